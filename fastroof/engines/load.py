"""Loading engine profiles: packaged ones by name or by engine and version, and user files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from fastroof.checks import one_of, shown, unknown_word
from fastroof.documents import parse_toml, read_toml
from fastroof.engines.data_parallel import DataParallel
from fastroof.engines.kernel_choices import KernelChoices, MixedAttention, OperatorKernel
from fastroof.engines.layout_rules import LayoutRules
from fastroof.engines.memory import KvMemory
from fastroof.engines.prefill_graphs import PrefillGraphs
from fastroof.engines.profile import CostForm, EngineProfile, LayerCost, NotFitted, Scheduling, StepCosts
from fastroof.engines.values import ServingErrors, holds_for, is_version
from fastroof.errors import PlanError

_PARTS: Final[dict[str, type]] = {
    "costs": StepCosts,
    "scheduling": Scheduling,
    "memory": KvMemory,
    "kernels": KernelChoices,
    "layout": LayoutRules,
    "data_parallel": DataParallel,
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
    return _profile({"name": name, **parse_toml(text, f"profile {name}", PlanError)}, f"profile {name}")


@cache
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
        return _profile(dict(given), "the profile given")
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
    content = read_toml(path, PlanError, f"the engine profile {path}")
    return _profile({"name": path.stem, **content}, str(path))


def version_named(given: object) -> str:
    """Return the version in the name of an engine (``vllm-0.12.0``); a packaged profile's name has none."""
    engine, _, version = given.partition("-") if isinstance(given, str) else ("", "", "")
    return version if engine in serving_engines() and given not in engine_names() else ""


def _profile(content: dict[str, Any], where: str) -> EngineProfile:
    parts = {key.name: part for part, made in _PARTS.items() for key in fields(made)}
    misplaced = [key for key in content if key in parts and key not in _PARTS]
    if misplaced:
        key = misplaced[0]
        raise PlanError(f"{where}: {key} belongs in [{parts[key]}], not at the top level")
    _check_keys(content, [key.name for key in fields(EngineProfile)], where, "an engine profile")
    if not isinstance(content.get("name"), str):
        raise PlanError(f"{where} needs a name")
    try:
        for name, made in _PARTS.items():
            if content.get(name) is None:
                content.pop(name, None)
            elif not isinstance(content[name], made):
                content[name] = _part(name, made, content[name], where)
        return EngineProfile(**content)
    except PlanError as error:
        raise PlanError(f"{where}: {error}" if where not in str(error) else str(error)) from None


def _part(name: str, made: type, keys: Any, where: str) -> Any:
    """Build one part of a profile from its table."""
    if not isinstance(keys, Mapping):
        raise PlanError(f"{name} must be a table of {', '.join(key.name for key in fields(made))}")
    _check_keys(keys, [key.name for key in fields(made)], where, f"[{name}]")
    values = dict(keys)
    if made is KernelChoices and "operators" in values:
        if not isinstance(values["operators"], list | tuple):
            raise PlanError("operators must be a list of tables, one per operator")
        values["operators"] = [_kernel(one, where) for one in values["operators"]]
    if made is StepCosts and "layers" in values:
        if not isinstance(values["layers"], list | tuple):
            raise PlanError("layers must be a list of tables, one per architecture")
        values["layers"] = [_layer_cost(one, where) for one in values["layers"]]
    if made is KernelChoices and "mixed_attention" in values:
        if not isinstance(values["mixed_attention"], list | tuple):
            raise PlanError("mixed_attention must be a list of tables, one per GPU")
        values["mixed_attention"] = [_mixed_attention(one, where) for one in values["mixed_attention"]]
    if made is KernelChoices and "prefill_graphs" in values:
        if not isinstance(values["prefill_graphs"], list | tuple):
            raise PlanError("prefill_graphs must be a list of tables, one per range of versions")
        values["prefill_graphs"] = [_prefill_graphs(one, where) for one in values["prefill_graphs"]]
    if made is CostForm and not isinstance(values.get("costs"), list | tuple):
        raise PlanError("[fit] needs costs, a list of names")
    if made is CostForm and "left_out" in values:
        if not isinstance(values["left_out"], list | tuple):
            raise PlanError("left_out must be a list of tables, one per group of runs")
        values["left_out"] = [_not_fitted(one, where) for one in values["left_out"]]
    return made(**values)


def _kernel(keys: Any, where: str) -> OperatorKernel:
    if not isinstance(keys, Mapping) or "operator" not in keys:
        raise PlanError("each of [[kernels.operators]] needs an operator")
    _check_keys(keys, [key.name for key in fields(OperatorKernel)], where, "[[kernels.operators]]")
    return OperatorKernel(**keys)


def _not_fitted(keys: Any, where: str) -> NotFitted:
    if not isinstance(keys, Mapping) or "reason" not in keys:
        raise PlanError("each of [[fit.left_out]] needs a reason")
    _check_keys(keys, [key.name for key in fields(NotFitted)], where, "[[fit.left_out]]")
    return NotFitted(**keys)


def _layer_cost(keys: Any, where: str) -> LayerCost:
    if not isinstance(keys, Mapping) or not {"architecture", "layer_us"} <= set(keys):
        raise PlanError("each of [[costs.layers]] needs an architecture and its layer_us")
    _check_keys(keys, [key.name for key in fields(LayerCost)], where, "[[costs.layers]]")
    return LayerCost(**keys)


def _mixed_attention(keys: Any, where: str) -> MixedAttention:
    if not isinstance(keys, Mapping) or "ns" not in keys:
        raise PlanError("each of [[kernels.mixed_attention]] needs ns")
    _check_keys(keys, [key.name for key in fields(MixedAttention)], where, "[[kernels.mixed_attention]]")
    return MixedAttention(**keys)


def _prefill_graphs(keys: Any, where: str) -> PrefillGraphs:
    if not isinstance(keys, Mapping) or "multiples" not in keys:
        raise PlanError("each of [[kernels.prefill_graphs]] needs multiples")
    _check_keys(keys, [key.name for key in fields(PrefillGraphs)], where, "[[kernels.prefill_graphs]]")
    return PrefillGraphs(**keys)


def _check_keys(keys: Mapping[str, Any], known: list[str], where: str, what: str) -> None:
    unknown = sorted(map(str, set(keys) - set(known)))
    if unknown:
        raise PlanError(f"{where}: unknown {', '.join(unknown)}; {what} has {', '.join(known)}")
