"""The aiter provider: AMD's fp8 GEMMs and attention, called as vLLM's ROCm backends call them.

Written by reading amd-aiter 0.1.7.post2, and of vLLM 0.26.0 and 0.33.0 ``_aiter_ops.py`` and
``v1/attention/backends/rocm_aiter_fa.py``, which call the same functions. Never run on a card.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np

from kernels_bench.protocol import Availability, Point, Prepared
from kernels_bench.providers.attention import contiguous_sets, paged_sets, prepare_attention, refuses_heads
from kernels_bench.providers.cuda_provider import CudaProvider, Launch
from kernels_bench.providers.device import cuda_availability
from kernels_bench.providers.paging import PAGE_SIZE, ragged_offsets
from kernels_bench.providers.torch_gemm import Gemm, prepare_gemm, refuses_gemm

PARTITION: Final = 256
"""Tokens of KV that a decode splits at: vLLM's ``_PARTITION_SIZE_ROCM``."""
LEAST_HEAD_DIM: Final = 64
"""vLLM decodes narrower heads with another kernel."""


class AiterProvider(CudaProvider):
    """Launches aiter's kernels."""

    name = "aiter"

    @cached_property
    def _aiter(self) -> Any:
        return importlib.import_module("aiter")

    @cached_property
    def launches(self) -> Mapping[str, Launch]:
        """What it launches, by operator."""
        decode = f"aiter paged_attention_v1, page {PAGE_SIZE}"
        return {
            "gemm": Launch(self._refuses_gemm, self._prepare_gemm, self._gemm_kernel),
            "attention_prefill": Launch(
                self._refuses_prefill, self._prepare_prefill, lambda point: "aiter flash_attn_varlen_func"
            ),
            "attention_decode": Launch(self._refuses_decode, self._prepare_decode, lambda point: decode),
        }

    def availability(self) -> Availability:
        """Return whether aiter imports and torch sees a GPU of AMD."""
        gpu = cuda_availability(self._device, has_amd=True)
        if not gpu.works:
            return gpu
        if not self.device.gfx:
            return Availability(False, "aiter is for AMD's GPUs")
        try:
            version = str(getattr(self._aiter, "__version__", "")) or "unknown"
        except Exception as error:  # it compiles parts of itself when it is imported
            why = f"{type(error).__name__}: {error}"
            return Availability(False, f"aiter cannot be imported ({why}): pip install amd-aiter")
        return Availability(True, versions={**(gpu.versions or {}), "aiter": version})

    def _refuses_gemm(self, point: Point) -> str | None:
        if point.values["dtype"] == "bf16":
            return "vLLM's bf16 GEMM is torch's"
        return refuses_gemm(point, self.device)

    def _gemm_kernel(self, point: Point) -> str:
        is_block = point.values["dtype"] == "fp8_block"
        return f"aiter {'gemm_a8w8_blockscale' if is_block else 'gemm_a8w8_CK, scales of rows'}"

    def _prepare_gemm(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        import torch

        def blocks(out: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> Any:
            return self._aiter.gemm_a8w8_blockscale(x, weight, x_scale, weight_scale, dtype=torch.bfloat16)

        def rows(out: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> Any:
            return self._aiter.gemm_a8w8_CK(x, weight, x_scale, weight_scale, None, torch.bfloat16)

        gemm: Gemm = blocks if point.values["dtype"] == "fp8_block" else rows
        kernel = self._gemm_kernel(point)
        return prepare_gemm(point, self.device, seed, max_bytes, kernel, gemm, scales_rows=gemm is rows)

    def _refuses_attention(self, point: Point) -> str | None:
        if point.values["kv_dtype"] != "bf16":
            return f"aiter's attention over {point.values['kv_dtype']} KV is not measured"
        if point.values.get("window", 0):
            return "aiter's attention within a window is not measured"
        return refuses_heads(point)

    def _refuses_prefill(self, point: Point) -> str | None:
        if point.values["q_len"] != point.values["kv_len"]:
            return "vLLM gathers a prefix and attends to it apart, which is not measured"
        return self._refuses_attention(point)

    def _refuses_decode(self, point: Point) -> str | None:
        if int(point.values["head_dim"]) < LEAST_HEAD_DIM:
            return f"aiter's paged attention has heads of {LEAST_HEAD_DIM} or more"
        return self._refuses_attention(point)

    def _prepare_prefill(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        sets = contiguous_sets(point, self.device, seed, max_bytes)
        offsets = self._ints(ragged_offsets(sets.new_tokens))
        longest = int(sets.new_tokens.max())

        def launch(index: int) -> None:
            self._aiter.flash_attn_varlen_func(
                q=sets.q[index], k=sets.k[index], v=sets.v[index], out=sets.out[index],
                cu_seqlens_q=offsets, cu_seqlens_k=offsets,
                max_seqlen_q=longest, max_seqlen_k=longest, min_seqlen_q=1,
                dropout_p=0.0, softmax_scale=sets.heads.scale, causal=True, window_size=(-1, -1),
            )  # fmt: skip

        return prepare_attention(sets, self.kernel(point), launch, seed)

    def _prepare_decode(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        import torch

        sets = paged_sets(point, self.device, seed, max_bytes, packed=True)
        batch, heads = sets.paged, sets.heads
        starts, lens, table = map(self._ints, (batch.token_offsets[:-1], batch.kv_lens, batch.block_table))
        longest = int(batch.kv_lens.max())
        parts = batch.num_sequences * heads.num_q_heads * -(-longest // PARTITION)
        # an output in bf16, the largest logit and the sum of each part
        workspace = torch.empty(parts * (2 * heads.head_dim + 8), dtype=torch.uint8, device=sets.q.device)
        one = torch.ones(1, dtype=torch.float32, device=sets.q.device)

        def launch(index: int) -> None:
            self._aiter.paged_attention_v1(
                sets.out[index], workspace, sets.q[index], sets.k[index], sets.v[index], heads.scale,
                table, starts, lens, longest, alibi_slopes=None,
                kv_cache_dtype="auto", kv_cache_layout="NHD", logits_soft_cap=0.0,
                k_scale=one, v_scale=one, fp8_out_scale=None,
                partition_size=PARTITION, mtp=1, sliding_window=0,
            )  # fmt: skip

        return prepare_attention(sets, self.kernel(point), launch, seed)

    def _ints(self, values: Any) -> Any:
        import torch

        return torch.tensor(np.ascontiguousarray(values), dtype=torch.int32, device=self.device.name)
