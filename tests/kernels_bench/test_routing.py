"""How tokens are routed: whole loads, distinct experts, a power law's shape, the most loaded GPU first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from kernels_bench.routing import DISTRIBUTIONS, expert_loads, route

LAYERS = st.sampled_from([(8, 2), (8, 8), (16, 1), (128, 8), (256, 8), (32, 4)])
TOKENS = st.integers(1, 300)
SEEDS = st.integers(0, 2**31)


@given(LAYERS, TOKENS, st.sampled_from(DISTRIBUTIONS), SEEDS)
def test_loads_are_all_assignments_and_no_expert_has_a_token_twice(layer, tokens, distribution, seed):
    experts, topk = layer
    loads = expert_loads(tokens, topk, experts, distribution, seed)
    assert loads.shape == (experts,)
    assert loads.sum() == tokens * topk
    assert loads.min() >= 0
    assert loads.max() <= tokens
    assert (loads == expert_loads(tokens, topk, experts, distribution, seed)).all()


@given(LAYERS, TOKENS, st.sampled_from(DISTRIBUTIONS), SEEDS, st.sampled_from([1, 2, 8]))
def test_tokens_take_distinct_experts_and_the_most_loaded_gpu_is_first(
    layer, tokens, distribution, seed, gpus
):
    experts, topk = layer
    routed = route(tokens, topk, experts, gpus, distribution, seed)
    assert routed.shape == (tokens, topk)
    assert all(len(set(row)) == topk for row in routed.tolist())
    counts = np.bincount(routed.ravel(), minlength=experts)
    loads = expert_loads(tokens, topk, experts, distribution, seed)
    assert sorted(counts) == sorted(loads)
    by_gpu, drawn = (x.reshape(gpus, -1).sum(axis=1) for x in (counts, loads))
    assert by_gpu[0] == drawn.max()
    assert sorted(by_gpu) == sorted(drawn), "GPUs keep their experts, only their order changes"


@given(LAYERS, TOKENS)
def test_balanced_loads_differ_by_one(layer, tokens):
    experts, topk = layer
    assert np.ptp(expert_loads(tokens, topk, experts, "balanced", 0)) <= 1


def test_uniform_loads_are_those_of_independent_tokens():
    loads = np.array([expert_loads(400, 8, 128, "uniform", seed) for seed in range(40)])
    assert loads.mean() == 25
    # binomial, less what taking an expert once only takes away
    assert loads.var() == pytest.approx(400 * (8 / 128) * (1 - 8 / 128), rel=0.1)
    touched = (np.array([expert_loads(10, 8, 128, "uniform", seed) for seed in range(200)]) > 0).sum(axis=1)
    assert touched.mean() == pytest.approx(128 * (1 - (1 - 8 / 128) ** 10), rel=0.02)


def expected_shares(exponent, low, high, experts):
    """Mean load of each expert over all, ascending: the power law's mean between quantiles, integrated."""
    edges = np.linspace(0, 1, 20 * experts + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    power = 1 - exponent
    loads = (low**power + middle * (high**power - low**power)) ** (1 / power)
    by_expert = loads.reshape(experts, -1).mean(axis=1)
    return by_expert / by_expert.sum()


@pytest.mark.parametrize("exponent", [1.01, 1.2])
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(4096, 8, 256), (512, 4, 128), (16384, 4, 512)])
def test_power_laws_have_the_expected_loads(exponent, tokens, topk, experts):
    drawn = np.sort(
        [expert_loads(tokens, topk, experts, f"power_law_{exponent}", seed) for seed in range(300)], axis=1
    )
    assignments = tokens * topk
    want = expected_shares(exponent, 1.0, 0.8 * tokens, experts) * assignments
    assert want.max() < tokens, "no load is cut, so that expectations hold"
    # of hundreds of experts, whose sum hardly varies: loads are scaled by the sum that was drawn
    np.testing.assert_allclose(drawn.mean(axis=0), want, rtol=0.05, atol=0.6)
    shares = drawn[:, -1] / assignments
    assert shares.std() / shares.mean() < 0.3, "each draw has the law's tail, not the luck of one"


def test_a_steeper_law_loads_the_most_loaded_gpu_more():
    def most_loaded(distribution):
        draws = [route(2048, 8, 256, 8, distribution, seed) < 32 for seed in range(50)]
        return np.mean([is_first.sum() for is_first in draws]) / (2048 * 8 / 8)

    balanced, gentle, steep = (most_loaded(d) for d in ("balanced", "power_law_1.01", "power_law_1.2"))
    assert balanced == 1
    assert 1.2 < gentle < steep


def test_few_tokens_are_spread_by_the_other_law():
    """At most as many assignments as experts: between 0.01 and 2 before they are scaled."""
    drawn = np.sort([expert_loads(8, 8, 256, "power_law_1.2", seed) for seed in range(300)], axis=1)
    want = expected_shares(1.2, 0.01, 2.0, 256) * 64
    assert drawn[:, -1].mean() == pytest.approx(want[-1], abs=0.6)


def test_what_is_above_the_tokens_goes_to_the_least_loaded():
    draws = [np.sort(expert_loads(16384, 2, 8, "power_law_1.2", seed)) for seed in range(20)]
    cut = [loads for loads in draws if loads[-1] == 16384]
    assert cut
    for loads in cut:
        assert loads.sum() == 2 * 16384
        assert loads[3] - loads[0] <= 1, "the law would have each several times the one before"


@pytest.mark.parametrize("distribution", ["zipf", "power_law_1.0", "power_law_", "power_law_x"])
def test_another_distribution_is_an_error(distribution):
    with pytest.raises(MeasureError, match="valid are balanced"):
        expert_loads(4, 2, 8, distribution, 0)


def test_what_cannot_be_routed_is_an_error():
    with pytest.raises(MeasureError, match="9 of 8 experts"):
        expert_loads(4, 9, 8, "balanced", 0)
    with pytest.raises(MeasureError, match="do not divide by 3"):
        route(4, 2, 8, 3, "balanced", 0)
