"""``fastroof step``: how long one step takes, and why."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.completion import run_few_loops_plain
from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.option_groups import ENGINE_FACTS, OUTSIDE_STEPS, TABLES, plan_options
from fastroof.cli.options import Json, Model, warn_beyond_context
from fastroof.cli.output import (
    ORIGIN_WORDS,
    percent,
    print_facts,
    print_json,
    print_line,
    print_records,
    print_table,
    scaled,
    time_words,
)
from fastroof.cli.workload_options import Requests, parse_images, parse_requests, with_image_tokens
from fastroof.columns import ORIGINS
from fastroof.command_group import GroupValues, taking, warn
from fastroof.defaults import DEFAULT_GPU
from fastroof.errors import PlanError
from fastroof.plan.options import LEAST_SEQS, LEAST_TOKENS, default_sizes
from fastroof.units import GIB, MIB, TB, US_PER_S

if TYPE_CHECKING:
    from fastroof import StepPlan
    from fastroof.config import GpuSpec
    from fastroof.plan.explain import Explanation, OperatorTime
    from fastroof.plan.plan_cache import CachedPlan

MOST_PLAIN: Final = 16384
"""Tokens and sequences of a step above which compiled loops are faster, including numba's import."""

PARTS: Final = {
    "tokens_us": "operators on all tokens",
    "logits_us": "LM head",
    "decode_attention_us": "decode attention",
    "prefill_attention_us": "prefill attention",
    "runtime_us": "engine",
    "vision_encoder_us": "vision encoder",
}

_ENERGY: Final = ("joules", "joules_per_token", "watts", "relative_error", "basis")

EPILOG: Final = (
    """\b
Examples:
  fastroof step --model llama-3.1-8b --decode 64x4096
  fastroof step --model llama-3.1-70b --tp 4 --dtype fp8 --decode 32x8192 --prefill 2048@1024 --explain
  fastroof step --model qwen3-vl-8b --prefill 4x100@0 --image 1920x1080 --explain
  fastroof step --model llama-3.1-70b --tp 4 --decode 32x8192 --measure > forward.sh

--measure needs vLLM 0.33 or newer on the GPUs that run forward.sh. It times the model's forward as one CUDA
graph, without LM head, sampler and host, which `fastroof validate --steps` compares with the plan's kernels.
Without --decode and --prefill it is a grid of steps of all kinds that fit the plan's KV cache.

\b
JSON: version, model, gpu, tp, pp, cp, dp, ep, moe_tp, routing, dtype, kv_dtype, lora (if any), engine,
method, tables_hash (empty for the datasheet model), kernels (which measured tables), requests [count,
new_tokens, context_len], tokens, sequences, latency_us, relative_error (one standard error; null with
--image), tokens_per_s (of all ranks and stages), tokens_per_s_per_gpu, origin (measured, interpolated,
extrapolated, borrowed or modelled), components_us [tokens, logits, decode_attention, prefill_attention,
runtime, vision_encoder (with images)], images [width, height] and image_tokens (of a prompt; with --image),
kv_tokens, max_kv_tokens, and with --explain operators [name, calls, total_us, share, flops, moved_bytes,
mfu, bytes_per_s, bound, origin, source, dtype (of its kernel)] and memory_bytes (of one GPU) [weights,
adapters (with LoRA), workspace, context, reserve, kv_cache]; with --energy energy [joules (of the GPUs of a
rank's stage), joules_per_token, watts (of one GPU), relative_error, basis (measured or modelled)]. Values
that do not apply are null.
"""
    + ENGINE_FACTS
)


@taking(plan=plan_options(without=OUTSIDE_STEPS), measured=TABLES)
def step(
    *,
    model: Model,
    plan: GroupValues,
    measured: GroupValues,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxKV", help="Decodes: 64x4096 is 64 that attend to 4096 tokens each; repeatable."
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NEW@CONTEXT",
            help="Prompts: 2048@1024 is 2048 new tokens after 1024; 4x2048@0 is four; repeatable.",
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WIDTHxHEIGHT",
            help="Image in every prompt of --prefill, in pixels (its tokens are added); repeatable.",
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Break the step down by operator.")] = False,
    energy: Annotated[
        bool, typer.Option("--energy", help="Estimate the step's joules, joules per token and watts.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Print the script that measures the step, or a grid of steps, with `vllm bench forward`.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time one step of a batch."""
    requests = [] if measure and not (decode or prefill) else parse_requests(decode or (), prefill or ())
    images = parse_images("--image", image or ())
    if measure:
        if images or explain or energy or as_json:
            raise PlanError(
                "--measure prints a script; it does not go with --image, --explain, --energy or --json"
            )
        typer.echo(_measuring(model, gpu_and_tables(**measured)[0], plan, requests))
        return
    if images and energy:
        raise PlanError("--energy does not go with --image: the power of a vision encoder is unknown")
    num_seqs = sum(r.count for r in requests)
    if max(num_seqs, sum(r.count * r.new_tokens for r in requests)) <= MOST_PLAIN:
        run_few_loops_plain()
    image_tokens = 0
    if images:
        from fastroof import load_model

        encoder = load_model(model).encoder
        image_tokens = sum(encoder.pieces(*size).tokens for size in images)
        requests = with_image_tokens(requests, image_tokens)
    num_tokens = sum(r.count * r.new_tokens for r in requests)
    sizes = max(num_tokens, LEAST_TOKENS), max(num_seqs, LEAST_SEQS)

    @functools.cache
    def compiled() -> StepPlan:
        from fastroof import compile_plan, load_model
        from fastroof.engines import load_engine

        spec, of_gpu = gpu_and_tables(**measured)
        own = load_engine(plan["engine"]).on(spec, load_model(model).ranks(plan["dp"])).scheduling
        return compile_plan(model, spec, of_gpu, **plan, **default_sizes(own, *sizes))

    every = [(r.new_tokens, r.context_len) for r in requests for _ in range(r.count)]
    pictures = images * sum(r.count for r in requests if not r.is_decode)
    from fastroof.run import StepBatch

    batch = StepBatch.from_requests([every])

    def error() -> float:
        plan = compiled()
        errors = plan.run(batch, with_error=plan.method in ("roofline", "datasheet")).relative_error
        return math.nan if errors is None else float(errors[0])

    operators = encoded = None
    if explain or images or energy:
        made = compiled()
        from fastroof.plan.plan_cache import CachedPlan

        timed = CachedPlan.of(made)
        operators = made.explain(every, images=pictures) if explain else None
        encoded = made.encode(pictures) if images else None
        relative = math.nan if images else error()
    else:
        from fastroof.plan.plan_cache import cached_error, cached_plan, plan_identity

        made = None
        # a GPU that was not named is that of the tables
        gpu, tables, source = measured.values()
        arguments = {**plan, "sizes": sizes, "gpu": gpu}
        identity = plan_identity(model, gpu or DEFAULT_GPU, tables, source, arguments)
        timed, stored = cached_plan(identity, compiled)
        # 0.1 s, and the plan: it is made of what measured points say of each other
        sizes_of_each = [(r.count, r.new_tokens, r.context_len) for r in requests]
        relative = cached_error(stored, sizes_of_each, error)
    times = timed.run(batch)
    encoder_us = 0.0 if encoded is None else encoded.latency_us
    latency_us = float(times.latency_us[0]) + encoder_us
    # every stage busy with a batch: as fast as the slowest
    stages = timed.layout["pp"]
    in_flight = StepBatch.from_requests([every] * stages)
    paced_us = latency_us if stages == 1 else timed.cycle_us(in_flight) + encoder_us * stages
    components = {name: float(part[0]) for name, part in times.components._asdict().items()}
    if images:
        components["vision_encoder_us"] = encoder_us
    kv_tokens = sum(r.count * (r.new_tokens + r.context_len) for r in requests)
    memory = timed.memory
    held = sum(r.count * memory.parts_per_request(r.new_tokens + r.context_len) for r in requests)
    if held > memory.parts:
        words = _kv_words(timed, requests, kv_tokens)
        warn(f"this step does not fit into the KV cache of one {timed.gpu}: {words}")
    warn_beyond_context(
        timed.model, timed.max_position, max((r.new_tokens + r.context_len for r in requests), default=0)
    )
    facts: dict[str, Any] = {
        "latency_us": latency_us,
        "relative_error": None if math.isnan(relative) else relative,
        "tokens": num_tokens,
        "sequences": num_seqs,
        "tokens_per_s": num_tokens * timed.batches_in_flight / paced_us * US_PER_S,
        "origin": ORIGINS[max(int(times.origin[0]), 0 if encoded is None else encoded.origin)],
        "kv_tokens": kv_tokens,
    }
    if images:
        facts |= {"images": images, "image_tokens": image_tokens}
    if energy and made is not None:
        drawn = made.energy(batch, with_error=not math.isnan(relative))
        row = {name: values[0] for name, values in drawn.columns().items()}
        facts["energy"] = {name: row[name] for name in _ENERGY if name != "basis"} | {"basis": drawn.basis}
    if as_json:
        print_json(_document(timed, requests, facts, components, operators))
    else:
        _print(timed, requests, facts, components, operators)


def _measuring(model: str, gpu: GpuSpec, plan: GroupValues, requests: Sequence[Requests]) -> str:
    """Return the script that measures a step, or a grid of steps, with vLLM, and how to compare it."""
    import warnings

    from fastroof import compile_plan, load_model
    from fastroof.engines.launch import LaunchSettings
    from fastroof.engines.launch.vllm_forward import FIRST_RELEASE, forward_command, step_grid
    from fastroof.models.load import published_checkpoint
    from fastroof.plan.options import PlanOptions

    loaded = load_model(model)
    options = PlanOptions(**plan).checked().for_model(loaded, gpu)
    if options.engine.engine not in ("", "vllm"):
        raise PlanError(f"--measure needs --engine vllm, whose bench it calls; got {options.engine.name}")
    layout = options.layout
    if layout.pp > 1 or layout.cp > 1:
        raise PlanError(f"--measure needs pp 1 and cp 1, whose steps can be compared; got {layout}")
    steps = {"step": [(r.new_tokens, r.context_len) for r in requests for _ in range(r.count)]}
    words = f"one step of {', '.join(r.words for r in requests)}"
    if not requests:
        with warnings.catch_warnings():
            # nothing is timed
            warnings.simplefilter("ignore")
            unmeasured = compile_plan(model, gpu, "datasheet", **{**plan, "method": "roofline"})
        room = unmeasured.memory.max_kv_tokens
        steps = step_grid(room, loaded.max_position)
        words = f"{len(steps)} steps that fit {room:,} tokens of KV cache"
        if not steps:
            raise PlanError(
                f"{loaded.name} has no room for a step on {gpu.title}: {room:,} tokens of KV cache"
            )
    checkpoint = published_checkpoint(model, options.dtype)
    served = LaunchSettings(
        checkpoint.name, layout.tp, layout.pp, layout.dp, layout.ep, options.dtype, options.kv_dtype,
        checkpoint.dtype, options.engine.memory.auto_kv_dtype(gpu, loaded.architecture, checkpoint.kv_dtype),
    )  # fmt: skip
    command = forward_command(served, steps, "forward.json")
    where = f"{loaded.name} on {layout.world_size} x {gpu.title}, vLLM {FIRST_RELEASE} or newer"
    compare = "fastroof validate --steps forward.json --engine-args forward.sh"
    lines = [
        f"# {words}: {where}",
        f"# then: {compare} --engine-version {FIRST_RELEASE} --gpu {gpu.name}",
        *(f"# not in the command: {text}" for text in command.unsaid),
        command.shell(),
    ]
    return "\n".join(lines)


def _document(
    plan: CachedPlan,
    requests: list[Requests],
    facts: dict[str, Any],
    components: dict[str, float],
    explanation: Explanation | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "version": plan.version,
        "model": plan.model,
        "gpu": plan.gpu,
        **plan.layout,
        "routing": plan.routing,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        **({} if plan.lora is None else {"lora": plan.lora}),
        **plan.engine_facts,
        "method": plan.method,
        "tables_hash": plan.tables_hash,
        "kernels": plan.kernels,
        "requests": [asdict(r) for r in requests],
        **{name: facts[name] for name in ("tokens", "sequences", "latency_us", "relative_error")},
        "tokens_per_s": facts["tokens_per_s"],
        "tokens_per_s_per_gpu": facts["tokens_per_s"] / plan.world_size,
        "origin": facts["origin"],
        "components_us": {name.removesuffix("_us"): us for name, us in components.items()},
        **{name: facts[name] for name in ("images", "image_tokens", "energy") if name in facts},
        "kv_tokens": facts["kv_tokens"],
        "max_kv_tokens": plan.memory.max_kv_tokens,
    }
    if explanation is not None:
        document["memory_bytes"] = plan.memory.explain()
        document["operators"] = [
            {
                "name": o.name,
                "calls": o.calls,
                "total_us": o.total_us,
                "share": o.total_us / explanation.total_us,
                "flops": o.flops,
                "moved_bytes": o.moved_bytes,
                "mfu": o.mfu,
                "bytes_per_s": o.moved_bytes / o.total_us * US_PER_S,
                "bound": o.bound,
                "origin": ORIGINS[o.origin],
                "source": o.source,
                "dtype": o.dtype,
            }
            for o in explanation.operators
        ]
    return document


def energy_words(drawn: Mapping[str, Any]) -> str:
    """Return a step's joules and watts, with their error, and whether its GPU's power was measured."""
    power = "power measured on this GPU" if drawn["basis"] == "measured" else "power modelled"
    return (
        f"{drawn['joules']:,.4g} J, {drawn['joules_per_token']:,.4g} J a token, "
        f"{drawn['watts']:,.0f} W a GPU ±{percent(drawn['relative_error'])}; {power}"
    )


def _checkpoint_words(plan: CachedPlan) -> str:
    """Return how a checkpoint is quantised, and whether that was requested."""
    other = "" if plan.dtype == plan.checkpoint_dtype else f", timed as {plan.dtype}"
    return f"{plan.checkpoint_method}{other}"


def _memory_words(plan: CachedPlan) -> str:
    """Return how a GPU's memory is divided."""
    parts = plan.memory.explain()
    return ", ".join(
        f"{name.replace('_', ' ')} {held / GIB:,.1f} GiB" for name, held in parts.items() if held
    )


def _kv_words(plan: CachedPlan, requests: list[Requests], kv_tokens: int) -> str:
    """Return the share of the KV cache that a step takes."""
    memory = plan.memory
    state_bytes = memory.state_bytes_per_sequence
    if not (memory.window or state_bytes):
        return f"{kv_tokens:,} of {memory.max_kv_tokens:,} tokens that fit"
    held = sum(r.count * memory.held_tokens(r.new_tokens + r.context_len) for r in requests)
    kept = [f", of which windowed layers keep the last {memory.window:,} of a sequence"] * bool(memory.window)
    kept += [f" and {state_bytes / MIB:,.1f} MiB of state a sequence"] * bool(state_bytes)
    return (
        f"{kv_tokens:,} tokens{''.join(kept)}: "
        f"as much as {held:,.0f} of {memory.max_kv_tokens:,} whole ones that fit"
    )


def _print(
    plan: CachedPlan,
    requests: list[Requests],
    facts: dict[str, Any],
    components: dict[str, float],
    explanation: Explanation | None,
) -> None:
    total_us = facts["latency_us"]
    gpus = plan.world_size
    per_gpu = f" ({facts['tokens_per_s'] / gpus:,.0f} a GPU)" if gpus > 1 else ""
    layout = plan.layout
    split = "" if gpus == layout["tp"] == layout["moe_tp"] else f" ({plan.layout_text})"
    print_line(
        f"{plan.model} on {gpus} x {plan.gpu_title}{split}, {plan.dtype} weights, {plan.kv_dtype} KV cache, "
        f"engine {plan.engine_title}"
    )
    pictures = ""
    if "images" in facts:
        sizes = ", ".join(f"{width} x {height}" for width, height in facts["images"])
        pictures = f"; in each prompt {facts['image_tokens']:,} tokens of images of {sizes}"
    print_line(f"one step of {', '.join(r.words for r in requests)}{pictures}\n")
    error = facts["relative_error"]
    spread = "" if error is None else f" ±{percent(error)}"
    words = {
        "step time": f"{time_words(total_us)}{spread}",
        "tokens/s": f"{facts['tokens_per_s']:,.0f}{per_gpu}",
        "origin": ORIGIN_WORDS[facts["origin"]],
        "energy": energy_words(facts["energy"]) if "energy" in facts else "",
        "kernels": plan.kernels,
        "checkpoint": _checkpoint_words(plan) if plan.checkpoint_method else "",
        "LoRA": f"{plan.lora} (rank:adapters:modules), all requests" if plan.lora else "",
        "KV cache": _kv_words(plan, requests, facts["kv_tokens"]),
        "memory of a GPU": "" if explanation is None else _memory_words(plan),
    }
    print_facts({name: value for name, value in words.items() if value})
    print_line()
    if explanation is None:
        rows = [(PARTS[name], f"{us:,.1f}", percent(us / total_us)) for name, us in components.items() if us]
        print_table(("part", "us", "share"), rows, left=("part",))
        return
    operators: dict[str, Callable[[OperatorTime], str]] = {
        "operator": lambda o: o.name,
        "calls": lambda o: str(o.calls),
        "us": lambda o: f"{o.total_us:,.1f}",
        "share": lambda o: percent(o.total_us / total_us),
        "FLOPs": lambda o: scaled(o.flops, "FLOP"),
        "bytes": lambda o: scaled(o.moved_bytes, "B"),
        "MFU": lambda o: percent(o.mfu),
        "TB/s": lambda o: f"{o.moved_bytes / o.total_us * US_PER_S / TB:.2f}" if o.moved_bytes else "",
        "bound": lambda o: o.bound,
        "origin": lambda o: ORIGINS[o.origin],
        "dtype": lambda o: o.dtype,
    }
    print_records(
        explanation.operators,
        operators,
        left=("operator", "bound", "origin", "dtype"),
        least=("dtype", "bytes", "FLOPs", "TB/s", "calls", "bound"),
    )
