"""LFM2: convolutions over 3 tokens, and attention."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import (
    ATTENTION,
    CARD,
    DENSE,
    QK_NORMS,
    Case,
    H,
    Published,
    Shapes,
    config,
    kv,
    moe,
)

CONVOLUTION: Shapes = [(3 * H, H), (H, 3), (H, H), (H,)]

CASES: dict[str, Case] = {
    "lfm2": (
        # a width of 96 is two thirds of 150, rounded up to a multiple
        config(
            "lfm2",
            full_attn_idxs=[1],
            intermediate_size=...,
            block_ff_dim=143,
            block_multiple_of=32,
            conv_bias=True,
        ),
        [("dense convolution", 3), ("dense attention", 1)],
        3 * (CONVOLUTION + [(3 * H,), (H,), (H,)]) + ATTENTION + QK_NORMS + 4 * DENSE,
    ),
    "lfm2_moe": (
        config(
            "lfm2_moe",
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        [("dense convolution", 1), ("moe attention", 2), ("moe convolution", 1)],
        2 * (CONVOLUTION + ATTENTION + QK_NORMS) + DENSE + 3 * (moe(4, 32) + [(4,)]),
    ),
}

PUBLISHED = {"lfm2-8b-a1b": Published("8.3", "1.5", kv((6, 8, 128)), CARD)}
