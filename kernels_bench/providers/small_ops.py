"""The kernels between GEMMs and attention, one set of them a provider."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from kernels_bench.providers.device import DTYPE_NAMES, FP8_MAX

RMS_EPSILON: Final = 1e-5
ROPE_THETA: Final = 10000.0
"""Base of the rotary frequencies; their values change no time."""

KINDS: Final = ("rmsnorm_residual", "rope", "silu_and_mul", "kv_write", "fp8_quantise")


class SmallOps:
    """What a transformer layer runs besides GEMMs and attention, in plain torch: for machines without a GPU.

    Those of this class return tuples of what they allocate. Others may write into what they are given, and
    return None.
    """

    def __init__(self) -> None:
        # What each kind of :data:`KINDS` launches, for those that it has.
        self.kernels: dict[str, str] = {}
        # dtype of the table of cosines and sines that ``rope`` reads.
        self.cos_sin_dtype = "fp32"

    def run(self, function: Callable[..., Any], rows: Sequence[Any], *others: Any) -> Any:
        """Call a function with tensors of a row a token, then others."""
        return function(*rows, *others)

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> Any:
        """Add ``x`` to ``residual`` and normalise the sum; in place, the latter into ``x``."""
        return self.run(_normed, (x, residual), weight)

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> Any:
        """Rotate queries and keys, shape (tokens, heads * head_dim); rows may be strided.

        ``cos_sin`` holds cosines, then sines, of each position: shape (positions, head_dim).
        """
        return self.run(_rotated, (positions, q, k), head_dim, cos_sin)

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Write keys and values, shape (tokens, heads, head_dim), at their slots of the pages."""
        page, place = slots // k_pages.shape[1], slots % k_pages.shape[1]
        k_pages[page, place] = k
        v_pages[page, place] = v

    def silu_and_mul(self, out: Any, x: Any) -> Any:
        """Return ``silu(gate) * up`` of rows that hold gate, then up."""
        return self.run(_gated, (x,))

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> Any:
        """Return ``x / scale`` in fp8; ``scale`` is of shape (1,)."""
        return self.run(_quantised, (x,), scale)


def _normed(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
    import torch

    total = residual + x
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + RMS_EPSILON)
    return (wide * scale).to(x.dtype) * weight, total


def _rotated(positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> tuple[Any, ...]:
    import torch

    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    halves = [x.unflatten(-1, (-1, head_dim)).chunk(2, dim=-1) for x in (q, k)]
    turned = [torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halves]
    return tuple(x.flatten(1).to(q.dtype) for x in turned)


def _gated(x: Any) -> tuple[Any]:
    import torch

    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up,)


def _quantised(x: Any, scale: Any) -> tuple[Any]:
    import torch

    return ((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(getattr(torch, DTYPE_NAMES["fp8"])),)


COMPILED_TOKENS: Final = 8192
"""Tokens of the call that compiles: a full step of vLLM's server, by default, on cards of 70 GiB or more."""


def inductor_words(what: str) -> str:
    """Name what Inductor compiles, with the version of torch that decides its kernels."""
    import torch

    return f"{what}, inductor of torch {torch.__version__}"


class Compiler:
    """Compiles functions the way vLLM compiles a model: once for any number of tokens."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        key: Hashable,
        function: Callable[..., Any],
        rows: Sequence[Any],
        others: Sequence[Any],
        tracing: Callable[[], AbstractContextManager[Mapping[str, Any]]] = lambda: contextlib.nullcontext({}),
    ) -> Any:
        """Return what calls a function, of the first with a key, with tensors of a row a token, then others.

        ``tracing`` is what it is compiled within; it gives Inductor's options.
        """
        import torch

        # Inductor indexes with 32 bits where the first call may, so a longer call than vLLM's has its own.
        tokens = max(COMPILED_TOKENS, 1 << (len(rows[0]) - 1).bit_length())
        key = (key, tokens, *(tensor.shape[1:] for tensor in rows))
        if key not in self._compiled:
            examples = [_lengthened(tensor, tokens) for tensor in rows]
            for example in examples:
                torch._dynamo.mark_dynamic(example, 0)
            with torch.inference_mode(), tracing() as options:
                # as vLLM: one kernel for every number of tokens, also for 1, which torch would compile again
                unguarded = {**options, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
                alone = _alone(function, len(self._compiled))
                call = torch.compile(alone, fullgraph=True, dynamic=False, options=unguarded)
                call(*examples, *others)
            self._compiled[key] = call
        return self._compiled[key]


def _alone(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Give a function its own code: with guards skipped, torch reuses what it compiled of a code object."""

    def call(*tensors: Any) -> Any:
        return function(*tensors)

    code = call.__code__.replace(co_name=f"compiled_{number}")
    return types.FunctionType(code, globals(), closure=call.__closure__)


def _lengthened(tensor: Any, tokens: int) -> Any:
    """Return zeros like a tensor, with a row for each of so many tokens."""
    import torch

    shape = (tokens, *tensor.shape[1:])
    return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()


class InductorSmallOps(SmallOps):
    """Plain torch, compiled: what engines run that compile their models."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()
        self._compiler = compiler
        self.kernels = {kind: inductor_words(kind) for kind in KINDS}

    def run(self, function: Callable[..., Any], rows: Sequence[Any], *others: Any) -> Any:
        """Call a function, compiled."""
        return self._compiler(function, function, rows, others)(*rows, *others)


VLLM_KERNELS: Final = {
    "rmsnorm_residual": "vllm fused_add_rms_norm",
    "rope": "vllm rotary_embedding",
    "silu_and_mul": "vllm silu_and_mul",
    "kv_write": "vllm reshape_and_cache_flash",
    "fp8_quantise": "vllm static_scaled_fp8_quant",
}


class VllmSmallOps(SmallOps):
    """vLLM's CUDA ops: what its models run with ``enforce_eager``."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._torch, self._ops, self._cache_ops = torch, torch.ops._C, torch.ops._C_cache_ops
        self._one: Any = None
        self.cos_sin_dtype = "bf16"
        self.kernels = VLLM_KERNELS

    def rmsnorm_residual(self, x: Any, residual: Any, weight: Any) -> None:
        """Add and normalise in place."""
        self._ops.fused_add_rms_norm(x, residual, weight, RMS_EPSILON)

    def rope(self, positions: Any, q: Any, k: Any, head_dim: int, cos_sin: Any) -> None:
        """Rotate in place."""
        self._ops.rotary_embedding(positions, q, k, head_dim, cos_sin, True)

    def kv_write(self, k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> None:
        """Write at the slots."""
        if self._one is None or self._one.device != k.device:
            self._one = self._torch.ones((), dtype=self._torch.float32, device=k.device)
        # "auto": the cache's own dtype, so that the scales are not used.
        self._cache_ops.reshape_and_cache_flash(k, v, k_pages, v_pages, slots, "auto", self._one, self._one)

    def silu_and_mul(self, out: Any, x: Any) -> None:
        """Gate and multiply."""
        self._ops.silu_and_mul(out, x)

    def fp8_quantise(self, out: Any, x: Any, scale: Any) -> None:
        """Divide, clamp and round."""
        self._ops.static_scaled_fp8_quant(out, x, scale, None)
