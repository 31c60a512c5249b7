"""compressed-tensors: groups of modules, each with how its weights and inputs are quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastroof.models.hf import Fields
from fastroof.models.quantisation.names import ModulePatterns
from fastroof.models.quantisation.scheme import (
    BLOCK,
    MXFP4_GROUP,
    NVFP4_GROUP,
    SCALE_BYTES,
    Group,
    Quantisation,
    block_scale_bytes,
    excluded_modules,
    group_size_of,
    int_weights,
    said_groups,
    unsupported,
)

__all__ = ["compressed_tensors", "config_groups", "kv_dtype_of"]


def compressed_tensors(fields: Fields) -> Quantisation:
    """Read a compressed-tensors configuration: groups of modules, those it ignores, its cache."""
    sparsity = fields.config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise unsupported(fields, f"sparsity_config {sparsity.get('format')!r}: no sparse kernel is measured")
    groups, names = config_groups(fields)
    excluded = excluded_modules(fields, "ignore")
    method = f"{' and '.join(dict.fromkeys(names))} (compressed-tensors)"
    return Quantisation(method, groups, excluded, kv_dtype_of(fields))


def config_groups(fields: Fields) -> tuple[tuple[Group, ...], list[str]]:
    """Groups of modules, those with a list of them first, and how a person says each."""
    given = fields.config.get("config_groups")
    if not given and fields.config.get("kv_cache_scheme") is not None:
        return (), ["its KV cache alone"]
    if not isinstance(given, Mapping) or not given:
        raise fields.error(f"field config_groups must hold groups of modules, got {given!r}")
    groups, names = [], []
    for name, group in given.items():
        if not isinstance(group, Mapping):
            raise fields.error(f"field config_groups.{name} must be an object, got {group!r}")
        within = Fields(group, f"{fields.where}: field config_groups.{name}")
        weights, inputs = _scheme(within, "weights"), _scheme(within, "input_activations")
        if weights is None:
            raise within.error("field weights is missing")
        dtype, scale_bytes, text = _scheme_format(within, weights, inputs)
        is_static = dtype == "fp8" and inputs is not None and inputs.is_static
        groups.append(Group(dtype, _targets(within), scale_bytes, static_scales=is_static))
        names.append(text)
    # a group for a list of modules comes before one for all of them
    return tuple(sorted(groups, key=lambda group: group.targets is None)), names


def _targets(fields: Fields) -> ModulePatterns | None:
    targets = fields.texts("targets")
    if targets is None:
        return None
    if any(re.fullmatch(r"\w*(Linear|MoE|Experts)", target) for target in targets):
        return None
    return ModulePatterns(targets, f"{fields.where}: field targets")


class _Scheme(NamedTuple):
    """How weights or inputs are quantised."""

    kind: str
    bits: int
    strategy: str | None
    group_size: int | None
    is_symmetric: bool
    block: Any
    is_static: bool


def _scheme(fields: Fields, key: str) -> _Scheme | None:
    given = fields.config.get(key)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise fields.error(f"field {key} must be an object, got {given!r}")
    within = Fields(given, f"{fields.where}.{key}")
    kind = within.text("type") or "int"
    if kind not in ("int", "float"):
        raise within.error(f"field type must be int or float, got {kind!r}")
    return _Scheme(
        kind,
        within.size("num_bits"),
        within.text("strategy"),
        group_size_of(within),
        within.flag("symmetric", default=True),
        given.get("block_structure"),
        not given.get("dynamic"),
    )


def _scheme_format(fields: Fields, weights: _Scheme, inputs: _Scheme | None) -> tuple[str, float, str]:
    """Format, bytes of scales a weight, and how a person says it."""
    on_inputs = None if inputs is None else (inputs.kind, inputs.bits)
    kind = (weights.kind, weights.bits, on_inputs)
    if kind == ("float", 8, ("float", 8)):
        if weights.strategy == "block":
            block = block_scale_bytes(fields, "weights.block_structure", weights.block or [BLOCK, BLOCK])
            return "fp8_block", block, f"fp8, blocks of {BLOCK} x {BLOCK}"
        if weights.strategy not in (None, "tensor", "channel"):
            raise unsupported(fields, f"fp8 weights with scales by {weights.strategy}")
        return "fp8", 0.0, f"fp8, a scale a {'row' if weights.strategy == 'channel' else 'tensor'}"
    if kind == ("int", 8, ("int", 8)):
        return "int8", 0.0, "int8 weights and inputs"
    if weights.kind == "int" and inputs is None:
        dtype, scales = int_weights(fields, weights.bits, weights.group_size, not weights.is_symmetric)
        return dtype, scales, f"int{weights.bits} weights, {said_groups(weights.group_size)}"
    if kind == ("int", 4, ("float", 8)):
        scales = 0.0 if weights.group_size is None else SCALE_BYTES / weights.group_size
        return "w4afp8", scales, f"int4 weights, {said_groups(weights.group_size)}, fp8 inputs"
    if kind[:2] == ("float", 4) and weights.group_size in (None, NVFP4_GROUP):
        if on_inputs == ("float", 4):
            return "nvfp4", 0.0, "nvfp4"
        if inputs is None:
            return "nvfp4_wo", 0.0, "nvfp4 weights alone"
    if kind == ("float", 4, None) and weights.group_size == MXFP4_GROUP:
        return "mxfp4", 0.0, "mxfp4 weights"
    text = "16 bits" if inputs is None else f"{inputs.kind}{inputs.bits}"
    raise unsupported(
        fields, f"weights in {weights.kind}{weights.bits} with inputs in {text} have no measured kernels"
    )


def kv_dtype_of(fields: Fields) -> str | None:
    """Format of the cache, where something is said of it."""
    scheme = fields.config.get("kv_cache_scheme")
    algorithm = fields.text("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        within = _scheme(fields, "kv_cache_scheme")
        algorithm = None if within is None else f"{'FP' if within.kind == 'float' else 'INT'}{within.bits}"
    elif isinstance(scheme, str):
        algorithm = scheme
    elif scheme is not None:
        raise fields.error(f"field kv_cache_scheme must be an object or FP8, got {scheme!r}")
    if algorithm is None or algorithm.upper() == "NONE":
        return None
    if algorithm.upper() != "FP8":
        raise unsupported(
            fields, f"its KV cache is in {algorithm}; bf16 and fp8 are measured", "choose one with kv_dtype="
        )
    return "fp8"
