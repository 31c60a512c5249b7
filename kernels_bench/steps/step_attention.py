"""What runs a step besides its GEMMs: attention over paged KV and the small kernels, by provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fastroof.errors import MeasureError
from kernels_bench.protocol import Availability
from kernels_bench.providers.attention import Heads
from kernels_bench.providers.device import CPU_DEVICE, Device, cuda_availability, cuda_device
from kernels_bench.providers.flashinfer_calls import FlashinferModules, plan_decode, plan_paged_prefill
from kernels_bench.providers.flashinfer_provider import FlashinferProvider
from kernels_bench.providers.paging import PagedBatch
from kernels_bench.providers.small_ops import SmallOps, TorchSmallOps, VllmSmallOps
from kernels_bench.providers.torch_attention import causal_attention, equal_runs
from kernels_bench.providers.vllm_ops import plan_fa3
from kernels_bench.providers.vllm_provider import VllmProvider
from kernels_bench.steps.step_linear import Fp8Kernels, PlainFp8, choose_fp8

STEP_PROVIDERS: Final = ("vllm", "flashinfer", "torch", "cpu")
"""In order of choice; cpu only when it is asked for."""

Attend = Callable[[Any, Any, Any, Any], None]
"""``attend(q, k_pages, v_pages, out)`` of one layer."""


class StepAttention(Protocol):
    """Attention of a whole step over paged KV."""

    # What it launches.
    kernel: str
    # Whether K and V of a token lie side by side.
    packed: bool
    # Whether it follows a page table, so that pages may lie in any order.
    shuffled: bool

    def plan(self, batch: PagedBatch, heads: Heads, dtype: Any, device: Device) -> Attend:
        """Plan a step once; what is returned runs in every layer."""


class Fa3Attention:
    """vLLM's FA3: one call for prefills and decodes."""

    kernel = "vllm FA3"
    packed = True
    shuffled = True

    def plan(self, batch: PagedBatch, heads: Heads, dtype: Any, device: Device) -> Attend:
        """Plan a step."""
        return plan_fa3(batch, heads, dtype, device)


class FlashinferAttention:
    """flashinfer: its decode kernel where all requests decode, else its paged prefill for all of them."""

    packed = False
    shuffled = True

    def __init__(self, flashinfer: Any, modules: FlashinferModules, heads: Heads) -> None:
        self._flashinfer = flashinfer
        self._tensor_cores = bool(modules.decode_uses_tensor_cores(heads, "bf16"))
        self.kernel = "flashinfer paged"

    def plan(self, batch: PagedBatch, heads: Heads, dtype: Any, device: Device) -> Attend:
        """Plan a step."""
        if batch.num_tokens > batch.num_sequences:
            return plan_paged_prefill(self._flashinfer, batch, heads, dtype, device)
        return plan_decode(
            self._flashinfer, batch, heads, dtype, dtype, device, tensor_cores=self._tensor_cores
        )


class SdpaAttention:
    """torch's SDPA: one call for each run of requests of one length, over pages that lie in a row.

    Serving engines run nothing like it for decodes; it is for hosts that have neither of the others.
    """

    kernel = "torch SDPA, one call a length"
    packed = False
    shuffled = False

    def plan(self, batch: PagedBatch, heads: Heads, dtype: Any, device: Device) -> Attend:
        """Plan a step."""
        tokens, pages, counts = batch.token_offsets, batch.page_offsets, batch.page_counts
        calls = []
        for first, end in equal_runs(batch.new_tokens, batch.kv_lens):
            rows = slice(int(tokens[first]), int(tokens[end]))
            held = slice(int(pages[first]), int(pages[end]))
            calls.append((rows, held, end - first, int(counts[first]), int(batch.kv_lens[first])))

        def attend(q: Any, k: Any, v: Any, out: Any) -> None:
            for rows, held, sequences, count, kv_len in calls:
                keys, values = (
                    x[held].unflatten(0, (sequences, count)).flatten(1, 2)[:, :kv_len].transpose(1, 2)
                    for x in (k, v)
                )
                queries = q[rows].unflatten(0, (sequences, -1)).transpose(1, 2)
                result = causal_attention(queries, keys, values)
                out[rows] = result.transpose(1, 2).flatten(0, 1)

        return attend


@dataclass(frozen=True)
class StepBackend:
    """What a step runs on."""

    # For the ``provider`` column: attention, then the small kernels.
    provider: str
    attention: StepAttention
    # Norms, rope, activation, KV write.
    ops: SmallOps
    # Where it runs.
    device: Device
    # dtype of weights, activations and KV: bf16, or fp32 on a CPU.
    dtype: str
    # For the provenance.
    versions: dict[str, str]
    # How linear layers in fp8 are multiplied; None for weights in ``dtype``.
    fp8: Fp8Kernels | None = None

    @property
    def weights(self) -> str:
        """Format of linear layers, out of :data:`~kernels_bench.steps.step_linear.WEIGHT_DTYPES`."""
        return "bf16" if self.fp8 is None else self.fp8.dtype

    @property
    def row_dtype(self) -> str:
        """The dtype column: the format of linear layers, fp32 on a CPU."""
        return self.dtype if self.fp8 is None else self.fp8.dtype


def choose_backend(names: Sequence[str], heads: Heads, weights: str = "bf16") -> StepBackend:
    """Choose attention and small kernels of a step."""
    unknown = [name for name in names if name not in STEP_PROVIDERS]
    if unknown:
        raise MeasureError(f"unknown provider {', '.join(unknown)}; steps have {', '.join(STEP_PROVIDERS)}")
    if "cpu" in names:
        if len(names) > 1:
            raise MeasureError("cpu runs on the host and the others on a GPU: pass --providers cpu alone")
        return _cpu_backend(weights)
    cuda = cuda_availability()
    if not cuda.works:
        raise MeasureError(f"steps need a GPU ({cuda.reason}); --providers cpu proves the step without one")
    device, reasons = cuda_device(), {}
    versions = dict(cuda.versions or {})
    wanted = names or [name for name in STEP_PROVIDERS if name != "cpu"]
    vllm = VllmProvider(device) if "vllm" in wanted else None
    for name in wanted:
        attention = _attention(name, heads, device, vllm)
        if isinstance(attention, str):
            reasons[name] = attention
            continue
        ops, ops_name = _small_ops(vllm)
        if vllm is not None:
            versions |= dict(vllm.availability().versions or {})
        if name == "flashinfer":
            versions |= dict(FlashinferProvider(device).availability().versions or {})
        fp8 = choose_fp8(weights, isinstance(ops, VllmSmallOps), ops, device)
        kernels = "; ".join((attention.kernel, ops_name, *([fp8.kernel] if fp8 is not None else [])))
        return StepBackend(kernels, attention, ops, device, "bf16", versions, fp8)
    raise MeasureError("no attention works here: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()))


def _attention(name: str, heads: Heads, device: Device, vllm: VllmProvider | None) -> StepAttention | str:
    """Return a provider's attention, or why it has none here."""
    if name == "vllm":
        assert vllm is not None
        return vllm.reasons["fa3"] or Fa3Attention()
    if name == "torch":
        return SdpaAttention()
    provider = FlashinferProvider(device)
    answer: Availability = provider.availability()
    if not answer.works:
        return answer.reason
    module = provider.modules.prefill("fa2", "bf16", heads.head_dim)
    if not provider.modules.is_built(module):
        return f"flashinfer's library {module} is not built"
    import flashinfer

    return FlashinferAttention(flashinfer, provider.modules, heads)


def _small_ops(vllm: VllmProvider | None) -> tuple[SmallOps, str]:
    if vllm is not None and not vllm.reasons["ops"]:
        return VllmSmallOps(), "vllm ops"
    try:
        from kernels_bench.providers.triton_elementwise import TritonSmallOps
    except ImportError as error:
        raise MeasureError(f"a step needs vLLM's ops library or triton, and has neither: {error}") from None
    return TritonSmallOps(), "triton ops"


def _cpu_backend(weights: str) -> StepBackend:
    try:
        import torch
    except ImportError as error:
        raise MeasureError(f"a step needs torch, on a CPU too: {error}") from None
    versions = {"torch": str(torch.__version__)}
    fp8 = None if weights == "bf16" else PlainFp8(weights)
    name = "torch on a CPU"
    return StepBackend(name, SdpaAttention(), TorchSmallOps(), CPU_DEVICE, "fp32", versions, fp8)
