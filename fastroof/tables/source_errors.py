"""Errors of a source: it is one measurement campaign among others, or has unsound families of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import LATENCY
from fastroof.config import load_gpu
from fastroof.errors import TableError
from fastroof.load.compare import campaign_family
from fastroof.load.families import family_columns
from fastroof.load.scaled import scaled_error, scaled_from
from fastroof.load.unsound import UnsoundFamily, families_error, unsound_families
from fastroof.operators.operator import Key, SourceTable, is_measured
from fastroof.operators.registry import OPERATORS
from fastroof.tables.completed import CompletedTable
from fastroof.tables.kernel_order import OrderedTables
from fastroof.uncertainty.campaign import CampaignError, CampaignErrors, campaign_error


class SourceError(NamedTuple):
    """Errors of one kernel's lookups that its neighbours in the table share.

    ``floor_us`` is the least latency of the kernel's family in its source; ``scaled`` the error of kernels
    that were measured on another card, or of your own that another campaign completes.
    """

    campaign: CampaignErrors
    floor_us: float
    families: tuple[UnsoundFamily, ...]
    scaled: float = 0.0

    def parts(self, sizes: Mapping[str, Floats], latency_us: Floats) -> tuple[Floats, Floats]:
        """Relative standard errors: independent per call, and common to all calls."""
        spread, common = self.campaign.at(latency_us, self.floor_us)
        of_families = families_error(self.families, sizes, latency_us)
        return spread, np.sqrt(common**2 + of_families**2 + self.scaled**2)

    def variance(self, sizes: Mapping[str, Floats], latency_us: Floats) -> Floats:
        """Squared relative standard error of a single lookup."""
        spread, common = self.parts(sizes, latency_us)
        return np.asarray(spread**2 + common**2)


_NONE: Final = CampaignError(0.0, 0.0)
NO_SOURCE: Final = SourceError(CampaignErrors(_NONE, _NONE), 1.0, ())
"""Error of kernels that were not measured: no campaign applies."""


def source_error(tables: OrderedTables, operator: str, key: Key) -> SourceError:
    """Errors of a kernel's source, or of its donor's; else of the operator's first source.

    ``[operators.<operator>.campaign]`` of a provenance.toml, with scale and common, replaces the shipped
    figure: 0 for tables measured on the very machine that is predicted.
    """

    def build() -> SourceError:
        measured = OPERATORS[operator].source_key(tables, key)
        words = dict(zip((c.name for c in OPERATORS[operator].keys), measured, strict=True))
        is_known = is_measured(tables, operator, measured)
        table = tables.serving(operator, measured) if is_known else tables.candidates(operator)[0]
        families = unsound_families(table.provenance, operator)
        campaign = _stated_campaign(table)
        if campaign is None:
            is_foreign = tables.is_foreign(table)
            engines = (tables.order.preferred(operator), table.engine) if is_foreign else None
            campaign = campaign_error(operator, campaign_family(operator, words), tables.gpu.name, engines)
        floor_us = _floor_us(table, words)
        donor = scaled_from(table.provenance)
        scaled = scaled_error(load_gpu(donor), tables.gpu) if donor else 0.0
        if isinstance(table, CompletedTable):
            scaled = table.error(measured)
        return SourceError(
            campaign, floor_us, tuple(family for family in families if family.holds_key(words)), scaled
        )

    return tables.cached(("source error", operator, key), build)


def _floor_us(table: SourceTable, words: Mapping[str, Any]) -> float:
    """Least latency of a kernel's family, or of the whole table if it has no such rows."""
    latency_us = table.columns[LATENCY.name]
    rows = np.full(len(latency_us), True)
    for name in family_columns(table.operator):
        rows &= table.columns[name] == words[name]
    return float(latency_us[rows].min() if rows.any() else latency_us.min())


def _stated_campaign(table: SourceTable) -> CampaignErrors | None:
    """Campaign errors stated in the source's provenance."""
    about = table.about.get("campaign")
    if about is None:
        return None
    figures = [about.get(name) for name in ("scale", "common")] if isinstance(about, Mapping) else []
    numbers = [float(v) for v in figures if isinstance(v, int | float) and 0.0 <= v < math.inf]
    if len(numbers) != 2 or numbers[1] > numbers[0]:
        raise TableError(
            f"{table.source}: operators.{table.operator}.campaign must have scale and common, relative "
            f"standard errors with 0 <= common <= scale; got {about!r}"
        )
    scale, common = numbers
    one = CampaignError(math.sqrt(scale**2 - common**2), common)
    return CampaignErrors(one, one)
