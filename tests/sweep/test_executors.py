"""The Ray executor on a real local cluster of two nodes, one of which is killed during the sweep."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastroof import SweepError, compile_plan
from fastroof.sweep import checkpoint, load_spec, run_sweep
from fastroof.sweep.executors import evaluate_task, ray_results, task_units
from fastroof.sweep.kind import load_tables_by_gpu
from fastroof.sweep.kinds import sweep_of
from fastroof.sweep.packed_results import unpacked_results

SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b", "qwen3-8b"],
    "tp": [1, 2],
    "isl": {"start": 100, "stop": 3000, "step": 100},
    "osl": [100, 500],
    "clients": {"start": 1, "stop": 256, "step": 1},
    "keep": "pareto",
}


def test_tasks_hold_enough_work_and_every_unit(cut_units: Callable[[int], None]) -> None:
    cut_units(1000)
    steps = {"models": ["llama-3.1-8b"], "tp": [1, 2, 4], "batch_size": list(range(1, 101)), "kv_len": 4096}
    for spec, weight in ((load_spec(SPEC), 4), (load_spec(steps), 1)):
        sweep = sweep_of(spec)
        listed = sweep.units()
        for least in (1, 250, 10**5, 10**9):
            tasks = task_units(sweep, listed, least)
            assert [unit for task in tasks for unit in task] == listed
            sizes = [weight * sum(unit.size for unit in task) for task in tasks]
            assert all(size >= least for size in sizes[:-1])
            # and no more than needed: without its last unit a task is too small
            assert all(weight * sum(unit.size for unit in task[:-1]) < least for task in tasks)


@pytest.mark.slow
def test_what_travels_to_workers_pickles() -> None:
    # a unit a plan, and each plan a group: nothing is dropped between units
    sweep = sweep_of(load_spec({**SPEC, "isl": 1000, "keep": "best", "per": ["model", "tp"]}))
    tables_by_gpu = load_tables_by_gpu(sweep)
    listed = sweep.units()
    there = pickle.loads(pickle.dumps((sweep, listed, tables_by_gpu)))
    expected = [sweep.evaluate(unit, tables_by_gpu) for unit in listed]
    found = unpacked_results(pickle.loads(pickle.dumps(evaluate_task(*there)))).values()
    for here, distant in zip(expected, found, strict=True):
        assert (here.rows, here.counts) == (distant.rows, distant.counts)
    plan = compile_plan("llama-3.1-8b", "h100", tables_by_gpu["h100"].tables, engine="kernels")
    assert pickle.loads(pickle.dumps(plan)).decode_us(64, 4096) == plan.decode_us(64, 4096)
    assert len(pickle.dumps(listed[0])) < 1000


class _Lost(Exception):
    """What Ray raises where it gave a task up."""


class _Ray(ModuleType):
    """A connected Ray of one processor, which gives up the first tasks a given number of times."""

    def __init__(self, losses: int) -> None:
        super().__init__("ray")
        self.exceptions = ModuleType("ray.exceptions")
        for name in ("WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"):
            setattr(self.exceptions, name, _Lost)
        self.exceptions.RayTaskError = type("RayTaskError", (Exception,), {})  # type: ignore[attr-defined]
        self.losses, self.submitted = losses, 0

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Any:
        def wrapped(work: Callable[..., Any]) -> Any:
            def submit(*arguments: Any) -> Callable[[], Any]:
                self.submitted += 1
                return lambda: work(*arguments)

            return SimpleNamespace(remote=submit)

        return wrapped

    def get(self, reference: Callable[[], Any]) -> Any:
        if self.losses:
            self.losses -= 1
            raise _Lost
        return reference()

    def cancel(self, reference: Any) -> None:
        pass


def test_a_task_that_ray_gives_up_is_handed_in_three_times_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(load_spec({"models": ["llama-3.1-8b"], "tp": [1, 2], "batch_size": 1, "kv_len": 64}))
    tables, listed = load_tables_by_gpu(sweep), sweep.units()
    assert len(listed) == 2

    def results(ray: _Ray) -> list[Any]:
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
        return list(ray_results(sweep, listed, tables, task_evaluations=1))

    expected = [sweep.evaluate(unit, tables).rows for unit in listed]
    for losses in range(4):
        ray = _Ray(losses)
        assert [result.rows for result in results(ray)] == expected
        assert ray.submitted == len(listed) + losses
    ray = _Ray(4)
    with pytest.raises(SweepError, match=r"Ray lost the units 0 to 0 repeatedly.*; --resume continues"):
        results(ray)
    # and no more unneeded tasks are handed in
    assert ray.submitted == len(listed) + 3


_ENDED = """
import os
init, remote = lambda **options: None, lambda **options: id
put = lambda value: os._exit(1)
"""


def test_a_ray_that_ends_its_process_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "path" / "ray").mkdir(parents=True)
    (tmp_path / "path" / "ray" / "__init__.py").write_text(_ENDED)
    (tmp_path / "path" / "ray" / "exceptions.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    output = tmp_path / "results" / "r.parquet"
    output.parent.mkdir()
    with pytest.raises(SweepError, match=r"^Ray ended: .*; --resume continues with what is done$"):
        run_sweep({**SPEC, "isl": 1000}, output, "ray")
    assert list(output.parent.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_without_ray_it_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SweepError, match=r"fastroof\[ray\]"):
        run_sweep({**SPEC, "isl": 1000}, tmp_path / "r.parquet", "ray")
    with pytest.raises(SweepError, match="address needs executor='ray'"):
        run_sweep(SPEC, tmp_path / "r.parquet", address="auto")
    assert list(tmp_path.iterdir()) == []


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray.exceptions", reason="the extra `ray` is not installed")
    with pytest.raises(SweepError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        run_sweep({**SPEC, "isl": 1000}, tmp_path / "r.parquet", "ray", address="127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with two processors each, and a head with none."""
    pytest.importorskip("ray.exceptions", reason="the extra `ray` is not installed")
    with warnings.catch_warnings():
        # Ray's own: sockets and log files that it leaves to be collected, and what it deprecates
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [started.add_node(num_cpus=2) for _ in range(2)]
        started.wait_for_nodes()
        yield started, nodes
        started.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cluster_that_loses_a_node_gives_the_local_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_units: Callable[[int], None], cluster: Any
) -> None:
    started, nodes = cluster
    cut_units(2**11)
    monkeypatch.setitem(ray_results.__kwdefaults__, "task_evaluations", 20_000)
    local = run_sweep(SPEC, tmp_path / "local.parquet")
    at: list[float] = []

    def kill_a_node(done: int, total: int) -> None:
        if done > 0.2 * total and not at:
            at.append(done / total)
            started.remove_node(nodes[1], allow_graceful=False)

    distant = run_sweep(SPEC, tmp_path / "ray.parquet", "ray", address=started.address, progress=kill_a_node)
    assert at
    assert at[0] < 0.5
    assert pq.read_table(tmp_path / "ray.parquet").equals(pq.read_table(tmp_path / "local.parquet"))
    assert distant.best == local.best
    assert distant.infeasible == local.infeasible


def _kill(name: str) -> bool:
    """Kill a process that a driver of this one has started; return whether there is one of that name."""
    parents, names = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[status.parent.name] = status.read_text().rpartition(")")[2].split()[1]
            names[status.parent.name] = (status.parent / "cmdline").read_text()
    for process in [process for process, command in names.items() if name in command]:
        above = [process]
        while above[-1] in parents:
            above.append(parents[above[-1]])
        if str(os.getpid()) in above and any("drive_ray" in names.get(one, "") for one in above):
            os.kill(int(process), signal.SIGKILL)
            return True
    return False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the cluster above
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("name", ["ray::evaluate_task", "raylet/raylet"])
def test_a_killed_worker_is_replaced_and_a_killed_node_ends_the_sweep_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cut_units: Callable[[int], None],
    name: str,
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the extra `ray` is not installed")
    cut_units(2**11)
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 0.0)
    monkeypatch.setitem(ray_results.__kwdefaults__, "task_evaluations", 20_000)
    run_sweep(SPEC, tmp_path / "local.parquet")
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed and done < 0.5 * total and _kill(name):
            killed.append(done)

    output = tmp_path / "results" / "ray.parquet"
    output.parent.mkdir()
    if name == "raylet/raylet":
        # Ray ends its process, or reports first that the node is lost
        with pytest.raises(
            SweepError, match=r"^Ray (ended|failed|lost).*; --resume continues with what is done$"
        ):
            run_sweep(SPEC, output, "ray", threads=2, progress=kill)
        assert [path.name for path in output.parent.iterdir()] == [".ray.parquet.parts"]
        run_sweep(SPEC, output, resume=True)
    else:
        run_sweep(SPEC, output, "ray", threads=2, progress=kill)
    assert killed
    assert capfd.readouterr() == ("", "")
    assert output.read_bytes() == (tmp_path / "local.parquet").read_bytes()
    assert list(output.parent.iterdir()) == [output]
