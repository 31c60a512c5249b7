"""The interactive report: a sweep's results as one page that needs nothing else."""

from __future__ import annotations

from fastroof.report.html.page import ReportFile, write_report

__all__ = ["ReportFile", "write_report"]
