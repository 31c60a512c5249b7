"""Memory of one GPU of a plan: weights, workspace, reserve, and how many KV tokens fit."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Longs
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.config import GpuSpec
from fastroof.engines import KvMemory
from fastroof.engines.memory import DATASHEET_MEMORY
from fastroof.errors import BatchError
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution, weight_bytes
from fastroof.models.spec import stages_of
from fastroof.run.batch import int_array
from fastroof.units import ACTIVATION_BYTES

VISIBLE_SHARE: Final = 0.99
"""Share of the datasheet's memory that CUDA reports.

79.10 to 79.33 of 80 GiB on H100 and A100, 139.81 of 141 on H200, 44.42 of 44.99 on L40S, 94.97 of 95.59 on
RTX PRO 6000 (engine logs in bench_data/kv_room.csv): 0.987 to 0.994.
"""


class LeftForKv(NamedTuple):
    """A GPU's memory by use, bytes."""

    room_bytes: int
    activation_bytes: int
    context_bytes: int
    reserve_bytes: int


def left_for_kv(
    rule: KvMemory,
    gpu: GpuSpec,
    layout: Layout,
    weight_bytes: int,
    working_bytes: int,
    max_tokens: int,
    logits: int,
) -> LeftForKv:
    """Return what an engine leaves for KV cache."""
    gpu_bytes = gpu.hbm_bytes
    if rule.room == "datasheet":
        usable = int(gpu_bytes * rule.fraction)
        room = max(0, usable - weight_bytes - working_bytes)
        return LeftForKv(room, working_bytes, 0, gpu_bytes - usable)
    visible = int(gpu_bytes * VISIBLE_SHARE)
    context = rule.context_bytes(gpu.nvlink_bytes_per_s, layout.world_size)
    if rule.room == "static":
        base, fraction = visible - context, rule.fraction
        if not fraction and rule.reserve is not None:
            kept = rule.reserve.bytes(gpu_bytes, max_tokens, layout.tp, layout.pp, layout.dp)
            fraction = max(1 - kept / gpu_bytes, 0.0)
        budget = int(base * fraction)
        return LeftForKv(max(0, budget - weight_bytes), 0, context, gpu_bytes - context - budget)
    run = round(max(rule.activation * working_bytes, rule.sample_bytes * logits))
    taken = weight_bytes + run + context
    if rule.room == "all":
        budget = int(visible * rule.fraction)
        return LeftForKv(max(0, budget - taken), run, context, gpu_bytes - budget)
    room = int(max(0, visible - taken) * rule.fraction)
    return LeftForKv(room, run, context, max(0, gpu_bytes - taken - room))


class PlanMemory(NamedTuple):
    """One GPU's memory, in bytes.

    Attributes
    ----------
    weight_bytes : int
        Weights in their formats, with scales.
    kv_bytes_per_token : int
        KV cache of one token over all layers, within the window.
    activation_bytes : int
        Workspace of the largest step; 0 if the engine's reserve covers it.
    reserve_bytes : int
        Left unused, by default or by the engine's profile.
    max_kv_tokens : int
        Tokens that fit besides all that, in whole blocks; bytes if no layer caches tokens.
    window : int
        Tokens of a sequence that windowed layers keep; 0 without such layers.
    window_kv_bytes_per_token : int
        Part of ``kv_bytes_per_token`` in windowed layers.
    state_bytes_per_sequence : int
        State of recurrent layers.
    context_bytes : int
        CUDA contexts, collectives and graphs.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    reserve_bytes: int
    max_kv_tokens: int
    window: int = 0
    window_kv_bytes_per_token: int = 0
    state_bytes_per_sequence: int = 0
    context_bytes: int = 0

    def explain(self) -> dict[str, int]:
        """Return a GPU's memory by use, bytes: weights, workspace, context, reserve and KV cache."""
        return {
            "weights": self.weight_bytes,
            "workspace": self.activation_bytes,
            "context": self.context_bytes,
            "reserve": self.reserve_bytes,
            "kv_cache": self.max_kv_tokens * self.token_bytes,
        }

    @property
    def token_bytes(self) -> int:
        """Bytes of each of ``max_kv_tokens``: a token's, or 1 if no layer caches tokens."""
        return max(self.kv_bytes_per_token, 1)

    @property
    def window_share(self) -> float:
        """Share of a token's KV cache in windowed layers; 1 without a cache."""
        if not self.kv_bytes_per_token:
            return 1.0
        return self.window_kv_bytes_per_token / self.kv_bytes_per_token

    @property
    def state_tokens(self) -> float:
        """A sequence's state in tokens of KV cache."""
        return self.state_bytes_per_sequence / self.token_bytes

    @property
    def kv_room(self) -> tuple[int, int, int, int, int]:
        """Room for KV cache as loops count it, see :mod:`fastroof.compiled.serving_options`."""
        whole, within = self.kv_bytes_per_token, self.window_kv_bytes_per_token
        state = self.state_bytes_per_sequence
        common = math.gcd(whole, within, state) or 1
        parts = self.max_kv_tokens * self.token_bytes // common
        window = self.window if within else 0
        return parts, (whole - within) // common, within // common, window, state // common

    def kv_bytes(self, kv_len: Any) -> Any:
        """Return the KV cache and state of one sequence, bytes."""
        length = _lengths(kv_len, 0)
        beyond = np.maximum(length - self.window, 0) * self.window_kv_bytes_per_token
        held = length * self.kv_bytes_per_token - beyond + self.state_bytes_per_sequence
        return held if held.ndim else int(held)

    def held_tokens(self, kv_len: float) -> float:
        """Return the KV cache and state of one sequence, in the tokens that ``max_kv_tokens`` counts."""
        return kv_len - self.window_share * max(kv_len - self.window, 0.0) + self.state_tokens

    def tokens_beside_states(self, sequences: int) -> int:
        """Return how many of ``max_kv_tokens`` the states of some sequences leave; 0 if they do not fit."""
        room = self.max_kv_tokens * self.token_bytes - sequences * self.state_bytes_per_sequence
        return max(room, 0) // self.token_bytes

    def max_sequences(self, kv_len: Any) -> Any:
        """Return how many sequences of a length fit."""
        parts, whole, within, window, state = self.kv_room
        length = _lengths(kv_len, 1)
        fit = parts // (whole * length + within * np.minimum(length, window) + state)
        return fit if fit.ndim else int(fit)


def _lengths(kv_len: Any, least: int) -> Longs:
    """Lengths of sequences as int64, small enough that no product here overflows."""
    lengths = int_array("kv_len", kv_len)
    wrong = lengths[(lengths < least) | (lengths > MAX_KV_LEN)]
    if wrong.size:
        raise BatchError(f"kv_len must be from {least} to {MAX_KV_LEN:,}, got {wrong[0]}")
    return lengths.astype(np.int64)


def plan_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    max_tokens: int,
    *,
    stage: int | None = None,
    rule: KvMemory = DATASHEET_MEMORY,
    max_seqs: int = 1024,
) -> PlanMemory:
    """Return the memory of one GPU, in the pipeline stage with the least room."""
    if stage is not None or layout.pp == 1:
        return _gpu_memory(model, layout, gpu, execution, max_tokens, stage or 0, rule, max_seqs)
    parts = [
        _gpu_memory(one.model(model), layout, gpu, execution, max_tokens, one.number, rule, max_seqs)
        for one in stages_of(model, layout.pp)
    ]
    return _fullest(parts)


def _fullest(parts: list[PlanMemory]) -> PlanMemory:
    """Memory of the pipeline stage with room for the fewest tokens."""

    def tokens(part: PlanMemory) -> float:
        holds_any = part.kv_bytes_per_token or not part.max_kv_tokens
        return part.max_kv_tokens if holds_any else math.inf

    least = min(parts, key=lambda part: (tokens(part), -part.weight_bytes))
    room = least.max_kv_tokens * least.token_bytes
    rooms = ((part.max_kv_tokens * part.token_bytes, part.state_bytes_per_sequence) for part in parts)
    shares = [-(-held * room // other) for other, held in rooms if other]
    return least._replace(state_bytes_per_sequence=max([least.state_bytes_per_sequence, *shares]))


def _gpu_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    max_tokens: int,
    stage: int,
    rule: KvMemory,
    max_seqs: int,
) -> PlanMemory:
    """Memory of one stage's GPU."""
    hidden = model.hidden
    is_first, is_last = stage == 0, stage == layout.pp - 1
    vocab_rows = model.padded_vocab(layout.tp) // layout.tp
    linear_bytes = model.sum_layers(lambda kind: kind.weight_bytes(hidden, layout, execution))
    is_tied = model.tie_embeddings and execution.head_dtype == "bf16"
    other = hidden if is_last else 0
    if is_first:
        is_copied = execution.exchange.copies_embedding and layout.dp > 1
        other += (model.padded_vocab(1) if is_copied else vocab_rows) * hidden
    if is_last and not (is_tied and is_first):
        linear_bytes += weight_bytes({"lm_head": vocab_rows * hidden}, execution.of_head())
    other += int(model.sum_layers(lambda kind: kind.other_weights(hidden, layout)))
    held_bytes = int(linear_bytes) + other * ACTIVATION_BYTES
    kv_bytes = model.kv_bytes_per_token(layout, execution.kv_dtype)
    widest = max(kind.activation_width(hidden, layout) for kind in model.kinds)
    activation_bytes = max_tokens * (2 * hidden * model.residual_rows + widest) * ACTIVATION_BYTES
    seqs = rule.seqs(gpu.name, gpu.hbm_bytes, max_seqs)
    logits = seqs * model.padded_vocab(1) if is_last else 0
    left = left_for_kv(rule, gpu, layout, held_bytes, activation_bytes, max_tokens, logits)
    room = left.room_bytes // max(kv_bytes, 1)
    return PlanMemory(
        held_bytes,
        kv_bytes,
        left.activation_bytes,
        left.reserve_bytes,
        room // rule.block_tokens * rule.block_tokens if kv_bytes else room,
        model.window or 0,
        window_kv_bytes(model, layout, execution.kv_dtype),
        model.state_bytes(layout),
        left.context_bytes,
    )


def window_kv_bytes(model: ModelSpec, layout: Layout, kv_dtype: str) -> int:
    """Bytes of ``model.kv_bytes_per_token`` that belong to windowed layers."""
    return int(
        model.sum_layers(
            lambda kind: kind.kv_bytes_per_token(layout, kv_dtype) if kind.attention.window else 0
        )
    )
