"""Where a sweep's latencies come from: the tables of each of its GPUs, or the datasheet model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from fastroof.config import gpu_names, load_gpu
from fastroof.errors import TableError
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.spec import DATASHEET

# Cutting a sweep into units needs no numba; whatever needs it is imported when tables are loaded.
if TYPE_CHECKING:
    from fastroof.plan.datasheet import DatasheetCurves
    from fastroof.tables import Tables

__all__ = ["GpuTables", "load_tables_by_gpu", "sources_hash", "tables_hash"]


class GpuTables(NamedTuple):
    """What plans of one GPU are compiled from: its tables, or the datasheet model's curves."""

    tables: Tables | None
    curves: DatasheetCurves | None = None


def load_tables_by_gpu(sweep: SweepKind) -> dict[str, GpuTables]:
    """Load the tables of each of a sweep's GPUs, by the name that the spec has for it."""
    from fastroof.load.by_name import missing_tables
    from fastroof.plan.datasheet import DatasheetCurves
    from fastroof.tables import load_tables

    tables_by_gpu, spec = {}, sweep.spec
    for given in sweep.gpus:
        gpu = load_gpu(given)
        if spec.tables == DATASHEET:
            tables_by_gpu[given] = GpuTables(None, DatasheetCurves(gpu))
        elif not spec.tables and gpu.name not in gpu_names():
            raise TableError(f"{missing_tables(gpu.name)} (tables = {DATASHEET!r} in a sweep)")
        else:
            tables_by_gpu[given] = GpuTables(
                load_tables(spec.tables or gpu.name, gpu=gpu.name, source=spec.source)
            )
    return tables_by_gpu


def tables_hash(tables_by_gpu: Mapping[str, GpuTables]) -> str:
    """Hash of the tables; of several GPUs, one after another."""
    return " ".join(
        "" if each.tables is None else each.tables.content_hash for each in tables_by_gpu.values()
    )


def sources_hash(tables_by_gpu: Mapping[str, GpuTables]) -> str:
    """Hash of all that latencies come from, sources that serve only some kernels or engines included."""
    return " ".join(
        "" if each.tables is None else each.tables.sources_hash for each in tables_by_gpu.values()
    )
