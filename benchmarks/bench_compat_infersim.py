"""InferSim's lookups a second through the public functions, as ratios to plain Python in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.conftest import Timed
from fastroof.bench.workload import Baseline, Workload
from fastroof.compat import infersim
from tests.reference import infersim as reference

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "golden_sample" / "infersim" / "bench_data"
LOOKUPS = 1_000_000
PLAIN_LOOKUPS = 2_000
SCENARIOS = 20_000
PLAIN_SCENARIOS = 200

LAYER = {"num_experts": 512, "topk": 10, "hidden": 2048, "intermediate": 512}
GDN = {
    "conv_kernel": 4,
    "num_key_heads": 16,
    "key_head_dim": 128,
    "num_value_heads": 32,
    "value_head_dim": 128,
}
MODEL = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
}  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> infersim.InfersimTables:
    return infersim.load(SAMPLE)


@pytest.fixture(scope="module")
def tree() -> reference.Tree:
    return reference.Tree(SAMPLE)


def _sizes(*tops: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, top, LOOKUPS) for top in tops]


def _compare(
    timed: Timed,
    tree: reference.Tree,
    mine: Callable[[], Any],
    plain: Callable[[int], Any],
    rows: int = LOOKUPS,
    plain_rows: int = PLAIN_LOOKUPS,
) -> None:
    """Time public functions, and plain Python that reads its files once or, as InferSim, for each row."""

    def plainly(rows: int, reads: bool = False) -> Any:
        found = []
        for i in range(rows):
            if reads:
                tree.split.clear()
            found.append(plain(i))
        return np.array(found)

    few = plain_rows // 10
    baselines = (
        Baseline("plain Python", partial(plainly, plain_rows), plain_rows, 0.0),
        Baseline("plain Python that reads its file a lookup", partial(plainly, few, True), few, None),
    )
    title = f"{rows:,} rows"
    timed(Workload("infersim", title, "row", rows, lambda: np.atleast_2d(mine()).T, baselines=baselines))


DECODES = {
    "mha": ("H20", {"num_heads": 16, "num_kv_heads": 2, "head_dim": 256}),
    "mla": ("H800", {"num_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
}
PREFILLS = {
    "mha": ("H20", {"num_heads": 16, "num_kv_heads": 2, "head_dim": 256}),
    "mla": ("H800", {"num_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}),
}
"""A device and head shape of each kind of attention."""


@pytest.mark.parametrize("kind", DECODES)
def test_attn_decode_mfu(timed: Timed, tables: Any, tree: Any, kind: str) -> None:
    (device, heads), (batch, kv_len) = DECODES[kind], _sizes(512, 131_072)

    def plain(i: int) -> float:
        query = int(batch[i]), int(kv_len[i]), False
        return reference.attn_decode_mfu(tree, device, kind, tuple(heads.values()), *query)

    _compare(
        timed,
        tree,
        lambda: infersim.attn_decode_mfu(tables, device, **heads, batch_size=batch, kv_len=kv_len),
        plain,
    )


@pytest.mark.parametrize("kind", PREFILLS)
def test_attn_prefill_mfu(timed: Timed, tables: Any, tree: Any, kind: str) -> None:
    (device, heads), (seq_len,) = PREFILLS[kind], _sizes(65_536)
    _compare(
        timed,
        tree,
        lambda: infersim.attn_prefill_mfu(tables, device, **heads, seq_len=seq_len),
        lambda i: reference.attn_prefill_mfu(tree, device, kind, tuple(heads.values()), int(seq_len[i])),
    )


def test_gemm_mfu(timed: Timed, tables: Any, tree: Any) -> None:
    """Every lookup another shape of the larger table: nothing is shared between neighbours."""
    m, k, n = _sizes(40_000, 8192, 12_288)
    _compare(
        timed,
        tree,
        lambda: infersim.gemm_mfu(tables, "H20", m, k, n),
        lambda i: reference.gemm_mfu(tree, "H20", int(m[i]), int(k[i]), int(n[i])),
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_grouped_gemm_mfu(timed: Timed, tables: Any, tree: Any, phase: str) -> None:
    (tokens,) = _sizes(40_000)
    num_gpus = np.random.default_rng(1).choice([1, 2, 4, 8, 16], LOOKUPS)

    def plain(i: int) -> tuple[float, float]:
        gpus = int(num_gpus[i])
        layer = (512, gpus, 512 // gpus, 10, 2048, 512)
        return reference.grouped_gemm_mfu(tree, "H20", phase, layer, int(tokens[i]))

    _compare(
        timed,
        tree,
        lambda: infersim.grouped_gemm_mfu(
            tables, "H20", phase, **LAYER, num_gpus=num_gpus, tokens_per_gpu=tokens
        ),
        plain,
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_gdn_latency_us(timed: Timed, tables: Any, tree: Any, phase: str) -> None:
    (tokens,) = _sizes(40_000)
    _compare(
        timed,
        tree,
        lambda: infersim.gdn_latency_us(tables, "H20", phase, **GDN, tokens=tokens),
        lambda i: reference.gdn_latency_us(tree, "H20", phase, (4, 16, 128, 32, 128), int(tokens[i])),
    )


def test_evaluate(timed: Timed, tables: Any, tree: Any) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "tp_size": rng.choice([1, 2, 4], SCENARIOS),
        "decode_bs": rng.integers(1, 513, SCENARIOS),
        "isl": rng.integers(1, 16_384, SCENARIOS),
    }
    scenario = {
        "device": "H20", "world_size": 4, "num_nodes": 1, "max_prefill_tokens": 8192, "target_tgs": 2560.0,
        "target_tpot": 50.0, "osl": 1024, "fp8_gemm": 0, "fp8_kv": 0, "deepep": 0, "tbo": 0, "sm_ratio": 0.9,
    }  # fmt: skip

    def plain(i: int) -> tuple[float, float]:
        row = {name: int(column[i]) for name, column in columns.items()}
        found = reference.evaluate(tree, MODEL, {**scenario, **row})
        return found["ttft_ms"], found["tpot_ms"]

    def mine() -> Any:
        result = infersim.evaluate(tables, MODEL, {**scenario, **columns})
        return [result["ttft_ms"].to_numpy(), result["tpot_ms"].to_numpy()]

    _compare(timed, tree, mine, plain, SCENARIOS, PLAIN_SCENARIOS)
