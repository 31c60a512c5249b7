"""``fastroof fit``: whether an engine starts a model, its limits, and its largest steps within a time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.option_groups import LIMITS, OUTSIDE_STEPS, TABLES, numbers_or_engine, plan_options
from fastroof.cli.options import Json, Model, flag_of, option
from fastroof.cli.output import percent, print_facts, print_json, print_line, print_records, print_table
from fastroof.cli.workload_options import parse_sizes
from fastroof.command_group import Group, GroupValues, taking
from fastroof.errors import BatchError

if TYPE_CHECKING:
    from fastroof.serving import Fit
    from fastroof.serving.largest_sizes import LargestSize

EPILOG: Final = """\b
Examples:
  fastroof fit --model qwen3-32b --gpu h100
  fastroof fit --model llama-3.1-70b --gpu h100 --tp 2 --max-num-seqs 256 --max-model-len 32768
  fastroof fit --model qwen3-next-80b-a3b --gpu h200 --tp 2 --engine sglang --json
  fastroof fit --model llama-3.1-8b --tpot 10
  fastroof fit --model llama-3.1-8b --tpot 10 --kv-len 1024,4096,16384 --batch-size 64

Without --tpot no kernel is looked up: memory alone decides. With it, decode steps of all sizes are timed: the
answer is the largest batch at each context and the longest context of each batch, of a rank and pipeline
stage, within memory and that time. --tpot inf leaves memory alone. Rules are those of the engine's newest
version that is known; --engine vllm-0.24.0 takes those of another. Sizes are GiB (2^30 bytes) of one GPU.

\b
JSON: version, model, gpu, engine, versions, engine_title, tp, pp, dp, ep, dtype, kv_dtype, starts,
max_model_len, max_num_seqs, max_num_batched_tokens, refusals in the order of the engine's checks [code (F:
more requests than tokens in a step, K: no kernel for the model on the card, A: other processes hold memory,
W, P: no memory for weights, or for the profiling run, B: no room for KV cache, C: one request of
max_model_len does not fit, D: more requests than blocks of states, E: may run out of memory later), reason,
needed, available, unit, remedy, is_warning], changes [settings, max_model_len, concurrency], memory
[fraction, bytes by use, blocks, block_bytes, block_tokens (null if the engine's blocks are unknown), ...],
cache_line_tokens (what the engine prints), concurrency, largest_max_model_len, largest_max_num_seqs,
length_of_all, running, graphs_variable, source, confidence (yes, likely, unlikely or no), margin_gib (of
the check that decides, negative if it fails) and its code deciding_check, error_gib (of the room in nine of
ten logged starts; null if not judged), graph_range_gib (least and most logged for CUDA graphs), other_rooms
(bytes of KV cache with other packages installed), room_errors [engine, versions, kind, starts, median_gib,
most_gib; null if not judged], command [text, release, config, unsaid]; with --tpot tpot_ms and largest
[given (kv_len or batch_size), batch_size, kv_len (0 if nothing is within the limits), step_ms,
tokens_per_s_per_gpu, kv_share (of the KV cache), limited_by (memory, tpot, max_num_seqs,
max_num_batched_tokens or max_model_len)], empty if the engine does not start.
"""


ROOM: Final[Group] = {
    "free_gib": option(float, "Free memory of a GPU at the start.  [default: all]", "GIB"),
    "prefix_caching": option(
        bool,
        "Cache states of recurrent layers for prefixes.  [default: the engine's own]",
        None,
        "--prefix-caching/--no-prefix-caching",
    ),
    "num_draft_tokens": option(int, "Draft tokens per request and step.", "TOKENS", default=0, min=0),
    "draft": option(str, "Draft: mtp, or a model.  [default: takes no memory]", "MODEL"),
}
"""What takes memory besides the plan, as arguments of :func:`fastroof.fit`."""


@taking(plan=plan_options(without=OUTSIDE_STEPS), limits=LIMITS, measured=TABLES, room=ROOM)
def fit(
    *,
    model: Model,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Tokens of the longest sequence.  [default: the model's own]"),
    ] = None,
    plan: GroupValues,
    limits: GroupValues,
    measured: GroupValues,
    tpot: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Maximum time per output token: also print the largest batches."),
    ] = None,
    kv_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Contexts to find the largest batch of, with --tpot; a list.  [default: a few]",
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="REQUESTS",
            help="Batches to find the longest context of, with --tpot; a list.  [default: --max-num-seqs]",
        ),
    ] = None,
    room: GroupValues,
    as_json: Json = False,
) -> None:
    """Tell whether an engine starts, and with which limits."""
    import fastroof
    from fastroof.defaults import DEFAULT_GPU

    given: dict[str, Any] = dict(numbers_or_engine(limits))
    gpu: Any = measured["gpu"] or DEFAULT_GPU
    if tpot is None:
        alone = {"--kv-len": kv_len, "--batch-size": batch_size, "--tables": measured["tables"]}
        alone["--source"] = measured["source"]
        named = [name for name, value in alone.items() if value is not None]
        if named:
            raise BatchError(f"{', '.join(named)} needs --tpot MS, the time to find the largest sizes within")
    else:
        given["tpot_ms"] = tpot
        sizes = {"kv_len": kv_len, "batch_size": batch_size}
        for name, text in sizes.items():
            given[name] = None if text is None else parse_sizes(flag_of(name), text)
        gpu, given["tables"] = gpu_and_tables(**measured)
    answer = fastroof.fit(model, gpu, max_model_len=max_model_len, **room, **given, **plan)
    if as_json:
        print_json(answer.document())
        return
    _print(answer)


def _print(answer: Fit) -> None:
    sizes = {"tp": answer.tp, "pp": answer.pp, "dp": answer.dp, "ep": answer.ep}
    layout = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tp")
    gpus = answer.tp * answer.pp * answer.dp
    print_line(
        f"{answer.model} on {gpus} x {answer.gpu}, {layout}, {answer.dtype} weights, {answer.kv_dtype} KV "
        f"cache, {answer.engine_title}\n"
    )
    print_line(f"starts: {'yes' if answer.starts else 'no'}{answer.confidence_words}")
    is_first = True
    for one in answer.refusals:
        word = "note: " if one.is_warning else "" if is_first else "also: "
        is_first = is_first and one.is_warning
        print_line(f"  {word}{one.reason}")
    print_line()
    print_table(("memory of a GPU", "GiB", ""), answer.memory_rows(), left=("memory of a GPU", ""))
    print_line()
    print_facts(dict(answer.facts()))
    if answer.changes:
        print_line("\nany of these makes it start:")
        rows = [
            (one.options(), f"{one.max_model_len:,}", f"{one.concurrency:,.1f}") for one in answer.changes
        ]
        print_table(("option", "longest max-model-len", "requests at once"), rows, left=("option",))
    elif answer.starts and answer.command is not None and answer.commands is not None:
        known = "" if answer.commands.is_of_profile else ", the closest release whose arguments were read"
        print_line(f"\nstart ({answer.commands.title} {answer.commands.release}{known}):")
        typer.echo(textwrap.indent(answer.command.shell(), "  "))
        for name, value in answer.command.config.items():
            print_line(f"  {answer.command.config_option}: {name} = {value}")
        for text in answer.command.unsaid:
            print_line(f"  not in the command: {text}")
    if answer.tpot_ms is not None and answer.starts:
        print_line(f"\ndecode steps within {answer.tpot_ms:g} ms:")
        _print_largest(answer)
    if answer.source:
        print_line(f"\nmemory rules: {answer.source}")


def _print_largest(answer: Fit) -> None:
    columns: dict[str, Callable[[LargestSize], str]] = {
        "": lambda one: "largest batch" if one.given == "kv_len" else "longest context",
        "batch size": lambda one: f"{one.batch_size:,}" if one.batch_size else "none",
        "kv_len": lambda one: f"{one.kv_len:,}" if one.kv_len else "none",
        "step ms": lambda one: "" if one.step_ms is None else f"{one.step_ms:,.2f}",
        "tokens/s a GPU": lambda one: (
            "" if one.tokens_per_s_per_gpu is None else f"{one.tokens_per_s_per_gpu:,.0f}"
        ),
        "KV cache": lambda one: percent(one.kv_share),
        "limited by": lambda one: "memory" if one.limited_by == "memory" else flag_of(one.limited_by),
    }
    print_records(answer.largest, columns, left=("", "limited by"))
