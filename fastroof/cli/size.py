"""``fastroof size``: how large a batch or context may be, how many GPUs a load needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof._version import __version__
from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.named_plans import SPECULATION, asked_speculation, drafts_said, drafts_words
from fastroof.cli.option_groups import (
    ENGINE_FACTS,
    LIMITS,
    TABLES,
    plan_options,
    step_limits,
)
from fastroof.cli.options import Json, Model, warn_beyond_context
from fastroof.cli.output import console, percent, print_json, print_table
from fastroof.cli.workload_options import parse_rates, parse_sizes
from fastroof.command_group import GroupValues, taking
from fastroof.errors import BatchError
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof import GpuSpec, ModelSpec, StepPlan, Tables
    from fastroof.plan.memory import PlanMemory

_QUESTIONS: Final = ("--rate", "--kv-len", "--batch-size")
_TIMES: Final = {"ttft_ms": 0, "tpot_ms": 2, "request_latency_ms": 0}
_LIMITS: Final = {
    "throughput": "throughput: more clients only wait longer",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "request_latency": "request latency",
    "kv_cache": "memory",
    "memory": "memory",
    "max_seqs": "--max-num-seqs",
    "budget": "--max-num-batched-tokens",
    "model": "the model's longest sequence",
}

EPILOG: Final = (
    """\b
Examples:
  fastroof size --model llama-3.1-70b --rate 20 --isl 4000 --osl 500 --ttft-ms 500 --tpot-ms 30
  fastroof size --model llama-3.1-70b --rate 20 --isl 4000 --osl 500 --tpot-ms 30 \\
      --num-draft-tokens 3 --accepted 2.2 --draft mtp --prefix-hit 0.5
  fastroof size --model llama-3.1-8b --kv-len 1024,4096,16384 --tpot-ms 10
  fastroof size --model llama-3.1-8b --batch-size 1,16,64 --tpot-ms 10

Give one of --rate (least GPUs), --kv-len (largest batch) and --batch-size (largest context). Each takes a
number or a comma-separated list. With one rate, every tp is shown, the one with the fewest GPUs first.

\b
JSON: version, model, gpu, dtype, kv_dtype, engine, tables_hash, num_draft_tokens, accepted, draft,
accepted_from (what --accepted auto was measured on; only with drafts), refused (tp: why it cannot run), rows.
Rows of --kv-len and --batch-size: one object per tp and size [tp, batch_size, kv_len, step_ms,
tokens_per_s_per_gpu, kv_share (of the KV cache), limited_by (memory, tpot, model or max_seqs)]; batch_size or
kv_len is 0 if nothing is within the limits. If memory limits a batch, fitting_max_num_seqs is the larger
batch that fits an engine started with that --max-num-seqs, else null.
Rows of --rate: one object per tp and rate [is_best, request_rate_per_s, isl, osl, and the fields of
LeastGpus: total_gpus, tp, replicas, concurrency, ttft_ms, tpot_ms, request_latency_ms,
tokens_per_s_per_gpu, max_request_rate_per_s, limited_by]; total_gpus is 0 if no deployment keeps the
limits, and the times are those of a single client.
"""
    + ENGINE_FACTS
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("size", epilog=EPILOG)(size)


@taking(plan=plan_options(without=("tp",)), limits=LIMITS, speculative=SPECULATION, measured=TABLES)
def size(
    *,
    model: Model,
    rate: Annotated[str | None, typer.Option(metavar="PER_S", help="Requests per second to serve.")] = None,
    kv_len: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Tokens that each decode attends to.")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(metavar="REQUESTS", help="Number of requests that decode together.")
    ] = None,
    isl: Annotated[
        float | None, typer.Option(metavar="TOKENS", help="Mean prompt length, with --rate.")
    ] = None,
    osl: Annotated[
        float | None,
        typer.Option(metavar="TOKENS", help="Mean output length, including the first token, with --rate."),
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Maximum mean time to first token, with --rate.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Maximum time per output token.")
    ] = None,
    request_latency_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Maximum mean time of a request, with --rate.")
    ] = None,
    tp: Annotated[str, typer.Option(metavar="GPUS", help="Tensor-parallel sizes to try.")] = "1,2,4,8",
    plan: GroupValues,
    limits: GroupValues,
    speculative: GroupValues,
    measured: GroupValues,
    as_json: Json = False,
) -> None:
    """Find the largest batch or context, or least GPUs."""
    from fastroof import load_model
    from fastroof.engines import load_engine
    from fastroof.plan.options import PlanOptions
    from fastroof.serving.least_gpus import replica_plans

    given = [rate, kv_len, batch_size]
    asked = [name for name, value in zip(_QUESTIONS, given, strict=True) if value is not None]
    if len(asked) != 1:
        raise BatchError(f"give one of {', '.join(_QUESTIONS)}, got {' and '.join(asked) or 'none of them'}")
    serving = {"--isl": isl, "--osl": osl, "--ttft-ms": ttft_ms, "--request-latency-ms": request_latency_ms}
    prefix_hit = speculative.pop("prefix_hit")
    serving |= {"--num-draft-tokens": speculative["num_draft_tokens"], "--prefix-hit": prefix_hit}
    _check_together(asked[0], serving)
    sizes = parse_sizes("--tp", tp)
    splits = sizes if isinstance(sizes, list) else [sizes]
    spec, tables = gpu_and_tables(**measured)
    engine = load_engine(plan["engine"])
    own = engine.on(spec).scheduling
    budget, seqs, max_seqs = step_limits(limits, own)
    reserved: dict[str, Any] = {"max_tokens": budget, "max_seqs": max_seqs}
    loaded = load_model(model)
    formats = PlanOptions(dtype=plan["dtype"], kv_dtype=plan["kv_dtype"]).for_model(loaded)
    dtype, kv_dtype = formats.dtype, formats.kv_dtype
    options: dict[str, Any] = {**plan, "dtype": dtype, "kv_dtype": kv_dtype, "engine": engine}
    largest = own.largest_step(budget, seqs * (1 + (speculative["num_draft_tokens"] or 0)))
    limit_ms = math.inf if tpot_ms is None else tpot_ms
    said: dict[str, Any] = {}
    if rate is not None:
        bounds = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "request_latency_ms": request_latency_ms}
        load = {"isl": isl, "osl": osl} | {name: ms for name, ms in bounds.items() if ms is not None}
        schedule: dict[str, Any] = {"max_batched_tokens": budget, "max_seqs": seqs}
        schedule["speculation"] = asked_speculation(
            loaded.name, speculative, measured, plan["engine"], max_tokens=largest + 1,
            max_seqs=seqs + budget,
        )  # fmt: skip
        said = drafts_said(schedule["speculation"])
        schedule["prefix_hit"] = 0.0 if prefix_hit is None else prefix_hit
        rows, refused = _deployments(
            (loaded, spec, tables), parse_rates(rate), splits, {**load, **schedule, **options}
        )
    else:
        options |= {"max_tokens": largest, "max_seqs": seqs}
        plans, refused = replica_plans(loaded, spec, tables, splits, options, budget=budget, running=max_seqs)
        if kv_len is not None:
            lengths = parse_sizes("--kv-len", kv_len)
            warn_beyond_context(
                loaded.name, loaded.max_position, max(lengths if isinstance(lengths, list) else [lengths])
            )
            rows = [row for one in plans for row in _batches(one, reserved, lengths, limit_ms)]
        else:
            batches = parse_sizes("--batch-size", str(batch_size))
            rows = [row for one in plans for row in _contexts(one, reserved, batches, limit_ms)]
    if as_json:
        print_json(
            {
                "version": __version__,
                "model": loaded.name,
                "gpu": spec.name,
                "dtype": dtype,
                "kv_dtype": kv_dtype,
                **engine.facts,
                "tables_hash": "" if tables is None else tables.content_hash,
                **said,
                "refused": refused,
                "rows": rows,
            }
        )
        return
    out = console()
    out.print(
        f"{loaded.name} on {spec.title}, {dtype} weights, {kv_dtype} KV cache, engine {engine.title}"
        f"{drafts_words(said)}\n",
        soft_wrap=True,
    )
    (_print_steps if rate is None else _print_deployments)(rows)
    for split, why in refused.items():
        out.print(f"tp {split} cannot run: {why}", soft_wrap=True)


def _check_together(asked: str, serving: dict[str, float | None]) -> None:
    """Refuse options of another question, and a rate without lengths."""
    if asked == "--rate":
        missing = [name for name in ("--isl", "--osl") if serving[name] is None]
        if missing:
            raise BatchError(f"--rate needs {' and '.join(missing)} too")
    else:
        spare = [name for name, value in serving.items() if value is not None]
        if spare:
            raise BatchError(f"{', '.join(spare)} goes with --rate; {asked} is about decode steps alone")


def _step_row(plan: StepPlan, memory: PlanMemory, batch: int, kv_len: int, limited_by: str) -> dict[str, Any]:
    is_any = bool(batch and kv_len)
    step_us = plan.decode_us(batch, kv_len) if is_any else math.nan
    # with a batch in each stage, as fast as the slowest
    paced_us = plan.bottleneck.decode_us(batch, kv_len) if is_any else math.nan
    tokens = batch * plan.layout.batches_in_flight
    return {
        "tp": plan.tp,
        "batch_size": batch,
        "kv_len": kv_len,
        "step_ms": step_us / US_PER_MS,
        "tokens_per_s_per_gpu": tokens / paced_us * US_PER_S / plan.layout.world_size,
        "kv_share": batch * memory.parts_per_request(kv_len) / memory.parts if is_any else math.nan,
        "limited_by": limited_by,
    }


def _batches(plan: StepPlan, reserved: dict[str, Any], lengths: Any, limit_ms: float) -> list[dict[str, Any]]:
    """Return the largest batches of a plan, and what limits them."""
    import numpy as np

    from fastroof.serving.sizing import largest_batch

    kv = np.atleast_1d(lengths)
    memory = plan.memory_of(**reserved)
    largest = largest_batch(plan, kv, limit_ms, **reserved)
    rows = []
    for batch, kv_len in zip(largest.tolist(), kv.tolist(), strict=True):
        limited_by = "tpot"
        if batch + 1 > memory.max_sequences(kv_len):
            limited_by = "memory"
        elif batch == min(plan.max_seqs, plan.max_tokens):
            limited_by = "max_seqs"
        row = _step_row(plan, memory, batch, kv_len, limited_by)
        fits = _fitting_seqs(plan, reserved, batch, kv_len) if limited_by == "memory" else None
        rows.append(row | {"fitting_max_num_seqs": fits})
    return rows


def _fitting_seqs(plan: StepPlan, reserved: dict[str, Any], batch: int, kv_len: int) -> int | None:
    """Return the largest batch that fits an engine started with that many requests, if larger."""
    low, high = batch, plan.profile.scheduling.max_num_seqs
    while low < high:
        seqs = (low + high + 1) // 2
        fits = plan.memory_of(**{**reserved, "max_seqs": seqs}).max_sequences(kv_len) >= seqs
        low, high = (seqs, high) if fits else (low, seqs - 1)
    return low if low > batch else None


def _contexts(plan: StepPlan, reserved: dict[str, Any], sizes: Any, limit_ms: float) -> list[dict[str, Any]]:
    """Return the largest contexts of a plan, and what limits them."""
    import numpy as np

    from fastroof.serving.sizing import largest_context

    batches = np.atleast_1d(sizes)
    memory = plan.memory_of(**reserved)
    largest = largest_context(plan, batches, limit_ms, **reserved)
    rows = []
    for kv_len, batch in zip(largest.tolist(), batches.tolist(), strict=True):
        limited_by = "tpot"
        if batch > memory.max_sequences(kv_len + 1):
            limited_by = "memory"
        elif kv_len == plan.model.max_position:
            limited_by = "model"
        rows.append(_step_row(plan, memory, batch, kv_len, limited_by))
    return rows


def _deployments(
    what: tuple[ModelSpec, GpuSpec, Tables | None],
    rates: list[float],
    splits: list[int],
    options: dict[str, Any],
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the smallest deployments for each rate on each tp, and the smallest of all."""
    from fastroof.serving.least_gpus import least_gpus
    from fastroof.serving.sizing import RATE_LIMITS

    best = least_gpus(*what, rates, tp=splits, **options)
    rows = []
    for split in (split for split in splits if split not in best.refused):
        sized = least_gpus(*what, rates, tp=split, **options).columns()
        for i, rate in enumerate(rates):
            row = {name: array[i].item() for name, array in sized.items()}
            row["limited_by"] = RATE_LIMITS[row["limited_by"]]
            is_best = row["total_gpus"] > 0 and split == best.tp[i]
            sizes = {"isl": options["isl"], "osl": options["osl"]}
            rows.append({"is_best": is_best, "request_rate_per_s": rate, **sizes, **row, "tp": split})
    order = {rate: i for i, rate in enumerate(rates)}
    rows.sort(key=lambda row: (order[row["request_rate_per_s"]], not row["is_best"], _size(row)))
    return rows, best.refused


def _size(row: dict[str, Any]) -> tuple[float, float]:
    """Return the sort key of deployments: GPUs, then throughput."""
    return row["total_gpus"] or math.inf, -row["max_request_rate_per_s"]


def _print_steps(rows: list[dict[str, Any]]) -> None:
    columns = ("tp", "batch size", "kv_len", "step ms", "tokens/s a GPU", "KV cache", "limited by")
    listed = []
    for row in rows:
        none = not (row["batch_size"] and row["kv_len"])
        listed.append(
            (
                str(row["tp"]),
                f"{row['batch_size']:,}" if row["batch_size"] else "none",
                f"{row['kv_len']:,}" if row["kv_len"] else "none",
                "" if none else f"{row['step_ms']:,.2f}",
                "" if none else f"{row['tokens_per_s_per_gpu']:,.0f}",
                "" if none else percent(row["kv_share"]),
                _LIMITS[row["limited_by"]],
            )
        )
    print_table(columns, listed, left=("limited by",))
    for row in rows:
        if row.get("fitting_max_num_seqs"):
            console().print(
                f"tp {row['tp']}, kv_len {row['kv_len']:,}: {row['fitting_max_num_seqs']:,} fit with "
                f"--max-num-seqs {row['fitting_max_num_seqs']}, for which the engine reserves less memory",
                soft_wrap=True,
            )


def _print_deployments(rows: list[dict[str, Any]]) -> None:
    several = len({row["request_rate_per_s"] for row in rows}) > 1
    columns = (
        "", "requests/s", "GPUs", "replicas", "tp", "clients", "TTFT ms", "TPOT ms", "request ms",
        "tokens/s a GPU", "max requests/s", "limited by",
    )  # fmt: skip
    listed = []
    for row in rows:
        serves = row["total_gpus"] > 0
        if several and not row["is_best"] and any(_same_rate(other, row) for other in rows):
            continue
        listed.append(
            (
                "least" if row["is_best"] else "",
                f"{row['request_rate_per_s']:,g}",
                f"{row['total_gpus']:,}" if serves else "none",
                f"{row['replicas']:,}" if serves else "",
                str(row["tp"]),
                f"{row['concurrency']:,.1f}" if serves else "1",
                *(_number(row[name], digits) for name, digits in _TIMES.items()),
                f"{row['tokens_per_s_per_gpu']:,.0f}" if serves else "",
                f"{row['max_request_rate_per_s']:,.1f}" if serves else "",
                _LIMITS[row["limited_by"]],
            )
        )
    print_table(columns, listed, left=("limited by",))


def _same_rate(best: dict[str, Any], row: dict[str, Any]) -> bool:
    return bool(best["is_best"]) and best["request_rate_per_s"] == row["request_rate_per_s"]


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:,.{digits}f}"
