"""Print each target's counts at the end of pytest, whichever worker ran it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()) or ():
                if name == "fuzz" and getattr(report, "when", "") == "call":
                    counts[value["target"]] = value
    if not counts:
        return
    terminalreporter.section("fuzz targets")
    for name, one in sorted(counts.items()):
        terminalreporter.line(
            f"{name:24} {one['cases']:6,} cases: {one['answered']:6,} answered, {one['refused']:6,} refused, "
            f"{one['failed']} failures, {one['seconds']:.1f} s"
        )
    total = sum(one["cases"] for one in counts.values())
    terminalreporter.line(f"{'all':24} {total:6,} cases")
