"""Which peak, and which FLOP convention, a published table's own ``mfu`` column was divided by.

``flops / (latency * mfu)`` is that peak. Published columns are rounded, often to 3 decimals, so a
candidate is judged by how many rows it reproduces within the rounding, not by the value alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.config.gpu import GpuSpec, gpu_names, load_gpu
from fastroof.load.measured import PeakFinding
from fastroof.operators.registry import OPERATORS
from fastroof.units import PEAK_DTYPE, TFLOP, US_PER_S

__all__ = ["PeakFit", "fit_peak", "rounding_unit"]

Columns = Mapping[str, Array]

RELATIVE_SLACK = 0.01
"""Latencies are rounded too, and peaks are quoted as 989 or 989.5: off by less is agreement."""
ROUNDED_AWAY = 0.02
"""A row whose mfu is rounded by more than this, relative, tells little of the peak."""
ENOUGH_ROWS = 0.75
"""Share of rows that a peak must reproduce to be named."""
MOST_DECIMALS = 9


@dataclass(frozen=True)
class PeakFit:
    """The peak a file used and which of its rows contradict it."""

    finding: PeakFinding
    units: str | None
    expected_mfu: Floats
    contradicts: Bools


@dataclass(frozen=True)
class _Candidate:
    peak_flops_per_s: float
    gpu: str
    units: str
    convention: str
    flops: Floats


def rounding_unit(values: Array) -> float:
    """Return the step a column was rounded to: 0.001 for 3 decimals."""
    # larger floats have no decimals, and rounding them overflows
    values = np.where(np.abs(values) < 2.0**52, values, 0.0)
    for decimals in range(MOST_DECIMALS):
        if np.abs(np.round(values, decimals) - values).max() < 0.1**MOST_DECIMALS:
            return float(10.0**-decimals)
    return float(10.0**-MOST_DECIMALS)


def fit_peak(
    operator: str, columns: Columns, gpu: GpuSpec, file: str, own_dtype: str | None
) -> PeakFit | None:
    """Find the peak and FLOP convention behind a file's mfu column."""
    mfu = columns.get("mfu")
    if mfu is None or not mfu.any():
        return None
    half_unit = rounding_unit(mfu) / 2.0
    seconds = columns["latency_us"] / US_PER_S
    own_units = None if own_dtype is None else PEAK_DTYPE.get(own_dtype)
    conventions = OPERATORS[operator].flops_conventions(columns)

    def contradicts(work: Floats, peak_flops_per_s: float) -> Bools:
        expected = work / (seconds * peak_flops_per_s)
        return np.asarray(np.abs(mfu - expected) > half_unit * (1 + 1e-6) + RELATIVE_SLACK * expected)

    sharp = mfu * ROUNDED_AWAY > half_unit

    def implied_peak(work: Floats) -> float:
        if sharp.any():
            return float(np.median(work[sharp] / (seconds[sharp] * mfu[sharp])))
        # Rounding errors cancel in a sum; the rows that read 0.0 belong to it.
        return float((work / seconds).sum() / mfu.sum())

    best: _Candidate | None = None
    fewest_off, nearest = int(len(mfu) * (1.0 - ENOUGH_ROWS)) + 1, 0.0
    for candidate in _candidates(conventions, gpu, own_units):
        if best is not None and best.gpu == gpu.name and not fewest_off:
            break
        off = int(contradicts(candidate.flops, candidate.peak_flops_per_s).sum())
        # 148 TFLOP/s and S^2 / 2 are within a percent of 165 and S^2 / 1.8: of two other cards the nearer
        distance = abs(implied_peak(candidate.flops) / candidate.peak_flops_per_s - 1.0)
        is_other_card = best is not None and best.gpu != gpu.name
        if off < fewest_off or (off == fewest_off and is_other_card and distance < nearest):
            best, fewest_off, nearest = candidate, off, distance
    convention, work = (best.convention, best.flops) if best else next(iter(conventions.items()))
    peak = implied_peak(work)
    if not sharp.any():
        sharp = np.ones(len(mfu), bool)

    used = best.peak_flops_per_s if best else peak
    own = best is not None and best.gpu == gpu.name
    finding = PeakFinding(
        file=file,
        peak_flops_per_s=peak,
        label=_label(best, gpu, peak) + (f"; {convention}" if convention else ""),
        agrees=own and (own_units is None or (best is not None and best.units == own_units)),
        rows=int(sharp.sum()),
    )
    units = best.units if best is not None and own else None
    return PeakFit(finding, units, work / (seconds * used), contradicts(work, used))


def _candidates(conventions: dict[str, Floats], gpu: GpuSpec, own_units: str | None) -> Iterator[_Candidate]:
    """Yield candidates, the card's own first: of several of these that fit equally the first is taken."""
    own = sorted(gpu.peak_flops_per_s.items(), key=lambda item: (item[0] != own_units, item[1], item[0]))
    for convention, work in conventions.items():
        for units, peak in own:
            if own_units in (None, units):
                yield _Candidate(peak, gpu.name, units, convention, work)
    for card in (gpu, *(load_gpu(name) for name in gpu_names() if name != gpu.name)):
        for units, peak in sorted(card.peak_flops_per_s.items()):
            for convention, work in conventions.items():
                yield _Candidate(peak, card.name, units, convention, work)


def _label(best: _Candidate | None, gpu: GpuSpec, peak_flops_per_s: float) -> str:
    if best is None:
        return f"{peak_flops_per_s / TFLOP:.4g} TFLOP/s, no known peak"
    if best.gpu == gpu.name:
        return f"{best.units} peak of {gpu.name}"
    return f"{best.peak_flops_per_s / TFLOP:.4g} TFLOP/s ({best.gpu} {best.units})"
