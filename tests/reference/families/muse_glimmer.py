"""Muse Glimmer: a gate as wide as the queries, four norms per layer and none with weights for heads."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, DENSE, Case, H, Published, Q, config, kv

CASES: dict[str, Case] = {
    "muse_glimmer": (
        {
            "model_type": "muse_glimmer",
            "text_config": config(
                "muse_glimmer_text",
                sliding_window=512,
                layer_types=[*["sliding_attention"] * 3, "full_attention"],
            ),
        },
        [("dense windowed", 3), ("dense full", 1)],
        4 * (ATTENTION + [(Q, H), (H,)] + DENSE + [(H,)]),
    ),
}

# the name has 30 B with the encoder: 50 layers of 1536, 1.85 B
PUBLISHED = {"muse-glimmer-30b": Published("30", None, kv((52, 2, 256)), "the model's name", extra=1.85)}
