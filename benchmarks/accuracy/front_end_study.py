"""The fitted front end of each engine, judged on left-out models, GPUs, versions and benches."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Final

import numpy as np
import typer

from benchmarks.accuracy.calibration import profiles_of
from benchmarks.accuracy.front_end import (
    PromptTime,
    TtftErrors,
    engine_of,
    fitted,
    fitted_without,
    is_named,
    residual,
)
from benchmarks.accuracy.measured import measured_on
from benchmarks.accuracy.predicted_runs import SPLIT_NAMES, PredictedRun, prompt_times, with_drafts
from benchmarks.accuracy.run_kinds import JUDGED, kind_of
from benchmarks.accuracy.validation import predict_gpu
from benchmarks.accuracy.whole_sample import measured_gpus
from fastroof.engines import FrontEnd
from fastroof.errors import FastroofError
from fastroof.evidence.predictions import Plans, predict_row
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.validation import is_waiting
from fastroof.tables import load_tables

REQUEST_MS: Final = (2.5, 5.0, 10.0, 15.0, 20.0, 30.0)
TOKEN_US: Final = (0.0, 2.0, 4.0)
"""Sizes of a named front end that are tried: equal requests queue in groups, so that no line fits them."""


def scan(behind: str) -> None:
    """Print TTFT errors of the runs behind a named front end, by its sizes."""
    print("| engine | request_ms | token_us | TTFT of each model: runs, mean, median, bias |")
    print("|---|---:|---:|---|")
    for gpu in measured_gpus():
        rows = [row for row in measured_on(gpu).rows if row.frontend == behind and not row.is_disaggregated]
        if not rows:
            continue
        try:
            plans = Plans(load_tables(gpu))
        except FastroofError:
            continue
        for engine in dict.fromkeys(row.engine for row in rows):
            some = [row for row in rows if row.engine == engine and kind_of(row, "")[0] == JUDGED]
            for request_ms, token_us in product(REQUEST_MS, TOKEN_US):
                errors = _of_sizes(some, plans, FrontEnd(request_ms, token_us))
                print(f"| {engine} {gpu} | {request_ms:g} | {token_us:g} | {errors} |")


def _of_sizes(rows: Sequence[ServingRow], plans: Plans, front_end: FrontEnd) -> str:
    found: dict[str, list[float]] = {}
    for row in rows:
        try:
            profile = replace(row.engine_profile, front_end=front_end)
            plan = plans.get(replace(row, frontend=""), profile)
            seen = predict_row(row, plan)
        except FastroofError:
            continue
        if not is_waiting(row) and not math.isnan(row.ttft_ms):
            found.setdefault(row.model, []).append(seen.ttft_ms / row.ttft_ms - 1.0)
    cells = []
    for model, errors in found.items():
        off = np.array(errors) * 100.0
        size = np.abs(off)
        cells.append(f"{model} {len(off)}, {size.mean():.1f}, {np.median(size):.1f}, {off.mean():+.1f}")
    return "; ".join(cells)


def main(
    behind: Annotated[
        str | None, typer.Option(help="Scan the sizes of a named front end instead: dynamo.")
    ] = None,
) -> None:
    """Fit the front end of each engine, and judge it on left-out models, GPUs, versions and benches."""
    if behind is not None:
        scan(behind)
        return
    predicted: list[PredictedRun] = []
    for gpu in measured_gpus():
        try:
            tables = load_tables(gpu)
        except FastroofError:
            continue
        predicted += predict_gpu(measured_on(gpu), tables, profiles_of("auto")).runs
    runs = prompt_times(with_drafts(predicted))
    engines = {name: [run for run in runs if engine_of(run) == name] for name in map(engine_of, runs)}
    print(
        "| profiles | runs | request_ms | token_us | server_ms | residual |\n|---|---:|---:|---:|---:|---:|"
    )
    for name, of_engine in engines.items():
        found, error = fitted(of_engine), residual(of_engine, SPLIT_NAMES["model"])
        sizes = f"{found.request_ms:g} | {found.token_us:g} | {found.server_ms:g}"
        print(f"| {name} | {len(of_engine)} | {sizes} | {error:.2f} |")
    heads = [f"without the {split}" for split in SPLIT_NAMES]
    print("\nTTFT, mean, median and bias:\n\n| bench | profiles | runs | none | " + " | ".join(heads) + " |")
    print(f"|---|---|---:|{'---|' * (1 + len(heads))}")
    by_split = {name: fitted_without(runs, split) for name, split in SPLIT_NAMES.items()}
    groups: dict[tuple[str, str], list[PromptTime]] = {("all", ""): runs}
    for run in runs:
        groups.setdefault((run.row.bench_label, engine_of(run)), []).append(run)
    for (bench, engine), some in groups.items():
        cells = [str(TtftErrors.of(some, lambda _: FrontEnd()))]
        for name, split in SPLIT_NAMES.items():
            known = by_split[name]

            def without(
                run: PromptTime,
                known: dict[tuple[Hashable, ...], FrontEnd] = known,
                split: Callable[[ServingRow], Hashable] = split,
            ) -> FrontEnd:
                if is_named(run.row):
                    return run.row.on_its_clock(run.row.engine_profile).front_end
                return known[engine_of(run), split(run.row)]

            cells.append(str(TtftErrors.of(some, without)))
        print(f"| {bench} | {engine} | {len(some)} | {' | '.join(cells)} |")
