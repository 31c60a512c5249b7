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
        plan = compile_plan("llama-3.1-8b", "h100", tables, tp=tp, pp=2, engine="kernels")
        parts = {part.name: part for part in plan.explain([(1024, 0)]).operators}
        sent_us[tp] = parts["pipeline send"].total_us
    gpu = load_gpu("h100")
    # 4096 elements of two bytes a token
    assert sent_us[8] == pytest.approx(INTER_NODE_US + 1024 * 8192 / gpu.inter_node_bytes_per_s * 1e6)
    within_us = sent_us[1] - 1024 * 8192 / gpu.nvlink_bytes_per_s * 1e6
    assert 0.0 < within_us < INTER_NODE_US


@pytest.mark.parametrize("order", [("llama-3.1-8b", "llama-3.1-70b"), ("llama-3.1-70b", "llama-3.1-8b")])
def test_wider_models_send_more(order: tuple[str, str]) -> None:
    tables, sent_us = load_tables("h100"), {}
    for model in order:
        plan = compile_plan(model, "h100", tables, tp=8, pp=2, engine="kernels")
        parts = {part.name: part for part in plan.explain([(1024, 0)]).operators}
        sent_us[model] = parts["pipeline send"].total_us
    # 8192 elements of two bytes a token where the smaller model has 4096
    sizes_us = [us - INTER_NODE_US for us in (sent_us["llama-3.1-8b"], sent_us["llama-3.1-70b"])]
    assert sizes_us[1] == pytest.approx(2 * sizes_us[0])


@pytest.mark.parametrize("order", [(2, 4, 8), (8, 4, 2)])
def test_more_stages_of_as_many_gpus_cross_more_nodes(order: tuple[int, ...]) -> None:
    """Two stages of 4 GPUs are in a node: none of 1, one of 3, three of 7 boundaries are between nodes."""
    tables, sent_us = load_tables("h100"), {}
    for pp in order:
        plan = compile_plan("llama-3.1-8b", "h100", tables, tp=4, pp=pp, engine="kernels")
        parts = {part.name: part for part in plan.explain([(1024, 0)]).operators}
        sent_us[pp] = parts["pipeline send"].total_us
    near_us = sent_us[2]
    far_us = sent_us[4] - 2 * near_us
    assert far_us > 2 * near_us
    assert sent_us[8] == pytest.approx(4 * near_us + 3 * far_us)
