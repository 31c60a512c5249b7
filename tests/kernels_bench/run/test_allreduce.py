"""All-reduce: ranks merged, dead, hanging and resumed with fakes; over gloo end to end on the CPU."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.errors import MeasureError
from fastroof.operators.registry import OPERATORS
from kernels_bench.grid.grid import load_grid
from kernels_bench.journal import find_journals, read_journal, starts
from kernels_bench.protocol import Point
from kernels_bench.run import allreduce, request, session
from kernels_bench.run.allreduce import joined, measure_allreduce, slowest_rank
from kernels_bench.run.allreduce_points import allreduce_points, usable_worlds
from kernels_bench.run.allreduce_rank import Answer, Broken, Order, Ready, World
from kernels_bench.run.allreduce_ranks import RanksTimeoutError, SpawnedRanks
from kernels_bench.run.run_options import RunOptions, RunReport
from tests.kernels_bench.fakes import (
    FakeClock,
    FakeMonitor,
    FakeProvider,
    FakeTimer,
    command,
    of_type,
    refused,
)

KERNEL = "nccl all_reduce 2.27.5"
OWN = "vllm all-reduce, CustomAllreduce"
STEADY = (9e3, *[500.0] * 20)
COLLECTIVE = {"dtype": "fp16", "collective": "alltoall"}


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce, "vllm_version", lambda: "0.26.0")


class FakeRanks:
    """Ranks of one world: rank r takes 1 + r / 10 of the given time."""

    def __init__(self, num_gpus: int, launcher: str, fakes: FakeWorlds) -> None:
        self.ready = Ready(KERNEL, "GPU")
        self.num_gpus, self.fakes, self.launcher = num_gpus, fakes, launcher
        self.closed = False

    def time(self, order: Order, timeout_s: float = 60.0) -> list[Answer]:
        self.fakes.orders.append((self.num_gpus, order))
        self.fakes.clock.spend(self.fakes.point_s)
        answer = self.fakes.answer(self.num_gpus, order)
        return [
            Answer(tuple(us * (1 + r / 10) for us in answer.replays_us), answer.calls, answer.error,
                   answer.out_of_memory and r == 1, OWN if self.launcher == "vllm" else "")
            for r in range(self.num_gpus)
        ]  # fmt: skip

    def close(self) -> None:
        self.closed = True


class FakeWorlds:
    """Opens fake ranks."""

    def __init__(
        self, answer: Callable[[int, Order], Answer] = lambda *_: Answer(STEADY, 100), point_s: float = 0.5
    ) -> None:
        self.answer, self.point_s = answer, point_s
        self.clock = FakeClock()
        self.opened: list[FakeRanks] = []
        self.orders: list[tuple[int, Order]] = []

    def __call__(self, num_gpus: int, backend: str, timeout_s: float) -> FakeRanks:
        self.opened.append(FakeRanks(num_gpus, backend, self))
        self.clock.spend(10.0)
        return self.opened[-1]


def measure(
    journal: Path, worlds: FakeWorlds, points: Sequence[Point] | None = None, **options: Any
) -> RunReport:
    return measure_allreduce(
        allreduce_points([2, 4]) if points is None else points,
        "nccl",
        FakeMonitor(),
        worlds.clock,
        journal,
        RunOptions(**{"gpu": "h100", "run_id": "r", **options}),
        worlds,
    )


# -- points and worlds -------------------------------------------------------------------------------


def test_the_points_have_the_schema_and_messages_of_256_b_to_512_mib() -> None:
    points = allreduce_points([2, 4, 8])
    schema = OPERATORS["allreduce"]
    names = [c.name for c in (*schema.keys, *schema.axes)]
    assert all(list(p.values) == names for p in points)
    assert len({p.key for p in points}) == len(points) == 3 * 2 * 22
    sizes = {p.values["message_bytes"] for p in points}
    assert (min(sizes), max(sizes)) == (256, 512 * 2**20)
    assert {p.values["mode"] for p in points} == {"graph", "nccl"}


def test_a_grid_may_give_its_own(tmp_path: Path) -> None:
    grid = tmp_path / "g.toml"
    grid.write_text(
        'title = "t"\n[[group]]\nname = "all-reduce"\noperator = "allreduce"\npriority = 1\ndtype = "bf16"\n'
        'num_gpus = [2, 4, 8]\nmode = ["graph", "nccl"]\n'
        f"message_bytes = {{start = 256, stop = {2**29}, factor = 2}}\n"
    )
    assert {p.key for p in load_grid(grid).points()} == {p.key for p in allreduce_points([2, 4, 8])}


def test_worlds_are_those_requested_and_available() -> None:
    assert usable_worlds((), 8) == [2, 4, 8]
    assert usable_worlds((), 3) == [2]
    assert usable_worlds((3, 2, 3), 4) == [2, 3]
    with pytest.raises(MeasureError, match="over 8 GPUs: torch sees 4 here"):
        usable_worlds((2, 8), 4)
    with pytest.raises(MeasureError, match="over 2 GPUs: torch sees 1 here"):
        usable_worlds((), 1)
    with pytest.raises(MeasureError, match=r"--gpus 1: .* at least 2"):
        usable_worlds((1,), 4)


# -- merging the ranks -------------------------------------------------------------------------------


def test_a_row_is_the_slowest_rank_as_a_whole() -> None:
    steady = Answer((900.0, 100.0, 100.0, 100.0), 10)
    unsteady = Answer((900.0, 80.0, 110.0, 140.0), 10)
    timing = slowest_rank([steady, unsteady, steady])
    assert (timing.latency_us, timing.p25_us, timing.p75_us, timing.min_us) == (11.0, 9.5, 12.5, 8.0)
    assert timing.num_replays == 3


def test_ranks_that_timed_different_calls_are_refused() -> None:
    with pytest.raises(MeasureError, match="2 replays of 10 calls, 2 replays of 20 calls"):
        slowest_rank([Answer((1.0, 1.0), 10), Answer((1.0, 1.0), 20)])


# -- a run -------------------------------------------------------------------------------------------


def test_rows_are_complete_and_worlds_are_opened_once_each(tmp_path: Path) -> None:
    worlds = FakeWorlds()
    report = measure(tmp_path / "j", worlds)
    assert (report.reason, report.measured, report.left) == ("complete", 88, 0)
    opened = [(ranks.launcher, ranks.num_gpus) for ranks in worlds.opened]
    assert opened == [("nccl", 2), ("nccl", 4), ("vllm", 2), ("vllm", 4)]
    assert all(ranks.closed for ranks in worlds.opened)
    records = read_journal(tmp_path / "j")
    assert records[0]["type"] == "start"
    assert records[-1]["type"] == "end"
    rows = {r["key"]: r for r in of_type(records, "row")}
    assert set(rows) == {p.key for p in allreduce_points([2, 4])}
    for row in rows.values():
        slowest = 5.0 * (1.1 if row["values"]["num_gpus"] == 2 else 1.3)
        assert row["latency_us"] == pytest.approx(slowest, rel=1e-12)
        ran = ("torch", KERNEL) if row["values"]["mode"] == "nccl" else ("vllm", OWN)
        assert (row["provider"], row["kernel"], row["num_replays"]) == (*ran, 20)
        assert row["sm_clock_mhz"] == 1900.0
        assert row["remeasured"] is False


def test_unsteady_replays_are_measured_once_more(tmp_path: Path) -> None:
    tries = 0

    def answer(num_gpus: int, order: Order) -> Answer:
        nonlocal tries
        tries += 1
        return Answer((1.0, *[400.0, 600.0] * 10) if tries == 1 else STEADY, 100)

    report = measure(tmp_path / "j", FakeWorlds(answer), allreduce_points([2])[:1])
    assert (report.measured, report.remeasured, tries) == (1, 1, 2)
    (row,) = of_type(read_journal(tmp_path / "j"), "row")
    assert row["latency_us"] == row["min_us"]


def test_a_rank_that_dies_ends_the_run_and_a_second_run_goes_on(tmp_path: Path) -> None:
    def dying(num_gpus: int, order: Order) -> Answer:
        if len(worlds.orders) == 31:
            raise MeasureError("rank 1 of 2 died")
        return Answer(STEADY, 100)

    worlds = FakeWorlds(dying)
    with pytest.raises(MeasureError, match="rank 1 of 2 died"):
        measure(tmp_path / "j", worlds)
    assert worlds.opened[-1].closed
    before = of_type(read_journal(tmp_path / "j"), "row")
    assert len(before) == 30
    again = FakeWorlds()
    report = measure(tmp_path / "j", again)
    assert (report.before, report.measured, report.left) == (30, 58, 0)
    rows = of_type(read_journal(tmp_path / "j"), "row")
    assert rows[:30] == before
    assert len({r["key"] for r in rows}) == len(rows) == 88
    assert measure(tmp_path / "j", again).before == 88
    assert len(again.opened) == 3, "nothing is spawned where nothing is left"


def test_a_deadline_leaves_the_rest(tmp_path: Path) -> None:
    worlds = FakeWorlds(point_s=2.0)
    report = measure(tmp_path / "j", worlds, deadline_s=40.0, reserve_s=3.0)
    assert report.reason == "deadline"
    assert report.elapsed_s <= 37.0
    assert report.measured == 13
    assert report.left == 88 - 13
    assert worlds.opened[-1].closed
    none = measure(tmp_path / "k", FakeWorlds(), deadline_s=5.0)
    assert (none.reason, none.measured) == ("deadline", 0)


def test_a_hang_until_the_deadline_is_the_deadline(tmp_path: Path) -> None:
    def hanging(num_gpus: int, order: Order) -> Answer:
        worlds.clock.spend(60.0)
        raise RanksTimeoutError("rank 0 did not answer")

    worlds = FakeWorlds(hanging)
    assert measure(tmp_path / "j", worlds, deadline_s=40.0).reason == "deadline"
    worlds = FakeWorlds(hanging)
    with pytest.raises(RanksTimeoutError):
        measure(tmp_path / "k", worlds)


def test_one_rank_out_of_memory_skips_the_point_on_all(tmp_path: Path) -> None:
    large = 2**29
    worlds = FakeWorlds(lambda _, order: Answer(STEADY, 100, 0.0, order.message_bytes == large))
    report = measure(tmp_path / "j", worlds)
    assert report.skipped == {"oom": 4}
    skips = of_type(read_journal(tmp_path / "j"), "skip")
    assert {s["values"]["message_bytes"] for s in skips} == {large}


def test_a_wrong_sum_stops_its_family_and_gives_no_row(tmp_path: Path) -> None:
    lines: list[str] = []
    worlds = FakeWorlds(
        lambda num_gpus, order: (
            Answer(error=0.5) if (num_gpus, order.mode) == (2, "graph") else Answer(STEADY, 100)
        )
    )
    report = measure(tmp_path / "j", worlds, say=lines.append)
    assert (report.measured, report.skipped) == (66, {"reference": 22})
    assert sum((n, order.mode) == (2, "graph") for n, order in worlds.orders) == 1
    (sentence,) = lines
    assert "relative error 0.5 against float64" in sentence
    infinite = FakeWorlds(lambda *_: Answer(error=float("inf")))
    assert measure(tmp_path / "k", infinite).measured == 0


def test_what_no_rank_can_time_is_skipped_before_any_is_spawned(tmp_path: Path) -> None:
    values = {"dtype": "bf16", "num_gpus": 2, "mode": "graph", "message_bytes": 256}
    bad = [
        Point("allreduce", {**values, "dtype": "fp8"}),
        Point("allreduce", {**values, "mode": "eager"}),
        Point("allreduce", {**values, "message_bytes": 257}),
        Point("allreduce", {**values, "dtype": "fp16"}),
        Point("collective", {**COLLECTIVE, "num_gpus": 3, "message_bytes": 256}),
        Point("collective", {**COLLECTIVE, "num_gpus": 2, "message_bytes": 255}),
    ]
    worlds = FakeWorlds()
    assert measure(tmp_path / "j", worlds, bad).skipped == {"unsupported": 6}
    assert not worlds.opened
    with pytest.raises(MeasureError, match="is not a collective"):
        measure(tmp_path / "k", worlds, [Point("gemm", {"dtype": "bf16", "m": 1, "n": 1, "k": 1})])


def test_without_vllm_its_own_all_reduce_has_no_row_and_nccl_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allreduce, "vllm_version", lambda: "")
    worlds = FakeWorlds()
    report = measure(tmp_path / "j", worlds, allreduce_points([2]))
    assert (report.measured, report.skipped) == (22, {"unsupported": 22})
    assert {order.mode for _, order in worlds.orders} == {"nccl"}
    skips = of_type(read_journal(tmp_path / "j"), "skip")
    assert {s["reason"] for s in skips} == {
        "mode graph is an engine's own all-reduce: it needs vllm, mode nccl does not"
    }


def test_a_journal_of_another_gpu_is_refused(tmp_path: Path) -> None:
    measure(tmp_path / "j", FakeWorlds(), allreduce_points([2])[:1])
    with pytest.raises(MeasureError, match=r"measured on h100 .* this is h200"):
        measure(tmp_path / "j", FakeWorlds(), gpu="h200")


# -- processes ---------------------------------------------------------------------------------------


def _ready(pipe: Connection, device: str = "GPU") -> Any:
    pipe.send(Ready("fake", device))
    return pipe.recv()


def obeys(rank: int, world: World, pipe: Connection) -> None:
    order = _ready(pipe)
    while order is not None:
        pipe.send(Answer((1.0, 2.0 + rank), world.num_gpus))
        order = pipe.recv()


def dies(rank: int, world: World, pipe: Connection) -> None:
    _ready(pipe)
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def dies_early(rank: int, world: World, pipe: Connection) -> None:
    if rank == 0:
        os._exit(3)
    time.sleep(600)


def hangs(rank: int, world: World, pipe: Connection) -> None:
    _ready(pipe)
    if rank == 0:
        pipe.send(Answer((1.0, 1.0), 1))
    time.sleep(600)


def breaks(rank: int, world: World, pipe: Connection) -> None:
    _ready(pipe)
    if rank == 1:
        pipe.send(Broken("RuntimeError: NCCL error"))
    time.sleep(600)


def differs(rank: int, world: World, pipe: Connection) -> None:
    _ready(pipe, f"GPU {rank}")


ORDER = Order("bf16", "eager", 256, 0, 2**30)


@pytest.mark.slow
def test_every_rank_answers_and_ends() -> None:
    ranks = SpawnedRanks(2, "gloo", 60.0, obeys)
    try:
        assert ranks.time(ORDER, 60.0) == [Answer((1.0, 2.0), 2), Answer((1.0, 3.0), 2)]
        assert len(ranks.time(ORDER, 60.0)) == 2
    finally:
        ranks.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (dies, r"rank 1 of 2 died for 256 B \(eager\) \(exit code 7\)"),
        (breaks, r"rank 1 of 2 failed for 256 B \(eager\): RuntimeError: NCCL error"),
        (hangs, r"rank 1 of 2 did not answer for 256 B \(eager\) within 0.5 s"),
    ],
)
def test_a_rank_that_fails_is_named_and_none_is_left(target: Any, words: str) -> None:
    ranks = SpawnedRanks(2, "gloo", 60.0, target)
    processes = list(ranks._processes)
    try:
        with pytest.raises(MeasureError, match=words):
            ranks.time(ORDER, 0.5 if target is hangs else 60.0)
    finally:
        ranks.close()
    # ended by force: none was waited for until it had slept
    assert all(process.exitcode != 0 for process in processes)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_ranks_that_never_meet_are_an_error() -> None:
    with pytest.raises(MeasureError, match=r"rank 0 of 2 died to meet \(exit code 3\)"):
        SpawnedRanks(2, "gloo", 60.0, dies_early)
    with pytest.raises(MeasureError, match=r"the GPUs differ \(GPU 0, GPU 1\)"):
        SpawnedRanks(2, "gloo", 60.0, differs)
    assert not multiprocessing.active_children()


# -- as a part of run --------------------------------------------------------------------------------


@pytest.fixture
def gpu_run(monkeypatch: pytest.MonkeyPatch) -> FakeWorlds:
    """A host with an H100, all of it fake; how many GPUs it has is up to the test."""
    worlds = FakeWorlds(lambda *_: Answer(tuple(1e4 * us for us in STEADY), 1))
    monkeypatch.setattr(request, "known_providers", lambda: [FakeProvider("torch"), FakeProvider("cpu")])
    monkeypatch.setattr(session, "usable_bytes", lambda on_cpu: 2**30)
    monkeypatch.setattr("kernels_bench.run.monitor.open_monitor", FakeMonitor)
    monkeypatch.setattr(
        "kernels_bench.run.timing.GraphTimer", lambda: FakeTimer(latency_us=lambda *_: (5e4, 0.0))
    )
    real = allreduce.measure_allreduce

    def with_fakes(points: Any, backend: Any, monitor: Any, clock: Any, *rest: Any) -> RunReport:
        worlds.clock.now_s = clock()
        return real(points, backend, monitor, clock, *rest, open_ranks=worlds)

    monkeypatch.setattr(allreduce, "measure_allreduce", with_fakes)
    return worlds


def test_run_with_four_gpus_measures_all_reduce_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_run: FakeWorlds
) -> None:
    monkeypatch.setattr("kernels_bench.run.allreduce_points.visible_gpus", lambda: 4)
    folder = tmp_path / "out"
    result = command("run", "smoke", "-o", folder, "--deadline", "600")
    assert result.exit_code == 0, result.output
    alone = len(load_grid("smoke").points())
    assert f"complete: {alone + 88 + 132} points measured" in result.stdout
    assert "another source" not in result.stderr
    tables = fastroof.load_tables(folder)
    looked_up = tables.lookup("allreduce", num_gpus=4, message_bytes=2**20, mode="graph")
    assert float(looked_up.latency_us) == pytest.approx(500.0 * 1e4 * 1.3)
    for name in ("all_gather", "reduce_scatter", "alltoall"):
        looked_up = tables.lookup("collective", collective=name, num_gpus=2, message_bytes=2**20)
        assert float(looked_up.latency_us) == pytest.approx(500.0 * 1e4 * 1.1)
    result = command("resume", folder)
    assert f"{alone + 88 + 132} before" in result.stdout, result.output
    assert [(one.launcher, one.num_gpus) for one in gpu_run.opened] == [
        ("nccl", 2), ("nccl", 4), ("vllm", 2), ("vllm", 4),
    ]  # fmt: skip


def test_run_with_one_gpu_prints_one_line_that_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_run: FakeWorlds
) -> None:
    monkeypatch.setattr("kernels_bench.run.allreduce_points.visible_gpus", lambda: 1)
    result = command("run", "smoke", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert sum("all-reduce is left to another source" in line for line in result.stderr.splitlines()) == 1
    assert not gpu_run.opened
    result = command("run", "smoke", "-o", tmp_path / "gemm", "--only", "gemm")
    assert "all-reduce" not in result.stderr


def test_only_all_reduce_measures_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_run: FakeWorlds
) -> None:
    monkeypatch.setattr("kernels_bench.run.allreduce_points.visible_gpus", lambda: 2)
    folder = tmp_path / "out"
    result = command("run", "smoke", "-o", folder, "--only", "allreduce", "--budget", "60")
    assert result.exit_code == 0, result.output
    (journal,) = find_journals(folder)
    assert {r["operator"] for r in of_type(read_journal(journal), "row")} == {"allreduce"}
    command("run", "smoke", "-o", tmp_path / "gemm", "--only", "gemm")
    assert len(gpu_run.opened) == 2
    result = command("run", "smoke", "-o", tmp_path / "others", "--only", "collective", "--budget", "60")
    assert result.exit_code == 0, result.output
    assert {order.collective for _, order in gpu_run.orders[-66:]} == {
        "all_gather",
        "reduce_scatter",
        "alltoall",
    }
    assert {order.mode for _, order in gpu_run.orders[-66:]} == {"nccl"}


def test_points_of_the_grid_beyond_the_gpus_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_run: FakeWorlds
) -> None:
    monkeypatch.setattr("kernels_bench.run.allreduce_points.visible_gpus", lambda: 2)
    grid = tmp_path / "g.toml"
    grid.write_text(
        'title = "t"\n[[group]]\nname = "all-reduce"\noperator = "allreduce"\npriority = 1\ndtype = "bf16"\n'
        'num_gpus = [2, 4]\nmode = "graph"\nmessage_bytes = [1024, 2048]\n'
    )
    result = command("run", grid, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "2 collectives of the grid need more than the 2 GPUs here" in result.stderr
    assert [(n, o.message_bytes) for n, o in sorted(gpu_run.orders, key=str)] == [(2, 1024), (2, 2048)]


def test_tables_are_written_where_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_run: FakeWorlds
) -> None:
    def dying(num_gpus: int, order: Order) -> Answer:
        raise MeasureError("rank 1 of 2 died")

    gpu_run.answer = dying
    monkeypatch.setattr("kernels_bench.run.allreduce_points.visible_gpus", lambda: 2)
    folder = tmp_path / "out"
    result = command("run", "smoke", "-o", folder)
    assert result.exit_code == 2
    assert "kernels-bench: error: rank 1 of 2 died" in result.stderr
    assert float(fastroof.load_tables(folder).lookup("gemm", m=256, n=4096, k=4096).latency_us) == 5e4


def test_two_parts_are_joined() -> None:
    first = RunReport("deadline", 3, 1, {"oom": 1}, 2, 4, 10.0)
    second = RunReport("complete", 5, 2, {"oom": 1, "error": 1}, 1, 0, 3.0)
    assert joined(first, second) == RunReport("deadline", 8, 3, {"oom": 2, "error": 1}, 3, 4, 13.0)
    assert joined(second, first).reason == "deadline"


# -- the command -------------------------------------------------------------------------------------


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_bench.run.allreduce_points.visible_gpus", lambda: 1)
    folder = tmp_path / "out"
    assert "over 8 GPUs: torch sees 1 here" in refused("allreduce", "-o", folder, "--gpus", "2,8")
    assert "over 2 GPUs: torch sees 1 here" in refused("allreduce", "-o", folder)
    assert "--gpus 'two' is not a number" in refused("allreduce", "-o", folder, "--gpus", "two")
    assert "unknown backend 'mpi'; there are nccl, gloo" in refused(
        "allreduce", "-o", folder, "--backend", "mpi"
    )
    assert "above zero, got -1" in refused("allreduce", "-o", folder, "--deadline", "-1")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_over_gloo_end_to_end(tmp_path: Path) -> None:
    """Two real ranks, checked sums, a journal, tables that load; then the same again, and a third rank."""
    folder = tmp_path / "out"
    result = command("allreduce", "-o", folder, "--backend", "gloo", "--gpus", "2", "--deadline", "300")
    assert result.exit_code == 0, result.output
    assert "complete: 5 all-reduces measured" in result.stdout
    tables = fastroof.load_tables(folder)
    assert tables.gpu.name == "cpu"
    (journal,) = find_journals(folder)
    rows = of_type(read_journal(journal), "row")
    assert len(rows) == 5
    for row in rows:
        found = tables.lookup("allreduce", **row["values"])
        assert float(found.latency_us) == row["latency_us"]
        assert row["kernel"].startswith("gloo all_reduce (torch ")
        assert row["min_us"] <= row["p25_us"] <= row["latency_us"] <= row["p75_us"]
        assert row["num_replays"] >= 5
    (start,) = starts(read_journal(journal))
    assert (start["part"], start["backend"], start["gpu"]) == ("allreduce", "gloo", "cpu")

    result = command("allreduce", "-o", folder, "--backend", "gloo", "--gpus", "2,3")
    assert "complete: 5 all-reduces measured" in result.stdout, result.output
    assert "5 before" in result.stdout
    assert len(of_type(read_journal(journal), "row")) == 10
    assert command("resume", folder).exit_code == 2


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_collectives_over_gloo_end_to_end(tmp_path: Path) -> None:
    """Two real ranks: the result of each is checked, tables load, and all-reduces are measured too."""
    folder = tmp_path / "out"
    result = command("collectives", "-o", folder, "--backend", "gloo", "--deadline", "300")
    assert result.exit_code == 0, result.output
    assert "complete: 15 collectives measured" in result.stdout
    (journal,) = find_journals(folder)
    rows = of_type(read_journal(journal), "row")
    tables = fastroof.load_tables(folder)
    for row in rows:
        values = row["values"]
        assert float(tables.lookup("collective", **values).latency_us) == row["latency_us"]
        assert row["kernel"].startswith(f"gloo {values['collective']} (torch ")
    assert {row["values"]["dtype"] for row in rows} == {OPERATORS["collective"].defaults["dtype"]}
    assert "holds other collectives only" in command("resume", folder).stderr
    result = command("allreduce", "-o", folder, "--backend", "gloo")
    assert "complete: 5 all-reduces measured" in result.stdout, result.output
    assert len(of_type(read_journal(journal), "row")) == 20


def sends_recorded(rank: int, world: World, pipe: Connection) -> None:
    """A rank that checks each call's tensors, as the schema's message_bytes has them."""
    import torch.distributed as dist

    from kernels_bench.run.allreduce_rank import run_rank

    def checked(right: Callable[..., Any], share: Callable[[int], int]) -> Callable[..., Any]:
        def call(output: Any, message: Any, *arguments: Any, **options: Any) -> Any:
            assert message.nbytes == 4096 * world.num_gpus, "what each GPU contributes"
            assert output.nbytes == share(message.nbytes)
            assert output.is_contiguous()
            assert message.is_contiguous()
            assert output.data_ptr() != message.data_ptr()
            return right(output, message, *arguments, **options)

        return call

    dist.all_gather_into_tensor = checked(dist.all_gather_into_tensor, lambda size: size * world.num_gpus)
    dist.reduce_scatter_tensor = checked(dist.reduce_scatter_tensor, lambda size: size // world.num_gpus)
    dist.all_to_all_single = checked(dist.all_to_all_single, lambda size: size)
    run_rank(rank, world, pipe)


def misplaced(rank: int, world: World, pipe: Connection) -> None:
    """Collectives whose parts come in another GPU's place; of a sum, one part twice."""
    import torch.distributed as dist

    from kernels_bench.run.allreduce_rank import run_rank

    def turned(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Any, message: Any) -> None:
            right(output, message)
            if rank == 0:
                output.copy_(output.roll(len(output) // world.num_gpus))

        return call

    dist.all_gather_into_tensor = turned(dist.all_gather_into_tensor)
    dist.reduce_scatter_tensor = turned(dist.reduce_scatter_tensor)
    dist.all_to_all_single = turned(dist.all_to_all_single)
    run_rank(rank, world, pipe)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("num_gpus", [pytest.param(2, marks=pytest.mark.release), 3])
def test_each_collective_sends_its_message_and_a_misplaced_part_is_caught(num_gpus: int) -> None:
    for target, is_right in ((sends_recorded, True), (misplaced, False)):
        ranks = SpawnedRanks(num_gpus, "gloo", 120.0, target)
        try:
            for name in ("all_gather", "reduce_scatter", "alltoall"):
                order = Order("fp16", "eager", 4096 * num_gpus, 5, 2**24, name)
                answers = ranks.time(order, 60.0)
                assert len({answer.error for answer in answers}) == 1, "the ranks agree on the error"
                # what is only moved is exact; a sum of halves is rounded
                most = (1e-3 if name == "reduce_scatter" else 0.0) if is_right else math.inf
                least = 0.0 if is_right else 0.1
                assert least <= answers[0].error <= most, name
                assert bool(answers[0].replays_us) is is_right
        finally:
            ranks.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_sums_agree_with_float64_and_a_wrong_one_is_caught() -> None:
    from kernels_bench.run.check import BOUNDS

    for target, is_right in ((None, True), (wrong_sum, False)):
        extra = {} if target is None else {"target": target}
        ranks = SpawnedRanks(3, "gloo", 120.0, **extra)
        try:
            answers = ranks.time(Order("bf16", "eager", 4096, 5, 2**24), 60.0)
        finally:
            ranks.close()
        assert len({answer.error for answer in answers}) == 1, "the ranks agree on the error"
        assert (0.0 < answers[0].error <= BOUNDS["bf16"]) is is_right
        assert bool(answers[0].replays_us) is is_right
        if is_right:
            assert len({(a.calls, len(a.replays_us)) for a in answers}) == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllms_own_group_reduces_and_names_what_ran() -> None:
    ranks = SpawnedRanks(2, "vllm", 180.0)
    try:
        answers = ranks.time(Order("bf16", "graph", 4096, 5, 2**24), 60.0)
    finally:
        ranks.close()
    assert all(0.0 < answer.error < 1e-2 and answer.replays_us for answer in answers)
    assert {answer.kernel.partition(", ")[0] for answer in answers} == {"vllm all-reduce"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_one_rank_without_room_does_not_block_the_others() -> None:
    ranks = SpawnedRanks(2, "gloo", 120.0)
    try:
        none = ranks.time(Order("bf16", "eager", 4096, 5, 4096), 60.0)
        assert [a.out_of_memory for a in none] == [True, True]
        assert not any(a.out_of_memory for a in ranks.time(Order("bf16", "eager", 4096, 5, 2**24), 60.0))
    finally:
        ranks.close()


def wrong_sum(rank: int, world: World, pipe: Connection) -> None:
    """A collective that doubles one rank's part on one rank."""
    import torch.distributed as dist

    from kernels_bench.run.allreduce_rank import run_rank

    right = dist.all_reduce

    def wrong(tensor: Any, *arguments: Any, **options: Any) -> None:
        right(tensor, *arguments, **options)
        if rank == 1 and not options:
            tensor.mul_(2.0)

    dist.all_reduce = wrong
    run_rank(rank, world, pipe)
