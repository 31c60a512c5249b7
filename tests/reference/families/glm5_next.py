"""GLM-5.3 Flash: the small file has its layers of Kimi delta attention; sparse ones have known widths."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import DENSE, Case, H, Shapes, config, moe

# 2 heads of 16: queries, keys and values; steps; decays and gate by 16; three convolutions over 4 tokens;
# a scale per head and a bias per channel of decays; norm of a head; output; norm
DELTA: Shapes = [
    (3 * 32, H), (2, H), (16, H), (16, H), (32, 16), (32, 16), (3 * 32, 4), (2,), (32,), (16,), (H, 32), (H,),
]  # fmt: skip
# two mixings of two streams: projection to 2 x (2 + 2) weights, biases, scales
STREAMS: Shapes = 2 * [(8, 2 * H), (8,), (3,)]

CASES: dict[str, Case] = {
    "glm5_next": (
        config(
            "glm5_next_text",
            layer_types=["linear_attention"] * 4,
            linear_attn_config={"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4},
            mlp_layer_types=["dense", *["sparse"] * 3],
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            hc_mult=2,
            hc_sinkhorn_iters=3,
        ),
        [("dense linear", 1), ("moe linear", 3)],
        4 * (DELTA + STREAMS) + DENSE + 3 * (moe(4, 32, 32) + [(4,)]),
    ),
}
