"""``fastroof tables validate``: check measured tables before they are used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from fastroof.cli.gpu_tables import import_progress
from fastroof.cli.options import FolderGpu, Json
from fastroof.cli.output import counted, percent, print_json, print_line, print_records
from fastroof.cli.tables.list import Where
from fastroof.defaults import DEFAULT_GPU
from fastroof.errors import TableError
from fastroof.units import TB

if TYPE_CHECKING:
    from fastroof.judging.grid_checks import Finding
    from fastroof.judging.validate import FileReport
    from fastroof.load import MeasuredTables
    from fastroof.tables import Tables

EXIT_WRONG_TABLES: Final = 1
_LISTED: Final = 3
"""Maximum findings of a kind that are listed one by one."""

VALIDATE_EPILOG: Final = """\b
Exit code 1 if a table must not be used or has an error finding, else 0.

\b
JSON: severity (note, warning or error: the gravest), reports: one object per file [gpu, file, operator,
source, rows, axes, mfu_min, mfu_max, bandwidth_max_bytes_per_s, bandwidth_limit_bytes_per_s, severity,
findings [kind, severity, count, message, worst]], refused: one object per set of tables that cannot be
used [folder, gpu, source, error], ignored: one object per file that was not read [folder, file, reason].
worst of a spike: the row's columns, row (from 1), axis, ratio, neighbours [size, latency_us], served_us,
served_relative_error.
"""


class _Checked(NamedTuple):
    reports: list[tuple[str, FileReport]]
    refused: list[dict[str, Any]]
    ignored: list[dict[str, str]]

    @property
    def severity(self) -> str:
        from fastroof.judging.validate import worst

        return "error" if self.refused else worst(report for _, report in self.reports)


def validate(
    where: Where = None,
    gpu: FolderGpu = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Source to check.  [default: all]")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print every finding, not one line per kind of warning.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check measured tables for errors."""
    checked = _check(gpu or DEFAULT_GPU, None, source) if where is None else _check(where, gpu, source)
    if as_json:
        print_json(
            {
                "severity": checked.severity,
                "reports": [{"gpu": name, **report.as_dict()} for name, report in checked.reports],
                "refused": checked.refused,
                "ignored": checked.ignored,
            }
        )
    else:
        _print(checked, every)
    if checked.severity == "error":
        raise typer.Exit(EXIT_WRONG_TABLES)


def _check(where: str, gpu: str | None, source: str | None) -> _Checked:
    from fastroof.judging.validate import validate
    from fastroof.load.family_checks import siblings_of
    from fastroof.load.listing import table_sets
    from fastroof.tables import Tables

    beside: dict[str, list[MeasuredTables]] = {}

    checked = _Checked([], [], [])
    try:
        with import_progress(where) as progress:
            sets = table_sets(where, gpu, source, progress=progress)
    except TableError as error:
        if gpu is not None or source is not None or not Path(where).is_dir():
            raise
        sets = []
        checked.refused.append({"folder": where, "gpu": None, "source": None, "error": str(error)})
    for table_set in table_sets(where, gpu) if source is not None and sets else sets:
        with suppress(TableError):
            measured = table_set.load()
            beside.setdefault(measured.gpu, []).append(measured)
    for table_set in sets:
        try:
            measured = table_set.load()
            reports = validate(measured, measured.gpu_spec, siblings_of(measured, beside[measured.gpu]))
        except TableError as error:
            place = {"folder": str(table_set.folder), "gpu": table_set.gpu, "source": table_set.source}
            checked.refused.append({**place, "error": str(error)})
            continue
        tables = Tables(measured, measured.gpu_spec)
        checked.reports.extend((measured.gpu, _with_served(report, tables)) for report in reports)
        checked.ignored.extend(
            {"folder": str(table_set.folder), "file": file, "reason": reason}
            for file, reason in measured.ignored.items()
        )
    return checked


def _with_served(report: FileReport, tables: Tables) -> FileReport:
    """Add what lookups answer instead to findings of spikes."""
    from fastroof.operators.registry import OPERATORS

    operator = OPERATORS[report.operator]
    if not operator.answers_lookups or all(finding.kind != "spike" for finding in report.findings):
        return report

    def with_served(finding: Finding) -> Finding:
        sizes = {name: finding.worst[name] for name in operator.arguments}
        served = tables.lookup(report.operator, with_error=True, **sizes)
        assert served.relative_error is not None
        us, error = float(served.latency_us), float(served.relative_error)
        message = f"{finding.message}; lookups answer {us:.4g} us ±{percent(error)}"
        worst = {**finding.worst, "served_us": us, "served_relative_error": error}
        return replace(finding, message=message, worst=worst)

    findings = (with_served(one) if one.kind == "spike" else one for one in report.findings)
    return replace(report, findings=tuple(findings))


def _print(checked: _Checked, every: bool) -> None:
    if checked.reports:
        columns: dict[str, Callable[[tuple[str, FileReport]], str]] = {
            "gpu": lambda one: one[0],
            "source": lambda one: one[1].source,
            "file": lambda one: one[1].file,
            "operator": lambda one: one[1].operator,
            "rows": lambda one: f"{one[1].rows:,}",
            "sizes": lambda one: " x ".join(f"{axis.count} {axis.name}" for axis in one[1].axes),
            "MFU": lambda one: (
                "-" if one[1].mfu_max is None else f"{percent(one[1].mfu_min)} to {percent(one[1].mfu_max)}"
            ),
            "max TB/s": lambda one: _tb_per_s(one[1].bandwidth_max_bytes_per_s),
            "of": lambda one: _tb_per_s(one[1].bandwidth_limit_bytes_per_s),
            "worst": lambda one: one[1].severity if one[1].findings else "-",
        }
        left = ("gpu", "source", "file", "operator", "sizes", "worst")
        print_records(checked.reports, columns, left=left, least=("file",))
        print_line()
    lines = _finding_lines(checked, every)
    # each source of a folder lists its unread files
    lines += dict.fromkeys(f"not read: {e['folder']}: {e['file']}: {e['reason']}" for e in checked.ignored)
    for line in lines:
        print_line(line)
    for entry in checked.refused:
        print_line(f"error: refused: {entry['error']}")
    counts = {
        severity: sum(f.severity == severity for _, report in checked.reports for f in report.findings)
        for severity in ("error", "warning", "note")
    }
    counts["error"] += len(checked.refused)
    rows_read = sum(report.rows for _, report in checked.reports)
    counts_text = ", ".join(counted(count, name) for name, count in counts.items())
    print_line(f"{counted(len(checked.reports), 'file')}, {rows_read:,} rows: {counts_text}")
    if not every and sum(counts.values()) > len(lines):
        print_line("--all lists every finding")


def _finding_lines(checked: _Checked, every: bool) -> list[str]:
    """Yield findings in words: errors one by one, others one line per kind."""
    lines = []
    for severity in ("error", "warning", "note"):
        kinds: dict[str, list[tuple[int, str, str]]] = {}
        for gpu, report in checked.reports:
            for finding in report.findings:
                if finding.severity == severity:
                    place = f"{gpu} {report.source} {report.file}"
                    kinds.setdefault(finding.kind, []).append((finding.count, place, finding.message))
        for kind, found in kinds.items():
            if every or severity == "error" or len(found) <= _LISTED:
                lines += [f"{severity}: {place}: {kind}: {message}" for _, place, message in found]
                continue
            _, place, message = max(found, key=lambda one: one[0])
            total = sum(count for count, *_ in found)
            lines.append(
                f"{severity}: {kind}: {total:,} in {len(found):,} findings, most in {place}: {message}"
            )
    return lines


def _tb_per_s(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / TB:.2f}"
