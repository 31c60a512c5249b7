"""A sweep that was killed goes on, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastroof import SweepError
from fastroof.sweep import checkpoint, load_spec, run_sweep
from fastroof.sweep.checkpoint import Checkpoint, parts_folder
from fastroof.sweep.kinds import sweep_of
from fastroof.sweep.packed_results import packed_results, unpacked_results
from fastroof.sweep.steps import spec as step_units
from fastroof.sweep.units import UnitResult
from tests.sweep.conftest import stopped_after

CHECKOUT = Path(__file__).resolve().parents[2]
DEPLOYMENTS: dict[str, Any] = {
    "models": ["llama-3.1-8b", "qwen3-8b"],
    "tp": [1, 2],
    "isl": [500, 2000],
    "osl": [100, 500],
    "clients": [1, 8, 64, 256],
    "constraints": {"tpot_ms": 20.0},
    "histogram": True,
}
STEPS: dict[str, Any] = {
    "models": ["llama-3.1-8b", "llama-2-70b"],
    "tp": [1, 2],
    "batch_size": [1, 8, 64],
    "kv_len": [1024, 8192, 100_000],
    "keep": "all",
}
SPECS = {
    **{keep: {**DEPLOYMENTS, "keep": keep} for keep in ("best", "pareto", "all")},
    "steps": STEPS,
}
UNIT_SIZE = 5

# Many small units, a part after each, and a little time for each: there is always something to kill.
SLOW_CHILD = """
import sys, time
from fastroof.sweep import checkpoint
from fastroof.sweep.deployments import DeploymentSweep, kind as deployment_units
from fastroof.sweep.steps import StepSweep, spec as step_units
checkpoint.PART_EVERY_S = 0.0
step_units.EVALUATIONS_A_UNIT = step_units.ROWS_A_UNIT = {size}
deployment_units.CANDIDATES_A_UNIT = deployment_units.KEPT_A_UNIT = {size}
def slowed(evaluate):
    def slowly(*args):
        time.sleep(0.03)
        return evaluate(*args)
    return slowly
for kind in (StepSweep, DeploymentSweep):
    kind.evaluate = slowed(kind.evaluate)
from fastroof.cli import main
main()
"""


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch, cut_units: Callable[[int], None]) -> None:
    cut_units(UNIT_SIZE)
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 0.0)


def child(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = ["sweep", "spec.toml", "--quiet", "--threads", "1", "-o", "r.parquet", *options]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_CHILD.format(size=UNIT_SIZE), *command],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def write_toml(spec: dict[str, Any], path: Path) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in spec.items() if not isinstance(value, dict)]
    for key, table in spec.items():
        if isinstance(table, dict):
            lines += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    path.write_text("\n".join(lines))


@pytest.fixture
def whole(tmp_path: Path) -> Callable[[Any], tuple[Any, Any]]:
    """Rows of an uninterrupted run."""

    def run(spec: Any) -> tuple[Any, Any]:
        summary = run_sweep(spec, tmp_path / "whole.parquet")
        return summary, pq.read_table(tmp_path / "whole.parquet")

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        # each kind of sweep with one of the errors, each error with two kinds; the others before a release
        pytest.param(name, error, marks=[pytest.mark.release] if (i + j) % 2 else [])
        for i, name in enumerate(SPECS)
        for j, error in enumerate((KeyboardInterrupt, OSError))
    ],
)
def test_what_was_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, name: str, error: type[BaseException]
) -> None:
    # one part of several units, written when it stops
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 1e9)
    spec = SPECS[name]
    output = tmp_path / "r.parquet"
    total = len(sweep_of(load_spec(spec)).units())
    assert total > 5
    assert stopped_after(spec, output, 3, error) == 3
    assert [path.name for path in parts_folder(output).glob("*.arrow")] == ["000000000.arrow"]
    assert stopped_after(spec, output, 2, error, resume=True) == 2
    progress: list[int] = []
    summary = run_sweep(spec, output, resume=True, progress=lambda done, _: progress.append(done))
    assert len(progress) == total
    expected, rows = whole(spec)
    assert pq.read_table(output).equals(rows)
    for key in set(vars(expected)) - {"evaluate_s", "total_s", "output"}:
        assert getattr(summary, key) == getattr(expected, key), key
    assert not parts_folder(output).exists()


def test_a_shorter_sweep_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", 1e9)
    written: list[str] = []
    replace = os.replace

    def noted(unfinished: Path, place: Path, **folders: int) -> None:
        written.append(os.path.basename(place))
        replace(unfinished, place, **folders)

    monkeypatch.setattr(os, "replace", noted)
    run_sweep(STEPS, tmp_path / "r.parquet", resume=True)
    assert written == ["r.parquet"]
    monkeypatch.setattr(checkpoint, "ROWS_A_PART", 1)
    run_sweep(STEPS, tmp_path / "r.parquet")
    assert "manifest.json" in written


def test_an_unfinished_run_is_neither_dropped_nor_continued_unasked(tmp_path: Path, whole: Any) -> None:
    output = tmp_path / "r.parquet"
    stopped_after(STEPS, output, 3, KeyboardInterrupt)
    with pytest.raises(SweepError, match=r"unfinished run of this sweep: --resume continues it, --restart"):
        run_sweep(STEPS, output)
    other = {**STEPS, "batch_size": [1, 8]}
    with pytest.raises(SweepError, match=r"of another sweep \(batch_size: \[1, 8, 64\] there, \[1, 8\] here"):
        run_sweep(other, output, resume=True)
    with pytest.raises(SweepError, match=r"of another sweep .*: --restart removes it"):
        run_sweep(other, output)
    with pytest.raises(SweepError, match="choose one"):
        run_sweep(STEPS, output, resume=True, restart=True)
    assert len(list(parts_folder(output).glob("*.arrow"))) == 3
    run_sweep(STEPS, output, restart=True)
    assert pq.read_table(output).equals(whole(STEPS)[1])
    assert not parts_folder(output).exists()


def test_another_version_or_other_tables_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "r.parquet"
    stopped_after(STEPS, output, 3, KeyboardInterrupt)
    manifest = parts_folder(output) / "manifest.json"
    for key, message in [
        ("fastroof.version", "fastroof's version: other there"),
        ("fastroof.tables_hash", "the tables' hash: other there"),
        ("fastroof.inputs_hash", "hash of the models, GPUs, engines and requests: other there"),
    ]:
        before = manifest.read_text()
        manifest.write_text(json.dumps({**json.loads(before), key: "other"}))
        with pytest.raises(SweepError, match=message):
            run_sweep(STEPS, output, resume=True)
        manifest.write_text(before)


@pytest.mark.parametrize("spec", ['{"models', "[1]", "3", 5, None, "", ["{}"]])
def test_what_holds_no_spec_is_of_another_sweep(tmp_path: Path, spec: Any) -> None:
    output = tmp_path / "r.parquet"
    stopped_after(STEPS, output, 3, KeyboardInterrupt)
    manifest = parts_folder(output) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "fastroof.spec": spec}))
    with pytest.raises(
        SweepError, match=r"\.r\.parquet\.parts holds an unfinished run of another sweep \(spec: "
    ):
        run_sweep(STEPS, output, resume=True)


def test_results_of_another_sweep_are_not_resumed_over(tmp_path: Path) -> None:
    output = tmp_path / "r.parquet"
    run_sweep(STEPS, output)
    before = output.read_bytes()
    with pytest.raises(SweepError, match=r"results of another sweep \(tp: \[1, 2\] there, \[1\] here\)"):
        run_sweep({**STEPS, "tp": 1}, output, resume=True)
    with pytest.raises(SweepError, match="results of another sweep"):
        run_sweep(DEPLOYMENTS, output, resume=True)
    assert output.read_bytes() == before
    run_sweep(STEPS, output, resume=True)
    run_sweep({**STEPS, "tp": 1}, output)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    output = tmp_path / "r.parquet"
    stopped_after(STEPS, output, 3, KeyboardInterrupt)
    identity = json.loads((parts_folder(output) / "manifest.json").read_text())
    with Checkpoint(sweep_of(load_spec(STEPS)), output, identity, resume=True):  # noqa: SIM117 - one inside the other
        with pytest.raises(SweepError, match="is in use"):
            run_sweep(STEPS, output, resume=True)


def test_nothing_is_kept_of_a_sweep_of_which_nothing_comes(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="nothing to evaluate"):
        run_sweep({**STEPS, "models": "llama-2-70b", "tp": 1}, tmp_path / "r.parquet")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(SweepError, match=r"cannot be written \(No space left.*continue with --resume"):
        run_sweep(STEPS, tmp_path / "r.parquet")
    assert not list(parts_folder(tmp_path / "r.parquet").glob("0*"))
    shutil.rmtree(parts_folder(tmp_path / "r.parquet"))
    parts_folder(tmp_path / "r.parquet").write_text("a file in the way")
    with pytest.raises(SweepError, match="is not a folder"):
        run_sweep(STEPS, tmp_path / "r.parquet")


@pytest.mark.slow
def test_ctrl_c_prints_how_to_go_on(tmp_path: Path, whole: Any) -> None:
    write_toml(STEPS, tmp_path / "spec.toml")
    running = child(tmp_path)
    folder = parts_folder(tmp_path / "r.parquet")
    while not list(folder.glob("*.arrow")) and running.poll() is None:
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, out = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted; finished parts are stored in .r.parquet.parts. To continue: fastroof sweep " in out
    assert out.rstrip().endswith("-o r.parquet --resume")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".r.parquet.parts", "spec.toml"]
    again = child(tmp_path, "--resume")
    assert again.communicate(timeout=60)[1] == ""
    assert again.returncode == 0
    assert pq.read_table(tmp_path / "r.parquet").equals(whole(STEPS)[1])


def test_outcomes_are_read_back(whole: Any) -> None:
    summary, _ = whole({**STEPS, "keep": "best"})
    listed = sweep_of(load_spec(STEPS)).units()[:2]
    rows = pa.record_batch({"kv_len": [1, 2]})
    results = [
        UnitResult(rows, {"evaluated": 3, "tpot": 1}, (("tp", "no"),), (asdict(summary.best[0]),), 0.1),
        UnitResult(rows[:0], {"evaluated": 5}, (), ({"group": ["a", 500, 0.1], "counts": [1, 2]},), 1 / 3),
    ]
    packed = packed_results(sweep_of(load_spec(STEPS)), listed, results)
    assert unpacked_results(packed) == {unit.number: of for unit, of in zip(listed, results, strict=True)}


@pytest.mark.slow
def test_a_stopped_sweep_over_other_results_is_continued_and_replaces_them(
    tmp_path: Path, whole: Any
) -> None:
    output = tmp_path / "r.parquet"
    run_sweep({**STEPS, "tp": 1}, output)
    stopped_after(STEPS, output, 3, KeyboardInterrupt)
    run_sweep(STEPS, output, resume=True)
    assert pq.read_table(output).equals(whole(STEPS)[1])


def test_a_sweep_stopped_before_its_first_result_begins_again(tmp_path: Path, whole: Any) -> None:
    output = tmp_path / "r.parquet"
    run_sweep({**STEPS, "tp": 1}, output)
    folder = parts_folder(output)
    folder.mkdir()
    (folder / "lock").touch()
    (folder / f".manifest.json.{'0' * 32}").write_bytes(b"{")
    with pytest.raises(SweepError, match="results of another sweep"):
        run_sweep(STEPS, output, resume=True)
    folder.mkdir(exist_ok=True)
    (folder / "lock").touch()
    run_sweep(STEPS, output)
    assert pq.read_table(output).equals(whole(STEPS)[1])
    assert not folder.exists()
    # what a sweep is known by is not dropped unasked
    folder.mkdir()
    (folder / "manifest.json").write_bytes(b"{")
    with pytest.raises(SweepError, match="--restart removes it"):
        run_sweep(STEPS, output)


def test_rows_do_not_pile_up_before_the_next_part_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_EVERY_S", float("inf"))
    for name in ("ROWS_A_UNIT", "EVALUATIONS_A_UNIT"):
        monkeypatch.setattr(step_units, name, 2**16)
    spec = {"models": ["llama-3.1-8b"], "tp": 1, "batch_size": list(range(1, 257)), "keep": "all",
            "kv_len": list(range(1, 1025))}  # fmt: skip
    folder = parts_folder(tmp_path / "rows.parquet")
    written = []

    def progress(done: int, total: int) -> None:
        written.append((done, len(list(folder.glob("*.arrow")))))

    run_sweep(spec, tmp_path / "rows.parquet", progress=progress)
    # a part of 2**17 rows is two units
    assert written == [(2**16, 0), (2 * 2**16, 1), (3 * 2**16, 1), (4 * 2**16, 2)]
