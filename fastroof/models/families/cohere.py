"""Command R, R7B and A: attention and MLP read one norm, and one sum over GPUs serves both."""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_sizes, layer_kinds, windows_by_turns
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp

_EVERY: Final = 4
_WINDOW: Final = 4096


def _layers(fields: Fields, windows: list[int | None], *, full_has_rope: bool) -> list[LayerKind]:
    if fields.flag("use_qk_norm", default=False):
        raise UnsupportedModelError(
            f"{fields.where}: use_qk_norm true has a norm with weights of each head, which no plan has yet"
        )
    heads = head_sizes(fields, missing_means_all=True)
    bias = fields.flag("attention_bias", default=False)
    mlp = GatedMlp(fields.size("intermediate_size"), parallel=True)
    return layer_kinds(
        (
            GroupedQueryAttention(
                *heads, bias, bias, window=window, sums_over_gpus=False,
                rope=full_has_rope or window is not None,
            ),
            mlp,
        )
        for window in windows
    )  # fmt: skip


def _cohere(fields: Fields) -> list[LayerKind]:
    return _layers(fields, [None] * fields.num_layers, full_has_rope=True)


def _cohere2(fields: Fields) -> list[LayerKind]:
    every = fields.size_or("sliding_window_pattern", _EVERY)
    windows = windows_by_turns(fields, fields.size_or("sliding_window", _WINDOW), every)
    return _layers(fields, windows, full_has_rope=False)


FAMILIES: Final = (
    Family("cohere", {"cohere": ("CohereForCausalLM",)}, _cohere, tie_embeddings=True),
    Family("cohere2", {"cohere2": ("Cohere2ForCausalLM",)}, _cohere2, tie_embeddings=True),
)
