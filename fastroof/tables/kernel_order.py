"""Whose measured kernels are asked first: those of an engine, then of the engines nearest to it."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.load import MeasuredTable

__all__ = ["BY_RANK", "KernelOrder"]


class KernelOrder(NamedTuple):
    """The order in which the sources of an operator are asked."""

    engines: tuple[str, ...] = ()
    operators: tuple[tuple[str, str], ...] = ()

    def wanted(self, operator: str) -> str:
        """The engine or source that is asked first for an operator; empty where the ranks decide."""
        named = dict(self.operators).get(operator)
        return named or (self.engines[0] if self.engines else "")

    def sorted(self, tables: tuple[MeasuredTable, ...], operator: str) -> tuple[MeasuredTable, ...]:
        """Tables of an operator in this order; those of no engine stay among those of the first."""
        if not self.wanted(operator):
            return tables
        first = dict(self.operators).get(operator)
        engines = (first, *self.engines) if first else self.engines

        def place(table: MeasuredTable) -> int:
            if table.source == first or table.engine == "":
                return 0
            return engines.index(table.engine) if table.engine in engines else len(engines)

        return tuple(sorted(tables, key=place))

    def is_foreign(self, table: MeasuredTable) -> bool:
        """Whether a table's kernels are another engine's than the one that is meant to run them."""
        wanted = self.wanted(table.operator)
        return wanted != "" and table.engine not in ("", wanted) and table.source != wanted


BY_RANK: Final = KernelOrder()
"""The order of the sources' ranks."""
