"""An engine that runs prompts ahead of decodes, naively: simulated, and the closed form in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastroof.compiled.expert_rows import RankRules
from tests.reference.lockstep import Others, together_us
from tests.reference.serving import ONE_TOKEN, ClosedForm, Verified, draft_us, mean_step_us, start, with_drain

PrefillUs = Callable[[list[tuple[int, int]]], float]
"""What a step of prompts takes, us, from (new tokens, tokens before them) of each."""
DecodeUs = Callable[[int, int], float]
"""What a step of so many decodes takes, us, at a mean length."""


@dataclass
class Request:
    """One request: what is computed of it, and when what happened."""

    client: int
    isl: int
    osl: int
    sent_us: float
    computed: int = 0
    produced: int = 0
    first_us: float = 0.0


class Seen(NamedTuple):
    """Means over all requests of a run but the first and last of each client, on request."""

    ttft_us: float
    tpot_us: float
    requests_per_s: float
    together: float
    """Prompts that are computed without a decode step between them, as a request sees them."""


def simulate(
    prefill_us: PrefillUs,
    decode_us: DecodeUs,
    isl: int,
    osl: int,
    clients: int,
    *,
    budget: int = 8192,
    max_running: float = math.inf,
    length_spread: float = 0.0,
    requests_per_client: int = 10,
    counted: slice = slice(None),
    think_us: float = 0.0,
    looks: int = 1,
    seed: int = 0,
) -> Seen:
    """Serve clients that start at once and send their next request when they have the last answer.

    A step is prompts alone while any wait: as many as ``budget`` tokens hold, the last of them in part. Only
    when none waits do all that run decode once. Lengths are drawn evenly, the shortest ``length_spread``
    below the longest, around the means that are given. A client's next request comes at any time up to
    ``think_us`` after its last token. Arrivals are read every ``looks`` decode steps, after
    prompts, and where nothing runs. Of each client ``counted`` requests make the means.
    """
    rng = np.random.default_rng(seed)
    half = length_spread / (2.0 - length_spread)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1.0 - half, 1.0 + half)))

    coming = [Request(client, length(isl), length(osl), 0.0) for client in range(clients)]
    sent = [1] * clients
    waiting: list[Request] = []
    running: list[Request] = []
    done: list[tuple[Request, float]] = []
    of_client = range(requests_per_client)[counted]
    group = 0
    now, unseen_steps = 0.0, looks
    groups: dict[int, int] = {}

    def finish(request: Request) -> None:
        if sent[request.client] - 1 in of_client:
            done.append((request, now))
        running.remove(request)
        if sent[request.client] < requests_per_client:
            sent[request.client] += 1
            sent_us = now + rng.uniform(0.0, think_us)
            coming.append(Request(request.client, length(isl), length(osl), sent_us))

    while coming or waiting or running:
        if unseen_steps >= looks or not running:
            arrived = sorted((r for r in coming if r.sent_us <= now), key=lambda r: r.sent_us)
            coming = [r for r in coming if r.sent_us > now]
            waiting += arrived
            unseen_steps = 0
        chunks: list[tuple[int, int]] = []
        begun: list[Request] = []
        left = budget
        for request in waiting:
            if not left or (request not in running and len(running) >= max_running):
                break
            if request not in running:
                running.append(request)
            new = min(request.isl - request.computed, left)
            chunks.append((new, request.computed))
            request.computed += new
            left -= new
            begun.append(request)
        if chunks:
            now += prefill_us(chunks)
            unseen_steps = looks
            for request in begun:
                if request.computed == request.isl:
                    waiting.remove(request)
                    request.produced, request.first_us = 1, now
                    if sent[request.client] - 1 in of_client:
                        groups[group] = groups.get(group, 0) + 1
                    if request.produced == request.osl:
                        finish(request)
        elif running:
            # a request that was cut waits, so that all that run are done with their prompts
            now += decode_us(len(running), round(float(np.mean([r.isl + r.produced for r in running]))))
            group += 1
            unseen_steps += 1
            for request in tuple(running):
                request.produced += 1
                if request.produced == request.osl:
                    finish(request)
        else:
            now = min(r.sent_us for r in coming)
    ttft = float(np.mean([r.first_us - r.sent_us for r, _ in done]))
    tpot = float(np.mean([(end - r.first_us) / (r.osl - 1) for r, end in done if r.osl > 1] or [math.nan]))
    first = min(r.sent_us for r, _ in done)
    sizes = np.array(list(groups.values()), np.float64)
    return Seen(ttft, tpot, len(done) / (now - first) * 1e6, float((sizes**2).sum() / sizes.sum()))


def same_step(steps: float, spread: float, rounds: float | None) -> float:
    """Share of the others that end in one step with a request: see ``fastroof.serving.estimate``."""
    if spread == 0:
        return 1.0
    if rounds is None or rounds <= 1:
        return 1 / (steps + 1)
    deviation = spread / (1 - spread / 2) / math.sqrt(12) * steps
    count = min(math.ceil(rounds - 1), 32)
    after = [0.5 + (rounds - 1) * (i + 0.5) / count for i in range(count)]
    each = [max(math.erf(1 / (4 * deviation * math.sqrt(j))), 1 / (steps + 1)) for j in after]
    return sum(each) / count


def closed_form(
    plan: Any,
    isl: float,
    osl: float,
    concurrency: float,
    budget: float = 8192,
    *,
    cached: float = 0.0,
    is_chunked: bool = True,
    osl_reserved: float = 0.5,
    max_kv_tokens: float = math.inf,
    rounds: float | None = None,
    spread: float = 0.2,
    looks: float = 1.0,
    steps_met: float | None = None,
    verified: Verified = ONE_TOKEN,
    rules: RankRules | None = None,
) -> ClosedForm:
    """The formulas in the notes of ``fastroof.serving.estimate``; ``cached`` tokens go before ``isl``.

    Requests arrive at random moments, or as a decode step ends, which they see ``steps_met`` steps later.
    Ranks step together by ``rules``; clients are those of each.
    """
    others_count = min(max(concurrency * rules.ranks, 1), rules.ranks) - 1 if rules else 0.0
    concurrency = max(concurrency, 1.0)
    others: Others | None = None
    same = 1.0
    steps = max((osl - 1) / verified.accepted, min(osl - 1, 1))
    # what a prefix takes leaves less room
    most = max_kv_tokens / (isl + cached + osl_reserved * osl)
    fit = min(concurrency, most)
    places = concurrency if concurrency <= most else max(math.floor(most + 1e-9), 1)
    room = budget if is_chunked else budget // isl * isl

    def of_all(us: float, tokens: float, is_decode: bool) -> float:
        if rules is None or others is None:
            return us
        # clients of all ranks that go on together compute their prompts in the same steps
        share = others.share * (1 - same) if is_decode else others.share + (1 - others.share) * same
        return together_us(plan, rules, others._replace(share=share), us, tokens, is_decode)

    def chunks_us(chunks: list[tuple[float, float, float]], seqs: float) -> float:
        new = sum(count * q for count, q, _ in chunks)
        longer = [(count, q, context + cached) for count, q, context in chunks]
        total = mean_step_us(plan, 0.0, isl, osl, longer, new, seqs, verified, hidden_us=hidden)
        return total + draft_us(verified, 0.0, isl, osl, longer, seqs)

    def step_us(tokens: float) -> float:
        chunk = min(isl, room, tokens)
        alone = chunks_us([(tokens / chunk, chunk, (isl - chunk) / 2)], tokens / isl)
        return of_all(alone, tokens, is_decode=False)

    def one_us() -> float:
        if isl <= room:
            return step_us(isl)
        full = math.ceil(isl / room) - 1
        # the plain steps produce no token but for the last; the draft goes on after each of them
        total = sum(
            mean_step_us(
                plan, 0.0, isl, osl, [(1, room, i * room + cached)], room, 0.0, verified, hidden_us=hidden
            )
            + draft_us(verified, 0.0, isl, osl, [(1, room, i * room + cached)], 1.0)
            for i in range(full)
        )
        total = full * of_all(total / full, room, is_decode=False)
        last = isl - full * room
        return total + of_all(chunks_us([(1, last, full * room)], 1.0), last, is_decode=False)

    def alone_decode_us(requests: float) -> float:
        total = mean_step_us(plan, requests, isl + cached, osl, [], requests, requests, verified)
        return total + draft_us(verified, requests, isl + cached, osl, [], 0.0)

    hidden = 0.0
    if plan.profile.scheduling.hides_host and steps_met != 0 and steps > 0:
        # the host launches prompts while those that do not end with their clients still decode
        going_on = 1 - same_step(steps, spread, rounds)
        hidden = max(going_on * min(fit - 1, 1) * alone_decode_us(fit), 0.0)
        # of two rows of prompts that come together, the second is behind prompts
        hidden /= 2 - math.exp(-fit * (1 - going_on))

    def decode_us(requests: float) -> float:
        total = alone_decode_us(requests)
        return of_all(total, requests * verified.tokens, is_decode=True)

    def row(together: float) -> tuple[float, float]:
        if together <= 1:
            return together * one_us(), one_us()
        if together * isl <= room:
            return step_us(together * isl), step_us(together * isl)
        if isl > room:
            more = (together - 1) * isl / room * step_us(room)
            return one_us() + more, one_us() + more / 2
        of_steps = together * isl / room
        return of_steps * step_us(room), (of_steps + 1) / 2 * step_us(room)

    def seen(same: float, decode: float, looks: float) -> tuple[float, float, float, float]:
        ending = min(same * looks, 1.0)
        mine = 1 + (fit - 1) * ending
        group = fit if ending == 1 else max(fit * ending / (1 - (1 - ending) ** fit), 1.0)
        in_all, own = row(group)[0], row(mine)[1]
        if fit > 1 and steps_met is None:
            others = max(mine - 1, 1)
            behind = (one_us() + others * (one_us() + row(others)[1])) / (1 + others)
            behind = one_us() + min(mine - 1, 1) * (behind - one_us())
            own = (1 - same) * own + same * behind
        decoding = (1 - same) * min(fit - 1, 1)
        if steps_met is None:
            found = (1 - math.exp(-fit * same)) * min(in_all / decode, 1) * decoding
            joins = found / (looks + found)
            short = min(in_all, decode)
            wait = (1 - joins) * looks * decode / 2 + joins * (in_all - short / 2)
            before = joins * (in_all - short)
            missed = (1 - joins) * (looks + 1) / 2
        else:
            # a step made ahead is of prompts if a request ended a step before and the engine looked then
            of_prompts = steps_met * (1 - math.exp(-fit * same)) / looks
            missed = (looks - 1) / 2 + steps_met - of_prompts
            before = of_prompts * in_all
            wait = missed * decode + before
        after = fit / group * in_all - own - decoding * before
        return own + decoding * wait, max(after, 0.0), fit * steps / (steps + decoding * missed), group

    if rules and rules.in_lockstep and not rules.balance_steps:
        together = fit
        if osl > 1:
            same = same_step(steps, spread, rounds)
            ending = min(same * looks, 1.0)
            together = fit if ending == 1 else max(fit * ending / (1 - (1 - ending) ** fit), 1.0)
        prompt_steps = fit / together * max(together * isl / room, 1)
        tokens = min(together * isl, room)
        share = prompt_steps / (prompt_steps + steps)
        alone_us = step_us(tokens)
        full = math.ceil(fit) if math.ceil(fit - 1e-9) > fit >= concurrency and osl > 1 else 0.0
        full_us = decode_us(full) if full else 0.0
        others = Others(
            others_count, share, tokens, fit * verified.tokens, alone_us, full * verified.tokens, full_us
        )
    mixed = share = decode = after = 0.0
    group = fit
    if osl > 1:
        same = same_step(steps, spread, rounds)
        ttft, after, decodes, group = seen(same, decode_us(fit), looks)
        decode = decode_us(decodes)
    else:
        ttft = row(fit)[0]
    each = decode + after / steps if osl > 1 else 0.0
    one_place = ttft + steps * each
    if concurrency > fit:
        ttft += (concurrency / fit - 1) * one_place
    if rounds is not None:
        first, first_after = seen(1.0, decode, 1.0)[:2] if osl > 1 else (row(fit)[1], 0.0)
        ttft = (start(first, one_place, concurrency, places, spread) + (rounds - 1) * ttft) / rounds
        after += (first_after - after) / rounds
        each = decode + after / steps if osl > 1 else 0.0
    if after > 0:
        mixed = step_us(min(group * isl, room))
        share = after / (after + steps * mixed)
    elif fit > 1 and osl == 1:
        mixed, share = step_us(min(fit * isl, room)), 1.0
    tpot = each * steps / (osl - 1) if osl > 1 else math.nan
    rate = concurrency * osl / (ttft + steps * each)
    if rounds is not None:
        if concurrency > places:
            rate = min(rate, fit * osl / one_place)
        if osl > 1:
            rate = with_drain(rate, tpot, osl, concurrency, rounds, spread)
    return ClosedForm(ttft, tpot, decode, mixed, share, fit, rate)
