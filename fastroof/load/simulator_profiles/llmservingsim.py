"""Convert profiles of LLMServingSim into rows of GEMMs, attention and elementwise kernels.

Current files, below ``profiler/perf``; times are in us, and ``kv_decode`` excludes the new token::

    <hardware>/<model>/<variant>/tp<N>/dense.csv          layer,tokens,time_us
    <hardware>/<model>/<variant>/tp<N>/per_sequence.csv   layer,sequences,time_us
    <hardware>/<model>/<variant>/tp<N>/attention.csv      layer,prefill_chunk,prefill_key,n_decode,kv_decode,
                                                          decode_q_len,time_us

A chunk of c tokens after k has ``prefill_key`` k + c / 2; older files have k itself, as ``kv_prefill``, and
no ``layer``.
Release 1.0.0's, below ``llm_profile/perf_models``, later ``profiler/v0/perf_models``::

    <hardware>/<model>/tp<N>/layers.csv      layer_name,input,kv_cache,tp_size,latency(ns)
    <hardware>/<model>/tp<N>/attention.csv   as Vidur's, ms; but kv_cache_size counts the keys of all
                                             sequences together, those of the call included

So in 1.0.0 a decode of batch b attends to ``kv_cache_size // b`` tokens. Its layers are PyTorch's in float16,
with several kernels per norm and rotary embedding; decode runs a prefill kernel. Files have no widths: sizes
are a GPU's share of the model that the folders name.

Left out: ``predictions`` (not measured), mixed calls, layers with unknown bytes, and prompts of a head shape
without any prefix-free row (in the current default grid no ``prefill_key`` is c / 2).

Sources: casys-kaist/LLMServingSim, docs/docs/profiler/output-bundle.md at
11b96ae1ee5c339d40f8d9ba7b2052d8ef2ace0d, profiler/core/attention_shape.py at
8d7b3d89fc07c4cce9918face131dba7e2f4857e; llm_profile/profiler/attention/attention_profiler.py and
attention_input.py and llm_profile/profiler/layers/main.py at 9e3f0ece7cab1393f176a74d38601ef07103f2d3,
models/llama.py of the same at 4a23e9f137dd83f91f5d2d449dd47ca51dd336c4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.config.gpu import load_gpu
from fastroof.errors import GpuError, ModelError, TableError
from fastroof.load.rows import read_columns
from fastroof.load.simulator_profiles import (
    EMBEDDING,
    Profile,
    gemm_rows,
    median_us,
    profile_folder,
    rope_rows,
    rows_of,
    silu_rows,
)
from fastroof.load.simulator_profiles.vidur import ATTENTION_COLUMNS, attention_rows
from fastroof.load.write import Format
from fastroof.models.dense import DenseModel, DenseShard, split
from fastroof.models.load import load_model
from fastroof.operators.external_rows import ExternalRows, size_columns, text_columns
from fastroof.pack import SIZE_LIMIT
from fastroof.units import NS_PER_US

PROGRAM: Final = "llmservingsim"
DENSE, PER_SEQUENCE, ATTENTION, LAYERS = "dense.csv", "per_sequence.csv", "attention.csv", "layers.csv"
OTHERS: Final = {
    "moe.csv": "experts of a whole block, whose routing has no keys in the schema",
    "linear_attention.csv": "linear attention",
    "mtp.csv": "speculative decoding",
    "skew.csv": "decodes of unequal length",
    "step.csv": "whole steps",
    "attn_prefill_predictions.csv": "predicted, not measured",
    "attn_decode_predictions.csv": "predicted, not measured",
}
VARIANTS: Final = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_TP: Final = re.compile(r"tp([1-9]\d*)")
_TIME: Final = "time_us"

_ATTENTION: Final = size_columns("prefill_chunk", "n_decode", "kv_decode", minimum=0)
_LAYER: Final = text_columns("layer")
_PREFILL_KEY: Final = Column("prefill_key", "float", "tokens", "context and half the chunk", 0)
_KV_PREFILL: Final = Column("kv_prefill", "int", "tokens", "context of the chunk", 0)
_DECODE_Q: Final = size_columns("decode_q_len")


class _Where(NamedTuple):
    """Hardware, model, variant and tensor parallelism from a file's folders."""

    hardware: str
    model: str
    variant: str
    tp: int


def convert_llmservingsim(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    gpu: str | None = None,
    model: str | None = None,
    dtype: str = "bf16",
    format: Format = "parquet",
    overwrite: bool = False,
) -> Path:
    """Import a folder of LLMServingSim's profiles and write ``<output>/<gpu>/llmservingsim/``."""
    root = profile_folder(folder, "LLMServingSim's profiles, such as profiler/perf", dtype)
    names = (DENSE, PER_SEQUENCE, ATTENTION, LAYERS, *OTHERS)
    found = {path: _where(path) for name in names for path in sorted(root.rglob(name))}
    spec, hardware = _hardware(root, found, gpu)
    profile = Profile(PROGRAM, spec, root)
    mine = {path: where for path, where in found.items() if where is not None and where.hardware == hardware}
    names_of_models = sorted({where.model for where in mine.values()})
    if model is not None and len(names_of_models) > 1:
        raise TableError(
            f"{root} has several models ({', '.join(names_of_models)}); model= (--model) needs a single one"
        )
    sizes = {name: _sizes(name if model is None else model, model is not None) for name in names_of_models}
    for path, where in sorted(mine.items()):
        known = sizes[where.model]
        if path.name in OTHERS:
            profile.leave_out(path, OTHERS[path.name])
        elif isinstance(known, str):
            profile.leave_out(path, known)
        else:
            _add(profile, path, where, known, dtype)
    provenance = {
        "url": "https://github.com/casys-kaist/LLMServingSim",
        "licence": "that of the repository; nothing of it is part of fastroof",
        "hardware": hardware,
        "changes": "times in us (ns / 1000 and ms x 1000 of release 1.0.0), sizes from the model's, divided "
        f"by the tensor-parallel size; rows in float16 filed under {dtype}; sorted",
        "timing": "kernels by the CUDA profiler, launched eagerly; KV writes are part of today's attention",
    }
    return profile.write(None if output is None else Path(output), provenance, format, overwrite)


# -- folders ---------------------------------------------------------------------------------------


def _where(path: Path) -> _Where | None:
    """Parse ``<hardware>/<org>/<model>[/<variant>]/tp<N>/...``; None for other paths."""
    parts = path.resolve().parts[:-1]
    for place in range(len(parts) - 1, 3, -1):
        if tp := _TP.fullmatch(parts[place]):
            variant = "" if _is_release_1(path) else parts[place - 1]
            above = parts[:place] if not variant else parts[: place - 1]
            return _Where(above[-3], "/".join(above[-2:]), variant, int(tp[1])) if len(above) > 3 else None
    return None


def _is_release_1(path: Path) -> bool:
    """Whether a file is release 1.0.0's, whose folders have no variant."""
    if path.name == ATTENTION:
        with path.open("rb") as file:
            return b"time_stats." in file.readline()
    return path.name == LAYERS or path.name.endswith("_predictions.csv")


def _hardware(root: Path, found: Mapping[Path, _Where | None], gpu: str | None) -> tuple[Any, str]:
    """GPU, and the name of its folder."""
    hardware = sorted({where.hardware for where in found.values() if where is not None})
    if not hardware:
        raise TableError(f"{root} has no profile file in <hardware>/<organisation>/<model>[/<variant>]/tp<N>")

    def named(word: str) -> str | None:
        try:
            return load_gpu(word).name
        except GpuError:
            return None

    spec = None if gpu is None else load_gpu(gpu)
    mine = [word for word in hardware if spec is None or named(word) == spec.name]
    if spec is not None and not mine and len(hardware) == 1 and named(hardware[0]) is None:
        return spec, hardware[0]
    if len(mine) != 1:
        raise TableError(f"{root} has profiles of {', '.join(hardware)}: choose the GPU with gpu= (--gpu)")
    return (spec or load_gpu(mine[0])), mine[0]


def _sizes(name: str, is_required: bool) -> DenseModel | str:
    """Sizes of a model, or the reason why they are unknown."""
    try:
        return DenseModel.of(load_model(name))
    except ModelError as error:
        if is_required:
            raise
        return f"{name}: no dense preset; give its sizes with model= (--model) ({str(error)[:60]} ..)"


# -- files -----------------------------------------------------------------------------------------


def _add(profile: Profile, path: Path, where: _Where, model: DenseModel, dtype: str) -> None:
    try:
        shard = split(model, where.tp)
    except ModelError as error:
        profile.leave_out(path, str(error))
        return
    profile.models.add(where.model)
    if not where.variant:
        (_add_layers if path.name == LAYERS else _add_v0_attention)(profile, path, model, where.tp, dtype)
        return
    weights, _, cache = where.variant.partition("-")
    kv_dtype = VARIANTS.get(cache.removeprefix("kv")) if cache else "bf16" if weights == "fp8" else weights
    if weights not in VARIANTS or kv_dtype is None:
        profile.leave_out(path, f"variant {where.variant}: unknown dtype")
    elif path.name == ATTENTION:
        _add_attention(profile, path, shard, model.head_dim, kv_dtype)
    else:
        # the simulator does not pad its share of the vocabulary
        _add_dense(profile, path, shard, model, model.vocab // where.tp, VARIANTS[weights])


def _times(path: Path, column: str, unit_us: float) -> Floats:
    return median_us(path, [column], unit_us, is_needed=True)[column]


def _by_layer(
    profile: Profile,
    path: Path,
    layers: Array,
    made: Mapping[str, tuple[str, ExternalRows]],
    others: Mapping[str, str],
) -> None:
    """Add the rows of each layer, and count the others by reason."""
    for layer in sorted(set(layers)):
        rows = layers == layer
        if layer in made:
            operator, every = made[layer]
            both = (every.columns, every.left_out)
            parts: Any = [{name: values[rows] for name, values in one.items()} for one in both]
            profile.add(path, operator, ExternalRows(*parts))
        else:
            profile.leave_out(path, others.get(layer, f"layer {layer}"), int(rows.sum()))


def _add_dense(
    profile: Profile, path: Path, shard: DenseShard, model: DenseModel, vocab_rows: int, dtype: str
) -> None:
    """Add dense.csv or per_sequence.csv: one layer per row, by tokens or by sequences."""
    count = "tokens" if path.name == DENSE else "sequences"
    raw = read_columns(path, (*text_columns("layer"), *size_columns(count)))
    us, m = _times(path, _TIME, 1.0), raw[count]
    head_dtype = "bf16" if dtype == "fp8" else dtype
    heads_width = (shard.num_q_heads + shard.num_kv_heads) * model.head_dim
    made = {
        "qkv_proj": ("gemm", gemm_rows(m, shard.qkv_out, model.hidden, us, dtype)),
        "o_proj": ("gemm", gemm_rows(m, model.hidden, shard.o_in, us, dtype)),
        "gate_up_proj": ("gemm", gemm_rows(m, 2 * shard.intermediate, model.hidden, us, dtype)),
        "down_proj": ("gemm", gemm_rows(m, model.hidden, shard.intermediate, us, dtype)),
        "lm_head": ("gemm", gemm_rows(m, vocab_rows, model.hidden, us, head_dtype)),
        "act_fn": ("elementwise", silu_rows(m, shard.intermediate, us)),
        "rotary_emb": ("elementwise", rope_rows(m, heads_width, us)),
    }
    norm = "norms: unknown whether the kernel also adds the residual"
    roles = dict.fromkeys(("layernorm", "final_layernorm", "qk_norm"), norm)
    roles |= {"embedding": EMBEDDING, "sampler": "sampler: no such operator"}
    _by_layer(profile, path, raw["layer"], made, roles)


def _add_attention(profile: Profile, path: Path, shard: DenseShard, head_dim: int, kv_dtype: str) -> None:
    raw = read_columns(path, _ATTENTION, (*_LAYER, _PREFILL_KEY, _KV_PREFILL, *_DECODE_Q))
    us = _times(path, _TIME, 1.0)
    chunk, batch = raw["prefill_chunk"], raw["n_decode"]
    if "prefill_key" not in raw and "kv_prefill" not in raw:
        raise TableError(f"{path} has neither a column prefill_key nor kv_prefill")
    context = raw["prefill_key"] - chunk / 2.0 if "prefill_key" in raw else raw["kv_prefill"] * 1.0
    is_size = (context >= 0.0) & (context == np.floor(context)) & (context < SIZE_LIMIT)
    shared = {
        "not attention": raw["layer"] != "attention" if "layer" in raw else np.zeros(len(us), bool),
        "prompts and decodes in one call": (chunk > 0) & (batch > 0),
        "no request": (chunk == 0) & (batch == 0),
        "several new tokens per decode": (raw["decode_q_len"] > 1) & (batch > 0)
        if "decode_q_len" in raw
        else np.zeros(len(us), bool),
    }
    is_prefill = chunk > 0
    for operator, rows in (("attention_prefill", is_prefill), ("attention_decode", ~is_prefill)):
        sizes: dict[str, Any] = {"batch_size": batch[rows], "kv_len": raw["kv_decode"][rows] + 1}
        out = {reason: mask[rows] for reason, mask in shared.items()}
        if operator == "attention_prefill":
            tokens = np.where(is_size, context, 0.0).astype(np.int64)
            sizes = {"batch_size": 1, "q_len": chunk[rows], "kv_len": (tokens + chunk)[rows]}
            out["fractional context length"] = ~is_size[rows]
        made = rows_of(
            us[rows], out, kv_dtype=kv_dtype, num_q_heads=shard.num_q_heads, num_kv_heads=shard.num_kv_heads,
            head_dim=head_dim, window=0, kernel="attention", **sizes,
        )  # fmt: skip
        profile.add(path, operator, made)


def _add_layers(profile: Profile, path: Path, model: DenseModel, tp: int, dtype: str) -> None:
    """Add layers.csv of release 1.0.0: separate projections over a prompt's tokens."""
    sizes = (
        *size_columns("input", "tp_size"),
        *size_columns("kv_cache", minimum=0),
        *text_columns("layer_name"),
    )
    raw = read_columns(path, sizes)
    us, m = _times(path, "latency(ns)", 1.0 / NS_PER_US), raw["input"]
    if (raw["tp_size"] != tp).any():
        raise TableError(
            f"{path} has rows of tp_size {sorted(set(raw['tp_size'].tolist()))} in folder tp{tp}"
        )
    hidden, width = model.hidden, model.intermediate // tp
    q_out, kv_out = (heads * model.head_dim // tp for heads in (model.num_q_heads, model.num_kv_heads))
    gemms = {
        "q_proj": (q_out, hidden), "k_proj": (kv_out, hidden), "v_proj": (kv_out, hidden),
        "o_proj": (hidden, q_out),
        "gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width),
        "lm_head": (model.vocab // tp, hidden),
    }  # fmt: skip
    made = {layer: ("gemm", gemm_rows(m, n, k, us, dtype)) for layer, (n, k) in gemms.items()}
    several = "several kernels of PyTorch, where engines run one"
    roles = dict.fromkeys(("input_layernorm", "post_layernorm", "final_layernorm", "rope", "act_fn"), several)
    roles |= {"embedding": EMBEDDING, "attn": "attention outside attention.csv"}
    _by_layer(profile, path, raw["layer_name"], made, roles)


def _add_v0_attention(profile: Profile, path: Path, model: DenseModel, tp: int, dtype: str) -> None:
    raw = read_columns(path, ATTENTION_COLUMNS)
    measured = (raw["n_embd"], raw["n_q_head"], raw["n_kv_head"], raw["num_tensor_parallel_workers"])
    expected = (model.hidden, model.num_q_heads, model.num_kv_heads, tp)
    if any((have != need).any() for have, need in zip(measured, expected, strict=True)):
        raise TableError(f"{path} has other sizes than {model.name} over {tp} GPUs, which its folders name")
    # kv_cache_size counts the keys of all sequences, those of the call included
    attention_rows(profile, path, raw, raw["kv_cache_size"] // raw["batch_size"], dtype)
