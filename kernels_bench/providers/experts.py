"""Routed experts of one layer on one GPU: tokens, weights, routing and float64 reference of all providers.

A call takes the tokens of every GPU that shares the experts, with the experts of each, and returns for each
token the weighted sum of what the experts here make of it; the GPUs' sums are added elsewhere. So run
engines whose tokens are the same on every GPU, or were gathered before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES
from kernels_bench.protocol import Point
from kernels_bench.providers import references
from kernels_bench.providers.device import FP8_MAX, Device, torch_dtype
from kernels_bench.providers.random_inputs import SCALE_BLOCK, InputMaker, quantise_blocks, spread_scales
from kernels_bench.providers.rotating import MAX_SETS, RotatingCalls, count_sets, sample
from kernels_bench.routing import DISTRIBUTIONS, route

CHECKED_TOKENS: Final = 32
DRAWN_AT_ONCE: Final = 2**28
"""Elements of a weight that is quantised: 0.5 GB of bf16."""
LARGEST_INPUT: Final = 6.0
LARGEST_GATED: Final = 20.0
"""What static scales of fp8 activations cover: of normal inputs, and of what comes between the GEMMs."""
ID_BYTES: Final = 4 + 4
"""An expert's number and its weight."""


@dataclass(frozen=True)
class ExpertLayer:
    """Sizes of the experts on one GPU, and of what they are given."""

    dtype: str
    # Tokens of all GPUs that share the experts.
    num_tokens: int
    # Experts a token takes; experts of the layer; GPUs that they are spread over.
    topk: int
    num_experts: int
    moe_ep: int
    # Of the model, and of one expert on this GPU.
    hidden: int
    width: int
    distribution: str

    @classmethod
    def of(cls, point: Point) -> ExpertLayer:
        """Take the sizes from a point's columns."""
        v = point.values
        sizes = {name: int(v[name]) for name in ("num_tokens", "topk", "num_experts", "moe_ep", "hidden")}
        width = int(v["intermediate"]) // int(v["moe_tp"])
        return cls(str(v["dtype"]), **sizes, width=width, distribution=str(v["distribution"]))

    @property
    def num_local(self) -> int:
        """Experts of this GPU."""
        return self.num_experts // self.moe_ep

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert, B."""
        return math.ceil(3 * self.hidden * self.width * DTYPE_BYTES[self.dtype])

    @property
    def token_bytes(self) -> int:
        """What one token has in a call: itself, its result, its experts and their weights."""
        return 2 * ACTIVATION_BYTES * self.hidden + self.topk * ID_BYTES


def refuses_experts(point: Point, dtypes: tuple[str, ...]) -> str | None:
    """Return why experts cannot be measured in any of a provider's dtypes, or None."""
    v = point.values
    if v["dtype"] not in dtypes:
        return f"no {v['dtype']} experts here; there are {', '.join(dtypes)}"
    if v["distribution"] not in DISTRIBUTIONS:
        return f"unknown distribution {v['distribution']!r}; valid are {', '.join(DISTRIBUTIONS)}"
    experts, ep, tp = (int(v[name]) for name in ("num_experts", "moe_ep", "moe_tp"))
    if experts % ep or int(v["intermediate"]) % tp:
        return (
            f"{experts} experts over {ep} GPUs, or a width of {v['intermediate']} over {tp}, does not divide"
        )
    if int(v["topk"]) > experts:
        return f"a token takes {v['topk']} of {experts} experts"
    layer = ExpertLayer.of(point)
    if v["dtype"] == "fp8_block" and (layer.hidden % SCALE_BLOCK or layer.width % SCALE_BLOCK):
        return f"blocks of {SCALE_BLOCK} do not divide {layer.hidden} and {layer.width}, an expert's widths"
    return None


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts of one GPU."""

    # Shapes (experts, 2 width, hidden) and (experts, hidden, width).
    gate_up: Any
    down: Any
    # fp8: one float32 an expert. fp8_block: one a block of 128 x 128. None for bf16.
    gate_up_scale: Any
    down_scale: Any
    # Whether rows of the gate come before those of ``up``.
    is_gate_first: bool

    @classmethod
    def make(cls, layer: ExpertLayer, make: InputMaker, is_gate_first: bool) -> ExpertWeights:
        """Draw them; quantised weights in parts, so that their bf16 takes little memory."""
        import torch

        weights: list[Any] = []
        scales: list[Any] = []
        for rows, columns in ((2 * layer.width, layer.hidden), (layer.hidden, layer.width)):
            scale = columns**-0.5  # as trained weights are: outputs of the order of one
            if layer.dtype == "bf16":
                weights.append(make.normal(layer.num_local, rows, columns).mul_(scale))
                scales.append(None)
                continue
            at_once = max(1, DRAWN_AT_ONCE // (rows * columns))
            shape = (layer.num_local, rows, columns)
            weight = torch.empty(shape, dtype=torch_dtype("fp8"), device=make.device.name)
            parts = []
            for first in range(0, layer.num_local, at_once):
                part = weight[first : first + at_once]
                quantised, part_scale = _quantised(make.normal(*part.shape).mul_(scale), layer.dtype)
                part.copy_(quantised)
                parts.append(part_scale)
            weights.append(weight)
            scales.append(torch.cat(parts))
        return cls(weights[0], weights[1], scales[0], scales[1], is_gate_first)

    def expert(self, index: int) -> tuple[Any, Any]:
        """Return gate and up, then down, of one expert in float64, the gate first."""
        both = []
        for weight, scale in ((self.gate_up, self.gate_up_scale), (self.down, self.down_scale)):
            one = weight[index].double()
            if scale is not None and scale.ndim == 1:
                one = one * scale[index].double()
            elif scale is not None:
                one = one * spread_scales(scale[index], SCALE_BLOCK, *one.shape).double()
            both.append(one)
        gate_up, down = both
        return (gate_up if self.is_gate_first else gate_up.roll(gate_up.shape[0] // 2, dims=0)), down


def _quantised(values: Any, dtype: str) -> tuple[Any, Any]:
    """Numbers of some experts' weight in fp8, and their scales: one an expert, or one a block."""
    if dtype == "fp8_block":
        return quantise_blocks(values, SCALE_BLOCK)
    scale = values.abs().amax(dim=(1, 2)).float() / FP8_MAX
    divided = values / scale.to(values.dtype)[:, None, None]
    return divided.clamp_(-FP8_MAX, FP8_MAX).to(torch_dtype("fp8")), scale


@dataclass(frozen=True)
class ExpertSets:
    """Input sets of one point of experts.

    Every set has its own tokens. Weights are shared where those of all experts exceed twice the L2: then
    sets differ in which experts their tokens take, turn by turn, so that calls of few tokens find no
    expert's weights in the L2 either.
    """

    layer: ExpertLayer
    # Shape (sets, num_tokens, hidden).
    x: Any
    # Set i takes number i mod their count.
    weights: list[ExpertWeights]
    # Of each token, int32 and float32, shape (sets, num_tokens, topk). Experts are numbered over all GPUs;
    # those here are the first.
    experts: Any
    expert_weights: Any
    # Place of each expert here, -1 of those elsewhere, int32; None where all are here.
    expert_map: Any
    # Static float32 scales of fp8 activations; None for other dtypes.
    x_scale: Any
    gated_scale: Any
    rotated_bytes: int

    @classmethod
    def make(
        cls, point: Point, device: Device, seed: int, max_bytes: int, *, is_gate_first: bool = True
    ) -> ExpertSets:
        """Draw tokens, routing and weights."""
        import torch

        layer = ExpertLayer.of(point)
        routed = route(
            layer.num_tokens, layer.topk, layer.num_experts, layer.moe_ep, layer.distribution, seed
        )
        is_here = routed < layer.num_local
        touched = len(np.unique(routed[is_here]))
        held_bytes = layer.num_local * layer.expert_bytes
        activation_bytes = layer.num_tokens * layer.token_bytes
        pools = count_sets(held_bytes + activation_bytes, device.rotated_bytes, max_bytes)
        called_bytes = touched * layer.expert_bytes + activation_bytes
        wanted = min(device.rotated_bytes // called_bytes + 1, MAX_SETS)
        fitting = (max_bytes - pools * held_bytes) // activation_bytes
        sets = max(pools, min(wanted, fitting))
        make = InputMaker(device, seed)
        # in later sets each token takes, of the experts here, those further on
        turned = [
            np.where(is_here, (routed + index // pools * touched) % layer.num_local, routed)
            for index in range(sets)
        ]
        here = np.where(np.arange(layer.num_experts) < layer.num_local, np.arange(layer.num_experts), -1)
        shares = make.normal(sets, layer.num_tokens, layer.topk, dtype="fp32")
        is_static = layer.dtype == "fp8"
        return cls(
            layer=layer,
            x=make.normal(sets, layer.num_tokens, layer.hidden),
            weights=[ExpertWeights.make(layer, make, is_gate_first) for _ in range(pools)],
            experts=make.indices(np.stack(turned)),
            expert_weights=torch.softmax(shares, dim=-1),
            expert_map=make.indices(here) if layer.moe_ep > 1 else None,
            x_scale=make.constant(LARGEST_INPUT / FP8_MAX) if is_static else None,
            gated_scale=make.constant(LARGEST_GATED / FP8_MAX) if is_static else None,
            rotated_bytes=pools * held_bytes + sets * activation_bytes,
        )

    @property
    def num_sets(self) -> int:
        """Input sets."""
        return int(self.x.shape[0])

    def weights_of(self, index: int) -> ExpertWeights:
        """Weights that a set's calls take."""
        return self.weights[index % len(self.weights)]

    def calls(self, kernel: str, compute: Callable[[int], Any], seed: int) -> RotatingCalls:
        """Bind a kernel to the sets and to what is checked of it."""
        outputs: dict[int, Any] = {}
        checked = self._checked(seed)

        def launch(index: int) -> None:
            outputs[index] = compute(index)

        def read(index: int) -> Any:
            return outputs[index][checked]

        def expect(index: int) -> Any:
            return self._expect(index, checked)

        return RotatingCalls(kernel, self.num_sets, self.rotated_bytes, launch, read, expect)

    def _checked(self, seed: int) -> Any:
        import torch

        is_here = (self.experts[0] < self.layer.num_local).any(dim=1).cpu().numpy()
        with_any, without = np.flatnonzero(is_here), np.flatnonzero(~is_here)
        chosen = with_any[sample(len(with_any), CHECKED_TOKENS, seed)]
        return torch.as_tensor(np.concatenate([chosen, without[:1]]), device=self.x.device)

    def _expect(self, index: int, tokens: Any) -> Any:
        """Naive: expert by expert, of the tokens that take it."""
        x, experts = self.x[index][tokens], self.experts[index][tokens]
        shares = self.expert_weights[index][tokens].double()
        out = x.double() * 0.0
        for expert in sorted({e for e in experts.ravel().tolist() if e < self.layer.num_local}):
            taken = experts == expert
            rows = taken.any(dim=1).nonzero()[:, 0]
            share = (shares * taken).sum(dim=1)[rows, None]
            out[rows] += share * references.gated_mlp(x[rows], *self.weights_of(index).expert(expert))
        return out
