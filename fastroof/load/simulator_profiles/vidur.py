"""Convert profiles of Vidur into rows of GEMMs, attention, elementwise kernels and all-reduces.

Below ``data/profiling``::

    compute/<gpu>/<model>/mlp.csv             time_stats.<operation>.median and other statistics, ms;
                                              n_head, n_kv_head, n_embd, n_expanded_embd: of the whole
                                              model; num_tensor_parallel_workers, num_tokens, use_gated_mlp
    compute/<gpu>/<model>/attention.csv       the same of attn_prefill and attn_decode, ms; n_q_head,
                                              n_kv_head, n_embd; batch_size, prefill_chunk_size,
                                              kv_cache_size, is_prefill
    network/<gpu>_<topology>/all_reduce.csv   time_stats.all_reduce.median, ms; size in bytes (two an
                                              element); num_workers GPUs, devices_per_node of them a node

Heads, widths and sizes are the whole model's; one GPU runs its share. Everything runs eagerly in float16, and
kernels are timed (kineto, in whole us) without launches. ``kv_cache_size`` is per sequence and excludes the
tokens of the call. Calls with several prompts were not measured. All-reduces are NCCL's.

Sources: microsoft/vidur, vidur/profiling: mlp/mlp_impl.py, mlp/mlp_wrapper.py,
collectives/collectives_wrapper.py and common/timer_stats_store.py at
e26eb8f79fa9a6a7c38eac0f5291302402b20364, attention/attention_wrapper.py at
1478250bb8be249631e2b7353948faf662e28665, README.md at 6e2138f351d7aca3d9202594a090ccd7eac83f4a.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from fastroof.arrays import Array
from fastroof.columns import Column
from fastroof.config.gpu import GpuSpec, load_gpu
from fastroof.errors import GpuError, TableError
from fastroof.load.rows import read_columns
from fastroof.load.simulator_profiles import (
    EMBEDDING,
    Profile,
    booleans,
    gemm_rows,
    median_us,
    profile_folder,
    rope_rows,
    rows_of,
    silu_rows,
    streaming_rows,
)
from fastroof.operators.external_rows import ExternalRows, size_columns, text_columns

PROGRAM: Final = "vidur"
COMPUTE, NETWORK = "compute", "network"
MLP: Final = "mlp.csv"
ATTENTION: Final = "attention.csv"
ALLREDUCE: Final = "all_reduce.csv"
OTHERS: Final = {"send_recv.csv": "point to point: no such operator"}
BOOLEANS: Final = {"True": True, "False": False}

_MLP_COLUMNS: Final = (
    *size_columns("n_head", "n_kv_head", "n_embd", "n_expanded_embd"),
    *size_columns("num_tokens", "num_tensor_parallel_workers"),
    *text_columns("use_gated_mlp"),
)
_ATTENTION_COLUMNS: Final = (
    *size_columns(
        "n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size", "block_size"
    ),
    *size_columns("prefill_chunk_size", "kv_cache_size", minimum=0),
    *text_columns("is_prefill", "attention_backend"),
)
_NETWORK_COLUMNS: Final = (
    *size_columns("num_workers", "devices_per_node"),
    Column("size", "int", "B", "bytes that each GPU contributes"),
    *text_columns("collective"),
)


def convert_vidur(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    gpu: str | None = None,
    topology: str | None = None,
    dtype: str = "bf16",
    overwrite: bool = False,
) -> Path:
    """Import a folder of Vidur's profiles and write ``<output>/<gpu>/vidur/``."""
    root = profile_folder(folder, "Vidur's profiles, such as data/profiling", dtype)
    names = (MLP, ATTENTION, ALLREDUCE, *OTHERS)
    found = sorted(path for name in names for path in root.rglob(name))
    spec = _gpu(root, found, gpu)
    profile = Profile(PROGRAM, spec, root)
    matching = [path for path in found if _gpu_of(path) in (None, spec.name)]
    _check_topologies(matching, topology)
    for path in matching:
        if path.name in OTHERS:
            profile.leave_out(path, OTHERS[path.name])
        elif path.name == MLP:
            _add_mlp(profile, path, dtype)
        elif path.name == ATTENTION:
            _add_attention(profile, path, dtype)
        elif topology in (None, path.parent.name):
            _add_allreduce(profile, path, dtype)
        else:
            profile.leave_out(path, f"another topology than {topology}")
    provenance = {
        "url": "https://github.com/microsoft/vidur",
        "licence": "that of the repository; nothing of it is part of fastroof",
        "changes": "median times multiplied by 1e3 from ms to us, sizes divided by the tensor-parallel size, "
        f"rows in float16 filed under {dtype}, sorted",
        "timing": "kernels by the CUDA profiler in whole us, launched eagerly; medians",
    }
    return profile.write(None if output is None else Path(output), provenance, overwrite)


def _spelled(path: Path, folder: str) -> str | None:
    """Folder of a file below ``compute`` or ``network``."""
    parts = path.resolve().parts
    return parts[parts.index(folder) + 1] if folder in parts[:-2] else None


def _gpu_of(path: Path) -> str | None:
    """GPU in a path by fastroof's name, or as spelled if unknown; None without one."""
    word = _spelled(path, COMPUTE) or (_spelled(path, NETWORK) or "").partition("_")[0]
    if not word:
        return None
    try:
        return load_gpu(word).name
    except GpuError:
        return word


def _gpu(root: Path, found: Iterable[Path], gpu: str | None) -> GpuSpec:
    gpus = sorted({name for path in found if (name := _gpu_of(path)) is not None})
    if gpu is not None:
        spec = load_gpu(gpu)
        if gpus and spec.name not in gpus:
            raise TableError(f"{root} has no profile of {gpu}; it has {', '.join(gpus)}")
        return spec
    if len(gpus) != 1:
        what = f"profiles of {', '.join(gpus)}" if gpus else "no folder named after a GPU"
        raise TableError(f"{root} has {what}: choose the GPU with gpu= (--gpu)")
    return load_gpu(gpus[0])


def _check_topologies(found: Iterable[Path], topology: str | None) -> None:
    names = sorted({path.parent.name for path in found if path.name == ALLREDUCE})
    if topology is not None and topology not in names:
        raise TableError(f"no all-reduces of topology {topology!r}; available: {', '.join(names) or 'none'}")
    if topology is None and len(names) > 1:
        raise TableError(
            f"all-reduces of several topologies ({', '.join(names)}): choose one with topology= (--topology)"
        )


def _model(path: Path) -> str:
    """Hugging Face model of a compute file."""
    parts = path.resolve().parts
    below = parts[parts.index(COMPUTE) + 2 : -1] if COMPUTE in parts[:-2] else parts[-3:-1]
    return "/".join(below)


# -- files -----------------------------------------------------------------------------------------


def _add_mlp(profile: Profile, path: Path, dtype: str) -> None:
    raw = read_columns(path, _MLP_COLUMNS)
    gated = booleans(path, "use_gated_mlp", raw["use_gated_mlp"], BOOLEANS)
    operations = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "attn_rope", "mlp_act")
    norms = ("input_layernorm", "post_attention_layernorm")
    stats = median_us(path, [f"time_stats.{name}.median" for name in (*operations, *norms, "add", "emb")])
    us = {name.split(".")[1]: values for name, values in stats.items()}
    tp, m, hidden = raw["num_tensor_parallel_workers"], raw["num_tokens"], raw["n_embd"]
    head_dim = hidden // raw["n_head"]
    q_heads, kv_heads = (_share(raw[name], tp) for name in ("n_head", "n_kv_head"))
    width = _share(raw["n_expanded_embd"], tp)
    qkv = np.where((q_heads > 0) & (kv_heads > 0), (q_heads + 2 * kv_heads) * head_dim, 0)
    sizes = {
        "attn_pre_proj": (qkv, hidden),
        "attn_post_proj": (hidden, q_heads * head_dim),
        "mlp_up_proj": (np.where(gated, 2, 1) * width, hidden),
        "mlp_down_proj": (hidden, width),
    }
    if not us:
        raise TableError(f"{path} has no column time_stats.<operation>.median")
    profile.models.add(_model(path))
    for name, (n, k) in sizes.items():
        if name in us:
            profile.add(path, "gemm", gemm_rows(m, n, k, us[name], dtype))
    streaming = []
    if "attn_rope" in us:
        rope_width = np.where(kv_heads > 0, (q_heads + kv_heads) * head_dim, 0)
        streaming.append(rope_rows(m, rope_width, us["attn_rope"]))
    if "mlp_act" in us:
        rows = silu_rows(m, width, us["mlp_act"])
        streaming.append(ExternalRows(rows.columns, rows.left_out | {"activation without a gate": ~gated}))
    if "add" in us:
        streaming.append(streaming_rows("add", m, hidden, 3, us["add"]))
    # a model with one norm per layer may have a layer norm instead of an RMSNorm
    kind = {True: "rmsnorm", False: "norm"}[norms[1] in us]
    streaming += [streaming_rows(kind, m, hidden, 2, us[name]) for name in norms if name in us]
    for rows in streaming:
        profile.add(path, "elementwise", rows)
    if "emb" in us:
        profile.leave_out(path, EMBEDDING, len(m))


def _share(size: Array, tp: Array) -> Array:
    """A GPU's share of a size; 0 if it cannot be divided."""
    return np.where(size % tp == 0, size // tp, 0)


def _add_attention(profile: Profile, path: Path, dtype: str) -> None:
    raw = read_columns(path, _ATTENTION_COLUMNS)
    profile.models.add(_model(path))
    is_prefill = booleans(path, "is_prefill", raw["is_prefill"], BOOLEANS)
    kv_len = raw["kv_cache_size"] + np.where(is_prefill, raw["prefill_chunk_size"], 1)
    tp = raw["num_tensor_parallel_workers"]
    q_heads, kv_heads = (_share(raw[name], tp) for name in ("n_q_head", "n_kv_head"))
    kernels = np.array([word.rpartition(".")[2].lower() for word in raw["attention_backend"]], object)
    stats = median_us(path, ["time_stats.attn_prefill.median", "time_stats.attn_decode.median"])
    for operator, name, rows in (
        ("attention_prefill", "time_stats.attn_prefill.median", is_prefill),
        ("attention_decode", "time_stats.attn_decode.median", ~is_prefill),
    ):
        if name not in stats or not rows.any():
            continue
        chunk, heads, kv = (each[rows] for each in (raw["prefill_chunk_size"], q_heads, kv_len))
        kv_heads_here = kv_heads[rows]
        columns = {
            "num_q_heads": heads,
            "num_kv_heads": kv_heads_here,
            "head_dim": (raw["n_embd"] // raw["n_q_head"])[rows],
            "batch_size": raw["batch_size"][rows],
            "kv_len": kv,
            "kernel": kernels[rows],
        }
        out = {"fewer heads than GPUs": (heads < 1) | (kv_heads_here < 1)}
        if operator == "attention_prefill":
            columns["q_len"] = chunk
            out |= {"prompt without tokens": chunk < 1, "kv_len below q_len": kv < chunk}
        out |= {"kv_len below 1": kv < 1}
        profile.add(path, operator, rows_of(stats[name][rows], out, kv_dtype=dtype, window=0, **columns))


def _add_allreduce(profile: Profile, path: Path, dtype: str) -> None:
    raw = read_columns(path, _NETWORK_COLUMNS)
    name = "time_stats.all_reduce.median"
    stats = median_us(path, [name], is_needed=True)
    out = {
        "another collective": raw["collective"] != "all_reduce",
        "one GPU": raw["num_workers"] < 2,
        "across nodes": raw["devices_per_node"] < raw["num_workers"],
    }
    sizes = {"num_gpus": raw["num_workers"], "message_bytes": raw["size"]}
    profile.add(
        path, "allreduce", rows_of(stats[name], out, dtype=dtype, mode="nccl", kernel="nccl", **sizes)
    )
