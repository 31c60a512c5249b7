"""Dense layers first, then experts: GLM-4.5 to 4.7, Ling and Ring; LongCat-Flash."""

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
    "glm4_moe": (
        config(
            "glm4_moe",
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=1,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        [("dense", 1), ("moe", 3)],
        4 * (ATTENTION + [(Q,), (KV,), (KV,)] + QK_NORMS) + DENSE + 3 * (moe(4, 32, 32) + [(4,)]),
    ),
    "bailing_moe_v2": (
        config(
            "bailing_moe_v2",
            first_k_dense_replace=1,
            use_qkv_bias=True,
            use_qk_norm=True,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=2,
            moe_intermediate_size=32,
            moe_router_enable_expert_bias=True,
        ),
        [("dense", 1), ("moe", 3)],
        4 * (ATTENTION + [(Q,), (KV,), (KV,)] + QK_NORMS) + DENSE + 3 * (moe(4, 32, 64) + [(4,)]),
    ),
    "bailing_moe": (
        config(
            "bailing_moe",
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
        ),
        [("moe", 4)],
        4 * (ATTENTION + moe(4, 32, 48)),
    ),
}

# besides the text model, checkpoints hold a layer that predicts a further token, some with an embedding and
# a head of its own
PUBLISHED = {
    "glm-4.5": Published("358", "32", kv((92, 8, 256)), f"{INDEX}; active: {CARD}", extra=5.54),
    "glm-4.5-air": Published("110", "12", kv((46, 8, 256)), f"{INDEX}; active: {CARD}", extra=3.62),
    "glm-4.6": Published("357", "32", kv((92, 8, 256)), f"{INDEX}; active: {CARD}", extra=3.98),
    "glm-4.7": Published("358", "32", kv((92, 8, 256)), f"{INDEX}; active: {CARD}", extra=5.54),
    "glm-4.7-flash": Published("31", "3", kv((47, 1, 576)), f"{INDEX}; active: {CARD}", extra=1.28),
    # of the experts that return their input, a third of 12 picks
    "longcat-flash": Published("560", "27", kv((56, 1, 576)), f"{CARD}; active: on average"),
}
