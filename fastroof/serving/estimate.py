"""What clients of a serving engine see in steady state, with prompts next to or ahead of decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import shown
from fastroof.compiled import serving
from fastroof.compiled import serving_options as loops
from fastroof.compiled.serving_options import FrontEndTimes, ServingOptions
from fastroof.errors import BatchError, PlanRangeError
from fastroof.plan.calls import rank_rules
from fastroof.plan.compile import check_plan
from fastroof.plan.energy import energy_error
from fastroof.plan.speculation import SpeculativeDecoding, check_errors, made_from, speculated
from fastroof.plan.start import check_room
from fastroof.plan.step_error import stated_error
from fastroof.serving.energy import MeanLoad, check_energy, joules_per_token
from fastroof.serving.scenarios import (
    STEADY,
    at_least,
    broadcast,
    check_budgets,
    checked_interval,
    decode_errors,
    engine_limits,
    field_values,
    new_tokens,
    raise_scenario,
    run_requests,
    steps_met,
)
from fastroof.serving.serving_estimate import ServingEstimate
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

LENGTH_SPREAD: Final = 0.2
"""Spread of output lengths that estimates assume: that of public benchmarks that draw lengths."""


def estimate(
    plan: StepPlan,
    isl: Any,
    osl: Any,
    clients: Any,
    max_num_batched_tokens: Any = None,
    chunked_prefill: bool | None = None,
    *,
    kv_reservation: str | None = None,
    max_kv_tokens: float | None = None,
    max_num_seqs: float | None = None,
    order: str | None = None,
    length_spread: float = LENGTH_SPREAD,
    wait_steps: float = 0.0,
    prefill_schedule_interval: int | None = None,
    arrivals: str = "closed",
    async_scheduling: bool | None = None,
    requests_per_client: float | str | None = None,
    speculation: SpeculativeDecoding | None = None,
    prefix_hit: Any = None,
    with_error: bool = False,
    with_energy: bool = False,
) -> ServingEstimate:
    """Estimate what clients of a continuously batching engine see.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs; its engine defines the costs added to a step, and the scheduling.
    isl, osl : number or array_like
        Mean tokens of a prompt, and of an output including its first token. Broadcast, as are the next two.
    clients : number or array_like
        Clients, each of which sends its next request as soon as it has an answer. They spread evenly over
        the ranks and pipeline stages of a plan that has several; with fewer clients some are idle.
    max_num_batched_tokens : number or array_like, optional
        Maximum tokens per step. This, the next two and ``max_num_seqs`` default to the engine's values.
    chunked_prefill : bool, optional
        Whether prompts are split if a step has no room for the whole.
    kv_reservation : str, optional
        ``mean``: a request takes KV cache as it grows, for half its output on average (vLLM); ``full``: it
        reserves its whole output before it starts (TensorRT-LLM).
    max_kv_tokens : number, optional
        KV-cache capacity, tokens (default: ``plan.memory.max_kv_tokens``). Windowed layers store at most
        their window of a longer request, which then counts as fewer tokens; a state counts as the tokens
        whose memory it takes.
    max_num_seqs : number, optional
        Maximum number of concurrent requests; inf for as many as fit.
    order : str, optional
        ``mixed``: prompts share steps with decodes; ``prefill_first``: prompts run in separate steps,
        and decodes only if no prompt waits (SGLang). Default: the engine's own.
    length_spread : number
        How far the shortest output is below the longest, relative to it, with uniformly drawn lengths;
        0 if all have one length. If prompts run first it determines how many requests end together.
    wait_steps : number
        Steps that prompts wait for others: TensorRT-LLM's ``batch_wait_timeout_iters``, from the
        first that waits; if prompts run first, the decode steps between two checks for new requests
        (SGLang's ``scheduler_recv_interval``).
    prefill_schedule_interval : int, optional
        Prompts are computed once every so many steps while requests decode (vLLM; default: in any step).
        Prompts must fit into a step, and ranks that share experts are simulated only.
    arrivals : str
        ``closed``: a client sends its next request when its last answer ends; without a front end it arrives
        at the end of a step, behind one at any moment. ``random``: at any moment, as at a given rate.
    async_scheduling : bool, optional
        Whether a step is scheduled while the previous one runs, so that requests that arrive at a step's end
        wait for one more step. Default: the engine's own.
    requests_per_client : number or "steady", optional
        Length of a run that starts all clients together: 1 is a burst. Means count the start as one of so
        many requests; ``"steady"`` leaves it out. Default: 10, or steady with ``arrivals="random"``.
    speculation : SpeculativeDecoding, optional
        Draft tokens that requests verify in a step, and how many of them are accepted.
    prefix_hit : number or array_like, optional
        Share of a prompt found in the prefix cache. Broadcast.
    with_error : bool
        Also return the error of the mean decode step, see :meth:`fastroof.StepPlan.decode_error`, and those
        of TPOT and TTFT. Not with speculation, for which there are no measurements.
    with_energy : bool
        Also return the joules per output token, see :mod:`fastroof.serving.energy`. Not with speculation.

    Returns
    -------
    ServingEstimate
        Arrays of the broadcast shape; floats if every argument is a scalar.

    Raises
    ------
    BatchError
        If a value is not a number of at least 1, or a prompt cannot be split and is larger than a step.
    PlanRangeError
        If the KV cache does not hold one request, or a step is larger than the plan allows.

    Notes
    -----
    The closed form is derived in serving/README.md, with its limits. Not modelled: preemption with
    kv_reservation ``mean`` (TPOT up to 30 % too low where long outputs overflow the KV cache), and waves of
    requests of equal lengths that stay together under a mixed schedule.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving import estimate
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> one, many = estimate(plan, isl=1024, osl=128, clients=[1, 64]).tpot_ms
    >>> bool(one < many)
    True
    """
    check_plan("plan", plan, BatchError)
    engine = engine_limits(
        plan.profile,
        max_num_batched_tokens=max_num_batched_tokens,
        chunked_prefill=chunked_prefill,
        kv_reservation=kv_reservation,
        max_num_seqs=max_num_seqs,
        order=order,
    )
    spread = at_least("length_spread", length_spread, 0)
    if spread >= 1.0:
        raise BatchError(f"length_spread must be below 1, got {shown(length_spread)}")
    inputs = {
        "isl": isl,
        "osl": osl,
        "clients": clients,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        **({} if prefix_hit is None else {"prefix_hit": prefix_hit}),
    }
    shape, arrays = broadcast(inputs)
    scenarios = dict(zip(inputs, arrays, strict=True))
    new = new_tokens(scenarios)
    target = speculated(plan, speculation)
    check_errors(with_error, target.tokens)
    check_energy(with_energy, plan, target.tokens)
    check_budgets(scenarios["max_num_batched_tokens"], target.tokens)
    interval = checked_interval(
        prefill_schedule_interval, plan, engine, new, budgets=scenarios["max_num_batched_tokens"]
    )
    memory = target.memory(max_num_batched_tokens=engine.memory_tokens, max_num_seqs=engine.asked_seqs)
    if max_kv_tokens is None:
        check_room(target.plan, memory, engine.asked_seqs, PlanRangeError)
    # each batch in flight is served like a separate replica, in its share of the room
    flight = plan.batches_in_flight
    room = float(memory.max_kv_tokens)
    if max_kv_tokens is not None:
        room = at_least("max_kv_tokens", max_kv_tokens, 1)
    room /= plan.layout.pp
    options = ServingOptions(
        max_kv_tokens=room,
        # an int would compile the loops once more
        max_num_seqs=float(memory.most_running(engine.max_num_seqs)),
        osl_reserved=engine.osl_reserved,
        is_chunked=engine.is_chunked,
        requests_per_client=run_requests(requests_per_client, arrivals),
        front_end=FrontEndTimes(*plan.profile.front_end.times_us),
        window=float(memory.window_tokens),
        window_share=memory.window_share,
        # a given number of tokens is one of tokens, not of blocks
        state_tokens=memory.state_tokens + (memory.open_tokens if max_kv_tokens is None else 0.0),
        is_prefill_first=engine.is_prefill_first,
        length_spread=spread,
        wait_steps=at_least("wait_steps", wait_steps, 0),
        steps_met=steps_met(plan.profile, arrivals, async_scheduling),
        rules=rank_rules(plan),
        batches=float(flight),
        pause_steps=interval - 1.0,
        is_closed=arrivals == "closed",
    )
    out = np.empty((loops.ESTIMATE_ROWS, len(arrays[0])))
    lengths, outputs, clients, budgets = arrays[:4]
    busy: Any = 1.0
    if flight > 1:
        # with less than one client each, some are idle
        clients = clients / flight
        busy = np.minimum(clients, 1.0)
    code, position, needed = serving.serving_estimates(
        target.arena, lengths, new, outputs, clients, budgets, options, out
    )
    if code:
        raise_scenario(plan, scenarios, code, position, needed, room, asked_seqs=engine.asked_seqs)
    rows = _rows(plan, out, flight, busy)
    if with_error:
        rows |= _errors(plan, out, options.requests_per_client == 1.0)
    if with_energy:
        load = MeanLoad(
            rows["decodes"], rows["prefill_tokens"], rows["kv_len"], lengths, new, outputs, budgets, clients,
            out[loops.REQUEST_US], rows["tokens_per_s_per_gpu"],
        )  # fmt: skip
        rows["joules_per_token"] = joules_per_token(plan, load, engine.is_prefill_first, spread == 0.0)
    values = field_values(rows, shape)
    if with_energy:
        values["joules_relative_error"] = energy_error(values.get("tpot_relative_error"), shape)
    rounds = options.requests_per_client
    run = {"requests_per_client": f"{rounds:g}" if rounds else STEADY, "length_spread": f"{spread:g}"}
    facts = {f"fastroof.{name}": value for name, value in run.items()}
    return ServingEstimate(**values, made_from=made_from(plan, speculation) | facts)


def _rows(plan: StepPlan, out: Floats, flight: float, busy: Any) -> dict[str, Floats]:
    """Return the columns of an estimate from the rows of the loop's answer."""
    tpot_ms = out[loops.TPOT_US] / US_PER_MS
    per_gpu = US_PER_S * flight / plan.layout.world_size
    return {
        "ttft_ms": out[loops.TTFT_US] / US_PER_MS,
        "tpot_ms": tpot_ms,
        "itl_ms": tpot_ms.copy(),
        "request_latency_ms": out[loops.REQUEST_US] / US_PER_MS,
        "tokens_per_s_per_gpu": out[loops.TOKENS_PER_US] * per_gpu * busy,
        "wait_ms": out[loops.WAIT_US] / US_PER_MS,
        "effective_concurrency": out[loops.EFFECTIVE_CONCURRENCY] * flight * busy,
        "decode_step_us": out[loops.DECODE_STEP_US],
        "mixed_step_us": out[loops.MIXED_STEP_US],
        "mixed_share": out[loops.MIXED_SHARE],
        "decodes": out[loops.DECODES],
        "prefill_tokens": out[loops.PREFILL_TOKENS],
        "prompts": out[loops.PROMPTS],
        "kv_len": out[loops.KV_LEN],
    }


def _errors(plan: StepPlan, out: Floats, is_burst: bool) -> dict[str, Floats]:
    """Return the errors of decode steps and, if the profile states them, of TPOT and TTFT."""
    decode = decode_errors(plan, out[loops.DECODES], out[loops.KV_LEN], out[loops.DECODE_STEP_US])
    known = plan.profile.errors
    if not (known.tpot or known.ttft):
        return {"relative_error": decode}
    # a step of several stages is a part of the time between tokens
    tpot = stated_error(plan, np.maximum(out[loops.DECODE_STEP_US], out[loops.TPOT_US]))
    tpot = np.fmax(tpot, decode) if plan.is_beyond_evidence else tpot
    waits = out[loops.WAIT_US] > 0.0
    of_run = (known.burst_tpot, known.burst_ttft or known.ttft) if is_burst else (0.0, known.ttft)
    tpot = np.fmax(tpot, np.where(waits, known.waiting_tpot, of_run[0]))
    ttft = np.where(waits, known.waiting_ttft, of_run[1])
    ttft[ttft == 0.0] = np.nan
    return {"relative_error": decode, "tpot_relative_error": tpot, "ttft_relative_error": ttft}
