"""Attention and a gated MLP in every layer; Command R has one norm a layer, Muse Glimmer four."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import (
    ATTENTION,
    CARD,
    DENSE,
    INDEX,
    KV,
    Case,
    H,
    Published,
    Q,
    Shapes,
    config,
    kv,
    moe,
)

BIASES = [(Q,), (KV,), (KV,)]
# the last tensor of DENSE is a norm
MLP_WITHOUT_NORM: Shapes = DENSE[:-1]

CASES: dict[str, Case] = {
    "ministral3": (
        {"model_type": "mistral3", "text_config": config("ministral3", sliding_window=None)},
        [("dense", 4)],
        4 * (ATTENTION + DENSE),
    ),
    "seed_oss": (config("seed_oss"), [("dense", 4)], 4 * (ATTENTION + BIASES + DENSE)),
    "seed_oss with a bias after attention": (
        config("seed_oss", attention_out_bias=True, mlp_bias=True),
        [("dense", 4)],
        4 * (ATTENTION + BIASES + [(H,)] + DENSE + [(96,), (96,), (H,)]),
    ),
    "smollm3": (
        config("smollm3", no_rope_layers=[1, 1, 0, 1]),
        [("dense", 3), ("dense unrotated", 1)],
        4 * (ATTENTION + DENSE),
    ),
    "internlm3 with a bias of queries": (
        config("internlm3", bias=False, qkv_bias=True),
        [("dense", 4)],
        4 * (ATTENTION + BIASES + DENSE),
    ),
    "internlm2 with biases": (
        config("internlm2", bias=True),
        [("dense", 4)],
        4 * (ATTENTION + BIASES + [(H,)] + DENSE),
    ),
    "olmoe": (
        config("olmoe", num_experts=4, num_experts_per_tok=2),
        [("moe", 4)],
        4 * (ATTENTION + [(Q,), (KV,)] + moe(4, 96)),
    ),
    "glm4": (
        config("glm4", attention_bias=True),
        [("dense", 4)],
        4 * (ATTENTION + BIASES + DENSE + [(H,), (H,)]),
    ),
    "qwen2_5_vl": (
        config("qwen2_5_vl", vision_config={"depth": 2, "hidden_size": 32}),
        [("dense", 4)],
        4 * (ATTENTION + BIASES + DENSE),
    ),
    "cohere": (config("cohere"), [("dense", 4)], 4 * (ATTENTION + MLP_WITHOUT_NORM)),
    "cohere2": (
        config("cohere2", sliding_window=512, sliding_window_pattern=2),
        [("dense windowed", 2), ("dense full", 2)],
        4 * (ATTENTION + MLP_WITHOUT_NORM),
    ),
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

PUBLISHED = {
    "devstral-2-123b": Published("125", None, kv((88, 8, 256)), INDEX),
    "ministral-3-14b": Published("13.5", None, kv((40, 8, 256)), f"{CARD}, of the language model"),
    "ministral-3-3b": Published("3.4", None, kv((26, 8, 256)), f"{CARD}, of the language model"),
    # 8.49 cut to one decimal
    "ministral-3-8b": Published("8.4", None, kv((34, 8, 256)), f"{CARD}, of the language model", rounded=0.1),
    "olmoe-1b-7b": Published("6.92", "1.3", kv((16, 16, 256)), f"{INDEX}; active: {CARD}"),
    "qwen2.5-vl-32b": Published("33.5", None, kv((64, 8, 256)), INDEX, extra=0.69),
    "qwen2.5-vl-72b": Published("73.4", None, kv((80, 8, 256)), INDEX, extra=0.70),
    "qwen2.5-vl-7b": Published("8.29", None, kv((28, 4, 256)), INDEX, extra=0.68),
    "seed-oss-36b": Published("36.2", None, kv((64, 8, 256)), INDEX),
    "command-a": Published("111", None, kv((64, 8, 256)), CARD),
    "command-r7b": Published("8.03", None, kv((32, 8, 256)), INDEX),
    # the name has 30 B with the encoder: 50 layers of 1536, 1.85 B
    "muse-glimmer-30b": Published("30", None, kv((52, 2, 256)), "the model's name", extra=1.85),
}
