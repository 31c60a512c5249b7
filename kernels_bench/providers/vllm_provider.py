"""The vllm provider: FA3 over paged KV, MLA too, small CUDA ops; with vllm its layers as it compiles them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from kernels_bench.operators.attention import ATTENTION
from kernels_bench.protocol import Availability, Point, Prepared
from kernels_bench.providers.attention import paged_sets, prepare_attention, refuses_heads
from kernels_bench.providers.cuda_provider import CudaProvider, Launch
from kernels_bench.providers.device import Device, cuda_availability
from kernels_bench.providers.elementwise import prepare_small_op, refuses_small_op
from kernels_bench.providers.mla import MLA_QUERY_WIDTH, mla_sets, prepare_mla
from kernels_bench.providers.paging import PAGE_SIZE
from kernels_bench.providers.small_ops import KINDS, VLLM_KERNELS, Compiler, VllmSmallOps
from kernels_bench.providers.torch_gemm import refuses_gemm
from kernels_bench.providers.vllm_experts import (
    Build,
    build_experts,
    prepare_vllm_experts,
    refuses_vllm_experts,
    vllm_version,
)
from kernels_bench.providers.vllm_layers import (
    CompiledSmallOps,
    compiled_kernels,
    compiles,
    model_being_built,
)
from kernels_bench.providers.vllm_linear import chosen_attention, prepare_vllm_linear
from kernels_bench.providers.vllm_ops import find_library, load_libraries, plan_fa3, plan_fa3_mla

LINEAR_PROBE: Final = Point("gemm", {"dtype": "fp8_block", "m": 64, "n": 256, "k": 256})
SMALL_PROBE: Final = {"m": 2, "width": 256, "io_bytes": 1}
PROBE_BYTES: Final = 2**24
LISTED_BYTES: Final = 2**32
FA3_MLA_WIDTHS: Final = (512, 64)
"""Latent and rotary columns of a token's KV that FA3 is compiled for."""
FA3: Final = 3


class VllmProvider(CudaProvider):
    """Launches the kernels of vLLM's libraries."""

    name = "vllm"

    def __init__(self, device: Device | None = None, build: Build = build_experts) -> None:
        super().__init__(device)
        self._reasons: dict[str, str] | None = None
        self._build = build
        self._attention: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._compiler = Compiler()
        self._failed_layers: dict[str, str | None] = {}

    @cached_property
    def launches(self) -> Mapping[str, Launch]:
        """What it launches, by operator."""
        attention = Launch(self._refuses_attention, self._prepare_attention, self._attention_kernel)
        return {
            "gemm": Launch(self._refuses_gemm, self._prepare_gemm, self._chosen_kernel),
            **dict.fromkeys(ATTENTION, attention),
            "mla_decode": Launch(self._refuses_mla, self._prepare_mla, self._mla_kernel),
            "moe": Launch(self._refuses_moe, self._prepare_moe, self._chosen_kernel),
            "elementwise": Launch(
                self._refuses_elementwise,
                self._prepare_elementwise,
                lambda point: self._small_kernels[point.values["kind"]],
            ),
        }

    def _chosen_kernel(self, point: Point) -> str:
        """Name what vLLM's layer chooses, which it does on the GPU only."""
        if not self.device.is_here:
            return "vllm's layer, whose class the GPU decides"
        return self.prepare(point, 0, LISTED_BYTES).kernel

    @property
    def reasons(self) -> dict[str, str]:
        """Why each library is not there; empty where it is."""
        if self._reasons is None:
            reasons = load_libraries()
            if not reasons["fa3"] and not self.device.is_hopper:
                reasons["fa3"] = (
                    f"FA3 is for Hopper, compute capability 9.0; this GPU has {self.device.version}"
                )
            self._reasons = reasons
        return self._reasons

    def availability(self) -> Availability:
        """Return whether any of the libraries loads on a GPU here."""
        cuda = cuda_availability(self._device)
        if not cuda.works:
            return cuda
        missing = [reason for reason in self.reasons.values() if reason]
        version = vllm_version()
        if len(missing) == len(self.reasons) and not version:
            return Availability(False, "; ".join(missing))
        loaded = {f"vllm_{name}": _identity(name) for name, reason in self.reasons.items() if not reason}
        if version:
            loaded["vllm"] = version
        return Availability(True, "; ".join(missing), {**(cuda.versions or {}), **loaded})

    def _refuses_gemm(self, point: Point) -> str | None:
        if point.values["dtype"] == "bf16":
            return "vLLM's bf16 GEMM is torch's"
        return refuses_gemm(point, self.device) or self._no_linear

    @cached_property
    def _no_linear(self) -> str | None:
        """Why vLLM's linear layers cannot be built here."""
        if not vllm_version():
            return "vLLM's linear layers need vllm itself, which is not installed"
        return self._failure(LINEAR_PROBE, "vLLM's linear layers")

    def _failure(self, probe: Point, what: str) -> str | None:
        """Why a probe does not run on the GPU here; a failure at each point would stop the provider."""
        if not self.device.is_here:
            return None
        try:
            self.launches[probe.operator].prepare(probe, 0, PROBE_BYTES).run(0)
        except Exception as error:
            words, _, _ = str(error).partition("\n\n")  # Inductor's continue with advice for debugging
            return f"{what} do not run here: {type(error).__name__}: {' '.join(words.split())}"
        return None

    def _prepare_gemm(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        return prepare_vllm_linear(point, self.device, seed, max_bytes, self._compiler)

    def _refuses_moe(self, point: Point) -> str | None:
        if reason := refuses_vllm_experts(point, self.device):
            return reason
        if self._build is build_experts and not vllm_version():
            return "vLLM's fused experts need vllm itself, which is not installed: its libraries hold none"
        return None

    def _prepare_moe(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        return prepare_vllm_experts(point, self._build, self.device, seed, max_bytes)

    def _refuses_elementwise(self, point: Point) -> str | None:
        if point.values["kind"] not in KINDS:
            return f"{self.name} {self.lacks} {point.values['kind']}"
        return refuses_small_op(point) or self._failed_small_op(str(point.values["kind"]))

    @property
    def _small_kernels(self) -> dict[str, str]:
        """What would be launched; vLLM compiles by default, and its settings are known on the GPU only."""
        if not vllm_version():
            return VLLM_KERNELS
        return self._small_ops.kernels if self.device.is_here else compiled_kernels()

    @cached_property
    def _small_ops(self) -> VllmSmallOps:
        """Layers as vLLM compiles them; custom ops where it compiles nothing, or of the libraries alone."""
        if vllm_version():
            with model_being_built(self.device.name) as settings:
                if compiles(settings):
                    return CompiledSmallOps(self.device, self._compiler)
        return VllmSmallOps()

    def _failed_small_op(self, kind: str) -> str | None:
        """Why vLLM's kernel of a kind does not run here."""
        kernel = self._small_kernels[kind]
        if kernel == VLLM_KERNELS[kind]:
            return self.reasons["ops"] or None
        if kind not in self._failed_layers:
            probe = Point("elementwise", {"kind": kind, **SMALL_PROBE})
            self._failed_layers[kind] = self._failure(probe, f"kernels of {kernel}")
        return self._failed_layers[kind]

    def _prepare_elementwise(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        return prepare_small_op(point, self._small_ops, self.device, seed, max_bytes)

    def _refuses_attention(self, point: Point) -> str | None:
        kv_dtype = point.values["kv_dtype"]
        # Over fp8 KV it computes in fp8, the table's attention in bf16; a decode waits for its KV in either.
        if kv_dtype != "bf16" and not (kv_dtype == "fp8" and point.operator == "attention_decode"):
            return f"vLLM's FA3 computes in {kv_dtype} where the KV cache is"
        return refuses_heads(point) or self.reasons["fa3"] or self._other_attention(point)

    def _chosen_attention(self, point: Point) -> tuple[str, int]:
        """Return the class that vLLM's attention layer chooses, and its version of FlashAttention."""
        if not vllm_version() or not self.device.is_here:
            return "", FA3  # the library alone: nothing chooses
        values = point.values
        is_mla = point.operator == "mla_decode"
        width = FA3_MLA_WIDTHS[0] + FA3_MLA_WIDTHS[1] if is_mla else int(values["head_dim"])
        key = (width, str(values["kv_dtype"]), int(values["num_q_heads"]), is_mla, bool(values.get("window")))
        if key not in self._attention:
            self._attention[key] = chosen_attention(self.device, *key)
        return self._attention[key]

    def _other_attention(self, point: Point) -> str | None:
        """Return what vLLM's attention layer would choose if not FA3, which is called as its layer does."""
        name, version = self._chosen_attention(point)
        if version == FA3:
            return None
        return f"vLLM chooses {name}{f' with FA{version}' if version else ''} here, which is not measured"

    def _attention_kernel(self, point: Point) -> str:
        window = int(point.values.get("window", 0))
        within = f", window {window}" if window else ""
        queries = ", fp8 queries, quantising them not inside" if point.values["kv_dtype"] == "fp8" else ""
        words = f"vllm {self._chosen_attention(point)[0]} FA3 paged, page {PAGE_SIZE}{within}{queries}"
        return " ".join(words.split())

    def _mla_kernel(self, point: Point) -> str:
        return " ".join(f"vllm {self._chosen_attention(point)[0]} FA3 MLA, page {PAGE_SIZE}".split())

    def _prepare_attention(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        q_dtype = str(point.values["kv_dtype"])
        sets = paged_sets(point, self.device, seed, max_bytes, packed=True, q_dtype=q_dtype)
        attend = plan_fa3(sets.paged, sets.heads, sets.q.dtype, self.device)
        return prepare_attention(sets, self._attention_kernel(point), sets.each(attend), seed)

    def _refuses_mla(self, point: Point) -> str | None:
        values = point.values
        if values["kv_dtype"] != "bf16":
            return f"vLLM's FA3 has no MLA over {values['kv_dtype']} KV"
        widths = int(values["kv_lora_rank"]), int(values["rope_dim"])
        if widths != FA3_MLA_WIDTHS:
            return f"vLLM's FA3 has MLA of 512 latent and 64 rotary columns, not {widths[0]} and {widths[1]}"
        return self.reasons["fa3"] or self._other_attention(point)

    def _prepare_mla(self, point: Point, seed: int, max_bytes: int) -> Prepared:
        sets = mla_sets(point, self.device, seed, max_bytes, page_size=PAGE_SIZE, packed=True)
        scale = 1.0 / math.sqrt(MLA_QUERY_WIDTH)
        heads = int(point.values["num_q_heads"])
        attend = plan_fa3_mla(sets.batch, heads, *FA3_MLA_WIDTHS, sets.q_pe.dtype, self.device, scale)
        return prepare_mla(sets, self._mla_kernel(point), attend, MLA_QUERY_WIDTH, seed)


def _identity(name: str) -> str:
    """Return what tells one build of a library from another: the start of its SHA-256."""
    import hashlib

    path = find_library(name)
    if path is None:
        return "registered by the process"
    with path.open("rb") as file:
        return f"{path.name} sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
