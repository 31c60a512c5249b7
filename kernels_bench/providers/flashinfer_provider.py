"""The flashinfer provider: prefill FA2 and FA3, paged decode, MLA, experts, block-scaled GEMM.

It measures with libraries that are built already, unless KERNELS_BENCH_COMPILE is 1: a first use on the GPU
host would take minutes of its time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from kernels_bench.protocol import Availability, Point, Prepared
from kernels_bench.providers.attention import (
    Heads,
    contiguous_sets,
    paged_sets,
    prepare_attention,
    refuses_heads,
)
from kernels_bench.providers.cuda_provider import CudaProvider, Launch
from kernels_bench.providers.device import Device, cuda_availability
from kernels_bench.providers.flashinfer_calls import (
    COMPILE_VARIABLE,
    FlashinferModules,
    flashinfer_modules,
    plan_decode,
    plan_mla,
    plan_paged_prefill,
    plan_ragged_prefill,
)
from kernels_bench.providers.flashinfer_kernels import (
    GEMM_KERNEL,
    experts_kernel,
    prepare_block_gemm,
    prepare_flashinfer_experts,
    refuses_block_gemm,
    refuses_flashinfer_experts,
)
from kernels_bench.providers.mla import MLA_PAGE_SIZE, MLA_QUERY_WIDTH, mla_sets, prepare_mla
from kernels_bench.providers.paging import PAGE_SIZE


class FlashinferProvider(CudaProvider):
    """Launches flashinfer's kernels."""

    name = "flashinfer"

    def __init__(
        self, device: Device | None = None, flashinfer: Any = None, modules: FlashinferModules | None = None
    ) -> None:
        super().__init__(device)
        self._flashinfer = flashinfer
        self._modules = modules

    @cached_property
    def launches(self) -> Mapping[str, Launch]:
        """What it launches, by operator."""
        return {
            "gemm": Launch(self._refuses_gemm, self._prepare_gemm, lambda point: GEMM_KERNEL),
            "attention_prefill": Launch(self._refuses_prefill, self._prepare_prefill, self._prefill_kernel),
            "attention_decode": Launch(self._refuses_decode, self._prepare_decode, self._decode_kernel),
            "mla_decode": Launch(self._refuses_mla, self._prepare_mla, self._mla_kernel),
            "moe": Launch(self._refuses_moe, self._prepare_moe, experts_kernel),
        }

    @property
    def modules(self) -> FlashinferModules:
        """Which libraries are built."""
        if self._modules is None:
            self._modules = flashinfer_modules()
        return self._modules

    def availability(self) -> Availability:
        """Return whether flashinfer imports and torch sees a GPU that it has kernels for."""
        cuda = cuda_availability(self._device)
        if not cuda.works:
            return cuda
        if self.device.capability < (8, 0):
            return Availability(
                False, f"flashinfer needs compute capability 8.0, this GPU has {self.device.version}"
            )
        try:
            package = self._package()
        except Exception as error:  # whatever a package raises when it is imported, this host lacks it
            return Availability(False, f"flashinfer cannot be imported: {type(error).__name__}: {error}")
        versions = {**(cuda.versions or {}), "flashinfer": str(getattr(package, "__version__", "unknown"))}
        return Availability(True, versions=versions)

    def _package(self) -> Any:
        if self._flashinfer is None:
            package = importlib.import_module("flashinfer")
            for part in ("mla", "gemm", "fused_moe"):
                importlib.import_module(f"flashinfer.{part}")
            self._flashinfer = package
        return self._flashinfer

    def _refuses_gemm(self, point: Point) -> str | None:
        return refuses_block_gemm(point, self.device, self.modules)

    def _prepare_gemm(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        return prepare_block_gemm(point, self._package(), self.device, seed, max_bytes)

    def _refuses_moe(self, point: Point) -> str | None:
        return refuses_flashinfer_experts(point, self.device, self.modules)

    def _prepare_moe(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        return prepare_flashinfer_experts(point, self._package(), self.device, seed, max_bytes)

    def _refuses_prefill(self, point: Point) -> str | None:
        if reason := refuses_heads(point):
            return reason
        if point.values["kv_dtype"] != "bf16":
            return f"prefill over {point.values['kv_dtype']} KV is not measured"
        if self._prefill_backend(point) is None:
            backend = "fa3" if self.device.is_hopper else "fa2"
            return _not_built(self.modules.prefill(backend, "bf16", _head_dim(point), _is_windowed(point)))
        return None

    def _refuses_decode(self, point: Point) -> str | None:
        if reason := refuses_heads(point):
            return reason
        kv_dtype = point.values["kv_dtype"]
        if kv_dtype not in ("bf16", "fp8"):
            return f"no decode over {kv_dtype} KV; there are bf16 and fp8"
        if self.modules.decode_uses_tensor_cores(Heads.of(point), kv_dtype) is None:
            return _not_built(self.modules.prefill("fa2", kv_dtype, _head_dim(point), _is_windowed(point)))
        return None

    def _refuses_mla(self, point: Point) -> str | None:
        if point.values["kv_dtype"] != "bf16":
            return f"MLA over {point.values['kv_dtype']} KV is not measured"
        if self._mla_backend(point) is None:
            latent, rope = int(point.values["kv_lora_rank"]), int(point.values["rope_dim"])
            return _not_built(self.modules.mla("fa3" if self.device.is_hopper else "fa2", latent, rope))
        return None

    def _prefill_backend(self, point: Point) -> str | None:
        return self.modules.prefill_backend(self.device, "bf16", _head_dim(point), _is_windowed(point))

    def _mla_backend(self, point: Point) -> str | None:
        latent, rope = int(point.values["kv_lora_rank"]), int(point.values["rope_dim"])
        backends = ("fa3", "fa2") if self.device.is_hopper else ("fa2",)
        built = (b for b in backends if self.modules.is_built(self.modules.mla(b, latent, rope)))
        return next(built, None)

    def _prepare_prefill(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        backend = self._prefill_backend(point) or "fa2"
        if _is_windowed(point):
            return self._prepare_windowed_prefill(point, seed, max_bytes, backend)
        sets = contiguous_sets(point, self.device, seed, max_bytes)
        launch = plan_ragged_prefill(self._package(), sets, self.device, backend)
        return prepare_attention(sets, self._prefill_kernel(point), launch, seed)

    def _prepare_windowed_prefill(self, point: Point, seed: int, max_bytes: int, backend: str) -> Prepared:
        """Over pages, of which a window leaves most unread: contiguous KV would hold and rotate all of it."""
        sets = paged_sets(point, self.device, seed, max_bytes, packed=False)
        package, dtype = self._package(), sets.q.dtype
        attend = plan_paged_prefill(package, sets.paged, sets.heads, dtype, self.device, backend)
        return prepare_attention(sets, self._prefill_kernel(point), sets.each(attend), seed)

    def _prepare_decode(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        sets = paged_sets(point, self.device, seed, max_bytes, packed=False)
        on_tensor = self.modules.decode_uses_tensor_cores(sets.heads, str(point.values["kv_dtype"]))
        dtypes = sets.q.dtype, sets.k.dtype
        attend = plan_decode(
            self._package(), sets.paged, sets.heads, *dtypes, self.device, tensor_cores=bool(on_tensor)
        )
        return prepare_attention(sets, self._decode_kernel(point), sets.each(attend), seed)

    def _prepare_mla(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        backend = self._mla_backend(point) or "fa2"
        sets = mla_sets(point, self.device, seed, max_bytes)
        heads, latent, rope = (int(point.values[n]) for n in ("num_q_heads", "kv_lora_rank", "rope_dim"))
        attend = plan_mla(self._package(), sets.batch, heads, latent, rope, self.device, backend)
        return prepare_mla(sets, self._mla_kernel(point), attend, MLA_QUERY_WIDTH, seed)

    def _prefill_kernel(self, point: Point) -> str:
        backend = self._prefill_backend(point) or "fa2"
        if _is_windowed(point):
            return f"flashinfer paged prefill {backend}, page {PAGE_SIZE}{_window_words(point)}"
        return f"flashinfer ragged prefill {backend}"

    def _decode_kernel(self, point: Point) -> str:
        is_tensor = self.modules.decode_uses_tensor_cores(Heads.of(point), str(point.values["kv_dtype"]))
        units = "tensor cores" if is_tensor else "CUDA cores"
        return f"flashinfer paged decode, {units}, page {PAGE_SIZE}{_window_words(point)}"

    def _mla_kernel(self, point: Point) -> str:
        return f"flashinfer MLA {self._mla_backend(point) or 'fa2'}, page {MLA_PAGE_SIZE}"


def _head_dim(point: Point) -> int:
    return int(point.values["head_dim"])


def _is_windowed(point: Point) -> bool:
    return int(point.values.get("window", 0)) > 0


def _window_words(point: Point) -> str:
    return f", window {point.values['window']}" if _is_windowed(point) else ""


def _not_built(name: str) -> str:
    return f"flashinfer's {name} is not built: install flashinfer-jit-cache, or set {COMPILE_VARIABLE}=1"
