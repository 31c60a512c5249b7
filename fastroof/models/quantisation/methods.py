"""Quantisation methods of checkpoints: their fields, the resulting formats and the modules.

The fields are those of transformers' quantisation configs, compressed-tensors and ModelOpt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from fastroof.models.hf import Fields
from fastroof.models.quantisation.scheme import (
    BLOCK,
    BLOCK_SCALE_BYTES,
    MXFP4_GROUP,
    NVFP4_GROUP,
    SCALE_BYTES,
    Group,
    ModulePatterns,
    Quantisation,
    block_scale_bytes,
    excluded_modules,
    group_size_of,
    group_words,
    int_weights,
    unsupported,
)


def compressed_tensors(fields: Fields) -> Quantisation:
    """Read a compressed-tensors configuration: module groups, ignored modules, KV cache."""
    sparsity = fields.config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise unsupported(fields, f"sparsity_config {sparsity.get('format')!r}: no sparse kernel is measured")
    groups, names = config_groups(fields)
    excluded = excluded_modules(fields, "ignore")
    method = f"{' and '.join(dict.fromkeys(names))} (compressed-tensors)"
    return Quantisation(method, groups, excluded, kv_dtype_of(fields))


def config_groups(fields: Fields) -> tuple[tuple[Group, ...], list[str]]:
    """Return the module groups, those with a module list first, and their descriptions."""
    config_groups = fields.config.get("config_groups")
    if not config_groups and fields.config.get("kv_cache_scheme") is not None:
        return (), ["its KV cache only"]
    if not isinstance(config_groups, Mapping) or not config_groups:
        raise fields.error(f"field config_groups must hold groups of modules, got {config_groups!r}")
    groups, names = [], []
    for name, group in config_groups.items():
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
    # groups with a list of modules take precedence over groups for all modules
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
    value = fields.config.get(key)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise fields.error(f"field {key} must be an object, got {value!r}")
    within = Fields(value, f"{fields.where}.{key}")
    kind = within.text("type") or "int"
    if kind not in ("int", "float"):
        raise within.error(f"field type must be int or float, got {kind!r}")
    return _Scheme(
        kind,
        within.size("num_bits"),
        within.text("strategy"),
        group_size_of(within),
        within.flag("symmetric", default=True),
        value.get("block_structure"),
        not value.get("dynamic"),
    )


def _scheme_format(fields: Fields, weights: _Scheme, inputs: _Scheme | None) -> tuple[str, float, str]:
    """Return the format, the scale bytes per weight, and a description."""
    on_inputs = None if inputs is None else (inputs.kind, inputs.bits)
    kind = (weights.kind, weights.bits, on_inputs)
    if kind == ("float", 8, ("float", 8)):
        if weights.strategy == "block":
            block = block_scale_bytes(fields, "weights.block_structure", weights.block or [BLOCK, BLOCK])
            return "fp8_block", block, f"fp8, blocks of {BLOCK} x {BLOCK}"
        if weights.strategy not in (None, "tensor", "channel"):
            raise unsupported(fields, f"fp8 weights with scales by {weights.strategy}")
        return "fp8", 0.0, f"fp8, one scale per {'row' if weights.strategy == 'channel' else 'tensor'}"
    if kind == ("int", 8, ("int", 8)):
        return "int8", 0.0, "int8 weights and inputs"
    if weights.kind == "int" and inputs is None:
        dtype, scales = int_weights(fields, weights.bits, weights.group_size, not weights.is_symmetric)
        return dtype, scales, f"int{weights.bits} weights, {group_words(weights.group_size)}"
    if kind == ("int", 4, ("float", 8)):
        scales = 0.0 if weights.group_size is None else SCALE_BYTES / weights.group_size
        return "w4afp8", scales, f"int4 weights, {group_words(weights.group_size)}, fp8 inputs"
    if kind[:2] == ("float", 4) and weights.group_size in (None, NVFP4_GROUP):
        if on_inputs == ("float", 4):
            return "nvfp4", 0.0, "nvfp4"
        if inputs is None:
            return "nvfp4_wo", 0.0, "nvfp4 weights only"
    if kind == ("float", 4, None) and weights.group_size == MXFP4_GROUP:
        return "mxfp4", 0.0, "mxfp4 weights"
    text = "16 bits" if inputs is None else f"{inputs.kind}{inputs.bits}"
    raise unsupported(
        fields, f"weights in {weights.kind}{weights.bits} with inputs in {text} have no measured kernels"
    )


def kv_dtype_of(fields: Fields) -> str | None:
    """Return the format of the KV cache, or None."""
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
    if algorithm.upper() not in ("FP8", "NVFP4"):
        raise unsupported(
            fields, f"its KV cache is in {algorithm}; bf16 and fp8 are measured", "choose one with kv_dtype="
        )
    return algorithm.lower()


_ALGORITHMS: Final[dict[str, tuple[str, str]]] = {
    "FP8": ("fp8", "fp8, one scale per tensor, static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "fp8, one scale per row, dynamic"),
    "FP8_BLOCK_SCALES": ("fp8_block", f"fp8, blocks of {BLOCK} x {BLOCK}"),
    "FP8_PB_WO": ("fp8_block", f"fp8, blocks of {BLOCK} x {BLOCK}"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4_wo", "nvfp4 weights only"),
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
"""Algorithm names of ModelOpt and TensorRT-LLM."""
_MIXED = "MIXED_PRECISION"


def modelopt(fields: Fields) -> Quantisation:
    """Read a ModelOpt configuration from a config.json or hf_quant_config.json."""
    excluded = excluded_modules(fields, "exclude_modules", "ignore")
    algorithm = fields.text("quant_algo")
    groups: tuple[Group, ...]
    has_groups = fields.config.get("config_groups") is not None
    if algorithm is None and not has_groups:
        if fields.text("kv_cache_quant_algo") is not None:
            return Quantisation("its KV cache only (modelopt)", (), excluded, kv_dtype_of(fields))
        raise fields.error(f"field quant_algo is missing; valid are {', '.join(_ALGORITHMS)} or {_MIXED}")
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
        text += f", {group_words(group_size)}"
    elif dtype == "fp8_block":
        scale_bytes = BLOCK_SCALE_BYTES / BLOCK**2
    elif dtype in ("nvfp4", "nvfp4_wo") and group_size not in (None, NVFP4_GROUP):
        raise fields.error(f"field group_size of {algorithm} must be {NVFP4_GROUP}, got {group_size}")
    return Group(dtype, targets, scale_bytes, static_scales=algorithm == "FP8"), text


def quantized_layers(fields: Fields) -> tuple[Group, ...]:
    """Return modules with separate algorithms, by format."""
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


def read_quantisation(fields: Fields) -> Quantisation:
    """Read a quantization_config, or the quantization of a hf_quant_config.json."""
    method = fields.text("quant_method")
    if method is None:
        method = _guessed_method(fields)
    read = _METHODS.get(method.casefold())
    if read is None:
        raise unsupported(
            fields, f"quant_method {method!r} is not one of {', '.join(sorted(_METHODS))}", _advice(method)
        )
    return read(fields)


def _guessed_method(fields: Fields) -> str:
    if "quant_algo" in fields.config:
        return "modelopt"
    if "config_groups" in fields.config:
        return "compressed-tensors"
    raise fields.error(f"field quant_method is missing; valid are {', '.join(sorted(_METHODS))}")


def _advice(method: str) -> str:
    if method.casefold() in ("bitsandbytes", "hqq", "quanto", "eetq", "gguf", "aqlm", "exl2"):
        return (
            "its kernels were not measured; use the unquantised config.json and choose the formats to time, "
            'as in dtype="int4_wo"'
        )
    return 'take the unquantised config.json and choose the precision with dtype=, as in dtype="fp8"'


def _fp8(fields: Fields) -> Quantisation:
    if fields.text("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise fields.error(f"field fmt must be e4m3 or float8_e4m3fn, got {fields.config['fmt']!r}")
    scheme = fields.text("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        raise fields.error(f"field activation_scheme must be dynamic or static, got {scheme!r}")
    block = fields.config.get("weight_block_size")
    excluded = excluded_modules(fields, "modules_to_not_convert", "ignored_layers")
    listed = fields.config.get("quantized_layers") is not None
    groups = quantized_layers(fields) if listed else _expert_dtype(fields)
    kv_dtype = kv_dtype_of(fields)
    if block is None:
        default = Group("fp8", static_scales=scheme == "static")
        return Quantisation(f"fp8, one scale per tensor, {scheme}", (*groups, default), excluded, kv_dtype)
    if scheme != "dynamic":
        raise fields.error(f"field activation_scheme must be dynamic with weight_block_size, got {scheme!r}")
    method = f"fp8, blocks of {BLOCK} x {BLOCK}, dynamic"
    if block == [MXFP4_GROUP, MXFP4_GROUP]:
        # engines run them with a scale per 32 weights of a row
        default, method = Group("mxfp8"), "fp8, blocks of 32 x 32, dynamic"
    else:
        default = Group("fp8_block", scale_bytes=block_scale_bytes(fields, "weight_block_size", block))
    if groups:
        where = "listed modules" if listed else "experts"
        method += f"; {' and '.join(sorted({group.dtype for group in groups}))} in {where}"
    return Quantisation(method, (*groups, default), excluded, kv_dtype)


def _expert_dtype(fields: Fields) -> tuple[Group, ...]:
    """Return the experts' group if they have a separate format, as in DeepSeek-V4."""
    dtype = fields.text("expert_dtype")
    if dtype in (None, "fp8"):
        return ()
    if dtype != "fp4":
        raise unsupported(fields, f"expert_dtype {dtype!r}: valid are fp4 and fp8")
    return (Group("mxfp4", roles=("experts",)),)


def _fbgemm_fp8(fields: Fields) -> Quantisation:
    excluded = excluded_modules(fields, "modules_to_not_convert", "ignored_layers")
    return Quantisation("fp8, one scale per row, dynamic (fbgemm_fp8)", (Group("fp8"),), excluded)


def _awq(fields: Fields) -> Quantisation:
    bits = fields.size("bits") if "bits" in fields.config else fields.size("w_bit")
    group_size = group_size_of(fields, "group_size" if "group_size" in fields.config else "q_group_size")
    dtype, scale_bytes = int_weights(fields, bits, group_size, fields.flag("zero_point", default=True))
    excluded = excluded_modules(fields, "modules_to_not_convert")
    method = f"int{bits} weights, {group_words(group_size)} (awq)"
    return Quantisation(method, (Group(dtype, scale_bytes=scale_bytes),), excluded)


def _gptq(fields: Fields) -> Quantisation:
    bits, group_size = fields.size("bits"), group_size_of(fields)
    # GPTQ files store zero points for symmetric weights too
    dtype, scale_bytes = int_weights(fields, bits, group_size, has_zeros=True)
    groups, unquantised = [], list(fields.texts("modules_to_not_convert") or ())
    rules = fields.config.get("dynamic")
    if rules is not None and not isinstance(rules, Mapping):
        raise fields.error(f"field dynamic must hold a rule for each pattern, got {rules!r}")
    for pattern, rule in (rules or {}).items():
        where = f"{fields.where}: field dynamic"
        if not isinstance(pattern, str) or not isinstance(rule, Mapping):
            raise fields.error(
                f"field dynamic must hold an object for each pattern, got {pattern!r}: {rule!r}"
            )
        expression = f"re:{pattern.removeprefix('-:').removeprefix('+:')}"
        if pattern.startswith("-:"):
            unquantised.append(expression)
            continue
        other = Fields({"bits": bits, "group_size": group_size, **rule}, where)
        group = int_weights(other, other.size("bits"), group_size_of(other), has_zeros=True)
        groups.append(Group(group[0], ModulePatterns([expression], where), group[1]))
    if fields.flag("lm_head", default=False):
        groups.append(Group(dtype, ModulePatterns(["lm_head"], fields.where), scale_bytes))
    groups.append(Group(dtype, scale_bytes=scale_bytes))
    method = f"int{bits} weights, {group_words(group_size)} (gptq)"
    excluded = ModulePatterns(unquantised, f"{fields.where}: field dynamic or modules_to_not_convert")
    return Quantisation(method, tuple(groups), excluded)


def _mxfp4(fields: Fields) -> Quantisation:
    # only experts are quantised, whatever other modules are listed
    excluded = excluded_modules(fields, "modules_to_not_convert")
    return Quantisation("mxfp4 experts", (Group("mxfp4", roles=("experts",)),), excluded)


_METHODS: Final[dict[str, Callable[[Fields], Quantisation]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "awq": _awq,
    "awq_marlin": _awq,
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "compressed-tensors": compressed_tensors,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_fp8": modelopt,
    "modelopt_mixed": modelopt,
}
