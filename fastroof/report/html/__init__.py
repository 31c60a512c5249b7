"""Self-contained interactive pages: a sweep's results, and a simulated run."""

from __future__ import annotations

from fastroof.report.html.page import ReportFile, write_report
from fastroof.report.html.simulation_page import write_simulation_report

__all__ = ["ReportFile", "write_report", "write_simulation_report"]
