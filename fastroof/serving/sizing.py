"""Maximum batch or context within memory and TPOT: decode steps inverted, from time to size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import shown, whole_number
from fastroof.compiled import sizing as loops
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import most_admitted
from fastroof.errors import BatchError
from fastroof.given_arrays import common_shape, number_array
from fastroof.plan import StepPlan
from fastroof.plan.compile import check_plan
from fastroof.run.batch import int_array
from fastroof.run.evaluate import raise_sizes
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import EngineLimits
from fastroof.serving.speculation import SpeculatedPlan, SpeculativeDecoding
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.plan.memory import PlanMemory


def positive(name: str, value: Any) -> Floats:
    """Return checked numbers above 0, including inf, as a float64 array."""
    array = number_array(value)
    if array is None or not (array > 0).all():
        raise BatchError(f"{name} must hold numbers above 0, got {shown(value)}")
    return array.astype(np.float64)


def _together(name: str, sizes: Any, tpot_ms: Any) -> tuple[tuple[int, ...], Longs, Floats]:
    """Return sizes (int64) and limits (us) as flat arrays of one shape."""
    # a limit that overflows in us is no limit
    with np.errstate(over="ignore"):
        both: list[Any] = [int_array(name, sizes), positive("tpot_ms", tpot_ms) * US_PER_MS]
    shape = common_shape({name: both[0].shape, "tpot_ms": both[1].shape}, BatchError)
    integers, limits = (np.broadcast_to(one, shape) for one in both)
    flat = integers.astype(np.int64).reshape(-1)
    # copied: numba warns when it checks whether a broadcast view is writable
    return integers.shape, flat, np.array(limits).reshape(-1)


def _memory(plan: StepPlan, **limits: int | None) -> PlanMemory:
    """Return one GPU's memory with an engine's limits, where given."""
    given: dict[str, Any] = {
        name: whole_number(name, value, most=2**31 - 1, error=BatchError)
        for name, value in limits.items()
        if value is not None
    }
    return plan.memory_of(**given) if given else plan.memory


def largest_batch(
    plan: StepPlan,
    kv_len: Any,
    tpot_ms: Any = np.inf,
    *,
    max_seqs: int | None = None,
    max_tokens: int | None = None,
) -> Any:
    """Return the largest batch of decodes within memory and a time per output token.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    kv_len : int or array_like of int
        Tokens that each request attends to, including the new one. Broadcast, as is the next.
    tpot_ms : number or array_like
        Maximum step time, ms; inf for memory only.
    max_seqs : int, optional
        Maximum number of concurrent requests of the engine (default: the profile's, also if larger). For
        fewer, some engines reserve less memory, see ``plan.memory_of``.
    max_tokens : int, optional
        Maximum tokens of a step of prompts, for which the engine reserves memory (default: the plan's).

    Returns
    -------
    int or ndarray of int64
        The largest ``b`` up to ``max_seqs``, ``plan.max_seqs`` and ``plan.max_tokens`` whose KV cache fits,
        ``b <= plan.memory.max_sequences(kv_len)``, and whose step meets the limit,
        ``plan.decode_us(b, kv_len) <= tpot_ms * 1000``; 0 if there is no such ``b``. Smaller batches may
        be slower: measured kernel times are not monotonic.

    Raises
    ------
    BatchError
        If a length is not an integer of at least 1, or a limit is not a number above 0.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving.sizing import largest_batch
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> batch_size = largest_batch(plan, 4096, tpot_ms=10)
    >>> bool(plan.decode_us(batch_size, 4096) <= 10_000 < plan.decode_us(batch_size + 1, 4096))
    True
    """
    check_plan("plan", plan, BatchError)
    shape, lengths, limits_us = _together("kv_len", kv_len, tpot_ms)
    raise_sizes(plan, {"batch_size": np.ones_like(lengths), "kv_len": lengths}, 0)
    order = np.argsort(lengths, kind="stable")
    memory = _memory(plan, max_seqs=max_seqs, max_tokens=max_tokens)
    batches = np.arange(1, min(plan.max_tokens, plan.max_seqs, max_seqs or plan.max_seqs) + 1)
    largest = np.empty_like(lengths)
    loops.largest_batches(
        plan.arena,
        memory.kv_room,
        batches,
        lengths[order],
        limits_us[order],
        loops.new_scratch(len(batches)),
        largest,
    )
    answer = np.empty_like(lengths)
    answer[order] = largest
    return answer.reshape(shape) if shape else int(answer[0])


def largest_context(
    plan: StepPlan,
    batch_size: Any,
    tpot_ms: Any = np.inf,
    *,
    max_kv_len: int | None = None,
    max_seqs: int | None = None,
    max_tokens: int | None = None,
) -> Any:
    """Return the longest context of a batch within memory and a time per output token.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    batch_size : int or array_like of int
        Requests that decode together. Broadcast, as is the next.
    tpot_ms : number or array_like
        Maximum step time, ms; inf for memory only.
    max_kv_len : int, optional
        Longest sequence to try (default: ``plan.model.max_position``).
    max_seqs : int, optional
        Maximum number of concurrent requests of the engine (default: the profile's, also if larger). For
        fewer, some engines reserve less memory, see ``plan.memory_of``.
    max_tokens : int, optional
        Maximum tokens of a step of prompts, for which the engine reserves memory (default: the plan's).

    Returns
    -------
    int or ndarray of int64
        The largest ``kv_len`` whose KV cache fits, ``batch_size <= plan.memory.max_sequences(kv_len)``, and
        whose step meets the limit, ``plan.decode_us(batch_size, kv_len) <= tpot_ms * 1000``; 0 if
        there is none. Shorter contexts may be slower: measured kernel times are not monotonic.

    Raises
    ------
    PlanRangeError
        If a batch size exceeds the plan's.
    BatchError
        If a size is not an integer of at least 1, or a limit is not a number above 0.

    Examples
    --------
    >>> import fastroof
    >>> from fastroof.serving.sizing import largest_context
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> kv_len = largest_context(plan, 16, tpot_ms=10)
    >>> bool(plan.decode_us(16, kv_len) <= 10_000 < plan.decode_us(16, kv_len + 1))
    True
    """
    check_plan("plan", plan, BatchError)
    longest = plan.model.max_position if max_kv_len is None else max_kv_len
    longest = whole_number("max_kv_len", longest, most=MAX_KV_LEN, error=BatchError)
    shape, batches, limits_us = _together("batch_size", batch_size, tpot_ms)
    raise_sizes(plan, {"batch_size": batches, "kv_len": np.ones_like(batches)}, 0)
    answer = np.empty_like(batches)
    memory = _memory(plan, max_seqs=max_seqs, max_tokens=max_tokens)
    loops.largest_contexts(plan.arena, memory.kv_room, longest, batches, limits_us, answer)
    return answer.reshape(shape) if shape else int(answer[0])


RATE_LIMITS: Final = ("throughput", "ttft", "tpot", "request_latency", "kv_cache", "max_seqs", "budget")
"""Limits of a replica's request rate, in the order of the codes of LeastGpus.

``throughput``: more clients only wait longer; ``kv_cache``, ``max_seqs`` and ``budget`` (tokens per step):
more clients do not fit; the others are the given time limits.
"""

FINE: Final = 64
"""Number of clients up to which candidates are 1/64 of the power of two below apart; beyond it, 1."""


def client_loads(most: float) -> Floats:
    """Return the candidate numbers of clients, integers or fractions, from 1 to ``most``, rising."""
    octaves = 2.0 ** np.arange(np.log2(FINE))
    fine = (octaves[:, None] * (1.0 + np.arange(FINE) / FINE)).reshape(-1)
    clients = np.concatenate([fine, np.arange(float(FINE), most), [most]])
    return np.unique(np.minimum(clients, most))


class RateCurve(NamedTuple):
    """The rates of one replica, and the index in RATE_LIMITS of the limit for more clients."""

    replica: loops.ReplicaCurve
    room: int


class ReplicaOptions(NamedTuple):
    """The options with which every replica is estimated."""

    engine: EngineLimits
    kv_reservation: str | None
    speculation: SpeculativeDecoding | None
    prefix_hit: float


def rate_curve(target: SpeculatedPlan, isl: float, osl: float, options: ReplicaOptions) -> RateCurve:
    """Estimate a replica for every candidate number of concurrent clients."""
    plan, engine = target.plan, options.engine
    memory = target.memory(max_tokens=engine.memory_tokens, max_seqs=engine.asked_seqs)
    layout = plan.layout
    room = float(memory.max_kv_tokens) / layout.pp
    budget = float(engine.max_batched_tokens)
    new = max(isl * (1.0 - options.prefix_hit), 1.0)
    begun = most_admitted(new, budget, engine.is_chunked, float(target.tokens), engine.is_prefill_first)
    held = memory.held_tokens
    for limit, is_over in (("kv_cache", held(isl + osl) > room), ("budget", begun < 1.0)):
        if is_over:
            return RateCurve(loops.ReplicaCurve(*np.empty((5, 0))), RATE_LIMITS.index(limit))
    fit = {
        "kv_cache": room / held(isl + engine.osl_reserved * osl),
        # before max_seqs, whose default it may have lowered to itself
        "budget": begun,
        "max_seqs": memory.most_running(engine.max_seqs),
    }
    tightest = min(fit, key=lambda name: fit[name])
    clients = client_loads(fit[tightest])
    estimates = estimate(
        plan, isl, osl, clients * layout.batches_in_flight, budget, engine.is_chunked,
        kv_reservation=options.kv_reservation, max_seqs=engine.max_seqs, speculation=options.speculation,
        prefix_hit=options.prefix_hit, arrivals="random",
    )  # fmt: skip
    times = (estimates.ttft_ms, estimates.tpot_ms, estimates.request_latency_ms)
    rate = estimates.tokens_per_s_per_gpu * (layout.world_size / osl)
    clients = clients * layout.batches_in_flight
    return RateCurve(loops.ReplicaCurve(clients, rate, *times), RATE_LIMITS.index(tightest))
