"""The runner against fakes: order, sentinels, remeasuring, checks, failures, deadlines, resuming."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from kernels_bench.journal import read_journal
from kernels_bench.protocol import Point
from kernels_bench.run.run_options import Progress, measuring_order
from kernels_bench.sentinels import sentinel_points
from tests.kernels_bench.fakes import (
    CLOCK_MHZ,
    FakeClock,
    FakeMonitor,
    FakeProvider,
    FakeTimer,
    gemm,
    gemms,
    of_type,
    run,
)

SENTINEL = gemm(4096, 4096, 4096, priority=0)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal-r.jsonl"


def kinds(journal: Path) -> list[str]:
    return [r["type"] for r in read_journal(journal)]


def row_keys(journal: Path) -> list[str]:
    return [r["key"] for r in of_type(read_journal(journal), "row")]


def test_every_point_once_with_all_that_was_promised(journal: Path) -> None:
    points = gemms(5)
    report = run(journal, points, start={"versions": {"torch": "2.11"}, "grid_sha256": "f"})
    assert (report.reason, report.measured, report.left, dict(report.skipped)) == ("complete", 5, 0, {})
    assert Counter(row_keys(journal)) == Counter(p.key for p in points)
    assert kinds(journal) == ["start", *["row"] * 5, "end"]
    start, *rows, end = read_journal(journal)
    assert start["facts"]["gpu_name"] == "NVIDIA H100 80GB HBM3"
    assert (start["run_id"], start["gpu"], start["seed"], start["resumed"]) == ("r", "h100", 0, False)
    assert (start["versions"], start["grid_sha256"]) == ({"torch": "2.11"}, "f")
    assert set(rows[0]) == {
        "type", "key", "operator", "values", "latency_us", "p25_us", "p75_us", "min_us", "num_replays",
        "provider", "kernel", "quantises_input", "sm_clock_mhz", "power_w", "temperature_c",
        "throttle_reasons", "power_limited_us", "remeasured", "order", "at_s",
    }  # fmt: skip
    assert {row["power_limited_us"] for row in rows} == {250.0}, "what the counter rose by around a point"
    assert [r["order"] for r in rows] == list(range(5))
    assert (end["reason"], end["measured"], end["left"]) == ("complete", 5, 0)


def test_order_is_seeded_random_within_priorities() -> None:
    points = [gemm(m, priority=1 + m % 2) for m in range(1, 41)]
    order = measuring_order(points, seed=3)
    assert order == measuring_order(list(reversed(points)), seed=3)
    assert order != measuring_order(points, seed=4)
    assert [p.priority for p in order] == [1] * 20 + [2] * 20
    ms = [p.values["m"] for p in order[:20]]
    assert ms != sorted(ms)
    assert Counter(p.key for p in order) == Counter(p.key for p in points)


def test_inputs_depend_on_point_and_seed_alone(tmp_path: Path) -> None:
    seeds: list[list[tuple[str, int]]] = []

    class Seeing(FakeProvider):
        def prepare(self, point: Point, seed: int, max_bytes: int):  # type: ignore[no-untyped-def]
            seeds[-1].append((point.key, seed))
            return super().prepare(point, seed, max_bytes)

    for name, points, seed in (("a", gemms(4), 0), ("b", gemms(6), 0), ("c", gemms(4), 1)):
        seeds.append([])
        run(tmp_path / name, points, [Seeing()], seed=seed)
    first, more, other = (dict(s) for s in seeds)
    assert all(more[key] == seed for key, seed in first.items())
    assert all(other[key] != seed for key, seed in first.items())
    assert len(set(first.values())) == 4


# -- sentinels and remeasuring -----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "every", "rounds"), [(10, 4, 4), (8, 4, 3), (3, 4, 2), (1, 200, 2)])
def test_sentinels_at_the_start_every_so_often_and_at_the_end(
    journal: Path, count: int, every: int, rounds: int
) -> None:
    report = run(journal, gemms(count), sentinels=(SENTINEL,), sentinel_every=every)
    found = kinds(journal)
    assert found[:2] == ["start", "sentinel"]
    assert found[-2:] == ["sentinel", "end"]
    sentinels = of_type(read_journal(journal), "sentinel")
    assert [s["round"] for s in sentinels] == list(range(rounds))
    assert report.sentinels[0].rounds == rounds


def test_drift_shows_in_the_report(journal: Path) -> None:
    timer = FakeTimer(latency_us=lambda p, call: (10.0 + call * (p == SENTINEL), 0.0))
    report = run(journal, gemms(10), timer=timer, sentinels=(SENTINEL,), sentinel_every=2)
    (sentinel,) = report.sentinels
    assert (sentinel.min_us, sentinel.max_us) == (10.0, 15.0)


def test_a_wide_spread_is_measured_once_more_and_the_steadier_kept(journal: Path) -> None:
    script = {0: (10.0, 1.0), 1: (12.0, 0.1)}
    timer = FakeTimer(latency_us=lambda p, call: script[call] if p.values["m"] == 1 else (10.0, 0.0))
    report = run(journal, gemms(2), timer=timer)
    rows = {r["values"]["m"]: r for r in of_type(read_journal(journal), "row")}
    assert (rows[1]["remeasured"], rows[1]["latency_us"]) == (True, 12.0), "kept the faster, not the steadier"
    assert rows[2]["remeasured"] is False
    assert timer.times == {gemm(1).key: 2, gemm(2).key: 1}
    assert report.remeasured == 1


def test_a_point_is_measured_again_once_at_most(journal: Path) -> None:
    timer = FakeTimer(latency_us=lambda *_: (10.0, 5.0))
    run(journal, gemms(3), timer=timer)
    assert set(timer.times.values()) == {2}


def test_a_clock_off_the_sentinels_is_measured_again(journal: Path) -> None:
    # The sentinel reads first, then each point; the last value holds.
    monitor = FakeMonitor([CLOCK_MHZ, CLOCK_MHZ * 0.96, CLOCK_MHZ])
    timer = FakeTimer()
    run(journal, gemms(3), timer=timer, monitor=monitor, sentinels=(SENTINEL,))
    rows = of_type(read_journal(journal), "row")
    assert [r["remeasured"] for r in rows] == [True, False, False]
    assert rows[0]["sm_clock_mhz"] == CLOCK_MHZ


def test_without_a_monitor_no_clock_is_suspicious(journal: Path) -> None:
    monitor = FakeMonitor([float("nan")])
    report = run(journal, gemms(3), monitor=monitor, sentinels=(SENTINEL,))
    assert report.remeasured == 0


def test_a_soak_runs_for_half_a_second_before_it_is_timed(journal: Path) -> None:
    timer = FakeTimer()
    soak = sentinel_points()[-1]
    run(journal, gemms(3), timer=timer, sentinels=(SENTINEL, soak))
    assert timer.warm_ups_us.pop(soak.key) == 500_000.0
    assert set(timer.warm_ups_us.values()) == {0.0}


def test_an_unsupported_sentinel_is_left_out_and_reported(journal: Path) -> None:
    lines: list[str] = []
    provider = FakeProvider(takes=lambda p: p.key != SENTINEL.key)
    report = run(journal, gemms(3), [provider], sentinels=(SENTINEL,), say=lines.append)
    assert report.measured == 3
    assert [s for s in lines if "sentinel left out" in s] == lines
    assert len(lines) == 1


# -- the reference check -----------------------------------------------------------------------------


def test_a_family_is_checked_once_before_it_is_timed(journal: Path) -> None:
    timer, provider = FakeTimer(), FakeProvider()
    run(journal, gemms(6), [provider], timer=timer)
    checked = [p for p in provider.prepared if p.ran]
    assert [p.point.values["m"] for p in checked] == [6, 1], "the largest quick one and the smallest"
    assert provider.prepared[:2] == checked, "timed before it was checked"
    assert all(p.ran == [0, 2] for p in checked)
    assert all(p.closed for p in provider.prepared)


def test_a_wrong_kernel_stops_its_family_and_no_other(journal: Path) -> None:
    lines: list[str] = []
    points = [*gemms(3), *(gemm(m, dtype="fp8") for m in (1, 2, 3))]
    provider = FakeProvider(error_of=lambda _: 0.03)  # above what bf16 may have, below what fp8 may
    timer = FakeTimer()
    report = run(journal, points, [provider], timer=timer, say=lines.append)
    assert (report.measured, dict(report.skipped)) == (3, {"reference": 3})
    rows, skips = (of_type(read_journal(journal), kind) for kind in ("row", "skip"))
    assert {r["values"]["dtype"] for r in rows} == {"fp8"}
    assert {(s["values"]["dtype"], s["kind"]) for s in skips} == {("bf16", "reference")}
    assert "relative error 0.03" in skips[0]["reason"]
    assert not any('"bf16"' in key for key in timer.keys), "a wrong kernel was timed"
    assert len(lines) == 1
    assert "reference check failed" in lines[0]


def test_nan_never_passes(journal: Path) -> None:
    report = run(journal, gemms(2), [FakeProvider(error_of=lambda _: float("nan"))])
    assert dict(report.skipped) == {"reference": 2}


# -- providers ---------------------------------------------------------------------------------------


def test_the_first_provider_that_takes_a_point_measures_it(journal: Path) -> None:
    first = FakeProvider("first", takes=lambda p: p.values["m"] <= 2)
    second = FakeProvider("second", takes=lambda p: p.values["m"] <= 4)
    report = run(journal, gemms(5), [first, second])
    by_m = {r["values"]["m"]: r["provider"] for r in of_type(read_journal(journal), "row")}
    assert by_m == {1: "first", 2: "first", 3: "second", 4: "second"}
    (skip,) = of_type(read_journal(journal), "skip")
    assert (skip["kind"], skip["reason"]) == ("unsupported", "first: not mine; second: not mine")
    assert dict(report.skipped) == {"unsupported": 1}


def test_out_of_memory_skips_the_point_and_reports_it(journal: Path) -> None:
    lines: list[str] = []
    too_large = gemm(10**6, 10**5, 10**5)
    provider = FakeProvider(fails=lambda p: MemoryError("no 9 GB\nadvice") if p == too_large else None)
    report = run(journal, [*gemms(3), too_large], [provider], say=lines.append)
    assert (report.measured, dict(report.skipped), report.left) == (3, {"oom": 1}, 0)
    (skip,) = of_type(read_journal(journal), "skip")
    assert (skip["kind"], skip["reason"]) == ("oom", "no 9 GB")
    assert lines == [f"out of memory, skipped: {too_large.key}"]


def test_memory_errors_never_stop_a_provider(journal: Path) -> None:
    provider = FakeProvider(fails=lambda p: MemoryError() if p.values["m"] > 2 else None)
    report = run(journal, gemms(30), [provider])
    assert (report.reason, report.measured, dict(report.skipped)) == ("complete", 2, {"oom": 28})


def test_a_run_goes_on_after_an_error_in_one_point(journal: Path) -> None:
    bad = {3, 7}
    provider = FakeProvider(fails=lambda p: RuntimeError("boom") if p.values["m"] in bad else None)
    report = run(journal, gemms(20), [provider])
    assert (report.measured, dict(report.skipped)) == (18, {"error": 2})
    assert {s["reason"] for s in of_type(read_journal(journal), "skip")} == {"fake: RuntimeError: boom"}


def test_ten_failures_in_a_row_hand_over_to_the_next_provider(journal: Path) -> None:
    lines: list[str] = []
    broken = FakeProvider("broken", fails=lambda _: RuntimeError("no such symbol"))
    report = run(journal, gemms(25), [broken, FakeProvider("works")], say=lines.append)
    rows = of_type(read_journal(journal), "row")
    assert (report.reason, report.measured, report.left) == ("complete", 25, 0)
    assert {r["provider"] for r in rows} == {"works"}
    assert len(broken.max_bytes) == 10
    assert any("broken failed 10 times in a row and is not used any more" in s for s in lines)


def test_failures_that_are_not_in_a_row_do_not_stop_a_provider(journal: Path) -> None:
    points = measuring_order(gemms(40), 0)
    # Not the ends of the family, on which its check runs.
    bad = {p.key for i, p in enumerate(points) if i % 2} - ends(points)
    provider = FakeProvider(fails=lambda p: RuntimeError("odd") if p.key in bad else None)
    report = run(journal, points, [provider])
    assert len(bad) > 10
    assert (report.reason, report.measured) == ("complete", 40 - len(bad))


def ends(points: list[Point]) -> set[str]:
    by_m = sorted(points, key=lambda p: p.values["m"])
    return {by_m[0].key, by_m[-1].key}


def test_no_provider_left_leaves_points_for_a_resumed_run(journal: Path) -> None:
    broken = FakeProvider(fails=lambda _: RuntimeError("boom"))
    report = run(journal, gemms(30), [broken])
    assert (report.reason, report.measured, report.left) == ("no provider", 0, 20)
    report = run(journal, gemms(30), [FakeProvider()])
    assert (report.reason, report.measured, report.left) == ("complete", 30, 0)


def test_a_lost_device_stops_at_once_and_is_resumed(journal: Path) -> None:
    lines: list[str] = []
    culprit = measuring_order(gemms(12), 0)[4]
    bad = FakeProvider(
        fails=lambda p: (
            RuntimeError("CUDA error: an illegal memory access was encountered") if p == culprit else None
        )
    )
    first = run(journal, gemms(12), [bad], say=lines.append)
    assert (first.reason, first.measured, first.left) == ("device lost", 4, 7)
    assert "the device is lost" in lines[-1]
    second = run(journal, gemms(12), [bad])
    assert (second.reason, second.measured) == ("device lost", 0), "an error is tried once more"
    third = run(journal, gemms(12), [bad])
    assert (third.reason, third.measured, third.left) == ("complete", 7, 0)
    assert Counter(row_keys(journal)) == Counter(p.key for p in gemms(12) if p != culprit)


def test_a_provider_that_cannot_even_refuse_is_passed_over(journal: Path) -> None:
    class Broken(FakeProvider):
        def refuses(self, point: Point) -> str | None:
            raise AttributeError("no such thing")

    report = run(journal, gemms(2), [Broken("broken"), FakeProvider("works")])
    assert report.measured == 2


def test_no_provider_is_an_error(journal: Path) -> None:
    with pytest.raises(MeasureError, match="no provider works here"):
        run(journal, gemms(2), [])
    assert not journal.exists()


# -- deadline ----------------------------------------------------------------------------------------


@given(deadline_s=st.floats(0.01, 3.0), seconds=st.floats(0.001, 0.3), reserve_s=st.floats(0, 0.5))
@settings(max_examples=60)
def test_nothing_runs_past_the_deadline(
    tmp_path_factory: pytest.TempPathFactory, deadline_s: float, seconds: float, reserve_s: float
) -> None:
    journal = tmp_path_factory.mktemp("d") / "j"
    clock = FakeClock()
    began_s = clock()
    report = run(
        journal, gemms(20), clock=clock, timer=FakeTimer(clock, seconds=seconds), deadline_s=deadline_s,
        reserve_s=reserve_s, estimate_s=lambda _: seconds,
    )  # fmt: skip
    assert clock() - began_s <= max(0.0, deadline_s - reserve_s) + 1e-9
    assert report.reason == ("deadline" if report.left else "complete")
    assert report.measured + report.left == 20
    fitting = int((deadline_s - reserve_s) / seconds + 1e-6)
    assert report.measured >= min(20, fitting - 1), "stopped long before the deadline"


def test_a_long_point_that_does_not_fit_lets_shorter_ones_pass(journal: Path) -> None:
    clock = FakeClock()
    long = gemm(1000)
    seconds = {p.key: 0.1 for p in gemms(10)} | {long.key: 50.0}
    report = run(
        journal, [*gemms(10), long], clock=clock, timer=FakeTimer(clock, seconds=0.1), deadline_s=5.0,
        estimate_s=lambda p: seconds[p.key],
    )  # fmt: skip
    assert (report.reason, report.measured, report.left) == ("deadline", 10, 1)
    assert of_type(read_journal(journal), "end")[0]["reason"] == "deadline"


def test_estimates_that_are_too_low_are_corrected_by_the_pace(journal: Path) -> None:
    clock = FakeClock()
    report = run(
        journal, gemms(100), clock=clock, timer=FakeTimer(clock, seconds=0.5), deadline_s=10.2,
        estimate_s=lambda _: 0.01,
    )  # fmt: skip
    assert report.elapsed_s <= 10.2
    assert report.measured == 20


def test_progress_counts_up_to_the_total(journal: Path) -> None:
    seen: list[Progress] = []
    clock = FakeClock()
    provider = FakeProvider(takes=lambda p: p.values["m"] != 4)
    run(journal, gemms(8), [provider], clock=clock, estimate_s=lambda _: 0.01, on_progress=seen.append)
    assert [p.done for p in seen] == list(range(1, 9))
    assert seen[-1].skipped == 1
    assert seen[-1].left_s == pytest.approx(0.0, abs=1e-9)
    assert seen[0].left_s > seen[4].left_s


# -- resuming ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no handler catches, as no handler catches SIGKILL."""


@given(st.integers(0, 20), st.data())
@settings(max_examples=60)
def test_a_kill_at_any_moment_resumes_to_every_point_once(
    tmp_path_factory: pytest.TempPathFactory, survived: int, data: st.DataObject
) -> None:
    journal = tmp_path_factory.mktemp("k") / "j"
    points = gemms(9)
    calls = 0

    def killing(point: Point, call: int) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        if calls > survived:
            raise Killed
        return 10.0, 0.0

    options = {"sentinels": (SENTINEL,), "sentinel_every": 4}
    try:
        run(journal, points, timer=FakeTimer(latency_us=killing), **options)
    except Killed:
        # The write in flight may be torn anywhere.
        whole = journal.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        journal.write_bytes(whole[: data.draw(st.integers(last, len(whole)))])
    before = row_keys(journal)
    report = run(journal, points, **options)
    assert report.reason == "complete"
    assert row_keys(journal)[: len(before)] == before
    assert Counter(row_keys(journal)) == Counter(p.key for p in points)
    rounds = [s["round"] for s in of_type(read_journal(journal), "sentinel")]
    assert rounds == sorted(rounds)
    orders = {r["key"]: r["order"] for r in of_type(read_journal(journal), "row")}
    assert orders == {p.key: i for i, p in enumerate(measuring_order(points, 0))}


def test_resuming_a_finished_run_measures_nothing(journal: Path) -> None:
    run(journal, gemms(3))
    timer = FakeTimer()
    report = run(journal, gemms(3), timer=timer, sentinels=(SENTINEL,))
    assert (report.reason, report.measured, report.before, timer.keys) == ("complete", 0, 3, [])


def test_ctrl_c_ends_the_journal_properly(journal: Path) -> None:
    def interrupting(point: Point, call: int) -> tuple[float, float]:
        if len(row_keys(journal)) == 3:
            raise KeyboardInterrupt
        return 10.0, 0.0

    report = run(journal, gemms(6), timer=FakeTimer(latency_us=interrupting))
    assert (report.reason, report.measured, report.left) == ("interrupted", 3, 3)
    assert kinds(journal)[-1] == "end"
    assert run(journal, gemms(6)).measured == 3


@pytest.mark.parametrize(
    ("gpu", "name"), [("h200", "NVIDIA H100 80GB HBM3"), ("h100", "NVIDIA H200")], ids=["given", "driver"]
)
def test_a_journal_of_another_gpu_is_refused(journal: Path, gpu: str, name: str) -> None:
    run(journal, gemms(3))
    before = journal.read_bytes()
    with pytest.raises(MeasureError, match="one journal holds one GPU"):
        run(journal, gemms(4), gpu=gpu, monitor=FakeMonitor(name=name))
    assert journal.read_bytes() == before


def test_changed_versions_are_reported(journal: Path) -> None:
    lines: list[str] = []
    run(journal, gemms(2), start={"versions": {"torch": "2.11"}})
    run(journal, gemms(3), start={"versions": {"torch": "2.12"}}, say=lines.append)
    assert any("torch 2.11 -> 2.12" in s for s in lines)


def test_a_full_disk_stops_the_run_with_the_journal_intact(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: bytes) -> int:
        if data.startswith(b'{"type": "row"') and len(row_keys(journal)) == 2:
            write(file, data[:30])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(MeasureError, match="No space left on device"):
        run(journal, gemms(5))
    monkeypatch.undo()
    assert kinds(journal) == ["start", "row", "row"]
    assert run(journal, gemms(5)).measured == 3
    assert Counter(row_keys(journal)) == Counter(p.key for p in gemms(5))
