"""``fastroof plot step``: decode steps by component."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

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
from fastroof.cli.plot.drawing import gpu_and_tables_to_draw, save, source_words
from fastroof.cli.plot.options import DEFAULT_MODEL, Output
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.errors import FastroofError

__all__ = ["register"]


def register(group: typer.Typer) -> None:
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
