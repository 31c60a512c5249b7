"""Energy of serving: joules per output token of mean steps, and of the time without any.

GPUs of all ranks that step together draw the power of busy ones (:func:`fastroof.plan.energy.busy_watts`)
while any of their ``n`` clients has a request in the engine. They are idle while all clients are in the front
end: each is there for a share ``f`` of a request, all for ``f**n``, or ``f`` if requests of one length end
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import check_flag
from fastroof.errors import BatchError
from fastroof.plan.calls import rank_rules
from fastroof.plan.energy import BusyLoad, busy_watts, check_power, gpus_of_a_batch
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


class MeanLoad(NamedTuple):
    """Loads of an engine by their mean steps: arrays of one length.

    Clients are those of a rank and a batch in its pipeline stages; below one, some ranks have none.
    """

    decodes: Floats
    prefill_tokens: Floats
    kv_len: Floats
    isl: Floats
    new_tokens: Floats
    osl: Floats
    budget: Floats
    clients: Floats
    request_us: Floats
    tokens_per_s_per_gpu: Floats


def check_energy(with_energy: bool, plan: StepPlan, tokens: int) -> None:
    """Refuse the energy of steps that verify draft tokens, and of a GPU whose power is unknown."""
    check_flag("with_energy", with_energy, BatchError)
    if with_energy and tokens > 1:
        raise BatchError("with_energy requires speculation=None: the power of drafts is unknown")
    if with_energy:
        check_power(plan.gpu, BatchError)


def joules_per_token(
    plan: StepPlan, load: MeanLoad, is_prefill_first: bool, is_one_length: bool = False
) -> Floats:
    """Energy of all GPUs per output token, J, idle time included."""
    # clients of all ranks that step together
    clients = load.clients * rank_rules(plan).together
    front_us = plan.profile.front_end.alone_us(load.isl)
    # requests of one length end together, and their clients are in the front end together
    apart = 1.0 if is_one_length else np.maximum(clients, 1.0)
    outside = np.clip(front_us / load.request_us, 0.0, 1.0) ** apart
    busy = (1.0 - outside) * np.minimum(clients, 1.0)
    tokens_per_us = load.tokens_per_s_per_gpu * gpus_of_a_batch(plan) / US_PER_S
    # mean steps are those that a decode sees: a client's own prompt is not among them
    alone = load.new_tokens / np.ceil(load.new_tokens / load.budget)
    prompt_tokens = np.where(load.prefill_tokens > 0.0, load.prefill_tokens, alone)
    mean = BusyLoad(
        decodes=load.decodes,
        beside=np.maximum(load.decodes - 1.0, 0.0) * (not is_prefill_first),
        kv_len=load.kv_len,
        prompt_tokens=prompt_tokens,
        new_tokens=load.new_tokens,
        prompt_steps_per_us=tokens_per_us / load.osl * load.new_tokens / prompt_tokens / busy,
    )
    watts = busy * busy_watts(plan, mean) + (1.0 - busy) * plan.gpu.idle_w
    return np.asarray(watts / load.tokens_per_s_per_gpu)
