"""Convert profiles of LLMServingSim into rows of GEMMs, attention and elementwise kernels.

Files of release 1.1.0 and later, below ``profiler/perf``; times are in us, and ``kv_decode`` excludes the new
token::

    <hardware>/<model>/<variant>/tp<N>/dense.csv          layer,tokens,time_us
    <hardware>/<model>/<variant>/tp<N>/per_sequence.csv   layer,sequences,time_us
    <hardware>/<model>/<variant>/tp<N>/attention.csv      layer,prefill_chunk,prefill_key,n_decode,kv_decode,
                                                          decode_q_len,time_us

A chunk of c tokens after k has ``prefill_key`` k + c / 2; older files have k itself, as ``kv_prefill``, and
no ``layer``. Files have no widths: sizes are a GPU's share of the model that the folders name.

Left out: mixed calls, layers with unknown bytes, and prompts of a head shape without any prefix-free row (in
the current default grid no ``prefill_key`` is c / 2).

Sources: casys-kaist/LLMServingSim, docs/docs/profiler/output-bundle.md at
11b96ae1ee5c339d40f8d9ba7b2052d8ef2ace0d, profiler/core/attention_shape.py at
8d7b3d89fc07c4cce9918face131dba7e2f4857e.
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
from fastroof.models.dense import DenseModel, DenseShard, split
from fastroof.models.load import load_model
from fastroof.operators.external_rows import ExternalRows, size_columns, text_columns
from fastroof.pack import SIZE_LIMIT

PROGRAM: Final = "llmservingsim"
DENSE, PER_SEQUENCE, ATTENTION = "dense.csv", "per_sequence.csv", "attention.csv"
OTHERS: Final = {
    "moe.csv": "experts of a whole block, whose routing has no keys in the schema",
    "linear_attention.csv": "linear attention",
    "mtp.csv": "speculative decoding",
    "skew.csv": "decodes of unequal length",
    "step.csv": "whole steps",
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
    overwrite: bool = False,
) -> Path:
    """Import a folder of LLMServingSim's profiles and write ``<output>/<gpu>/llmservingsim/``."""
    root = profile_folder(folder, "LLMServingSim's profiles, such as profiler/perf")
    names = (DENSE, PER_SEQUENCE, ATTENTION, *OTHERS)
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
            _add(profile, path, where, known)
    provenance = {
        "url": "https://github.com/casys-kaist/LLMServingSim",
        "licence": "that of the repository; nothing of it is part of fastroof",
        "hardware": hardware,
        "changes": "sizes from the model's, divided by the tensor-parallel size; sorted",
        "timing": "kernels by the CUDA profiler, launched eagerly; KV writes are part of today's attention",
    }
    return profile.write(None if output is None else Path(output), provenance, overwrite)


# -- folders ---------------------------------------------------------------------------------------


def _where(path: Path) -> _Where | None:
    """Parse ``<hardware>/<org>/<model>/<variant>/tp<N>/...``; None for other paths."""
    parts = path.resolve().parts[:-1]
    for place in range(len(parts) - 1, 4, -1):
        if tp := _TP.fullmatch(parts[place]):
            *_, hardware, organisation, name, variant = parts[:place]
            return _Where(hardware, f"{organisation}/{name}", variant, int(tp[1]))
    return None


def _hardware(root: Path, found: Mapping[Path, _Where | None], gpu: str | None) -> tuple[Any, str]:
    """GPU, and the name of its folder."""
    hardware = sorted({where.hardware for where in found.values() if where is not None})
    if not hardware:
        raise TableError(f"{root} has no profile file in <hardware>/<organisation>/<model>/<variant>/tp<N>")

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


def _add(profile: Profile, path: Path, where: _Where, model: DenseModel) -> None:
    try:
        shard = split(model, where.tp)
    except ModelError as error:
        profile.leave_out(path, str(error))
        return
    profile.models.add(where.model)
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
