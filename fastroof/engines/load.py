"""Loading engine profiles: packaged ones by name or by engine and version, and user files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from fastroof.checks import one_of, shown, unknown_word
from fastroof.documents import Table, parse_table, read_table
from fastroof.engines.costs import CostForm, CostRule, LayerCost, NotFitted, StepCosts
from fastroof.engines.data_parallel import DataParallel, GraphTokens
from fastroof.engines.front_end import FrontEnd
from fastroof.engines.kernel_choices import (
    ExpertRows,
    FusedNorms,
    KernelChoices,
    MixedAttention,
    OperatorKernel,
    SinkAttention,
)
from fastroof.engines.layout_rules import LayoutRules
from fastroof.engines.lora import LoraRules
from fastroof.engines.memory import KvMemory
from fastroof.engines.prefill_graphs import PrefillGraphs
from fastroof.engines.profile import EngineProfile
from fastroof.engines.scheduling import PromptPause, Scheduling
from fastroof.engines.values import ServingErrors, holds_for, is_version
from fastroof.errors import PlanError

_PARTS: Final[dict[str, type]] = {
    "costs": StepCosts,
    "scheduling": Scheduling,
    "memory": KvMemory,
    "kernels": KernelChoices,
    "layout": LayoutRules,
    "data_parallel": DataParallel,
    "front_end": FrontEnd,
    "lora": LoraRules,
    "errors": ServingErrors,
    "fit": CostForm,
}


@cache
def engine_names() -> tuple[str, ...]:
    """Return the names of the packaged profiles, sorted; ``kernels`` is the plain sum of kernels."""
    folder = resources.files("fastroof.engines") / "profiles"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


@cache
def _packaged(name: str) -> EngineProfile:
    text = (resources.files("fastroof.engines") / "profiles" / f"{name}.toml").read_text("utf-8")
    return _profile(parse_table(text, f"profile {name}", PlanError), name)


@lru_cache(256)
def _narrowed(name: str, version: str) -> EngineProfile:
    return _packaged(name).at(version)


def serving_engines() -> tuple[str, ...]:
    """Return the serving engines that have packaged profiles, sorted.

    Examples
    --------
    >>> serving_engines()
    ('sglang', 'trtllm', 'vllm')
    """
    return tuple(sorted({_packaged(name).engine for name in engine_names()} - {""}))


def engine_of_version(engine: str, version: str = "") -> EngineProfile:
    """Return the packaged profile of an engine's version.

    Parameters
    ----------
    engine : str
        One of :func:`serving_engines`.
    version : str
        Its version; empty for the newest.

    Returns
    -------
    EngineProfile
        The profile whose range includes the version, with that version's kernels; the oldest for a version
        before all ranges; if no range includes it, or it is not a version, that of the newest.

    Raises
    ------
    PlanError
        If the engine is unknown.
    """
    one_of("engine", engine, serving_engines(), PlanError)
    if not is_version(version):
        return _narrowed(_of_version(engine, "").name, version)
    try:
        return _of_version(engine, version)
    except PlanError:
        return _narrowed(_before_all(engine, version) or _of_version(engine, "").name, version)


def _before_all(engine: str, version: str) -> str:
    """Return the name of an engine's oldest profile if a version precedes its range; else an empty string."""
    for name in engine_names():
        profile = _packaged(name)
        ends = [bound for bound in profile.versions.split(",") if bound.strip().startswith("<")]
        if profile.engine == engine and ends and holds_for(",".join(ends), version):
            return name
    return ""


def _of_version(engine: str, version: str) -> EngineProfile:
    """Return the profile whose range includes a version, or the open-ended one if no version is given."""
    profiles = [profile for profile in map(_packaged, engine_names()) if profile.engine == engine]
    for profile in profiles:
        is_open = "<" not in profile.versions and "==" not in profile.versions
        if holds_for(profile.versions, version) if version else is_open:
            return _narrowed(profile.name, version)
    ranges = ", ".join(f"{profile.name} ({profile.versions})" for profile in profiles)
    raise PlanError(f"no profile for {engine} {version}; valid: {ranges}")


def load_engine(given: EngineProfile | str | Path | Mapping[str, Any]) -> EngineProfile:
    """Load an engine's profile.

    Parameters
    ----------
    given : EngineProfile, str, Path or mapping
        A profile, the name of a packaged one, an engine (its newest version), an engine and its version as in
        ``vllm-0.12``, the path of a TOML file, or its contents.

    Returns
    -------
    EngineProfile
        The validated profile.

    Raises
    ------
    PlanError
        If the profile does not exist, or has unknown keys.

    Examples
    --------
    >>> load_engine("kernels").costs.step_us
    0.0
    >>> load_engine("vllm-0.12.0").name, load_engine("vllm").versions
    ('vllm-0.12', '>=0.14')
    """
    if isinstance(given, EngineProfile):
        return given
    if isinstance(given, Mapping):
        return _profile(Table(given, "the profile given", PlanError))
    names = engine_names()
    if isinstance(given, str) and given in serving_engines():
        return engine_of_version(given)
    if isinstance(given, str) and given in names:
        return _packaged(given)
    path = Path(given) if isinstance(given, str | Path) else None
    if path is None or path.suffix != ".toml":
        engine, _, version = given.partition("-") if isinstance(given, str) else ("", "", "")
        if version and engine in serving_engines():
            return _of_version(engine, version)
        if not isinstance(given, str):
            raise PlanError(f"engine must be one of {', '.join(names)} or a .toml file, got {shown(given)}")
        words = unknown_word("engine", given, {*names, *serving_engines()}, "fastroof engines")
        raise PlanError(f"{words}, or give a .toml file")
    return _profile(read_table(path, PlanError, f"the engine profile {path}"), path.stem)


def version_named(given: object) -> str:
    """Return the version in the name of an engine (``vllm-0.12.0``); a packaged profile's name has none."""
    engine, _, version = given.partition("-") if isinstance(given, str) else ("", "", "")
    return version if engine in serving_engines() and given not in engine_names() else ""


def _profile(top: Table, name: str | None = None) -> EngineProfile:
    top.data = {key: value for key, value in top.data.items() if value is not None}
    changes: dict[str, Any] = {} if name is None or "name" in top.data else {"name": name}
    parts = {key.name: part for part, made in _PARTS.items() for key in fields(made)}
    own = {key.name for key in fields(EngineProfile)}
    for key in top.data:
        if key in parts and key not in own:
            raise top.problem(f"belongs in [{parts[key]}], not at the top level", key)
    for part, made in _PARTS.items():
        if part in top.data and not isinstance(top.data[part], made):
            table = top.table(part)
            rows = {
                key: [one.build(row) for one in table.tables(key)]
                for key, row in _ROWS.get(made, {}).items()
                if not _are_made(table.data.get(key, ()), row)
            }
            changes[part] = table.build(made, **rows)
    return top.build(EngineProfile, **changes)


def _are_made(given: Any, row: type) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(one, row) for one in given)


_ROWS: Final[dict[type, dict[str, type]]] = {
    StepCosts: {"layers": LayerCost, "rules": CostRule},
    Scheduling: {"pauses": PromptPause},
    KernelChoices: {
        "operators": OperatorKernel,
        "mixed_attention": MixedAttention,
        "prefill_graphs": PrefillGraphs,
        "expert_rows": ExpertRows,
        "fused_norms": FusedNorms,
        "sink_attention": SinkAttention,
    },
    DataParallel: {"graphs": GraphTokens},
    CostForm: {"left_out": NotFitted},
}
"""The lists of tables of each part, by key."""
