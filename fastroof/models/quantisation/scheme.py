"""What every way of quantising a checkpoint is read into, and fields that several of them have."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from fastroof.errors import UnsupportedModelError
from fastroof.models.hf import Fields
from fastroof.models.quantisation.names import ModulePatterns

__all__ = [
    "BLOCK",
    "BLOCK_SCALE_BYTES",
    "MXFP4_GROUP",
    "NVFP4_GROUP",
    "SCALE_BYTES",
    "Group",
    "Quantisation",
    "block_scale_bytes",
    "excluded_modules",
    "group_size_of",
    "int_weights",
    "said_groups",
    "unsupported",
]

BLOCK: Final = 128
"""Rows and columns of the weights that share a scale in every measured fp8_block kernel."""
SCALE_BYTES: Final = 2
BLOCK_SCALE_BYTES: Final = 4
NVFP4_GROUP, MXFP4_GROUP = 16, 32
_GROUP_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024)


class Group(NamedTuple):
    """Modules in one format."""

    dtype: str
    targets: ModulePatterns | None = None
    scale_bytes: float = 0.0
    roles: tuple[str, ...] = ()
    static_scales: bool = False


class Quantisation(NamedTuple):
    """How a checkpoint is quantised: the first group that names a module has it, unless it is excluded."""

    method: str
    groups: tuple[Group, ...]
    excluded: ModulePatterns
    kv_dtype: str | None = None


def unsupported(fields: Fields, what: str, advice: str = "") -> UnsupportedModelError:
    """Error about what no kernel was measured for."""
    advice = advice or "take the unquantised config.json and choose the precision with dtype="
    return UnsupportedModelError(f"{fields.where}: {what}; {advice}")


def excluded_modules(fields: Fields, *keys: str) -> ModulePatterns:
    """Modules in bf16, as these fields list them."""
    patterns = [pattern for key in keys for pattern in fields.texts(key) or ()]
    return ModulePatterns(patterns, f"{fields.where}: field {' or '.join(keys)}")


def block_scale_bytes(fields: Fields, key: str, block: Any) -> float:
    """Bytes of scales a weight, of blocks of the one size that kernels were measured with."""
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int for size in block):
        raise fields.error(f"field {key} must be two whole numbers, as [128, 128], got {block!r}")
    if block != [BLOCK, BLOCK]:
        raise unsupported(fields, f"{key} {block}: fp8_block is measured in blocks of {BLOCK} x {BLOCK}")
    return BLOCK_SCALE_BYTES / BLOCK**2


def int_weights(fields: Fields, bits: int, group_size: int | None, has_zeros: bool) -> tuple[str, float]:
    """Format of integer weights alone, and bytes of scales and zero points a weight."""
    if bits not in (4, 8):
        raise unsupported(fields, f"weights in {bits} bits; int4_wo and int8_wo are what plans know")
    if group_size is None:
        return f"int{bits}_wo", 0.0
    return f"int{bits}_wo", (SCALE_BYTES + has_zeros * bits / 8) / group_size


def group_size_of(fields: Fields, key: str = "group_size") -> int | None:
    """Weights of a row that share a scale; None where -1 or nothing says that all do."""
    size = fields.config.get(key)
    if size is None or (type(size) is int and size == -1):
        return None
    if type(size) is not int or size not in _GROUP_SIZES:
        sizes = ", ".join(map(str, _GROUP_SIZES))
        raise fields.error(f"field {key} must be one of {sizes} or -1 for whole rows, got {size!r}")
    return size


def said_groups(group_size: int | None) -> str:
    """How a person says a group size."""
    return "whole rows" if group_size is None else f"groups of {group_size}"
