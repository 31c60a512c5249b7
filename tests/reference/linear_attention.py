"""Naive steps of models with delta rules on one GPU: lookups and streams, layer by layer of their files."""

from __future__ import annotations

from typing import Any

from tests.reference import steps

DELTA_PARTS = {
    ("gdn", "generation"): ("convolution", "recurrence"),
    ("gdn", "context"): ("convolution", "recurrence"),
    # vLLM decodes in one kernel
    ("kda", "generation"): ("fused",),
    ("kda", "context"): ("convolution", "recurrence"),
}


class Step:
    """Equal decodes (``new`` 1) after ``context`` tokens, or equal fresh prompts; formats bf16."""

    def __init__(self, tables: Any, batch: int, new: int, context: int) -> None:
        self.tables, self.batch, self.new, self.context = tables, batch, new, context
        self.tokens = batch * new
        self.phase = "generation" if new == 1 and context else "context"
        self.launch_us, self.bytes_per_us = steps.streaming(tables)

    def stream(self, elements: float) -> float:
        """A kernel that reads and writes so many bf16 elements a token."""
        return self.launch_us + self.tokens * 2 * elements / self.bytes_per_us

    def gemm(self, n: int, k: int, rows: int | None = None) -> float:
        m = self.tokens if rows is None else rows
        return float(self.tables.lookup("gemm", m=m, n=n, k=k, dtype="bf16").latency_us)

    def delta(self, operator: str, k_heads: int, k_dim: int, v_heads: int, v_dim: int) -> float:
        names = {"num_k_heads": k_heads, "head_k_dim": k_dim, "num_v_heads": v_heads, "head_v_dim": v_dim}
        sizes = {"phase": self.phase, "batch_size": self.batch, "q_len": self.new, **names}
        parts = DELTA_PARTS[operator, self.phase]
        return sum(float(self.tables.lookup(operator, part=part, **sizes).latency_us) for part in parts)

    def mlp(self, hidden: int, width: int) -> float:
        return self.gemm(2 * width, hidden) + self.stream(3 * width) + self.gemm(hidden, width)

    def around(self, hidden: int, vocab: int) -> float:
        head = self.gemm(-(-vocab // 64) * 64, hidden, rows=self.batch)
        return self.stream(2 * hidden) + self.stream(4 * hidden) + head


def qwen_us(tables: Any, text: dict[str, Any], batch: int, new: int, context: int) -> float:
    """Qwen3-Next or Qwen3.5, us."""
    step, hidden = Step(tables, batch, new, context), text["hidden_size"]
    k_heads, k_dim = text["linear_num_key_heads"], text["linear_key_head_dim"]
    v_heads, v_dim = text["linear_num_value_heads"], text["linear_value_head_dim"]
    values = v_heads * v_dim

    def linear() -> float:
        projections = step.gemm(2 * k_heads * k_dim + 2 * values, hidden) + step.gemm(2 * v_heads, hidden)
        mixed = step.delta("gdn", k_heads, k_dim, v_heads, v_dim) + step.stream(3 * values)
        return step.stream(4 * hidden) + projections + mixed + step.gemm(hidden, values)

    def full() -> float:
        q_heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        width, out = text["head_dim"], text["num_attention_heads"] * text["head_dim"]
        heads = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": width, "kv_dtype": "bf16"}
        if step.phase == "generation":
            found = tables.lookup("attention_decode", batch_size=batch, kv_len=context + 1, **heads)
        else:
            found = tables.lookup("attention_prefill", batch_size=batch, q_len=new, kv_len=new, **heads)
        # queries, a gate as wide, keys and values
        projections = step.gemm(2 * out + 2 * kv_heads * width, hidden) + step.gemm(hidden, out)
        norm_and_rope = 2 * step.stream(2 * (q_heads + kv_heads) * width)
        streams = step.stream(4 * hidden) + norm_and_rope + step.stream(4 * kv_heads * width)
        return streams + projections + float(found.latency_us) + step.stream(3 * out)

    def experts() -> float:
        found = tables.lookup(
            "moe",
            num_tokens=step.tokens,
            hidden=hidden,
            intermediate=text["moe_intermediate_size"],
            topk=text["num_experts_per_tok"],
            num_experts=text["num_experts"],
            distribution="power_law_1.2",
            dtype="bf16",
        )
        shared = step.mlp(hidden, text["shared_expert_intermediate_size"]) + step.gemm(1, hidden)
        return step.gemm(text["num_experts"], hidden) + shared + float(found.latency_us)

    total = step.around(hidden, text["vocab_size"])
    for layer in range(text["num_hidden_layers"]):
        total += full() if layer % 4 == 3 else linear()
        total += step.stream(4 * hidden)
        total += experts() if "num_experts" in text else step.mlp(hidden, text["intermediate_size"])
    return total


def kimi_delta_us(tables: Any, text: dict[str, Any], batch: int, new: int, context: int) -> float:
    """Kimi delta attention before dense MLPs in every layer, with attention residuals, us."""
    step, hidden, num_layers = (
        Step(tables, batch, new, context),
        text["hidden_size"],
        text["num_hidden_layers"],
    )
    heads, width = (text["linear_attn_config"][name] for name in ("num_heads", "head_dim"))
    inner = heads * width
    total = step.around(hidden, text["vocab_size"])
    # the embedding and the sums of whole blocks before a layer; where it stands costs its mean
    sealed = [1 + layer // text["attn_res_block_size"] for layer in range(num_layers)]
    for _ in range(num_layers):
        # sums of earlier blocks and of the own one are read, one row is written
        total += 2 * step.stream((sum(sealed) / num_layers + 2) * hidden)
        projections = (
            step.gemm(4 * inner, hidden) + step.gemm(width + heads, hidden) + step.gemm(inner, width)
        )
        mixed = step.delta("kda", heads, width, heads, width) + step.stream(3 * inner)
        total += step.stream(4 * hidden) + projections + mixed + step.gemm(hidden, inner)
        total += step.stream(4 * hidden) + step.mlp(hidden, text["intermediate_size"])
    return total
