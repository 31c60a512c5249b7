"""The terms of Vidur's ExecutionTime, which both of its interfaces name alike."""

from __future__ import annotations

from typing import Final

__all__ = ["TERM_OF"]

TERM_OF: Final = {
    "attention rmsnorm": "attn_norm_time",
    "qkv quantise": "attention_layer_pre_proj_execution_time",
    "qkv": "attention_layer_pre_proj_execution_time",
    "qk rmsnorm": "attention_rope_execution_time",
    "rope": "attention_rope_execution_time",
    "kv write": "attention_kv_cache_save_execution_time",
    "decode attention": "attention_decode_execution_time",
    "prefill attention": "attention_prefill_execution_time",
    "o quantise": "attention_layer_post_proj_execution_time",
    "o": "attention_layer_post_proj_execution_time",
    "mlp rmsnorm": "mlp_norm_time",
    "gate_up quantise": "mlp_layer_up_proj_execution_time",
    "gate_up": "mlp_layer_up_proj_execution_time",
    "silu_and_mul": "mlp_layer_act_execution_time",
    "down quantise": "mlp_layer_down_proj_execution_time",
    "down": "mlp_layer_down_proj_execution_time",
    "attention all-reduce": "tensor_parallel_communication_time",
    "mlp all-reduce": "tensor_parallel_communication_time",
}
"""Vidur's term of each operator of a plan that runs in every layer."""
