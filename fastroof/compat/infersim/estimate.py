"""InferSim's whole estimate, for columns of scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Array, Bools
from fastroof.columns import Column
from fastroof.compat.infersim.layers import Placed, place
from fastroof.compat.infersim.model import read_model
from fastroof.compat.infersim.phases import Phase, decode, prefill
from fastroof.compat.infersim.query import device_numbers
from fastroof.compat.infersim.scenarios import LABELS, SCENARIO_COLUMNS, read_scenarios
from fastroof.compat.infersim.sizes import model_sizes, state_bytes
from fastroof.compat.infersim.tree import InfersimTables, file_path

__all__ = ["RESULT_COLUMNS", "evaluate"]


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
        *(Column(f"{prefix}_{c.name}", c.kind, c.unit, f"{c.meaning}, a layer") for c in _PHASE_COLUMNS),
        time,
        rate,
        Column(f"{prefix}_error", "text", "", "why InferSim gives no answer; null where it does"),
        Column(f"{prefix}_fallbacks", "text", "", "parts that no measured row answered for"),
    )


RESULT_COLUMNS: Final = (
    Column("params_per_gpu_gib", "float", "GiB", "weights on one GPU"),
    Column("kvcache_mem_gib", "float", "GiB", "memory left for the KV cache"),
    Column("kvcache_bytes_per_token", "float", "B", "KV cache of one token, all layers"),
    Column("states_bytes", "int", "B", "recurrent states of one request, all layers"),
    Column("target_bs", "int", "sequences", "decode batch on each GPU"),
    Column("avg_context_len", "int", "tokens", "tokens that a request attends to on average"),
    Column("kv_fits", "int", "", "1: the decode batch fits in memory"),
    Column("flops_attn_core_g", "float", "1e9 FLOP", "decode attention of one token, a layer"),
    Column("flops_moe_g", "float", "1e9 FLOP", "experts of one token, a layer"),
    Column("flops_others_g", "float", "1e9 FLOP", "attention projections of one token, a layer"),
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
        What :func:`load` returned.
    config : mapping
        The model's Hugging Face config.json.
    scenarios : mapping of str to column, or pyarrow.Table
        ``device``, ``world_size``, ``tp_size``, ``num_nodes``, ``max_prefill_tokens``, ``decode_bs`` (null:
        what the targets need), ``target_tgs`` (tokens/s a GPU), ``target_tpot`` (ms), ``isl``, ``osl``
        (tokens), ``fp8_gemm``, ``fp8_kv``, ``deepep``, ``tbo`` (0 or 1), ``sm_ratio`` (108/132 if left out).
        A scalar holds for all rows. ``id``, ``source`` and ``model`` are handed through.

    Returns
    -------
    pyarrow.Table
        The scenarios, then the columns of ``RESULT_COLUMNS``: sizes, parts of a layer, ``ttft_ms``,
        ``tpot_ms``, tokens a second and GPU. Where InferSim raises in a phase, ``p_error`` or ``d_error``
        says why and the phase's columns from there on are null. ``p_fallbacks`` and ``d_fallbacks``
        name what InferSim answered with a default, printed or not.

    Raises
    ------
    BatchError
        If the scenarios' columns are not as above.
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


def _joined(separator: str, words: Mapping[str, Bools]) -> pa.Array:
    """Of every row the words that hold there."""
    rows = len(next(iter(words.values())))
    joined = np.full(rows, "", object)
    for word, where in words.items():
        joined[where & (joined != "")] += separator
        joined[where] += word
    return pa.array(joined, pa.string())


def _warnings(p: Placed, first: Phase, each: Phase, too_large: Bools, slo_ms: Array) -> pa.Array:
    """Return what InferSim prints for each row, sorted, as the recorded answers have it."""
    tpot_ms, alive = each.columns["tpot_ms"]
    words = {_SLO_WARNING: alive & (tpot_ms > slo_ms), _MEMORY_WARNING: too_large}
    attention = "mla" if p.model.mla else "mha"
    for phase, name, ending in ((first, "prefill", "not exist."), (each, "decode", "not exists")):
        words |= _missing_files(p, phase.missing_file, f"{attention}/{name}", phase.heads, ending)
        words[f"Warning: grouped_gemm {name} mfu not found, will use default mfu."] = phase.missing_experts
    return _joined(" | ", dict(sorted(words.items())))


def _missing_files(
    p: Placed, where: Bools, kind: str, heads: tuple[Array, ...], ending: str
) -> dict[str, Bools]:
    """Return the warnings of attention files that are not there."""
    names = np.stack([p.device, *heads])
    words = {}
    for device, *sizes in np.unique(names[:, where], axis=1).T.tolist():
        of_file = where & (names == np.array([[device], *([size] for size in sizes)])).all(axis=0)
        words[f"Warning: bench_data/{file_path(kind, p.tables.devices[device], sizes)} {ending}"] = of_file
    return words
