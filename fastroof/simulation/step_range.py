"""The effect of the step error on a simulation: the same requests with steps one standard error off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.checks import is_number, shown
from fastroof.errors import BatchError, PlanError, TableError
from fastroof.plan.step_error import mean_decodes, stated_error
from fastroof.simulation.requests import LIMITS, RequestTimes

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

AMPLIFIED: Final = 2.0
"""Near saturation the 99th percentile of TTFT or E2E changes by at least this power of a step's change."""

LIMIT_PERCENTILE: Final = 99.0
"""The percentile that limits apply to by default."""


class StepError(NamedTuple):
    """The relative standard error that all steps of a plan have in common."""

    relative: float
    basis: str

    @property
    def is_known(self) -> bool:
        """Whether the error is known."""
        return self.relative > 0.0

    @property
    def time_scales(self) -> tuple[float, float]:
        """Factors on all steps: one standard error faster, and slower."""
        return math.exp(-self.relative), math.exp(self.relative)


def step_error(plan: StepPlan, decodes: float, kv_len: float, *, has_drafts: bool = False) -> StepError:
    """Return the error of a simulation's steps."""
    if has_drafts:
        return StepError(math.nan, "unknown: steps that verify draft tokens were not measured")
    batch, kv = (int(size[0]) for size in mean_decodes(plan, decodes, kv_len))
    is_judged = not plan.error_source.is_datasheet and not plan.is_beyond_evidence
    if plan.profile.errors.tpot and is_judged:
        stated = float(stated_error(plan, plan.decode_us(batch, kv)))
        basis = f"of TPOT on runs held out of the fit, by the profile {plan.profile.name}"
        return StepError(stated, basis)
    try:
        relative = plan.decode_error(batch, kv)
    except (PlanError, TableError) as error:
        return StepError(math.nan, f"unknown: {error}")
    if not relative > 0.0:
        return StepError(math.nan, "unknown: no measurements say how accurate these tables are")
    kernels = "the datasheet model's" if plan.error_source.is_datasheet else "its measured kernels'"
    return StepError(relative, f"of a step of {batch:,} decodes, by {kernels} own error")


def limits_kept(
    times: RequestTimes, limits: Mapping[str, float], percentile: float | None = LIMIT_PERCENTILE
) -> dict[str, bool]:
    """Whether a percentile over all requests, or their mean, is within each limit."""
    if percentile is not None and not (is_number(percentile) and 0 < percentile <= 100):
        raise BatchError(f"percentile must be a number above 0 and up to 100, got {shown(percentile)}")
    return {
        # nan: no request has such a time, so none breaks the limit
        name: not times.percentile(name, percentile) > limit_ms
        for name, limit_ms in limits.items()
    }


def flipped_limits(
    fast: RequestTimes, slow: RequestTimes, limits: Mapping[str, float], percentile: float | None
) -> list[str]:
    """Return the limits that hold on faster steps and not on slower ones, or vice versa."""
    hold = limits_kept(fast, limits, percentile), limits_kept(slow, limits, percentile)
    return [name for name in limits if hold[0][name] != hold[1][name]]


def amplification(fast: RequestTimes, slow: RequestTimes, relative: float) -> float:
    """Return the log change of the 99th percentile of TTFT or E2E over that of steps; 1 without queues."""
    found = math.nan
    for name in ("ttft_ms", "e2e_ms"):
        low, high = (times.percentile(name, LIMIT_PERCENTILE) for times in (fast, slow))
        if 0.0 < low < math.inf:
            changed = math.log(high / low) / (2.0 * relative)
            found = changed if math.isnan(found) else max(found, changed)
    return found


RANGED: Final = (*LIMITS, "itl_ms", "requests_per_s", "output_tokens_per_s", "preemptions", "timed_out")
"""Results that have a range."""


def paired(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of two runs as pairs ``[fast, slow]``, for every name of :data:`RANGED`."""
    pairs: dict[str, Any] = {}
    for name in RANGED:
        if isinstance(fast[name], Mapping):
            pairs[name] = {inner: [fast[name][inner], slow[name][inner]] for inner in fast[name]}
        else:
            pairs[name] = [fast[name], slow[name]]
    return pairs
