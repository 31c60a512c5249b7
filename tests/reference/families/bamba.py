"""Mamba-2 in most layers (Bamba, Granite 4) or next to attention (Falcon-H1); Granite 3 without it."""

from __future__ import annotations

from tests.reference.checkpoints import (
    ATTENTION,
    CARD,
    DENSE,
    INDEX,
    Case,
    H,
    Published,
    Shapes,
    config,
    kv,
    moe,
)

# z, x, B, C and time steps; convolution; A, D and the bias of time steps; gated norm; projection; norm
MAMBA: Shapes = [(2 * 128 + 2 * 32 + 8, H), (192, 4), (192,), (8,), (8,), (8,), (128,), (H, 128), (H,)]
# z, x, B, C and time steps; convolution; A, D and the bias of time steps; projection
FALCON_MAMBA: Shapes = [(2 * 128 + 2 * 2 * 32 + 8, H), (256, 4), (256,), (8,), (8,), (8,), (H, 128)]
SIZES = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 32, "mamba_expand": 2}
FALCON = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_n_groups": 2}
LAYERS = ["mamba", "mamba", "attention", "mamba"]
SHARED = [(48, H), (48, H), (H, 48), (H,)]

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
    "falcon_h1": (
        config("falcon_h1", **FALCON, mamba_d_head=16),
        [("attention and mamba", 4)],
        4 * (ATTENTION + FALCON_MAMBA + DENSE),
    ),
    "falcon_h1 with norms": (
        config("falcon_h1", **FALCON, mamba_rms_norm=True),
        [("attention and mamba", 4)],
        4 * (ATTENTION + FALCON_MAMBA + [(128,)] + DENSE),
    ),
    "granite": (config("granite"), [("dense", 4)], 4 * (ATTENTION + DENSE)),
    "granitemoe": (
        config("granitemoe", num_local_experts=4, num_experts_per_tok=2),
        [("moe", 4)],
        4 * (ATTENTION + moe(4, 96)),
    ),
    "granitemoehybrid": (
        config(
            "granitemoehybrid",
            layer_types=LAYERS,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            **SIZES,
        ),
        [("mamba", 3), ("attention", 1)],
        3 * MAMBA + ATTENTION + 4 * moe(4, 96, 48),
    ),
    "granitemoehybrid without experts": (
        config(
            "granitemoehybrid", layer_types=LAYERS, num_local_experts=0, shared_intermediate_size=48, **SIZES
        ),
        [("mamba", 3), ("attention", 1)],
        3 * MAMBA + ATTENTION + 4 * SHARED,
    ),
}

PUBLISHED = {
    "bamba-9b": Published("9.78", None, kv((3, 8, 256)), CARD),
    "falcon-h1-34b": Published("33.6", None, kv((72, 4, 256)), INDEX),
    "falcon-h1-7b": Published("7.59", None, kv((44, 2, 256)), INDEX),
    "granite-4.0-h-small": Published("32.2", "9", kv((4, 8, 256)), f"{INDEX}; active: {CARD}"),
    "granite-4.0-h-tiny": Published("6.94", "1", kv((4, 4, 256)), f"{INDEX}; active: {CARD}"),
}
