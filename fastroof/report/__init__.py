"""Plots of tables, plans and sweeps; matplotlib is imported on first use."""

from __future__ import annotations

from fastroof.report.front import draw_pareto
from fastroof.report.model_roofline_plot import draw_model_roofline
from fastroof.report.plots import check_picture, save_figure
from fastroof.report.results_file import read_results
from fastroof.report.rooflines import draw_roofline
from fastroof.report.step_plot import draw_step

__all__ = [
    "check_picture",
    "draw_model_roofline",
    "draw_pareto",
    "draw_roofline",
    "draw_step",
    "read_results",
    "save_figure",
]
