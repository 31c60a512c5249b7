"""Steps through arrays: homogeneous, ragged, of other dtypes and strides, few and many."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import cases
from benchmarks.conftest import Timed
from fastroof import compile_plan
from fastroof.bench import WORKLOADS, Baseline, Setup, Workload
from fastroof.bench.workload import decode_sizes, ragged_decodes
from fastroof.bench.workloads import homogeneous_decode, ragged

LARGE = "FASTROOF_BENCH_LARGE"
"""Set to 1 to time 1e8 steps as well, which takes 3 GB."""

MOST_EXTRA_BYTES = 300e6


def test_decode(timed: Timed, setup: Setup) -> None:
    timed(cases.decode(setup))


def test_decode_int64(timed: Timed, setup: Setup) -> None:
    timed(cases.decode_int64(setup))


def test_prefill(timed: Timed, setup: Setup) -> None:
    timed(WORKLOADS["prefill"](setup))


def test_ragged_decode(timed: Timed, setup: Setup) -> None:
    timed(WORKLOADS["ragged-decode"](setup))


def test_ragged_decode_int64(timed: Timed, setup: Setup) -> None:
    timed(cases.ragged_int64(setup))


def test_ragged_mixed(timed: Timed, setup: Setup) -> None:
    timed(WORKLOADS["ragged-mixed"](setup))


def test_ragged_with_origins(timed: Timed, setup: Setup) -> None:
    """``plan.run``: components and origins too, against ``plan.step_us``."""
    batch = ragged_decodes(setup.size(100_000, 1_000))
    requests = len(batch.new_tokens)
    alone = Baseline("step_us", lambda: setup.plan.step_us(batch), requests, 0.0)
    timed(
        Workload(
            "run", "components and origins", "request", requests,
            lambda: setup.plan.run(batch).latency_us, baselines=(alone,),
        )
    )  # fmt: skip


@pytest.mark.parametrize("requests", [1, 4, 16, 64, 256, 1024, 4096])
def test_rows(timed: Timed, setup: Setup, requests: int) -> None:
    """Two million requests, so many a step on average: the time a request has to stay the same."""
    plan = compile_plan(
        setup.model, setup.gpu, setup.tables, max_tokens=8192, max_seqs=8192, engine="kernels"
    )
    batch = ragged_decodes(max(1, setup.size(2_000_000, 10_000) // requests), requests)
    workload = ragged(replace(setup, plan=plan), batch, f"rows-{requests}", "decode")
    # more sequences than were measured are extrapolated, which the NumPy version cannot do
    timed(replace(workload, baselines=workload.baselines[:1]))


@pytest.mark.parametrize("steps", [1, 100, 10_000, 1_000_000, 10_000_000, 100_000_000])
def test_scaling(timed: Timed, benchmark: Any, setup: Setup, steps: int) -> None:
    """The time a step from one step to many, with the memory taken beyond inputs and output."""
    if steps > 10_000_000 and not os.environ.get(LARGE):
        pytest.skip(f"1e8 steps take 3 GB: {LARGE}=1 times them")
    steps = min(steps, setup.size(steps, 100_000))
    workload = homogeneous_decode(setup, steps, name=f"scaling-{steps}")
    workload = replace(workload, baselines=workload.baselines[:1])
    tracemalloc.start()
    workload.run()
    extra = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert extra < MOST_EXTRA_BYTES
    benchmark.extra_info["extra_bytes"] = extra
    calls = max(1, setup.size(10_000, 10) // steps)
    if calls > 1:
        once = workload.run
        again = lambda: [once() for _ in range(calls)]  # noqa: E731
        workload = replace(workload, count=steps * calls, run=again, baselines=())
    timed(workload)


def _strided(array: Any, _: Path) -> Any:
    wide = np.zeros((len(array), 2), array.dtype)
    wide[:, 0] = array
    return wide[:, 0]


def _read_only(array: Any, _: Path) -> Any:
    array.flags.writeable = False
    return array


def _mapped(array: Any, folder: Path) -> Any:
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, array)
    return np.load(path, mmap_mode="r")


FORMS = {
    "int32": lambda a, _: a,
    "int64": lambda a, _: a.astype(np.int64),
    "uint32": lambda a, _: a.astype(np.uint32),
    "strided": _strided,
    "reversed": lambda a, _: np.ascontiguousarray(a[::-1])[::-1],
    "read-only": _read_only,
    "memory-mapped": _mapped,
    "Arrow": lambda a, _: pa.array(a),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(timed: Timed, setup: Setup, form: str, tmp_path: Path) -> None:
    """Any dtype, stride and owner of the sizes, against contiguous int32: the same bits."""
    count = setup.size(1_000_000, 10_000)
    sizes = decode_sizes(setup, count)
    out, native = np.empty(count), np.empty(count)
    given = [FORMS[form](size.copy(), tmp_path) for size in sizes]
    int32 = Baseline("contiguous int32", lambda: setup.plan.decode_us(*sizes, out=native), count, 0.0)
    timed(
        Workload(
            f"forms-{form}", form, "step", count, lambda: setup.plan.decode_us(*given, out=out),
            baselines=(int32,),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", ["decode", "prefill", "ragged-decode", "ragged-mixed", "sweep-best"])
def test_windowed(timed: Timed, setup: Setup, name: str) -> None:
    timed(cases.windowed(setup, name))
