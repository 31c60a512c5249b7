"""The lines of the README's accuracy table that come from ``kernels-bench`` campaigns.

Kernels: the other shipped tables, looked up at the campaign's points. Whole steps of engines: predicted by
the other tables' kernels and by the campaign's, which the same engine's shipped rows complete, alone and with
the profile of the engine's version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from benchmarks.accuracy.rows import shipped_steps
from fastroof.atomic_files import write_whole
from fastroof.config import load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.engines import load_engine
from fastroof.evidence.predictions import Plans
from fastroof.evidence.steps.measured_steps import ENGINE_STEPS_DATASET, MeasuredStep
from fastroof.evidence.validation import Skipped, predicted_steps
from fastroof.judging.coverage import judged_by, run_coverage_against
from fastroof.load import MeasuredTables, load_measured
from fastroof.load.sources import SERVING_FOLDER, list_sources
from fastroof.tables import Tables
from fastroof.tables.holdout import run_against

README: Final = Path(__file__).parents[2] / "README.md"
PREFIX: Final = "| own "
"""Start of the lines that this command writes; they come after the last line about kernels."""

AFTER: Final = "| MoE |"
METHODS: Final = ("roofline", "linear_mfu")


def own_campaigns(root: Path | None = None) -> dict[str, Path]:
    """Return the folder of each GPU's campaign that kernels-bench measured."""
    folders = sorted((bench_data_root() if root is None else root).glob("*/*/provenance.toml"))
    sources = [source for path in folders for source in list_sources(path.parent)]
    return {source.gpu: source.folder for source in sources if source.is_own}


def main(
    write: Annotated[bool, typer.Option("--write", help="Write the lines into the README's table.")] = False,
) -> None:
    """Print the lines about our own measurements for the README's accuracy table."""
    lines: list[str] = []
    campaigns = own_campaigns()
    for gpu in sorted(path.parent.name for path in bench_data_root().glob(f"*/{SERVING_FOLDER}")):
        campaign = load_measured(campaigns[gpu]) if gpu in campaigns else None
        steps = [step for step in shipped_steps(gpu) if step.dataset == ENGINE_STEPS_DATASET]
        if campaign is None and not steps:
            continue
        # shipped tables alone: what is imported on this machine decides no figure
        tables = Tables(load_measured(bench_data_root() / gpu), load_gpu(gpu))
        if campaign is not None:
            tables = judged_by(tables, campaign)
            lines += kernel_lines(tables, campaign)
            for row in run_coverage_against(tables, campaign):
                place = f"{row.operator} {row.grid} {row.region}"
                typer.echo(f"80 % intervals hold {row.level_80:.0%} of {row.points:,}: {place}", err=True)
        lines += step_lines(steps, tables, campaign)
    if not lines:
        typer.echo("bench_data has nothing that kernels-bench measured", err=True)
    for line in lines:
        typer.echo(line)
    if write:
        write_whole(README, with_lines(README.read_text("utf-8"), lines))


def with_lines(text: str, lines: list[str]) -> str:
    """Return the README with these lines in place of the former ones."""
    kept = [line for line in text.splitlines() if not line.startswith(PREFIX)]
    (at,) = (number for number, line in enumerate(kept, 1) if line.startswith(AFTER))
    return "\n".join([*kept[:at], *lines, *kept[at:]]) + "\n"


def kernel_lines(tables: Tables, campaign: MeasuredTables) -> Iterator[str]:
    """Yield a line an operator: points and errors of its dtypes, all points of each weighted alike."""
    found: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {}
    for row in run_against(tables, campaign, methods=METHODS):
        families = found.setdefault(row.operator, {})
        families.setdefault(row.grid, {}).setdefault(row.method, []).append((row.points, row.mape))
    for operator, families in found.items():
        points = [f"{sum(count for count, _ in parts[METHODS[0]]):,}" for parts in families.values()]
        errors = (" / ".join(_share(parts[method]) for parts in families.values()) for method in METHODS)
        fastroof, baseline = errors
        what = f"own {tables.gpu.name.upper()} rows: {operator.replace('_', ' ')}, {' / '.join(families)}"
        yield f"| {what} | {' / '.join(points)} | **{fastroof} %** | {baseline} % |"


def _share(parts: list[tuple[int, float]]) -> str:
    points, errors = zip(*parts, strict=True)
    return f"{np.average(errors, weights=points) * 100.0:.1f}"


def step_lines(
    steps: Sequence[MeasuredStep], tables: Tables, campaign: MeasuredTables | None
) -> Iterator[str]:
    """Yield a line for each way to predict an engine's steps."""
    ways = {"others' kernels": tables} if steps else {}
    if steps and campaign is not None:
        measured = tables.measured
        others = {name: measured.candidates(name) for name in campaign.tables}
        first, rest = {**measured.tables, **campaign.tables}, {**measured.others, **others}
        ways["own kernels"] = Tables(replace(measured, tables=first, others=rest), tables.gpu)
    version = " and ".join(sorted({f"{step.engine} {step.engine_version}" for step in steps}))
    for words, kernels in ways.items():
        for how, profile in (("alone", load_engine("kernels")), ("and the profile", None)):
            skipped = Skipped()
            rows = list(predicted_steps(steps, Plans(kernels), skipped, profile))
            phases = dict.fromkeys(row.quantity for row in rows)
            errors = {phase: [abs(r.error) for r in rows if r.quantity == phase] for phase in phases}
            points = " / ".join(f"{len(of)} {phase}" for phase, of in errors.items())
            mape = " / ".join(f"{np.mean(of) * 100.0:.1f}" for of in errors.values())
            left = f", {skipped.total()} left out" if skipped else ""
            what = f"own {tables.gpu.name.upper()} steps of {re.sub('^vllm', 'vLLM', version)}: {words} {how}"
            yield f"| {what} | {points}{left} | **{mape} %** | |"
