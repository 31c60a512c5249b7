"""InferSim's complete estimate, for columns of scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Array, Bools, Longs, Reals
from fastroof.columns import Column
from fastroof.compat.infersim import layers
from fastroof.compat.infersim.layers import Placed, model_sizes, place, state_bytes
from fastroof.compat.infersim.lookups import device_numbers
from fastroof.compat.infersim.model import (
    CAUSAL_DIVISOR,
    DECODE_OVERHEAD_MS,
    GFLOP,
    HYBRID_DECODE_OVERHEAD_MS,
    PREFILL_OVERHEAD_MS,
    read_model,
)
from fastroof.compat.infersim.scenarios import LABELS, SCENARIO_COLUMNS, read_scenarios
from fastroof.compat.infersim.tree import InfersimTables, file_path, gdn_us_of
from fastroof.compiled.compat_infersim import EMPTY_BLOCK, NO_KEY
from fastroof.units import GIB, MS_PER_S, US_PER_S

ZERO_MFU: Final = "ZeroDivisionError: float division by zero"
NO_KV_DTYPE: Final = "ValueError: min() arg is an empty sequence"
NO_EXPERT_GPUS: Final = "ZeroDivisionError: world_size // tp_size is 0"


@dataclass
class Phase:
    """Intermediate columns of one phase; a scenario that fails keeps the columns computed before."""

    prefix: str
    heads: tuple[Longs, Longs, Longs]
    alive: Bools
    columns: dict[str, tuple[Array, Bools]] = field(default_factory=dict)
    errors: Array = field(init=False)
    fallbacks: dict[str, Bools] = field(default_factory=dict)
    missing_file: Bools = field(init=False)
    missing_experts: Bools = field(init=False)

    def __post_init__(self) -> None:
        self.errors = np.full(len(self.alive), None, object)
        self.missing_file = np.zeros_like(self.alive)
        self.missing_experts = np.zeros_like(self.alive)

    def put(self, **values: Array) -> None:
        """Add columns for the scenarios that have not failed."""
        for name, column in values.items():
            self.columns[f"{self.prefix}_{name}"] = column, self.alive.copy()

    def add_fallback(self, part: str, where: Bools) -> None:
        """Record a part for which no measured row was found."""
        self.fallbacks[part] = self.fallbacks.get(part, False) | (where & self.alive)

    def fail(self, where: Bools, reason: str | Array) -> None:
        """Mark scenarios that have not failed yet as failed."""
        where = where & self.alive
        self.errors[where] = reason if isinstance(reason, str) else reason[where]
        self.alive = self.alive & ~where


def prefill(p: Placed, scenarios: dict[str, Array], kv_token_bytes: Reals) -> Phase:
    """Return the time to first token of a step of ``max_prefill_tokens`` on each GPU."""
    phase = Phase("p", _file_heads(p, decode=False), np.ones(len(p.tp), np.bool_))
    model, gdn = p.model, p.model.gdn
    isl, tokens = scenarios["isl"], scenarios["max_prefill_tokens"]
    kind = "mla/prefill" if model.mla else "mha/prefill"
    row = p.tables.rows(kind, (p.device, *phase.heads), (isl,))
    mfu = p.tables.mfu(kind, row, p.default_mfu)
    # the order of InferSim's operations, here and below: another order differs in the last bit
    core_s = (
        isl
        * (layers.prefill_flops(p, model.mla, isl) / GFLOP)
        / CAUSAL_DIVISOR
        / (p.attention_gflops_per_s * mfu)
    )
    load_s = kv_token_bytes * isl / model.num_layers / GIB / p.memory_gb_per_s
    attention_s = _put_attention(phase, row, mfu, core_s, load_s)
    projections_s = _projections(phase, p, tokens)
    if gdn:
        linear_s, linear_projections_s = _linear(phase, p, "prefill", isl, tokens, np.ones_like(isl))
    experts_s = _experts(phase, p, "prefill", tokens)
    before_s, after_s, tp_s = _communication(phase, p, tokens)
    counted: Array = tokens
    if gdn:
        chunks = tokens / isl
        step_s = (
            (attention_s * chunks + projections_s) * model.full_layers
            + (linear_s * chunks + linear_projections_s) * gdn.num_layers
            + experts_s * model.num_layers
            + np.where(p.tp > 1, 2 * tp_s, before_s + after_s) * model.num_layers
        )
    else:
        attention_s = attention_s * np.ceil(tokens / isl)
        overlap = scenarios["tbo"] == 1
        mixed_s, moe_s = ((part / scenarios["sm_ratio"]) for part in (attention_s + projections_s, experts_s))
        two_batches_s = np.maximum(mixed_s, before_s) + np.maximum(mixed_s, after_s)
        two_batches_s = two_batches_s + np.maximum(moe_s, before_s) + np.maximum(moe_s, after_s)
        one_batch_s = attention_s + experts_s + projections_s + (before_s + after_s) + tp_s
        step_s = np.where(overlap, two_batches_s, one_batch_s) * model.num_layers
        counted = np.where(overlap, 2 * tokens, tokens)
    ttft_ms = step_s * MS_PER_S + PREFILL_OVERHEAD_MS
    _finish(phase, p, "ttft_ms", ttft_ms, "prefill_tgs", counted)
    return phase


def decode(
    p: Placed, scenarios: dict[str, Array], batch: Longs, kv_len: Longs, kv_token_bytes: Reals
) -> Phase:
    """Return the time per output token of a decode step of ``batch`` requests on each GPU."""
    phase = Phase("d", _file_heads(p, decode=True), np.ones(len(p.tp), np.bool_))
    model, gdn = p.model, p.model.gdn
    kind = "mla/decode" if model.mla else "mha/decode"
    row = p.tables.rows(kind, (p.device, *phase.heads, scenarios["fp8_kv"]), (batch, kv_len))
    phase.fail(row == EMPTY_BLOCK, NO_KV_DTYPE)
    mfu = p.tables.mfu(kind, row, p.default_mfu)
    core_s = (
        batch
        * (layers.decode_flops(p, model.mla, model.num_heads, kv_len) / GFLOP)
        / (p.attention_gflops_per_s * mfu)
    )
    load_s = kv_token_bytes * kv_len * batch / model.num_layers / GIB / p.memory_gb_per_s
    attention_s = _put_attention(phase, row, mfu, core_s, load_s)
    projections_s = _projections(phase, p, batch)
    if gdn:
        linear_s, linear_projections_s = _linear(phase, p, "decode", batch, batch, batch)
    experts_s = _experts(phase, p, "decode", batch)
    before_s, after_s, tp_s = _communication(phase, p, batch)
    counted: Array = batch
    if gdn:
        step_s = (
            (attention_s + projections_s) * model.full_layers
            + (linear_s + linear_projections_s) * gdn.num_layers
            + experts_s * model.num_layers
            + np.where(p.tp > 1, 2 * tp_s, before_s + after_s) * model.num_layers
        )
        tpot_ms = step_s * MS_PER_S + HYBRID_DECODE_OVERHEAD_MS
    else:
        overlap = scenarios["tbo"] == 1
        mixed_s = attention_s + projections_s
        two_batches_s = 2 * np.maximum(mixed_s, experts_s + before_s + after_s)
        one_batch_s = mixed_s + experts_s + (before_s + after_s) + tp_s
        step_s = np.where(overlap, two_batches_s, one_batch_s) * model.num_layers
        counted = np.where(overlap, 2 * batch, batch)
        tpot_ms = step_s * MS_PER_S + DECODE_OVERHEAD_MS
    _finish(phase, p, "tpot_ms", tpot_ms, "decode_tgs", counted)
    return phase


def _file_heads(p: Placed, decode: bool) -> tuple[Longs, Longs, Longs]:
    """Return the numbers in the name of the attention file."""
    mla, shape = p.model.mla, p.tp.shape
    if mla is None:
        return p.heads, p.kv_heads, np.broadcast_to(p.model.head_dim, shape)
    latent = mla.kv_lora_rank if decode else mla.nope_dim
    return p.heads, np.broadcast_to(latent, shape), np.broadcast_to(mla.rope_dim, shape)


def _put_attention(phase: Phase, row: Longs, mfu: Reals, core_s: Reals, load_s: Reals) -> Reals:
    phase.missing_file = phase.alive & (row == NO_KEY)
    phase.add_fallback("attention", row < 0)
    phase.fail(mfu == 0, ZERO_MFU)
    attention_s = np.maximum(core_s, load_s)
    phase.put(attn_mfu=mfu, attn_core_s=core_s, kv_load_s=load_s, attn_core_max_s=attention_s)
    return attention_s


def _projections(phase: Phase, p: Placed, tokens: Longs) -> Reals:
    projections = layers.attention_projections_s(p, tokens)
    phase.add_fallback("projections", projections.fallback)
    phase.fail(projections.zero_mfu, ZERO_MFU)
    phase.put(attn_others_s=projections.seconds)
    return projections.seconds


def _linear(
    phase: Phase, p: Placed, word: str, queried: Longs, tokens: Longs, requests: Longs
) -> tuple[Reals, Reals]:
    """Return the core and projections of a gated delta net; its states are read once per request."""
    gdn = p.model.gdn
    assert gdn is not None
    layer = (gdn.conv_kernel, gdn.num_key_heads, gdn.key_head_dim, gdn.num_value_heads, gdn.value_head_dim)
    kind = f"gdn/{word}"
    of_each = tuple(np.broadcast_to(size, queried.shape) for size in layer)
    row = p.tables.rows(kind, (p.device, *of_each), (queried,))
    paths = [
        f"AssertionError: Error: bench_data/{file_path(kind, d, layer)} not exist." for d in p.tables.devices
    ]
    phase.fail(row < 0, np.array(paths, object)[p.device])
    core_us = gdn_us_of(p.tables.blocks[kind], row, queried)
    states_s = state_bytes(gdn) * requests / gdn.num_layers / GIB / p.memory_gb_per_s
    core_s = np.maximum(core_us / US_PER_S, states_s)
    projections = layers.linear_projections_s(p, gdn, tokens)
    phase.put(lin_core_us=core_us, lin_states_s=states_s, lin_core_max_s=core_s)
    phase.add_fallback("linear projections", projections.fallback)
    phase.fail(projections.zero_mfu, ZERO_MFU)
    phase.put(lin_others_s=projections.seconds)
    return core_s, projections.seconds


def _experts(phase: Phase, p: Placed, word: str, tokens: Longs) -> Reals:
    model = p.model
    phase.fail(p.world < p.tp, NO_EXPERT_GPUS)
    local_gpus = np.maximum(p.world // p.tp, 1)
    mfu, row = layers.experts_mfu(p, word, tokens, local_gpus)
    if model.moe:
        phase.missing_experts = phase.alive & (row == NO_KEY)
    phase.add_fallback("experts" if model.moe else "MLP", row < 0)
    phase.fail(mfu == 0, ZERO_MFU)
    routed_s = layers.experts_flops(p, word, tokens) / (p.gemm_gflops_per_s * mfu)
    load_s = layers.expert_bytes(p) * model.num_experts / local_gpus / GIB / p.memory_gb_per_s
    experts_s: Reals = np.maximum(routed_s, load_s)
    phase.put(moe_mfu=mfu, routed_s=routed_s, moe_load_s=load_s)
    if model.num_shared_experts:
        width = p.intermediate * model.num_shared_experts
        up = layers.gemm_s(p, tokens, model.hidden, 2 * width)
        down = layers.gemm_s(p, tokens, width, model.hidden)
        both = up + down
        phase.add_fallback("shared experts", both.fallback)
        phase.fail(both.zero_mfu, ZERO_MFU)
        phase.put(shared_up_s=up.seconds, shared_down_s=down.seconds)
        experts_s = experts_s + both.seconds
    phase.put(moe_s=experts_s)
    return experts_s


def _communication(phase: Phase, p: Placed, tokens: Longs) -> tuple[Reals, Reals, Reals]:
    before_s, after_s = layers.exchange_s(p, tokens, decode=phase.prefix == "d")
    tp_s = layers.tp_allreduce_s(p, tokens)
    phase.put(comm1_s=before_s, comm2_s=after_s, tp_comm_s=tp_s)
    return before_s, after_s, tp_s


def _finish(phase: Phase, p: Placed, time: str, step_ms: Reals, rate: str, tokens: Array) -> None:
    """Set the step time and the tokens/s per GPU; neither has the phase's prefix."""
    phase.columns[time] = step_ms, phase.alive
    phase.columns[rate] = tokens / p.tp / (step_ms / MS_PER_S), phase.alive


_PHASE_COLUMNS: Final = (
    Column("attn_mfu", "float", "", "MFU of full attention"),
    Column("attn_core_s", "float", "s", "its FLOPs at that MFU"),
    Column("kv_load_s", "float", "s", "its KV cache through the memory"),
    Column("attn_core_max_s", "float", "s", "the longer of the two"),
    Column("attn_others_s", "float", "s", "its projections"),
    Column("lin_core_us", "float", "us", "gated delta net as measured"),
    Column("lin_states_s", "float", "s", "its states through the memory"),
    Column("lin_core_max_s", "float", "s", "the longer of the two"),
    Column("lin_others_s", "float", "s", "its projections"),
    Column("moe_mfu", "float", "", "MFU of the experts, or of the MLP"),
    Column("routed_s", "float", "s", "their FLOPs at that MFU"),
    Column("moe_load_s", "float", "s", "their weights through the memory"),
    Column("shared_up_s", "float", "s", "shared experts, up and gate"),
    Column("shared_down_s", "float", "s", "shared experts, down"),
    Column("moe_s", "float", "s", "routed and shared experts, or the MLP"),
    Column("comm1_s", "float", "s", "communication before the experts"),
    Column("comm2_s", "float", "s", "communication after the experts"),
    Column("tp_comm_s", "float", "s", "all-reduce of a tensor-parallel layer"),
)


def _phase_columns(prefix: str, time: Column, rate: Column) -> tuple[Column, ...]:
    return (
        *(Column(f"{prefix}_{c.name}", c.kind, c.unit, f"{c.meaning}, per layer") for c in _PHASE_COLUMNS),
        time,
        rate,
        Column(f"{prefix}_error", "text", "", "why InferSim has no answer; null if it has one"),
        Column(f"{prefix}_fallbacks", "text", "", "parts without a measured row"),
    )


RESULT_COLUMNS: Final = (
    Column("params_per_gpu_gib", "float", "GiB", "weights on one GPU"),
    Column("kvcache_mem_gib", "float", "GiB", "memory left for the KV cache"),
    Column("kvcache_bytes_per_token", "float", "B", "KV cache of one token, all layers"),
    Column("states_bytes", "int", "B", "recurrent states of one request, all layers"),
    Column("target_bs", "int", "sequences", "decode batch on each GPU"),
    Column("avg_context_len", "int", "tokens", "mean tokens that a request attends to"),
    Column("kv_fits", "int", "", "1: the decode batch fits in memory"),
    Column("flops_attn_core_g", "float", "1e9 FLOP", "decode attention of one token, per layer"),
    Column("flops_moe_g", "float", "1e9 FLOP", "experts of one token, per layer"),
    Column("flops_others_g", "float", "1e9 FLOP", "attention projections of one token, per layer"),
    *_phase_columns(
        "p",
        Column("ttft_ms", "float", "ms", "time to first token"),
        Column("prefill_tgs", "float", "tokens/s", "prompt tokens, on each GPU"),
    ),
    *_phase_columns(
        "d",
        Column("tpot_ms", "float", "ms", "time per output token"),
        Column("decode_tgs", "float", "tokens/s", "output tokens, on each GPU"),
    ),
    Column("warnings", "text", "", "what InferSim prints, sorted"),
)
"""Columns that `evaluate` adds to the scenarios."""

_ARROW_TYPES: Final = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
_SLO_WARNING: Final = "!Error: TPOT > SLO, need smaller GFLOPs to speedup"
_MEMORY_WARNING: Final = "!Error: need smaller kvcache"


def evaluate(
    tables: InfersimTables, config: Mapping[str, Any], scenarios: Mapping[str, Any] | pa.Table
) -> pa.Table:
    r"""Estimate prefill and decode of one model in many scenarios, as InferSim does.

    Parameters
    ----------
    tables : InfersimTables
        Tables from :func:`load`.
    config : mapping
        The model's Hugging Face config.json.
    scenarios : mapping of str to column, or pyarrow.Table
        ``device``, ``world_size``, ``tp_size``, ``num_nodes``, ``max_prefill_tokens``, ``decode_bs`` (null:
        derived from the targets), ``target_tgs`` (tokens/s per GPU), ``target_tpot`` (ms), ``isl``, ``osl``
        (tokens), ``fp8_gemm``, ``fp8_kv``, ``deepep``, ``tbo`` (0 or 1), ``sm_ratio`` (default 108/132).
        A scalar applies to all rows. ``id``, ``source`` and ``model`` are copied to the result.

    Returns
    -------
    pyarrow.Table
        The scenarios, then the columns of ``RESULT_COLUMNS``: sizes, parts of a layer, ``ttft_ms``,
        ``tpot_ms``, tokens/s per GPU. If InferSim raises in a phase, ``p_error`` or ``d_error``
        is the reason, and the phase's columns from there on are null. ``p_fallbacks`` and ``d_fallbacks``
        name the parts that InferSim answered with a default, whether it prints a warning or not.

    Raises
    ------
    BatchError
        If the scenarios' columns are invalid.
    ModelError
        If the config lacks a field.
    GpuError
        If a device has no constants.

    Examples
    --------
    >>> from fastroof.compat.infersim import read_files
    >>> tables = read_files({"gemm/h20/data.csv": "m,k,n,latency_us,mfu\n1,8192,16384,99.0,0.5\n"})
    >>> config = {
    ...     "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    ...     "num_key_value_heads": 8, "intermediate_size": 12288,
    ... }
    >>> result = evaluate(tables, config, {
    ...     "device": "H20", "world_size": 1, "tp_size": 1, "num_nodes": 1, "max_prefill_tokens": 4096,
    ...     "decode_bs": [16, 32], "target_tgs": 2560.0, "target_tpot": 50.0, "isl": 4096, "osl": 1024,
    ...     "fp8_gemm": 0, "fp8_kv": 0, "deepep": 0, "tbo": 0,
    ... })
    >>> [round(ms, 1) for ms in result["tpot_ms"].to_pylist()]
    [11.8, 16.3]
    >>> result["d_fallbacks"].to_pylist()
    ['attention, MLP', 'attention, MLP']
    """
    model = read_model(config)
    columns, given = read_scenarios(scenarios)
    device = device_numbers(tables, columns["device"])
    placed = place(tables, model, device, columns)
    sizes = model_sizes(placed, columns)
    kv_token_bytes = sizes["kvcache_bytes_per_token"]
    with np.errstate(divide="ignore", invalid="ignore"):  # rows that fail are masked
        first = prefill(placed, columns, kv_token_bytes)
        each = decode(placed, columns, sizes["target_bs"], sizes["avg_context_len"], kv_token_bytes)
    answers: dict[str, pa.Array] = {name: pa.array(values) for name, values in sizes.items()}
    if model.gdn:
        answers["states_bytes"] = pa.repeat(pa.scalar(state_bytes(model.gdn), pa.int64()), len(device))
    for phase in (first, each):
        answers |= {name: pa.array(values, mask=~alive) for name, (values, alive) in phase.columns.items()}
        answers[f"{phase.prefix}_error"] = pa.array(phase.errors, pa.string())
        answers[f"{phase.prefix}_fallbacks"] = _joined(", ", phase.fallbacks)
    answers["warnings"] = _warnings(placed, first, each, sizes["kv_fits"] == 0, columns["target_tpot"])
    shown = [label for label in LABELS if label in given]
    arrays = [
        *given.values(),
        *(answers.get(c.name, pa.nulls(len(device), _ARROW_TYPES[c.kind])) for c in RESULT_COLUMNS),
    ]
    fields = [
        *(pa.field(label, given[label].type) for label in shown),
        *(
            pa.field(c.name, _ARROW_TYPES[c.kind], metadata={"unit": c.unit, "meaning": c.meaning})
            for c in (*SCENARIO_COLUMNS, *RESULT_COLUMNS)
        ),
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _joined(separator: str, texts: Mapping[str, Bools]) -> pa.Array:
    """Return for each row the texts that apply to it."""
    rows = len(next(iter(texts.values())))
    joined = np.full(rows, "", object)
    for word, where in texts.items():
        joined[where & (joined != "")] += separator
        joined[where] += word
    return pa.array(joined, pa.string())


def _warnings(p: Placed, first: Phase, each: Phase, too_large: Bools, slo_ms: Array) -> pa.Array:
    """Return what InferSim prints for each row, sorted, as in the recorded answers."""
    tpot_ms, alive = each.columns["tpot_ms"]
    texts = {_SLO_WARNING: alive & (tpot_ms > slo_ms), _MEMORY_WARNING: too_large}
    attention = "mla" if p.model.mla else "mha"
    for phase, name, ending in ((first, "prefill", "not exist."), (each, "decode", "not exists")):
        texts |= _missing_files(p, phase.missing_file, f"{attention}/{name}", phase.heads, ending)
        texts[f"Warning: grouped_gemm {name} mfu not found, will use default mfu."] = phase.missing_experts
    return _joined(" | ", dict(sorted(texts.items())))


def _missing_files(
    p: Placed, where: Bools, kind: str, heads: tuple[Array, ...], ending: str
) -> dict[str, Bools]:
    """Return the warnings about missing attention files."""
    names = np.stack([p.device, *heads])
    texts = {}
    for device, *sizes in np.unique(names[:, where], axis=1).T.tolist():
        of_file = where & (names == np.array([[device], *([size] for size in sizes)])).all(axis=0)
        texts[f"Warning: bench_data/{file_path(kind, p.tables.devices[device], sizes)} {ending}"] = of_file
    return texts
