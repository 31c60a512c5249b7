"""Validate measured tables: impossible rows, and rows that harm lookups.

Nothing is changed or dropped; reports list findings with their severity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.config.gpu import GpuSpec
from fastroof.judging.grid_checks import (
    SEVERITIES,
    Finding,
    Severity,
    duplicates,
    example,
    grid_findings,
    grid_of,
)
from fastroof.load.family_checks import find_unsound
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.trees import fit_peak
from fastroof.load.unsound import unsound_families
from fastroof.operators.operator import Columns, RowWork
from fastroof.operators.registry import OPERATORS
from fastroof.units import GB, MIB, TFLOP, US_PER_S


@dataclass(frozen=True)
class AxisRange:
    """Number of distinct values of one axis, and their range."""

    name: str
    count: int
    minimum: int
    maximum: int


@dataclass(frozen=True)
class FileReport:
    """Findings in one file of measured rows."""

    file: str
    operator: str
    source: str
    rows: int
    axes: tuple[AxisRange, ...]
    mfu_min: float | None
    mfu_max: float | None
    bandwidth_max_bytes_per_s: float | None
    bandwidth_limit_bytes_per_s: float
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """Highest severity of the findings, ``"note"`` without any."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="note")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "severity": self.severity}


def worst(reports: Iterable[FileReport]) -> Severity:
    """Highest severity of all reports, ``"note"`` without any."""
    return max((r.severity for r in reports), key=SEVERITIES.index, default="note")


UNKNOWN_L2_BYTES = 64 * MIB
"""L2 size if a gpu.toml has none: more than Hopper's, in favour of the table."""


def validate(
    tables: MeasuredTables, gpu: GpuSpec, siblings: Mapping[str, Sequence[MeasuredTable]] | None = None
) -> list[FileReport]:
    """Report on every file of measured tables."""
    siblings_by_operator = siblings or {}
    return [
        report
        for name, table in tables.tables.items()
        for report in _reports(table, gpu, siblings_by_operator.get(name, ()))
    ]


def _reports(table: MeasuredTable, gpu: GpuSpec, siblings: Sequence[MeasuredTable]) -> list[FileReport]:
    if not table.num_rows:
        return []
    columns = table.columns
    if "file" in columns:
        names, first, file = np.unique(columns["file"], return_index=True, return_inverse=True)
        in_order = np.argsort(first)
    else:
        names = np.array([", ".join(table.files) or table.operator], dtype=object)
        file, in_order = np.zeros(table.num_rows, np.int64), np.zeros(1, np.int64)
    of_file = {
        number: [finding] for number, finding in duplicates(table.operator, columns, file, len(names)).items()
    }
    # families span all files of a table
    of_file.setdefault(int(in_order[0]), []).extend(_unsound(table, siblings))
    for number, finding in _spikes(table, file):
        of_file.setdefault(number, []).append(finding)
    return [
        _report(
            table,
            str(names[i]),
            {name: values[file == i] for name, values in columns.items()},
            of_file.get(int(i), []),
            gpu,
        )
        for i in in_order
    ]


def _report(
    table: MeasuredTable, file: str, columns: Columns, of_table: list[Finding], gpu: GpuSpec
) -> FileReport:
    operator = table.operator
    work = OPERATORS[operator].work(columns, gpu)
    seconds = columns["latency_us"] / US_PER_S
    mfu = work.flops / (seconds * work.peak_flops_per_s)
    bandwidth = work.moved_bytes / seconds
    findings = [
        *_check_peaks(operator, columns, work, gpu),
        *_check_bandwidth(operator, columns, work, bandwidth, gpu),
        *_check_mfu_column(operator, columns, file, gpu),
        *of_table,
        *grid_findings(grid_of(operator, columns)),
    ]
    axes = {c.name: columns[c.name] for c in OPERATORS[operator].axes}
    return FileReport(
        file=file,
        operator=operator,
        source=table.source,
        rows=len(seconds),
        axes=tuple(
            AxisRange(name, len(np.unique(v)), int(v.min()), int(v.max())) for name, v in axes.items()
        ),
        mfu_min=_or_none(np.fmin.reduce(mfu)),
        mfu_max=_or_none(np.fmax.reduce(mfu)),
        bandwidth_max_bytes_per_s=_or_none(np.fmax.reduce(bandwidth)),
        bandwidth_limit_bytes_per_s=work.bandwidth_bytes_per_s,
        findings=tuple(sorted(findings, key=lambda f: -SEVERITIES.index(f.severity))),
    )


def _unsound(table: MeasuredTable, siblings: Sequence[MeasuredTable]) -> list[Finding]:
    flagged = [(family.test, family.keys) for family in unsound_families(table.provenance, table.operator)]
    findings = []
    for family in find_unsound(table, siblings):
        is_flagged = (family.test, family.keys) in flagged
        words = " ".join(
            f"{name} {' '.join(cells)}" if isinstance(cells[0], str) else f"{name} {cells[0]} to {cells[1]}"
            for name, cells in family.keys.items()
        )
        message = f"{words}: {family.test}: {family.reason}"
        if not is_flagged:
            message += "; not flagged in provenance.toml"
        severity: Severity = "note" if is_flagged else "warning"
        findings.append(Finding("unsound", severity, family.rows, message, family.as_dict()))
    return findings


def _spikes(table: MeasuredTable, file: Longs) -> Iterator[tuple[int, Finding]]:
    """Yield one finding per spike, with the number of its file."""
    spikes, operator, columns = table.spikes, table.operator, table.columns
    axes = table.schema.independent_axes(columns)
    names = list(axes)
    for number, row in enumerate(spikes.row.tolist()):
        axis = names[spikes.axis[number]]
        of = int(file[row])
        point = example(operator, columns, row) | {
            "latency_us": float(spikes.latency_us[number]),
            "row": int(np.count_nonzero(file[: row + 1] == of)),
            "axis": axis,
            "ratio": float(spikes.ratio[number]),
            "neighbours": [
                {axis: int(axes[axis][at]), "latency_us": float(us)}
                for at, us in (
                    (spikes.before[number], spikes.before_us[number]),
                    (spikes.after[number], spikes.after_us[number]),
                )
                if at >= 0
            ],
        }
        yield of, Finding("spike", "warning", 1, _describe_spike(operator, point), point)


def _describe_spike(operator: str, point: Mapping[str, Any]) -> str:
    columns = (*OPERATORS[operator].keys, *OPERATORS[operator].axes)
    place = " ".join(f"{column.name} {point[column.name]}" for column in columns)
    neighbours = " and ".join(
        f"{one['latency_us']:.4g} at {point['axis']} {one[point['axis']]}" for one in point["neighbours"]
    )
    return (
        f"row {point['row']}, {place}: {point['latency_us']:.4g} us, {point['ratio']:.3g} times its "
        f"neighbour{'s' * (len(point['neighbours']) > 1)} ({neighbours}), and no sibling row shares it"
    )


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


# -- against the GPU ---------------------------------------------------------------------------


def _check_peaks(operator: str, columns: Columns, work: RowWork, gpu: GpuSpec) -> list[Finding]:
    computes = ~np.isnan(work.flops)
    unknown = computes & np.isnan(work.peak_flops_per_s)
    flops_per_s = work.flops * US_PER_S / columns["latency_us"]
    mfu, limit = flops_per_s / work.peak_flops_per_s, flops_per_s / work.limit_flops_per_s
    impossible = limit > 1.0
    findings = []
    if unknown.any():
        row = int(np.argmax(unknown))
        column = "dtype" if "dtype" in columns else "kv_dtype"
        have = ", ".join(sorted(gpu.peak_flops_per_s))
        dtype = columns[column][row]
        message = f"{unknown.sum()} rows of dtype {dtype!r}: {gpu.name} computes only in {have}"
        point = example(operator, columns, row)
        findings.append(Finding("unknown_dtype", "error", int(unknown.sum()), message, point))
    slow_units = (mfu > 1.0) & ~impossible
    cases: list[tuple[str, Severity, Bools, Floats, Floats, str]] = [
        ("mfu_above_1", "error", impossible, limit, work.limit_flops_per_s, "wrong unit, dtype or GPU"),
        ("above_own_peak", "warning", slow_units, mfu, work.peak_flops_per_s, "it computed in fp8, not bf16"),
    ]
    for kind, severity, rows, share, peak, why in cases:
        if rows.any():
            row = int(np.argmax(np.where(rows, share, -np.inf)))
            message = (
                f"{rows.sum()} rows above {peak[row] / TFLOP:.4g} TFLOP/s, up to MFU {share[row]:.3f}: {why}"
            )
            point = example(operator, columns, row) | {"mfu": float(share[row])}
            findings.append(Finding(kind, severity, int(rows.sum()), message, point))
    return findings


def _check_bandwidth(
    operator: str, columns: Columns, work: RowWork, bandwidth: Floats, gpu: GpuSpec
) -> list[Finding]:
    share = bandwidth / work.bandwidth_bytes_per_s
    least_share = share * (work.least_bytes / work.moved_bytes)
    above = least_share > 1.0
    slack = OPERATORS[operator].bandwidth_slack
    if work.over_link:
        harmless = above & (share <= slack) & OPERATORS[operator].faster_than_ring
        impossible = share > slack
        easy = ("in_switch", "possible for switches that reduce")
        what = "link"
    else:
        cached = work.moved_bytes < 2 * (gpu.l2_bytes or UNKNOWN_L2_BYTES)
        harmless = above & cached
        impossible = (least_share > slack) & ~cached
        easy = ("cached", "small enough for the L2")
        what = "memory"
    cases: list[tuple[str, Severity, Bools, str]] = [
        ("bandwidth", "error", impossible, "wrong unit, size or GPU"),
        ("bandwidth", "warning", above & ~harmless & ~impossible, "more than the datasheet has"),
        (easy[0], "note", harmless, easy[1]),
        (
            "few_experts",
            "warning",
            (share > 1.0) & ~above,
            "its tokens reached fewer experts than even routing does",
        ),
    ]
    findings = []
    for kind, severity, rows, why in cases:
        if rows.any():
            row = int(np.argmax(np.where(rows, share, -np.inf)))
            message = (
                f"{rows.sum()} rows above the {work.bandwidth_bytes_per_s / GB:g} GB/s of the {what}, up to "
                f"{bandwidth[row] / GB:.0f} GB/s: {why}"
            )
            point = example(operator, columns, row)
            point |= {"bytes": float(work.moved_bytes[row]), "bandwidth_bytes_per_s": float(bandwidth[row])}
            findings.append(Finding(kind, severity, int(rows.sum()), message, point))
    return findings


# -- against the file's own mfu column ---------------------------------------------------------


def _check_mfu_column(operator: str, columns: Columns, file: str, gpu: GpuSpec) -> list[Finding]:
    mfu = columns.get("mfu")
    if mfu is None or np.isnan(mfu).any():
        return []
    dtypes = np.unique(columns["dtype"]) if "dtype" in columns else np.array(["bf16"], dtype=object)
    fit = fit_peak(operator, columns, gpu, file, str(dtypes[0])) if len(dtypes) == 1 else None
    if fit is None:
        return []
    findings = []
    peak, label = fit.finding.peak_flops_per_s, fit.finding.label
    if not fit.finding.agrees:
        message = f"the mfu column was divided by {peak / TFLOP:.4g} TFLOP/s: {label}; latency is used"
        findings.append(Finding("mfu_column_peak", "warning", len(mfu), message, {"peak_flops_per_s": peak}))
    elif label.endswith(("1.8", "not halved")):
        message = f"the mfu column counts other FLOPs than it should: {label}; latency is used"
        findings.append(Finding("mfu_column_flops", "note", len(mfu), message))
    wrong = fit.contradicts
    if wrong.any():
        apart = np.abs(mfu - fit.expected_mfu) / fit.expected_mfu
        row = int(np.argmax(np.where(wrong, apart, -np.inf)))
        meant = columns["latency_us"][row] * fit.expected_mfu[row] / mfu[row] if mfu[row] else np.inf
        message = (
            f"latency and mfu contradict each other in {wrong.sum()} rows: "
            f"{columns['latency_us'][row]:g} us means MFU {fit.expected_mfu[row]:.4f}, "
            f"the file has {mfu[row]:g}" + (f" ({meant:.4g} us)" if mfu[row] else "") + "; latency is used"
        )
        point = example(operator, columns, row)
        point |= {"mfu": float(mfu[row]), "mfu_by_latency": float(fit.expected_mfu[row])}
        findings.append(Finding("mfu_column_rows", "warning", int(wrong.sum()), message, point))
    return findings
