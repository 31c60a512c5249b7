"""A naive step of Nemotron-H on one GPU: lookups and two formulas, letter by letter of its pattern."""

from __future__ import annotations

from typing import Any

from tests.reference import steps

LAUNCH_US = {"generation": 3.3, "context": 21.0}
EFFICIENCY = {"generation": 0.9, "context": 0.42}


def recurrence_us(gpu: Any, config: dict[str, Any], phase: str, batch: int, new: int) -> float:
    """Mamba-2's recurrence of one layer by the datasheet, us: a float32 state, five operations an element."""
    heads, width = config["mamba_num_heads"], config["mamba_head_dim"]
    state, groups = config["ssm_state_size"], config["n_groups"]
    elements = heads * width * state
    # x, B and C in, y out, a time step a head
    token_bytes = 2 * (2 * heads * width + 2 * groups * state) + 4 * heads
    # a prompt has no state to read
    passes = 2 if phase == "generation" else 1
    moved = batch * (passes * 4 * elements + new * token_bytes)
    work_s = 5.0 * batch * new * elements / gpu.peak("bf16") + moved / gpu.hbm_bytes_per_s
    return LAUNCH_US[phase] + 1e6 * work_s / EFFICIENCY[phase]


def convolution_channels(config: dict[str, Any]) -> int:
    """Channels of x, B and C."""
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    return int(inner + 2 * config["n_groups"] * config["ssm_state_size"])


def step_us(tables: Any, config: dict[str, Any], batch: int, new: int, context: int) -> float:
    """Equal decodes (``new`` 1) after ``context`` tokens, or equal fresh prompts, us; formats bf16."""
    hidden, tokens = config["hidden_size"], batch * new
    phase = "generation" if new == 1 and context else "context"
    launch_us, bytes_per_us = steps.streaming(tables)

    def stream(elements: float) -> float:
        return launch_us + tokens * 2 * elements / bytes_per_us

    def gemm(n: int, k: int, rows: int = tokens) -> float:
        return float(tables.lookup("gemm", m=rows, n=n, k=k, dtype="bf16").latency_us)

    def mamba() -> float:
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        channels = convolution_channels(config)
        convolution = tables.lookup(
            "mamba2",
            phase=phase,
            part="convolution",
            conv_width=config["conv_kernel"],
            num_heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            state_dim=config["ssm_state_size"],
            num_groups=config["n_groups"],
            chunk_size=config["chunk_size"],
            batch_size=batch,
            q_len=new,
        )
        projections = gemm(inner + channels + config["mamba_num_heads"], hidden) + gemm(hidden, inner)
        scan = recurrence_us(tables.gpu, config, phase, batch, new)
        return stream(4 * hidden) + projections + float(convolution.latency_us) + scan + stream(3 * inner)

    def attention() -> float:
        q_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        width = config["head_dim"]
        heads = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": width, "kv_dtype": "bf16"}
        if phase == "generation":
            found = tables.lookup("attention_decode", batch_size=batch, kv_len=context + 1, **heads)
        else:
            found = tables.lookup("attention_prefill", batch_size=batch, q_len=new, kv_len=new, **heads)
        projections = gemm((q_heads + 2 * kv_heads) * width, hidden) + gemm(hidden, q_heads * width)
        # keys and values are read and written
        return stream(4 * hidden) + projections + stream(4 * kv_heads * width) + float(found.latency_us)

    def mlp(width: int) -> float:
        return gemm(width, hidden) + stream(2 * width) + gemm(hidden, width)

    def experts() -> float:
        found = tables.lookup(
            "moe_nongated",
            num_tokens=tokens,
            hidden=config.get("moe_latent_size") or hidden,
            intermediate=config["moe_intermediate_size"],
            topk=config["num_experts_per_tok"],
            num_experts=config["n_routed_experts"],
            distribution="power_law_1.2",
            dtype="bf16",
        )
        latent = config.get("moe_latent_size")
        projections = gemm(latent, hidden) + gemm(hidden, latent) if latent else 0.0
        shared = mlp(config["moe_shared_expert_intermediate_size"])
        router = gemm(config["n_routed_experts"], hidden)
        return stream(4 * hidden) + shared + router + projections + float(found.latency_us)

    letters = {"M": mamba, "*": attention, "E": experts, "-": lambda: mlp_layer()}

    def mlp_layer() -> float:
        return stream(4 * hidden) + mlp(config["intermediate_size"])

    layers = sum(letters[letter]() for letter in config["hybrid_override_pattern"])
    embedding, norm = stream(2 * hidden), stream(4 * hidden)
    return embedding + layers + norm + gemm(config["vocab_size"], hidden, rows=batch)
