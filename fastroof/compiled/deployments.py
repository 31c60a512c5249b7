"""The loop behind deployment sweeps: from candidate numbers to their answers, or to the best of them.

A candidate is an index into the product of a plan's axes. Each is estimated independently as a closed loop
of clients (fastroof.compiled.closed_loops); a list of candidates is never made.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats, Longs
from fastroof.compiled import closed_loops as L
from fastroof.compiled.closed_loops import (
    DeploymentOptions,
    Scratch,
    Sizes,
    closed_loop,
    mean_held,
    solve_rate,
)
from fastroof.compiled.jit import jit
from fastroof.compiled.serving_options import held_tokens

BINS_A_DOUBLING = 4
FIRST_DOUBLING = -20
BINS = 240
"""Bins of a histogram: four per doubling, from 2**-20 to 2**40; values outside go to the outermost."""


class BestTable(NamedTuple):
    """The best of each group, best first: a row per group, of which ``taken`` places are filled."""

    value: Floats
    at: Longs
    taken: Longs


class Fronts(NamedTuple):
    """The Pareto front of each group, x falling, y rising: a row per group, ``taken`` places filled."""

    x: Floats
    y: Floats
    at: Longs
    taken: Longs


@jit
def keep_best(table: BestTable, group: int, value: float, at: int) -> None:
    """Keep a value if it is among the highest of its group; NaN never is."""
    most = table.value.shape[1]
    count = table.taken[group]
    if not value >= -math.inf or (count == most and not value > table.value[group, most - 1]):
        return
    if count < most:
        table.taken[group] = count + 1
        place = count
    else:
        place = most - 1
    while place > 0 and value > table.value[group, place - 1]:
        table.value[group, place] = table.value[group, place - 1]
        table.at[group, place] = table.at[group, place - 1]
        place -= 1
    table.value[group, place] = value
    table.at[group, place] = at


@jit
def keep_pareto(fronts: Fronts, group: int, x: float, y: float, at: int) -> bool:
    """Insert a point unless another of its group dominates it, and drop points that it dominates."""
    count = fronts.taken[group]
    # the first with less x: all before have at least as much, and the last of those has the most y
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if fronts.x[group, middle] >= x:
            low = middle + 1
        else:
            high = middle
    if low > 0 and fronts.y[group, low - 1] >= y:
        return True
    # a point with the same x has less y
    start = low - 1 if low > 0 and fronts.x[group, low - 1] == x else low
    stop = low
    while stop < count and fronts.y[group, stop] <= y:
        stop += 1
    if start == stop:
        if count == fronts.x.shape[1]:
            return False
        for i in range(count, start, -1):
            fronts.x[group, i] = fronts.x[group, i - 1]
            fronts.y[group, i] = fronts.y[group, i - 1]
            fronts.at[group, i] = fronts.at[group, i - 1]
        fronts.taken[group] = count + 1
    else:
        gone = stop - start - 1
        for i in range(stop, count):
            fronts.x[group, i - gone] = fronts.x[group, i]
            fronts.y[group, i - gone] = fronts.y[group, i]
            fronts.at[group, i - gone] = fronts.at[group, i]
        fronts.taken[group] = count - gone
    fronts.x[group, start] = x
    fronts.y[group, start] = y
    fronts.at[group, start] = at
    return True


@jit
def count_value(counts: Longs, group: int, value: float) -> None:
    """Count a value above 0 in its group's histogram; others are not counted."""
    if value > 0.0:
        place = math.floor((math.log2(value) - FIRST_DOUBLING) * BINS_A_DOUBLING)
        counts[group, int(min(max(place, 0), BINS - 1))] += 1


@jit
def reduce_best(groups: Longs, values: Floats, table: BestTable) -> None:
    """Keep the highest values of each group."""
    for i in range(len(groups)):
        keep_best(table, groups[i], values[i], i)


@jit
def reduce_pareto(groups: Longs, x: Floats, y: Floats, start: int, fronts: Fronts) -> int:
    """Keep each group's front, from ``start`` on. Returns where a row was full, or the number of points."""
    for i in range(start, len(groups)):
        if not keep_pareto(fronts, groups[i], x[i], y[i], i):
            return i
    return len(groups)


# objectives; more is better
PER_GPU_HIGH, PER_USER_HIGH, COST_LOW, GOODPUT = range(4)


class Axes(NamedTuple):
    """Axes of a plan's candidates, the first varies slowest; layouts have several columns.

    ``max_num_seqs`` is not an axis: each candidate runs with one of them. ``max_kv_tokens`` has a row per
    budget and a column per limit on requests.
    """

    replicas: Floats
    prefill_workers: Floats
    decode_workers: Floats
    isl: Floats
    osl: Floats
    load: Floats
    budget: Floats
    prefix_hit: Floats
    max_num_seqs: Floats
    max_kv_tokens: Floats


class Reduction(NamedTuple):
    """Results by group: a candidate's group is the sum of its layout's and its digits' strides."""

    is_pareto: bool
    layout_group: Longs
    strides: Longs
    best: BestTable
    fronts: Fronts
    histogram: Longs


@jit
def candidate_digits(axes: Axes, number: int, digits: Longs) -> None:
    """Find a candidate's index on each axis: layout, isl, osl, load, budget, prefix hit."""
    rest = number
    lengths = (len(axes.isl), len(axes.osl), len(axes.load), len(axes.budget), len(axes.prefix_hit))
    for i in range(5, 0, -1):
        length = lengths[i - 1]
        digits[i] = rest % length
        rest = rest // length
    digits[0] = rest


@jit
def _most_running(axes: Axes, budget: int, whole: float, held: float, clients: float) -> int:
    """Return the limit on requests under which most of the clients run, the first of equals."""
    best = 0
    most = -1.0
    for i in range(len(axes.max_num_seqs)):
        room = axes.max_kv_tokens[budget, i]
        running = min(clients, axes.max_num_seqs[i], room / held) if whole <= room else 0.0
        if running > most:
            most = running
            best = i
    return best


@jit
def _sizes(axes: Axes, digits: Longs, limit: int) -> Sizes:
    """Return a candidate's sizes with one of the limits on requests."""
    layout = digits[0]
    isl = axes.isl[digits[1]]
    return Sizes(
        axes.replicas[layout],
        axes.prefill_workers[layout],
        axes.decode_workers[layout],
        isl,
        max(isl * (1.0 - axes.prefix_hit[digits[5]]), 1.0),
        axes.osl[digits[2]],
        axes.load[digits[3]],
        axes.budget[digits[4]],
        axes.max_num_seqs[limit],
        axes.max_kv_tokens[digits[4], limit],
    )


@jit
def _candidate(arena: Floats, axes: Axes, number: int, options: DeploymentOptions, scratch: Scratch) -> int:
    """Estimate a candidate into ``scratch.answer``. Returns the outcome."""
    digits = scratch.digits
    candidate_digits(axes, number, digits)
    layout = digits[0]
    isl = axes.isl[digits[1]]
    osl = axes.osl[digits[2]]
    budget = digits[4]
    length = isl + osl
    if length > options.max_position:
        return L.CONTEXT
    whole = held_tokens(length, options.window, options.window_share, options.state_tokens)
    held = mean_held(isl, osl, options)
    # engines among which the clients' requests spread
    engines = max(axes.replicas[layout], axes.decode_workers[layout], 1.0)
    limit = _most_running(
        axes, budget, whole, held, math.inf if options.is_rate else axes.load[digits[3]] / engines
    )
    sizes = _sizes(axes, digits, limit)
    if whole > sizes.max_kv_tokens:
        return L.MEMORY
    if not options.is_chunked and sizes.new > sizes.budget:
        return L.WHOLE_PROMPT
    replicas = max(sizes.replicas, 1.0)
    gpus = options.tp * (sizes.replicas + sizes.prefill_workers + sizes.decode_workers)
    if options.is_rate:
        rate = sizes.load / options.us_per_s / replicas
        code, clients = solve_rate(arena, sizes, rate, options, scratch)
        enough = _most_running(axes, budget, whole, held, clients * replicas / engines)
        if code == L.FEASIBLE and enough != limit:
            sizes = _sizes(axes, digits, enough)
            code = closed_loop(arena, sizes, clients, options, scratch)
    else:
        rate = 0.0
        clients = sizes.load / replicas
        code = closed_loop(arena, sizes, clients, options, scratch)
    if code != L.FEASIBLE:
        return code
    mean = scratch.mean
    # with less than one client each, replicas are idle for the rest of the time
    busy = min(clients, 1.0)
    if options.is_rate:
        tokens_per_us = rate * sizes.osl * replicas
        clients = rate * mean[L.MEAN_REQUEST_US]
    else:
        tokens_per_us = mean[L.MEAN_TOKENS_PER_US] * busy * replicas
    answer = scratch.answer
    answer[L.CONCURRENCY] = clients * replicas if options.is_rate else sizes.load
    answer[L.REQUEST_RATE] = sizes.load if options.is_rate else math.nan
    answer[L.TTFT_MS] = mean[L.MEAN_TTFT_US] / options.us_per_ms
    answer[L.TPOT_MS] = mean[L.MEAN_TPOT_US] / options.us_per_ms
    answer[L.REQUEST_MS] = mean[L.MEAN_REQUEST_US] / options.us_per_ms
    answer[L.TOKENS_PER_S] = tokens_per_us * options.us_per_s
    answer[L.PER_GPU] = answer[L.TOKENS_PER_S] / gpus
    answer[L.PER_USER] = options.us_per_s / mean[L.MEAN_TPOT_US]
    answer[L.REQUESTS_PER_S] = sizes.load if options.is_rate else answer[L.TOKENS_PER_S] / sizes.osl
    answer[L.COST] = options.gpu_price / answer[L.PER_GPU]
    answer[L.EFFECTIVE] = mean[L.MEAN_EFFECTIVE] * busy * replicas
    answer[L.DECODE_STEP_MS] = mean[L.MEAN_DECODE_STEP_US] / options.us_per_ms
    answer[L.MIXED_STEP_MS] = mean[L.MEAN_MIXED_STEP_US] / options.us_per_ms
    answer[L.MIXED_SHARE] = mean[L.MEAN_SHARE]
    answer[L.WAIT_MS] = mean[L.MEAN_WAIT_US] / options.us_per_ms
    answer[L.KV_SHARE] = mean[L.MEAN_KV_SHARE]
    answer[L.DECODES] = mean[L.MEAN_DECODES]
    answer[L.PREFILL_TOKENS] = mean[L.MEAN_PREFILL]
    answer[L.PROMPTS] = mean[L.MEAN_PROMPTS]
    answer[L.KV_LEN] = mean[L.MEAN_KV_LEN]
    answer[L.MAX_SEQS] = sizes.max_num_seqs
    answer[L.ROOM] = sizes.max_kv_tokens
    if answer[L.TTFT_MS] > options.ttft_ms:
        return L.TTFT
    if answer[L.TPOT_MS] > options.tpot_ms:
        return L.TPOT
    if answer[L.REQUEST_MS] > options.request_ms:
        return L.REQUEST
    if answer[L.KV_SHARE] > options.kv_share:
        return L.KV_SHARE_OVER
    if gpus > options.total_gpus:
        return L.GPUS
    return L.FEASIBLE


@jit
def evaluate_candidates(
    arena: Floats,
    axes: Axes,
    options: DeploymentOptions,
    numbers: Longs,
    scratch: Scratch,
    answers: Floats,
    codes: Flags,
) -> None:
    """Estimate candidates into ``answers``, a column each; columns without an estimate stay unfilled."""
    for i in range(len(numbers)):
        codes[i] = _candidate(arena, axes, numbers[i], options, scratch)
        if codes[i] == L.FEASIBLE or L.TTFT <= codes[i] <= L.GPUS:
            for row in range(L.ANSWERS):
                answers[row, i] = scratch.answer[row]


MANTISSA = 2.0**40
"""Rounding of objectives: candidates that differ by less than 1e-12 are equal, the first of them is best."""


@jit
def _objective(answer: Any, objective: int) -> float:
    """Return the metric to maximize, without its last digits, in which sums that should be equal differ."""
    value = answer[L.TOKENS_PER_S]
    if objective == PER_GPU_HIGH:
        value = answer[L.PER_GPU]
    elif objective == PER_USER_HIGH:
        value = answer[L.PER_USER]
    elif objective == COST_LOW:
        value = -answer[L.COST]
    mantissa, exponent = math.frexp(value)
    return math.ldexp(np.rint(mantissa * MANTISSA) / MANTISSA, exponent)


@jit
def reduce_candidates(
    arena: Floats,
    axes: Axes,
    options: DeploymentOptions,
    start: int,
    stop: int,
    scratch: Scratch,
    reduction: Reduction,
    counts: Longs,
) -> int:
    """Keep the best candidates, or the Pareto front, within the limits, and count all by outcome."""
    strides = reduction.strides
    for number in range(start, stop):
        code = _candidate(arena, axes, number, options, scratch)
        if code == L.FEASIBLE:
            digits = scratch.digits
            group = reduction.layout_group[digits[0]]
            for i in range(5):
                group += digits[i + 1] * strides[i]
            answer = scratch.answer
            value = _objective(answer, options.objective)
            if reduction.is_pareto:
                # a single token has no time per token
                per_user = answer[L.PER_USER] if answer[L.PER_USER] >= 0.0 else 0.0
                if not keep_pareto(reduction.fronts, group, per_user, answer[L.PER_GPU], number):
                    return number
            else:
                keep_best(reduction.best, group, value, number)
            if len(reduction.histogram) > 0:
                count_value(reduction.histogram, group, abs(value))
        counts[code] += 1
    return stop
