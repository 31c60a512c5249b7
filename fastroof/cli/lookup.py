"""``fastroof lookup``: one kernel, or a list of them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.options import GpuName, Json, OneSource, TablesInstead
from fastroof.cli.output import percent, print_json, print_table
from fastroof.cli.written_sizes import parse_sizes
from fastroof.columns import ORIGINS
from fastroof.command_group import help_if_alone
from fastroof.errors import MissingTableError

__all__ = ["register"]

EPILOG: Final = """\b
Sizes are whole numbers or comma-separated lists, which are broadcast: --m 1,64,512 --n 6144 --k 4096.

\b
JSON: operator, gpu, source, method, rows: one object a kernel with its sizes and dtypes, latency_us,
mfu (null for communication), origin (measured, interpolated, extrapolated, borrowed or modelled), and with
--with-error relative_error: one standard error over the latency, 80 % of points are within 1.28 of them.
"""

Size = Annotated[str, typer.Option(metavar="SIZES", show_default=False)]
OneSize = Annotated[str, typer.Option(metavar="SIZES")]
Dtype = Annotated[str, typer.Option(help="bf16, fp8 or fp8_block.")]
KvDtype = Annotated[str, typer.Option(help="dtype of the KV cache: bf16 or fp8.")]
Method = Annotated[str, typer.Option(help="roofline, linear_mfu, nearest or floor.")]
WithError = Annotated[bool, typer.Option("--with-error", help="Also print a standard error of each.")]


group = typer.Typer(help="Look kernels up: latency, MFU, origin.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(help_if_alone)
    for command in (gemm, attention_prefill, attention_decode, allreduce, moe):
        group.command(command.__name__, epilog=EPILOG)(command)
    app.add_typer(group, name="lookup")


def _look_up(operator: str, options: dict[str, Any]) -> None:
    """Answer one of the commands below, whose local names are the options."""
    import numpy as np

    method, as_json, with_error = (options.pop(name) for name in ("method", "as_json", "with_error"))
    gpu, path, source = options.pop("gpu"), options.pop("tables"), options.pop("source")
    words = ("dtype", "kv_dtype", "mode", "distribution")
    given = {
        name: value if name in words else parse_sizes(f"--{name.replace('_', '-')}", value)
        for name, value in options.items()
    }
    _, tables = gpu_and_tables(gpu, path, source)
    if tables is None:
        raise MissingTableError(f"{gpu} has no measured tables to look anything up in; see fastroof gpus")
    found = tables.lookup(operator, method=method, with_error=with_error, **given)
    errors = found.relative_error.ravel().tolist() if with_error else ()
    shown = {
        name: np.broadcast_to(np.asarray(value), found.latency_us.shape).ravel().tolist()
        for name, value in given.items()
    }
    answers = zip(
        found.latency_us.ravel().tolist(),
        found.mfu.ravel().tolist(),
        found.origin.ravel().tolist(),
        strict=True,
    )
    rows = [
        {
            **{name: values[i] for name, values in shown.items()},
            "latency_us": latency_us,
            "mfu": mfu,
            "origin": ORIGINS[origin],
            **({"relative_error": errors[i]} if with_error else {}),
        }
        for i, (latency_us, mfu, origin) in enumerate(answers)
    ]
    if as_json:
        print_json(
            {
                "operator": operator,
                "gpu": tables.gpu.name,
                "source": tables.sources[operator],
                "method": method,
                "rows": rows,
            }
        )
        return
    text = [
        tuple(
            f"{value:,.3f}"
            if name == "latency_us"
            else percent(value) or "-"
            if name == "mfu"
            else f"+- {percent(value)}"
            if name == "relative_error"
            else str(value)
            for name, value in row.items()
        )
        for row in rows
    ]
    print_table(
        tuple(
            {"latency_us": "latency us", "mfu": "MFU", "relative_error": "error"}.get(name, name)
            for name in rows[0]
        ),
        text,
        left=("origin", *words),
    )


def gemm(
    m: Size,
    n: Size,
    k: Size,
    dtype: Dtype = "bf16",
    method: Method = "roofline",
    gpu: GpuName = None,
    tables: TablesInstead = None,
    source: OneSource = None,
    with_error: WithError = False,
    as_json: Json = False,
) -> None:
    """GEMM of m tokens, n outputs, k inputs."""
    _look_up("gemm", locals())


def attention_prefill(
    num_q_heads: Size,
    num_kv_heads: Size,
    head_dim: Size,
    q_len: Size,
    kv_len: Size,
    batch_size: OneSize = "1",
    kv_dtype: KvDtype = "bf16",
    method: Method = "roofline",
    gpu: GpuName = None,
    tables: TablesInstead = None,
    source: OneSource = None,
    with_error: WithError = False,
    as_json: Json = False,
) -> None:
    """Causal attention of whole prompts or chunks.

    q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens.
    """
    _look_up("attention_prefill", locals())


def attention_decode(
    num_q_heads: Size,
    num_kv_heads: Size,
    head_dim: Size,
    batch_size: Size,
    kv_len: Size,
    kv_dtype: KvDtype = "bf16",
    method: Method = "roofline",
    gpu: GpuName = None,
    tables: TablesInstead = None,
    source: OneSource = None,
    with_error: WithError = False,
    as_json: Json = False,
) -> None:
    """Paged attention of one new token a sequence."""
    _look_up("attention_decode", locals())


def allreduce(
    num_gpus: Size,
    message_bytes: Size,
    dtype: Dtype = "bf16",
    mode: Annotated[str, typer.Option(help="graph (in a CUDA graph), eager or nccl.")] = "graph",
    method: Method = "roofline",
    gpu: GpuName = None,
    tables: TablesInstead = None,
    source: OneSource = None,
    with_error: WithError = False,
    as_json: Json = False,
) -> None:
    """Sum over GPUs, message-bytes from each."""
    _look_up("allreduce", locals())


def moe(
    num_tokens: Size,
    hidden: Size,
    intermediate: Size,
    topk: Size,
    num_experts: Size,
    moe_tp: OneSize = "1",
    moe_ep: OneSize = "1",
    distribution: Annotated[str, typer.Option(help="How tokens spread over experts.")] = "balanced",
    dtype: Dtype = "bf16",
    method: Method = "roofline",
    gpu: GpuName = None,
    tables: TablesInstead = None,
    source: OneSource = None,
    with_error: WithError = False,
    as_json: Json = False,
) -> None:
    """Routed experts of one layer, on one GPU."""
    _look_up("moe", locals())
