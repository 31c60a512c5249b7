"""What the suites and the table time: workloads of ``fastroof.bench`` and others, with more baselines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.baselines import (
    AiconfiguratorEngine,
    NumpyPlan,
    attention_nodes,
    gemm_nodes,
    interpn_interpolator,
    python_decode_us,
    scipy_interpolator,
)
from fastroof.bench.lookups import lookup_points
from fastroof.bench.workload import Baseline, Setup, Workload, decode_sizes, ragged_decodes
from fastroof.bench.workloads import WORKLOADS, homogeneous_decode, ragged, sweep_plans
from fastroof.models import LayerGroup
from fastroof.operators.gemm import gemm_bytes, gemm_flops
from fastroof.plan import compile_plan
from fastroof.sweep import best_batches
from fastroof.units import US_PER_S

THREADS = 4
WINDOW = 128


def decode(setup: Setup) -> Workload:
    """Homogeneous decode against NumPy over dense tables and plain Python as well."""
    workload = WORKLOADS["decode"](setup)
    batch, kv_len = decode_sizes(setup, workload.count)
    few, fewer = min(workload.count, 500_000), setup.size(50, 5)
    dense = NumpyPlan(setup.plan, setup.tables)

    def plain() -> list[float]:
        sizes = zip(batch[:fewer].tolist(), kv_len[:fewer].tolist(), strict=True)
        return [python_decode_us(setup.plan, setup.tables, *size) for size in sizes]

    more = (
        Baseline("NumPy over dense tables", lambda: dense.decode_us(batch[:few], kv_len[:few]), few),
        Baseline("lookups in Python", plain, fewer),
    )
    return replace(workload, baselines=(*workload.baselines, *more))


def decode_int64(setup: Setup) -> Workload:
    return homogeneous_decode(setup, setup.size(10_000_000, 20_000), np.int64, "decode-int64")


def ragged_int64(setup: Setup) -> Workload:
    batch = ragged_decodes(setup.size(100_000, 1_000), dtype=np.int64)
    return ragged(setup, batch, "ragged-decode-int64", "decode")


def in_threads(setup: Setup, name: str) -> Workload:
    """A workload in four threads, against itself in one: the same bits."""
    several, one = (WORKLOADS[name](replace(setup, threads=t)) for t in (THREADS, 1))
    alone = Baseline("one thread", one.run, one.count, 0.0)
    title = f"{several.title}, {THREADS} threads"
    return replace(several, name=f"{name}-threads", title=title, baselines=(alone,))


def windowed(setup: Setup, name: str) -> Workload:
    """A workload of a plan half of whose layers attend within a window, against the plan without."""
    (group,) = setup.model.layers
    within = replace(group.kind, attention=replace(group.kind.attention, window=WINDOW), name="windowed")
    half = group.count // 2
    layers = (replace(group, count=group.count - half), LayerGroup(within, half))
    model = replace(setup.model, layers=layers)
    plan = compile_plan(
        model,
        setup.gpu,
        setup.tables,
        max_num_batched_tokens=setup.plan.max_num_batched_tokens,
        max_num_seqs=setup.plan.max_num_seqs,
        engine="kernels",
    )
    of_windows = replace(setup, model=model, plan=plan)
    if name == "sweep-best":
        mine, theirs = (_best_of_one(one) for one in (of_windows, setup))
    else:
        mine, theirs = (WORKLOADS[name](one) for one in (of_windows, setup))
    without = Baseline("the plan without", theirs.run, theirs.count, None)
    title = f"{mine.title}, half of the layers within a window of {WINDOW}"
    return replace(mine, name=f"{name}-windowed", title=title, baselines=(without,))


def _best_of_one(setup: Setup) -> Workload:
    """Steps of one plan, a hundred times over, of which the best batch of each length is kept."""
    # short enough for the memory of both plans: what is beyond it is counted, not timed
    plans, kv_len = [setup.plan] * setup.size(100, 2), np.arange(32, 32 + setup.size(481, 16))
    batch = np.arange(1, setup.size(256, 16) + 1)
    count = len(plans) * len(batch) * len(kv_len)
    title = f"{len(plans)} plans x {len(batch)} batches x {len(kv_len)} kv, best batch kept"
    return Workload("best-of-one", title, "step", count, lambda: best_batches(plans, batch, kv_len))


def sweep_in_threads(setup: Setup) -> Workload:
    """A grid of 100 M steps, best batches kept: four threads against one."""
    plans = sweep_plans(setup) * setup.size(4, 1)
    batch = np.arange(1, setup.size(512, 16) + 1)
    # short enough for the memory of most plans: what is beyond it is counted, not timed
    kv_len = np.arange(32, 32 + setup.size(481, 16))

    def swept(threads: int) -> Any:
        return best_batches(plans, batch, kv_len, threads=threads)

    count = len(plans) * len(batch) * len(kv_len)
    one = Baseline("one thread", lambda: swept(1), count, None)
    title = f"{len(plans)} plans x {len(batch)} batches x {len(kv_len)} kv, best kept, {THREADS} threads"
    return Workload("sweep-best-threads", title, "step", count, lambda: swept(THREADS), baselines=(one,))


def lookup(setup: Setup, operator: str) -> Workload:
    """Lookups by the default method, against general interpolators on the same nodes."""
    count = setup.size(1_000_000, 2_000)
    tables = setup.tables
    points = lookup_points(tables, operator, count, setup.plan.heads)
    nodes = gemm_nodes(tables, points) if operator == "gemm" else attention_nodes(tables, operator, points)
    baselines = []
    for name, make in (("scipy", scipy_interpolator), ("interpn", interpn_interpolator)):
        try:
            baselines.append(Baseline(name, make(nodes), count))
        except ImportError:
            continue
    return Workload(
        f"lookup {operator}",
        f"{count:,} lookups of {operator}",
        "lookup",
        count,
        lambda: tables.lookup(operator, **points).latency_us,
        baselines=tuple(baselines),
    )


def aiconfigurator_steps(setup: Setup) -> Workload:
    """Decode steps against aiconfigurator-core's engine, which takes one a call."""
    engine = AiconfiguratorEngine()
    workload = homogeneous_decode(setup, setup.size(1_000_000, 1_000), name="decode-aiconfigurator")
    batch, kv_len = (size[:2_000] for size in decode_sizes(setup, workload.count))
    theirs = Baseline("aiconfigurator-core", partial(engine.decode_us, batch, kv_len), len(batch), rtol=None)
    return replace(workload, baselines=(theirs,))


def aiconfigurator_gemms(setup: Setup) -> Workload:
    """GEMMs at points that the shipped tables measured; the peer has those of an older version.

    Less than one in a thousand was measured faster than its roofline (outputs that stay in the L2):
    there that engine answers with the roofline, and those points are left out.
    """
    engine = AiconfiguratorEngine()
    columns = setup.tables.table("gemm").columns
    work = gemm_flops(columns["m"], columns["n"], columns["k"]) / setup.gpu.peak("bf16")
    moved = gemm_bytes(columns["m"], columns["n"], columns["k"], 2) / setup.gpu.hbm_bytes_per_s
    above = columns["latency_us"] > np.maximum(work, moved) * US_PER_S
    # its newest tables are of vLLM 0.24.0, without most narrow GEMMs
    wide = np.minimum(columns["n"], columns["k"]) >= 512
    rows = np.flatnonzero((columns["dtype"] == "bf16") & above & wide)
    chosen = np.random.default_rng(3).choice(rows, setup.size(1_000_000, 1_000))
    m, n, k = (columns[name][chosen] for name in ("m", "n", "k"))
    few = slice(0, 1_000)
    theirs = Baseline(
        "aiconfigurator-core", partial(engine.gemm_us, m[few], n[few], k[few]), 1_000, rtol=None
    )
    return Workload(
        "gemm-aiconfigurator",
        f"{len(chosen):,} GEMMs at measured points",
        "lookup",
        len(chosen),
        lambda: setup.tables.lookup("gemm", m=m, n=n, k=k).latency_us,
        baselines=(theirs,),
    )
