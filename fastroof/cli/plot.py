"""The commands of ``fastroof plot``: plots of tables, plans and sweeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.option_groups import OUTSIDE_STEPS, TABLES, plan_options
from fastroof.cli.options import Model, Results, option
from fastroof.command_group import Commands, Group, GroupValues, help_if_alone, options_given, taking, warn
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastroof import GpuSpec, Tables
    from fastroof.report.results_file import Results as SweepResults


def source_words(tables: Tables) -> str:
    """Name the sources of tables, for the foot of a plot."""
    return ", ".join(sorted(set(tables.sources.values())))


def gpu_and_tables_to_draw(
    output: Path, gpu: str | None, tables: str | None, source: str | None
) -> tuple[GpuSpec, Tables | None]:
    """Check what is missing before drawing."""
    from fastroof.report import check_picture

    check_picture(output)
    return gpu_and_tables(gpu, tables, source)


def save(figure: Figure, output: Path) -> None:
    """Write a plot and print its path."""
    from fastroof.report import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")


def _rows_to_draw(results: SweepResults, where: list[str] | None, colour_by: str) -> dict[str, Any]:
    """Return the values that rows to draw have (default: those of one workload)."""
    wanted: dict[str, Any] = {}
    for text in where or ():
        name, sign, value = text.partition("=")
        if not sign or name not in results:
            columns = ", ".join(results.have((*results.kind.settings, *results.kind.workload)))
            raise FastroofError(f"--where {text} is not COLUMN=VALUE; the columns are {columns}")
        given = {str(each): each for each in results.codes(name)[1]}
        wanted[name] = given.get(value, value)
    start = results.start_workload()
    others = [n for n in results.have(results.kind.workload) if n not in wanted and n != colour_by]
    return wanted | {name: start[name] for name in others}


DEFAULT_MODEL: Final = "llama-3.1-8b"

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write: .png or .svg.")]


@taking(plan=plan_options(without=OUTSIDE_STEPS), measured=TABLES)
def step(
    *,
    output: Output,
    model: Model = DEFAULT_MODEL,
    plan: GroupValues,
    against: Annotated[str, typer.Option(metavar="batch|kv-len", help="What varies.")] = "batch",
    batch: Annotated[
        int, typer.Option(metavar="REQUESTS", help="Requests in the step, with --against kv-len.")
    ] = 64,
    kv_len: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens that each attends to, with --against batch.")
    ] = 4096,
    max_batch: Annotated[
        int, typer.Option(metavar="REQUESTS", help="Largest batch, with --against batch.")
    ] = 512,
    measured: GroupValues,
) -> None:
    """Plot a decode step by component over batch or context."""
    from fastroof import compile_plan
    from fastroof.report import draw_step

    varied = {"batch": "batch_size", "kv-len": "kv_len"}
    if against not in varied:
        raise FastroofError(f"--against is batch or kv-len, got {against!r}")
    spec, tables = gpu_and_tables_to_draw(output, **measured)
    timed = compile_plan(
        model,
        spec,
        tables,
        **plan,
        max_num_batched_tokens=max(8192, max_batch, batch),
        max_num_seqs=max_batch if against == "batch" else max(max_batch, batch),
    )
    figure = draw_step(
        timed,
        against=cast('Literal["batch_size", "kv_len"]', varied[against]),
        batch_size=batch,
        kv_len=kv_len,
        source="" if tables is None else source_words(tables),
    )
    save(figure, output)


def pareto(
    results: Results,
    output: Output,
    colour_by: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column that sets colours and fronts: model, tp or dtype.")
    ] = "model",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=VALUE",
            help="Rows to draw, as isl=4000; repeatable.  [default: those of the first workload]",
        ),
    ] = None,
) -> None:
    """Plot tokens/s per user against per GPU, of a sweep."""
    from fastroof.report import check_picture, draw_pareto, read_results

    check_picture(output)
    swept = read_results(results)
    save(draw_pareto(swept, colour_by=colour_by, **_rows_to_draw(swept, where, colour_by)), output)


_OF_A_MODEL: Final = ("--tp", "--batch", "--kv-len", "--prompt", "--kv-dtype", "--engine", "--method")


STEPS: Final[Group] = {
    "tp": option(str, "Up to six tp sizes, with --model.", "SIZES", default="1"),
    "batch": option(str, "Decodes of a step, with --model.", "SIZES", default="1,4,16,64,256"),
    "kv_len": option(int, "Tokens that each decode attends to, with --model.", "TOKENS", default=4096),
    "prompt": option(int, "Tokens of the prefill, with --model.", "TOKENS", default=8192, min=1),
}
"""The steps of a model on its roofline."""


@taking(steps=STEPS, plan=plan_options(only=("kv_dtype", "engine", "method")), measured=TABLES)
def roofline(
    *,
    context: typer.Context,
    output: Output,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE",
            help="Peaks and GEMMs to show (bf16, fp8, fp8_block; repeatable), or with --model the format of "
            "its linear layers.  [default: bf16]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model whose steps to show, one line per tp, instead of measured kernels."),
    ] = None,
    steps: GroupValues,
    plan: GroupValues,
    measured: GroupValues,
) -> None:
    """Plot kernels, or a model's steps, on a GPU's roofline."""
    from fastroof.report import draw_roofline

    if model is None:
        given = [name for name in _OF_A_MODEL if name in options_given(context).values()]
        if given:
            raise FastroofError(f"{', '.join(given)} need{'s' * (len(given) == 1)} --model")
    if model is not None and len(dtype or ()) > 1:
        raise FastroofError(f"--model takes one --dtype, got {', '.join(dtype or ())}")
    spec, tables = gpu_and_tables_to_draw(output, **measured)
    if model is not None:
        options = {**plan, "dtype": dtype[0] if dtype else "auto"}
        save(_model_figure(model, spec, tables, steps, options), output)
        return
    if tables is None:
        warn(f"{spec.name} has no measured tables; the plot shows its roofline without kernels")
    save(draw_roofline(spec, tables, dtypes=tuple(dict.fromkeys(dtype or ("bf16",)))), output)


def _sizes(name: str, text: str, most: int) -> list[int]:
    from fastroof.cli.workload_options import parse_sizes

    found = parse_sizes(name, text)
    sizes = sorted({found} if isinstance(found, int) else set(found))
    if sizes[0] < 1 or len(sizes) > most:
        raise FastroofError(f"{name} needs 1 to {most} sizes of at least 1, got {text}")
    return sizes


def _source_words(tables: Tables) -> str:
    """Return the source of tables, or the number of sources."""
    sources = set(tables.sources.values())
    return f"source {source_words(tables)}" if len(sources) == 1 else f"{len(sources)} sources of kernels"


def _model_figure(
    model: str, gpu: GpuSpec, measured: Tables | None, steps: GroupValues, options: dict[str, Any]
) -> Figure:
    """Compile a plan for each tp, and draw their steps."""
    from fastroof import compile_plan
    from fastroof.report import draw_model_roofline

    layouts, batches = _sizes("--tp", steps["tp"], 6), _sizes("--batch", steps["batch"], 12)
    sizes = {"kv_len": steps["kv_len"], "prompt": steps["prompt"]}
    options["max_num_batched_tokens"] = max(8192, sizes["prompt"], batches[-1])
    options["max_num_seqs"] = max(512, batches[-1])
    plans = [compile_plan(model, gpu, measured, tp=size, **options) for size in layouts]
    source = "" if measured is None else _source_words(measured)
    return draw_model_roofline(plans, batch_sizes=batches, **sizes, source=source)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(help="Draw tables, plans and sweeps as PNG or SVG.")
    group.callback(invoke_without_command=True)(help_if_alone)
    commands: dict[str, Callable[..., None]] = {
        "roofline": roofline,
        "step": step,
        "pareto": pareto,
    }
    for name, command in commands.items():
        group.command(name)(command)
    app.add_typer(group, name="plot")
