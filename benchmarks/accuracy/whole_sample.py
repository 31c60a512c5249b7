"""Validation over every GPU that runs were measured on: all in one report, judged or with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.left_out_profiles import SPLITS, profiles_of, profiles_without
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.predicted_runs import JUDGED, KINDS, front_ends_of, with_drafts
from benchmarks.accuracy.run_groups import RunGroup, Totals, run_groups, totals_of
from benchmarks.accuracy.validation import judge_independent, predict_gpu, runtime_name
from fastroof._version import __version__
from fastroof.config.paths import bench_data_root
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError, TableError
from fastroof.load.own import SERVING_FOLDER
from fastroof.serving.evidence.measured_steps import STEPS_DATASET
from fastroof.serving.evidence.prediction_errors import PredictedTime, Validation
from fastroof.tables import Tables, load_tables

__all__ = ["SampleValidation", "measured_gpus", "report_document", "validate_gpus"]


@dataclass(frozen=True)
class SampleValidation:
    """Predictions beside what was measured, on several GPUs.

    Attributes
    ----------
    version, runtime : str
        fastroof's version, and the profile as asked for.
    split : str
        What each run's constants have not seen: model, gpu, version; empty where they may have seen it.
    gpus : tuple of Validation
        By GPU.
    absent : dict of str to str
        Why a GPU is left out whole, by its name: its tables are not there.
    runs : int
        Distinct runs of serving engines that are known, of all GPUs.
    represented : int
        Those that have a prediction.
    left_out : dict of str to int
        Rows of the sources that are not represented, by reason: with the runs that are, all rows there are.
    """

    version: str
    runtime: str
    split: str
    gpus: tuple[Validation, ...]
    absent: dict[str, str]
    runs: int
    represented: int
    left_out: dict[str, int]

    @property
    def times(self) -> tuple[PredictedTime, ...]:
        """Every time that was judged, of all GPUs."""
        return tuple(time for one in self.gpus for time in one.rows)

    def groups(self, min_rows: int = 1) -> tuple[RunGroup, ...]:
        """Sum errors up by model, GPU, engine, version and format; see :func:`run_groups`."""
        return run_groups(self.times, min_rows)

    def totals(self) -> tuple[Totals, ...]:
        """Sum groups up: those that are judged, then those of all kinds."""
        groups = self.groups()
        return tuple(
            totals_of(groups, quantity, kinds)
            for quantity in ("tpot", "ttft")
            for kinds in ((JUDGED,), KINDS)
        )


def measured_gpus(root: Path | None = None) -> tuple[str, ...]:
    """Return the GPUs that runs or steps ship of, by name.

    Examples
    --------
    >>> "b300" in measured_gpus()
    True
    """
    root = bench_data_root() if root is None else root
    return tuple(sorted(folder.parent.name for folder in root.glob(f"*/{SERVING_FOLDER}")))


def validate_gpus(
    gpus: Sequence[str] | None = None,
    *,
    runtime: str | Path | EngineProfile = "auto",
    leave_out: str | None = None,
    load: Callable[[str], Tables] = load_tables,
    progress: Callable[[str], None] | None = None,
) -> SampleValidation:
    """Predict all that was measured on several GPUs, and judge it in one report.

    Parameters
    ----------
    gpus : sequence of str, optional
        Their names; all of :func:`measured_gpus` if not given.
    runtime : str, Path or EngineProfile
        ``auto`` predicts each run by the profile of its engine and version; else one profile for all.
    leave_out : str, optional
        ``model``, ``gpu`` or ``version``: predict each run by constants that were fitted without its own.
        Needs ``runtime="auto"``.
    load : callable
        Returns a GPU's tables by its name.
    progress : callable, optional
        Called with words about what is being done.

    Returns
    -------
    SampleValidation
        GPUs without tables are in ``absent``, with their runs in ``left_out``.

    Raises
    ------
    FastroofError
        If a GPU has no runs, the profile is unknown, there is no such split, or nothing can be judged.
    """
    if leave_out is not None and runtime != "auto":
        raise TableError(
            f"leaving a {leave_out} out fits each engine's own profile, so runtime must be 'auto', "
            f"got {runtime!r}"
        )
    if leave_out is not None and leave_out not in SPLITS:
        raise TableError(f"what is left out is one of {', '.join(SPLITS)}, got {leave_out!r}")
    known = measured_gpus()
    unknown = [gpu for gpu in gpus or () if gpu not in known]
    if unknown:
        raise TableError(
            f"nothing was measured end to end on {unknown[0]}; something was on {', '.join(known)}"
        )
    say = progress or (lambda words: None)
    evidence = {gpu: measured_on(gpu) for gpu in gpus or known}
    tables, absent = _tables(evidence, load, say)
    profile_of = profiles_of(runtime)
    if leave_out is not None:
        runs = [run for gpu in tables for run in evidence[gpu].rows]
        profile_of = profiles_without(leave_out, runs, tables, say)
    predicted = []
    for gpu, measured_kernels in tables.items():
        say(f"{gpu}: predicting {len(evidence[gpu].rows) + len(evidence[gpu].steps)} rows")
        on_gpu = predict_gpu(evidence[gpu], measured_kernels, profile_of)
        if leave_out is None:
            # what nothing is fitted to is no part of a report of what fits have not seen
            others = judge_independent(evidence[gpu], measured_kernels, runtime, False, on_gpu.skipped)
            on_gpu = on_gpu._replace(others=(*on_gpu.others, *others))
        predicted.append(on_gpu)
    settled = with_drafts([run for one in predicted for run in one.runs])
    say("finding what test benches add to TTFT")
    front_end_of = front_ends_of(settled, leave_out or "model")
    following = iter(settled)
    reports = tuple(
        one.judged(
            [next(following) for _ in one.runs], front_end_of, runtime_name(runtime), leave_out is not None
        )
        for one in predicted
    )
    return SampleValidation(
        __version__,
        runtime_name(runtime),
        leave_out or "",
        reports,
        absent,
        sum(len(one.rows) for one in evidence.values()),
        sum(len(one.runs) for one in predicted),
        _left_out(reports, evidence, absent),
    )


def _tables(
    evidence: dict[str, Measured], load: Callable[[str], Tables], say: Callable[[str], None]
) -> tuple[dict[str, Tables], dict[str, str]]:
    """Tables by GPU, and why others have none: the words name the command that brings them."""
    tables, absent = {}, {}
    for gpu in evidence:
        say(f"{gpu}: loading tables")
        try:
            tables[gpu] = load(gpu)
        except FastroofError as error:
            absent[gpu] = str(error)
    if not tables:
        raise TableError("no GPU has tables: " + "; ".join(f"{gpu}: {why}" for gpu, why in absent.items()))
    return tables, absent


def _left_out(
    reports: Sequence[Validation], evidence: dict[str, Measured], absent: dict[str, str]
) -> dict[str, int]:
    """Rows of runs by reason, the most first."""
    reasons = Counter[str]()
    for report in reports:
        no_runs = {STEPS_DATASET, *(row.dataset for row in evidence[report.gpu].independent)}
        for entry in report.left_out:
            if not entry.quantity and entry.source not in no_runs:
                reasons[entry.reason] += entry.rows
    for gpu, why in absent.items():
        reasons[f"{gpu}: {why}"] += len(evidence[gpu].rows)
        for entry in evidence[gpu].left_out:
            reasons[entry.reason] += entry.rows
    return dict(reasons.most_common())


def report_document(report: SampleValidation, min_rows: int = 1) -> dict[str, Any]:
    """Return the report as JSON has it.

    Parameters
    ----------
    report : SampleValidation
        What :func:`validate_gpus` returned.
    min_rows : int
        Leave smaller groups out; they count in totals.

    Returns
    -------
    dict
        rows = represented + the sum of left_out; errors are fractions.
    """
    return {
        "version": report.version,
        "runtime": report.runtime,
        "leave_out": report.split,
        "gpus": {one.gpu: {"tables_hash": one.tables_hash} for one in report.gpus},
        "frontends": {
            one.gpu: {dataset: front._asdict() for dataset, front in one.frontends.items()}
            for one in report.gpus
        },
        "gpus_left_out": report.absent,
        "rows": report.represented + sum(report.left_out.values()),
        "runs": report.runs,
        "represented": report.represented,
        "left_out": report.left_out,
        "totals": [asdict(total) for total in report.totals()],
        "groups": [group._asdict() for group in report.groups(min_rows)],
    }
