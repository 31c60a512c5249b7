"""Routed experts without a gate: two GEMMs an expert, as with a squared ReLU between.

Where a GPU has no such kernels measured at all, those with a gate lend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.operators.calls import Experts
from fastroof.operators.expert_borrowing import (
    BorrowedPoints,
    ExpertShape,
    Lender,
    borrowed_points,
    borrowing_grids,
)
from fastroof.operators.expert_rows import PACKAGE_COLUMNS, nongated_rows
from fastroof.operators.expert_work import NONGATED_GEMMS
from fastroof.operators.foreign_rows import RUN, PackageFile
from fastroof.operators.moe import MOE, MoeOperator
from fastroof.operators.operator import DatasheetClass, HoldoutGrid, Key
from fastroof.uncertainty.variance import relative_variance

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

__all__ = ["GATED", "MOE_NONGATED", "OPERATORS", "NongatedMoeOperator"]

GATED: Final = 0.28
"""Relative standard error of standing for experts without a gate: 80 % of |ln| lie within 0.36 where
TensorRT-LLM's bf16 kernels of the H200 with a gate stand for those without, see ``README.md`` beside this."""


class NongatedMoeOperator(MoeOperator):
    """Routed experts of two GEMMs: up and down, as with a squared ReLU between."""

    gemms: ClassVar[int] = NONGATED_GEMMS
    name = "moe_nongated"
    rank = 51
    summary = "Routed experts without a gate."
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {}
    holdouts = (HoldoutGrid("moe_nongated", "every second", {}, {}), *borrowing_grids("moe_nongated"))
    coverages = (HoldoutGrid("moe_nongated", "bf16", {}, {"dtype": "bf16"}), *borrowing_grids("moe_nongated"))
    package_files = (PackageFile("moe", "moe_perf", PACKAGE_COLUMNS, nongated_rows, RUN),)
    tree_files = ()

    # -- lent by experts with a gate -----------------------------------------------------------------

    def _has_own(self, tables: Tables) -> bool:
        """Whether any kernel without a gate was measured on the GPU."""
        return self.name in tables.measured.tables

    def lenders(self, tables: Tables, key: Key) -> tuple[Lender, ...]:
        """As of experts with a gate; where no others were measured these lend, the very shape first."""
        if self._has_own(tables) or MOE.name not in tables.measured.tables:
            return super().lenders(tables, key)
        return MOE.lenders(tables, key) or (Lender(ExpertShape(*key), 1.0, 0.0),)

    def _borrowed(self, tables: Tables, wanted: ExpertShape, lenders: Sequence[Lender]) -> BorrowedPoints:
        if self._has_own(tables):
            return super()._borrowed(tables, wanted, lenders)
        return borrowed_points(
            wanted,
            lenders,
            lambda shape: MOE.packed(tables, shape),
            lambda shape, launch_us: self.roofline(shape, tables.gpu, launch_us),
            lambda shape, launch_us: MOE.roofline(shape, tables.gpu, launch_us),
        )

    def _variance(self, tables: Tables, key: Key, tokens: Floats) -> Floats:
        """As of experts with a gate; where these lend their own, and of lending."""
        if self._has_own(tables):
            return super()._variance(tables, key, tokens)
        near = self.lenders(tables, key)[0].shape
        own = relative_variance(MOE.local_errors(tables, near), [tokens])
        apart = MOE.borrowing_errors(tables, near).of(ExpertShape(*key), self.lenders(tables, key))
        return np.asarray(own + (apart * (tuple(near) != tuple(key))) ** 2 + GATED**2)

    def serving(self, call: Experts, tables: Tables) -> MeasuredTable:
        """The table that has the layer's shape, or its nearest lender."""
        if self._has_own(tables):
            return super().serving(call, tables)
        return tables.serving(MOE.name, self.source_key(tables, self.row_key(call)))

    def table_points(self, call: Experts, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """So many tokens of the layer's shape; nothing where it has no table."""
        return super().table_points(call, tables, rows) if self._has_own(tables) else None


MOE_NONGATED: Final = NongatedMoeOperator()
OPERATORS: Final = (MOE_NONGATED,)
