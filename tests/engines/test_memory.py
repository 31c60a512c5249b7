"""What engines leave beside weights and KV cache, worked out by hand."""

from __future__ import annotations

import pytest

from fastroof.engines import KvMemory, load_engine
from fastroof.engines.memory import FAST_LINK_BYTES_PER_S, StaticReserve
from fastroof.units import GIB, MIB


@pytest.mark.parametrize(
    ("tp", "pp", "ranks", "mib"),
    [
        # 100 of its own, 1024 tokens at 2, a graph of 32 requests (64 from tp 4 on) at 3, 5 a GPU
        (1, 1, 1, 100 + 2048 + 96 + 5),
        (2, 1, 1, 100 + 2048 + 96 + 10),
        (2, 4, 1, 100 + 2048 + 96 + 40),
        (4, 2, 1, 100 + 2048 + 192 + 40),
        # 7 for every request of a graph of every rank
        (2, 1, 3, 100 + 2048 + 96 + 10 + 7 * 32 * 3),
    ],
)
def test_a_reserve_counts_tokens_graphs_gpus_and_ranks(tp: int, pp: int, ranks: int, mib: int) -> None:
    reserve = StaticReserve(
        mib=100, mib_per_token=2, mib_per_graph=3, mib_per_gpu=5, mib_per_rank_graph=7, graphs=((0, 32, 64),)
    )
    assert reserve.bytes(80 * GIB, 1024, tp, pp, ranks) == mib * MIB


def test_the_first_row_of_graphs_that_holds_and_the_least_of_large_gpus() -> None:
    reserve = StaticReserve(
        mib_per_graph=1, mib_per_token=1, least_tokens=50, least_gib=2, large_gib=40,
        graphs=((20, 8, 16), (60, 24, 48)),
    )  # fmt: skip
    assert reserve.bytes(16 * GIB, 10, 1, 1, 1) == (8 + 50) * MIB
    assert reserve.bytes(24 * GIB, 70, 8, 1, 1) == (48 + 70) * MIB
    assert reserve.bytes(80 * GIB, 70, 8, 1, 1) == 2 * GIB
    assert reserve.bytes(80 * GIB, 4096, 8, 1, 1) == 4 * GIB


def test_contexts_have_groups_buffers_by_their_link() -> None:
    memory = KvMemory(context_gib=0.75, group_gib=2.0, slow_group_gib=1.0)
    fast, slow = float(FAST_LINK_BYTES_PER_S), float(FAST_LINK_BYTES_PER_S) / 2
    assert memory.context_bytes(fast, 1) == memory.context_bytes(slow, 1) == 0.75 * GIB
    assert memory.context_bytes(fast, 8) == 2.75 * GIB
    assert memory.context_bytes(slow, 8) == 1.75 * GIB


def test_defaults_of_a_card_by_version() -> None:
    """The table of vllm/engine/arg_utils.py, for an API server, and SGLang's chunks."""
    cards = {"l40s": 45, "a100": 80, "h100": 80, "b200": 180}
    expected = {
        "vllm-0.24.0": [(2048, 256), (2048, 256), (8192, 1024), (8192, 1024)],
        "vllm-0.33.0": [(2048, 256), (2048, 256), (8192, 1024), (16384, 1024)],
        "sglang": [(4096, 1024), (8192, 1024), (8192, 1024), (16384, 1024)],
    }
    for engine, limits in expected.items():
        rule = load_engine(engine).memory
        assert [rule.default_limits(gpu, gib * GIB, 8192, 1024) for gpu, gib in cards.items()] == limits
    old, new = (
        load_engine(name).memory.default_limits("rtx_4090", 24 * GIB, 1, 9)
        for name in ("sglang-0.5.14", "sglang")
    )
    assert (old, new) == ((2048, 9), (4096, 9))


def test_small_gpus_sample_for_fewer_requests() -> None:
    memory = KvMemory(small_gib=70, small_seqs=256, small_gpus=("b300",))
    assert memory.seqs("l40s", 48 * GIB, 1024) == 256
    assert memory.seqs("l40s", 48 * GIB, 64) == 64
    assert memory.seqs("b300", 288 * GIB, 1024) == 256
    assert memory.seqs("h100", 80 * GIB, 1024) == 1024
