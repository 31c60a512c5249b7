"""Tests of the experts of one layer: its splits at equal work, and the engines that measured it.

With even routing a GPU has as much work with ep n as with tp n. Rows that count the tokens of one GPU in
place of all take n times as long with ep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.load import MeasuredTable
from fastroof.operators.moe_work import EVENLY_ROUTED, ExpertShape
from fastroof.tables.table_set import Tables

EXPERTS: Final = ("moe", "moe_nongated")

SPLIT_TOKENS: Final = 4096
"""Tokens at which splits are compared: enough for GEMMs to take longer than the experts' weights."""

SPLITS: Final = (0.6, 1.6)
"""Ratios of ep n to tp n beyond which a layer is listed."""

REFUSED: Final = 2.5
"""The ratio from which it cannot be of equal work."""

SLOWER: Final = 2.0
"""Ratio to another engine at every common number of tokens from which a layer is listed."""

FEWEST_TOKENS: Final = 5
"""Fewest common numbers of tokens of two engines."""


class UnlikeExperts(NamedTuple):
    """Rows of one layer and split that are unlike another split's, or another source's."""

    source: str
    shape: ExpertShape
    against: str
    ratio: float

    @property
    def facts(self) -> dict[str, Any]:
        """Its values by name, in answers as JSON."""
        values = {"source": self.source, "against": self.against, "ratio": self.ratio}
        return values | self.shape._asdict()

    @property
    def text(self) -> str:
        """One line of a survey."""
        one = self.shape
        layer = f"{one.hidden} x {one.intermediate}, {one.topk} of {one.num_experts}, {one.dtype}"
        refused = " (refused)" if self.is_refused else ""
        split = f"tp {one.moe_tp} ep {one.moe_ep}"
        return f"{self.source}: {layer}, {split}: {self.ratio:.2f} times {self.against}{refused}"

    @property
    def is_refused(self) -> bool:
        """Whether its tokens cannot be those of all GPUs."""
        return self.against.startswith("tp ") and self.ratio > REFUSED


class _Curve(NamedTuple):
    tokens: np.ndarray
    us: np.ndarray

    def at(self, tokens: float) -> float:
        """Latency, us; nan beyond the measured tokens."""
        return float(np.interp(tokens, self.tokens, self.us, np.nan, np.nan))


def unlike_experts(tables: Tables, operator: str, table: MeasuredTable) -> tuple[UnlikeExperts, ...]:
    """List a source's layers whose splits differ, and those that other engines run in half the time."""
    curves = _curves(table)
    others = [(one.source, _curves(one)) for one in tables.candidates(operator) if one.engine != table.engine]
    return (*_unlike_splits(table.source, curves), *_slower(table.source, curves, others))


_Curves = dict[ExpertShape, _Curve]


def _curves(table: MeasuredTable) -> _Curves:
    """Least latency by tokens, of each layer and split with even routing."""
    found: _Curves = {}
    for key, rows in table.groups().items():
        shape = ExpertShape(*key)
        if shape.distribution in EVENLY_ROUTED:
            order = rows[np.lexsort((table.columns["latency_us"][rows], table.columns["num_tokens"][rows]))]
            tokens, first = np.unique(table.columns["num_tokens"][order], return_index=True)
            found[shape] = _Curve(tokens, table.columns["latency_us"][order][first])
    return found


def _unlike_splits(source: str, curves: _Curves) -> Iterator[UnlikeExperts]:
    for shape, curve in curves.items():
        even = curves.get(shape._replace(moe_tp=shape.moe_ep, moe_ep=1))
        if shape.moe_tp > 1 or shape.moe_ep == 1 or even is None:
            continue
        ratio = curve.at(SPLIT_TOKENS) / even.at(SPLIT_TOKENS)
        if ratio < SPLITS[0] or ratio > SPLITS[1]:
            yield UnlikeExperts(source, shape, f"tp {shape.moe_ep}", ratio)


def _slower(source: str, curves: _Curves, others: list[tuple[str, _Curves]]) -> Iterator[UnlikeExperts]:
    for shape, curve in curves.items():
        for other, theirs in others:
            if shape not in theirs:
                continue
            one = theirs[shape]
            common, mine, its = np.intersect1d(curve.tokens, one.tokens, return_indices=True)
            ratios = curve.us[mine] / one.us[its]
            if len(common) >= FEWEST_TOKENS and ratios.min() > SLOWER:
                yield UnlikeExperts(source, shape, other, float(np.median(ratios)))
