"""What pipeline stages send each other, in plans of one table set."""

from __future__ import annotations

import pytest

from fastroof import compile_plan, load_gpu, load_tables
from fastroof.operators.link_groups import INTER_NODE_US


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1)])
def test_plans_of_the_same_tables_send_over_their_own_boundaries(sizes: tuple[int, int]) -> None:
    """Two stages of 8 GPUs lie in two nodes, two of one GPU in the same, whichever was compiled first."""
    tables = load_tables("h100")
    sent_us = {}
    for tp in sizes:
        plan = compile_plan("llama-3.1-8b", "h100", tables, tp=tp, pp=2)
        parts = {part.name: part for part in plan.explain([(1024, 0)]).operators}
        sent_us[tp] = parts["pipeline send"].total_us
    gpu = load_gpu("h100")
    # 4096 elements of two bytes a token
    assert sent_us[8] == pytest.approx(INTER_NODE_US + 1024 * 8192 / gpu.inter_node_bytes_per_s * 1e6)
    within_us = sent_us[1] - 1024 * 8192 / gpu.nvlink_bytes_per_s * 1e6
    assert 0.0 < within_us < INTER_NODE_US
