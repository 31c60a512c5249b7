"""Sweeps: written out and reduced, against NumPy's broadcasting; in four threads against one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks import cases
from benchmarks.conftest import Timed
from fastroof import compile_plan, run_sweep
from fastroof.bench import WORKLOADS, Setup
from fastroof.bench.numpy_steps import NumpySteps
from fastroof.bench.workload import sweep_axes
from fastroof.bench.workloads import numpy_best


def test_written(timed: Timed, setup: Setup) -> None:
    timed(WORKLOADS["sweep"](setup))


def test_reduced_to_best(timed: Timed, setup: Setup) -> None:
    timed(WORKLOADS["sweep-best"](setup))


def test_best_batches_are_numpys(setup: Setup, tmp_path: Path) -> None:
    """What the two are timed at is one thing: the batch with most tokens a second within memory."""
    batch, kv_len = sweep_axes(setup)
    spec = {
        "models": [setup.model.name], "batch_size": batch.tolist(), "kv_len": kv_len.tolist(),
    }  # fmt: skip
    run_sweep(spec, tmp_path / "best.parquet")
    plan = compile_plan(setup.model, setup.gpu, setup.tables, max_tokens=512, max_seqs=512, engine="kernels")
    (best,) = numpy_best([plan], [NumpySteps(plan, setup.tables)], batch, kv_len)
    found = pq.read_table(tmp_path / "best.parquet")["batch_size"].to_numpy()
    np.testing.assert_array_equal(found, batch[best])


def test_written_in_threads(timed: Timed, setup: Setup) -> None:
    timed(cases.in_threads(setup, "sweep"))


def test_reduced_in_threads(timed: Timed, setup: Setup) -> None:
    timed(cases.sweep_in_threads(setup))


def test_threads_write_the_same_rows(setup: Setup, tmp_path: Path) -> None:
    spec = {
        "models": [setup.model.name],
        "tp": [1, 2],
        "batch_size": list(range(1, 65)),
        "kv_len": [512, 777],
    }
    for threads in (1, cases.THREADS):
        run_sweep(spec, tmp_path / f"{threads}.parquet", threads=threads)
    one, several = (pq.read_table(tmp_path / f"{threads}.parquet") for threads in (1, cases.THREADS))
    assert one.equals(several)


def test_steps_in_threads(timed: Timed, setup: Setup) -> None:
    timed(cases.in_threads(setup, "decode"))


def test_ragged_in_threads(timed: Timed, setup: Setup) -> None:
    timed(cases.in_threads(setup, "ragged-mixed"))
