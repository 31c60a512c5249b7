"""OLMo 2 and 3, EXAONE 4: a norm after attention and after the MLP instead of before them; K-EXAONE.

Adding the residual and the norm stream the same bytes in either order, so layers are timed like others.
K-EXAONE has EXAONE 4's attention, norms before, and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.deepseek import first_dense
from fastroof.models.families.family import (
    FULL,
    WINDOWED,
    Family,
    head_sizes,
    layer_kinds,
    layer_windows,
    windows_by_turns,
)
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp, Mlp

_EVERY: Final = 4
_WINDOW: Final = 4096
_LOCAL, _GLOBAL = "L", "G"


def _layers(
    fields: Fields,
    windows: list[int | None],
    *,
    qk_norm_spans_heads: bool,
    full_has_rope: bool,
    mlps: Sequence[Mlp] | None = None,
) -> list[LayerKind]:
    heads = head_sizes(fields, missing_means_all=True)
    bias = fields.flag("attention_bias", default=False)
    mlps = mlps or [GatedMlp(fields.size("intermediate_size"))] * len(windows)
    attention = {
        window: GroupedQueryAttention(
            *heads, bias, bias, True, window,
            qk_norm_spans_heads=qk_norm_spans_heads, rope=full_has_rope or window is not None,
        )
        for window in dict.fromkeys(windows)
    }  # fmt: skip
    return layer_kinds((attention[window], mlp) for window, mlp in zip(windows, mlps, strict=True))


def _olmo2(fields: Fields) -> list[LayerKind]:
    windows: list[int | None] = [None] * fields.num_layers
    return _layers(fields, windows, qk_norm_spans_heads=True, full_has_rope=True)


def _olmo3(fields: Fields) -> list[LayerKind]:
    windows = windows_by_turns(fields, fields.size_or("sliding_window", _WINDOW), _EVERY)
    return _layers(fields, windows, qk_norm_spans_heads=True, full_has_rope=True)


def _exaone4(fields: Fields, mlps: Sequence[Mlp] | None = None) -> list[LayerKind]:
    num_layers, window = fields.num_layers, fields.optional_size("sliding_window")
    if window is None:
        every: list[int | None] = [None] * num_layers
        return _layers(fields, every, qk_norm_spans_heads=False, full_has_rope=True, mlps=mlps)
    kinds = {"layer_types": _by_pattern(fields, num_layers)}
    windows = layer_windows(fields.with_defaults(kinds), window)
    return _layers(fields, windows, qk_norm_spans_heads=False, full_has_rope=False, mlps=mlps)


def _exaone_moe(fields: Fields) -> list[LayerKind]:
    width = fields.size("moe_intermediate_size")
    experts = RoutedExperts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        width,
        fields.count("num_shared_experts", 1) * width,
        router_bias=True,
    )
    # published files list the layers too, by is_moe_layer or mlp_layer_types
    return _exaone4(fields, first_dense(fields.with_defaults({"first_k_dense_replace": 1}), experts))


def _by_pattern(fields: Fields, num_layers: int) -> list[str]:
    """Return the kinds of layers: a repeated pattern (``LLLG``), or each n-th and the last one full."""
    pattern = fields.config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {_LOCAL, _GLOBAL}:
        full = [pattern[layer % len(pattern)] == _GLOBAL for layer in range(num_layers)]
    elif isinstance(pattern, str):
        raise fields.error(f"field sliding_window_pattern must be of {_LOCAL} and {_GLOBAL}, got {pattern!r}")
    else:
        every = fields.size_or("sliding_window_pattern", _EVERY)
        full = [(layer + 1) % every == 0 for layer in range(num_layers)]
    full[-1] = True
    return [FULL if is_full else WINDOWED for is_full in full]


FAMILIES: Final = (
    Family("olmo2", {"olmo2": ("Olmo2ForCausalLM",)}, _olmo2),
    Family("olmo3", {"olmo3": ("Olmo3ForCausalLM",)}, _olmo3),
    Family("exaone4", {"exaone4": ("Exaone4ForCausalLM",)}, _exaone4),
    Family(
        "exaone-moe",
        {"exaone_moe": ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")},
        _exaone_moe,
        reads=("num_experts",),
    ),
)
