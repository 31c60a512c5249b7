"""vLLM's kernels without vLLM: where its libraries are, and every call into them.

The schemas are those that the libraries of vLLM 0.26.0 register themselves (read out of the wheel), so
that a call can be checked where the libraries do not load. They load with ``torch.ops.load_library``
under the torch they were built with, 2.11 with CUDA 13.0.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from kernels_bench.providers.attention import Heads
from kernels_bench.providers.device import Device
from kernels_bench.providers.paging import PagedBatch

LIBRARIES_VARIABLE: Final = "KERNELS_BENCH_VLLM_LIBS"
"""Environment variable: a folder that holds the libraries, at any depth.

A library that an importable vllm has is taken from there instead: importing vllm loads it in any case, and a
process can register an op only once.
"""

LIBRARY_FILES: Final = {"fa3": "_vllm_fa3_C.abi3.so", "ops": "_C_stable_libtorch.abi3.so"}
"""FA3, and norm, rope, activation, quantisation and KV write."""

SCHEMAS: Final = {
    "_vllm_fa3_C::fwd": (
        "fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(b!)? out, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
        "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, "
        "Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, "
        "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, "
        "int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, "
        "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
        "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
    ),
    "_vllm_fa3_C::get_scheduler_metadata": (
        "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
        "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
        "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left, "
        "int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"
    ),
    "_C::fused_add_rms_norm": (
        "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()"
    ),
    "_C::rotary_embedding": (
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
    ),
    "_C::silu_and_mul": "silu_and_mul(Tensor(a!) result, Tensor input) -> ()",
    "_C::static_scaled_fp8_quant": (
        "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None)"
        " -> ()"
    ),
    "_C_cache_ops::reshape_and_cache_flash": (
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
    ),
}
"""Schema of each op that is called, by its qualified name."""

GRAPH_MAX_SPLITS: Final = 32
"""Splits of the KV that FA3 may make under full CUDA graphs; vLLM's default."""
GRAPH_MAX_TOKENS: Final = 512
"""Tokens up to which vLLM replays full CUDA graphs; its default. Beyond, FA3 chooses the splits itself."""


def find_library(name: str) -> Path | None:
    """Look for a library: in an importable vllm, else in the folder that the environment names."""
    spec = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if named := os.environ.get(LIBRARIES_VARIABLE):
        folders.append(Path(named))
    for folder in folders:
        libraries = sorted(folder.rglob(LIBRARY_FILES[name])) if folder.is_dir() else []
        if libraries:
            return libraries[0]
    return None


def load_libraries() -> dict[str, str]:
    """Load what can be loaded, and return why the rest does not load."""
    import torch

    reasons = {}
    for name, file in LIBRARY_FILES.items():
        if not _missing_ops(torch, name):
            reasons[name] = ""
            continue
        path = find_library(name)
        if path is None:
            reasons[name] = (
                f"{file} is neither in an installed vllm nor below the folder {LIBRARIES_VARIABLE} names"
            )
            continue
        try:
            ops: Any = torch.ops
            ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            reasons[name] = f"{path} does not load: {_root_cause(error)}"
            continue
        missing = _missing_ops(torch, name)
        reasons[name] = f"{path} lacks {', '.join(missing)}: need that of vLLM 0.26" if missing else ""
    return reasons


def _root_cause(error: BaseException) -> str:
    """Return the first line of what an error was raised from: torch's own names only the file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _missing_ops(torch: Any, name: str) -> list[str]:
    """Return the ops of a library that are not registered."""
    split = {op: op.split("::") for op in SCHEMAS if op.startswith("_vllm_fa3_C::") == (name == "fa3")}
    return [op for op, (space, short) in split.items() if not hasattr(getattr(torch.ops, space), short)]


def plan_fa3(
    batch: PagedBatch, heads: Heads, dtype: Any, device: Device
) -> Callable[[Any, Any, Any, Any], None]:
    """Plan FA3 over paged KV the way vLLM calls it, for prefills, decodes and both.

    ``dtype`` is that of queries, keys and values: with fp8 ones vLLM gives their scales, here 1.
    """
    import torch

    window = (heads.window_left, 0 if heads.window else -1)  # as vLLM's backend gives it
    widths = *heads.sizes, heads.head_dim
    descale = None
    if dtype.itemsize == 1:
        one = torch.ones(1, dtype=torch.float32, device=device.name)
        descale = one.expand(batch.num_sequences, heads.num_kv_heads)
    forward = _plan_forward(batch, widths, dtype, device, heads.scale, window, descale)
    return lambda q, k, v, out: forward(q, k, v, None, out)


def plan_fa3_mla(
    batch: PagedBatch, num_heads: int, latent: int, rope_dim: int, dtype: Any, device: Device, scale: float
) -> Callable[[Any, Any, Any, Any, Any], None]:
    """Plan MLA decode with absorbed weights the way vLLM calls FA3: keys are rotary, values latent."""
    forward = _plan_forward(batch, (num_heads, 1, rope_dim, latent), dtype, device, scale, (-1, -1), None)

    def attend(q_nope: Any, q_pe: Any, latent_pages: Any, rope_pages: Any, out: Any) -> None:
        forward(q_pe, rope_pages[:, :, None], latent_pages[:, :, None], q_nope, out)

    return attend


def _plan_forward(
    batch: PagedBatch,
    widths: tuple[int, int, int, int],
    dtype: Any,
    device: Device,
    scale: float,
    window: tuple[int, int],
    descale: Any,
) -> Callable[[Any, Any, Any, Any, Any], None]:
    """Plan a call; ``widths`` are the heads of queries and KV, and the widths of keys and of values."""
    import torch

    ops = torch.ops._vllm_fa3_C
    # Copied: a table's properties may be views that torch warns it must not write to.
    offsets, kv_lens, table = (
        torch.tensor(np.ascontiguousarray(x), dtype=torch.int32, device=device.name)
        for x in (batch.token_offsets, batch.kv_lens, batch.block_table)
    )
    longest_q, longest_kv = int(batch.new_tokens.max()), int(batch.kv_lens.max())
    splits = GRAPH_MAX_SPLITS if batch.num_tokens <= GRAPH_MAX_TOKENS else 0
    metadata = ops.get_scheduler_metadata(
        batch.num_sequences, longest_q, longest_kv, *widths, dtype, kv_lens, offsets,
        None, None, None, None,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
        batch.page_size, 0, True, *window, False,  # max_seqlen_k_new, is_causal, has_softcap
        splits, None, 0,  # pack_gqa, sm_margin
    )  # fmt: skip

    def forward(q: Any, k: Any, v: Any, q_v: Any, out: Any) -> None:
        ops.fwd(
            q, k, v, None, None, q_v, out, offsets,  # k_new, v_new
            None, None, None, kv_lens, longest_q, longest_kv,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q
            table, None, None,  # kv_batch_idx, leftpad_k
            None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary
            descale, descale, descale, scale,  # of q, k and v
            True, *window, 0.0, True,  # is_causal, softcap, is_rotary_interleaved
            metadata, splits, None, 0, None,  # pack_gqa, sm_margin, s_aux
            1, 0, None,  # cp_world_size, cp_rank, cp_tot_seqused_k
        )  # fmt: skip

    return forward
