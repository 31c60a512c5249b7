"""Energy of serving: joules per output token of mean steps, and of the time without any.

A GPU of a busy engine draws the mean power of its decode-only and mixed steps, weighted by their time. It is
idle while all clients are in the front end: each is there for a share ``f`` of a request, all of ``n`` for
``f**n``. ``watts / (tokens/s per GPU)`` are the joules of an output token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import check_flag
from fastroof.errors import BatchError
from fastroof.plan.energy import MeanSteps, check_power, mean_watts

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


class MeanLoad(NamedTuple):
    """Loads of an engine by their mean steps: arrays of one length; clients and times are of one engine."""

    decode_us: Floats
    mixed_us: Floats
    mixed_share: Floats
    decodes: Floats
    prefill_tokens: Floats
    prompts: Floats
    kv_len: Floats
    isl: Floats
    new_tokens: Floats
    budget: Floats
    clients: Floats
    ttft_us: Floats
    request_us: Floats
    tokens_per_s_per_gpu: Floats


def check_energy(with_energy: bool, plan: StepPlan, tokens: int) -> None:
    """Refuse the energy of steps that verify draft tokens, and of a GPU whose power is unknown."""
    check_flag("with_energy", with_energy, BatchError)
    if with_energy and tokens > 1:
        raise BatchError("with_energy requires speculation=None: the power of drafts is unknown")
    if with_energy:
        check_power(plan.gpu, BatchError)


def load_watts(plan: StepPlan, load: MeanLoad, is_prefill_first: bool) -> Floats:
    """Mean power of a GPU under loads, W, idle time included."""
    front_us = plan.profile.front_end.alone_us(load.isl)
    nothing = np.zeros(len(load.decodes))
    # one client with an output of one token: all steps are chunks of its prompt
    is_single = (load.decode_us == 0.0) & (load.mixed_us == 0.0)
    own_us = np.maximum(load.ttft_us - front_us, 1.0) / np.ceil(load.new_tokens / load.budget)
    mixed_us = np.where(is_single, own_us, load.mixed_us)
    prompt_tokens = np.where(is_single, np.minimum(load.new_tokens, load.budget), load.prefill_tokens)
    share = np.where(is_single, 1.0, load.mixed_share)
    decodes = np.where(load.decode_us > 0.0, np.maximum(load.decodes, 1.0), 0.0)
    decode_only = MeanSteps(decodes, load.kv_len, nothing, nothing, nothing)
    beside = nothing if is_prefill_first else np.where(is_single, 0.0, load.decodes)
    q_len = np.maximum(np.minimum(load.new_tokens, prompt_tokens), 1.0)
    mixed = MeanSteps(beside, load.kv_len, prompt_tokens, np.maximum(load.prompts, 1.0), q_len)
    decode_us, mixed_us = (1.0 - share) * load.decode_us, share * mixed_us
    busy_uj = decode_us * mean_watts(plan, decode_only, load.decode_us)
    busy_uj = busy_uj + mixed_us * mean_watts(plan, mixed, np.where(is_single, own_us, load.mixed_us))
    busy_watts = busy_uj / np.maximum(decode_us + mixed_us, np.finfo(np.float64).tiny)
    outside = np.clip(front_us / load.request_us, 0.0, 1.0) ** np.maximum(load.clients, 1.0)
    busy = (1.0 - outside) * np.minimum(load.clients, 1.0)
    return np.asarray(busy * busy_watts + (1.0 - busy) * plan.gpu.idle_w)


def joules_per_token(plan: StepPlan, load: MeanLoad, is_prefill_first: bool) -> Floats:
    """Energy of all GPUs per output token, J."""
    return load_watts(plan, load, is_prefill_first) / load.tokens_per_s_per_gpu
