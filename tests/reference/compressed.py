"""A naive step of DeepSeek-V4-Flash on one GPU: every kernel of every layer looked up by itself, and summed.

Nothing here reads a call of the product: what a layer is made of is written down again.
"""

from __future__ import annotations

from typing import Any

from tests.reference import steps

HIDDEN, HEADS, WIDTH, Q_LORA, GROUPS, O_LORA = 4096, 64, 512, 1024, 8, 1024
EXPERT, VOCAB = 2048, 129280
KEY = {
    "dtype": "fp8_block", "kv_dtype": "fp8", "attn_dtype": "bf16", "model": "deepseek-v4-flash",
    "num_heads": HEADS,
}  # fmt: skip


def step_us(tables: Any, batch: int, q_len: int, kv_len: int, layers: dict[int, int]) -> float:
    """Time of equal requests: decodes where ``q_len`` is 1; layers by their compression.

    Experts are fp8_block, drawn as plans draw them by default.
    """
    tokens = batch * q_len
    launch_us, bytes_per_us = steps.streaming(tables)

    def streamed(elements: int) -> float:
        return launch_us + tokens * elements * 2 / bytes_per_us

    def gemm(m: int, n: int, k: int, dtype: str) -> float:
        return float(tables.lookup("gemm", m=m, n=n, k=k, dtype=dtype).latency_us)

    def mixed(stage: str) -> float:
        found = tables.lookup("hyper_connections", stage=stage, hidden=HIDDEN, num_tokens=tokens)
        return float(found.latency_us)

    experts = tables.lookup(
        "moe", num_tokens=tokens, hidden=HIDDEN, intermediate=EXPERT, topk=6, num_experts=256,
        distribution="power_law_1.2", dtype="fp8_block",
    )  # fmt: skip
    # one token's streams are read, mixed and written for both sublayers by one kernel before, one after
    layer = mixed("pre") + mixed("post") + 2 * streamed(2 * HIDDEN)
    layer += gemm(tokens, 2 * EXPERT, HIDDEN, "fp8_block") + streamed(3 * EXPERT)
    layer += gemm(tokens, HIDDEN, EXPERT, "fp8_block")
    layer += gemm(tokens, 256, HIDDEN, "bf16") + float(experts.latency_us)
    total = streamed(5 * HIDDEN) + streamed(4 * HIDDEN) + gemm(batch, VOCAB, HIDDEN, "bf16")
    for ratio, count in layers.items():
        total += count * (layer + block_us(tables, ratio, batch, q_len, kv_len))
    return total


def block_us(tables: Any, ratio: int, batch: int, q_len: int, kv_len: int) -> float:
    """One block at sizes that were measured, over a model's scores."""
    phase = "decode" if q_len == 1 else "prefill"
    sizes = {"batch_size": batch, "kv_len": kv_len} | ({} if q_len == 1 else {"q_len": q_len})
    operator = f"{'csa' if ratio == 4 else 'hca'}_{phase}"
    us = float(tables.lookup(operator, **KEY, **sizes).latency_us)
    if ratio == 0:
        return us * window_share(tables, operator, batch, q_len, kv_len)
    if ratio == 4 and kv_len // 4 > 512:
        part = {"part": "topk_v2" if q_len == 1 else "topk_v1", "model": "deepseek-v4-flash"}
        part |= {"compress_ratio": 4, "num_heads": 64, "batch_size": batch, "q_len": q_len, "kv_len": kv_len}
        flat, peaked = (tables.lookup("sparse_part", scores=s, **part) for s in ("flat", "top_last"))
        us += float(peaked.latency_us) - float(flat.latency_us)
    return us


def window_share(tables: Any, operator: str, batch: int, q_len: int, kv_len: int) -> float:
    """What a block with the window alone costs of HCA's, by rooflines with the launch floor of its table."""
    rows = tables.measured.tables[operator].columns
    launch_us = min(
        us
        for us, *names in zip(rows["latency_us"], *(rows[name] for name in KEY), strict=True)
        if names == list(KEY.values())
    )
    gpu, tokens = tables.gpu, batch * q_len

    def bound_us(has_entries: bool) -> float:
        weights = HIDDEN * (Q_LORA + WIDTH) + Q_LORA * HEADS * WIDTH + HEADS * WIDTH * O_LORA
        weights += GROUPS * O_LORA * HIDDEN + 2 * HIDDEN * WIDTH * has_entries
        pairs = sum(
            min(k, 128) + (k / 128 if has_entries else 0.0) for k in range(kv_len - q_len + 1, kv_len + 1)
        )
        read = min(kv_len, 128) + (kv_len / 128 if has_entries else 0.0)
        seconds = 2 * tokens * weights / gpu.peak("fp8")
        seconds += 4 * HEADS * WIDTH * batch * pairs / gpu.peak("bf16")
        moved = weights + batch * read * WIDTH + 2 * 2 * tokens * HIDDEN
        return launch_us + 1e6 * (seconds + moved / gpu.hbm_bytes_per_s)

    return bound_us(False) / bound_us(True)
