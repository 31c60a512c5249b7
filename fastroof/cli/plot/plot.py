"""``fastroof plot curves``: TTFT and TPOT of a sweep over its load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer

from fastroof.cli.named_plans import gpu_and_tables
from fastroof.cli.options import (
    AllowModelled,
    Dp,
    Dtype,
    Ep,
    GpuName,
    KvDtype,
    Method,
    Model,
    MoeTp,
    OneSource,
    Pp,
    Routing,
    Runtime,
    TablesInstead,
    Tp,
)
from fastroof.command_group import warn
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.errors import FastroofError, MissingTableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastroof import GpuSpec, Tables
    from fastroof.report.results_file import Results as SweepResults


def source_words(tables: Tables) -> str:
    """Name the sources of tables, for the foot of a picture."""
    return ", ".join(sorted(set(tables.sources.values())))


def gpu_and_tables_to_draw(
    output: Path, gpu: str | None, tables: str | None, source: str | None
) -> tuple[GpuSpec, Tables | None]:
    """Find out what is missing before any time goes into a picture."""
    from fastroof.report import check_picture

    check_picture(output)
    return gpu_and_tables(gpu, tables, source)


def save(figure: Figure, output: Path) -> None:
    """Write a picture, and say so."""
    from fastroof.report import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")


def rows_to_draw(
    path: Path,
    output: Path,
    where: list[str] | None,
    *,
    leave: tuple[str, ...] = (),
    is_over_load: bool = False,
) -> tuple[SweepResults, dict[str, Any]]:
    """The results, and which rows to draw: of one workload, unless something else is asked for."""
    from fastroof.report import check_picture, read_results

    check_picture(output)
    results = read_results(path)
    wanted: dict[str, Any] = {}
    for text in where or ():
        name, sign, value = text.partition("=")
        if not sign or name not in results:
            columns = ", ".join(results.have((*results.kind.settings, *results.kind.workload)))
            raise FastroofError(f"--where {text} is not COLUMN=VALUE; the columns are {columns}")
        given = {str(each): each for each in results.codes(name)[1]}
        wanted[name] = given.get(value, value)
    start = results.start_workload()
    for name in results.have(results.kind.workload):
        if name not in (*wanted, *leave) and not (is_over_load and name == results.load()):
            wanted[name] = start[name]
    return results, wanted


DEFAULT_MODEL: Final = "llama-3.1-8b"

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write: .png or .svg.")]
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


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("curves")(curves)


def curves(results: Results, output: Output, where: Where = None) -> None:
    """TTFT and TPOT of a sweep over its load."""
    from fastroof.report import draw_serving_curves

    swept, wanted = rows_to_draw(results, output, where, is_over_load=True)
    save(draw_serving_curves(swept, **wanted), output)


def register_step(group: typer.Typer) -> None:
    """Add the command."""
    group.command("step")(step)


def step(
    output: Output,
    model: Model = DEFAULT_MODEL,
    gpu: GpuName = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    moe_tp: MoeTp = None,
    routing: Routing = None,
    allow_modelled: AllowModelled = False,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    against: Annotated[str, typer.Option(help="What varies: batch or kv-len.")] = "batch",
    batch: Annotated[int, typer.Option(help="Requests in the step, where kv-len varies.")] = 64,
    kv_len: Annotated[int, typer.Option(help="Tokens each attends to, where the batch varies.")] = 4096,
    max_batch: Annotated[int, typer.Option(help="Largest batch, where it varies.")] = 512,
    method: Method = "roofline",
    runtime: Runtime = DEFAULT_RUNTIME,
    tables: TablesInstead = None,
    source: OneSource = None,
) -> None:
    """Decode step by component, against batch or context."""
    from fastroof import compile_plan
    from fastroof.report import draw_step

    varied = {"batch": "batch_size", "kv-len": "kv_len"}
    if against not in varied:
        raise FastroofError(f"--against is batch or kv-len, got {against!r}")
    spec, measured = gpu_and_tables_to_draw(output, gpu, tables, source)
    plan = compile_plan(
        model,
        spec,
        measured,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        moe_tp=moe_tp,
        routing=routing,
        allow_modelled=allow_modelled,
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
        source="" if measured is None else source_words(measured),
    )
    save(figure, output)


def register_mfu(group: typer.Typer) -> None:
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


def register_pareto(group: typer.Typer) -> None:
    """Add the command."""
    group.command("pareto")(pareto)


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

    swept, wanted = rows_to_draw(results, output, where, leave=(colour_by,))
    save(draw_pareto(swept, colour_by=colour_by, **wanted), output)


_OF_A_MODEL: Final = ("--tp", "--batch", "--kv-len", "--prompt", "--kv-dtype", "--runtime", "--method")


def register_roofline(group: typer.Typer) -> None:
    """Add the command."""
    group.command("roofline")(roofline)


def roofline(
    context: typer.Context,
    output: Output,
    gpu: GpuName = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Peaks and GEMMs to show: bf16, fp8, fp8_block; repeatable.  [default: bf16]  With --model "
            "that of its linear layers."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Show its steps (decodes and a prefill), a line a tp, instead of measured kernels."
        ),
    ] = None,
    tp: Annotated[
        str, typer.Option(metavar="SIZES", help="With --model: layouts, up to six, as 1,2,4,8.")
    ] = "1",
    batch: Annotated[
        str, typer.Option(metavar="SIZES", help="With --model: decodes of a step.")
    ] = "1,4,16,64,256",
    kv_len: Annotated[int, typer.Option(help="With --model: tokens that each decode attends to.")] = 4096,
    prompt: Annotated[int, typer.Option(min=1, help="With --model: tokens of the prefill.")] = 8192,
    kv_dtype: KvDtype = "auto",
    runtime: Runtime = DEFAULT_RUNTIME,
    method: Method = "roofline",
    tables: TablesInstead = None,
    source: OneSource = None,
) -> None:
    """Measured kernels, or a model's steps, on the GPU's roofline."""
    from fastroof.report import draw_roofline

    if model is None:
        given = [name for name in _OF_A_MODEL if _is_given(context, name)]
        if given:
            raise FastroofError(f"{', '.join(given)} go{'es' * (len(given) == 1)} with --model")
    if model is not None and len(dtype or ()) > 1:
        raise FastroofError(f"--model has one --dtype, got {', '.join(dtype or ())}")
    spec, measured = gpu_and_tables_to_draw(output, gpu, tables, source)
    if model is not None:
        options = {"kv_dtype": kv_dtype, "runtime": runtime, "method": method}
        options["dtype"] = dtype[0] if dtype else "auto"
        save(_model_figure(model, spec, measured, tp, batch, kv_len, prompt, options), output)
        return
    if measured is None:
        warn(f"no measured tables of {spec.name}: the picture has its roofs and no kernels")
    save(draw_roofline(spec, measured, dtypes=tuple(dict.fromkeys(dtype or ("bf16",)))), output)


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option.removeprefix("--").replace("-", "_"))
    return source is not None and source.name == "COMMANDLINE"


def _sizes(option: str, text: str, most: int) -> list[int]:
    from fastroof.cli.workload_options import parse_sizes

    found = parse_sizes(option, text)
    sizes = sorted({found} if isinstance(found, int) else set(found))
    if sizes[0] < 1 or len(sizes) > most:
        raise FastroofError(f"{option} needs 1 to {most} sizes of at least 1, got {text}")
    return sizes


def _source_words(tables: Tables) -> str:
    """The source of tables, or how many there are: a line has no room for all of them."""
    sources = set(tables.sources.values())
    return f"source {source_words(tables)}" if len(sources) == 1 else f"{len(sources)} sources of kernels"


def _model_figure(
    model: str,
    gpu: GpuSpec,
    measured: Tables | None,
    tp: str,
    batch: str,
    kv_len: int,
    prompt: int,
    options: dict[str, Any],
) -> Figure:
    """Compile a plan for each tp, and draw their steps."""
    from fastroof import compile_plan
    from fastroof.report import draw_model_roofline

    layouts, batches = _sizes("--tp", tp, 6), _sizes("--batch", batch, 12)
    plans = [
        compile_plan(
            model,
            gpu,
            measured,
            tp=size,
            max_tokens=max(8192, prompt, batches[-1]),
            max_seqs=max(512, batches[-1]),
            **options,
        )
        for size in layouts
    ]
    return draw_model_roofline(
        plans,
        batch_sizes=batches,
        kv_len=kv_len,
        prompt=prompt,
        source="" if measured is None else _source_words(measured),
    )


def register_leading_steps(group: typer.Typer) -> None:
    """Add the command."""
    group.command("leading-steps")(leading_steps)


def leading_steps(results: Results, output: Output, where: Where = None) -> None:
    """What the steps of a sweep's best rows are made of."""
    from fastroof.report import draw_leading_steps

    swept, wanted = rows_to_draw(results, output, where)
    save(draw_leading_steps(swept, **wanted), output)
