"""Linear layers of a step: in bf16, in fp8 with a scale a tensor, and in fp8 with a scale a block.

Inputs of fp8 layers are quantised by a kernel of their own, as engines do without a compiler's fusion: with a
static scale (a scale a tensor), or with one for 128 elements of a row (a scale a block).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

from fastroof.errors import MeasureError
from fastroof.models import DenseModel
from fastroof.models.dense import split
from kernels_bench.providers.device import FP8_MAX, Device
from kernels_bench.providers.experts import LARGEST_GATED, LARGEST_INPUT
from kernels_bench.providers.random_inputs import SCALE_BLOCK, InputMaker, quantise_blocks, spread_scales
from kernels_bench.providers.small_ops import SmallOps
from kernels_bench.providers.torch_gemm import FP8_ALIGNMENT, torch_gemm

WEIGHT_DTYPES: Final = ("bf16", "fp8", "fp8_block")
"""Formats that a step's linear layers may have; its embedding and LM head stay in bf16."""

SMALLEST_SCALE: Final = 1e-10
"""Of a group of inputs; what vLLM passes."""


class LinearLayer(NamedTuple):
    """A linear layer's weight and what belongs to it."""

    # Shape (outputs, inputs).
    weight: Any
    # fp8: float32, shape (1,). fp8_block: float32, shape (outputs / 128, inputs / 128). None for bf16.
    scale: Any = None
    # fp8: the static float32 scale of inputs, shape (1,). None for other formats.
    x_scale: Any = None
    # Shape (outputs,), in the dtype of activations.
    bias: Any = None


def random_linear(
    make: InputMaker, outputs: int, inputs: int, dtype: str, weights: str, bias: Any, *, gated: bool = False
) -> LinearLayer:
    """Draw a layer whose outputs are of the order of its inputs."""
    weight = make.normal(outputs, inputs, dtype=dtype)
    weight *= inputs**-0.5
    if weights == "fp8_block":
        return LinearLayer(*quantise_blocks(weight, SCALE_BLOCK), bias=bias)
    if weights == "fp8":
        scale = weight.abs().amax().reshape(1).float() / FP8_MAX
        x_scale = make.constant((LARGEST_GATED if gated else LARGEST_INPUT) / FP8_MAX)
        return LinearLayer(_to_fp8(weight / scale.to(weight.dtype)), scale, x_scale, bias)
    return LinearLayer(weight, bias=bias)


def _to_fp8(values: Any) -> Any:
    import torch

    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def refuses_weights(model: DenseModel, weights: str) -> str | None:
    """Return why a model's linear layers cannot have a format, or None."""
    if weights not in WEIGHT_DTYPES:
        return f"steps have no weights in {weights}; valid are {', '.join(WEIGHT_DTYPES)}"
    multiple = {"bf16": 1, "fp8": FP8_ALIGNMENT, "fp8_block": SCALE_BLOCK}[weights]
    share = split(model, 1)
    sizes = {
        "hidden": model.hidden,
        "QKV": share.qkv_out,
        "attention output": share.o_in,
        "MLP": share.intermediate,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % multiple]
    if odd:
        return f"{model.name} in {weights} needs widths in multiples of {multiple}, not {', '.join(odd)}"
    return None


class Fp8Kernels(Protocol):
    """How a backend multiplies in fp8."""

    # ``"fp8"`` or ``"fp8_block"``.
    dtype: str
    # What multiplies, for the provider column.
    kernel: str

    def quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Write ``x / scale`` in fp8; of fp8_block, ``scale`` is written too, shape (rows, width / 128)."""

    def multiply(self, out: Any, x: Any, x_scale: Any, layer: LinearLayer) -> None:
        """Write the layer's outputs of quantised inputs."""


class VllmFp8:
    """vLLM's quantisation and CUTLASS GEMMs, as its linear layers run them on Hopper without DeepGEMM."""

    def __init__(self, dtype: str) -> None:
        import torch

        self._ops = torch.ops._C
        self.dtype = dtype
        self.kernel = f"vllm cutlass_scaled_mm, {dtype}"

    def quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Quantise inputs."""
        if self.dtype == "fp8":
            self._ops.static_scaled_fp8_quant(out, x, scale, None)
        else:
            # Scales of a column lie together, as the GEMM reads them; no powers of two, no TMA alignment.
            self._ops.per_token_group_fp8_quant(
                x, out, scale, SCALE_BLOCK, SMALLEST_SCALE, -FP8_MAX, FP8_MAX, False, True, False
            )

    def multiply(self, out: Any, x: Any, x_scale: Any, layer: LinearLayer) -> None:
        """Multiply; in fp8_block a separate kernel adds a bias, which the GEMM lacks."""
        is_block = self.dtype == "fp8_block"
        scale, bias = (layer.scale.t(), None) if is_block else (layer.scale, layer.bias)
        self._ops.cutlass_scaled_mm(out, x, layer.weight.t(), x_scale, scale, bias)
        if is_block and layer.bias is not None:
            out += layer.bias


class TorchFp8:
    """torch's fp8 GEMM with a scale a tensor, for hosts without vLLM's libraries."""

    dtype = "fp8"
    kernel = "torch._scaled_mm, per tensor"

    def __init__(self, ops: SmallOps) -> None:
        self._ops = ops
        _, self._gemm = torch_gemm("fp8")

    def quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Quantise inputs."""
        self._ops.fp8_quantise(out, x, scale)

    def multiply(self, out: Any, x: Any, x_scale: Any, layer: LinearLayer) -> None:
        """Multiply; a separate kernel adds a bias."""
        self._gemm(out, x, layer.weight, x_scale, layer.scale)
        if layer.bias is not None:
            out += layer.bias


class PlainFp8:
    """Plain torch: for machines without a GPU, and to show what the kernels do."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.kernel = f"torch, {dtype} emulated"

    def quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Quantise inputs."""
        if self.dtype == "fp8_block":
            groups = x.float().unflatten(-1, (-1, SCALE_BLOCK)).abs().amax(dim=-1)
            scale.copy_(groups.clamp_min(SMALLEST_SCALE) / FP8_MAX)
            scale = spread_scales(scale, 1, *x.shape)
        out.copy_(_to_fp8(x.float() / scale))

    def multiply(self, out: Any, x: Any, x_scale: Any, layer: LinearLayer) -> None:
        """Multiply in float32."""
        rows, columns = layer.weight.shape
        scale = layer.scale
        if self.dtype == "fp8_block":
            x_scale, scale = (
                spread_scales(x_scale, 1, *x.shape),
                spread_scales(scale, SCALE_BLOCK, rows, columns),
            )
        product = (x.float() * x_scale) @ (layer.weight.float() * scale).t()
        out.copy_(product if layer.bias is None else product + layer.bias.float())


def choose_fp8(weights: str, has_vllm_ops: bool, ops: SmallOps, device: Device) -> Fp8Kernels | None:
    """Choose how a GPU multiplies weights in a format; None for bf16."""
    if weights == "bf16":
        return None
    if device.capability < (8, 9):
        capability = ".".join(map(str, device.capability))
        raise MeasureError(f"weights in {weights} need compute capability 8.9, this GPU has {capability}")
    if has_vllm_ops:
        return VllmFp8(weights)
    if weights == "fp8_block":
        raise MeasureError("weights in fp8_block need vLLM's ops library, which is missing or was not named")
    return TorchFp8(ops)
