"""Attention over keys and values by head: prefills and decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from fastroof.operators.attention_work import attention_bytes
from fastroof.units import DTYPE_BYTES
from kernels_bench.operators.operator import STREAMING, Limits, MeasuredOperator, ModelShapes, Values

DECODE_BANDWIDTH_SHARE: Final = 0.8 * STREAMING


def _seen_tokens(values: Values) -> int:
    """Tokens of a sequence that some query of it attends to."""
    kv_len, window = int(values["kv_len"]), int(values.get("window", 0))
    return min(kv_len, window + int(values.get("q_len", 1)) - 1) if window else kv_len


def kv_tokens(values: Values) -> float:
    """Tokens that the sequences of a point attend to together."""
    return float(values["batch_size"] * _seen_tokens(values))


def _kv_bytes(values: Values) -> float:
    heads = values["num_q_heads"], values["num_kv_heads"], values["head_dim"]
    kv_bytes = DTYPE_BYTES[values["kv_dtype"]]
    return float(attention_bytes(*heads, 0, _seen_tokens(values), values["batch_size"], kv_bytes))


class AttentionOperator(MeasuredOperator):
    """What all attention by head has in common."""

    flops_share = 0.505  # of 989.5 TFLOP/s: 500
    launch_us = 8.0
    shape_columns = ("num_q_heads", "num_kv_heads", "head_dim")
    model_shapes: ClassVar[ModelShapes] = {"heads": lambda model, tp: [model.heads(tp)]}
    limits: ClassVar[Limits] = {"max_kv_bytes": _kv_bytes, "max_kv_tokens": kv_tokens}
    defaults: ClassVar[Mapping[str, int | str]] = {"window": 0}
    divisors: ClassVar[Mapping[str, str]] = {"num_q_heads": "num_kv_heads"}

    def reference_work(self, values: Values) -> float:
        """Of every query with every token, keys and values."""
        pairs = super().reference_work(values)
        return pairs * float(values["num_q_heads"]) * 2.0 * float(values["head_dim"])


class PrefillAttentionOperator(AttentionOperator):
    """Causal attention of several new tokens a sequence, after a prefix or none."""

    name = "attention_prefill"
    limits: ClassVar[Limits] = {
        **AttentionOperator.limits,
        "max_new_tokens": lambda values: float(values["batch_size"] * values["q_len"]),
    }

    def given_columns(self) -> tuple[str, ...]:
        """``prefix`` instead of ``kv_len``."""
        return tuple("prefix" if name == "kv_len" else name for name in self.columns)

    def completed(self, given: Values) -> Values:
        """``kv_len``: the prefix and the new tokens."""
        return {**given, "kv_len": given["prefix"] + given["q_len"]}


class DecodeAttentionOperator(AttentionOperator):
    """One query a sequence, all sequences of one length."""

    name = "attention_decode"
    bandwidth_share = DECODE_BANDWIDTH_SHARE


OPERATORS: Final = (PrefillAttentionOperator(), DecodeAttentionOperator())
ATTENTION: Final = tuple(operator.name for operator in OPERATORS)
"""Operators of providers of attention by head."""
