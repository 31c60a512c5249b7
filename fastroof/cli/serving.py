"""``fastroof serving``: what clients of an engine see in steady state."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.named_plans import SPECULATION, drafts_said, drafts_words, speculation_of
from fastroof.cli.option_groups import ENGINE_FACTS, LIMITS, SCHEDULING, TABLES, plan_options, step_limits
from fastroof.cli.options import Json, Model, warn_beyond_context
from fastroof.cli.output import (
    ORIGIN_WORDS,
    layout_suffix,
    percent,
    plan_facts,
    plan_words,
    print_json,
    print_line,
    print_table,
)
from fastroof.cli.workload_options import parse_images, parse_sizes
from fastroof.columns import ORIGINS
from fastroof.command_group import GroupValues, taking
from fastroof.defaults import REQUESTS_PER_CLIENT
from fastroof.errors import BatchError
from fastroof.units import GB, US_PER_MS

if TYPE_CHECKING:
    from fastroof import StepPlan
    from fastroof.models.layout import Layout

_WORKERS = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")

EPILOG: Final = (
    """\b
Examples:
  fastroof serving --model llama-3.1-8b --isl 1024 --osl 128 --clients 1,8,64 --engine vllm
  fastroof serving --model llama-3.1-70b --tp 8 --isl 8192 --osl 256 --clients 64 --disaggregated 2:1
  fastroof serving --model llama-3.1-70b --tp 8 --isl 8192 --osl 256 --clients 1,64 \\
      --num-draft-tokens 3 --accepted 2.2 --draft llama-3.1-8b,tp=4 --prefix-hit 0.5
  fastroof serving --model minimax-m3 --tp 8 --isl 8192 --osl 256 --clients 16 \\
      --num-draft-tokens 3 --accepted auto --draft mtp
  fastroof serving --model qwen3-vl-8b --isl 100 --osl 128 --clients 1,16 --image 1024x768 --image 640x480

Sizes are numbers or comma-separated lists; every combination is one scenario. --disaggregated X:Y is X
workers that prefill and Y that decode, each on --tp GPUs (--prefill-tp for those that prefill).

\b
JSON: version, model, gpu, tp, pp, dp, ep, moe_tp, dtype, kv_dtype, lora (if any), engine,
max_num_batched_tokens, max_kv_tokens, tables_hash, num_draft_tokens, accepted (mean tokens of a step),
requests_per_client, length_spread, front_end (its times in words),
draft, accepted_from (what --accepted auto was measured on), prefix_hit, images (their sizes), image_tokens
(of a prompt, besides isl; these only if given), rows: one object per scenario [isl, osl, clients,
origin (of decodes) and the fields of fastroof.serving.ServingEstimate, with --energy also joules_per_token
and joules_relative_error], or with --disaggregated also prefill_tp, prefill_workers, decode_workers and the
fields of DisaggregatedEstimate.
"""
    + ENGINE_FACTS
)


@taking(plan=plan_options(), limits=LIMITS, scheduling=SCHEDULING, speculative=SPECULATION, measured=TABLES)
def serving(
    *,
    model: Model,
    isl: Annotated[str, typer.Option(metavar="TOKENS", help="Mean prompt length.")],
    osl: Annotated[
        str, typer.Option(metavar="TOKENS", help="Mean output length, including the first token.")
    ],
    clients: Annotated[str, typer.Option(metavar="CLIENTS", help="Number of requests in flight.")],
    plan: GroupValues,
    limits: GroupValues,
    scheduling: GroupValues,
    length_spread: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Spread of output lengths: (longest - shortest) / longest; matters with prefill_first.  "
            "[default: 0.2]",
        ),
    ] = None,
    requests_per_client: Annotated[
        str,
        typer.Option(
            metavar="REQUESTS|steady",
            help="Requests of each client after a start of all together, which means count; 1 is a burst, "
            "steady leaves the start out.",
        ),
    ] = str(REQUESTS_PER_CLIENT),
    speculative: GroupValues,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="WIDTHxHEIGHT", help="Image of each prompt, besides --isl tokens; repeatable."),
    ] = None,
    disaggregated: Annotated[
        str | None, typer.Option(metavar="X:Y", help="Number of prefill workers and of decode workers.")
    ] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(metavar="GPUS", help="GPUs of a prefill worker.  [default: --tp]")
    ] = None,
    kv_bandwidth: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Bandwidth between GPUs of two workers.  [default: NVLink's]"),
    ] = None,
    energy: Annotated[
        bool, typer.Option("--energy", help="Estimate joules per output token, idle time included.")
    ] = False,
    measured: GroupValues,
    as_json: Json = False,
) -> None:
    """Estimate TTFT, TPOT and throughput of a serving engine."""
    import numpy as np

    from fastroof import compile_plan
    from fastroof.engines import load_engine
    from fastroof.models import load_model
    from fastroof.plan.speculation import speculated
    from fastroof.plan.step_error import decode_origins
    from fastroof.serving import estimate, estimate_disaggregated, estimate_with_images
    from fastroof.serving.estimate import LENGTH_SPREAD

    for option, value in (("--prefill-tp", prefill_tp), ("--kv-bandwidth", kv_bandwidth)):
        if value is not None and disaggregated is None:
            raise BatchError(f"{option} needs --disaggregated, the numbers of workers such as 2:1")
    lists = [parse_sizes("--isl", isl), parse_sizes("--osl", osl), parse_sizes("--clients", clients)]
    mesh = np.meshgrid(*(np.atleast_1d(sizes) for sizes in lists), indexing="ij")
    scenarios = dict(zip(("isl", "osl", "clients"), (axis.ravel() for axis in mesh), strict=True))
    spec, tables = gpu_and_tables(**measured)
    engine = load_engine(plan["engine"])
    own = engine.on(spec, load_model(model).ranks(plan["dp"])).scheduling.in_order(scheduling["order"])
    budget, seqs, asked_seqs = step_limits(limits, own)
    schedule: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "chunked_prefill": scheduling["chunked_prefill"],
        "max_num_seqs": asked_seqs,
    }
    ahead: dict[str, Any] = {"length_spread": length_spread}
    ahead |= {name: scheduling[name] for name in ("order", "prefill_schedule_interval")}
    ahead = {name: value for name, value in ahead.items() if value is not None}

    most_seqs = max(seqs, min(budget, int(scenarios["clients"].max())))
    decode_tokens = most_seqs * (1 + (speculative["num_draft_tokens"] or 0))

    def plan_on(gpus: int) -> StepPlan:
        return compile_plan(
            model,
            spec,
            tables,
            **{**plan, "tp": gpus, "engine": engine},
            max_num_batched_tokens=own.largest_step(budget, decode_tokens),
            max_num_seqs=most_seqs,
        )

    served = plan_on(plan["tp"])
    prefix_hit = speculative.pop("prefix_hit")
    drafts = speculation_of(served, speculative, measured, plan["engine"])
    if disaggregated is not None and prefix_hit is not None:
        raise BatchError("--prefix-hit does not apply to --disaggregated: its workers share no prefix cache")
    if energy and (disaggregated is not None or image):
        raise BatchError("--energy does not apply to --disaggregated or --image: their power is unknown")
    if disaggregated is not None and image:
        raise BatchError("--image does not apply to --disaggregated")
    if disaggregated is not None and ahead:
        raise BatchError(
            "--order, --length-spread and --prefill-schedule-interval do not apply to --disaggregated: a "
            "worker does one of both"
        )
    schedule |= {"speculation": drafts, "with_error": drafts is None}
    options = drafts_said(drafts)
    if prefix_hit is not None:
        options["prefix_hit"] = prefix_hit
    workers: dict[str, int] = {}
    run: dict[str, Any] = {}
    layouts: tuple[Layout, ...] = ()
    if disaggregated is None:
        rounds = given_requests(requests_per_client)
        run = {"requests_per_client": rounds, "length_spread": ahead.get("length_spread", LENGTH_SPREAD)}
        schedule |= {"prefix_hit": prefix_hit, **ahead, **run}
        if image:
            every = parse_images("--image", image)
            options |= {"images": every, "image_tokens": served.encode(every).tokens}
            times: Any = estimate_with_images(served, **scenarios, **schedule, images=every)
        else:
            times = estimate(served, **scenarios, **schedule, with_energy=energy)
    else:
        match = _WORKERS.fullmatch(disaggregated)
        if match is None:
            raise BatchError(f"--disaggregated needs numbers of workers such as 2:1, got {disaggregated!r}")
        prefill, decode = map(int, match.groups())
        workers = {
            "prefill_tp": plan["tp"] if prefill_tp is None else prefill_tp,
            "prefill_workers": prefill,
            "decode_workers": decode,
        }
        prefills = plan_on(workers["prefill_tp"])
        layouts = prefills.layout, served.layout
        times = estimate_disaggregated(
            prefills,
            served,
            **scenarios,
            prefill_workers=prefill,
            decode_workers=decode,
            **schedule,
            link_bytes_per_s=None if kv_bandwidth is None else kv_bandwidth * GB,
        )
    tokens = scenarios["isl"] + scenarios["osl"] + options.get("image_tokens", 0)
    warn_beyond_context(served.model.name, served.model.max_position, tokens.max())
    given = {name: values for name, values in times.columns().items() if values is not None}
    columns = {**scenarios, **given}
    means = columns["decodes"], columns["kv_len"]
    rows = [{name: array[i].item() for name, array in columns.items()} for i in range(mesh[0].size)]
    for row, origin in zip(rows, decode_origins(served, *means, has_drafts=drafts is not None), strict=True):
        row["origin"] = ORIGINS[origin]
    memory = speculated(served, drafts).memory(max_num_batched_tokens=budget, max_num_seqs=asked_seqs)
    if as_json:
        print_json(
            {
                **plan_facts(served, **workers),
                "max_num_batched_tokens": budget,
                "max_num_seqs": int(memory.most_running(seqs)),
                "max_kv_tokens": memory.max_kv_tokens,
                "tables_hash": served.tables_hash,
                **run,
                "front_end": served.profile.front_end.words(),
                **options,
                "rows": rows,
            }
        )
    else:
        _print(served, _apart_words(workers, layouts, served), rows, options, run)


def _apart_words(workers: dict[str, int], layouts: tuple[Layout, ...], plan: StepPlan) -> str:
    """Return the number and layout of prefill and decode workers; empty without them."""
    if not workers:
        return ""
    counts = workers["prefill_workers"], workers["decode_workers"]
    gpus = sum(count * layout.world_size for count, layout in zip(counts, layouts, strict=True))
    prefill, decode = (f"{count} x {layout}" for count, layout in zip(counts, layouts, strict=True))
    return f"{gpus} x {plan.gpu.title} ({prefill} that prefill, {decode} that decode)"


def given_requests(text: str) -> float | str:
    """Read the requests of each client: a number, or steady."""
    try:
        return float(text)
    except ValueError:
        return text


def _print(
    plan: StepPlan, apart: str, rows: list[dict[str, Any]], options: dict[str, Any], run: dict[str, Any]
) -> None:
    from fastroof.plan.energy import basis_of

    where = apart or f"{plan.layout.world_size} x {plan.gpu.title}{layout_suffix(plan.layout)}"
    print_line(f"{plan_words(plan, where)}{_drafts_text(options)}")
    print_line(f"{_run_words(run)}front end: {plan.profile.front_end.words()}\n")
    common = ("isl", "osl", "clients", "TTFT ms", "TPOT ms", "request ms", "tokens/s a GPU")
    more = ("prefill load", "KV load", "decodes", "wait ms") if apart else (
        "running", "decode ms", "mixed ms", "mixed steps", "wait ms"
    )  # fmt: skip
    has_joules = "joules_per_token" in rows[0]
    joules = ("J a token",) * has_joules
    print_table((*common, *more, *joules), [_cells(row, is_apart=bool(apart)) for row in rows])
    print_line(f"\n{_error_words(rows)}")
    if has_joules:
        error = max(row["joules_relative_error"] for row in rows)
        print_line(f"J a token: power {basis_of(plan.gpu)}, ±{percent(error)} for it alone")


def _error_words(rows: list[dict[str, Any]]) -> str:
    """Return the largest errors of the rows, and the furthest origin."""
    names = {"tpot_relative_error": "TPOT", "ttft_relative_error": "TTFT"}
    if not any(name in rows[0] for name in names):
        names = {"relative_error": "a decode step"}
    known = []
    for name, words in names.items():
        errors = [error for row in rows if not math.isnan(error := row.get(name, math.nan))]
        known += [f"{words} ±{percent(max(errors))}"] if errors else []
    origin = max((row["origin"] for row in rows), key=ORIGINS.index)
    stated = f"one standard error: {', '.join(known)}" if known else "errors unknown"
    return f"{stated}; decodes {ORIGIN_WORDS[origin]}"


def _run_words(run: dict[str, Any]) -> str:
    if not run:
        return ""
    rounds = run["requests_per_client"]
    from fastroof.serving.scenarios import STEADY

    start = "without the start" if rounds == STEADY else f"{rounds:g} requests a client, started together"
    spread = run["length_spread"]
    lengths = f"outputs differ by {percent(spread)}" if spread else "equal lengths"
    return f"{start}, {lengths}; "


def _drafts_text(options: dict[str, Any]) -> str:
    words = drafts_words(options)
    if "prefix_hit" in options:
        words += f", {percent(options['prefix_hit'])} of prompts in the prefix cache"
    if "images" in options:
        sizes = ", ".join(f"{width} x {height}" for width, height in options["images"])
        words += f", images of {sizes} a prompt: "
        words += f"{options['image_tokens']:,} tokens besides isl"
    return words


def _cells(row: dict[str, Any], *, is_apart: bool) -> list[str]:
    def number(name: str, digits: int = 1) -> str:
        return "-" if row[name] != row[name] else f"{row[name]:,.{digits}f}"

    cells = [f"{row[name]:,}" for name in ("isl", "osl", "clients")]
    cells += [number("ttft_ms"), number("tpot_ms", 2), number("request_latency_ms", 0)]
    cells.append(number("tokens_per_s_per_gpu", 0))
    if is_apart:
        loads = [percent(row[name]) for name in ("prefill_load", "kv_load")]
        return [*cells, *loads, number("decodes"), number("wait_ms")]
    cells.append(number("effective_concurrency"))
    for name in ("decode_step_us", "mixed_step_us"):
        cells.append(f"{row[name] / US_PER_MS:,.2f}" if row[name] else "-")
    joules = [f"{row['joules_per_token']:,.4g}"] if "joules_per_token" in row else []
    return [*cells, percent(row["mixed_share"]), number("wait_ms"), *joules]
