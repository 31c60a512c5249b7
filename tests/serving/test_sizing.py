"""Inverse questions: answers against trying everything, their limits kept, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fastroof
from fastroof import BatchError, PlanError, PlanRangeError, Tables, compile_plan
from fastroof.cli import app
from fastroof.cli.workload_options import parse_rates
from fastroof.compiled import request_sums, steps
from fastroof.compiled import sizing as loops
from fastroof.engines import EngineProfile, StepCosts
from fastroof.errors import LookupInputError
from fastroof.serving import estimate
from fastroof.serving.least_gpus import least_gpus
from fastroof.serving.sizing import RATE_LIMITS, client_loads, largest_batch, largest_context
from tests.reference import sizing as naive
from tests.reference.handmade import attention_rows, gemm_rows, handmade_tables
from tests.reference.shards import changed

PROFILE = EngineProfile("made up", costs=StepCosts(step_us=200.0, sequence_us=9.0, prefill_us=70.0))
# jagged on purpose: 16 rows are faster than 8, kv 512 than 256
GRID = {
    (b, x): 9.0 + b * x / 4096 + x / 700 - 6.0 * (x == 512) for b in (1, 8, 64) for x in (64, 256, 512, 4096)
}


@pytest.fixture(scope="module")
def tables() -> Tables:
    return handmade_tables(
        gemm=gemm_rows({(1, 64, 64): 3.0, (8, 64, 64): 5.0, (16, 64, 64): 4.0, (64, 256, 512): 6.0}),
        attention_decode=attention_rows(GRID),
        attention_prefill=attention_rows(GRID, is_decode=False),
        elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
    )


@pytest.fixture(scope="module")
def small_model() -> Any:
    return changed(fastroof.load_model("llama-3.1-8b"), num_layers=2, max_position=6000)


@pytest.fixture(scope="module", params=["roofline", "linear_mfu", "floor", "nearest"])
def plan(request: pytest.FixtureRequest, tables: Tables, small_model: Any) -> Any:
    return compile_plan(
        small_model, "h100", tables, max_tokens=200, max_seqs=150, engine=PROFILE, method=request.param
    )


def little_memory(plan: Any, max_kv_tokens: int) -> Any:
    """The same plan with room for so many tokens."""
    other = dataclasses.replace(plan)
    other.__dict__["memory"] = plan.memory._replace(
        max_kv_tokens=max_kv_tokens, blocks=max_kv_tokens // plan.memory.block_tokens
    )
    return other


def limits_of(plan: Any) -> np.ndarray:
    """Limits that many steps keep and many do not, some of them to the last bit."""
    times = plan.decode_us([1, 8, 9, 30, 64, 100, 150], [1, 70, 300, 512, 511, 900, 5000]) / 1e3
    return np.r_[times, np.nextafter(times, 0), times[0] / 2, np.inf]


# -- the loops -----------------------------------------------------------------------------------


@pytest.mark.loops
@pytest.mark.parametrize("max_kv_tokens", [10**9, 20_000, 100])
def test_batches_are_the_largest(plan: Any, max_kv_tokens: int) -> None:
    one = little_memory(plan, max_kv_tokens)
    kv = np.array([1, 63, 64, 65, 255, 512, 700, 4096, 9000])
    found = largest_batch(one, kv[:, None], limits_of(plan))
    for i, length in enumerate(kv.tolist()):
        assert found[i].tolist() == naive.largest_batch(one, length, limits_of(plan) * 1e3)
    assert found.max() == (100 if max_kv_tokens == 100 else 150)
    assert found.min() == 0


@pytest.mark.loops
@pytest.mark.parametrize("max_kv_tokens", [10**9, 20_000, 100])
def test_contexts_are_the_largest(plan: Any, max_kv_tokens: int) -> None:
    one = little_memory(plan, max_kv_tokens)
    batches = np.array([1, 7, 8, 9, 64, 101, 150])
    found = largest_context(one, batches[:, None], limits_of(plan))
    for i, batch in enumerate(batches.tolist()):
        assert found[i].tolist() == naive.largest_context(one, batch, limits_of(plan) * 1e3, 6000)
    assert found.max() == (100 if max_kv_tokens == 100 else 6000)
    assert found.min() == 0
    assert largest_context(one, 1, max_kv_len=50) == 50


ROOM = (10**9, 1, 0, 0, 0, 1, 1, 10**9)


@pytest.mark.loops
def test_loops_refuse_sizes_that_no_step_has(plan: Any) -> None:
    scratch, limits = loops.new_scratch(200), np.array([np.inf])
    out = np.zeros(1, np.int64)

    def batches(count: int, kv_len: int) -> int:
        sizes = np.arange(1, count + 1)
        return loops.largest_batches(plan.arena, ROOM, sizes, np.array([kv_len]), limits, scratch, out)

    assert batches(150, 5) == 0
    assert batches(151, 5) == batches(9, 0) == batches(9, request_sums.MAX_KV_LEN + 1) == steps.CODE_SIZES
    for batch in (0, 151):
        sizes = np.array([batch])
        assert loops.largest_contexts(plan.arena, ROOM, 99, sizes, limits, out) == steps.CODE_SIZES


def curve(*places: tuple[float, float, float, float]) -> loops.ReplicaCurve:
    """A replica with 1, 2, ... clients: requests a second, TTFT, TPOT and request latency of each."""
    clients = np.arange(1.0, len(places) + 1)
    return loops.ReplicaCurve(clients, *np.array(places, float).reshape(-1, 4).T.copy())


def fewest(replica: loops.ReplicaCurve, rate: float, *limits: float) -> tuple[int, ...]:
    three = np.concatenate([limits, [np.inf] * 3])[:3, None].copy()
    found = loops.FewestReplicas(*np.full((3, 1), -9), np.full(1, 99, np.uint8))
    loops.least_replicas(replica, np.array([rate]), *three, found)
    return tuple(int(row[0]) for row in found)


@pytest.mark.loops
def test_replicas_of_a_curve() -> None:
    three = curve((2, 10, 1, 50), (3, 20, 2, 60), (3.5, 30, 3, 55))
    assert fewest(three, 7) == (2, 2, 2, loops.LIMITED_BY_ROOM)
    assert fewest(three, 5) == (2, 1, 2, loops.LIMITED_BY_ROOM)
    assert fewest(three, 0.1) == (1, 0, 2, loops.LIMITED_BY_ROOM)
    assert fewest(three, 7, 29.0) == (3, 1, 1, loops.LIMITED_BY_TTFT)
    assert fewest(three, 7, 30.0, 2.5) == (3, 1, 1, loops.LIMITED_BY_TPOT)
    # jagged: the second place is over its limit, the third is not
    assert fewest(three, 5, 99.0, 9.0, 55.0) == (2, 2, 2, loops.LIMITED_BY_ROOM)
    assert fewest(three, 5, 99.0, 9.0, 50.0) == (3, 0, 0, loops.LIMITED_BY_REQUEST)
    assert fewest(three, 5, 9.0) == (0, -1, -1, loops.LIMITED_BY_TTFT)
    assert fewest(three, 5, 99.0, 0.5) == (0, -1, -1, loops.LIMITED_BY_TPOT)
    assert fewest(curve(), 5) == (0, -1, -1, loops.LIMITED_BY_ROOM)
    # as many requests with more clients are no more, nor is what rounding adds
    flat = curve((2, 1, 1, 1), (3, 2, 2, 2), (3 + 1e-12, 3, 3, 3), (2, 4, 4, 4))
    assert fewest(flat, 3) == (1, 1, 1, loops.LIMITED_BY_NOTHING_MORE)
    # one token has no time per token
    assert fewest(curve((1, 1, math.nan, 1)), 1, 9.0, 1.0)[0] == 1


@pytest.mark.loops
def test_rounded_quotients_take_no_replica_too_many_nor_too_few() -> None:
    rng = np.random.default_rng(0)
    most = rng.uniform(0.1, 10.0, 300)
    corrected = set()
    for one in most.tolist():
        for count in (3, 7, 11):
            for rate in (np.nextafter(count * one, 0), count * one, np.nextafter(count * one, 1e9)):
                replicas = fewest(curve((one, 1, 1, 1)), float(rate))[0]
                assert replicas * one >= rate > (replicas - 1) * one
                corrected.add(replicas - math.ceil(rate / one))
    assert corrected == {-1, 0, 1}


# -- steps ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(h100: Tables) -> Any:
    return compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")


@settings(max_examples=60)
@given(kv_len=st.integers(1, 200_000), limit_ms=st.floats(1.0, 100.0))
def test_a_batch_keeps_its_limits_and_no_larger_one_does(real: Any, kv_len: int, limit_ms: float) -> None:
    found = largest_batch(real, kv_len, limit_ms)
    every = np.arange(1, 1025)
    within = real.decode_us(every, kv_len) <= limit_ms * 1e3
    within &= every * kv_len <= real.memory.max_kv_tokens
    assert found == 0 or within[found - 1]
    assert not within[found:].any()


@settings(max_examples=60)
@given(batch_size=st.integers(1, 1024), limit_ms=st.floats(1.0, 100.0))
def test_a_context_keeps_its_limits_and_no_larger_one_does(
    real: Any, batch_size: int, limit_ms: float
) -> None:
    found = largest_context(real, batch_size, limit_ms)
    every = np.arange(1, real.model.max_position + 1)
    within = real.decode_us(batch_size, every) <= limit_ms * 1e3
    within &= batch_size * every <= real.memory.max_kv_tokens
    assert found == 0 or within[found - 1]
    assert not within[found:].any()


def test_arrays_equal_singles(real: Any) -> None:
    rng = np.random.default_rng(1)
    limits = rng.uniform(4.0, 40.0, (5, 1))
    for ask, sizes in (
        (largest_batch, rng.integers(1, 99_999, 7)),
        (largest_context, rng.integers(1, 999, 7)),
    ):
        found = ask(real, sizes.astype(np.uint16), limits)
        assert found.shape == (5, 7)
        assert found.dtype == np.int64
        sizes = sizes.astype(np.uint16)
        for i in range(5):
            for j in range(7):
                one = ask(real, int(sizes[j]), float(limits[i, 0]))
                assert type(one) is int
                assert one == found[i, j]
        assert ask(real, [], 5).shape == (0,)


def test_memory_alone(real: Any) -> None:
    room = real.memory.max_kv_tokens
    assert largest_batch(real, 4096) == room // 4096
    assert largest_batch(real, room) == 1
    assert largest_batch(real, room + 1) == 0
    assert largest_context(real, 16) == room // 16
    assert largest_context(real, 1) == real.model.max_position
    assert largest_context(real, 1, max_kv_len=10**8) == room
    # a limit that is no longer finite in us is none
    assert largest_batch(real, 4096, 1e308) == room // 4096
    assert largest_context(real, 16, [1e308, np.inf]).tolist() == [room // 16] * 2


def test_wrong_sizes_and_limits_say_what_would_do(real: Any) -> None:
    with pytest.raises(BatchError, match="tpot_ms must hold numbers above 0, got 0"):
        largest_batch(real, 5, 0)
    with pytest.raises(BatchError, match="tpot_ms must hold numbers above 0, got nan"):
        largest_context(real, 5, math.nan)
    with pytest.raises(BatchError, match="tpot_ms must hold numbers above 0, got 'fast'"):
        largest_context(real, 5, "fast")
    with pytest.raises(BatchError, match=r"tpot_ms must hold numbers above 0, got \[\[1.0"):
        largest_context(real, 5, [[1.0], [2.0, 3.0]])
    with pytest.raises(BatchError, match=r"do not broadcast: kv_len \(2,\), tpot_ms \(3,\)"):
        largest_batch(real, [5, 6], [1, 2, 3])
    with pytest.raises(BatchError, match="kv_len must be at least 1, got 0"):
        largest_batch(real, [5, 0])
    with pytest.raises(BatchError, match="kv_len must hold integers"):
        largest_batch(real, 5.0)
    with pytest.raises(PlanRangeError, match="1025 sequences"):
        largest_context(real, 1025)
    for longest in (0, True, 5.0, 2**30):
        with pytest.raises(BatchError, match="max_kv_len must be a whole number from 1"):
            largest_context(real, 5, max_kv_len=longest)


# -- GPUs ----------------------------------------------------------------------------------------

LOAD = {"isl": 1000, "osl": 200}


@pytest.mark.parametrize("limits", [(math.inf,) * 3, (40.0, 12.0, math.inf), (500.0, 30.0, 2000.0)])
def test_replicas_are_the_fewest(h100: Tables, limits: tuple[float, float, float]) -> None:
    options = dict(zip(("ttft_ms", "tpot_ms", "request_latency_ms"), limits, strict=True))
    rates = [0.5, 20.0, 111.0]
    found = least_gpus(
        "llama-3.1-8b", "h100", h100, rates, **LOAD, **options, tp=2, max_seqs=96, engine="kernels"
    )
    plan = compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine="kernels")
    for i, rate in enumerate(rates):
        expected = naive.fewest_replicas(plan, rate, *LOAD.values(), limits, client_loads(96.0).tolist())
        assert found.replicas[i] == expected[0]
        assert found.concurrency[i] == expected[0] * expected[1]
        assert found.max_request_rate_per_s[i] == expected[2]


def test_it_is_the_smallest_over_tp(h100: Tables) -> None:
    rng = np.random.default_rng(2)
    rates = rng.uniform(0.1, 300.0, 60)
    limits = {"ttft_ms": rng.uniform(20.0, 400.0, 60), "tpot_ms": rng.uniform(3.0, 30.0, 60)}
    every = least_gpus("llama-3.1-8b", "h100", h100, rates, **LOAD, **limits)
    apart = {
        tp: least_gpus("llama-3.1-8b", "h100", h100, rates, **LOAD, **limits, tp=tp) for tp in (1, 2, 4, 8)
    }
    for i in range(60):
        of = {tp: (one.total_gpus[i], -one.max_request_rate_per_s[i]) for tp, one in apart.items()}
        serving = {tp: size for tp, size in of.items() if size[0]}
        if not serving:
            assert every.total_gpus[i] == every.tp[i] == every.replicas[i] == 0
            assert np.isnan(every.concurrency[i])
            continue
        best = min(serving, key=lambda tp: serving[tp])
        assert every.tp[i] == best
        for name in every.columns():
            assert getattr(every, name)[i] == getattr(apart[best], name)[i]
    assert len(set(every.tp.tolist())) > 2


def test_the_deployment_keeps_its_limits(h100: Tables) -> None:
    rates = np.geomspace(0.1, 500.0, 40)
    found = least_gpus(
        "llama-3.1-8b", "h100", h100, rates, **LOAD, ttft_ms=60.0, tpot_ms=12.0, engine="kernels"
    )
    assert (np.diff(found.total_gpus) >= 0).all()
    for i in range(40):
        plan = compile_plan(
            "llama-3.1-8b", "h100", h100, tp=int(found.tp[i]), max_seqs=9216, engine="kernels"
        )
        replicas = int(found.replicas[i])
        clients = found.concurrency[i] / replicas
        seen = estimate(plan, *LOAD.values(), clients, arrivals="random")
        assert found.ttft_ms[i] == pytest.approx(seen.ttft_ms, rel=1e-9)
        assert found.tpot_ms[i] == pytest.approx(seen.tpot_ms, rel=1e-9)
        assert found.request_latency_ms[i] == pytest.approx(seen.request_latency_ms, rel=1e-9)
        assert seen.ttft_ms <= 60.0 * (1 + 1e-9)
        assert seen.tpot_ms <= 12.0 * (1 + 1e-9)
        made = seen.tokens_per_s_per_gpu * plan.tp / LOAD["osl"] * replicas
        assert made >= rates[i] * (1 - 1e-9)
        assert found.max_request_rate_per_s[i] >= made * (1 - 1e-9)
        assert found.tokens_per_s_per_gpu[i] == pytest.approx(rates[i] * LOAD["osl"] / found.total_gpus[i])
        assert RATE_LIMITS[found.limited_by[i]] in ("ttft", "tpot")


def test_arrays_of_lengths_equal_singles(h100: Tables) -> None:
    isl, osl, rate = np.array([100, 1000, 100]), np.array([[1], [50]]), np.array([5.0, 50.0, 500.0])
    found = least_gpus("qwen3-32b", "h100", h100, rate, isl, osl, tp=[4, 8], tpot_ms=25)
    assert found.total_gpus.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            sizes = (float(rate[j]), int(isl[j]), int(osl[i, 0]))
            one = least_gpus("qwen3-32b", "h100", h100, *sizes, tp=[4, 8], tpot_ms=25)
            assert type(one.total_gpus) is int
            for name, value in one.columns().items():
                np.testing.assert_array_equal(value, found.columns()[name][i, j])
    assert least_gpus("qwen3-32b", "h100", h100, [], 9, 9).total_gpus.shape == (0,)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"isl": 1000, "osl": 200, "max_seqs": 7}, "max_seqs"),
        ({"isl": 1, "osl": 2000, "max_batched_tokens": 64}, "budget"),
        ({"isl": 60_000, "osl": 6000, "ttft_ms": 1e5}, "kv_cache"),
        ({"isl": 3000, "osl": 20}, "throughput"),
        ({"isl": 3000, "osl": 200, "request_latency_ms": 2000}, "request_latency"),
    ],
)
def test_what_limits_a_replica(h100: Tables, options: dict[str, Any], limit: str) -> None:
    found = least_gpus("llama-3.1-8b", "h100", h100, 1.0, tp=1, **options)
    assert RATE_LIMITS[found.limited_by] == limit


def test_what_no_deployment_serves(h100: Tables) -> None:
    found = least_gpus("llama-3.1-70b", "h100", h100, 1.0, **LOAD, tpot_ms=2.0, engine="kernels")
    assert (found.total_gpus, found.tp, found.replicas) == (0, 0, 0)
    assert found.max_request_rate_per_s == 0.0
    assert RATE_LIMITS[found.limited_by] == "tpot"
    assert found.tpot_ms > 2.0
    assert list(found.refused) == [1]
    assert "131.4 GiB of weights, 1.6 GiB of a profiling run leave no room" in found.refused[1]
    # too long for the KV cache of two GPUs, which the weights all but fill
    found = least_gpus("llama-3.1-70b", "h100", h100, 1.0, 90_000, 10_000, tp=2, engine="kernels")
    assert found.total_gpus == 0
    assert RATE_LIMITS[found.limited_by] == "kv_cache"
    assert math.isnan(found.ttft_ms)
    with pytest.raises(PlanError, match=r"tp=1: llama-3.1-70b on 1 x h100: .*; use tp=2"):
        least_gpus("llama-3.1-70b", "h100", h100, 1.0, **LOAD, tp=1)
    with pytest.raises(PlanError, match=r"tp=1, 2: dtype must be one of"):
        least_gpus("llama-3.1-8b", "h100", h100, 1.0, **LOAD, tp=[1, 2], dtype="int3")
    with pytest.raises(PlanError, match=r"tp must be one of 1, 2, 4, 8, 16, 32, 64, got 3"):
        least_gpus("llama-3.1-8b", "h100", h100, 1.0, **LOAD, tp=3)
    with pytest.raises(PlanError, match="tp is empty"):
        least_gpus("llama-3.1-8b", "h100", h100, 1.0, **LOAD, tp=[])


def test_wrong_loads_say_what_would_do(h100: Tables) -> None:
    def ask(rate: Any = 1.0, isl: Any = 100, osl: Any = 100, **options: Any) -> None:
        least_gpus("llama-3.1-8b", "h100", h100, rate, isl, osl, tp=1, **options)

    for wrong in (0, -1.0, math.nan, "many", None):
        with pytest.raises(BatchError, match="request_rate_per_s must hold numbers above 0"):
            ask(rate=wrong)
    for large in (math.inf, 2**63):
        with pytest.raises(BatchError, match=r"request_rate_per_s must be at most 1e\+09, got (inf|9.22)"):
            ask(rate=large)
    assert least_gpus("llama-3.1-8b", "h100", h100, 1e9, 1000, 100, tp=1).total_gpus > 10**7
    with pytest.raises(BatchError, match=r"osl must be at least 1, got 0.5"):
        ask(osl=[5, 0.5])
    with pytest.raises(BatchError, match=r"up to 131173 tokens, the maximum of llama-3\.1-8b is 131072"):
        ask(isl=131_073)
    with pytest.raises(BatchError, match="ttft_ms must hold numbers above 0, got 0"):
        ask(ttft_ms=0)
    with pytest.raises(BatchError, match="shapes do not broadcast"):
        ask(rate=[1, 2], isl=[1, 2, 3])
    with pytest.raises(BatchError, match="max_seqs must be a whole number from 1 to 1,048,576, got 0"):
        ask(max_seqs=0)
    with pytest.raises(BatchError, match="max_batched_tokens must be a whole number from 1"):
        ask(max_batched_tokens=True)
    with pytest.raises(BatchError, match="kv_reservation must be one of"):
        ask(kv_reservation="half")


@settings(max_examples=80)
@given(
    isl=st.floats(1, 20_000), osl=st.floats(1, 3000), budget=st.sampled_from([1, 7, 64, 512, 2048, 8192]),
    kv_reservation=st.sampled_from(["mean", "full"]),
)  # fmt: skip
def test_any_load_is_sized(h100: Tables, isl: float, osl: float, budget: int, kv_reservation: str) -> None:
    found = least_gpus(
        "llama-3.1-8b", "h100", h100, [1.0, 100.0], isl, osl,
        tp=1, max_batched_tokens=budget, kv_reservation=kv_reservation,
    )  # fmt: skip
    assert (found.replicas >= 1).all()
    assert (found.max_request_rate_per_s >= [1.0, 100.0]).all()


def test_client_loads_hold_all_whole_numbers_and_is_fine_below_64() -> None:
    for most in (1.0, 1.3, 5.0, 63.5, 64.0, 64.5, 900.25):
        loads = client_loads(most)
        assert loads[0] == 1.0
        assert loads[-1] == most
        assert (np.diff(loads) > 0).all()
        assert np.isin(np.arange(1, math.floor(most) + 1), loads).all()
        assert (np.diff(loads) / loads[:-1] <= 1 / 64).all()


# -- the command ---------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["size", *arguments], prog_name="fastroof")
    return done.exit_code, done.stdout, done.stderr


def document(*arguments: str) -> Any:
    code, out, err = command(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


DEPLOYMENT = (
    "--model",
    "llama-3.1-70b",
    "--isl",
    "4000",
    "--osl",
    "500",
    "--ttft-ms",
    "500",
    "--tpot-ms",
    "30",
)


@pytest.mark.slow
def test_the_command_gives_the_same_numbers(h100: Tables, real: Any) -> None:
    found = document(*DEPLOYMENT, "--rate", "2,20", "--tp", "4,8", "--request-latency-ms", "20000")
    options = {"ttft_ms": 500, "tpot_ms": 30, "request_latency_ms": 20_000}
    least = least_gpus("llama-3.1-70b", "h100", h100, [2, 20], 4000, 500, tp=[4, 8], **options)
    best = [row for row in found["rows"] if row["is_best"]]
    assert [row["request_rate_per_s"] for row in best] == [2.0, 20.0]
    for name in (n for n in least.columns() if n != "limited_by"):
        assert [row[name] for row in best] == getattr(least, name).tolist()
    assert len(found["rows"]) == 4
    assert found["refused"] == {}
    assert found["tables_hash"] == h100.content_hash

    lengths = ("--kv-len", "10,4096,500000", "--tpot-ms", "10")
    kernels = ("--model", "llama-3.1-8b", "--tp", "1", "--engine", "kernels")
    code, out, err = command(*kernels, *lengths, "--json")
    assert code == 0
    assert "500,000 tokens is longer than the context of llama-3.1-8b" in err
    found = json.loads(out)
    sizes = largest_batch(real, [10, 4096, 500_000], 10).tolist()
    assert [row["batch_size"] for row in found["rows"]] == sizes
    assert found["rows"][1]["step_ms"] == real.decode_us(sizes[1], 4096) / 1e3
    assert [row["limited_by"] for row in found["rows"]] == ["tpot", "tpot", "memory"]
    assert found["rows"][2]["step_ms"] is None

    found = document(*kernels, "--batch-size", "1,64", "--tpot-ms", "500")
    assert [row["kv_len"] for row in found["rows"]] == largest_context(real, [1, 64], 500).tolist()
    assert [row["limited_by"] for row in found["rows"]] == ["model", "memory"]


def test_an_engine_that_is_started_for_few_requests_has_the_memory_of_few(h100: Tables) -> None:
    # with room to sort the logits of 1,024 requests vLLM has none for KV cache
    split = ("--model", "llama-3.1-70b", "--tp", "2", "--max-num-seqs", "4", "--engine", "vllm-0.10.0")
    plan = compile_plan("llama-3.1-70b", "h100", h100, tp=2, max_seqs=4, engine="vllm-0.10.0")
    few = plan.memory_of(max_seqs=4)
    assert plan.memory.max_kv_tokens == 0 < few.max_kv_tokens
    row = document(*split, "--kv-len", "1000")["rows"][0]
    assert (row["batch_size"], row["limited_by"]) == (4, "max_seqs")
    assert row["kv_share"] == pytest.approx(4 * few.parts_per_request(1000) / few.parts)
    row = document(*split, "--batch-size", "2")["rows"][0]
    assert (row["kv_len"], row["limited_by"]) == (few.largest_length(2), "memory")
    assert (largest_batch(plan, 1000), largest_batch(plan, 1000, max_seqs=3)) == (0, 3)
    assert largest_context(plan, 2, max_seqs=4) == few.largest_length(2) == few.parts // 2 * 16
    assert largest_context(plan, 2) == 0
    with pytest.raises(BatchError, match="max_seqs must be a whole number from 1"):
        largest_batch(plan, 1000, max_seqs=0)


@pytest.mark.slow
def test_every_key_is_explained() -> None:
    explained = command("--help")[1]
    for question in (("--batch-size", "8", "--model", "llama-3.1-8b"), (*DEPLOYMENT, "--rate", "9")):
        found = document(*question)
        for key in (*found, *found["rows"][0]):
            assert key in explained


@pytest.mark.slow
def test_it_prints_tables() -> None:
    code, out, err = command(*DEPLOYMENT, "--rate", "20")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "llama-3.1-70b on NVIDIA H100 SXM, bf16 weights, bf16 KV cache, engine "
        "vllm >=0.33 (not validated beyond 0.28)"
    )
    shown = [line.split() for line in lines[4:7]]
    assert shown[0][:2] == ["least", "20"]
    assert [shown[0][4], shown[1][3], shown[2][3]] == ["8", "4", "2"]  # tp
    assert lines[7].startswith("tp 1 cannot run: ")
    assert lines[7].endswith("; use tp=2")
    # of several rates, the least for each; where there is none, why not
    out = command(*DEPLOYMENT, "--rate", "20,50")[1]
    assert out.count("least") == 2
    out = command(*DEPLOYMENT[:-1], "3", "--rate", "20,50")[1]
    assert out.count("none") == 6
    assert "least" not in out
    out = command("--model", "llama-3.1-8b", "--kv-len", "4096,999999", "--tp", "1", "--max-num-seqs", "5")[1]
    assert "--max-num-seqs" in out
    assert out.count("none") == 1


@pytest.mark.slow
def test_wrong_questions_are_refused() -> None:
    def refused(*arguments: str) -> str:
        code, out, err = command("--model", "llama-3.1-8b", *arguments)
        assert (code, out) == (2, "")
        return err.removeprefix("fastroof: error: ").rstrip()

    questions = "give one of --rate, --kv-len, --batch-size, got"
    assert refused() == f"{questions} none of them"
    assert refused("--rate", "1", "--kv-len", "5") == f"{questions} --rate and --kv-len"
    assert refused("--rate", "1", "--isl", "5") == "--rate needs --osl too"
    assert refused("--rate", "1") == "--rate needs --isl and --osl too"
    assert refused("--kv-len", "1", "--ttft-ms", "5").startswith("--ttft-ms goes with --rate; --kv-len is")
    assert refused("--kv-len", "1", "--tpot-ms", "-5") == "tpot_ms must hold numbers above 0, got -5.0"
    assert refused("--kv-len", "x").startswith("--kv-len needs a whole number")
    assert "tp must be one of 1, 2, 4, 8, 16, 32, 64, got 3" in refused("--kv-len", "5", "--tp", "3")
    for text in ("", "0", "-1", "1,,2", "nan", "1e999"):
        with pytest.raises(LookupInputError, match="--rate needs a number above 0"):
            parse_rates(text)
