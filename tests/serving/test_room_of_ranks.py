"""KV cache of several ranks and stages: each rank has a room of its own, micro-batches share one."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof import compile_plan, load_tables
from fastroof.serving import estimate


@pytest.mark.parametrize(
    ("layout", "rooms"), [({}, 1), ({"pp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2, "pp": 2}, 2)]
)
def test_as_many_requests_run_as_all_ranks_hold(layout: dict[str, Any], rooms: int) -> None:
    tables = load_tables("h100")
    plan = compile_plan("llama-3.1-8b", "h100", tables, engine="vllm", max_num_seqs=1024, **layout)
    # requests of 1000 tokens that grow by 200 hold 1100 on average, of 22,000 tokens' room a GPU
    found = estimate(plan, isl=1000, osl=200, clients=500, max_kv_tokens=22_000, max_num_seqs=1024)
    assert found.effective_concurrency == pytest.approx(20 * rooms)
