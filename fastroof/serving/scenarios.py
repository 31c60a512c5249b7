"""Checks of scenarios: arguments as the loops read them, and errors about invalid scenarios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import is_number, is_whole_number, one_of, shown, whole_number
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import AT_RANDOM, CODE_KV, CODE_SIZES, CODE_TOKENS, CODE_WHOLE_PROMPT
from fastroof.defaults import REQUESTS_PER_CLIENT
from fastroof.engines import KV_RESERVATIONS, STEP_ORDERS, EngineProfile
from fastroof.engines.values import MOST
from fastroof.errors import BatchError, PlanRangeError
from fastroof.given_arrays import common_shape, number_array, refused
from fastroof.plan.calls import rank_rules
from fastroof.plan.start import what_makes_room

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

ARRIVALS: Final = ("closed", "random")
"""When requests arrive: as the last answer of their client ends, or at random moments of a step."""


STEADY: Final = "steady"
"""A closed loop without its start."""


class EngineLimits(NamedTuple):
    """How an engine schedules and reserves memory, as the loops read it."""

    max_num_batched_tokens: Any
    is_chunked: bool
    osl_reserved: float
    max_num_seqs: float
    is_prefill_first: bool
    asked_seqs: float | None = None
    """``max_num_seqs`` if it was given, or follows from the tokens given."""

    @property
    def memory_tokens(self) -> int | None:
        """Tokens of a step that memory is reserved for; None, the plan's, for several or invalid ones."""
        tokens = self.max_num_batched_tokens
        return int(tokens) if is_whole_number(tokens, most=MAX_KV_LEN) else None


def broadcast(scenarios: Mapping[str, Any]) -> tuple[tuple[int, ...], list[Floats]]:
    """Broadcast numbers against each other; return the shape and flat float64 arrays."""
    arrays = []
    for name, value in scenarios.items():
        array = number_array(value)
        if array is None:
            raise BatchError(f"{name} must hold numbers, {refused(value)}")
        arrays.append(array.astype(np.float64))
    shapes = {name: array.shape for name, array in zip(scenarios, arrays, strict=True)}
    shape = common_shape(shapes, BatchError)
    return shape, [np.array(np.broadcast_to(array, shape), order="C").reshape(-1) for array in arrays]


def new_tokens(scenarios: Mapping[str, Floats]) -> Floats:
    """Return the prompt tokens to compute: those not in the prefix cache, and always the last."""
    isl = scenarios["isl"]
    if "prefix_hit" not in scenarios:
        return isl
    found = scenarios["prefix_hit"]
    wrong = ~((found >= 0.0) & (found <= 1.0))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise BatchError(f"prefix_hit must be from 0 to 1, got {found[i]:g} at position {i}")
    # prompts of length 0 are rejected with the lengths
    return np.minimum(np.maximum(isl * (1.0 - found), 1.0), isl)


def check_budgets(budgets: Floats, tokens: int) -> None:
    """Reject budgets smaller than the tokens that one request verifies."""
    small = budgets < tokens
    if tokens > 1 and small.any():
        i = int(np.flatnonzero(small)[0])
        raise BatchError(
            f"max_num_batched_tokens must be at least {tokens}, which one request verifies per step, got "
            f"{budgets[i]:g} at position {i}"
        )


def field_values(rows: Mapping[str, Floats], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return answers by name as arrays of the scenarios' shape; floats for scalars."""
    return {name: row.reshape(shape) if shape else float(row[0]) for name, row in rows.items()}


def decode_errors(plan: StepPlan, decodes: Floats, kv_len: Floats, step_us: Floats) -> Floats:
    """Return the relative standard error of mean decode steps at the nearest sizes; nan without a step."""
    has_step = step_us > 0.0
    errors = np.full(step_us.shape, np.nan)
    sizes = (np.maximum(decodes[has_step], 1.0), kv_len[has_step])
    errors[has_step] = plan.decode_error(*(np.rint(size).astype(np.int64) for size in sizes))
    return errors


def at_least(name: str, value: float, least: float) -> float:
    """Return a checked number that all scenarios share."""
    if not is_number(value) or not least <= float(value):
        raise BatchError(f"{name} must be a number of at least {least:g}, got {shown(value)}")
    return float(value)


def engine_limits(
    engine: EngineProfile,
    *,
    max_num_batched_tokens: Any = None,
    chunked_prefill: bool | None = None,
    kv_reservation: str | None = None,
    max_num_seqs: float | None = None,
    order: str | None = None,
) -> EngineLimits:
    """Return the given values, with the engine's defaults for missing ones."""
    scheduling = engine.scheduling
    if chunked_prefill is None:
        chunked_prefill = scheduling.chunked_prefill
    if not isinstance(chunked_prefill, bool | np.bool_):
        raise BatchError(f"chunked_prefill must be True or False, got {shown(chunked_prefill)}")
    if kv_reservation is None:
        kv_reservation = engine.memory.kv_reservation
    one_of("kv_reservation", kv_reservation, KV_RESERVATIONS, BatchError)
    if order is None:
        order = scheduling.order
    one_of("order", order, STEP_ORDERS, BatchError)
    tokens, seqs, asked_seqs = scheduling.in_order(order).step_limits(max_num_batched_tokens, max_num_seqs)
    return EngineLimits(
        tokens,
        bool(chunked_prefill),
        KV_RESERVATIONS[kv_reservation],
        math.inf if type(seqs) is float and seqs == math.inf else at_least("max_num_seqs", seqs, 1),
        order == "prefill_first",
        asked_seqs,
    )


def checked_interval(
    value: int | None, plan: StepPlan, engine: EngineLimits, new: Floats, budgets: Floats
) -> int:
    """Return ``prefill_schedule_interval`` where the closed form holds; 1 lets prompts join any step."""
    scheduling, name = plan.profile.scheduling, "prefill_schedule_interval"
    if scheduling.prefill_decode_interval or scheduling.min_free_slots_delay > 1:
        raise BatchError(
            f"prefill_decode_interval and min_free_slots_delay of {plan.engine} are not estimated; simulate "
            "a trace instead"
        )
    chosen = scheduling.prefill_schedule_interval if value is None else value
    interval = whole_number(name, chosen, most=MOST, error=BatchError)
    shares_experts = bool(rank_rules(plan).in_lockstep)
    plan.profile.refuse_pauses({name: interval}, shares_experts, BatchError)
    why = ""
    if engine.is_prefill_first:
        why = 'needs order="mixed"'
    elif shares_experts:
        why = "is not estimated for ranks that share experts"
    elif (new > budgets).any():
        why = f"is not estimated for prompts of several steps ({new.max():g} tokens to compute)"
    if why and interval > 1:
        raise BatchError(f"{name} {interval} {why}; simulate a trace instead, or leave it at 1")
    return interval


def run_requests(value: float | str | None, arrivals: str = "closed") -> float:
    """Return the requests of each client of a run, as the loops read them: 0 without a start."""
    usual = REQUESTS_PER_CLIENT if arrivals == "closed" else STEADY
    requests = usual if value is None else value
    if requests != STEADY and not (is_number(requests) and 1.0 <= float(requests) < math.inf):
        raise BatchError(
            f"requests_per_client must be a number of at least 1, or {STEADY}, got {shown(requests)}"
        )
    return 0.0 if requests == STEADY else float(requests)


def steps_met(engine: EngineProfile, arrivals: str, async_scheduling: bool | None = None) -> float:
    """Return the whole steps that an arriving request waits for, as the loops read them.

    Behind a front end a request's arrival does not depend on the end of its client's last answer.
    """
    one_of("arrivals", arrivals, ARRIVALS, BatchError)
    if async_scheduling is None:
        async_scheduling = engine.scheduling.async_scheduling
    if not isinstance(async_scheduling, bool | np.bool_):
        raise BatchError(f"async_scheduling must be True or False, got {shown(async_scheduling)}")
    if arrivals == "closed" and engine.front_end.adds_nothing:
        return float(async_scheduling)
    return AT_RANDOM - float(async_scheduling)


def raise_scenario(
    plan: StepPlan,
    scenarios: Mapping[str, Floats],
    code: int,
    position: int,
    needed: float,
    max_kv_tokens: float,
    whose: str = "the plan",
    asked_seqs: float | None = None,
) -> NoReturn:
    """Raise the error of the scenario at which a loop stopped, with valid values."""
    one = {name: float(array[position]) for name, array in scenarios.items()}
    sizes = ", ".join(f"{name} {value:.12g}" for name, value in one.items())
    where = f"the scenario at position {position} ({sizes})"
    if code == CODE_SIZES:
        raise BatchError(f"{where} needs numbers from 1 to {MAX_KV_LEN}")
    if code == CODE_WHOLE_PROMPT:
        raise BatchError(
            f"{where} has prompts that are larger than a step: use "
            f"chunked_prefill=True, or max_num_batched_tokens={math.ceil(needed)} or more"
        )
    if code == CODE_KV:
        room = int(min(max_kv_tokens, MAX_KV_LEN))
        most = plan.profile.scheduling.max_num_seqs
        seqs = int(min(most, most if asked_seqs is None else asked_seqs))
        remedy = what_makes_room(plan, seqs, min(math.ceil(one["isl"] + one["osl"]), MAX_KV_LEN))
        raise PlanRangeError(
            f"{where} does not fit: one request needs {math.ceil(needed)} tokens of KV cache, {whose} has "
            f"room for {room} on {plan.tp} x {plan.gpu.name}: use {remedy}, or shorter requests"
        )
    what, option = (
        ("tokens", "max_num_batched_tokens") if code == CODE_TOKENS else ("sequences", "max_num_seqs")
    )
    limit = plan.max_num_batched_tokens if code == CODE_TOKENS else plan.max_num_seqs
    raise PlanRangeError(
        f"{where} has steps of {math.ceil(needed)} {what}, {whose} times up to {limit}: "
        f"compile_plan(..., {option}={math.ceil(needed)}) or more"
    )
