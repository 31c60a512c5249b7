"""The common form of all quantisation methods, and fields that several methods share."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models.hf import Fields

ModuleNames = Mapping[str, Sequence[str]]
"""Names of a layer's modules without the layer's prefix, by the role of their call."""

_EXPERT_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "moe", "mixer", "ffn")
_EXPERT_PARTS = ("", ".0.gate_proj", ".0.up_proj", ".0.down_proj", ".0.w1", ".0.w2", ".0.w3")
_SHARED_NAMES = ("shared_experts", "shared_expert")
_SHARED_BLOCKS = (
    *(f"{block}.{shared}" for block in _EXPERT_BLOCKS for shared in _SHARED_NAMES),
    "share_expert",
)
_ATTENTION_NAMES = ("self_attn", "attn", "attention", "mixer")
_LATENT_DOWN = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa")

MODULE_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "qkv": tuple(f"{a}.{p}" for a in _ATTENTION_NAMES for p in ("q_proj", "k_proj", "v_proj", "qkv_proj")),
    "q_down": tuple(f"{a}.{p}" for a in _ATTENTION_NAMES for p in _LATENT_DOWN),
    "q_up": tuple(f"{a}.{p}" for a in _ATTENTION_NAMES for p in ("q_b_proj", "q_proj")),
    "kv_up": tuple(f"{a}.kv_b_proj" for a in _ATTENTION_NAMES),
    "o": tuple(f"{a}.o_proj" for a in _ATTENTION_NAMES),
    "gate_up": tuple(
        f"{block}.{p}" for block in ("mlp", "feed_forward") for p in ("gate_proj", "up_proj", "gate_up_proj")
    ),
    "down": ("mlp.down_proj", "feed_forward.down_proj"),
    "experts": tuple(f"{block}.experts{part}" for block in _EXPERT_BLOCKS for part in _EXPERT_PARTS),
    "shared_gate_up": tuple(f"{block}.{p}" for block in _SHARED_BLOCKS for p in ("gate_proj", "up_proj")),
    "shared_down": tuple(f"{block}.down_proj" for block in _SHARED_BLOCKS),
}
"""Module names in the checkpoints of most families; other families provide their own."""

HEAD_NAMES: Final = ("lm_head", "language_model.lm_head", "head", "output")
"""Names of the LM head."""

_STACKS = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")
"""Prefixes of ``layers.0`` in a checkpoint, depending on how the model is wrapped."""
_LAYER = re.compile(r"^layers\.(\d+)\.")
_WITH_LAYER = re.compile(r"layers(\.|$)|\d+(\.|$)")
# a repeated group that contains a repetition can take exponential time over a name that does not match
_NESTED_REPETITION = re.compile(r"[+*}][^()]*\)[+*{]")
_MOST_REPETITIONS: Final = 5
"""Maximum per expression: the time over a name grows with its length to that power."""


def layer_module_names(layer: int, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a layer's modules from the layer stack on: ``layers.3.self_attn.q_proj``."""
    return tuple(f"layers.{layer}.{name}" for name in names)


class ModulePatterns:
    """Modules listed in a checkpoint's configuration."""

    def __init__(self, patterns: Sequence[str], where: str) -> None:
        self.patterns = tuple(patterns)
        self._literal: set[str] = set()
        # entries without a layer name apply to all layers
        self._named_modules: dict[str, bool] = {}
        self._globs: list[re.Pattern[str]] = []
        self._globs_of_layer: dict[int, list[re.Pattern[str]]] = {}
        self._expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self._expressions.append(_expression(pattern[3:], where))
                continue
            stack = max((one for one in _STACKS if pattern.startswith(one)), key=len)
            name = pattern[len(stack) :]
            if "*" not in name:
                self._literal.add(name)
                continue
            glob = re.compile(rf"(?:.*\.)?{fnmatch.translate(name)[:-2]}(?:\..*)?\Z")
            layer = _LAYER.match(name)
            of_layer = self._globs if layer is None else self._globs_of_layer.setdefault(int(layer[1]), [])
            of_layer.append(glob)
        self._with_layer = {name for name in self._literal if _WITH_LAYER.match(name)}

    @property
    def differs_by_layer(self) -> bool:
        """Return whether the list may treat the same module differently in two layers."""
        return bool(self._with_layer or self._globs or self._globs_of_layer or self._expressions)

    def name_any(self, names: Sequence[str]) -> bool:
        """Return whether the list includes any of a module's names, each from the layer stack on."""
        return any(self._names(name) for name in names)

    def _names(self, name: str) -> bool:
        layer = _LAYER.match(name)
        module = name if layer is None else name[layer.end() :]
        if module not in self._named_modules:
            self._named_modules[module] = not self._literal.isdisjoint(_runs(module.split(".")))
        if self._named_modules[module] or (self._with_layer and self._names_layer(name)):
            return True
        globs = self._globs if layer is None else [*self._globs, *self._globs_of_layer.get(int(layer[1]), ())]
        return any(glob.match(name) for glob in globs) or any(
            expression.match(stack + name) for expression in self._expressions for stack in _STACKS
        )

    def _names_layer(self, name: str) -> bool:
        """Return whether the list includes a literal name from the layer on: ``layers.3``, ``3.mlp``."""
        parts = name.split(".")
        return not self._with_layer.isdisjoint(_runs(parts, 2))


def _runs(parts: Sequence[str], starts: int | None = None) -> list[str]:
    """Return every run of parts, or those that begin within the first ``starts`` parts."""
    count = len(parts)
    begins = range(count if starts is None else min(starts, count))
    return [".".join(parts[start:end]) for start in begins for end in range(start + 1, count + 1)]


def _expression(text: str, where: str) -> re.Pattern[str]:
    if _NESTED_REPETITION.search(text):
        raise ModelError(f"{where}: {text!r} repeats a repetition, which can take forever to match")
    if len(re.findall(r"(?<!\\)[*+{]", text)) > _MOST_REPETITIONS:
        raise ModelError(f"{where}: {text!r} has more than {_MOST_REPETITIONS} repetitions")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{where}: {text!r} is not a regular expression: {error}") from error


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
    """How a checkpoint is quantised: unless excluded, a module belongs to the first group that names it."""

    method: str
    groups: tuple[Group, ...]
    excluded: ModulePatterns
    kv_dtype: str | None = None


def unsupported(fields: Fields, what: str, advice: str = "") -> UnsupportedModelError:
    """Return an error about a quantisation without measured kernels."""
    advice = advice or "take the unquantised config.json and choose the precision with dtype="
    return UnsupportedModelError(f"{fields.where}: {what}; {advice}")


def excluded_modules(fields: Fields, *keys: str) -> ModulePatterns:
    """Return the modules that these fields exclude, which stay in bf16."""
    patterns = [pattern for key in keys for pattern in fields.texts(key) or ()]
    return ModulePatterns(patterns, f"{fields.where}: field {' or '.join(keys)}")


def block_scale_bytes(fields: Fields, key: str, block: Any) -> float:
    """Return the scale bytes per weight of blocks, which must have the measured size."""
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int for size in block):
        raise fields.error(f"field {key} must be two whole numbers, as [128, 128], got {block!r}")
    if block != [BLOCK, BLOCK]:
        raise unsupported(fields, f"{key} {block}: fp8_block is measured in blocks of {BLOCK} x {BLOCK}")
    return BLOCK_SCALE_BYTES / BLOCK**2


def int_weights(fields: Fields, bits: int, group_size: int | None, has_zeros: bool) -> tuple[str, float]:
    """Return the format of weight-only integers, and the bytes of scales and zero points per weight."""
    if bits not in (4, 8):
        raise unsupported(fields, f"weights in {bits} bits; valid are int4_wo and int8_wo")
    if group_size is None:
        return f"int{bits}_wo", 0.0
    return f"int{bits}_wo", (SCALE_BYTES + has_zeros * bits / 8) / group_size


def group_size_of(fields: Fields, key: str = "group_size") -> int | None:
    """Return the weights per scale of a row; None if a whole row shares one."""
    size = fields.config.get(key)
    if size is None or (type(size) is int and size == -1):
        return None
    if type(size) is not int or size not in _GROUP_SIZES:
        sizes = ", ".join(map(str, _GROUP_SIZES))
        raise fields.error(f"field {key} must be one of {sizes} or -1 for whole rows, got {size!r}")
    return size


def group_words(group_size: int | None) -> str:
    """Return a group size as text."""
    return "whole rows" if group_size is None else f"groups of {group_size}"
