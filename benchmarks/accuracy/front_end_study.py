"""The fitted front end of each engine, judged on left-out models, GPUs, versions and benches."""

from __future__ import annotations

from collections.abc import Callable, Hashable

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
from benchmarks.accuracy.validation import predict_gpu
from benchmarks.accuracy.whole_sample import measured_gpus
from fastroof.engines import FrontEnd
from fastroof.errors import FastroofError
from fastroof.evidence.rows import ServingRow
from fastroof.tables import load_tables


def main() -> None:
    """Fit the front end of each engine, and judge it on left-out models, GPUs, versions and benches."""
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
