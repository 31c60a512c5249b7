"""``fastroof plot mfu``: the MFU of a model's kernels."""

from __future__ import annotations

import typer

from fastroof.cli.options import Dtype, GpuName, KvDtype, Method, Model, OneSource, TablesInstead, Tp
from fastroof.cli.plot.drawing import gpu_and_tables_to_draw, save
from fastroof.cli.plot.options import DEFAULT_MODEL, Output
from fastroof.errors import MissingTableError

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("mfu")(mfu)


def mfu(
    output: Output,
    model: Model = DEFAULT_MODEL,
    gpu: GpuName = None,
    tp: Tp = 1,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    method: Method = "roofline",
    tables: TablesInstead = None,
    source: OneSource = None,
) -> None:
    """MFU of one model's kernels against their sizes."""
    from fastroof import load_model
    from fastroof.load.by_name import missing_tables
    from fastroof.report import draw_mfu

    spec, measured = gpu_and_tables_to_draw(output, gpu, tables, source)
    if measured is None:
        raise MissingTableError(missing_tables(spec.name))
    figure = draw_mfu(load_model(model), measured, tp=tp, dtype=dtype, kv_dtype=kv_dtype, method=method)
    save(figure, output)
