"""What each way of quantising a checkpoint says: its fields -> formats, and the modules they are of.

Fields are those that transformers' quantisation configs, compressed-tensors and ModelOpt write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fastroof.models.hf import Fields
from fastroof.models.quantisation.compressed_tensors import compressed_tensors, kv_dtype_of
from fastroof.models.quantisation.modelopt import modelopt, quantized_layers
from fastroof.models.quantisation.names import ModulePatterns
from fastroof.models.quantisation.scheme import (
    BLOCK,
    Group,
    Quantisation,
    block_scale_bytes,
    excluded_modules,
    group_size_of,
    int_weights,
    said_groups,
    unsupported,
)

__all__ = ["read_quantisation"]


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
    raise fields.error(f"field quant_method is missing; it may be {', '.join(sorted(_METHODS))}")


def _advice(method: str) -> str:
    if method.casefold() in ("bitsandbytes", "hqq", "quanto", "eetq", "gguf", "aqlm", "exl2"):
        return (
            "its kernels were not measured; take the unquantised config.json and say how it is to be timed, "
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
        rest = Group("fp8", static_scales=scheme == "static")
        return Quantisation(f"fp8, a scale a tensor, {scheme}", (*groups, rest), excluded, kv_dtype)
    if scheme != "dynamic":
        raise fields.error(f"field activation_scheme must be dynamic with weight_block_size, got {scheme!r}")
    rest = Group("fp8_block", scale_bytes=block_scale_bytes(fields, "weight_block_size", block))
    method = f"fp8, blocks of {BLOCK} x {BLOCK}, dynamic"
    if groups:
        where = "listed modules" if listed else "experts"
        method += f"; {' and '.join(sorted({group.dtype for group in groups}))} in {where}"
    return Quantisation(method, (*groups, rest), excluded, kv_dtype)


def _expert_dtype(fields: Fields) -> tuple[Group, ...]:
    """Experts in a format of their own, as DeepSeek-V4 has them."""
    dtype = fields.text("expert_dtype")
    if dtype in (None, "fp8"):
        return ()
    if dtype != "fp4":
        raise unsupported(fields, f"expert_dtype {dtype!r}: fp4 and fp8 are what plans know")
    return (Group("mxfp4", roles=("experts",)),)


def _fbgemm_fp8(fields: Fields) -> Quantisation:
    excluded = excluded_modules(fields, "modules_to_not_convert", "ignored_layers")
    return Quantisation("fp8, a scale a row, dynamic (fbgemm_fp8)", (Group("fp8"),), excluded)


def _awq(fields: Fields) -> Quantisation:
    bits = fields.size("bits") if "bits" in fields.config else fields.size("w_bit")
    group_size = group_size_of(fields, "group_size" if "group_size" in fields.config else "q_group_size")
    dtype, scale_bytes = int_weights(fields, bits, group_size, fields.flag("zero_point", default=True))
    excluded = excluded_modules(fields, "modules_to_not_convert")
    method = f"int{bits} weights, {said_groups(group_size)} (awq)"
    return Quantisation(method, (Group(dtype, scale_bytes=scale_bytes),), excluded)


def _gptq(fields: Fields) -> Quantisation:
    bits, group_size = fields.size("bits"), group_size_of(fields)
    # GPTQ files hold zero points of symmetric weights too
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
        made = int_weights(other, other.size("bits"), group_size_of(other), has_zeros=True)
        groups.append(Group(made[0], ModulePatterns([expression], where), made[1]))
    if fields.flag("lm_head", default=False):
        groups.append(Group(dtype, ModulePatterns(["lm_head"], fields.where), scale_bytes))
    groups.append(Group(dtype, scale_bytes=scale_bytes))
    method = f"int{bits} weights, {said_groups(group_size)} (gptq)"
    excluded = ModulePatterns(unquantised, f"{fields.where}: field dynamic or modules_to_not_convert")
    return Quantisation(method, tuple(groups), excluded)


def _mxfp4(fields: Fields) -> Quantisation:
    # only experts have it, whatever the list of other modules says
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
