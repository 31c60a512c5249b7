"""Plans whose experts' kernel sends tokens itself: in the place of experts and of both exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastroof import StepPlan, Tables, compile_plan, load_gpu
from fastroof.errors import MissingTableError, PlanError
from fastroof.operators.calls import Experts
from fastroof.operators.expert_dispatch import MEGAMOE
from fastroof.operators.moe import MOE
from fastroof.operators.row_operator import CurveOptions
from tests.reference.handmade import handmade_tables
from tests.reference.kinds import step_us

KEY = ("fp8_block", 3072, 1536, 8, 256, 8)
"""The layer of MiniMax M2.5 over 8 GPUs."""
DECODES = ((8, 60.0), (64, 90.0), (1024, 300.0))
PROMPTS = ((512, 250.0), (8192, 1500.0))
OPTIONS: dict[str, Any] = {
    "engine": "sglang",
    "dp": 8,
    "ep": 8,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 64,
}
EXCHANGES = ("experts_dispatch", "experts_combine", "experts_gather", "experts_scatter")


@pytest.fixture(scope="module")
def tables(h100: Tables) -> Tables:
    made = handmade_tables(
        megamoe=[
            *((*KEY, "generation", "power_law_1.2", *point) for point in DECODES),
            *((*KEY, "context", "power_law_1.2", *point) for point in PROMPTS),
        ]
    )
    whole = {**h100.measured.tables, **made.measured.tables}
    return Tables(replace(h100.measured, tables=whole), h100.gpu)


def compiled(tables: Tables, **options: Any) -> StepPlan:
    return compile_plan("minimax-m2.5", "h100", tables, **{"exchange": "megamoe", **OPTIONS, **options})


def parts(plan: Any, requests: list[tuple[int, int]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in plan.explain(requests).operators:
        sums[part.role] = sums.get(part.role, 0.0) + part.total_us
    return sums


@pytest.mark.parametrize(("requests", "us"), [
    ([(1, 99)], 60.0), ([(1, 99)] * 8, 90.0), ([(64, 0)], 250.0), ([(1, 99), (63, 0)], 250.0),
])  # fmt: skip
def test_one_kernel_takes_the_place_of_experts_and_their_exchange(
    tables: Tables, requests: list[tuple[int, int]], us: float
) -> None:
    """Tokens are those of all 8 ranks; prompts run the kernel that was measured for them."""
    plan = compiled(tables)
    found = parts(plan, requests)
    assert found["experts"] == pytest.approx(62 * us, rel=1e-12)
    assert not found.keys() & set(EXCHANGES)
    gathered = parts(compiled(tables, exchange="gather"), requests)
    # the engine pauses before each kernel, of which there are fewer
    others = gathered.keys() - {"experts", "runtime", *EXCHANGES}
    assert {role: found[role] for role in others} == {role: gathered[role] for role in others}
    assert plan.describe()["exchange"] == "megamoe"


def test_a_step_is_the_sum_of_its_kernels(tables: Tables) -> None:
    plan = compiled(tables, engine="kernels")
    assert plan.decode_us(8, 100) == pytest.approx(step_us(plan, tables, [(1, 99)] * 8), rel=1e-9)


def test_gpus_of_a_rank_share_its_tokens_and_gather_them_again(tables: Tables) -> None:
    plan = compiled(tables, tp=8, dp=1)
    found = parts(plan, [(1, 99)] * 64)
    assert found["experts"] == pytest.approx(62 * 90.0, rel=1e-12)
    assert {"attention_scatter", "tokens_gather"} <= found.keys()
    assert "mlp_allreduce" not in found


def test_nothing_is_borrowed_between_groups_of_other_sizes(tables: Tables) -> None:
    with pytest.raises(MissingTableError, match="moe_ep=4"):
        compiled(tables, dp=4, ep=4)
    plan = compiled(tables, dp=4, ep=4, allow_modelled=True)
    (experts,) = (p for p in plan.explain([(1, 99)] * 8).operators if p.role == "experts")
    assert experts.origin == 4
    with pytest.raises(PlanError, match="experts that are whole on one of several GPUs"):
        compiled(tables, dp=8, ep=4)
    with pytest.raises(PlanError, match="roofline"):
        compiled(tables, method="nearest")


def test_without_tables_sending_hides_behind_computing_or_it_behind_sending() -> None:
    """With few experts a token, computing takes less than sending: each token to about 3 of 8 GPUs."""
    gpu = load_gpu("h100")
    call = Experts(
        "experts", "experts", 1, *KEY[1:5], 1, 8, "fp8_block", "balanced", phase="context", sends=True
    )
    nodes, computing = MEGAMOE.datasheet_nodes(call, gpu), MOE.datasheet_nodes(call, gpu)
    assert (nodes.value >= computing.value).all()
    thin = replace(call, intermediate=128)
    at = 65536.0
    link_us = at / 8 * 3072 * 3 * 8 * (1 - (7 / 8) ** 8) * 7 / 8 / gpu.nvlink_bytes_per_s * 1e6
    found = float(
        np.interp(at, MEGAMOE.datasheet_nodes(thin, gpu).axis, MEGAMOE.datasheet_nodes(thin, gpu).value)
    )
    assert found > link_us
    assert found > float(np.interp(at, computing.axis, MOE.datasheet_nodes(thin, gpu).value))


def test_a_measured_point_comes_back_and_its_error_with_it(tables: Tables) -> None:
    call = Experts(
        "experts", "experts", 1, *KEY[1:5], 1, 8, "fp8_block", "power_law_1.2", phase="generation", sends=True
    )
    nodes = MEGAMOE.row_nodes(call, tables, CurveOptions(), 1024)
    for tokens, us in DECODES:
        assert float(np.interp(tokens, nodes.axis, nodes.value)) == us
    error = np.sqrt(MEGAMOE.row_variance(call, tables, np.array([32.0])))
    assert 0.0 < error[0] < 1.0
