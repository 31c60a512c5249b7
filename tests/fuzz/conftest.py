"""Options of the fuzzer, and each target's counts at the end of pytest, whichever worker ran it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-first", metavar="SEED", type=int, default=0, help="first seed of each target")
    group.addoption("--fuzz-cases", metavar="NUMBER", type=int, help="cases per target (default: its own)")
    group.addoption("--fuzz-keep", metavar="FOLDER", type=Path, help="write failing and crashing cases here")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        target: kinds
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, (target, kinds) in getattr(report, "user_properties", ()) or ()
        if name == "fuzz" and getattr(report, "when", "") == "call"
    }
    if counts:
        terminalreporter.section("fuzz targets")
    for target, kinds in sorted(counts.items()):
        shown = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
        terminalreporter.line(f"{target:24} {shown}")
