"""A plan's times as the profile of LLMServingSim v1.0.0, which later versions call v0: integer nanoseconds.

That release and its forks read, below ``llm_profile/perf_models``::

    <hardware>/<model>/tp<N>/
        layers.csv                                  layer_name,input,kv_cache,tp_size,latency(ns)
        predictions/attn_prefill_predictions.csv    kv_cache_size,prefill_chunk_size,prediction
        predictions/attn_decode_predictions.csv     batch_size,kv_cache_size,prediction

A step is ``embedding``, then every layer's ``input_layernorm``, ``q_proj``, ``k_proj``, ``v_proj``, ``rope``,
attention, ``o_proj``, ``post_layernorm``, ``gate_proj``, ``up_proj``, ``act_fn`` and ``down_proj``, then
``final_layernorm`` and ``lm_head``: a row each, whose ``input`` is the step's tokens, and for ``lm_head`` its
requests. Nothing is interpolated: a key without a row ends the simulation. Attention is up to two rows:

* decodes: their number, and the whole part of their mean kv_len, up to the next multiple of 64;
* prompts: the context of all, up to the next multiple of 64, which its scheduler leaves at 0 always, and the
  root of the sum of new_tokens squared, over decodes too, rounded, up to the next multiple of 32.

Sources: casys-kaist/LLMServingSim, inference_serving/trace_generator.py, scheduler.py and request.py at
9e3f0ece7cab1393f176a74d38601ef07103f2d3; its profiler, llmservingsim/profiler/v0 at
4a23e9f137dd83f91f5d2d449dd47ca51dd336c4; profiler/v0/README.md at
7ab44bcefbc61b80193de030d48651ca5ea0970a (the name, and that current versions read it no more).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.backends.dense_plans import check_decodes_alone
from fastroof.backends.llmservingsim import (
    Bundle,
    checked_plans,
    folder_names,
    others_us,
    profile_folder,
    write_rows,
)
from fastroof.compiled import steps
from fastroof.errors import BackendError
from fastroof.operators.calls import Role
from fastroof.units import NS_PER_US

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["LAYERS", "LONGEST", "export_llmservingsim_v0"]

LAYERS: Final[dict[tuple[str, ...], tuple[Role, ...]]] = {
    ("embedding",): ("embedding",),
    ("input_layernorm",): ("attention_norm",),
    ("q_proj", "k_proj", "v_proj"): ("qkv_quantise", "qkv"),
    ("rope",): ("qk_norm", "rope", "kv_write"),
    ("o_proj",): ("o_quantise", "o"),
    ("post_layernorm",): ("mlp_norm",),
    ("gate_proj", "up_proj"): ("gate_up_quantise", "gate_up"),
    ("act_fn",): ("activation",),
    ("down_proj",): ("down_quantise", "down"),
    ("final_layernorm",): ("final_norm",),
    ("lm_head",): ("lm_head",),
}
"""The simulator's layers, and the roles of the plan's calls that they stand for together.

Layers that a plan fuses share its time by the width of their outputs, and add up to it. The KV write is part
of ``rope``, which is looked up by tokens, as attention is not. What the runtime adds to a step and its
sequences is part of ``lm_head``, which alone runs once a step and knows its requests.
"""

LONGEST: Final = 16_384
"""Tokens of the longest request, unless another is asked for."""

KV_STEP: Final = 64
CHUNK_STEP: Final = 32


def export_llmservingsim_v0(
    plans: StepPlan | Sequence[StepPlan],
    output: str | Path,
    *,
    hardware: str | None = None,
    model: str | None = None,
    longest: int | None = None,
) -> Bundle:
    """Write plans of one model as a profile that LLMServingSim v1.0.0 simulates, whole or not at all.

    Parameters
    ----------
    plans : StepPlan or sequence of StepPlan
        One a tensor-parallel size, otherwise alike. Their ``max_tokens`` and ``max_seqs`` are the most that
        the simulator may be run with: its ``--max-num-batched-tokens`` and ``--max-batch``.
    output : str or Path
        The simulator's ``llm_profile/perf_models`` folder; made where it does not exist.
    hardware : str, optional
        What cluster configurations call the GPU; by default its name in capitals.
    model : str, optional
        Which of the simulator's ``model_config`` it is; by default the preset's first Hugging Face name.
    longest : int, optional
        Tokens that a request may reach, prompt and output; by default :data:`LONGEST`, or as many as the
        model takes.

    Returns
    -------
    Bundle
        The model's folder, and how many rows it holds.

    Raises
    ------
    BackendError
        If the plans are of several models, or two of one size; if the model takes no such requests; if the
        hardware would be a TPU to the simulator; if the folder exists or cannot be written.

    Notes
    -----
    A row of attention answers for 64 lengths, or 32: it holds the time at their middle, which halves the
    error of the last, where the simulator's own profiler measures. A row of prompts is one prompt of that
    many tokens, and holds what the runtime adds to prompts; of a runtime that holds steps with prompts at
    a floor, that is what a prompt alone lacks, and too much for a step with decodes. The rows named
    ``attn`` are read where ``--enable-attn-prediction`` finds no predictor, and none is written.
    """
    listed = checked_plans(plans)
    for plan in listed:
        check_decodes_alone(plan, "LLMServingSim v1.0.0")
    names = folder_names(listed[0], hardware, model)
    if "TPU" in names["hardware"] or names["hardware"].lower().startswith("tpu"):
        raise BackendError(
            f"hardware {names['hardware']!r} is a TPU to the simulator, which reads other rows"
        )
    most = listed[0].model.max_position
    longest = min(LONGEST, most) if longest is None else longest
    if not 1 <= longest <= most:
        raise BackendError(f"{listed[0].model.name} takes requests of 1 to {most} tokens, not {longest}")
    output = Path(output)
    with profile_folder(output, names) as building:
        rows = sum(_write_tables(plan, longest, building / f"tp{plan.tp}") for plan in listed)
    return Bundle(output.joinpath(*names.values()), rows)


def _write_tables(plan: StepPlan, longest: int, folder: Path) -> int:
    (folder / "predictions").mkdir(parents=True)
    prompts, decodes = (
        folder / "predictions" / f"attn_{kind}_predictions.csv" for kind in ("prefill", "decode")
    )
    return (
        write_rows(folder / "layers.csv", "layer_name,input,kv_cache,tp_size,latency(ns)", _layers(plan))
        + write_rows(prompts, "kv_cache_size,prefill_chunk_size,prediction", _prefill_rows(plan, longest))
        + write_rows(decodes, "batch_size,kv_cache_size,prediction", _decode_rows(plan, longest))
    )


def _layers(plan: StepPlan) -> Iterator[str]:
    curves = {curve.operator.role: curve for curve in plan.row_curves}
    tokens = np.arange(1, plan.max_tokens + 1)
    for layers, roles in LAYERS.items():
        inputs = tokens
        latency_us: Floats = np.zeros(len(tokens))
        if layers == ("lm_head",):
            inputs = tokens[: plan.max_seqs]
            added_us, sequence_us = plan.arena[[steps.STEP_US, steps.SEQUENCE_US]].tolist()
            latency_us = added_us + sequence_us * inputs.astype(np.float64)
        for part in (curves[role] for role in roles if role in curves):
            latency_us = latency_us + np.interp(inputs, part.axis, part.value)
        whole_ns = _whole_ns(latency_us)
        for layer, share_ns in zip(layers, _shared(whole_ns, _widths(plan, layers)), strict=True):
            yield from _layer_rows(plan, layer, inputs, share_ns)
    attention_ns = _attention_ns(plan, plan.prefill_us(tokens), tokens, 1)
    yield from _layer_rows(plan, "attn", tokens, attention_ns)


def _layer_rows(plan: StepPlan, layer: str, inputs: Longs, latency_ns: Longs) -> Iterator[str]:
    pairs = zip(inputs.tolist(), latency_ns.tolist(), strict=True)
    return (f"{layer},{rows},0,{plan.tp},{latency}" for rows, latency in pairs)


def _widths(plan: StepPlan, layers: tuple[str, ...]) -> tuple[int, ...]:
    """Outputs of layers that a plan fuses, on one GPU, in some unit."""
    if layers[0] == "q_proj":
        heads = plan.heads
        return heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads
    return (1,) * len(layers)


def _shared(whole_ns: Longs, widths: tuple[int, ...]) -> list[Longs]:
    """A time split by widths, without losing a nanosecond: the first takes what the others leave."""
    others = [whole_ns * width // sum(widths) for width in widths[1:]]
    return [whole_ns - sum(others), *others]


def _prefill_rows(plan: StepPlan, longest: int) -> Iterator[str]:
    """Rows of one prompt that ends within the model's positions, after every context."""
    chunks, tokens = _bins(CHUNK_STEP, plan.max_tokens, CHUNK_STEP // 2)
    contexts, before = _bins(KV_STEP, longest, KV_STEP // 2)
    contexts, before = np.append(0, contexts), np.append(0, before)
    room = np.maximum(plan.model.max_position - tokens, 0)
    step_us = plan.prefill_us(tokens, np.minimum(before[:, np.newaxis], room))
    attention_ns = _attention_ns(plan, step_us, tokens, 1)
    for context, row_ns in zip(contexts.tolist(), attention_ns.tolist(), strict=True):
        yield from (f"{context},{chunk},{ns}" for chunk, ns in zip(chunks.tolist(), row_ns, strict=True))


def _decode_rows(plan: StepPlan, longest: int) -> Iterator[str]:
    """Rows of every number of decodes: a mean that is cut to a whole number lies half a token higher."""
    counts = np.arange(1, min(plan.max_seqs, plan.max_tokens) + 1)[:, np.newaxis]
    lengths, kv_len = _bins(KV_STEP, longest, KV_STEP // 2 - 1)
    attention_ns = _attention_ns(plan, plan.decode_us(counts, kv_len), counts, counts)
    for count, row_ns in enumerate(attention_ns.tolist(), 1):
        yield from (f"{count},{length},{ns}" for length, ns in zip(lengths.tolist(), row_ns, strict=True))


def _bins(step: int, last: int, back: int) -> tuple[Longs, Longs]:
    """Multiples of a step up to the one that ``last`` is looked up at, and a size ``back`` before each."""
    keys = np.arange(step, last + step, step)
    return keys, np.minimum(keys - back, last)


def _attention_ns(plan: StepPlan, step_us: Floats, tokens: int | Longs, sequences: int | Longs) -> Longs:
    """What steps take besides every other operator, ns a layer: attention, and what is added to prompts."""
    return _whole_ns((step_us - others_us(plan, tokens, sequences)) / plan.model.num_layers)


def _whole_ns(latency_us: Floats) -> Longs:
    whole: Longs = np.rint(latency_us * NS_PER_US).astype(np.int64)
    return whole
