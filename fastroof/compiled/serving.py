"""The loop behind serving estimates: from a plan and closed loops of clients to their steady state.

The engine's order of steps selects one of two closed forms: prompts mixed with decodes
(fastroof.compiled.mixed_steps) or ahead of them (fastroof.compiled.prefill_first). The time of requests
outside the engine is added to both.
"""

from __future__ import annotations

from fastroof.arrays import Floats
from fastroof.compiled import serving_options as S
from fastroof.compiled.closed_runs import Clients
from fastroof.compiled.jit import jit
from fastroof.compiled.lockstep import others_with_requests, rules_of_load
from fastroof.compiled.mixed_steps import add_prefix, mixed_scenario
from fastroof.compiled.prefill_first import PromptSizes, prefill_first_scenario
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import ServingOptions, front_end_us, held_room
from fastroof.compiled.steps import PlanParts, open_plan
from fastroof.compiled.verification import Speculation, open_speculation


@jit
def _refused(
    isl: float, new: float, osl: float, concurrency: float, budget: float, options: ServingOptions
) -> tuple[int, float]:
    """Return the code of an invalid scenario, or 0, and the size it concerns."""
    if not (1.0 <= isl <= MAX_KV_LEN and 1.0 <= osl <= MAX_KV_LEN and 1.0 <= new <= isl):
        return S.CODE_SIZES, 0.0
    # with ranks and stages, a batch may have less than one client
    if not (1.0 - 1e-9 <= concurrency * options.batches <= MAX_KV_LEN and 1.0 <= budget <= MAX_KV_LEN):
        return S.CODE_SIZES, 0.0
    held = held_room(isl + osl, options)
    if held > options.max_kv_tokens or isl + osl > MAX_KV_LEN:
        return S.CODE_KV, held
    if not options.is_chunked and new > budget:
        return S.CODE_WHOLE_PROMPT, new
    return 0, 0.0


@jit
def _engine_scenario(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    loop: Clients,
    options: ServingOptions,
    out: Floats,
) -> tuple[int, float]:
    """Estimate what the engine's own clock shows. Returns a code and the size it concerns."""
    isl, new, osl, budget = sizes.isl, sizes.new, sizes.osl, sizes.budget
    room = options.max_kv_tokens
    if new < isl:
        # tokens found in the prefix cache take room, too
        output = options.osl_reserved * osl
        held = held_room(isl + output, options)
        new_held = held_room(new + output, options)
        room = max(room * (new_held / held), new + osl + options.state_tokens)
    rules = rules_of_load(loop.inside, options.rules)
    chosen = ServingOptions(
        room,
        options.max_num_seqs,
        options.osl_reserved,
        options.is_chunked,
        options.requests_per_client,
        options.front_end,
        options.window,
        options.window_share,
        options.state_tokens,
        options.is_prefill_first,
        options.length_spread,
        options.wait_steps,
        options.steps_met,
        rules,
        options.batches,
        options.pause_steps,
        options.is_closed,
    )
    with_requests = others_with_requests(loop.inside * options.batches, rules)
    clients = Clients(max(loop.inside, 1.0), max(loop.every, 1.0), loop.outside_us)
    if options.is_prefill_first:
        given = PromptSizes(isl, new, osl, clients.inside, budget)
        return prefill_first_scenario(
            arena, plan, speculation, given, clients.every, with_requests, chosen, out
        )
    code, needed = mixed_scenario(
        arena, plan, speculation, new, osl, clients, with_requests, budget, chosen, out
    )
    if code == 0 and new < isl:
        add_prefix(arena, plan, speculation, isl, new, osl, clients.inside, budget, chosen, out)
    return code, needed


@jit
def _add_front_end(out: Floats, front_us: float, burst_us: float) -> None:
    """Add the time outside the engine to an estimate of its own clock."""
    engine_us = out[S.REQUEST_US]
    out[S.TTFT_US] += front_us + burst_us
    out[S.REQUEST_US] = engine_us + (front_us + burst_us)
    out[S.TOKENS_PER_US] *= engine_us / out[S.REQUEST_US]


@jit
def _add_drain(out: Floats, clients: float, osl: float, options: ServingOptions) -> None:
    """Count the end of a run in its throughput: the longest outputs end last, next to fewer and fewer."""
    rounds, spread = options.requests_per_client, options.length_spread
    if rounds <= 0.0 or spread <= 0.0 or osl <= 1.0:
        return
    # the expected longest of so many outputs
    more = osl * (0.5 * spread / (1.0 - 0.5 * spread)) * (clients - 1.0) / (clients + 1.0)
    tokens = rounds * clients * osl
    out[S.TOKENS_PER_US] = tokens / (tokens / out[S.TOKENS_PER_US] + more * out[S.TPOT_US])


@jit
def _scenario(
    arena: Floats,
    plan: PlanParts,
    speculation: Speculation,
    sizes: PromptSizes,
    options: ServingOptions,
    out: Floats,
) -> tuple[int, float]:
    """Estimate what clients see: the engine with those of them who are in it, and the front end."""
    front_end = options.front_end
    every = sizes.concurrency
    alone_us = front_end_us(front_end, sizes.isl, 0.0, 0.0)
    code, needed = _engine_scenario(
        arena, plan, speculation, sizes, Clients(every, every, alone_us), options, out
    )
    if code != 0 or max(front_end.request_us, front_end.token_us, front_end.server_us) <= 0.0:
        return code, needed
    clients = max(sizes.concurrency, 1.0)
    # a rank has an API server of its own, pipeline stages share one
    served = clients * options.batches / options.rules.ranks
    front_us = front_end_us(front_end, sizes.isl, served, out[S.REQUEST_US])
    outside = front_us / (out[S.REQUEST_US] + front_us)
    if clients > 1.0 and outside > S.NOTICED:
        inside = max(clients * (1.0 - outside), 1.0)
        code, needed = _engine_scenario(
            arena, plan, speculation, sizes, Clients(inside, every, front_us), options, out
        )
        # all clients send requests at the rate of those in the engine
        out[S.TOKENS_PER_US] *= clients / inside
        front_us = front_end_us(front_end, sizes.isl, served, out[S.REQUEST_US])
    burst_us = 0.0
    if options.requests_per_client > 0.0:
        # the first requests of all clients share the API server
        burst_us = front_end.server_us * (served - 1.0) / options.requests_per_client
    _add_front_end(out, front_us, burst_us)
    return code, needed


@jit
def serving_estimates(
    arena: Floats,
    isl: Floats,
    new_tokens: Floats,
    osl: Floats,
    concurrency: Floats,
    max_num_batched_tokens: Floats,
    options: ServingOptions,
    out: Floats,
) -> tuple[int, int, float]:
    """Estimate scenarios into ``out``, a column each; rows are named in serving_options."""
    plan = open_plan(arena)
    speculation = open_speculation(arena, plan)
    for i in range(len(isl)):
        sizes = PromptSizes(isl[i], new_tokens[i], osl[i], concurrency[i], max_num_batched_tokens[i])
        code, needed = _refused(sizes.isl, sizes.new, sizes.osl, sizes.concurrency, sizes.budget, options)
        if code == 0:
            code, needed = _scenario(arena, plan, speculation, sizes, options, out[:, i])
            _add_drain(out[:, i], max(sizes.concurrency, 1.0), sizes.osl, options)
        if code != 0:
            return code, i, needed
    return 0, 0, 0.0
