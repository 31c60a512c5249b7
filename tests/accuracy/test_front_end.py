"""What test benches add to TTFT: found again where it is known, and never from what it is judged by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.front_end import FORMS, FrontEnd, PromptTime, front_ends
from benchmarks.accuracy.rows import shipped_rows
from fastroof.serving.evidence.rows import ServingRow


@pytest.fixture(scope="module")
def a_row() -> ServingRow:
    return replace(shipped_rows("h100")[0], frontend="", bench="bench", engine="vllm", length_factor=1.0)


def runs_of(
    row: ServingRow, model: str, truth: FrontEnd, seed: int, engine: str = "vllm", noise: float = 0.0
) -> list[PromptTime]:
    """Runs of all sizes, whose TTFT is what is predicted and what a front end adds, give or take some."""
    random = np.random.default_rng(seed)
    runs = []
    for _ in range(40):
        sizes = replace(
            row, model=model, architecture=model, engine=engine, isl=float(random.integers(100, 9000)),
            concurrency=float(2 ** random.integers(1, 8)),
        )  # fmt: skip
        predicted, tpot_ms = float(random.uniform(20.0, 200.0)), float(random.uniform(5.0, 40.0))
        ttft_ms = predicted + truth.added_ms(sizes, tpot_ms)
        ttft_ms *= 1.0 + noise * float(random.uniform(-1.0, 1.0))
        runs.append(PromptTime(replace(sizes, ttft_ms=ttft_ms), predicted, tpot_ms))
    return runs


@pytest.mark.parametrize("form", FORMS)
def test_what_was_added_is_found(a_row: ServingRow, form: tuple[str, ...]) -> None:
    known = FrontEnd(20.0, 0.7, 11.0, 1.5)
    truth = FrontEnd(**{name: getattr(known, name) for name in form})
    runs = [run for seed, model in enumerate("abc") for run in runs_of(a_row, model, truth, seed)]
    found = front_ends(runs)
    assert len(found) == len(runs)
    for run, one in zip(runs, found, strict=True):
        added_ms = truth.added_ms(run.row, run.tpot_ms)
        assert one.added_ms(run.row, run.tpot_ms) == pytest.approx(added_ms, rel=0.02, abs=0.01)


def test_a_model_says_nothing_of_itself(a_row: ServingRow) -> None:
    truth = FrontEnd(request_ms=20.0, client_ms=0.7)
    others = [run for seed, model in enumerate("ab") for run in runs_of(a_row, model, truth, seed, noise=0.2)]
    found = []
    for much in (0.0, 500.0):
        judged = runs_of(a_row, "c", FrontEnd(request_ms=much), 9)
        # of whatever engine, GPU or format
        elsewhere = runs_of(replace(a_row, gpu="b200"), "c", FrontEnd(request_ms=much), 8, engine="trtllm")
        found.append(front_ends([*others, *judged, *elsewhere])[len(others) :])
    assert found[0] == found[1]
    assert found[0][0].request_ms == pytest.approx(20.0, rel=0.4)


def test_an_engine_without_other_models_takes_those_of_its_bench(a_row: ServingRow) -> None:
    truth = FrontEnd(token_us=30.0)
    runs = [*runs_of(a_row, "a", truth, 0, "trtllm"), *runs_of(a_row, "b", truth, 1, "trtllm")]
    alone = runs_of(a_row, "c", truth, 2)
    found = front_ends([*runs, *alone])[-1]
    assert found.token_us == pytest.approx(30.0, rel=0.02)
    elsewhere = [run._replace(row=replace(run.row, bench="another")) for run in alone]
    assert front_ends([*runs, *elsewhere])[-1] == FrontEnd()


def test_where_engines_differ_each_has_its_own(a_row: ServingRow) -> None:
    runs = []
    for seed, model in enumerate("abc"):
        runs += runs_of(a_row, model, FrontEnd(request_ms=5.0), seed)
        runs += runs_of(a_row, model, FrontEnd(request_ms=90.0), seed + 10, engine="trtllm")
    found = {run.row.engine: one.request_ms for run, one in zip(runs, front_ends(runs), strict=True)}
    assert found["vllm"] == pytest.approx(5.0, rel=0.05)
    assert found["trtllm"] == pytest.approx(90.0, rel=0.05)


def test_nothing_is_added_where_there_is_no_bench_or_nothing_else(a_row: ServingRow) -> None:
    runs = runs_of(a_row, "a", FrontEnd(request_ms=50.0), 0)
    assert set(front_ends(runs)) == {FrontEnd()}
    runs += runs_of(a_row, "b", FrontEnd(request_ms=50.0), 1)
    of_none = [run._replace(row=replace(run.row, bench="")) for run in runs]
    assert set(front_ends(of_none)) == {FrontEnd()}
    # one other model alone chooses no form: it has a constant
    for one in set(front_ends(runs)):
        assert one == FrontEnd(request_ms=pytest.approx(50.0, rel=1e-6))
        assert str(one) == "50 ms a request"
    assert str(FrontEnd()) == "nothing"


def test_what_is_left_out_together_can_be_gpus(a_row: ServingRow) -> None:
    runs = []
    for seed, gpu in enumerate(("h100", "h200", "b200")):
        runs += runs_of(replace(a_row, gpu=gpu), "a", FrontEnd(request_ms=30.0), seed)
    for one in front_ends(runs, split=lambda row: row.gpu):
        assert one.request_ms == pytest.approx(30.0, rel=1e-6)
    assert set(front_ends(runs)) == {FrontEnd()}
