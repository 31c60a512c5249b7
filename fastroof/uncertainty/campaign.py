"""Differences between measurement campaigns: the same kernel on the same GPU, measured by others.

Neighbours in a table share clocks, library versions and harness, so leave-one-out misses these. Points that
several sources measured show them: ``campaigns.json`` has their figures by operator, family and GPU,
separately for sources with the same library's kernels and for engines with different ones. ``fastroof tables
campaigns`` makes it from the tables.

The scale of a comparison is ``q80(|ln ratio|) / 1.28``: the interval of one source at 1.28 standard errors
holds 80 % of the other's values. It is not divided by sqrt(2), since the predicted machine is one more
campaign. Its common part, shared by all shapes of a step, is the root mean square of the median ln ratio at
each octave of the first size; the rest is independent per call.

Short calls are dominated by launches and scheduling, in which campaigns differ more, so figures are separate
below and above :data:`LONG` times the least latency of the family.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.documents import parse_json
from fastroof.errors import TableError
from fastroof.uncertainty.leave_one_out import LEVEL, NORMAL_80

CAMPAIGNS_FILE: Final = "campaigns.json"


class CampaignError(NamedTuple):
    """Relative standard errors of a source as one campaign among others: per call, and common."""

    spread: float
    common: float

    @property
    def variance(self) -> float:
        """Squared error of a single lookup."""
        return self.spread**2 + self.common**2


KINDS: Final = ("same", "any")
"""Kinds of kernels other than pairs of engines: of the same library, and any."""


LONG: Final = 4.0
"""Multiple of the least latency of a family from which a call is long."""

BLEND: Final = 2.0
"""Factor below and above :data:`LONG` within which the two figures are blended."""


class CampaignErrors(NamedTuple):
    """Errors of short calls and of long ones."""

    short: CampaignError
    long: CampaignError

    def at(self, latency_us: Floats, floor_us: float) -> tuple[Floats, Floats]:
        """Spread and common part of calls of a latency; ``floor_us`` is the least of the family."""
        octaves = np.log2(np.maximum(latency_us / (floor_us * LONG), 1e-9)) / math.log2(BLEND)
        weight = np.clip((octaves + 1.0) / 2.0, 0.0, 1.0)
        spread, common = (
            (1.0 - weight) * one + weight * other for one, other in zip(self.short, self.long, strict=True)
        )
        return spread, common


class CampaignFigure(NamedTuple):
    """Figures from the common points of sources."""

    operator: str
    family: str
    gpu: str
    kernels: str
    length: str
    scale: float
    common: float
    pairs: int
    points: int

    @property
    def error(self) -> CampaignError:
        """The figures as an error: the rest of the scale is independent per call."""
        common = min(self.common, self.scale)
        return CampaignError(math.sqrt(self.scale**2 - common**2), common)


def engine_pair(one: str, other: str) -> str:
    """Name of a pair of engines, in either order."""
    return "+".join(sorted((one, other)))


def scale_of(log_ratio: Floats) -> float:
    """Relative standard error whose 80 % interval holds 80 % of the other source's values."""
    return float(np.quantile(np.abs(log_ratio), LEVEL)) / NORMAL_80


def common_scale(log_ratio: Floats, octave: Longs) -> float:
    """Root mean square of the medians of octaves, weighted by points."""
    total = sum(
        float(np.median(log_ratio[octave == one])) ** 2 * int((octave == one).sum())
        for one in np.unique(octave)
    )
    return math.sqrt(total / len(log_ratio))


def pooled_figures(pairs: Sequence[CampaignFigure]) -> list[CampaignFigure]:
    """Pool comparisons of two sources: by family and GPU, by family, by operator, and all."""
    by_gpu = _pool(pairs, ("operator", "family", "gpu"))
    by_family = _pool(by_gpu, ("operator", "family"))
    by_operator = _pool((one for one in by_family if one.kernels in KINDS), ("operator",))
    listed = [*by_gpu, *by_family, *by_operator, *_pool(by_operator, ())]
    # drop figures of two engines that equal those of any
    any_of = {(*one[:3], one.length): one for one in listed if one.kernels == "any"}
    return [one for one in listed if one.kernels in KINDS or one[5:] != any_of[*one[:3], one.length][5:]]


def _pool(parts: Iterable[CampaignFigure], kept: tuple[str, ...]) -> list[CampaignFigure]:
    groups: dict[tuple[str, str, str, str, str], list[CampaignFigure]] = {}
    for part in parts:
        operator, family, gpu = (
            getattr(part, name) if name in kept else "" for name in ("operator", "family", "gpu")
        )
        groups.setdefault((operator, family, gpu, part.kernels, part.length), []).append(part)

    return [
        CampaignFigure(
            *key,
            float(np.median([part.scale for part in group])),
            float(np.median([part.common for part in group])),
            sum(part.pairs for part in group),
            sum(part.points for part in group),
        )
        for key, group in sorted(groups.items())
    ]


def campaigns_text(document: dict[str, Any]) -> str:
    """Return a document of figures as JSON with a line per figure."""
    lines = ",\n".join(map(json.dumps, document["figures"]))
    return f'{{"made_from": {json.dumps(document["made_from"])}, "figures": [\n{lines}\n]}}\n'


@functools.cache
def figures() -> dict[tuple[str, str, str, str, str], CampaignFigure]:
    """Shipped figures by operator, family, GPU, kind of kernels and length of calls."""
    text = (resources.files("fastroof.uncertainty") / CAMPAIGNS_FILE).read_text("utf-8")
    rows = parse_json(text, CAMPAIGNS_FILE, TableError)["figures"]
    listed = (CampaignFigure(*(row[name] for name in CampaignFigure._fields)) for row in rows)
    return {(one.operator, one.family, one.gpu, one.kernels, one.length): one for one in listed}


def campaign_error(
    operator: str, family: str, gpu: str, engines: tuple[str, str] | None = None
) -> CampaignErrors:
    """Errors of a source's campaign, from the most specific figures."""
    known = figures()
    kinds = (engine_pair(*engines), "any") if engines else ("same",)
    places = ((operator, family, gpu), (operator, family, ""), (operator, "", ""), ("", "", ""))

    def error(length: str) -> CampaignError:
        keys = ((*place, kernels, length) for place in places for kernels in kinds)
        found = next((key for key in keys if key in known), None)
        if found is None:
            raise TableError(f"{CAMPAIGNS_FILE} has no figure for all operators: reinstall fastroof")
        return known[found].error

    return CampaignErrors(error("short"), error("long"))
