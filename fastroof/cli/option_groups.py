"""Option groups that several commands share, each defined once.

A plan option is a field of :class:`fastroof.plan.options.PlanOptions`: its name, default, help text and unit
are read from there. ``@taking(plan=plan_options())`` replaces the parameter ``plan`` by the group's options,
which the command then gets as a dict.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.cli.options import Gpu, Source, TablesPath
from fastroof.errors import SimulationError, SweepError
from fastroof.plan.options import OPTIONS

if TYPE_CHECKING:
    from fastroof.engines import EngineProfile
    from fastroof.plan import StepPlan
    from fastroof.simulation import Link

Group = Mapping[str, tuple[Any, Any]]
"""Type and default of each option by the name of its parameter; ... if required."""

GroupValues = dict[str, Any]
"""Values of a group's options by name."""

_TYPES: Final[dict[str, Any]] = {
    "int": int,
    "int | None": int | None,
    "float": float,
    "float | None": float | None,
    "str": str,
    "str | None": str | None,
    "bool": bool,
    "bool | None": bool | None,
    "Lora | str | int | None": str | None,
}
_ELSEWHERE: Final = ("max_tokens", "max_seqs")
"""Sizes of a plan, which every command sets itself."""

OUTSIDE_STEPS: Final = ("client_overhead_ms",)
"""Options of a plan that times of steps do not depend on."""

ENGINE: Final = ("--engine", "--runtime")
MAX_NUM_BATCHED_TOKENS: Final = ("--max-num-batched-tokens", "--max-batched-tokens")
MAX_NUM_SEQS: Final = ("--max-num-seqs", "--max-seqs")


_WHOLE: Final = re.compile(r"[0-9]{1,9}")

ENGINE_OWN: Final = "engine"
"""Value that means the default of the engine's profile."""


def taking(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command groups of options, each replacing the parameter of its name."""

    def with_groups(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for one in inspect.signature(function, eval_str=True).parameters.values():
            if one.name in groups:
                parameters += [_parameter(name, *option) for name, option in groups[one.name].items()]
            else:
                parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def command(**given: Any) -> None:
            taken = {group: {name: given.pop(name) for name in options} for group, options in groups.items()}
            function(**given, **taken)

        made: Any = command
        made.__name__, made.__doc__ = function.__name__, function.__doc__
        made.__signature__ = inspect.Signature(parameters)
        made.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return with_groups


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=empty if default is ... else default, annotation=kind
    )


def plan_options(*, without: Collection[str] = (), only: Collection[str] = ()) -> Group:
    """Return the options that a plan is compiled with, as arguments of :func:`fastroof.compile_plan`."""
    group: dict[str, tuple[Any, Any]] = {}
    for name, field in OPTIONS.items():
        if name in _ELSEWHERE or name in without or (only and name not in only):
            continue
        # a flag that is off by default needs no word to turn it off
        flag = (f"--{name.replace('_', '-')}",) if field.default is False else ()
        own = field.metadata["flag"]
        names = ENGINE if name == "engine" else (own,) if own else flag
        option = typer.Option(*names, metavar=field.metadata["metavar"] or None, help=field.metadata["help"])
        kind = _TYPES.get(str(field.type), str)
        group[name] = (Annotated[kind, option], field.default)
    return group


TABLES: Final[Group] = {"gpu": (Gpu, None), "tables": (TablesPath, None), "source": (Source, None)}
"""The GPU and its measured tables, as arguments of :func:`fastroof.cli.gpu_tables.gpu_and_tables`."""


def _size(names: Collection[str], metavar: str, what: str) -> tuple[Any, str]:
    help_text = f"Maximum number of {what}; {ENGINE_OWN} is the engine's own."
    return Annotated[str, typer.Option(*names, metavar=metavar, help=help_text)], ENGINE_OWN


LIMITS: Final[Group] = {
    "max_num_batched_tokens": _size(MAX_NUM_BATCHED_TOKENS, "TOKENS", "tokens in a step"),
    "max_num_seqs": _size(MAX_NUM_SEQS, "REQUESTS", "concurrent sequences"),
}
"""The largest step that an engine schedules."""

ENGINE_FACTS: Final = """
\b
After engine: engine_versions (those with the same rules), not_validated_beyond (the newest version with
measured runs if the engine is newer, else null).
"""
"""The end of the help of commands that print an engine's profile as JSON."""

SCHEDULING: Final[Group] = {
    "order": (
        Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help="Order of prompts: mixed (with decodes) or prefill_first (in steps before them).  "
                "[default: the engine's own]",
            ),
        ],
        None,
    ),
    "chunked_prefill": (
        Annotated[
            bool | None,
            typer.Option(
                "--chunked-prefill/--no-chunked-prefill",
                help="Split prompts that do not fit into a step.  [default: the engine's own]",
            ),
        ],
        None,
    ),
    "prefill_schedule_interval": (
        Annotated[
            int | None,
            typer.Option(
                min=1,
                metavar="STEPS",
                help="Compute prompts once every so many steps while requests decode (vLLM).  [default: 1]",
            ),
        ],
        None,
    ),
}
"""How an engine fills its steps."""

ENGINE_SETTINGS: Final[Group] = {
    **LIMITS,
    "num_gpu_blocks": (
        Annotated[
            int | None,
            typer.Option(
                min=1, metavar="BLOCKS", help="Number of KV cache blocks.  [default: as many as fit]"
            ),
        ],
        None,
    ),
    "block_size": (
        Annotated[
            str,
            typer.Option(metavar="TOKENS", help=f"Tokens per block; {ENGINE_OWN} is the engine's own."),
        ],
        ENGINE_OWN,
    ),
    "async_scheduling": (
        Annotated[
            bool | None,
            typer.Option(
                "--async-scheduling/--no-async-scheduling",
                help="Schedule a step while the previous one runs.  [default: the engine's own]",
            ),
        ],
        None,
    ),
    **SCHEDULING,
    "reserve_output": (
        Annotated[
            bool | None,
            typer.Option(
                "--reserve-output/--no-reserve-output",
                help="Start a request only if its whole output fits.  [default: the engine's own]",
            ),
        ],
        None,
    ),
    "prefill_decode_interval": (
        Annotated[
            int | None,
            typer.Option(
                min=0, metavar="STEPS", help="Decode steps after one with prompts (SGLang).  [default: 0]"
            ),
        ],
        None,
    ),
    "min_free_slots_delay": (
        Annotated[
            int | None,
            typer.Option(
                min=0,
                metavar="REQUESTS",
                help="Start prompts once so many of --max-num-seqs are free (SGLang).  [default: 0]",
            ),
        ],
        None,
    ),
    "timeout": (
        Annotated[
            float | None,
            typer.Option(metavar="S", help="Seconds after which a client gives up.  [default: never]"),
        ],
        None,
    ),
}
"""Settings of a simulated engine."""


def engine_settings(given: GroupValues) -> dict[str, Any]:
    """Return the arguments of :func:`fastroof.simulate` that options of ENGINE_SETTINGS are."""
    settings = dict(given)
    for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
        settings[name] = number_or_engine(f"--{name.replace('_', '-')}", given[name])
    settings["timeout_s"] = settings.pop("timeout")
    return settings


def simulated_plan(
    model: str, gpu: Any, tables: Any, settings: Mapping[str, Any], options: GroupValues
) -> StepPlan:
    """Compile a plan for the steps that an engine with these settings makes."""
    from fastroof import compile_plan
    from fastroof.engines import load_engine

    engine = load_engine(options["engine"]).on(gpu)
    own = engine.scheduling
    tokens = settings["max_num_batched_tokens"] or own.max_num_batched_tokens
    seqs = settings["max_num_seqs"] or min(own.max_num_seqs, tokens)
    sizes = {"max_tokens": max(tokens, seqs), "max_seqs": seqs}
    return compile_plan(model, gpu, tables, **{**options, **sizes, "engine": engine})


def engine_limits(given: GroupValues, engine: EngineProfile) -> tuple[int, int]:
    """Return the tokens and sequences of the largest step: those given, else the engine's own."""
    tokens, seqs = (number_or_engine(f"--{name.replace('_', '-')}", given[name]) for name in LIMITS)
    own = engine.scheduling
    return tokens or own.max_num_batched_tokens, seqs or own.max_num_seqs


def number_or_engine(option: str, text: str) -> int | None:
    """Read a whole number; None for ``engine``, the engine's own default."""
    word = text.strip()
    if word == ENGINE_OWN:
        return None
    if _WHOLE.fullmatch(word) is None or int(word) < 1:
        raise SimulationError(
            f"{option} needs a whole number of at least 1, or {ENGINE_OWN}, got {shown(text)}"
        )
    return int(word)


ROUTER: Final[Group] = {
    "router": (
        Annotated[
            str,
            typer.Option(
                metavar="NAME",
                help="Routing to replicas: round_robin, least_outstanding, least_load, least_kv, "
                "power_of_two or, with a simulated prefix cache, prefix_aware.",
            ),
        ],
        "round_robin",
    ),
    "prefix_cache": (
        Annotated[
            str,
            typer.Option(
                metavar="auto|given|lru",
                help="Prefix cache: hits as the trace gives them, or of a simulated LRU cache by its "
                "hash_ids or sessions; auto is lru for traces with either.",
            ),
        ],
        "auto",
    ),
    "kv_tiers": (
        Annotated[
            str | None,
            typer.Option(
                metavar="TIERS",
                help="Tiers of KV cache below a simulated prefix cache, with commas between: lmcache-cpu, "
                "lmcache-disk, vllm-offloading, sglang-hicache, mooncake-store, or another name with its "
                "size and bandwidth, then latency, write_back, write_through, wait, before_step, by_layer, "
                "prompts, answers: host:200GB:50GB/s:20us:by_layer.  [default: none]",
            ),
        ],
        None,
    ),
}
"""How requests find a replica, and what is cached in it and below it."""


EXECUTION: Final[Group] = {
    "executor": (
        Annotated[str, typer.Option(metavar="local|ray", help="Where a sweep runs.")],
        "local",
    ),
    "address": (
        Annotated[
            str | None,
            typer.Option(metavar="HOST:PORT", help="Ray cluster to use, or auto.  [default: start one here]"),
        ],
        None,
    ),
    "resume": (Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")], False),
    "restart": (Annotated[bool, typer.Option("--restart", help="Discard an interrupted run.")], False),
}
"""How a sweep runs, as arguments of :func:`fastroof.run_sweep`."""


def check_engine(given: str | None) -> None:
    """Refuse an executor as --engine, which it meant before."""
    if given in ("local", "ray"):
        raise SweepError(f"--engine is the serving engine; --executor {given} says where a sweep runs")


POOLS: Final[Group] = {
    "prefill_replicas": (
        Annotated[
            int | None, typer.Option(min=1, help="Number of prefill engines; needs --decode-replicas.")
        ],
        None,
    ),
    "decode_replicas": (
        Annotated[int | None, typer.Option(min=1, help="Number of decode engines, each on --tp GPUs.")],
        None,
    ),
    "prefill_tp": (
        Annotated[
            int | None, typer.Option(metavar="GPUS", help="GPUs of a prefill engine.  [default: --tp]")
        ],
        None,
    ),
    "kv_bandwidth": (
        Annotated[
            float | None,
            typer.Option(
                metavar="GB/S",
                help="Bandwidth from a prefill GPU to a decode GPU: 50 is a 400 Gb/s NIC.  "
                "[default: NVLink's]",
            ),
        ],
        None,
    ),
    "kv_latency": (
        Annotated[
            float | None,
            typer.Option(metavar="US", help="Latency of each KV cache transfer.  [default: 0]"),
        ],
        None,
    ),
    "first_token": (
        Annotated[
            str | None,
            typer.Option(
                metavar="transfer|prefill|decode",
                help="Where the client sees the first token: with the KV cache at the decode engine, at the "
                "prefill engine, or computed by the decode engine.  [default: transfer]",
            ),
        ],
        None,
    ),
    "back_pressure": (
        Annotated[
            bool | None,
            typer.Option(
                "--back-pressure/--no-back-pressure",
                help="Keep a prompt's blocks until it is sent, once its decode engine has room.  "
                "[default: no-back-pressure]",
            ),
        ],
        None,
    ),
    "kv_by_layer": (
        Annotated[
            bool | None,
            typer.Option(
                "--kv-by-layer/--kv-at-once",
                help="Send each layer's KV cache as soon as it is computed.  [default: kv-at-once]",
            ),
        ],
        None,
    ),
}
"""Engines that only prefill and engines that only decode."""


def asked_link(
    replicas: int,
    *,
    prefill_replicas: int | None,
    decode_replicas: int | None,
    prefill_tp: int | None,
    kv_bandwidth: float | None,
    kv_latency: float | None,
    first_token: str | None,
    back_pressure: bool | None,
    kv_by_layer: bool | None,
) -> Link | None:
    """Return the link between pools of engines, None without pools."""
    from fastroof.simulation import Link
    from fastroof.units import GB

    given: dict[str, Any] = {
        "--prefill-tp": prefill_tp,
        "--kv-bandwidth": kv_bandwidth,
        "--kv-latency": kv_latency,
        "--first-token": first_token,
        "--back-pressure": back_pressure,
        "--kv-by-layer": kv_by_layer,
    }
    if prefill_replicas is None and decode_replicas is None:
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise SimulationError(f"{alone[0]} needs --prefill-replicas and --decode-replicas")
        return None
    if None in (prefill_replicas, decode_replicas):
        raise SimulationError("--prefill-replicas and --decode-replicas go together: give both")
    if replicas != 1:
        raise SimulationError(
            f"--replicas {replicas} are engines that prefill and decode; leave it out with "
            "--prefill-replicas and --decode-replicas"
        )
    link = Link(
        None if kv_bandwidth is None else kv_bandwidth * GB,
        kv_latency or 0.0,
        back_pressure=bool(back_pressure),
        by_layer=bool(kv_by_layer),
    )
    return link if first_token is None else link._replace(first_token=first_token)
