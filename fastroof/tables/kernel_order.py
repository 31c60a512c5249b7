"""The engine order by which sources serve kernels, and tables that have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol, TypeVar

from fastroof.operators.operator import RowSource, SourceTable

Table = TypeVar("Table", bound=SourceTable)


class KernelOrder(NamedTuple):
    """Order of preference of an operator's sources: engines, and engines or sources of single operators.

    Without engines the ranks of the sources decide. Sources of the first engine's ``release`` precede those
    of its other versions.
    """

    engines: tuple[str, ...] = ()
    operators: tuple[tuple[str, str], ...] = ()
    release: str = ""

    def preferred(self, operator: str) -> str:
        """Engine or source preferred for an operator; empty if the ranks decide."""
        preferred = dict(self.operators).get(operator)
        return preferred or (self.engines[0] if self.engines else "")

    def sorted(self, tables: tuple[Table, ...], operator: str) -> tuple[Table, ...]:
        """Sort tables of an operator in this order; tables without an engine count as the first engine's."""
        if not self.preferred(operator):
            return tables
        first = dict(self.operators).get(operator)
        engines = (first, *self.engines) if first else self.engines

        def place(table: Table) -> int:
            if table.source == first or table.engine == "":
                return 0
            return engines.index(table.engine) if table.engine in engines else len(engines)

        ordered = sorted(tables, key=place)
        if self.release and not first and engines[0] in (table.engine for table in ordered):
            # the engine's versions begin after your own tables, and before what ranks last
            start = next(i for i, table in enumerate(ordered) if table.engine == engines[0])
            ordered[start:] = sorted(ordered[start:], key=lambda table: not self._is_of_release(table))
        return tuple(ordered)

    def _is_of_release(self, table: SourceTable) -> bool:
        """Whether a table is of the first engine's release; 0.31 is any 0.31.x."""
        version = str(table.provenance.get("framework_version", ""))
        return table.engine == self.engines[0] and f"{version}.".startswith(f"{self.release}.")

    def is_foreign(self, table: SourceTable) -> bool:
        """Whether a table has the kernels of another engine than the preferred one."""
        preferred = self.preferred(table.operator)
        return preferred != "" and table.engine not in ("", preferred) and table.source != preferred


BY_RANK: Final = KernelOrder()
"""Order by the ranks of sources."""


class OrderedTables(RowSource, Protocol):
    """Tables with an order of preference of engines."""

    @property
    def order(self) -> KernelOrder:
        """The order of engines."""

    @property
    def scaled_sources(self) -> frozenset[str]:
        """Names of sources whose kernels were measured on another card."""

    @property
    def made_from(self) -> Mapping[str, str]:
        """Metadata of Arrow tables: version, hash and GPU."""
