"""What answers may be off for their source: it is one campaign among others, or has unsound families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import LATENCY
from fastroof.errors import TableError
from fastroof.load.compare import campaign_family
from fastroof.load.families import family_columns
from fastroof.load.own import UnsoundFamily, families_error, unsound_families
from fastroof.operators.registry import OPERATORS
from fastroof.uncertainty.campaign import CampaignError, CampaignErrors, campaign_error

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables.table_set import Tables

Key = tuple[Any, ...]


class SourceError(NamedTuple):
    """Errors of one kernel's answers that its neighbours in the table share."""

    campaign: CampaignErrors
    floor_us: float
    families: tuple[UnsoundFamily, ...]

    def parts(self, sizes: Mapping[str, Floats], latency_us: Floats) -> tuple[Floats, Floats]:
        """Relative standard errors of a call by itself, and of all calls together."""
        spread, common = self.campaign.at(latency_us, self.floor_us)
        return spread, np.asarray(np.hypot(common, families_error(self.families, sizes, latency_us)))

    def variance(self, sizes: Mapping[str, Floats], latency_us: Floats) -> Floats:
        """Of a single answer, relative and squared."""
        spread, common = self.parts(sizes, latency_us)
        return np.asarray(spread**2 + common**2)


_NONE: Final = CampaignError(0.0, 0.0)
NO_SOURCE: Final = SourceError(CampaignErrors(_NONE, _NONE), 1.0, ())
"""Of what was not measured: no campaign can be another one."""


def source_error(tables: Tables, operator: str, asked: Key) -> SourceError:
    """Errors of a kernel's source; of one that was not measured those of the operator's first source."""

    def made() -> SourceError:
        key = OPERATORS[operator].source_key(tables, asked)
        words = dict(zip((c.name for c in OPERATORS[operator].keys), key, strict=True))
        there = tables.serves(operator, key)
        table = tables.serving(operator, key) if there else tables.table(operator)
        families = unsound_families(table.provenance, operator)
        told = _told(table)
        if told is None:
            is_foreign = tables.is_foreign(operator, key if there else None)
            engines = (tables.order.wanted(operator), table.engine) if is_foreign else None
            told = campaign_error(operator, campaign_family(operator, words), tables.gpu.name, engines)
        floor_us = _floor_us(table, words)
        return SourceError(told, floor_us, tuple(family for family in families if family.holds_key(words)))

    return tables.kept(("source error", operator, asked), made)


def _floor_us(table: MeasuredTable, words: Mapping[str, Any]) -> float:
    """Least latency of a kernel's family, of the whole table where it has no such rows."""
    rows = np.full(table.num_rows, True)
    for name in family_columns(table.operator):
        rows &= table.columns[name] == words[name]
    latency_us = table.columns[LATENCY.name]
    return float(latency_us[rows].min() if rows.any() else latency_us.min())


def _told(table: MeasuredTable) -> CampaignErrors | None:
    """What the source's own provenance says of its campaign."""
    about = table.about.get("campaign")
    if about is None:
        return None
    figures = [about.get(name) for name in ("scale", "common")] if isinstance(about, Mapping) else []
    given = [float(v) for v in figures if isinstance(v, int | float) and 0.0 <= v < math.inf]
    if len(given) != 2 or given[1] > given[0]:
        raise TableError(
            f"{table.source}: operators.{table.operator}.campaign is {about!r}; need scale and common, "
            "relative standard errors of at least 0, common no larger than scale"
        )
    scale, common = given
    one = CampaignError(math.sqrt(scale**2 - common**2), common)
    return CampaignErrors(one, one)
