"""Every call into flashinfer, with the arguments of 0.6.14 to 0.7.2 (bound to the installed one in tests).

Wrappers are made without ``use_cuda_graph``: they are planned once, before capture, for lengths that no
replay changes, and then only ``run`` is captured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kernels_bench.providers.attention import AttentionSets, Heads
from kernels_bench.providers.device import Device, torch_dtype
from kernels_bench.providers.mla import MLA_QUERY_WIDTH
from kernels_bench.providers.paging import PagedBatch, ragged_offsets

COMPILE_VARIABLE: Final = "KERNELS_BENCH_COMPILE"
"""Environment variable: 1 lets flashinfer compile what is not built: minutes a kernel, with nvcc."""
WORKSPACE_BYTES: Final = 256 * 2**20
CUDA_CORE_GROUPS: Final = (1, 2, 3, 4, 8)
"""Query heads a KV head that decode without tensor cores is compiled for (utils.cuh)."""
POS_ENCODING_NONE: Final = 0


@dataclass(frozen=True)
class FlashinferModules:
    """Which kernels need no compiler on this host."""

    # Whether the library of a module's name is there.
    is_built: Callable[[str], bool]

    def prefill(self, backend: str, kv_dtype: str, head_dim: int, windowed: bool = False) -> str:
        """Name of the prefill module, which decode with tensor cores runs too."""
        import torch
        from flashinfer.jit.attention.modules import get_batch_prefill_uri

        bf16 = torch.bfloat16
        kv = torch_dtype(kv_dtype)
        shape = (head_dim, head_dim, POS_ENCODING_NONE)
        # No soft cap, no fp16 accumulation.
        return str(
            get_batch_prefill_uri(backend, bf16, kv, bf16, torch.int32, *shape, windowed, False, False)
        )

    def decode(self, kv_dtype: str, head_dim: int, windowed: bool = False) -> str:
        """Name of the decode module that runs without tensor cores."""
        import torch
        from flashinfer.jit.attention.modules import get_batch_decode_uri

        bf16 = torch.bfloat16
        kv = torch_dtype(kv_dtype)
        shape = (head_dim, head_dim, POS_ENCODING_NONE)
        return str(get_batch_decode_uri(bf16, kv, bf16, torch.int32, *shape, windowed, False))

    def mla(self, backend: str, latent: int, rope_dim: int) -> str:
        """Name of the MLA module."""
        import torch
        from flashinfer.jit.attention.modules import get_batch_mla_uri

        bf16 = torch.bfloat16
        return str(get_batch_mla_uri(backend, bf16, bf16, bf16, torch.int32, latent, rope_dim, False))

    def prefill_backend(
        self, device: Device, kv_dtype: str, head_dim: int, windowed: bool = False
    ) -> str | None:
        """Return fa3 where it is built and runs, else fa2 where that is built, else None."""
        backends = ("fa3", "fa2") if device.is_hopper and kv_dtype == "bf16" else ("fa2",)
        built = (b for b in backends if self.is_built(self.prefill(b, kv_dtype, head_dim, windowed)))
        return next(built, None)

    def decode_uses_tensor_cores(self, heads: Heads, kv_dtype: str) -> bool | None:
        """Return whether decode runs on tensor cores, as vLLM has it wherever it can; None: cannot run."""
        windowed = heads.window > 0
        if self.is_built(self.prefill("fa2", kv_dtype, heads.head_dim, windowed)):
            return True
        fits = heads.group_size in CUDA_CORE_GROUPS
        return False if fits and self.is_built(self.decode(kv_dtype, heads.head_dim, windowed)) else None


def flashinfer_modules() -> FlashinferModules:
    """Look for libraries where flashinfer does: in its packages, several since 0.7.2, then in its cache."""
    from flashinfer.jit import env

    def is_built(name: str) -> bool:
        if os.environ.get(COMPILE_VARIABLE) == "1":
            return True
        find = getattr(env, "get_aot_path", lambda name: env.FLASHINFER_AOT_DIR / name / f"{name}.so")
        return any(path.is_file() for path in (find(name), env.FLASHINFER_JIT_DIR / name / f"{name}.so"))

    return FlashinferModules(is_built)


def _workspace(device: Device) -> Any:
    import torch

    # Zeroed: decode reads it before it writes it.
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device.name)


def _ints(values: Any, device: Device) -> Any:
    import torch

    return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=device.name)


def _pages(batch: PagedBatch, device: Device) -> list[Any]:
    return [_ints(values, device) for values in (batch.page_offsets, batch.pages, batch.last_page_lens)]


def _options(heads: Heads, q_dtype: Any, kv_dtype: Any) -> dict[str, Any]:
    window = {"window_left": heads.window_left, "sm_scale": heads.scale}
    return {**window, "q_data_type": q_dtype, "kv_data_type": kv_dtype}


def plan_ragged_prefill(
    flashinfer: Any, sets: AttentionSets, device: Device, backend: str
) -> Callable[[int], None]:
    """Plan prefill over contiguous KV, causal from the lower right."""
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(device), "NHD", backend=backend)
    heads = sets.heads
    offsets = [_ints(ragged_offsets(lengths), device) for lengths in (sets.new_tokens, sets.kv_lens)]
    wrapper.plan(*offsets, *heads.sizes, causal=True, **_options(heads, sets.q.dtype, sets.k.dtype))
    return lambda i: wrapper.run(sets.q[i], sets.k[i], sets.v[i], out=sets.out[i])


def plan_paged_prefill(
    flashinfer: Any, batch: PagedBatch, heads: Heads, dtype: Any, device: Device, backend: str = "fa2"
) -> Callable[[Any, Any, Any, Any], None]:
    """Plan attention of a whole step over paged KV, decodes among it."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD", backend=backend)
    offsets = _ints(batch.token_offsets, device)
    pages, page = _pages(batch, device), batch.page_size
    wrapper.plan(offsets, *pages, *heads.sizes, page, causal=True, **_options(heads, dtype, dtype))
    return lambda q, k, v, out: wrapper.run(q, (k, v), out=out)


def plan_decode(
    flashinfer: Any,
    batch: PagedBatch,
    heads: Heads,
    q_dtype: Any,
    kv_dtype: Any,
    device: Device,
    *,
    tensor_cores: bool,
) -> Callable[[Any, Any, Any, Any], None]:
    """Plan one query a sequence over paged KV."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device), "NHD", use_tensor_cores=tensor_cores, backend="fa2" if tensor_cores else "auto"
    )
    pages = _pages(batch, device)
    wrapper.plan(*pages, *heads.sizes, batch.page_size, **_options(heads, q_dtype, kv_dtype))
    return lambda q, k, v, out: wrapper.run(q, (k, v), out=out)


def plan_mla(
    flashinfer: Any,
    batch: PagedBatch,
    num_heads: int,
    latent: int,
    rope_dim: int,
    device: Device,
    backend: str,
) -> Callable[[Any, Any, Any, Any, Any], None]:
    """Plan MLA decode with absorbed weights."""
    import torch

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(device), backend=backend)
    wrapper.plan(
        _ints(batch.token_offsets, device),
        _ints(batch.page_offsets, device),
        _ints(batch.pages, device),
        _ints(batch.kv_lens, device),
        num_heads,
        latent,
        rope_dim,
        batch.page_size,
        False,
        1.0 / math.sqrt(MLA_QUERY_WIDTH),
        torch.bfloat16,
        torch.bfloat16,
    )

    return lambda q_nope, q_pe, latent, rope, out: wrapper.run(q_nope, q_pe, latent, rope, out=out)
