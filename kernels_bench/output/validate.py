"""Look measured tables over before they are used: fastroof's checks, and what an own measurement adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.config.gpu import GpuSpec
from fastroof.judging.grid_checks import SEVERITIES, Finding, Severity, example
from fastroof.judging.validate import FileReport, validate, worst
from fastroof.load import MeasuredTable, MeasuredTables
from kernels_bench.output.provenance import HARMLESS_THROTTLES, refuse_odd_provenance
from kernels_bench.output.table_sets import row_keys
from kernels_bench.protocol import Point

Columns = Mapping[str, Array]

WIDE_QUARTILES: Final = 0.05
"""The quartile range over the median at which a point is measured again."""
SPREAD: Final = 0.05
"""A sentinel should not vary more than a single point may."""
GRAVE_SPREAD: Final = 0.25
"""A sentinel that varies by this much ran on a GPU that others used or that was throttled."""
DRIFT: Final = 0.03
"""The difference of clocks at which a point is measured again: a drift of the same size is as bad."""


@dataclass(frozen=True)
class Validation:
    """All findings about a table set."""

    gpu: str
    # fastroof's checks, one a file, with the findings of :func:`validate_tables` added to them.
    reports: tuple[FileReport, ...]
    # What concerns the set as a whole: sentinels, device, skips, coverage.
    findings: tuple[Finding, ...]
    coverage: tuple[Coverage, ...] = ()
    # How each sentinel of each run repeated, as :class:`kernels_bench.sentinels.SentinelRepeat` has it.
    sentinels: tuple[Mapping[str, Any], ...] = ()

    @property
    def severity(self) -> Severity:
        """Severity of the most severe finding, or ``"note"``."""
        own = (f.severity for f in self.findings)
        return max((worst(self.reports), *own), key=SEVERITIES.index)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON can hold."""
        return {
            "gpu": self.gpu,
            "severity": self.severity,
            "files": [report.as_dict() for report in self.reports],
            "findings": [asdict(finding) for finding in self.findings],
            "coverage": [asdict(group) | {"missing": group.missing} for group in self.coverage],
            "sentinels": [dict(repeat) for repeat in self.sentinels],
        }


def validate_tables(
    tables: MeasuredTables,
    gpu: GpuSpec,
    grid: Sequence[Point] | None = None,
    skipped: Sequence[str] = (),
    sentinels: Sequence[str] = (),
) -> Validation:
    """Check a table set."""
    extra: dict[str, list[Finding]] = {
        operator: list(_table_findings(table)) for operator, table in tables.tables.items()
    }
    reports = []
    for report in validate(tables, gpu):
        # A table of several files reports what concerns all of them with its first.
        findings = sorted([*report.findings, *extra.pop(report.operator, [])], key=_gravest_first)
        reports.append(replace(report, findings=tuple(findings)))
    # Other sources have no runs and sentinels.
    own = (t.provenance for t in tables.tables.values() if {"runs", "merged_from"} & set(t.provenance))
    covered = () if grid is None else coverage(tables, grid, skipped, sentinels)
    provenance = next(own, None)
    findings = [*_set_findings(provenance), *coverage_findings(covered)]
    return Validation(
        gpu=tables.gpu,
        reports=tuple(reports),
        findings=tuple(sorted(findings, key=_gravest_first)),
        coverage=covered,
        sentinels=tuple((provenance or {}).get("sentinels", ())),
    )


def _gravest_first(finding: Finding) -> int:
    return -SEVERITIES.index(finding.severity)


# -- one table -----------------------------------------------------------------------------------


def _table_findings(table: MeasuredTable) -> Iterator[Finding]:
    if not table.num_rows:
        return
    columns = table.columns
    yield from _quartiles(table.operator, columns)
    if "run_spread" in columns:
        apart = columns["run_spread"] > WIDE_QUARTILES
        if apart.any():
            row = int(np.argmax(columns["run_spread"]))
            share = float(columns["run_spread"][row])
            message = (
                f"runs are more than {WIDE_QUARTILES:.0%} apart in {apart.sum()} rows, up to {share:.1%}"
            )
            point = example(table.operator, columns, row) | {"run_spread": share}
            yield Finding("runs_apart", "warning", int(apart.sum()), message, point)


def _quartiles(operator: str, columns: Columns) -> Iterator[Finding]:
    names = ("min_us", "p25_us", "latency_us", "p75_us")
    if any(name not in columns for name in names):
        return
    low, first, median, third = (columns[name] for name in names)
    wrong = (low > first) | (first > median) | (median > third)
    if wrong.any():
        row = int(np.argmax(wrong))
        message = f"{wrong.sum()} rows have a median outside of their quartiles, or a larger minimum"
        point = example(operator, columns, row) | {name: float(columns[name][row]) for name in names}
        yield Finding("quartiles", "error", int(wrong.sum()), message, point)
    width = (third - first) / median
    wide = width > WIDE_QUARTILES
    if wide.any():
        row = int(np.argmax(width))
        message = (
            f"{wide.sum()} of {len(wide)} rows have quartiles more than {WIDE_QUARTILES:.0%} of the median "
            f"apart, up to {width[row]:.1%}"
        )
        point = example(operator, columns, row) | {"p25_us": float(first[row]), "p75_us": float(third[row])}
        # One in ten is what a busy host does to a run; above it the medians themselves are in doubt.
        severity: Severity = "warning" if wide.mean() > 0.1 else "note"
        yield Finding("wide_quartiles", severity, int(wide.sum()), message, point)


# -- the set as a whole --------------------------------------------------------------------------


def _set_findings(provenance: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield findings from the provenance that kernels_bench wrote."""
    if provenance is None:
        return
    refuse_odd_provenance(provenance)
    sentinels = provenance.get("sentinels", [])
    if not sentinels:
        yield Finding("no_sentinels", "warning", 0, "no sentinel was measured: drift would not show")
    for kind, name, limit, words in (
        ("sentinel_spread", "spread", SPREAD, "varies"),
        ("sentinel_drift", "drift", DRIFT, "drifts from first to last third"),
    ):
        moved = [s for s in sentinels if abs(s[name]) > limit]
        if moved:
            most = max(moved, key=lambda s: abs(s[name]))
            grave = kind == "sentinel_spread" and abs(most[name]) > GRAVE_SPREAD
            message = f"sentinel {most['key']} of {most['run']} {words} by {most[name]:.1%} of its median"
            yield Finding(kind, "error" if grave else "warning", len(moved), message, dict(most))
    for part in (provenance, *provenance.get("merged_from", [])):
        yield from _device_findings(part)


def _device_findings(provenance: Mapping[str, Any]) -> Iterator[Finding]:
    device = provenance.get("device", {})
    by_card = {} if isinstance(device, str) else device.get("throttled_rows", {})  # others name the card
    throttled = {name: count for name, count in by_card.items() if name not in HARMLESS_THROTTLES}
    if throttled:
        words = ", ".join(f"{name} in {count} rows" for name, count in throttled.items())
        # Large GEMMs draw the full power budget of a healthy card; heat is another matter.
        severity: Severity = "note" if set(throttled) == {"sw_power_cap"} else "warning"
        yield Finding("throttled", severity, sum(throttled.values()), f"clocks were held back: {words}")
    if left_out := provenance.get("left_out", {}):
        key, why = next(iter(left_out.items()))
        message = f"{len(left_out)} measured rows are in no table, as {key}: {why}"
        yield Finding("left_out", "warning", len(left_out), message)
    for kind, reasons in provenance.get("skips", {}).items():
        common = max(reasons, key=lambda reason: reasons[reason])
        count = sum(reasons.values())
        grave_kind: Severity = "warning" if kind in ("reference", "error") else "note"
        yield Finding("skips", grave_kind, count, f"{count} points skipped ({kind}), most of all: {common}")


@dataclass(frozen=True)
class Coverage:
    """How much of one group of a grid has been measured, in points."""

    group: str
    operator: str
    points: int
    measured: int
    skipped: int

    @property
    def missing(self) -> int:
        """Points that were neither measured nor skipped."""
        return self.points - self.measured - self.skipped


def coverage(
    tables: MeasuredTables, grid: Sequence[Point], skipped: Sequence[str] = (), sentinels: Sequence[str] = ()
) -> tuple[Coverage, ...]:
    """Count how much of a grid a table set holds, by group."""
    wanted = {point.operator for point in grid}
    have = set(sentinels)
    for operator, table in tables.tables.items():
        if operator in wanted:
            have.update(row_keys(operator, table.columns))
    tried = set(skipped)
    counts: dict[tuple[str, str], list[int]] = {}
    for point in grid:
        group = counts.setdefault((point.group, point.operator), [0, 0, 0])
        key = point.key
        group[0] += 1
        group[1] += key in have
        group[2] += key in tried and key not in have
    return tuple(Coverage(*names, *numbers) for names, numbers in counts.items())


def coverage_findings(groups: Sequence[Coverage]) -> Iterator[Finding]:
    """Yield findings about missing points."""
    missing = sum(group.missing for group in groups)
    if not missing:
        return
    points = sum(group.points for group in groups)
    most = max(groups, key=lambda group: group.missing)
    message = (
        f"{missing} of {points} points of the grid were not measured ({missing / points:.0%}), most of all "
        f"{most.missing} of {most.points} in {most.group or most.operator}"
    )
    yield Finding("coverage", "warning", missing, message)
