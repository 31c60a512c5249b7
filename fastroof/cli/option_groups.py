"""Option groups that several commands share, each defined once.

A plan option is a field of :class:`fastroof.plan.options.PlanOptions`: its name, default, help text and unit
are read from there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import shown
from fastroof.cli.options import Gpu, Source, TablesPath, flag_of, option
from fastroof.command_group import Group, GroupValues
from fastroof.errors import SimulationError
from fastroof.plan.options import OPTIONS

if TYPE_CHECKING:
    from fastroof.engines.scheduling import Scheduling, StepLimits
    from fastroof.plan import StepPlan

_TYPES: Final[dict[str, Any]] = {"int": int, "float": float, "bool": bool}
"""Types of options that are not text."""

_ELSEWHERE: Final = (
    "max_num_batched_tokens", "max_num_seqs", "gemm_smoothing", "wide_experts", "num_slots", "dp_imbalance",
    "moe_tp",
)  # fmt: skip
"""Sizes of a plan, which every command sets itself, and options of Python and of named plans alone."""

OUTSIDE_STEPS: Final = ("front_end",)
"""Options of a plan that times of steps do not depend on."""

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
        flag = (flag_of(name),) if field.default is False else ()
        own = field.metadata["flag"]
        names = (own,) if own else flag
        kind = _TYPES.get(str(field.type).removesuffix(" | None"), str)
        about = field.metadata
        group[name] = option(kind, about["help"], about["metavar"] or None, *names, default=field.default)
    return group


TABLES: Final[Group] = {"gpu": (Gpu, None), "tables": (TablesPath, None), "source": (Source, None)}
"""The GPU and its measured tables, as arguments of :func:`fastroof.cli.gpu_tables.gpu_and_tables`."""


_OWN: Final = f"; {ENGINE_OWN} is the engine's own."

LIMITS: Final[Group] = {
    "max_num_batched_tokens": option(
        str, f"Maximum number of tokens in a step{_OWN}", "TOKENS", default=ENGINE_OWN
    ),
    "max_num_seqs": option(
        str, f"Maximum number of concurrent sequences{_OWN}", "REQUESTS", default=ENGINE_OWN
    ),
}
"""The largest step that an engine schedules."""

ENGINE_FACTS: Final = """
\b
After engine: engine_versions (those with the same rules), not_validated_beyond (the newest version with
measured runs if the engine is newer, else null).
"""
"""The end of the help of commands that print an engine's profile as JSON."""

SCHEDULING: Final[Group] = {
    "order": option(
        str,
        "Order of prompts: mixed (with decodes) or prefill_first (in steps before them).  "
        "[default: the engine's own]",
        "NAME",
    ),
    "chunked_prefill": option(
        bool,
        "Split prompts that do not fit into a step.  [default: the engine's own]",
        None,
        "--chunked-prefill/--no-chunked-prefill",
    ),
    "prefill_schedule_interval": option(
        int,
        "Compute prompts once every so many steps while requests decode (vLLM).  [default: 1]",
        "STEPS",
        min=1,
    ),
}
"""How an engine fills its steps."""

ENGINE_SETTINGS: Final[Group] = {
    **LIMITS,
    "num_gpu_blocks": option(int, "Number of KV cache blocks.  [default: as many as fit]", "BLOCKS", min=1),
    "block_size": option(str, f"Tokens per block{_OWN}", "TOKENS", default=ENGINE_OWN),
    "async_scheduling": option(
        bool,
        "Schedule a step while the previous one runs.  [default: the engine's own]",
        None,
        "--async-scheduling/--no-async-scheduling",
    ),
    **SCHEDULING,
    "timeout": option(float, "Seconds after which a client gives up.  [default: never]", "S"),
}
"""Settings of a simulated engine."""


def engine_settings(given: GroupValues) -> dict[str, Any]:
    """Return the arguments of :func:`fastroof.simulate` that options of ENGINE_SETTINGS are."""
    settings = given | numbers_or_engine(given, (*LIMITS, "block_size"))
    settings["timeout_s"] = settings.pop("timeout")
    return settings


def simulated_plan(
    model: str,
    gpu: Any,
    tables: Any,
    settings: Mapping[str, Any],
    options: GroupValues,
    draft_tokens: int | None = None,
) -> StepPlan:
    """Compile a plan for the steps that an engine with these settings makes."""
    from fastroof import compile_plan
    from fastroof.engines import load_engine
    from fastroof.models import load_model

    engine = load_engine(options["engine"]).on(gpu, load_model(model).ranks(options["dp"]))
    own = engine.scheduling.in_order(settings.get("order"))
    tokens, seqs, _ = own.step_limits(*(settings[name] for name in LIMITS))
    sizes = own.plan_sizes(tokens, seqs, draft_tokens or 0)
    return compile_plan(model, gpu, tables, **{**options, **sizes, "engine": engine})


def step_limits(given: GroupValues, own: Scheduling) -> StepLimits:
    """Return the limits given, else the engine's own."""
    return own.step_limits(*numbers_or_engine(given).values())


def numbers_or_engine(given: GroupValues, names: Iterable[str] = LIMITS) -> dict[str, int | None]:
    """Read the numbers of some options; None for the engine's own default."""
    return {name: number_or_engine(flag_of(name), given[name]) for name in names}


def number_or_engine(name: str, text: str) -> int | None:
    """Read a whole number; None for ``engine``, the engine's own default."""
    word = text.strip()
    if word == ENGINE_OWN:
        return None
    if _WHOLE.fullmatch(word) is None or int(word) < 1:
        raise SimulationError(
            f"{name} needs a whole number of at least 1, or {ENGINE_OWN}, got {shown(text)}"
        )
    return int(word)


EXECUTION: Final[Group] = {
    "address": option(str, "Ray cluster to run on, or auto.  [default: run here]", "HOST:PORT"),
    "resume": option(bool, "Continue an interrupted run.", None, "--resume", default=False),
    "restart": option(bool, "Discard an interrupted run.", None, "--restart", default=False),
}
"""How a sweep runs, as arguments of :func:`fastroof.run_sweep`; with an address, on Ray."""
