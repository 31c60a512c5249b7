"""Serving, naively: a simulated closed loop, request by request, and the closed form in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastroof import StepBatch
from fastroof.compiled import steps
from fastroof.compiled.expert_rows import RankRules
from fastroof.compiled.grids import grid_value
from tests.reference import mixed_attention, verification
from tests.reference.lockstep import Others, together_us


@dataclass
class Request:
    """One request of the simulation: what is computed of it, and when what happened."""

    isl: int
    osl: int
    sent_us: float
    computed: int = 0
    tokens_out: int = 0
    again: int = 0
    first_us: float = 0.0
    done_us: float = 0.0

    @property
    def prompt_left(self) -> int:
        return max(self.isl + self.again - self.computed, 0)


class Simulated(NamedTuple):
    """Means over the requests of the middle of a simulation, and over its steps."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    decodes: float
    running: float
    mixed_share: float


def held(running: list[Request], chunks: list[tuple[Request, int]], is_reserved: bool) -> int:
    """Tokens of KV cache that are taken, after this step's chunks."""
    if is_reserved:
        return sum(r.isl + r.osl for r in running)
    return sum(r.computed for r in running) + sum(q for _, q in chunks)


def simulate_closed_loop(
    plan: Any,
    isl: int,
    osl: int,
    concurrency: int,
    *,
    max_num_batched_tokens: int = 8192,
    max_kv_tokens: float = math.inf,
    is_chunked: bool = True,
    is_reserved: bool = True,
    think_us: float | None = None,
    length_spread: float = 0.2,
    rounds: int = 6,
    seed: int = 0,
    tokens: int = 1,
    accepted: float = 1.0,
    prefix_hit: float = 0.0,
    wait_steps: int = 0,
) -> Simulated:
    """Serve ``concurrency`` clients, each of which sends its next request when it has the last answer.

    A step holds every decode, then chunks of running prompts, then waiting prompts, oldest first, within the
    token budget and the KV cache, which a request reserves in full, or takes token by token (the newest is
    then thrown out when it is full). Clients start at any time of a cycle and take up to ``think_us``, by
    default a step, so that requests come at any time of a step. A decode verifies ``tokens`` and produces
    ``accepted`` of them on average; ``prefix_hit`` of a prompt need not be computed. With decodes,
    waiting prompts are held back for ``wait_steps`` from the first on, or until they fill nine tenths of a
    step.
    """
    rng = np.random.default_rng(seed)
    step_us = float(plan.decode_us(min(concurrency, plan.max_num_seqs), isl + osl // 2))
    think_us = step_us if think_us is None else think_us
    prompt_us = float(plan.prefill_us(min(isl, max_num_batched_tokens))) * max(
        1.0, isl / max_num_batched_tokens
    )
    cycle_us = osl * step_us + concurrency * prompt_us

    def request(sent_us: float) -> Request:
        lengths = [
            max(1, round(n * rng.uniform(1.0 - length_spread, 1.0 + length_spread))) for n in (isl, osl)
        ]
        made = Request(*lengths, sent_us)
        made.computed = min(round(prefix_hit * made.isl), made.isl - 1)
        return made

    def step_tokens() -> int:
        if tokens == 1:
            return 1
        return int(accepted) + int(rng.random() < accepted - int(accepted))

    waiting = [request(start) for start in sorted(rng.uniform(0.0, cycle_us, concurrency).tolist())]
    total = rounds * concurrency + 20
    now_us = 0.0
    running: list[Request] = []
    done: list[Request] = []
    seen: list[tuple[float, float, int, int, bool]] = []
    held_steps = 0
    while len(done) < total:
        chunks: list[tuple[Request, int]] = []
        left = max_num_batched_tokens
        decoding = [r for r in running if not r.prompt_left]
        while (
            not is_reserved
            and held(running, chunks, is_reserved) + len(decoding) > max_kv_tokens
            and len(running) > 1
        ):
            thrown = running.pop()
            # its output is prefilled again with its prompt
            thrown.again, thrown.computed = thrown.tokens_out, 0
            waiting.insert(0, thrown)
            decoding = [r for r in running if not r.prompt_left]
        for r in decoding:
            chunks.append((r, tokens))
            left -= tokens
        for r in running:
            if r.prompt_left and left:
                chunk = min(r.prompt_left, left)
                chunks.append((r, chunk))
                left -= chunk
        waiting.sort(key=lambda r: r.sent_us)
        come = sum(r.prompt_left for r in waiting if r.sent_us <= now_us)
        is_held = bool(decoding) and 0 < come < 0.9 * max_num_batched_tokens and held_steps < wait_steps
        held_steps = held_steps + 1 if is_held else 0
        while (
            not is_held and left and waiting and waiting[0].sent_us <= now_us and len(running) < concurrency
        ):
            r = waiting[0]
            wanted = r.isl + (r.osl if is_reserved else r.again)
            if running and held(running, chunks, is_reserved) + wanted > max_kv_tokens:
                break
            if not is_chunked and r.prompt_left > left and chunks:
                break
            waiting.pop(0)
            running.append(r)
            chunk = min(r.prompt_left, left)
            chunks.append((r, chunk))
            left -= chunk
        if not chunks:
            now_us = waiting[0].sent_us
            continue
        batch = [(q, r.computed) for r, q in chunks]
        if tokens > 1:
            took = verification.mixed_step_us(plan, batch[: len(decoding)], batch[len(decoding) :])
        else:
            took = float(plan.step_us(StepBatch.from_requests([batch]))[0])
        seen.append((now_us, took, len(decoding), len(running), len(chunks) > len(decoding)))
        now_us += took
        for r, q in chunks:
            more = 1
            if not r.prompt_left:
                more = q = min(step_tokens(), r.osl - r.tokens_out)
            r.computed += q
            if r.prompt_left:
                continue
            r.tokens_out += more
            if not r.first_us:
                r.first_us = now_us
            if r.tokens_out >= r.osl:
                r.done_us = now_us
                running.remove(r)
                done.append(r)
                waiting.append(request(now_us + float(rng.uniform(0.0, think_us))))
    middle = done[len(done) // 4 :]
    start, end = middle[0].done_us, middle[-1].done_us
    steps_seen = np.array([s for s in seen if start <= s[0] < end], float)
    decodes = steps_seen[:, 2]
    by_decode = decodes if decodes.sum() else np.ones_like(decodes)
    return Simulated(
        float(np.mean([r.first_us - r.sent_us for r in middle])) / 1e3,
        float(np.mean([(r.done_us - r.first_us) / max(r.osl - 1, 1) for r in middle])) / 1e3,
        sum(r.osl for r in middle[1:]) / (end - start) * 1e6,
        float(np.average(decodes, weights=by_decode)),
        float(np.average(steps_seen[:, 3], weights=steps_seen[:, 1])),
        float(np.average(steps_seen[:, 4], weights=by_decode)),
    )


def simulate_prefill_worker(
    one_us: float, more_us: float, most: int, arrivals: float, count: int = 40_000
) -> float:
    """Mean time from a prompt's arrival, at random, to the end of its batch of at most ``most``, us."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1.0 / arrivals, count)).tolist()
    free_us, first, total = 0.0, 0, 0.0
    while first < count:
        start = max(free_us, times[first])
        last = first
        while last < count and last - first < most and times[last] <= start:
            last += 1
        free_us = start + one_us + (last - first - 1) * more_us
        total += sum(free_us - t for t in times[first:last])
        first = last
    return total / count


SLICES = 300
"""Places at which the mean over a growing context is taken: off by 1 / SLICES**2 where the curve bends."""


def row(plan: Any, at: int, last: int, x: float) -> float:
    """A dense row of the plan at a real number."""
    start = int(plan.arena[at])
    return float(np.interp(x, np.arange(last + 1), plan.arena[start : start + last + 1]))


class Verified(NamedTuple):
    """How a request decodes: tokens of a step, mean accepted tokens, and what drafts the others."""

    tokens: int = 1
    accepted: float = 1.0
    draft: Any = None


ONE_TOKEN = Verified()


def mean_step_us(
    plan: Any,
    decodes: float,
    isl: float,
    osl: float,
    chunks: list[tuple[float, float, float]],
    tokens: float,
    seqs: float,
    verified: Verified = ONE_TOKEN,
    is_draft: bool = False,
    hidden_us: float = 0.0,
) -> float:
    """A step of ``decodes`` somewhere in their output and of chunks (how many, new tokens, context), us.

    ``tokens`` and ``seqs`` count one token a decode. The host begins to launch chunks ``hidden_us`` before
    their step can start.
    """
    parts, costs = steps.open_plan(plan.arena), plan.profile.costs
    more = decodes * (verified.tokens - 1)
    total = row(plan, steps.TOKENS_AT, plan.max_num_batched_tokens, tokens + more)
    total += verification.head_us(plan, seqs + more)
    total += 0.0 if is_draft else parts.step_us + parts.sequence_us * seqs
    if decodes > 0 and osl > 1:
        width = (osl - 1) / math.sqrt(max(decodes, 1.0))
        middle = isl + osl / 2 + (verified.tokens - 1) - (verified.accepted - 1) / 2
        kv_lens = middle + width * ((np.arange(SLICES) + 0.5) / SLICES - 0.5)
        batch = max(decodes, 1.0)
        attention = [grid_value(plan.arena, parts.decode, batch, kv) for kv in kv_lens.tolist()]
        if verified.tokens > 1:
            longer = [
                verification.factor(plan, batch, max(kv, verified.tokens), verified.tokens)
                for kv in kv_lens.tolist()
            ]
            attention = [a * b for a, b in zip(attention, longer, strict=True)]
        attention_us = min(decodes, 1.0) * float(np.mean(attention))
        if chunks:
            attention_us = max(attention_us, mixed_attention.kv_token_us(plan) * decodes * middle)
        total += attention_us
    if chunks:
        new = sum(count * q for count, q, _ in chunks)
        causal = sum(count * q * (q + 1) / 2 for count, q, _ in chunks)
        q_len = 2 * causal / new - 1
        attention_us = grid_value(plan.arena, parts.prefill, new / q_len, q_len)
        attention_us += parts.prefix_pair_us * sum(count * q * ctx for count, q, ctx in chunks)
        attention_us += parts.prefix_token_us * sum(count * ctx for count, _, ctx in chunks)
        total += max(attention_us - min(decodes, 1.0) * mixed_attention.launches_saved_us(plan), 0.0)
        if not is_draft:
            total = max(total + costs.prefill_us, parts.prefill_floor_us - hidden_us)
    return total


def draft_us(
    verified: Verified,
    decodes: float,
    isl: float,
    osl: float,
    chunks: list[tuple[float, float, float]],
    prompts: float,
) -> float:
    """Time of drafting per step: a draft step that reads the step's tokens, then decode steps."""
    if verified.draft is None:
        return 0.0
    at = isl + (verified.tokens - 1) / 2 - (verified.accepted - 1) / 2
    steps_alone = verified.tokens - 1

    def alone(requests: float) -> float:
        return mean_step_us(verified.draft, requests, at, osl, [], requests, requests, is_draft=True)

    if not chunks:
        return steps_alone * alone(decodes) if decodes else 0.0
    new = sum(count * q for count, q, _ in chunks)
    sizes = (decodes + new, decodes + prompts)
    first = mean_step_us(verified.draft, decodes, at, osl, chunks, *sizes, is_draft=True)
    return first + (steps_alone - 1) * alone(decodes + prompts)


class ClosedForm(NamedTuple):
    """Times of the closed form, us, and output tokens of all clients in one."""

    ttft_us: float
    tpot_us: float
    decode_us: float
    mixed_us: float
    mixed_share: float
    running: float
    tokens_per_us: float


def start(first_us: float, place_us: float, clients: float, places: float, spread: float) -> float:
    """Mean TTFT of clients that start together, client by client; the last may be a part of one."""
    if clients <= places:
        return first_us
    shares = [1.0] * math.floor(clients) + [clients % 1] * (clients % 1 > 0)
    waves = [share * (i // places) for i, share in enumerate(shares)]
    equal = first_us + place_us * sum(waves) / clients
    # places become free evenly: those behind wait for half of them on average
    behind = (clients - places) / clients
    mean_wait = (clients - places) / 2 * place_us / places
    even = first_us + behind * (first_us + mean_wait)
    return equal + min(spread / 0.4, 1) * (even - equal)


def with_drain(
    rate: float, tpot_us: float, osl: float, clients: float, rounds: float, spread: float
) -> float:
    """Tokens a us of a run that ends with the longest of its last outputs, even around their mean."""
    longer = osl * spread / (2 - spread) * (clients - 1) / (clients + 1)
    return 1 / (1 / rate + longer * tpot_us / (rounds * clients * osl))


def train(
    clients: float,
    isl: float,
    osl: float,
    room: float,
    decode_us: float,
    ahead: float,
    outside_us: float,
    prompts: Callable[[float, float, float], float],
) -> tuple[float, float, float] | None:
    """Groups of equal requests one by one: TTFT in the engine, a step of prompts, its share; None: no train.

    The first groups queue while their prompts are on the way; each later one finds as many in the queue.
    """
    groups = clients if isl > room else max(1.0, clients * isl / room)
    if groups >= 0.7 * osl:
        return None
    missed = ahead + math.ceil(outside_us / decode_us - 1e-9)
    queued = min(groups, 1 + missed)
    step_us = prompts(clients - queued * clients / groups, min(clients * isl, room), room)
    each = max(1.0, isl / room)
    if groups == 1:
        return step_us, step_us, 0.0
    total = 0.0
    for j in range(1, math.floor(queued) + 1):
        total += max(outside_us, missed * decode_us) + j * step_us * each - (j - 1) * decode_us
    total += (groups - math.floor(queued)) * queued * step_us * each
    decoding = groups - queued + queued * (queued - 1) / (2 * groups)
    ttft_us = max(total / groups - outside_us, step_us * each)
    return ttft_us, step_us, min(decoding * each / (osl - 1), 1.0)


def closed_form(
    plan: Any,
    isl: float,
    osl: float,
    concurrency: float,
    budget: float = 8192,
    *,
    is_chunked: bool = True,
    osl_reserved: float = 0.5,
    max_kv_tokens: float = math.inf,
    rounds: float | None = None,
    spread: float = 0.2,
    outside_us: float = 0.0,
    wait_steps: float = 0.0,
    interval: float = 1.0,
    steps_met: float | None = None,
    verified: Verified = ONE_TOKEN,
    rules: RankRules | None = None,
) -> ClosedForm:
    """The formulas in the notes of ``fastroof.serving.estimate``, one after the other.

    Without ``steps_met``, or with one below 0, a request comes at a random time: most likely while a long
    step runs, of which it waits for the rest, and for as many steps more as that is below -1. A client that
    sends its next request as its last answer ends meets steps as they start, long and short ones alike: all
    of the next one where an asynchronous scheduler has made it by then (1), none otherwise (0). Ranks step
    together by ``rules``; clients are those of each. A run of ``rounds`` requests a client counts its start.
    """
    clients_of_all = concurrency * rules.ranks if rules else 1.0
    # prompts do not wait for those of other ranks while a rank has no request to decode
    is_balanced = rules is not None and bool(rules.balance_steps) and concurrency >= 1
    concurrency = max(concurrency, 1.0)
    ahead = max(-1.0 - steps_met, 0.0) if steps_met is not None else 0.0
    steps_met = None if steps_met is not None and steps_met < 0 else steps_met
    met = 1.0 + ahead if steps_met is None else steps_met
    q = verified.tokens
    turns = max((osl - 1) / verified.accepted, min(osl - 1, 1))
    most = max_kv_tokens / (isl + osl_reserved * osl)
    most = min(most, 1 + (budget - 1) / q if is_chunked else 1 + (budget - isl) / q)
    fit = min(concurrency, most)
    room_at_first = room = budget - (fit - 1) * q if is_chunked else (budget - (fit - 1) * q) // isl * isl
    prompt_steps = max(1.0, isl / room)
    arrivals = (fit - 1) / (turns + met + prompt_steps)
    held = held_steps = 0.0
    if wait_steps and fit > 1 and osl > 1:
        for _ in range(3):
            held = min(arrivals * wait_steps, max(room / isl - 1, 0))
            held_steps = held / arrivals * (1 + held / 2) / (1 + held)
            arrivals = (fit - 1) / (turns + met + prompt_steps + held_steps)
    pauses = interval > 1 and fit > 1 and osl > 1 and fit >= concurrency
    share_held = 0.0
    if pauses:
        for _ in range(3):
            apart = interval + math.exp(-arrivals * interval) / (1 - math.exp(-arrivals))
            share_held, held = interval / apart, arrivals * apart - 1
            held_steps = share_held * (interval - 1) / 2
            arrivals = (fit - 1) / (turns + met + prompt_steps + held_steps)
    own_decode = min(turns, 1)
    in_lockstep = rules is not None and bool(rules.in_lockstep) and not is_balanced
    others_count = min(max(clients_of_all, 1), rules.ranks) - 1 if in_lockstep else 0
    cycle, work = turns + met + prompt_steps + held_steps, (fit - 1) * isl / room
    queue_steps = (math.sqrt((cycle - work) ** 2 + 2 * isl / room * work) - (cycle - work)) / 2
    is_bound = arrivals * isl >= room
    if is_bound:
        room = budget * isl / (turns * q + isl) if is_chunked else max(budget // (turns * q + isl), 1) * isl
        room = min(room, budget - own_decode * q) if is_chunked else room
        arrivals, prompt_steps = room / isl, max(1.0, isl / room)
        decodes = min(max(arrivals * turns, own_decode), fit)
        running, mixed, prefill = min(fit, arrivals * (turns + prompt_steps)), 1.0, room
    else:
        running, decodes = fit, own_decode + (fit - 1) * turns / (turns + met + prompt_steps + held_steps)
        busy = arrivals * prompt_steps / (1 + held) if held else 1 - math.exp(-arrivals * prompt_steps)
        mixed = max(busy, arrivals * isl / room)
        mixed = float(arrivals > 0) if osl == 1 else mixed
        prefill = min(arrivals * isl / mixed, room, budget - decodes * q) if mixed else 0.0

    def step(
        d: float, tokens: float, chunks: list[tuple[float, float, float]], seqs: float, new: float = 0.0
    ) -> float:
        drafted = draft_us(verified, d, isl, osl, chunks, new)
        return mean_step_us(plan, d, isl, osl, chunks, d + tokens, seqs, verified) + drafted

    def prompts(d: float, tokens: float, of: float) -> float:
        chunk = min(isl, of, tokens)
        of_prompt = tokens / isl
        return step(d, tokens, [(tokens / chunk, chunk, (isl - chunk) / 2)], d + of_prompt, of_prompt)

    decode_us = step(decodes, 0.0, [], decodes) if osl > 1 else 0.0
    mixed_us = prompts(decodes, prefill, room) if mixed else 0.0
    any_prompts, alone_us, found = mixed, decode_us, 1.0
    others = Others(0, 0, 0, 0, 0)
    if in_lockstep:
        cycle = fit / arrivals if is_bound else cycle
        each = fit / cycle
        # a prompt alone takes whole steps, among others that wait a part of one
        spare = max(1 - each * isl / room, 0)
        whole = prompt_steps + spare * (math.ceil(prompt_steps - 1e-9) - prompt_steps)
        share = 1 - (1 - min(whole / cycle, 1)) ** fit
        share = each * prompt_steps / (1 + held) if held else share
        share = 1.0 if is_bound else min(max(share, each * isl / room), 1.0)
        theirs = min(each * isl / share, room)
        with_theirs = decodes if is_bound else (fit - 1) * turns / cycle
        prompts_us = prompts(with_theirs, theirs, room)
        decoding = max((fit * turns / cycle - share * with_theirs) / (1 - share), 0) if share < 1 else 0
        decoding = with_theirs if share == 1 else decoding
        others = Others(others_count, share, theirs + with_theirs * q, decoding * q, prompts_us)
        more = math.ceil(concurrency - 1e-9) - concurrency
        if more > 0 and fit >= concurrency and not is_bound and osl > 1:
            full = decodes + more * turns / cycle
            others = others._replace(full_tokens=full * q, full_us=step(full, 0.0, [], full))
        ranks = math.ceil(others_count - 1e-9)
        none = (1 - share * others_count / ranks) ** ranks if ranks else 1.0
        any_prompts = 1 - (1 - mixed) * none
        if osl > 1:
            alone_us = together_us(plan, rules, others._replace(share=0), decode_us, decodes * q, True)
            decode_us = together_us(plan, rules, others, decode_us, decodes * q, True)
        if mixed:
            mixed_us = together_us(plan, rules, others, mixed_us, decodes * q + prefill, False)
        elif osl == 1 and others_count:
            found = 1 - none
            mixed_us = together_us(plan, rules, others, 0.0, 0.0, False) / found
            mixed = any_prompts = 1.0
    mean = (1 - mixed) * decode_us + mixed * mixed_us
    square = (1 - mixed) * decode_us**2 + mixed * mixed_us**2
    wait = come = queue = 0.0
    if fit - 1 + others_count > 0:
        busy = min(fit - 1 + others_count, found)
        wait = busy * (square / (2 * mean) + ahead * mean)
        come = arrivals * (square / mean**2 + ahead)
        if steps_met is not None:
            wait, come = busy * met * mean, arrivals
        load = min(arrivals * isl / room, 0.999)
        queue = min(load / (1 - load), 1.0) * mixed * mixed_us / 2
        if steps_met is not None:
            queue = 0.0 if is_bound else queue_steps * mixed_us
        if pauses and not is_bound:
            # a random moment is in a long step more often
            in_time = (
                (mixed_us + (interval - 2) / 2 * decode_us) / mean * (interval - 1) / interval * decode_us
            )
            wait += busy * (held_steps * decode_us if steps_met is not None else share_held * in_time)
            come += share_held * arrivals * (interval - 1)
        elif held and not is_bound:
            wait += busy * held_steps * mean
            come += held
    rest_decodes = max(decodes - own_decode, 0.0)
    full = math.ceil(isl / room) - 1
    # a prompt's first chunks produce no token, yet the draft is taken to go on after each of them
    own = sum(step(rest_decodes, room, [(1, room, i * room)], rest_decodes, 1.0) for i in range(full))
    if in_lockstep and full:
        own = full * together_us(plan, rules, others, own / full, room + rest_decodes * q, False)
    rest = isl - full * room
    more = min(come * isl, room - rest)
    chunk = min(isl, room)
    last = [(1, rest, full * room), (more / chunk, chunk, (isl - chunk) / 2)]
    last_us = step(rest_decodes, rest + more, last, rest_decodes + 1 + more / isl, 1.0)
    if in_lockstep:
        last_us = together_us(plan, rules, others, last_us, rest + more + rest_decodes * q, False)
    own += last_us
    one_place = wait + queue + own + turns * mean
    steady = ttft = wait + queue + own
    if is_bound:
        one_place = max(one_place, fit / arrivals * mixed_us)
    is_plain = q == 1 and not wait_steps and interval <= 1 and not in_lockstep
    if concurrency == fit > 1 and not is_bound and spread == 0 and osl > 1 and is_plain:
        came = met if steps_met is not None else ahead
        seen = train(fit, isl, osl, room_at_first, decode_us, came, outside_us, prompts)
        if seen is not None:
            steady, mixed_us, any_prompts = seen
            ttft, mean = steady, (1 - any_prompts) * decode_us + any_prompts * mixed_us
    if is_bound:
        ttft = max(steady, concurrency / arrivals * mixed_us - turns * mean)
    elif concurrency > fit:
        ttft += (concurrency / fit - 1) * (steady + turns * mean)
    if in_lockstep:
        mixed_us = (mean - (1 - any_prompts) * alone_us) / any_prompts if any_prompts else 0.0
    if rounds is not None:
        a_step, each = max(1, room_at_first // isl), max(1.0, isl / room_at_first)
        if fit < a_step:
            one_us = burst = step(0.0, fit * isl, [(fit, isl, 0.0)], fit, fit)
            later_steps = 0.0
        else:
            one_us = prompts((fit - 1) / 2 * min(osl - 1, 1), min(a_step * isl, room_at_first), room_at_first)
            burst = one_us * each * (fit / a_step + 1) / 2
            later_steps = (fit / a_step - 1) * each
        places = concurrency if concurrency <= most else max(math.floor(most + 1e-9), 1)
        ttft = (start(burst, one_place, concurrency, places, spread) + (rounds - 1) * ttft) / rounds
        if osl > 1:
            # prompts after a request's own: half of those of a burst, or all that it has steps for
            after = later_steps / 2 if later_steps <= turns else turns - turns**2 / (2 * later_steps)
            of_burst = places / concurrency / rounds
            in_burst, in_steady = of_burst * after / turns, (1 - of_burst) * any_prompts
            any_prompts = in_burst + in_steady
            mixed_us = (in_burst * one_us + in_steady * mixed_us) / any_prompts if any_prompts else 0.0
            mean = (1 - any_prompts) * alone_us + any_prompts * mixed_us
    tpot = mean * turns / (osl - 1) if osl > 1 else math.nan
    rate = concurrency * osl / (ttft + turns * mean if osl > 1 else ttft)
    if rounds is not None:
        if concurrency > places and not is_bound:
            rate = min(rate, fit * osl / one_place)
        if osl > 1:
            rate = with_drain(rate, tpot, osl, concurrency, rounds, spread)
    return ClosedForm(ttft, tpot, alone_us, mixed_us, any_prompts, running, rate)
