"""ModelOpt: one algorithm for a model, or one for each of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastroof.models.hf import Fields
from fastroof.models.quantisation.compressed_tensors import config_groups, kv_dtype_of
from fastroof.models.quantisation.names import ModulePatterns
from fastroof.models.quantisation.scheme import (
    BLOCK,
    BLOCK_SCALE_BYTES,
    NVFP4_GROUP,
    SCALE_BYTES,
    Group,
    Quantisation,
    excluded_modules,
    group_size_of,
    said_groups,
    unsupported,
)

__all__ = ["modelopt", "quantized_layers"]

_ALGORITHMS: Final[dict[str, tuple[str, str]]] = {
    "FP8": ("fp8", "fp8, a scale a tensor, static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "fp8, a scale a row, dynamic"),
    "FP8_BLOCK_SCALES": ("fp8_block", f"fp8, blocks of {BLOCK} x {BLOCK}"),
    "FP8_PB_WO": ("fp8_block", f"fp8, blocks of {BLOCK} x {BLOCK}"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4_wo", "nvfp4 weights alone"),
    "W4A16": ("int4_wo", "int4 weights"),
    "W4A16_AWQ": ("int4_wo", "int4 weights"),
    "W4A8_AWQ": ("w4afp8", "int4 weights, fp8 inputs"),
    "W8A16": ("int8_wo", "int8 weights"),
    "W8A16_AWQ": ("int8_wo", "int8 weights"),
    "W8A8_SQ_PER_CHANNEL": ("int8", "int8 weights and inputs"),
    "W4A16_MXFP4": ("mxfp4", "mxfp4 weights"),
    "W4A8_MXFP4_MXFP8": ("mxfp4", "mxfp4 weights"),
    "W4A8_MXFP4_FP8": ("mxfp4", "mxfp4 weights"),
}
"""ModelOpt's and TensorRT-LLM's names."""
_MIXED = "MIXED_PRECISION"


def modelopt(fields: Fields) -> Quantisation:
    """Read what ModelOpt writes, into a config.json or a hf_quant_config.json."""
    excluded = excluded_modules(fields, "exclude_modules", "ignore")
    algorithm = fields.text("quant_algo")
    groups: tuple[Group, ...]
    has_groups = fields.config.get("config_groups") is not None
    if algorithm is None and not has_groups:
        if fields.text("kv_cache_quant_algo") is not None:
            return Quantisation("its KV cache alone (modelopt)", (), excluded, kv_dtype_of(fields))
        raise fields.error(f"field quant_algo is missing; it may be {', '.join(_ALGORITHMS)} or {_MIXED}")
    if algorithm is None or (algorithm == _MIXED and fields.config.get("quantized_layers") is None):
        groups, names = config_groups(fields)
    elif algorithm == _MIXED:
        groups = quantized_layers(fields)
        names = [group.dtype for group in groups]
    else:
        group, name = _algorithm(fields)
        groups, names = (group,), [name]
    method = f"{' and '.join(dict.fromkeys(names))} (modelopt)"
    return Quantisation(method, groups, excluded, kv_dtype_of(fields))


def _algorithm(fields: Fields, targets: ModulePatterns | None = None) -> tuple[Group, str]:
    algorithm = fields.text("quant_algo")
    if algorithm is None:
        raise fields.error("field quant_algo is missing")
    if algorithm not in _ALGORITHMS:
        known = ", ".join((*_ALGORITHMS, _MIXED))
        raise unsupported(fields, f"quant_algo {algorithm!r} has no measured kernels; known are {known}")
    dtype, text = _ALGORITHMS[algorithm]
    group_size = group_size_of(fields)
    scale_bytes = 0.0
    if dtype in ("int4_wo", "int8_wo", "w4afp8") and group_size is not None:
        scale_bytes = SCALE_BYTES / group_size
        text += f", {said_groups(group_size)}"
    elif dtype == "fp8_block":
        scale_bytes = BLOCK_SCALE_BYTES / BLOCK**2
    elif dtype in ("nvfp4", "nvfp4_wo") and group_size not in (None, NVFP4_GROUP):
        raise fields.error(f"field group_size of {algorithm} must be {NVFP4_GROUP}, got {group_size}")
    return Group(dtype, targets, scale_bytes, static_scales=algorithm == "FP8"), text


def quantized_layers(fields: Fields) -> tuple[Group, ...]:
    """Modules that each have an algorithm of their own, by format."""
    layers = fields.config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise fields.error(f"field quantized_layers must hold an algorithm for each module, got {layers!r}")
    modules: dict[Group, list[str]] = {}
    for module, algorithm in layers.items():
        where = f"{fields.where}: field quantized_layers.{module}"
        if not isinstance(module, str) or not isinstance(algorithm, Mapping):
            raise fields.error(
                f"field quantized_layers must hold an object for {module!r}, got {algorithm!r}"
            )
        group, _ = _algorithm(Fields(algorithm, where))
        modules.setdefault(group, []).append(module)
    where = f"{fields.where}: field quantized_layers"
    return tuple(group._replace(targets=ModulePatterns(names, where)) for group, names in modules.items())
