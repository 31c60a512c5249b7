"""Granite 3 and 4: dense, with experts, and with Mamba-2 of 8 heads of 16 and 32 states in one group."""

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, CARD, DENSE, INDEX, Case, H, Published, config, kv, moe
from tests.reference.families.bamba import MAMBA

SIZES = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 32, "mamba_expand": 2}
LAYERS = ["mamba", "mamba", "attention", "mamba"]
SHARED = [(48, H), (48, H), (H, 48), (H,)]

CASES: dict[str, Case] = {
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
    "granite-4.0-h-small": Published("32.2", "9", kv((4, 8, 256)), f"{INDEX}; active: {CARD}"),
    "granite-4.0-h-tiny": Published("6.94", "1", kv((4, 4, 256)), f"{INDEX}; active: {CARD}"),
}
