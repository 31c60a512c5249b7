"""The loops that time steps: a plan's arena and a batch in, microseconds out.

    step_us = tokens[m] + logits[s] + L decode_attention(bs, mean kv) + L prefill_attention(...) + runtime

One thread owns a step and every loop adds its parts in this one order, so that a step is the same to
the last bit whichever entry point times it and however many threads there are.

A plan's arena is one float64 array: the header named below, then the sections it points to.
"""

from __future__ import annotations

from fastroof.compiled.grids import grid_flag, grid_value
from fastroof.compiled.jit import Flags, Floats, Ints, jit

__all__ = [
    "CODE_BATCH",
    "CODE_CONTEXT",
    "CODE_KV_LEN",
    "CODE_NEW_TOKENS",
    "CODE_OFFSETS",
    "CODE_SEQUENCES",
    "CODE_TOKENS",
    "HEADER_SIZE",
    "MAX_KV_LEN",
    "decode_steps_us",
    "prefill_steps_us",
    "ragged_step_parts",
    "ragged_steps_us",
]

# Header slots of a plan's arena.
MAGIC, FORMAT, MAX_TOKENS, MAX_SEQS, NUM_LAYERS, RUNTIME_US = 0, 1, 2, 3, 4, 5
PREFIX_PAIR_US, PREFIX_TOKEN_US = 6, 7
TOKENS_AT, LOGITS_AT, TOKENS_ORIGIN_AT, LOGITS_ORIGIN_AT = 8, 9, 10, 11
DECODE_AT, PREFILL_AT, ARENA_SIZE = 12, 13, 14
HEADER_SIZE = 16

MAX_KV_LEN = 2**28
"""Longest sequence that an entry point accepts, tokens."""

CODE_NEW_TOKENS = 1
CODE_CONTEXT = 2
CODE_TOKENS = 4
CODE_SEQUENCES = 8
CODE_KV_LEN = 16
CODE_BATCH = 32
CODE_OFFSETS = 64

MODELLED = 4


@jit
def _per_row_us(arena: Floats, num_tokens: int, num_seqs: int) -> float:
    """Per-token operators of the step and the LM head over its sequences, us."""
    tokens_us: float = arena[int(arena[TOKENS_AT]) + num_tokens]
    logits_us: float = arena[int(arena[LOGITS_AT]) + num_seqs]
    return tokens_us + logits_us


@jit
def _decode_attention_us(arena: Floats, num_decodes: int, kv_sum: int) -> float:
    """Decode attention of all layers, us: paged attention costs its total KV."""
    mean_kv = float(kv_sum) / float(num_decodes)
    layers: float = arena[NUM_LAYERS]
    return layers * grid_value(arena, int(arena[DECODE_AT]), float(num_decodes), mean_kv)


@jit
def _prefill_shape(new_sum: int, causal_pairs: int) -> tuple[float, float]:
    """Batch and q_len of equal chunks with these sums: the measured point when the chunks are equal."""
    q_len = 2.0 * float(causal_pairs) / float(new_sum) - 1.0
    return float(new_sum) / q_len, q_len


@jit
def _prefill_attention_us(
    arena: Floats, new_sum: int, causal_pairs: int, prefix_pairs: int, prefix_sum: int
) -> float:
    """Prefill attention of all layers, us: one call over all chunks, its floor paid once."""
    batch, q_len = _prefill_shape(new_sum, causal_pairs)
    own = grid_value(arena, int(arena[PREFILL_AT]), batch, q_len)
    prefix: float = arena[PREFIX_PAIR_US] * float(prefix_pairs) + arena[PREFIX_TOKEN_US] * float(prefix_sum)
    layers: float = arena[NUM_LAYERS]
    return layers * (own + prefix)


@jit
def decode_steps_us(arena: Floats, batch_size: Ints, kv_len: Ints, out: Floats) -> int:
    """Time steps of equal decodes: ``batch_size`` requests at ``kv_len`` each. Returns a code."""
    max_batch = int(min(arena[MAX_TOKENS], arena[MAX_SEQS]))
    code = 0
    for i in range(len(out)):
        batch = int(batch_size[i])
        kv = int(kv_len[i])
        if batch < 1:
            code |= CODE_BATCH
            batch = 1
        if batch > max_batch:
            code |= CODE_TOKENS
            batch = max_batch
        if kv < 1 or kv > MAX_KV_LEN:
            code |= CODE_KV_LEN
            kv = 1
        base = _per_row_us(arena, batch, batch)
        out[i] = base + _decode_attention_us(arena, batch, batch * kv) + arena[RUNTIME_US]
    return code


@jit
def prefill_steps_us(
    arena: Floats, new_tokens: Ints, context_len: Ints, batch_size: Ints, out: Floats
) -> int:
    """Time steps of equal chunks: ``batch_size`` requests of new tokens after a context. Returns a code."""
    max_tokens = int(arena[MAX_TOKENS])
    max_seqs = int(arena[MAX_SEQS])
    code = 0
    for i in range(len(out)):
        batch = int(batch_size[i])
        new = int(new_tokens[i])
        context = int(context_len[i])
        if batch < 1:
            code |= CODE_BATCH
            batch = 1
        if batch > max_seqs:
            code |= CODE_SEQUENCES
            batch = max_seqs
        if new < 1:
            code |= CODE_NEW_TOKENS
            new = 1
        if context < 0:
            code |= CODE_CONTEXT
            context = 0
        if context > MAX_KV_LEN - new:
            code |= CODE_KV_LEN
            context = 0
        if new > max_tokens or batch * new > max_tokens:
            code |= CODE_TOKENS
            batch = 1
            new = 1
        tokens = batch * new
        base = _per_row_us(arena, tokens, batch)
        if new == 1 and context > 0:
            attention = _decode_attention_us(arena, batch, batch * (context + 1))
        else:
            pairs = batch * (new * (new + 1) // 2)
            attention = _prefill_attention_us(arena, tokens, pairs, tokens * context, batch * context)
        out[i] = base + attention + arena[RUNTIME_US]
    return code


@jit
def _ragged_sums(
    new_tokens: Ints, context_len: Ints, start: int, stop: int, max_tokens: int
) -> tuple[int, int, int, int, int, int, int]:
    """Integer sums over one step's requests, and a code: order does not matter to them."""
    code = 0
    num_decodes = 0
    kv_sum = 0
    new_sum = 0
    causal_pairs = 0
    prefix_pairs = 0
    prefix_sum = 0
    for r in range(start, stop):
        new = int(new_tokens[r])
        context = int(context_len[r])
        if new < 1:
            code |= CODE_NEW_TOKENS
            new = 1
        if context < 0:
            code |= CODE_CONTEXT
            context = 0
        if context > MAX_KV_LEN - new:
            code |= CODE_KV_LEN
            context = 0
        if new > max_tokens:
            code |= CODE_TOKENS
            new = 1
        if new == 1 and context > 0:
            num_decodes += 1
            kv_sum += context + 1
        else:
            new_sum += new
            causal_pairs += new * (new + 1) // 2
            prefix_pairs += new * context
            prefix_sum += context
    return num_decodes, kv_sum, new_sum, causal_pairs, prefix_pairs, prefix_sum, code


@jit
def _step_bounds(offsets: Ints, i: int, num_requests: int) -> tuple[int, int, int]:
    """First and last request of step i, clamped into the arrays, and a code."""
    start = int(offsets[i])
    stop = int(offsets[i + 1])
    if start < 0 or stop < start or stop > num_requests:
        return 0, 0, CODE_OFFSETS
    return start, stop, 0


@jit
def _clamped_rows(arena: Floats, num_requests: int, num_decodes: int, new_sum: int) -> tuple[int, int, int]:
    """Tokens and sequences of a step, clamped to what the plan holds, and a code."""
    code = 0
    tokens = num_decodes + new_sum
    if tokens > arena[MAX_TOKENS]:
        code |= CODE_TOKENS
        tokens = int(arena[MAX_TOKENS])
    seqs = num_requests
    if seqs > arena[MAX_SEQS]:
        code |= CODE_SEQUENCES
        seqs = int(arena[MAX_SEQS])
    return tokens, seqs, code


@jit
def ragged_steps_us(arena: Floats, new_tokens: Ints, context_len: Ints, offsets: Ints, out: Floats) -> int:
    """Time ragged steps, CSR: step i holds requests ``offsets[i]:offsets[i + 1]``. Returns a code."""
    max_tokens = int(arena[MAX_TOKENS])
    code = 0
    for i in range(len(out)):
        # one function for this and its twin below, returning all nine values, made ragged steps 20 % slower
        start, stop, bad = _step_bounds(offsets, i, len(new_tokens))
        decodes, kv_sum, new_sum, pairs, prefix_pairs, prefix_sum, met = _ragged_sums(
            new_tokens, context_len, start, stop, max_tokens
        )
        tokens, seqs, over = _clamped_rows(arena, stop - start, decodes, new_sum)
        code |= bad | met | over
        if seqs == 0:
            out[i] = 0.0
            continue
        total = _per_row_us(arena, tokens, seqs)
        if decodes > 0:
            total += _decode_attention_us(arena, decodes, kv_sum)
        if new_sum > 0:
            total += _prefill_attention_us(arena, new_sum, pairs, prefix_pairs, prefix_sum)
        out[i] = total + arena[RUNTIME_US]
    return code


@jit
def ragged_step_parts(
    arena: Floats,
    new_tokens: Ints,
    context_len: Ints,
    offsets: Ints,
    tokens_us: Floats,
    logits_us: Floats,
    decode_us: Floats,
    prefill_us: Floats,
    runtime_us: Floats,
    out: Floats,
    origin: Flags,
) -> int:
    """Time ragged steps part by part, with the origin of each step. Returns a code."""
    max_tokens = int(arena[MAX_TOKENS])
    code = 0
    for i in range(len(out)):
        start, stop, bad = _step_bounds(offsets, i, len(new_tokens))
        decodes, kv_sum, new_sum, pairs, prefix_pairs, prefix_sum, met = _ragged_sums(
            new_tokens, context_len, start, stop, max_tokens
        )
        tokens, seqs, over = _clamped_rows(arena, stop - start, decodes, new_sum)
        code |= bad | met | over
        tokens_us[i] = 0.0
        logits_us[i] = 0.0
        decode_us[i] = 0.0
        prefill_us[i] = 0.0
        runtime_us[i] = 0.0
        out[i] = 0.0
        origin[i] = 0
        if seqs == 0:
            continue
        tokens_us[i] = arena[int(arena[TOKENS_AT]) + tokens]
        logits_us[i] = arena[int(arena[LOGITS_AT]) + seqs]
        made = int(
            max(arena[int(arena[TOKENS_ORIGIN_AT]) + tokens], arena[int(arena[LOGITS_ORIGIN_AT]) + seqs])
        )
        total = tokens_us[i] + logits_us[i]
        if decodes > 0:
            decode_us[i] = _decode_attention_us(arena, decodes, kv_sum)
            mean_kv = float(kv_sum) / float(decodes)
            made = max(made, grid_flag(arena, int(arena[DECODE_AT]), float(decodes), mean_kv))
            total += decode_us[i]
        if new_sum > 0:
            prefill_us[i] = _prefill_attention_us(arena, new_sum, pairs, prefix_pairs, prefix_sum)
            batch, q_len = _prefill_shape(new_sum, pairs)
            made = max(made, grid_flag(arena, int(arena[PREFILL_AT]), batch, q_len))
            if prefix_sum > 0:
                made = MODELLED
            total += prefill_us[i]
        runtime_us[i] = arena[RUNTIME_US]
        out[i] = total + arena[RUNTIME_US]
        origin[i] = made
    return code
