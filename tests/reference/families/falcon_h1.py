"""Falcon-H1: attention next to Mamba-2 of 8 heads of 16 and 32 states in two groups, without a gated norm."""

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, DENSE, INDEX, Case, H, Published, Shapes, config, kv

# z, x, B, C and time steps; convolution; A, D and the bias of time steps; projection
MAMBA: Shapes = [(2 * 128 + 2 * 2 * 32 + 8, H), (256, 4), (256,), (8,), (8,), (8,), (H, 128)]

CASES: dict[str, Case] = {
    "falcon_h1": (
        config(
            "falcon_h1",
            mamba_d_ssm=128,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=32,
            mamba_n_groups=2,
        ),
        [("attention and mamba", 4)],
        4 * (ATTENTION + MAMBA + DENSE),
    ),
    "falcon_h1 with norms": (
        config("falcon_h1", mamba_d_ssm=128, mamba_n_heads=8, mamba_d_state=32, mamba_n_groups=2,
               mamba_rms_norm=True),
        [("attention and mamba", 4)],
        4 * (ATTENTION + MAMBA + [(128,)] + DENSE),
    ),
}  # fmt: skip

PUBLISHED = {
    "falcon-h1-34b": Published("33.6", None, kv((72, 4, 256)), INDEX),
    "falcon-h1-7b": Published("7.59", None, kv((44, 2, 256)), INDEX),
}
