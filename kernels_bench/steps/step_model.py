"""The hand-written forward step of a dense transformer, with random weights and preallocated buffers.

Nothing is allocated while a step runs, and nothing depends on what a tensor holds, so that the whole of it
fits into one CUDA graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Floats
from fastroof.errors import MeasureError
from fastroof.models import DenseModel
from kernels_bench.providers.attention import Heads
from kernels_bench.providers.device import oom_as_memory_error
from kernels_bench.providers.elementwise import rope_table
from kernels_bench.providers.paging import PAGE_SIZE
from kernels_bench.providers.random_inputs import SCALE_BLOCK, InputMaker
from kernels_bench.providers.small_ops import ROPE_THETA
from kernels_bench.steps.step_attention import Attend, StepBackend
from kernels_bench.steps.step_linear import LinearLayer, refuses_weights
from kernels_bench.steps.step_points import StepPoint
from kernels_bench.steps.step_reference import reference_logits
from kernels_bench.steps.step_weights import random_weights


def refuses_model(model: DenseModel, weights: str = "bf16") -> str | None:
    """Return why a model's step is not written here, or None."""
    if model.head_dim % 2:
        return f"{model.name} has heads of {model.head_dim}, which rope cannot halve"
    return refuses_weights(model, weights)


class StepModel:
    """A model's random weights on a device."""

    def __init__(self, spec: DenseModel, backend: StepBackend, seed: int) -> None:
        if reason := refuses_model(spec, backend.weights):
            raise MeasureError(reason)
        self.backend = backend
        self.heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        self.weights = random_weights(spec, backend.device, backend.dtype, seed, backend.weights)

    def prepare(self, point: StepPoint, seed: int) -> PreparedStep:
        """Make a step's inputs and buffers, and fill its cache with random keys and values."""
        spec, longest = self.weights.spec, max(point.kv_lens)
        window = spec.sliding_window
        if window is not None and longest > window:
            raise MeasureError(
                f"{spec.name} attends within {window} tokens, and a request has {longest}: "
                "a sliding window is not measured"
            )
        with oom_as_memory_error():
            return PreparedStep(self, point, seed)


class PreparedStep:
    """One step, ready to run; what a timer takes."""

    num_sets = 1

    def __init__(self, model: StepModel, point: StepPoint, seed: int) -> None:
        import torch

        self.kernel = f"whole step, {model.backend.provider}"
        self._torch = torch
        self._model = model
        spec, backend = model.weights.spec, model.backend
        make = InputMaker(backend.device, seed)
        self.batch = batch = point.batch(seed if backend.attention.shuffled else None)
        random = np.random.default_rng(seed)
        self.tokens = make.indices(random.integers(0, spec.vocab, batch.num_tokens), "int64")
        self._positions = make.indices(batch.positions, "int64")
        self._slots = make.indices(batch.slots, "int64")
        self._last = make.indices(batch.last_tokens, "int64")
        table_dtype = backend.ops.cos_sin_dtype if backend.dtype == "bf16" else backend.dtype
        longest = int(batch.kv_lens.max())
        self._cos_sin = rope_table(make, longest, spec.head_dim, ROPE_THETA, table_dtype)
        self.k_pages, self.v_pages = self._cache(make)

        def buffer(rows: int, width: int) -> Any:
            return make.poisoned(rows, width, dtype=backend.dtype)

        rows, width = batch.num_tokens, spec.num_q_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        self._residual, self._x = buffer(rows, spec.hidden), buffer(rows, spec.hidden)
        self._qkv, self._attended = buffer(rows, width + 2 * kv_width), buffer(rows, width)
        self._gate_up = buffer(rows, 2 * spec.intermediate)
        self._middle = buffer(rows, spec.intermediate)
        self._last_x = buffer(batch.num_sequences, spec.hidden)
        self.logits = buffer(batch.num_sequences, spec.padded_vocab(1))
        # Views of one row each: queries, keys and values stay where the QKV projection writes them, unless
        # their heads are normalised, which engines do into new rows.
        self._q, self._k, self._v = self._qkv.split((width, kv_width, kv_width), dim=1)
        heads = (-1, spec.head_dim)
        self._q_written, self._k_written = (x.unflatten(1, heads) for x in (self._q, self._k))
        if spec.qk_norm:
            self._q, self._k = buffer(rows, width), buffer(rows, kv_width)
        self._k_heads, self._v_heads = self._k.unflatten(1, heads), self._v.unflatten(1, heads)
        self._q_heads, self._out_heads = self._q.unflatten(1, heads), self._attended.unflatten(1, heads)
        self._quantised = {
            width: self._inputs(make, rows, width)
            for width in (spec.hidden, spec.num_q_heads * spec.head_dim, spec.intermediate)
            if backend.fp8 is not None
        }
        self._attend: Attend = backend.attention.plan(batch, model.heads, self._q.dtype, backend.device)

    def run(self, index: int) -> None:
        """Run the step without waiting for it."""
        weights, ops = self._model.weights, self._model.backend.ops
        x, residual = self._x, self._residual
        self._torch.index_select(weights.embedding, 0, self.tokens, out=residual)
        ops.rmsnorm(x, residual, weights.layers[0].attention_norm)
        for number, layer in enumerate(weights.layers):
            if number:
                ops.rmsnorm_residual(x, residual, layer.attention_norm)
            self._linear(self._qkv, x, layer.qkv)
            if layer.q_norm is not None:
                ops.rmsnorm(self._q_heads, self._q_written, layer.q_norm)
                ops.rmsnorm(self._k_heads, self._k_written, layer.k_norm)
            ops.rope(self._positions, self._q, self._k, weights.spec.head_dim, self._cos_sin)
            k_pages, v_pages = self.k_pages[number], self.v_pages[number]
            ops.kv_write(self._k_heads, self._v_heads, k_pages, v_pages, self._slots)
            self._attend(self._q_heads, k_pages, v_pages, self._out_heads)
            self._linear(x, self._attended, layer.o)
            ops.rmsnorm_residual(x, residual, layer.mlp_norm)
            self._linear(self._gate_up, x, layer.gate_up)
            ops.silu_and_mul(self._middle, self._gate_up)
            self._linear(x, self._middle, layer.down)
        ops.rmsnorm_residual(x, residual, weights.final_norm)
        self._torch.index_select(x, 0, self._last, out=self._last_x)
        self._linear(self.logits, self._last_x, weights.lm_head)

    def result(self, index: int) -> Floats:
        """Return the logits of the last run, without the padded vocabulary."""
        logits: Floats = self.logits[:, : self._model.weights.spec.vocab].double().cpu().numpy()
        return logits

    def reference(self, index: int) -> Floats:
        """Return what they should be, by a naive float64 step on the host: for small models."""
        return reference_logits(self._model.weights, self.batch, self.tokens, self.k_pages, self.v_pages)

    def close(self) -> None:
        """Give the cache and the buffers back."""
        for name in [name for name in vars(self) if name not in ("kernel", "_torch")]:
            delattr(self, name)
        if self._torch.cuda.is_available():
            # Caches of other sizes follow: what is left of this one would lie between them.
            self._torch.cuda.empty_cache()

    def _linear(self, out: Any, x: Any, layer: LinearLayer) -> None:
        """F.linear with the output given (cuBLASLt, bias in its epilogue), or quantised and in fp8."""
        fp8 = self._model.backend.fp8
        if layer.scale is not None and fp8 is not None:
            quantised, scales = self._quantised[x.shape[1]]
            x_scale = scales if layer.x_scale is None else layer.x_scale
            fp8.quantise(quantised, x, x_scale)
            fp8.multiply(out, quantised, x_scale, layer)
        elif layer.bias is None:
            self._torch.mm(x, layer.weight.t(), out=out)
        else:
            self._torch.addmm(layer.bias, x, layer.weight.t(), out=out)

    def _inputs(self, make: InputMaker, rows: int, width: int) -> tuple[Any, Any]:
        """Room for quantised inputs, and for their scales by blocks, those of a column together."""
        scales = make.poisoned(-(-width // SCALE_BLOCK), rows, dtype="fp32").t()
        return make.poisoned(rows, width, dtype="fp8"), scales

    def _cache(self, make: InputMaker) -> tuple[list[Any], list[Any]]:
        spec, backend = self._model.weights.spec, self._model.backend
        shape = (self.batch.num_pages, PAGE_SIZE, spec.num_kv_heads)
        k_pages, v_pages = [], []
        for _ in range(spec.num_layers):
            if backend.attention.packed:
                pool = make.normal(*shape, 2 * spec.head_dim, dtype=backend.dtype)
                k, v = pool.split(spec.head_dim, dim=-1)
            else:
                k = make.normal(*shape, spec.head_dim, dtype=backend.dtype)
                v = make.normal(*shape, spec.head_dim, dtype=backend.dtype)
            k_pages.append(k)
            v_pages.append(v)
        return k_pages, v_pages
