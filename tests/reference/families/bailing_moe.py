"""Ling and Ring: a dense layer, then 4 experts and two shared ones; norms of heads and a bias of queries."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

from tests.reference.checkpoints import ATTENTION, DENSE, KV, QK_NORMS, Case, Q, config, moe

CASES: dict[str, Case] = {
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
