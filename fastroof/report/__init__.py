"""Pictures of tables and plans; matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from fastroof.report.mfu_plot import draw_mfu
from fastroof.report.plots import save_figure
from fastroof.report.roofline_plot import draw_roofline
from fastroof.report.step_plot import draw_step

__all__ = ["draw_mfu", "draw_roofline", "draw_step", "save_figure"]
