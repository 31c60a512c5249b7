"""Reading a user's own runs: load-generator files and engine arguments -> rows and a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.acceptance import MTP
from fastroof.engines import EngineProfile
from fastroof.errors import BatchError, TableError
from fastroof.evidence.engine_arguments import EngineArguments, read_engine_arguments
from fastroof.evidence.load_generators import FoundRuns, GeneratorRun, read_runs
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.speculative_flags import NO_DRAFT
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.evidence.steps.step_files import OwnSteps, read_own_steps
from fastroof.models import load_model
from fastroof.plan.speculation import SpeculativeDecoding

ARGS_FILES: Final = (
    *(f"engine_args{suffix}" for suffix in (".txt", ".json", ".toml", ".yaml", ".yml")),
    "start.sh",
)
"""Files with the engine's arguments that are looked for in a run's folder, the last by ``best --save``."""


@dataclass(frozen=True)
class OwnRow(ServingRow):
    """A row of a user's engine, with its schedule at start and the run that its load generator wrote."""

    own_profile: EngineProfile | None = None
    run: GeneratorRun | None = None
    changing: tuple[str, ...] = ()

    @property
    def not_fitted(self) -> str:
        """Return why no fit should use it; empty if one may."""
        changed = ", ".join(self.changing)
        return self.left_out or (f"{changed} changes its steps and is not modelled" if changed else "")

    @property
    def engine_profile(self) -> EngineProfile:
        """The profile of its engine as it was started."""
        return self.own_profile or super().engine_profile


@dataclass(frozen=True)
class OwnRuns:
    """A user's own runs and whole steps; ``left_out`` of one has the reason if no fit should use it."""

    rows: tuple[OwnRow, ...]
    engines: tuple[EngineArguments, ...]
    warnings: tuple[str, ...]
    steps: tuple[MeasuredStep, ...] = ()

    @property
    def gpu(self) -> str:
        """Return the GPU that it was measured on, by the first row; empty without any."""
        every: tuple[EngineArguments | MeasuredStep, ...] = (*self.engines, *self.steps)
        return every[0].gpu if every else ""

    @property
    def taken(self) -> tuple[OwnRow, ...]:
        """Return the rows that a fit may use."""
        return tuple(row for row in self.rows if not row.not_fitted)


def read_own_runs(
    runs: Sequence[str | Path],
    engine_args: str | Path | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    engine: str = "",
    steps: str | Path | None = None,
) -> OwnRuns:
    """Read runs of load generators and whole steps, with the arguments of their engine.

    By default, each run's folder is searched for ``engine_args.txt`` (.json, .toml, .yaml), so that runs of
    several engines need a folder each. ``given`` has further settings: see ``read_engine_arguments``.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    steps_read = OwnSteps(()) if steps is None else read_own_steps(steps, engine_args, given)
    found = read_runs(runs) if runs or steps is None else FoundRuns(())
    engines: dict[Path | None, EngineArguments] = {}
    warnings: list[str] = []
    if found.others:
        warnings.append(f"files that are not runs: {few(found.others)}")
    rows = []
    given_path = None if engine_args is None else Path(engine_args)
    for run in found.runs:
        path = given_path or _arguments_file(run, {"engine": engine or None, **given})
        if path not in engines:
            engines[path] = read_engine_arguments(path, given, engine=engine)
        rows.append(_row(run, engines[path]))
    started = [*engines.values()]
    if steps_read.engine is not None and steps_read.engine not in started:
        started.append(steps_read.engine)
    for arguments in started:
        warnings += arguments.warnings
        if arguments.changing and arguments in engines.values():
            listed = ", ".join(arguments.changing)
            warnings.append(f"no fit takes runs with {listed}: it changes steps and is not modelled")
    warnings += steps_read.notes
    unspread = [run.name for run in found.runs if math.isnan(run.length_spread) and not run.refused]
    if unspread:
        warnings.append(f"lengths are assumed to be equal, since the file has no spread: {few(unspread)}")
    by_rate = sum("Little" in run.concurrency_from for run in found.runs)
    if by_rate:
        warnings.append(f"requests in flight are from Little's law, not from clients: {by_rate} runs")
    return OwnRuns(tuple(rows), tuple(started), tuple(dict.fromkeys(warnings)), steps_read.steps)


def few(names: Sequence[str]) -> str:
    """Return up to three names, and the number of all others."""
    listed = ", ".join(names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"


def _arguments_file(run: GeneratorRun, given: Mapping[str, Any]) -> Path | None:
    folder = Path(run.path).parent
    files = [folder / name for name in ARGS_FILES if (folder / name).is_file()]
    if len(files) > 1:
        raise TableError(f"{folder} has {' and '.join(path.name for path in files)}; keep one")
    if not files and any(given.get(name) is None for name in ("gpu", "engine", "model")):
        raise TableError(
            f"{run.file}: no engine arguments; give --engine-args with its command line, put it "
            f"next to the runs as {ARGS_FILES[0]}, or give --gpu, --engine and --model"
        )
    return files[0] if files else None


def _speculation(run: GeneratorRun, engine: EngineArguments) -> tuple[SpeculativeDecoding | None, str]:
    """Return the speculative decoding of a run, and why its drafts are unknown."""
    drafts = engine.drafts
    if drafts is None:
        if not run.drafts:
            return None, ""
        return None, (
            f"{run.drafts}: speculative decoding; name its drafts in the engine's arguments, or give "
            "--num-draft-tokens (and --draft)"
        )
    accepted = run.accepted if engine.accepted == "" else engine.accepted
    if isinstance(accepted, float) and math.isnan(accepted):
        return None, (
            f"{drafts.num_draft_tokens} draft tokens a step, and neither its file nor --accepted has the "
            "mean tokens per step; give it, or auto"
        )
    try:
        drafted = SpeculativeDecoding(drafts.num_draft_tokens, accepted, MTP if drafts.draft == MTP else None)
        return drafted.for_model(load_model(engine.model).name), ""
    except BatchError as error:
        return None, str(error)


def _row(run: GeneratorRun, engine: EngineArguments) -> OwnRow:
    layout, drafts = engine.layout, engine.drafts
    speculation, unknown = _speculation(run, engine)
    is_model = drafts is not None and drafts.draft not in (MTP, NO_DRAFT)
    same = ("gpu", "engine", "checkpoint", "model", "dtype", "kv_dtype", "kv_dtype_from", "changing")
    figures = ("isl", "osl", "concurrency", "requests_per_client", "ttft_ms", "tpot_ms")
    return OwnRow(
        dataset="own",
        row=run.name,
        **{name: getattr(engine, name) for name in same},
        **{name: getattr(run, name) for name in figures},
        **{size: getattr(layout, size) for size in ("tp", "pp", "dp", "ep")},
        engine_version=engine.version,
        left_out=run.refused or unknown,
        length_spread=0.0 if math.isnan(run.length_spread) else run.length_spread,
        own_profile=engine.profile,
        run=run,
        speculation=speculation,
        draft_model=drafts.draft if drafts is not None and is_model else "",
        draft_tp=layout.tp if drafts is None else drafts.tp or layout.tp,
    )
