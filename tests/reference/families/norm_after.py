"""OLMo 2 and 3: norms of all heads together; EXAONE 4: norms of each head."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import (
    ATTENTION,
    CARD,
    DENSE,
    INDEX,
    KV,
    QK_NORMS,
    Case,
    Published,
    Q,
    config,
    kv,
    moe,
)

CASES: dict[str, Case] = {
    "olmo2": (config("olmo2"), [("dense", 4)], 4 * (ATTENTION + [(Q,), (KV,)] + DENSE)),
    "olmo3": (
        config("olmo3", sliding_window=512),
        [("dense windowed", 3), ("dense full", 1)],
        4 * (ATTENTION + [(Q,), (KV,)] + DENSE),
    ),
    "exaone4": (
        config("exaone4", sliding_window=512, sliding_window_pattern="LG"),
        [("dense windowed", 2), ("dense full", 2)],
        4 * (ATTENTION + QK_NORMS + DENSE),
    ),
    "exaone4 without windows": (
        config("exaone4", sliding_window=None, sliding_window_pattern=None),
        [("dense", 4)],
        4 * (ATTENTION + QK_NORMS + DENSE),
    ),
}

CASES["exaone_moe"] = (
    config(
        "exaone_moe",
        sliding_window=512,
        sliding_window_pattern="LLG",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    # the last layer is full, whatever the pattern
    [("dense windowed", 1), ("moe windowed", 1), ("moe full", 2)],
    4 * (ATTENTION + QK_NORMS) + DENSE + 3 * (moe(4, 32, 32) + [(4,)]),
)

PUBLISHED = {
    "k-exaone-236b-a23b": Published("236", "23", kv((48, 8, 256)), CARD),
    "exaone-4.0-1.2b": Published("1.28", None, kv((30, 8, 128)), INDEX),
    "exaone-4.0-32b": Published("32.0", None, kv((64, 8, 256)), INDEX),
    "olmo-3-32b": Published("32.2", None, kv((64, 8, 256)), INDEX),
    "olmo-3-7b": Published("7.30", None, kv((32, 32, 256)), INDEX),
}
