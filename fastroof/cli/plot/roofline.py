"""``fastroof plot roofline``: measured kernels, or a model's steps, under a GPU's roofs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.options import GpuName, KvDtype, Method, OneSource, Runtime, TablesInstead
from fastroof.cli.plot.drawing import gpu_and_tables_to_draw, save, source_words
from fastroof.cli.plot.options import Output
from fastroof.command_group import warn
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastroof import GpuSpec, Tables

__all__ = ["register"]

_OF_A_MODEL: Final = ("--tp", "--batch", "--kv-len", "--prompt", "--kv-dtype", "--runtime", "--method")


def register(group: typer.Typer) -> None:
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
    from fastroof.cli.written_sizes import parse_sizes

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
