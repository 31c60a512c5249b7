"""ERNIE 4.5: dense, and with 4 experts and two shared ones in some layers."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, CARD, DENSE, INDEX, Case, Published, config, kv, moe

CASES: dict[str, Case] = {
    "ernie4_5": (config("ernie4_5"), [("dense", 4)], 4 * (ATTENTION + DENSE)),
    "ernie4_5_moe": (
        config(
            "ernie4_5_moe",
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_intermediate_size=32,
            moe_layer_start_index=1,
            moe_layer_end_index=2,
        ),
        [("dense", 2), ("moe", 2)],
        4 * ATTENTION + 2 * DENSE + 2 * (moe(4, 32, 64) + [(4,)]),
    ),
}

PUBLISHED = {
    "ernie-4.5-21b-a3b": Published("21.8", "3", kv((28, 4, 256)), f"{INDEX}; active: {CARD}"),
    "ernie-4.5-300b-a47b": Published("300", "47", kv((54, 8, 256)), CARD),
}
