"""Bamba: 8 heads of 16 and 32 states in one group."""

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, CARD, DENSE, Case, H, Published, Shapes, config, kv

# z, x, B, C and time steps; convolution; A, D and the bias of time steps; gated norm; projection; norm
MAMBA: Shapes = [(2 * 128 + 2 * 32 + 8, H), (192, 4), (192,), (8,), (8,), (8,), (128,), (H, 128), (H,)]

CASES: dict[str, Case] = {
    "bamba": (
        config(
            "bamba",
            attn_layer_indices=[2],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=32,
            mamba_n_groups=1,
        ),
        [("mamba", 3), ("attention", 1)],
        3 * MAMBA + ATTENTION + 4 * DENSE,
    ),
}

PUBLISHED = {"bamba-9b": Published("9.78", None, kv((3, 8, 256)), CARD)}
