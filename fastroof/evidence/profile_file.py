"""Writing engine profiles as TOML files, as a calibration yields them."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fastroof.atomic_files import check_file_place, write_output
from fastroof.engines import (
    EngineProfile,
    ExpertRows,
    KvMemory,
    OperatorKernel,
    PrefillGraphs,
    Scheduling,
)
from fastroof.engines.data_parallel import ONE_SUM
from fastroof.engines.layout_rules import ANY_LAYOUT
from fastroof.engines.scheduling import PAUSES
from fastroof.errors import TableError
from fastroof.load.write import toml_text


def profile_text(profile: EngineProfile) -> str:
    """Return a profile as the TOML that :func:`fastroof.engines.load_engine` reads."""
    content = {key: value for key, value in asdict(profile).items() if value not in ("", None, {})}
    for names in ("engines", "cold_decode", "one_attention_call"):
        if not content["kernels"][names]:
            del content["kernels"][names]
    default_memory = asdict(KvMemory())
    content["memory"]["by_version"] = [
        {"versions": versions, **dict(values)} for versions, values in content["memory"]["by_version"]
    ]
    content["memory"] = {
        key: _named(value)
        for key, value in content["memory"].items()
        if key == "kv_reservation" or value not in (default_memory[key], [])
    }
    for name, made in (("prefill_graphs", PrefillGraphs), ("expert_rows", ExpertRows)):
        plain = {key.name: key.default for key in fields(made)}
        if rows := content["kernels"].pop(name):
            content["kernels"][name] = [
                {key: _named(value) for key, value in one.items() if value != plain[key]} for one in rows
            ]
    figures = content["kernels"].pop("mixed_attention")
    if figures:
        content["kernels"]["mixed_attention"] = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in one.items() if value}
            for one in figures
        ]
    layers = content["costs"].pop("layers")
    content["costs"] = {cost: us for cost, us in content["costs"].items() if us}
    if layers:
        content["costs"]["layers"] = [{key: value for key, value in one.items() if value} for one in layers]
    for part in ("front_end", "errors"):
        content[part] = {name: value for name, value in content[part].items() if value}
        if not content[part]:
            del content[part]
    operators = content["kernels"].pop("operators")
    defaults = {"operator": "", **{key.name: key.default for key in fields(OperatorKernel)[1:]}}
    if operators:
        content["kernels"]["operators"] = [
            {
                key: dict(value) if key == "layout" else value
                for key, value in one.items()
                if value != defaults[key]
            }
            for one in operators
        ]
    plain = asdict(ANY_LAYOUT)
    fit = content.get("fit")
    if fit is not None:
        for key in ("layers", "chosen_on"):
            fit[key] = [list(row) for row in fit[key]]
        fit["left_out"] = [{key: value for key, value in one.items() if value} for one in fit["left_out"]]
        content["fit"] = {key: value for key, value in fit.items() if key == "costs" or value}
    layout = {key: value for key, value in content.pop("layout").items() if value != plain[key]}
    if "gathered_bytes" in layout:
        layout["gathered_bytes"] = dict(layout["gathered_bytes"])
    if layout:
        content["layout"] = layout
    ranks, default_ranks = content.pop("data_parallel"), asdict(ONE_SUM)
    if ranks != default_ranks:
        changed = {key: value for key, value in ranks.items() if value != default_ranks[key]}
        content["data_parallel"] = changed | _tables(changed, "graphs")
    default_schedule = asdict(Scheduling())
    schedule = {
        key: value
        for key, value in content["scheduling"].items()
        if key not in ("by_card", "pauses", *PAUSES) or value != default_schedule[key]
    }
    content["scheduling"] = schedule | _tables(schedule, "pauses")
    order = [field.name for field in fields(profile)]
    return toml_text(dict(sorted(content.items(), key=lambda part: order.index(part[0]))))


def _tables(part: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a part's list of tables, if it has one, without what is empty."""
    rows = part.get(key, ())
    tables = [{name: _named(value) for name, value in row.items() if value} for row in rows]
    return {key: tables} if tables else {}


def _named(value: Any) -> Any:
    """Return a value without the parts that are None, which TOML does not have."""
    if isinstance(value, dict):
        return {key: _named(one) for key, one in value.items() if one is not None}
    return [_named(one) for one in value] if isinstance(value, list | tuple) else value


def check_profile_path(path: str | Path) -> Path:
    """Return the path if a profile can be written there."""
    path = Path(path)
    if path.suffix != ".toml" or os.path.isdir(path):
        raise TableError(f"an engine profile must be a .toml file, got {path}")
    check_file_place(path, f"profile {path}", TableError)
    return path


def write_profile(profile: EngineProfile, path: str | Path) -> Path:
    """Write a profile as TOML, atomically."""
    return write_output(check_profile_path(path), profile_text(profile), "profile", TableError)
