"""The terms of Vidur's ExecutionTime, which both of its interfaces name alike."""

from __future__ import annotations

from typing import Final

from fastroof.operators.calls import Role

TERM_OF: Final[dict[Role, str]] = {
    "attention_norm": "attn_norm_time",
    "qkv_quantise": "attention_layer_pre_proj_execution_time",
    "qkv": "attention_layer_pre_proj_execution_time",
    "qk_norm": "attention_rope_execution_time",
    "rope": "attention_rope_execution_time",
    "kv_write": "attention_kv_cache_save_execution_time",
    "decode_attention": "attention_decode_execution_time",
    "prefill_attention": "attention_prefill_execution_time",
    "o_quantise": "attention_layer_post_proj_execution_time",
    "o": "attention_layer_post_proj_execution_time",
    "mlp_norm": "mlp_norm_time",
    "gate_up_quantise": "mlp_layer_up_proj_execution_time",
    "gate_up": "mlp_layer_up_proj_execution_time",
    "activation": "mlp_layer_act_execution_time",
    "down_quantise": "mlp_layer_down_proj_execution_time",
    "down": "mlp_layer_down_proj_execution_time",
    "attention_allreduce": "tensor_parallel_communication_time",
    "mlp_allreduce": "tensor_parallel_communication_time",
    # of a mixture of experts, which Vidur has no terms of its own for
    "router": "mlp_layer_up_proj_execution_time",
    "experts": "mlp_layer_up_proj_execution_time",
    "shared_gate_up_quantise": "mlp_layer_up_proj_execution_time",
    "shared_gate_up": "mlp_layer_up_proj_execution_time",
    "shared_gate": "mlp_layer_up_proj_execution_time",
    "shared_activation": "mlp_layer_act_execution_time",
    "shared_down_quantise": "mlp_layer_down_proj_execution_time",
    "shared_down": "mlp_layer_down_proj_execution_time",
    "experts_down_quantise": "mlp_layer_up_proj_execution_time",
    "experts_down": "mlp_layer_up_proj_execution_time",
    "experts_up_quantise": "mlp_layer_down_proj_execution_time",
    "experts_up": "mlp_layer_down_proj_execution_time",
    # of latent, sparse and linear attention
    "q_down_quantise": "attention_layer_pre_proj_execution_time",
    "q_down": "attention_layer_pre_proj_execution_time",
    "q_up_quantise": "attention_layer_pre_proj_execution_time",
    "q_up": "attention_layer_pre_proj_execution_time",
    "kv_up_quantise": "attention_layer_pre_proj_execution_time",
    "kv_up": "attention_layer_pre_proj_execution_time",
    "latent_products": "attention_layer_pre_proj_execution_time",
    "index": "attention_layer_pre_proj_execution_time",
    "state_in_quantise": "attention_layer_pre_proj_execution_time",
    "state_in": "attention_layer_pre_proj_execution_time",
    "state_conv": "attention_rope_execution_time",
    "state_gate": "attention_layer_post_proj_execution_time",
    "state_out_quantise": "attention_layer_post_proj_execution_time",
    "state_out": "attention_layer_post_proj_execution_time",
    "hyper_connection": "attn_norm_time",
    "attention_gate": "attention_layer_post_proj_execution_time",
    "qk_norm_allreduce": "tensor_parallel_communication_time",
    "attention_scatter": "tensor_parallel_communication_time",
    "experts_gather": "tensor_parallel_communication_time",
    "experts_dispatch": "tensor_parallel_communication_time",
    "experts_combine": "tensor_parallel_communication_time",
    "experts_scatter": "tensor_parallel_communication_time",
    "tokens_gather": "tensor_parallel_communication_time",
    "kv_gather": "tensor_parallel_communication_time",
}
"""Vidur's term of each call of a plan, by its role, that runs in every layer."""
