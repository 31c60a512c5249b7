"""How vLLM's layers are built and compiled, and its small ones as its engine runs them.

vLLM 0.26.0 and 0.33.0 agree. Compiling is their default (level O2). ``VllmConfig.__post_init__`` then adds
"none" to ``custom_ops``, and ``CudaPlatformBase.get_default_ir_op_priority`` makes norms "native": Inductor
compiles norms, rope, activations and quantisation. With ``enforce_eager`` or TORCH_COMPILE_DISABLE=1 it is
"all" and "vllm_c": custom ops. Weights in blocks of fp8 add "+quant_fp8". Attention backends write KV.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any, Final

from kernels_bench.providers.device import Device
from kernels_bench.providers.small_ops import (
    RMS_EPSILON,
    ROPE_THETA,
    VLLM_KERNELS,
    Compiler,
    VllmSmallOps,
    inductor_words,
)

LAYERS: Final = "vllm.model_executor.layers"
_NAMES: Final = {
    "rmsnorm_residual": "RMSNorm",
    "rope": "RotaryEmbedding",
    "silu_and_mul": "SiluAndMul",
    "fp8_quantise": "QuantFP8",
}


def compiled_kernels() -> dict[str, str]:
    """Name what computes each kind where vLLM compiles."""
    return VLLM_KERNELS | {kind: inductor_words(f"vllm {name}") for kind, name in _NAMES.items()}


@contextlib.contextmanager
def model_being_built(device: Any, *, scheme: Any = None, spread_experts: bool = False) -> Iterator[Any]:
    """Let vLLM's layers find its default settings, with a checkpoint's scheme, and groups of one rank."""
    import torch

    config: Any = importlib.import_module("vllm.config")
    settings = config.VllmConfig(quant_config=scheme)
    settings.parallel_config.enable_expert_parallel = spread_experts
    # what the choice of a kernel asks of a model
    settings.model_config = SimpleNamespace(
        dtype=torch.bfloat16, hf_text_config=SimpleNamespace(model_type="llama"), is_moe=False
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # the dtype of outputs
    try:
        with config.set_current_vllm_config(settings), torch.device(device):
            _join_alone()
            yield settings
    finally:
        torch.set_default_dtype(before)


def _join_alone() -> None:
    """Make the groups of one rank that vLLM's layers ask for their share of a weight."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    if not state.model_parallel_is_initialized():
        with tempfile.TemporaryDirectory(prefix="kernels_bench-") as folder:
            state.init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
            state.initialize_model_parallel(1)


def compiles(settings: Any) -> bool:
    """Return whether vLLM would compile a model with Inductor."""
    config = settings.compilation_config
    return bool(config.backend == "inductor" and config.mode.name == "VLLM_COMPILE")


def compiled_layer(compiler: Compiler, settings: Any, layer: Any, *rows: Any, scale: Any = None) -> Any:
    """Call a layer, compiled, with tensors of a row a token, and with a scale if it takes one.

    Layers of one class and the same widths share what is compiled, so of those with weights there is one.
    """
    key = type(layer).__name__, str(getattr(layer, "group_shape", "")), scale is None
    others = () if scale is None else (scale,)
    return compiler(key, layer.forward_native, rows, others, lambda: _tracing(settings))(*rows, *others)


@contextlib.contextmanager
def _tracing(settings: Any) -> Iterator[Any]:
    """Trace norms by their priority, to which a pass of vLLM's own backend lowers them; its options."""
    ir: Any = importlib.import_module("vllm.ir")
    with ir.enable_torch_wrap(False), settings.kernel_config.ir_op_priority.set_priority():
        yield settings.compilation_config.inductor_compile_config


class CompiledSmallOps(VllmSmallOps):
    """vLLM's small layers, compiled, and its op that writes KV."""

    def __init__(self, device: Device, compiler: Compiler) -> None:
        super().__init__()
        self.kernels = compiled_kernels()
        self._device, self._compiler = device, compiler
        self._layers: dict[Hashable, tuple[Any, Any]] = {}

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> Any:
        """Add and normalise."""
        layer, settings = self._layer("layernorm", "RMSNorm", x.shape[1], RMS_EPSILON)
        layer.weight.data = weight
        return compiled_layer(self._compiler, settings, layer, x, residual)

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> Any:
        """Rotate."""
        sizes = head_dim, head_dim, len(cos_sin), ROPE_THETA, True, q.dtype
        layer, settings = self._layer("rotary_embedding", "RotaryEmbedding", *sizes)
        layer.cos_sin_cache.data = cos_sin
        return compiled_layer(self._compiler, settings, layer, positions, q, k)

    def silu_and_mul(self, out: Any, x: Any) -> Any:
        """Gate and multiply."""
        layer, settings = self._layer("activation", "SiluAndMul")
        return (compiled_layer(self._compiler, settings, layer, x),)

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> Any:
        """Divide, clamp and round."""
        group: Any = importlib.import_module(f"{LAYERS}.quantization.utils.quant_utils").GroupShape
        layer, settings = self._layer("quantization.input_quant_fp8", "QuantFP8", True, group.PER_TENSOR)
        return compiled_layer(self._compiler, settings, layer, x, scale=scale)

    def _layer(self, module: str, name: str, *sizes: Any) -> tuple[Any, Any]:
        """Return a layer of these sizes, built once, and the settings it was built with."""
        if (name, sizes) not in self._layers:
            with model_being_built(self._device.name) as settings:
                layer = getattr(importlib.import_module(f"{LAYERS}.{module}"), name)(*sizes)
                if layer.enabled():
                    raise NotImplementedError(f"vLLM's settings keep {name} a custom op: not measured")
                self._layers[name, sizes] = layer, settings
        return self._layers[name, sizes]
