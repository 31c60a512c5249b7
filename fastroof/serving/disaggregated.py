"""Serving with separate workers: some only prefill and send the KV cache to others that only decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrow import RELATIVE_ERROR, ArrowResult, answer
from fastroof.compiled import disaggregated as loops
from fastroof.compiled.serving_options import CODE_KV, CODE_SEQS, CODE_SIZES, FrontEndTimes
from fastroof.errors import BatchError, PlanError
from fastroof.plan.compile import check_plan
from fastroof.plan.speculation import (
    SpeculatedPlan,
    SpeculativeDecoding,
    check_errors,
    made_from,
    speculated,
)
from fastroof.plan.start import check_hand_over
from fastroof.serving.scenarios import (
    EngineLimits,
    at_least,
    broadcast,
    decode_errors,
    engine_limits,
    field_values,
    raise_scenario,
)
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


class Workers(NamedTuple):
    """Plans of both kinds of workers, and both as the loops read them."""

    prefill: StepPlan
    decode: StepPlan
    prefill_loops: SpeculatedPlan
    decode_loops: SpeculatedPlan

    @classmethod
    def of(cls, prefill: StepPlan, decode: StepPlan, speculation: SpeculativeDecoding | None) -> Workers:
        """Check that the two plans match, and lay them out."""
        check_hand_over(prefill, decode, PlanError)
        return cls(prefill, decode, speculated(prefill, speculation), speculated(decode, speculation))

    def transfer_us_per_token(self, link_bytes_per_s: float | None) -> float:
        """Return the time to send one token's KV cache to a decode worker, us."""
        prefill, decode = self.prefill, self.decode
        if link_bytes_per_s is None:
            link_bytes_per_s = min(plan.gpu.nvlink_bytes_per_s for plan in (prefill, decode))
        rate = at_least("link_bytes_per_s", link_bytes_per_s, 1) * min(
            plan.tp * plan.layout.pp for plan in (prefill, decode)
        )
        return self.decode_loops.whole_kv_bytes().token_bytes / rate * US_PER_S

    def options(
        self, link_bytes_per_s: float | None, prefill_engine: EngineLimits, decode_engine: EngineLimits
    ) -> loops.LinkOptions:
        """Return the options that all scenarios share."""
        seqs = decode_engine.asked_seqs
        prefill = self.prefill_loops.memory(
            max_num_batched_tokens=prefill_engine.memory_tokens, max_num_seqs=seqs
        )
        decode = self.decode_loops.memory(
            max_num_batched_tokens=decode_engine.memory_tokens, max_num_seqs=seqs
        )
        sent = self.decode_loops.whole_kv_bytes()
        return loops.LinkOptions(
            prefill_kv_tokens=prefill.max_kv_tokens / self.prefill.layout.pp,
            decode_kv_tokens=decode.max_kv_tokens / self.decode.layout.pp,
            max_num_seqs=float(decode.most_running(decode_engine.max_num_seqs)),
            osl_reserved=decode_engine.osl_reserved,
            is_chunked=prefill_engine.is_chunked,
            transfer_us_per_token=self.transfer_us_per_token(link_bytes_per_s),
            prefill_window=float(prefill.window_tokens),
            decode_window=float(decode.window_tokens),
            transfer_window=float(sent.window_tokens),
            prefill_window_share=prefill.window_share,
            decode_window_share=decode.window_share,
            transfer_window_share=sent.window_share,
            prefill_state_tokens=prefill.state_tokens + prefill.open_tokens,
            decode_state_tokens=decode.state_tokens + decode.open_tokens,
            transfer_state_tokens=sent.state_tokens,
            front_end=FrontEndTimes(*self.prefill.profile.front_end.times_us),
        )


MOST_WORKERS: Final = 2**20


@dataclass(frozen=True, eq=False)
class DisaggregatedEstimate(ArrowResult):
    """Estimates of disaggregated closed loops: floats, or arrays of the scenarios' shape.

    Attributes
    ----------
    ttft_ms : float or ndarray of float64
        Mean time to first token, ms: waiting, prefill and transfer, since the decode worker streams it.
    tpot_ms, itl_ms : float or ndarray of float64
        Mean time per output token after the first, ms: a decode-only step.
    request_latency_ms : float or ndarray of float64
        ``ttft_ms + tpot_ms * (osl - 1)``.
    tokens_per_s_per_gpu : float or ndarray of float64
        Output tokens/s of all clients, divided by the GPUs of all workers.
    wait_ms, prefill_ms, transfer_ms : float or ndarray of float64
        The terms of ``ttft_ms``.
    prefill_batch : float or ndarray of float64
        Number of prompts that are prefilled together.
    prefill_load, link_load, kv_load : float or ndarray of float64
        Share of the capacity of the prefill workers, their links and the decode workers' KV cache; the
        one at 1 limits the throughput.
    decodes : float or ndarray of float64
        Number of requests that decode together on one worker.
    decode_step_us : float or ndarray of float64
        Time of their step, us.
    kv_len : float or ndarray of float64
        Mean tokens that a decode attends to.
    relative_error : float or ndarray of float64, or None
        One standard error over ``decode_step_us``; None if not requested.
    made_from : mapping of str to str
        fastroof's version, the tables' hash and the decode plan's settings: metadata of its Arrow table.
    """

    ttft_ms: Any = answer("ms", "mean time to first token: waiting, prefill and transfer")
    tpot_ms: Any = answer("ms", "mean time per output token after the first")
    itl_ms: Any = answer("ms", "mean time between two tokens; equals tpot_ms")
    request_latency_ms: Any = answer("ms", "ttft_ms + tpot_ms * (osl - 1)")
    tokens_per_s_per_gpu: Any = answer("tokens/s", "output tokens of all clients, over all GPUs")
    wait_ms: Any = answer("ms", "share of ttft_ms that a request waits", 0)
    prefill_ms: Any = answer("ms", "share of ttft_ms that its prefill takes")
    transfer_ms: Any = answer("ms", "share of ttft_ms that its KV cache is sent")
    prefill_batch: Any = answer("", "prompts that are prefilled together")
    prefill_load: Any = answer("", "share of the prefill workers' capacity")
    link_load: Any = answer("", "share of their links' capacity")
    kv_load: Any = answer("", "share of the decode workers' KV-cache capacity")
    decodes: Any = answer("", "requests that decode together on one worker")
    decode_step_us: Any = answer("us", "time of their step")
    kv_len: Any = answer("tokens", "mean tokens that a decode attends to")
    relative_error: Any = answer(RELATIVE_ERROR.unit, RELATIVE_ERROR.meaning, 0, default=None)
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)


def estimate_disaggregated(
    prefill_plan: StepPlan,
    decode_plan: StepPlan,
    isl: Any,
    osl: Any,
    clients: Any,
    prefill_workers: Any = 1,
    decode_workers: Any = 1,
    max_num_batched_tokens: Any = None,
    *,
    link_bytes_per_s: float | None = None,
    chunked_prefill: bool | None = None,
    kv_reservation: str | None = None,
    max_num_seqs: float | None = None,
    speculation: SpeculativeDecoding | None = None,
    with_error: bool = False,
) -> DisaggregatedEstimate:
    """Estimate what clients see when prefill and decode run on separate GPUs.

    Parameters
    ----------
    prefill_plan, decode_plan : StepPlan
        One worker of each kind: the same model and kv_dtype; each may use a different number of GPUs.
    isl, osl : number or array_like
        Mean tokens of a prompt, and of an output (at least 2). Broadcast, as are the next four.
    clients : number or array_like
        Total clients, each of which sends its next request as soon as it has an answer.
    prefill_workers, decode_workers : number or array_like
        Workers of each kind; requests spread evenly over them.
    max_num_batched_tokens : number or array_like, optional
        Maximum tokens per prefill step: whole prompts, or a chunk of a longer one (default: the prefill
        plan's engine). Decode workers are started with it too, and reserve memory for it.
    link_bytes_per_s : float, optional
        Bandwidth from one GPU to a GPU of another worker, B/s (default: NVLink). 50e9 is a 400 Gb/s NIC.
    chunked_prefill : bool, optional
        Whether a prefill worker splits prompts that are longer than a step (default: its plan's engine).
    kv_reservation, max_num_seqs : str and number, optional
        As in :func:`estimate`, for a decode worker (default: its plan's engine).
    speculation : SpeculativeDecoding, optional
        As in :func:`estimate`: decode workers verify, workers of both kinds run the draft, and the draft's KV
        cache is sent too.
    with_error : bool
        As in :func:`estimate`.

    Returns
    -------
    DisaggregatedEstimate
        Arrays of the broadcast shape; floats if every argument is a scalar.

    Raises
    ------
    PlanError
        If the plans are of different models or KV cache dtypes.
    BatchError
        If a value is not a number of at least 1, osl is less than 2, or a prompt cannot be split and is
        larger than a step.
    PlanRangeError
        If the KV cache does not hold one request, or a step is larger than its plan allows.

    Notes
    -----
    The request rate X is the one at which the clients at all three places sum to ``clients``::

        clients = X (W + P(b) + transfer) + decode_workers n,    X = decode_workers n / ((osl - 1) D(n))
        transfer    = isl x KV bytes of a token / (link_bytes_per_s x min(tp x pp of prefill, of decode))

    D(n) is the mean step of n decodes over their growing context (with speculation: of verifications and
    drafts, and the steps of an output replace osl - 1, as in :func:`estimate`), P(b) the time to prefill
    b prompts together, at most m. A prefill worker is FIFO: a prompt that finds it busy, with probability u,
    waits half a batch, and shares the next with later arrivals; near a load rho of 1, some wait longer::

        b = 1 + u a P(b), u = a P(b)/b            a: prompts that arrive per unit of time, rho = a P(m)/m
        W = u P(b)/2 + max(1/(m (1 - rho^2)) - 1, 0) (1 + rho) P(m)/2

    which is the M/D/1 queue for m = 1, and within 20 % of a simulation up to a load of 0.95. X is limited by
    the capacity of prefill and links, n by the KV cache; further clients wait (Little's law). Each
    prefill worker sends one prompt at a time, after it is done: layer-wise transfers that overlap with
    prefill would be faster. Decode steps are undisturbed by arriving KV cache.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving import estimate_disaggregated
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> one, two = estimate_disaggregated(plan, plan, 4096, 256, 128, prefill_workers=[1, 2]).ttft_ms
    >>> bool(two < one)
    True
    """
    check_plan("prefill_plan", prefill_plan, BatchError)
    check_plan("decode_plan", decode_plan, BatchError)
    prefill_engine = engine_limits(
        prefill_plan.profile, max_num_batched_tokens=max_num_batched_tokens, chunked_prefill=chunked_prefill
    )
    decode_engine = engine_limits(
        decode_plan.profile,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_reservation=kv_reservation,
        max_num_seqs=max_num_seqs,
    )
    workers = Workers.of(prefill_plan, decode_plan, speculation)
    check_errors(with_error, workers.decode_loops.tokens)
    options = workers.options(link_bytes_per_s, prefill_engine, decode_engine)
    inputs = {
        "isl": isl,
        "osl": osl,
        "clients": clients,
        "prefill_workers": prefill_workers,
        "decode_workers": decode_workers,
        "max_num_batched_tokens": prefill_engine.max_num_batched_tokens,
    }
    shape, arrays = broadcast(inputs)
    scenarios = np.array(arrays)
    if len(arrays[0]) and scenarios[3:5].max() > MOST_WORKERS:
        raise BatchError(
            f"prefill_workers and decode_workers must be numbers up to {MOST_WORKERS:,}, "
            f"got {scenarios[3:5].max():g}"
        )
    gpus = scenarios[3] * prefill_plan.layout.world_size + scenarios[4] * decode_plan.layout.world_size
    # each batch in flight is served like a separate worker
    scenarios[3] *= prefill_plan.batches_in_flight
    scenarios[4] *= decode_plan.batches_in_flight
    out = np.empty((loops.DISAGGREGATED_ROWS, len(arrays[0])))
    code, position, needed = loops.disaggregated_estimates(
        workers.prefill_loops.arena, workers.decode_loops.arena, scenarios, options, out
    )
    if code:
        _refuse(workers, options, dict(zip(inputs, arrays, strict=True)), code, position, needed)
    tpot_ms = out[loops.TPOT_US] / US_PER_MS
    rows = {
        "ttft_ms": out[loops.TTFT_US] / US_PER_MS,
        "tpot_ms": tpot_ms,
        "itl_ms": tpot_ms.copy(),
        "request_latency_ms": out[loops.REQUEST_US] / US_PER_MS,
        "tokens_per_s_per_gpu": out[loops.TOKENS_PER_US] * US_PER_S / gpus,
        "wait_ms": out[loops.WAIT_US] / US_PER_MS,
        "prefill_ms": out[loops.PREFILL_US] / US_PER_MS,
        "transfer_ms": out[loops.TRANSFER_US] / US_PER_MS,
        "prefill_batch": out[loops.PREFILL_BATCH],
        "prefill_load": out[loops.PREFILL_LOAD],
        "link_load": out[loops.LINK_LOAD],
        "kv_load": out[loops.KV_LOAD],
        "decodes": out[loops.DECODES],
        "decode_step_us": out[loops.DECODE_STEP_US],
        "kv_len": out[loops.KV_LEN],
    }
    if with_error:
        sizes = (rows[name] for name in ("decodes", "kv_len", "decode_step_us"))
        rows["relative_error"] = decode_errors(decode_plan, *sizes)
    return DisaggregatedEstimate(**field_values(rows, shape), made_from=made_from(decode_plan, speculation))


def _refuse(
    workers: Workers,
    options: loops.LinkOptions,
    scenarios: dict[str, Any],
    code: int,
    position: int,
    needed: float,
) -> None:
    """Raise the error of the plan that cannot time a scenario."""
    osl = float(scenarios["osl"][position])
    if code == CODE_SIZES and 1.0 <= osl < 2.0:
        raise BatchError(
            f"osl must be at least 2, got {osl:g} at position {position}: "
            "one token leaves nothing to hand over to a decode worker"
        )
    if code in (CODE_KV, loops.CODE_DECODE_SEQS):
        shared_code = CODE_SEQS if code == loops.CODE_DECODE_SEQS else code
        room = options.decode_kv_tokens
        raise_scenario(workers.decode, scenarios, shared_code, position, needed, room, "the decode plan")
    shared_code = CODE_KV if code == loops.CODE_PREFILL_KV else code
    room = options.prefill_kv_tokens
    raise_scenario(workers.prefill, scenarios, shared_code, position, needed, room, "the prefill plan")
