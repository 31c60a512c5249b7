"""``fastroof plot``: pictures of tables, plans and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fastroof.cli.errors import help_if_alone, warn
from fastroof.cli.inputs import gpu_and_tables
from fastroof.cli.options import Dtype, KvDtype, Method, Model, Runtime
from fastroof.errors import FastroofError, MissingTableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastroof import GpuSpec, Tables
    from fastroof.report.results_file import Results as SweepResults

__all__ = ["register"]

DEFAULT_MODEL = "llama-3.1-8b"

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write: .png or .svg.")]
Gpu = Annotated[str | None, typer.Option(help="GPU (see fastroof gpus).  [default: h100]")]
TablesPath = Annotated[
    str | None, typer.Option(metavar="PATH", help="Folder of measured tables to use instead.")
]
Source = Annotated[str | None, typer.Option(help="Use only this source of the tables.")]

Tp = Annotated[int, typer.Option(help="GPUs the model is split over: 1, 2, 4 or 8.")]

Results = Annotated[
    Path, typer.Argument(metavar="RESULTS.parquet", help="What fastroof sweep wrote.", show_default=False)
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Only such rows, as --where isl=4000; repeatable.  [default: the first workload of several]",
    ),
]

group = typer.Typer(help="Draw tables, plans and sweeps as PNG or SVG.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(help_if_alone)
    for command in (roofline, mfu, step, pareto, curves, leading_steps):
        group.command(command.__name__.replace("_", "-"))(command)
    app.add_typer(group, name="plot")


def _source_words(tables: Tables) -> str:
    return ", ".join(sorted(set(tables.sources.values())))


def _prepare(
    output: Path, gpu: str | None, tables: str | None, source: str | None
) -> tuple[GpuSpec, Tables | None]:
    """Find out what is missing before any time goes into a picture."""
    from fastroof.report.plots import checked_path, style

    checked_path(output)
    with style():
        return gpu_and_tables(gpu, tables, source)


def _save(figure: Figure, output: Path) -> None:
    from fastroof.report import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")


def roofline(
    output: Output,
    gpu: Gpu = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Peaks and GEMMs to show: bf16, fp8, fp8_block; repeatable.  [default: bf16]"),
    ] = None,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Measured kernels on the GPU's roofline."""
    from fastroof.report import draw_roofline

    spec, measured = _prepare(output, gpu, tables, source)
    if measured is None:
        warn(f"no measured tables of {spec.name}: the picture has its roofs and no kernels")
    _save(draw_roofline(spec, measured, dtypes=tuple(dict.fromkeys(dtype or ("bf16",)))), output)


def mfu(
    output: Output,
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = None,
    tp: Tp = 1,
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = "bf16",
    method: Method = "roofline",
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """MFU of one model's kernels against their sizes."""
    from fastroof import load_model
    from fastroof.report import draw_mfu

    spec, measured = _prepare(output, gpu, tables, source)
    if measured is None:
        raise MissingTableError(f"{spec.name} has no measured tables to draw; see fastroof gpus")
    figure = draw_mfu(load_model(model), measured, tp=tp, dtype=dtype, kv_dtype=kv_dtype, method=method)
    _save(figure, output)


def step(
    output: Output,
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = None,
    tp: Tp = 1,
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = "bf16",
    against: Annotated[str, typer.Option(help="What varies: batch or kv-len.")] = "batch",
    batch: Annotated[int, typer.Option(help="Requests in the step, where kv-len varies.")] = 64,
    kv_len: Annotated[int, typer.Option(help="Tokens each attends to, where the batch varies.")] = 4096,
    max_batch: Annotated[int, typer.Option(help="Largest batch, where it varies.")] = 512,
    method: Method = "roofline",
    runtime: Runtime = "kernels",
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Decode step by component, against batch or context."""
    from fastroof import compile_plan
    from fastroof.report import draw_step

    varied = {"batch": "batch_size", "kv-len": "kv_len"}
    if against not in varied:
        raise FastroofError(f"--against is batch or kv-len, got {against!r}")
    spec, measured = _prepare(output, gpu, tables, source)
    plan = compile_plan(
        model,
        spec,
        measured,
        tp=tp,
        dtype=dtype,
        kv_dtype=kv_dtype,
        runtime=runtime,
        method=method,
        max_tokens=max(8192, max_batch, batch),
        max_seqs=max_batch if against == "batch" else max(max_batch, batch),
    )
    figure = draw_step(
        plan,
        against=cast('Literal["batch_size", "kv_len"]', varied[against]),
        batch_size=batch,
        kv_len=kv_len,
        source="" if measured is None else _source_words(measured),
    )
    _save(figure, output)


def pareto(
    results: Results,
    output: Output,
    colour_by: Annotated[
        str, typer.Option(help="Column with colours and fronts of its own, as model, tp or dtype.")
    ] = "model",
    where: Where = None,
) -> None:
    """Tokens/s per user against per GPU, of a sweep."""
    from fastroof.report import draw_pareto

    found, wanted = _swept(results, output, where, leave=(colour_by,))
    _save(draw_pareto(found, colour_by=colour_by, **wanted), output)


def curves(results: Results, output: Output, where: Where = None) -> None:
    """TTFT and TPOT of a sweep over its load."""
    from fastroof.report import draw_serving_curves

    found, wanted = _swept(results, output, where, is_over_load=True)
    _save(draw_serving_curves(found, **wanted), output)


def leading_steps(results: Results, output: Output, where: Where = None) -> None:
    """What the steps of a sweep's best rows are made of."""
    from fastroof.report import draw_leading_steps

    found, wanted = _swept(results, output, where)
    _save(draw_leading_steps(found, **wanted), output)


def _swept(
    path: Path,
    output: Path,
    where: list[str] | None,
    *,
    leave: tuple[str, ...] = (),
    is_over_load: bool = False,
) -> tuple[SweepResults, dict[str, Any]]:
    """The results, and which rows to draw: of one workload, unless something else is asked for."""
    from fastroof.report import read_results
    from fastroof.report.plots import checked_path, style

    checked_path(output)
    with style():
        found = read_results(path)
    wanted: dict[str, Any] = {}
    for text in where or ():
        name, sign, value = text.partition("=")
        if not sign or name not in found:
            columns = ", ".join(found.have((*found.kind.settings, *found.kind.workload)))
            raise FastroofError(f"--where {text} is not COLUMN=VALUE; the columns are {columns}")
        given = {str(each): each for each in found.codes(name)[1]}
        wanted[name] = given.get(value, value)
    start = found.start_workload()
    for name in found.have(found.kind.workload):
        if name not in (*wanted, *leave) and not (is_over_load and name == found.load()):
            wanted[name] = start[name]
    return found, wanted
