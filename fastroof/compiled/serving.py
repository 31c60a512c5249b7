"""The loop behind serving estimates: from a plan and closed loops of clients to their steady state.

The engine's order of steps selects one of two closed forms: prompts mixed with decodes
(fastroof.compiled.mixed_steps) or ahead of them (fastroof.compiled.prefill_first).
"""

from __future__ import annotations

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit
from fastroof.compiled.lockstep import others_with_requests
from fastroof.compiled.mixed_steps import add_prefix, mixed_scenario
from fastroof.compiled.prefill_first import PromptSizes, prefill_first_scenario
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import (
    CODE_KV,
    CODE_SIZES,
    CODE_WHOLE_PROMPT,
    ServingOptions,
    held_room,
)
from fastroof.compiled.steps import open_plan
from fastroof.compiled.verification import open_speculation


@jit
def _refused(
    isl: float, new: float, osl: float, concurrency: float, budget: float, options: ServingOptions
) -> tuple[int, float]:
    """Return the code of an invalid scenario, or 0, and the size it concerns."""
    if not (1.0 <= isl <= MAX_KV_LEN and 1.0 <= osl <= MAX_KV_LEN and 1.0 <= new <= isl):
        return CODE_SIZES, 0.0
    # with ranks and stages, a batch may have less than one client
    if not (1.0 - 1e-9 <= concurrency * options.batches <= MAX_KV_LEN and 1.0 <= budget <= MAX_KV_LEN):
        return CODE_SIZES, 0.0
    held = held_room(isl + osl, options)
    if held > options.max_kv_tokens or isl + osl > MAX_KV_LEN:
        return CODE_KV, held
    if not options.is_chunked and new > budget:
        return CODE_WHOLE_PROMPT, new
    return 0, 0.0


@jit
def serving_estimates(
    arena: Floats,
    isl: Floats,
    new_tokens: Floats,
    osl: Floats,
    concurrency: Floats,
    max_batched_tokens: Floats,
    options: ServingOptions,
    out: Floats,
) -> tuple[int, int, float]:
    """Estimate scenarios into ``out``, a column each; rows are named in serving_options."""
    plan = open_plan(arena)
    speculation = open_speculation(arena, plan)
    for i in range(len(isl)):
        new = new_tokens[i]
        clients = concurrency[i]
        budget = max_batched_tokens[i]
        code, needed = _refused(isl[i], new, osl[i], clients, budget, options)
        if code != 0:
            return code, i, needed
        room = options.max_kv_tokens
        if new < isl[i]:
            # tokens found in the prefix cache take room, too
            output = options.osl_reserved * osl[i]
            held = held_room(isl[i] + output, options)
            new_held = held_room(new + output, options)
            room = max(room * (new_held / held), new + osl[i] + options.state_tokens)
        chosen = ServingOptions(
            room,
            options.max_seqs,
            options.osl_reserved,
            options.is_chunked,
            options.requests_per_client,
            options.frontend_us_per_token,
            options.window,
            options.window_share,
            options.state_tokens,
            options.is_prefill_first,
            options.length_spread,
            options.wait_steps,
            options.steps_met,
            options.rules,
            options.batches,
            options.pause_steps,
        )
        with_requests = others_with_requests(clients * options.batches, options.rules)
        clients = max(clients, 1.0)
        if options.is_prefill_first:
            sizes = PromptSizes(isl[i], new, osl[i], clients, budget)
            code, needed = prefill_first_scenario(
                arena, plan, speculation, sizes, with_requests, chosen, out[:, i]
            )
            if code != 0:
                return code, i, needed
            continue
        code, needed = mixed_scenario(
            arena, plan, speculation, new, osl[i], clients, with_requests, budget, chosen, out[:, i]
        )
        if code == 0 and new < isl[i]:
            add_prefix(
                arena,
                plan,
                speculation,
                isl[i],
                new,
                osl[i],
                clients,
                budget,
                chosen,
                out[:, i],
            )
        if code != 0:
            return code, i, needed
    return 0, 0, 0.0
