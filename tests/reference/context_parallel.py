"""A naive prompt that several GPUs share: one of them, by plans in which none is shared."""

from __future__ import annotations

from typing import Any


def prompts_us(
    whole: Any,
    ranks: Any,
    tables: Any,
    cp: int,
    new_tokens: int,
    batch_size: int,
    kv_bytes: int,
    floor_us: float,
) -> float:
    """Time of equal prompts without a prefix, us.

    Parameters
    ----------
    whole : StepPlan
        Of a GPU that has a prompt alone.
    ranks : StepPlan
        Of GPUs with tokens of their own, as many as share the prompt.
    tables : Tables
        For the keys and values that are gathered.
    cp : int
        GPUs that share it.
    new_tokens, batch_size : int
        Of each prompt, and prompts; their tokens divide by cp.
    kv_bytes : int
        Of a token in bf16, of one layer, on one GPU.
    floor_us : float
        Least time of a layer's attention.
    """
    layers = whole.model.num_layers
    tokens = new_tokens * batch_size
    prompts = [(new_tokens, 0)] * batch_size
    (attention,) = (o for o in whole.explain(prompts).operators if o.role == "prefill_attention")
    (head,) = (o for o in whole.explain(prompts).operators if o.role == "lm_head")
    share = [(tokens // cp, 0)]
    rows = [o for o in ranks.explain(share).operators if o.role not in ("prefill_attention", "lm_head")]
    size = {"num_gpus": cp, "message_bytes": tokens // cp * kv_bytes}
    gathered = float(tables.lookup("collective", collective="all_gather", **size).latency_us)
    one = attention.total_us / layers
    return (
        sum(o.total_us for o in rows) + head.total_us + layers * (gathered + floor_us + (one - floor_us) / cp)
    )
