"""Command R, R7B and A: one norm per layer."""

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, CARD, DENSE, INDEX, Case, Published, Shapes, config, kv

# the last tensor of DENSE is a norm
MLP: Shapes = DENSE[:-1]

CASES: dict[str, Case] = {
    "cohere": (config("cohere"), [("dense", 4)], 4 * (ATTENTION + MLP)),
    "cohere2": (
        config("cohere2", sliding_window=512, sliding_window_pattern=2),
        [("dense windowed", 2), ("dense full", 2)],
        4 * (ATTENTION + MLP),
    ),
}

PUBLISHED = {
    "command-a": Published("111", None, kv((64, 8, 256)), CARD),
    "command-r7b": Published("8.03", None, kv((32, 8, 256)), INDEX),
}
