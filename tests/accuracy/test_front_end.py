"""Front ends from clients' TTFT: found again where they are known, and never from what they are judged by."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from benchmarks.accuracy.front_end import PromptTime, TtftErrors, fitted, fitted_without, residual
from benchmarks.accuracy.rows import shipped_rows
from fastroof.engines import FrontEnd
from fastroof.evidence.predictions import front_end_ms
from fastroof.evidence.rows import ENGINE_CLOCK, ServingRow

KNOWN = FrontEnd(request_ms=20.0, token_us=11.0, server_ms=7.0)


@pytest.fixture(scope="module")
def a_row() -> ServingRow:
    return replace(
        shipped_rows("h100")[0], engine="vllm", frontend="", bench="inferencemax", length_factor=1.0
    )


def runs_of(
    row: ServingRow, model: str, truth: FrontEnd, seed: int, *, noise: float = 0.0, **changes: str
) -> list[PromptTime]:
    """Runs of all sizes, whose TTFT is the prediction plus the front end's time, with some noise."""
    random = np.random.default_rng(seed)
    runs = []
    for _ in range(40):
        sizes = replace(
            row, model=model, architecture=model, isl=float(random.integers(100, 9000)),
            concurrency=float(2 ** random.integers(1, 8)), requests_per_client=10.0,
            **MappingProxyType(changes),
        )  # fmt: skip
        engine_ms = float(random.uniform(20.0, 200.0))
        ttft_ms = engine_ms + front_end_ms(truth, sizes)
        ttft_ms *= 1.0 + noise * float(random.uniform(-1.0, 1.0))
        runs.append(PromptTime(replace(sizes, ttft_ms=ttft_ms), "vllm", engine_ms))
    return runs


def sizes_of(front_end: FrontEnd) -> tuple[float, float, float]:
    return front_end.request_ms, front_end.token_us, front_end.server_ms


@pytest.mark.parametrize("left_out", ["", "request_ms", "token_us", "server_ms"])
def test_what_was_added_is_found(a_row: ServingRow, left_out: str) -> None:
    truth = replace(KNOWN, **{left_out: 0.0}) if left_out else KNOWN
    runs = runs_of(a_row, "a", truth, 0) + runs_of(a_row, "b", truth, 1)
    assert sizes_of(fitted(runs)) == pytest.approx(sizes_of(truth), abs=0.02)
    noisy = runs_of(a_row, "a", truth, 2, noise=0.1) + runs_of(a_row, "b", truth, 3, noise=0.1)
    assert TtftErrors.of(noisy, lambda _: fitted(noisy)).mean < 0.07


def test_a_judged_model_is_left_out_of_its_fit(a_row: ServingRow) -> None:
    others = runs_of(a_row, "a", KNOWN, 0) + runs_of(a_row, "b", KNOWN, 1)
    judged = runs_of(a_row, "c", replace(KNOWN, request_ms=400.0), 2)
    found = fitted_without([*others, *judged], lambda row: row.whole_model)
    assert sizes_of(found["vllm", "c"]) == pytest.approx(sizes_of(KNOWN), abs=0.02)
    assert found["vllm", "a"] != found["vllm", "c"]
    assert residual(others, lambda row: row.whole_model) < 0.001


def test_models_weigh_alike(a_row: ServingRow) -> None:
    many = [run for seed in range(6) for run in runs_of(a_row, "a", FrontEnd(request_ms=10.0), seed)]
    few = runs_of(a_row, "b", FrontEnd(request_ms=60.0), 9)
    # with one vote each neither model's runs are dismissed as outliers of the other's
    assert 10.0 < fitted(many + few).request_ms + fitted(many + few).server_ms < 60.0


def test_plain_servers_come_before_routers(a_row: ServingRow) -> None:
    plain = runs_of(a_row, "a", KNOWN, 0)
    routed = runs_of(a_row, "b", replace(KNOWN, request_ms=150.0), 1, bench="dynamo")
    assert sizes_of(fitted(plain + routed)) == pytest.approx(sizes_of(KNOWN), abs=0.02)
    assert fitted(routed).request_ms == pytest.approx(150.0, abs=0.2)


def test_times_of_the_engines_clock_are_not_fitted(a_row: ServingRow) -> None:
    own = runs_of(a_row, "a", FrontEnd(request_ms=500.0), 0, clock=ENGINE_CLOCK)
    assert fitted(own) == FrontEnd()
    plain = runs_of(a_row, "b", KNOWN, 1)
    assert sizes_of(fitted(own + plain)) == pytest.approx(sizes_of(KNOWN), abs=0.02)


def test_runs_behind_a_named_front_end_fit_none(a_row: ServingRow) -> None:
    routed = runs_of(a_row, "a", replace(KNOWN, request_ms=150.0), 0, bench="")
    routed = [run._replace(row=replace(run.row, frontend="dynamo")) for run in routed]
    assert fitted(routed) == FrontEnd()
    plain = [run._replace(row=replace(run.row, bench="")) for run in runs_of(a_row, "b", KNOWN, 1)]
    assert sizes_of(fitted([*routed, *plain])) == pytest.approx(sizes_of(KNOWN), abs=0.02)
