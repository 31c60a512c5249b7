"""vLLM's linear layers of fp8 and fp8_block, built as a model's are, so that vLLM chooses the kernel.

A call quantises its bf16 inputs, as in a model. The calls are those of vLLM 0.26.0 and 0.33.0.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from fastroof.columns import QUANTISES
from fastroof.operators.gemm import gemm_bytes
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES
from kernels_bench.protocol import Point
from kernels_bench.providers import references
from kernels_bench.providers.device import Device, take
from kernels_bench.providers.random_inputs import SCALE_BLOCK, InputMaker, quantise_blocks, spread_scales
from kernels_bench.providers.rotating import RotatingCalls, count_sets, sample
from kernels_bench.providers.small_ops import Compiler, inductor_words
from kernels_bench.providers.torch_gemm import CHECKED_COLUMNS, CHECKED_ROWS
from kernels_bench.providers.vllm_layers import LAYERS, compiled_layer, compiles, model_being_built


def fp8_layer(weight: Any, scale: Any, compiler: Compiler) -> tuple[Any, str]:
    """Build a linear layer of a checkpoint's fp8 weight and scale, and name what quantises its inputs.

    vLLM compiles the quantisation unless it keeps that a custom op.
    """
    linear: Any = importlib.import_module(f"{LAYERS}.linear")
    is_block = scale.ndim == 2
    scheme = fp8_scheme("dynamic", is_block)
    with model_being_built(weight.device, scheme=scheme) as settings:
        n, k = weight.shape
        layer = linear.ReplicatedLinear(k, n, bias=False, quant_config=scheme, disable_tp=True)
        layer.weight.data.copy_(weight)
        (layer.weight_scale_inv if is_block else layer.weight_scale).data.copy_(scale)
        layer.quant_method.process_weights_after_loading(layer)
        quantise = getattr(layer.quant_method.fp8_linear, "quant_fp8", None)
        if quantise is None or quantise.enabled() or not compiles(settings):
            return layer, "quantisation of inputs"

        def compiled(x: Any, *scales: Any) -> Any:
            return compiled_layer(compiler, settings, quantise, x)

        quantise._forward_method = compiled
    return layer, inductor_words("quantisation of inputs")


def fp8_scheme(activations: str, is_block: bool) -> Any:
    """Return vLLM's description of an fp8 checkpoint, whose activations have dynamic or static scales."""
    fp8: Any = importlib.import_module(f"{LAYERS}.quantization.fp8")
    blocks = [SCALE_BLOCK, SCALE_BLOCK] if is_block else None
    return fp8.Fp8Config(True, activations, weight_block_size=blocks)


def chosen_attention(
    device: Device, width: int, kv_dtype: str, num_heads: int, is_mla: bool, has_window: bool
) -> tuple[str, int]:
    """Return the class that vLLM's attention layer chooses, and its version of FlashAttention, else 0."""
    import torch

    selector: Any = importlib.import_module("vllm.v1.attention.selector")
    versions: Any = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    with model_being_built(device.name) as settings:
        settings.model_config = (
            None  # the choice asks for more of one, for kinds of models that are not measured
        )
        backend = selector.get_attn_backend(
            width,
            torch.bfloat16,
            "auto" if kv_dtype == "bf16" else kv_dtype,
            use_mla=is_mla,
            num_heads=num_heads if is_mla else None,
            has_sliding_window=has_window,
        )
        is_flash = backend.get_name().startswith("FLASH_ATTN")
        return backend.__name__, (versions.get_flash_attn_version() or 0) if is_flash else 0


def prepare_vllm_linear(
    point: Point, device: Device, seed: int, max_bytes: int, compiler: Compiler
) -> RotatingCalls:
    """Make inputs and a layer of an fp8 GEMM; each set has its own copy of the layer's weights."""
    dtype = point.values["dtype"]
    m, n, k = (int(point.values[name]) for name in ("m", "n", "k"))
    set_bytes = int(gemm_bytes(m, n, k, DTYPE_BYTES[dtype], ACTIVATION_BYTES))
    sets = count_sets(set_bytes, device.rotated_bytes, max_bytes)
    make = InputMaker(device, seed)
    is_block = dtype == "fp8_block"
    weight, scale = quantise_blocks(make.normal(n, k), SCALE_BLOCK) if is_block else make.quantised(n, k)
    layer, quantisation = fp8_layer(weight, scale, compiler)
    layers = [layer, *(_copy(layer) for _ in range(sets - 1))]
    x = make.normal(sets, m, k)
    rows = make.indices(sample(m, CHECKED_ROWS, seed), "int64")
    columns = make.indices(sample(n, CHECKED_COLUMNS, seed + 1), "int64")
    spread = spread_scales(scale, SCALE_BLOCK, n, k)[columns] if is_block else scale
    expected_weight, outputs = take(weight, columns), dict[int, Any]()
    apply = layer.quant_method.apply

    def launch(index: int) -> None:
        outputs[index] = apply(layers[index], x[index])

    def read(index: int) -> Any:
        return outputs[index][rows][:, columns]

    def expect(index: int) -> Any:
        return references.linear(x[index][rows], expected_weight, None, spread)

    kernel = f"vllm {type(layer.quant_method.fp8_linear).__name__}, with {quantisation}"
    included = {QUANTISES.name: 1}
    return RotatingCalls(kernel, sets, sets * set_bytes, launch, read, expect, included)


def _copy(layer: Any) -> Any:
    """Return what a call reads of a layer, its tensors elsewhere in memory."""
    plain = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    tensors = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
    return SimpleNamespace(**plain, **{name: value.detach().clone() for name, value in tensors.items()})
