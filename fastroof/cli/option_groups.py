"""Option groups that several commands share, each defined once.

A plan option is a field of :class:`fastroof.plan.options.PlanOptions`: its name, default, help text and unit
are read from there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.cli.options import Gpu, Source, TablesPath
from fastroof.command_group import Group, GroupValues
from fastroof.errors import SimulationError, SweepError
from fastroof.plan.options import OPTIONS

if TYPE_CHECKING:
    from fastroof.engines.scheduling import Scheduling, StepLimits
    from fastroof.plan import StepPlan

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

ENGINE: Final = ("--engine",)
MAX_NUM_BATCHED_TOKENS: Final = ("--max-num-batched-tokens",)
MAX_NUM_SEQS: Final = ("--max-num-seqs",)


_WHOLE: Final = re.compile(r"[0-9]{1,9}")

ENGINE_OWN: Final = "engine"
"""Value that means the default of the engine's profile."""


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
    own = engine.scheduling.in_order(settings.get("order"))
    tokens, seqs, _ = own.step_limits(*(settings[name] for name in LIMITS))
    return compile_plan(model, gpu, tables, **{**options, **own.plan_sizes(tokens, seqs), "engine": engine})


def step_limits(given: GroupValues, own: Scheduling) -> StepLimits:
    """Return the limits given, else the engine's own."""
    return own.step_limits(*(number_or_engine(f"--{name.replace('_', '-')}", given[name]) for name in LIMITS))


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
