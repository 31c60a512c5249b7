"""Writing engine profiles as TOML files, as a calibration yields them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import check_file_place, write_output
from fastroof.engines import (
    CostForm,
    EngineProfile,
    ExpertRows,
    KvMemory,
    OperatorKernel,
    PrefillGraphs,
    Scheduling,
)
from fastroof.engines.data_parallel import ONE_SUM
from fastroof.engines.front_end import NO_FRONT_END
from fastroof.engines.layout_rules import ANY_LAYOUT
from fastroof.engines.scheduling import PAUSES
from fastroof.errors import TableError
from fastroof.load.write import toml_text

_DEFAULTS: Final = {
    name: {field.name: field.default for field in fields(made)}
    for name, made in (
        ("prefill_graphs", PrefillGraphs), ("expert_rows", ExpertRows), ("operators", OperatorKernel),
    )
}  # fmt: skip
"""Defaults of the rows of kernels, which are not written; other rows leave out what is empty."""

_NAMED: Final = ("layout", "gathered_bytes")
"""Pairs that are written as a table."""

_ROWS: Final = ("layers", "rules", "left_out", "graphs", "pauses")
"""Lists of tables, which are written without what is empty."""


def profile_text(profile: EngineProfile) -> str:
    """Return a profile as the TOML that :func:`fastroof.engines.load_engine` reads."""
    content = {key: value for key, value in asdict(profile).items() if value not in ("", None, {})}
    if profile.cost_share == 1.0:
        del content["cost_share"]
    kernels, memory = content["kernels"], content["memory"]
    for name in ("engines", "cold_decode", "one_attention_call"):
        if not kernels[name]:
            del kernels[name]
    memory["by_version"] = [{"versions": versions, **dict(rest)} for versions, rest in memory["by_version"]]
    content["memory"] = _written(memory, asdict(KvMemory()) | {"by_version": []}, "kv_reservation")
    for name in (*_DEFAULTS, "mixed_attention", "fused_norms", "sink_attention"):
        if rows := kernels.pop(name):
            kernels[name] = [_written(one, _DEFAULTS.get(name)) for one in rows]
    for part in ("costs", "errors"):
        content[part] = _written(content[part])
    if "fit" in content:
        content["fit"] = _written(content["fit"], asdict(CostForm(())), "costs")
    for part, plain in (("front_end", NO_FRONT_END), ("layout", ANY_LAYOUT), ("data_parallel", ONE_SUM)):
        content[part] = _written(content[part], asdict(plain))
    usual = asdict(Scheduling())
    rare = {key: usual[key] for key in ("by_card", "pauses", "states_overlap_with", *PAUSES)}
    content["scheduling"] = _written(content["scheduling"], rare)
    optional = ("front_end", "errors", "layout", "data_parallel")
    content = {name: part for name, part in content.items() if part or name not in optional}
    order = [field.name for field in fields(profile)]
    return toml_text(dict(sorted(content.items(), key=lambda part: order.index(part[0]))))


def _written(
    part: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *always: str
) -> dict[str, Any]:
    """Return what differs from the defaults, or what is not empty."""
    return {
        key: _toml(key, value)
        for key, value in part.items()
        if key in always or (value if defaults is None else key not in defaults or value != defaults[key])
    }


def _toml(key: str, value: Any) -> Any:
    """Return a value without the parts that are None, which TOML does not have."""
    if key in _NAMED:
        return dict(value)
    if isinstance(value, dict):
        return {name: _toml(name, one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_written(one) if key in _ROWS and isinstance(one, dict) else _toml("", one) for one in value]
    return value


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
