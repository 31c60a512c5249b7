"""Plans in C: plan files, a header, and an object file of the loops that needs no Python."""

from __future__ import annotations

from fastroof.backends.c.export import CExport, export_c
from fastroof.backends.c.plan_file import PlanFile, read_plan_file, write_plan_file

__all__ = ["CExport", "PlanFile", "export_c", "read_plan_file", "write_plan_file"]
