"""Multi-head latent attention: prefills over full heads, decodes over the compressed cache."""

from __future__ import annotations

from typing import ClassVar, Final

from fastroof.units import DTYPE_BYTES
from kernels_bench.operators.attention import DECODE_BANDWIDTH_SHARE, kv_tokens
from kernels_bench.operators.operator import Limits, MeasuredOperator, Values


def _latent_bytes(values: Values) -> float:
    width = values["kv_lora_rank"] + values["rope_dim"]
    return kv_tokens(values) * float(width * DTYPE_BYTES[values["kv_dtype"]])


class MlaPrefillOperator(MeasuredOperator):
    """Causal attention of prompts, before absorption."""

    name = "mla_prefill"
    flops_share = 0.455  # of 989.5 TFLOP/s: 450
    launch_us = 10.0
    computes_in_dtype = True

    def reference_work(self, values: Values) -> float:
        """Of every query with every token, keys and values."""
        pairs = float(values["batch_size"]) * float(values["q_len"]) * float(values["kv_len"])
        return pairs * float(values["num_q_heads"]) * 2.0 * float(values["nope_dim"])


class MlaDecodeOperator(MeasuredOperator):
    """Absorbed queries over the latent cache."""

    name = "mla_decode"
    flops_share = 0.455
    bandwidth_share = DECODE_BANDWIDTH_SHARE
    launch_us = 10.0
    limits: ClassVar[Limits] = {"max_kv_bytes": _latent_bytes, "max_kv_tokens": kv_tokens}

    def reference_work(self, values: Values) -> float:
        """Of every query with every token, keys and values."""
        pairs = super().reference_work(values)
        return pairs * float(values["num_q_heads"]) * 2.0 * float(values["kv_lora_rank"])


OPERATORS: Final = (MlaPrefillOperator(), MlaDecodeOperator())
