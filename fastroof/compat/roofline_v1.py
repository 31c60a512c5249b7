"""Roofline V1, the calibrated model that roofline V2 replaced: one constant MFU per phase, no tables.

Only for comparison. The description that it follows gives its structure and three constants; where it is
incomplete, this module follows roofline V2's conventions as far as possible:

* FLOPs are V2's: seven GEMMs per layer of 2 m k n; attention 4 num_heads new_tokens context head_dim, where
  a chunk's context is progress + new_tokens and a decode's is progress; no LM head.
* Bytes are V2's: the weights once per phase, activations, KV written, and KV read with its discounts.
* GEMM time and attention time are added, since attention has a separate peak.
* tp divides both FLOPs and bytes: by tp in decode, by tp^0.68 in prefill. The bandwidth factor of prefill is
  1, and the MFU multipliers are 1.
* There is no overhead and no floor, and a step without requests takes 0.
* ``bwEfficiencyFactor`` and ``perLayerOverhead`` of a hardware dict belong to V2 and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.checks import is_number, shown
from fastroof.compat.roofline_v2.steps import (
    Hardware,
    ModelSizes,
    StepRequests,
    Steps,
    checked_tp,
    refuse_infinite,
    refuse_requests,
)
from fastroof.compiled.compat_roofline_v2 import MAX_SEQUENCE
from fastroof.errors import PlanError
from fastroof.units import US_PER_S


@dataclass(frozen=True)
class Calibration:
    """Fitted constants of roofline V1."""

    mfu_prefill: float
    mfu_decode: float
    mfu_prefill_multiplier: float = 1.0
    mfu_decode_multiplier: float = 1.0
    bw_prefill_factor: float = 1.0
    bw_decode_factor: float = 0.6
    tp_exponent_prefill: float = 0.68
    tp_exponent_decode: float = 1.0
    vector_peak_fraction: float = 0.1

    def __post_init__(self) -> None:
        wrong = []
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_number(value) or value <= 0.0:
                wrong.append(f"{field.name} must be a finite number above 0, got {shown(value)}")
        if wrong:
            raise PlanError(f"calibration: {'; '.join(wrong)}")


class Parts(NamedTuple):
    """Seconds of one phase of every step: GEMMs, attention, the excess of its bytes, and the total."""

    gemm_s: Floats
    attention_s: Floats
    memory_s: Floats
    total_s: Floats


@dataclass(frozen=True)
class _Phase:
    """Divisors of a phase."""

    gemm_flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    gpus: float

    def parts_s(self, gemm_flops: Floats, attention_flops: Floats, moved_bytes: Floats) -> Parts:
        gemm_s, attention_s = gemm_flops / self.gemm_flops_per_s, attention_flops / self.attention_flops_per_s
        compute_s = gemm_s + attention_s
        longer_s = np.maximum(compute_s, moved_bytes / self.bytes_per_s)
        parts = gemm_s, attention_s, longer_s - compute_s, longer_s
        return Parts(*(part / self.gpus for part in parts))


@np.errstate(all="ignore")  # infinite results are rejected below
def step_us(
    model_config: Mapping[str, Any],
    hardware: Mapping[str, Any],
    calibration: Calibration,
    tp: int,
    steps: Steps,
) -> Floats:
    """Time steps with a constant MFU per phase.

    Parameters
    ----------
    model_config : mapping
        As in :func:`fastroof.compat.roofline_v2.step_us`.
    hardware : mapping
        ``TFlopsPeak`` (TFLOP/s) and ``BwPeakTBs`` (TB/s).
    calibration : Calibration
        The fitted constants.
    tp : int
        Tensor-parallel size.
    steps : StepRequests, or iterable of (prefill requests, decode requests)
        As in :func:`fastroof.compat.roofline_v2.step_us`.

    Returns
    -------
    ndarray of float64, shape (steps,)
        Microseconds.

    Raises
    ------
    BatchError, ModelError, GpuError, PlanError
        If a request, model_config, hardware, calibration or tp is invalid.

    Notes
    -----
    A phase takes ``max(GEMM FLOPs / (peak * MFU) + attention FLOPs / (0.1 * peak), bytes / (bandwidth *
    factor)) / tp ** exponent``; a mixed step the mean of its two phases, weighted by new tokens.

    Examples
    --------
    >>> model = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    ...          "num_key_value_heads": 8, "intermediate_size": 14336, "bytes_per_param": 2}
    >>> fitted = Calibration(mfu_prefill=0.6, mfu_decode=0.3)
    >>> step_us(model, {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35}, fitted, 1, [([], [4096] * 8)]).round()
    array([8655.])
    """
    (prefill_tokens, prefill), (decode_tokens, decode) = phases(
        model_config, hardware, calibration, tp, steps
    )
    tokens = prefill_tokens + decode_tokens
    weighted_s = prefill_tokens * prefill.total_s + decode_tokens * decode.total_s
    mean_s: Floats = weighted_s / np.maximum(tokens, 1.0)
    refuse_infinite(prefill.total_s, decode.total_s, mean_s)
    return mean_s * US_PER_S


def phases(
    model_config: Mapping[str, Any],
    hardware: Mapping[str, Any],
    calibration: Calibration,
    tp: int,
    steps: Steps,
) -> tuple[tuple[Floats, Parts], tuple[Floats, Parts]]:
    """Return the new tokens and seconds by part of every step's phases; arguments as in :func:`step_us`."""
    sizes = ModelSizes.from_config(model_config)
    gpu = Hardware.from_config(hardware)
    gpus = np.float64(checked_tp(tp))
    if not isinstance(calibration, Calibration):
        raise PlanError(f"calibration must be a Calibration, got {type(calibration).__name__}")
    batch = steps if isinstance(steps, StepRequests) else StepRequests.from_steps(steps)
    for values, least in (
        (batch.prefill_progress, 0),
        (batch.prefill_new_tokens, 1),
        (batch.decode_progress, 0),
    ):
        if len(values) and not least <= values.min() <= values.max() <= MAX_SEQUENCE:
            refuse_requests(batch)
    vector_flops_per_s = gpu.peak_flops_per_s * calibration.vector_peak_fraction
    prefill = _Phase(
        gpu.peak_flops_per_s * calibration.mfu_prefill * calibration.mfu_prefill_multiplier,
        vector_flops_per_s,
        gpu.peak_bytes_per_s * calibration.bw_prefill_factor,
        gpus**calibration.tp_exponent_prefill,
    )
    decode = _Phase(
        gpu.peak_flops_per_s * calibration.mfu_decode * calibration.mfu_decode_multiplier,
        vector_flops_per_s,
        gpu.peak_bytes_per_s * calibration.bw_decode_factor,
        gpus**calibration.tp_exponent_decode,
    )
    progress, new = batch.prefill_progress, batch.prefill_new_tokens
    one = np.ones_like(batch.decode_progress)
    return (
        _phase(sizes, prefill, progress, new, progress + new, batch.prefill_offsets),
        _phase(sizes, decode, batch.decode_progress, one, batch.decode_progress, batch.decode_offsets),
    )


def _phase(
    sizes: ModelSizes, phase: _Phase, progress: Longs, new_tokens: Longs, context: Longs, offsets: Longs
) -> tuple[Floats, Parts]:
    """Return the new tokens and seconds of one phase of every step; 0 for a step without such requests."""
    num_steps = len(offsets) - 1
    step = np.repeat(np.arange(num_steps), np.diff(offsets))

    def total(of_request: Any) -> Floats:
        return np.asarray(np.bincount(step, of_request, num_steps), np.float64)

    new = new_tokens.astype(np.float64)
    one = new_tokens == 1
    kv_bytes = 2.0 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * sizes.bytes_per_param
    activation_bytes = sizes.num_layers * sizes.hidden_size * sizes.bytes_per_param
    moved: Floats = activation_bytes * new * np.where(one, 0.75, 0.85)
    moved += kv_bytes * new + kv_bytes * progress * np.where(one, 0.80, 0.92)
    tokens = total(new)
    seconds = phase.parts_s(
        2.0 * tokens * sizes.num_layers * sizes.layer_weights,
        4.0 * sizes.num_layers * sizes.num_heads * sizes.head_dim * total(new * context),
        total(moved) + sizes.weight_bytes,
    )
    return tokens, Parts(*(np.where(tokens > 0.0, part, 0.0) for part in seconds))
