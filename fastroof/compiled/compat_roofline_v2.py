"""Roofline V2's lookups and steps, in its order of operations: answers are identical to the last bit.

Tables are blocks of one float64 arena, and a model's constants another array, with the slots named below:
counting references of many small arrays would cost more than the arithmetic.

Every axis has one extra node with the last node's value, so that an x clamped to the measured range always
has a cell: at a node the weight is 0 and the node's value comes back unchanged.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats, Ints
from fastroof.compiled.guides import bracket
from fastroof.compiled.jit import jit

LEAST_MFU = 1e-4
"""An interpolated MFU below it counts as a hole; the nearest row above it is used instead."""

FIRST_BUCKET = 512
NUM_BUCKETS = 8
"""Prefill lengths are rounded up to 512, 1024, .. 65536."""

MAX_SEQUENCE = 2**31
"""Largest progress or number of new tokens of a request."""

CODE_OFFSETS = 1
CODE_PROGRESS = 2
CODE_NEW_TOKENS = 4

# A curve's block: nodes, rows, then the padded axis, the MFU of its nodes, and x and MFU of the rows
# that are no holes, in file order.
CURVE_HEADER = 2

# A grid's block: batch nodes, KV nodes, rows, then both padded axes, the cells (a row a batch size),
# and batch size, KV length and MFU of the rows that are no holes, in file order.
GRID_HEADER = 3

# Slots of a model's constants. The four GEMMs are q (and o), k (and v), gate (and up), down; the blocks'
# places are in the arena.
PEAK_FLOPS_PER_S, BANDWIDTH_BYTES_PER_S, TP, OVERHEAD_S = 0, 1, 2, 3
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 5, 6, 7, 8
BYTES_PER_PARAM, WEIGHT_BYTES, DECODE_AT = 9, 10, 11
GEMM_K, GEMM_N, GEMM_MEMORY_S, GEMM_AT = 12, 16, 20, 24
BUCKET_MFU = 28
MODEL_SIZE = BUCKET_MFU + NUM_BUCKETS

# tuples, not NamedTuples: they are made for every call, and a NamedTuple would cost 2 us each
GemmPairs = tuple[Floats, Floats, Ints]
"""The measured k and n, and where the arena has each pair's curve over m."""
PrefillRequests = tuple[Ints, Ints, Ints]
"""Progress and new tokens of requests that prefill, and offsets: step i has offsets[i] to offsets[i + 1]."""
DecodeRequests = tuple[Ints, Ints]
"""Progress of requests that decode, and offsets."""
StepSeconds = tuple[Floats, Floats, Floats, Floats]
"""Components of steps: compute and memory of prefill, then of decode."""


@jit
def _clamped(arena: Floats, start: int, stop: int, x: float) -> float:
    """Clamp x to the measured range of a padded axis."""
    low: float = arena[start]
    high: float = arena[stop - 2]
    return min(max(x, low), high)


@jit
def _curve_mfu(arena: Floats, at: int, x: float) -> float:
    """Return a curve's MFU at x; in a hole that of the nearest row, of a tie the first in the file."""
    nodes = int(arena[at])
    start = at + CURVE_HEADER
    held = _clamped(arena, start, start + nodes, x)
    i = bracket(arena, start, start + nodes, held)
    t = (held - arena[i]) / (arena[i + 1] - arena[i])
    low: float = arena[i + nodes]
    mfu: float = low + (arena[i + nodes + 1] - low) * t
    return mfu if mfu >= LEAST_MFU else _curve_hole_mfu(arena, at, x)


@jit
def _curve_hole_mfu(arena: Floats, at: int, x: float) -> float:
    rows = int(arena[at + 1])
    first = at + CURVE_HEADER + 2 * int(arena[at])
    mfu: float = LEAST_MFU
    least = math.inf
    for r in range(first, first + rows):
        distance = abs(arena[r] - x)
        if distance < least:
            least = distance
            mfu = arena[r + rows]
    return mfu


@jit
def curve_mfus(arena: Floats, at: Ints, x: Floats, out: Floats) -> None:
    """Look up every x in the curve at its place."""
    for p in range(len(out)):
        out[p] = _curve_mfu(arena, at[p], x[p])


@jit
def _gemm_pair(pairs: GemmPairs, k: float, n: float) -> int:
    """Nearest measured (k, n) that holds the wanted one; the largest where none does."""
    pair_k, pair_n, _ = pairs
    best = -1
    least = math.inf
    largest = 0
    size = -1.0
    for c in range(len(pair_k)):
        own = pair_k[c] * pair_k[c] + pair_n[c] * pair_n[c]
        if own > size:
            size = own
            largest = c
        if pair_k[c] >= k and pair_n[c] >= n:
            dk = pair_k[c] - k
            dn = pair_n[c] - n
            distance = dk * dk + dn * dn
            if distance < least:
                least = distance
                best = c
    return best if best >= 0 else largest


@jit
def gemm_mfus(
    arena: Floats, pairs: GemmPairs, m: Floats, k: Floats, n: Floats, at: Ints, out: Floats
) -> None:
    """Look up every (m, k, n); ``at`` gets the curve that was used."""
    for p in range(len(out)):
        at[p] = pairs[2][_gemm_pair(pairs, k[p], n[p])]
        out[p] = _curve_mfu(arena, at[p], m[p])


@jit
def _batch_cell(arena: Floats, at: int, batch_size: float) -> tuple[int, float]:
    """Return where the cells of the batch size below start, and the weight of the next batch size."""
    nb = int(arena[at])
    nkv = int(arena[at + 1])
    start = at + GRID_HEADER
    held = _clamped(arena, start, start + nb, batch_size)
    i = bracket(arena, start, start + nb, held)
    t = (held - arena[i]) / (arena[i + 1] - arena[i])
    return start + nb + nkv + (i - start) * nkv, t


@jit
def _grid_mfu(arena: Floats, at: int, row_at: int, tb: float, batch_size: float, kv_len: float) -> float:
    """Return a grid's MFU at a KV length, between the batch size at ``row_at`` and the next."""
    nkv = int(arena[at + 1])
    start = at + GRID_HEADER + int(arena[at])
    held = _clamped(arena, start, start + nkv, kv_len)
    j = bracket(arena, start, start + nkv, held)
    t = (held - arena[j]) / (arena[j + 1] - arena[j])
    c = row_at + j - start
    low: float = arena[c] + (arena[c + nkv] - arena[c]) * tb
    high: float = arena[c + 1] + (arena[c + nkv + 1] - arena[c + 1]) * tb
    mfu: float = low + (high - low) * t
    return mfu if mfu >= LEAST_MFU else _grid_hole_mfu(arena, at, batch_size, kv_len)


@jit
def _grid_hole_mfu(arena: Floats, at: int, batch_size: float, kv_len: float) -> float:
    """Return the MFU of the nearest row by Euclidean distance, of a tie the first in the file."""
    nb = int(arena[at])
    nkv = int(arena[at + 1])
    rows = int(arena[at + 2])
    first = at + GRID_HEADER + nb + nkv + nb * nkv
    mfu: float = LEAST_MFU
    least = math.inf
    for r in range(first, first + rows):
        db = arena[r] - batch_size
        dkv = arena[r + rows] - kv_len
        distance = math.sqrt(db * db + dkv * dkv)
        if distance < least:
            least = distance
            mfu = arena[r + 2 * rows]
    return mfu


@jit
def grid_mfus(arena: Floats, at: Ints, batch_size: Floats, kv_len: Floats, out: Floats) -> None:
    """Look up every (batch size, KV length) in the grid at its place."""
    for p in range(len(out)):
        row_at, tb = _batch_cell(arena, at[p], batch_size[p])
        out[p] = _grid_mfu(arena, at[p], row_at, tb, batch_size[p], kv_len[p])


@jit
def _gemm_s(model: Floats, arena: Floats, g: int, m: float) -> float:
    """Time one GEMM of one layer, not split, s: the longer of its FLOPs and reading its weights."""
    mfu = _curve_mfu(arena, int(model[GEMM_AT + g]), m)
    compute_s: float = 2.0 * m * model[GEMM_K + g] * model[GEMM_N + g] / (model[PEAK_FLOPS_PER_S] * mfu)
    memory_s: float = model[GEMM_MEMORY_S + g]
    return max(compute_s, memory_s)


@jit
def _gemms_s(model: Floats, arena: Floats, m: float) -> float:
    """Time all layers' GEMMs over m tokens, s, summed as q + k + v + o + gate + up + down."""
    q = _gemm_s(model, arena, 0, m)
    k = _gemm_s(model, arena, 1, m)
    gate = _gemm_s(model, arena, 2, m)
    down = _gemm_s(model, arena, 3, m)
    total: float = (q + k + k + q + gate + gate + down) * (1.0 / model[TP]) * model[NUM_LAYERS]
    return total


@jit
def _attention_flops(num_heads: float, head_dim: float, new_tokens: float, context: float) -> float:
    """Count FLOPs of one layer's attention, every new token against the whole context."""
    return 2.0 * num_heads * new_tokens * context * head_dim * 2.0


@jit
def _token_bytes(model: Floats) -> tuple[float, float]:
    """Count bytes of one token's activations and of its KV, all layers."""
    layers = model[NUM_LAYERS]
    width = model[BYTES_PER_PARAM]
    return layers * model[HIDDEN_SIZE] * width, 2.0 * layers * model[NUM_KV_HEADS] * model[HEAD_DIM] * width


@jit
def _moved_bytes(
    activation_bytes: float,
    kv_bytes: float,
    weight_bytes: float,
    tp: float,
    new_tokens: float,
    progress: float,
) -> float:
    """Count activation and KV bytes of a request on a GPU, rounded as with weights added and subtracted."""
    one = new_tokens == 1.0
    activations = activation_bytes * new_tokens * (0.75 if one else 0.85)
    access = kv_bytes * progress * (0.80 if one else 0.92)
    growth = kv_bytes * new_tokens
    return (activations + access + growth + weight_bytes - weight_bytes) / tp


@jit
def _memory_s(model: Floats, moved_bytes: float) -> float:
    """Time a phase that moves these bytes, and the weights once, s."""
    seconds: float = (moved_bytes + model[WEIGHT_BYTES] / model[TP]) / model[BANDWIDTH_BYTES_PER_S]
    return seconds


@jit
def _mfu_row(model: Floats, arena: Floats, num_requests: float, mfu_row: Floats) -> None:
    """Interpolate the MFU of decode attention at one batch size, for all nodes of the KV axis."""
    at = int(model[DECODE_AT])
    nkv = int(arena[at + 1])
    row_at, tb = _batch_cell(arena, at, num_requests)
    for j in range(min(nkv, len(mfu_row))):
        mfu_row[j] = arena[row_at + j] + (arena[row_at + nkv + j] - arena[row_at + j]) * tb


@jit
def _decode_s(
    model: Floats, arena: Floats, mfu_row: Floats, gemms_s: float, progress: Ints, start: int, stop: int
) -> tuple[float, float, int]:
    """Return compute and memory seconds of a step's decodes, and a code."""
    num_requests = float(stop - start)
    at = int(model[DECODE_AT])
    nkv = min(int(arena[at + 1]), len(mfu_row))
    kv_at = at + GRID_HEADER + int(arena[at])
    first = arena[kv_at]
    last = arena[kv_at + nkv - 2]
    layers, heads, head_dim = model[NUM_LAYERS], model[NUM_HEADS], model[HEAD_DIM]
    weight_bytes, tp = model[WEIGHT_BYTES], model[TP]
    activation_bytes, kv_bytes = _token_bytes(model)
    code = 0
    flops = 0.0
    weighted = 0.0
    moved_bytes = 0.0
    for r in range(start, stop):
        own = int(progress[r])
        if own < 0 or own > MAX_SEQUENCE:
            code |= CODE_PROGRESS
            own = 0
        context = float(own)
        held = min(max(context, first), last)
        # few nodes: a linear scan without a branch to mispredict
        j = 0
        for node in range(1, nkv - 1):
            if arena[kv_at + node] <= held:
                j = node
        t = (held - arena[kv_at + j]) / (arena[kv_at + j + 1] - arena[kv_at + j])
        mfu = mfu_row[j] + (mfu_row[j + 1] - mfu_row[j]) * t
        if mfu < LEAST_MFU:
            mfu = _grid_hole_mfu(arena, at, num_requests, context)
        own_flops = _attention_flops(heads, head_dim, 1.0, context) * layers
        flops += own_flops
        weighted += own_flops * mfu
        moved_bytes += _moved_bytes(activation_bytes, kv_bytes, weight_bytes, tp, 1.0, context)
    compute_s = gemms_s
    if flops > 0.0:
        compute_s += flops / (model[PEAK_FLOPS_PER_S] * (weighted / flops)) / tp
    return compute_s, _memory_s(model, moved_bytes), code


@jit
def _bucket(tokens: int) -> int:
    """Return the bucket of a prefill request: the power of two that its last token reaches."""
    bucket = 0
    while bucket < NUM_BUCKETS - 1 and (FIRST_BUCKET << bucket) < tokens:
        bucket += 1
    return bucket


@jit
def _bucket_s(
    model: Floats, arena: Floats, progress: Ints, new_tokens: Ints, start: int, stop: int, bucket: int
) -> float:
    """Return compute seconds of one bucket's requests, which run as one batch."""
    flops = 0.0
    tokens = 0
    for r in range(start, stop):
        new = int(new_tokens[r])
        context = int(progress[r]) + new
        if _bucket(context) == bucket:
            tokens += new
            flops += _attention_flops(model[NUM_HEADS], model[HEAD_DIM], float(new), float(context))
    peak = model[PEAK_FLOPS_PER_S] * model[BUCKET_MFU + bucket]
    attention_s: float = flops * model[NUM_LAYERS] / 1.8 / peak / model[TP]
    return _gemms_s(model, arena, float(tokens)) + attention_s


@jit
def _prefill_s(
    model: Floats, arena: Floats, progress: Ints, new_tokens: Ints, start: int, stop: int
) -> tuple[float, float, int]:
    """Return compute and memory seconds of a step's prefill requests, summed over buckets, and a code."""
    activation_bytes, kv_bytes = _token_bytes(model)
    present = 0
    moved_bytes = 0.0
    for r in range(start, stop):
        new = int(new_tokens[r])
        context = int(progress[r])
        if context < 0 or context > MAX_SEQUENCE:
            return 0.0, 0.0, CODE_PROGRESS
        if new < 1 or new > MAX_SEQUENCE:
            return 0.0, 0.0, CODE_NEW_TOKENS
        present |= 1 << _bucket(context + new)
        moved_bytes += _moved_bytes(
            activation_bytes, kv_bytes, model[WEIGHT_BYTES], model[TP], float(new), float(context)
        )
    compute_s = 0.0
    for bucket in range(NUM_BUCKETS):
        if present & (1 << bucket):
            compute_s += _bucket_s(model, arena, progress, new_tokens, start, stop, bucket)
    return compute_s, _memory_s(model, moved_bytes), 0


@jit
def _requests_of(offsets: Ints, i: int, num_requests: int) -> tuple[int, int, int]:
    """Return the first and last request of step i, clamped to the arrays, and a code."""
    start = int(offsets[i])
    stop = int(offsets[i + 1])
    if start < 0 or stop < start or stop > num_requests:
        return 0, 0, CODE_OFFSETS
    return start, stop, 0


@jit
def steps_s(
    model: Floats,
    arena: Floats,
    prefill: PrefillRequests,
    decode: DecodeRequests,
    mfu_row: Floats,
    seconds: StepSeconds,
    out_s: Floats,
) -> int:
    """Time steps, CSR in prefill and in decode requests: seconds of components and in all. Returns a code."""
    code = 0
    prefill_compute_s, prefill_memory_s, decode_compute_s, decode_memory_s = seconds
    prefill_progress, prefill_new_tokens, prefill_offsets = prefill
    decode_progress, decode_offsets = decode
    num_prefill = min(len(prefill_progress), len(prefill_new_tokens))
    num_decodes = 0
    gemms_s = 0.0
    for i in range(len(out_s)):
        prefill_compute_s[i] = 0.0
        prefill_memory_s[i] = 0.0
        decode_compute_s[i] = 0.0
        decode_memory_s[i] = 0.0
        start, stop, bad = _requests_of(prefill_offsets, i, num_prefill)
        if stop > start:
            prefill_compute_s[i], prefill_memory_s[i], met = _prefill_s(
                model, arena, prefill_progress, prefill_new_tokens, start, stop
            )
            code |= met
        code |= bad
        start, stop, bad = _requests_of(decode_offsets, i, len(decode_progress))
        if stop > start:
            if stop - start != num_decodes:
                # GEMMs and the row of MFUs depend on nothing else
                num_decodes = stop - start
                gemms_s = _gemms_s(model, arena, float(num_decodes))
                _mfu_row(model, arena, float(num_decodes), mfu_row)
            decode_compute_s[i], decode_memory_s[i], met = _decode_s(
                model, arena, mfu_row, gemms_s, decode_progress, start, stop
            )
            code |= met
        code |= bad
        longest_s = max(
            max(prefill_compute_s[i], prefill_memory_s[i]), max(decode_compute_s[i], decode_memory_s[i])
        )
        out_s[i] = longest_s + model[OVERHEAD_S]
    return code
