"""What is known of measuring one operator: its points, what they cost, how they are checked.

The columns of its table, FLOPs and bytes are fastroof's. Which kernels a provider launches for it is in
:mod:`kernels_bench.providers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.operators import registry
from fastroof.operators.operator import Operator
from fastroof.units import PEAK_DTYPE
from kernels_bench.model_shape import ModelShape

Values = Mapping[str, Any]
"""Key and axis columns of one point."""
Columns = Mapping[str, Array]
"""The same of many points of one operator, each of shape (points,)."""

Shape = tuple[int, ...]
ModelShapes = Mapping[str, Callable[[ModelShape, int], Iterable[Shape]]]
"""Shapes of a model's kernels at a tensor-parallel size, by what a grid calls them."""
Limits = Mapping[str, Callable[[Values], float]]
"""What a limit of a grid bounds, of one point."""

STREAMING: Final = 0.776
"""Share of an H100's 3.35 TB/s that kernels were seen to reach: 2.6 TB/s."""


class MeasuredOperator:
    """One operator as it is measured. A subclass states how it differs from this."""

    name: ClassVar[str]
    # Shares of a card's peak FLOP/s and bandwidth that its kernels were seen to reach on an H100.
    flops_share: ClassVar[float] = 1.0
    # Of fp8 kernels, of their higher peak, if it is another one.
    fp8_flops_share: ClassVar[float] = 0.0
    bandwidth_share: ClassVar[float] = STREAMING
    launch_us: ClassVar[float]
    # Seconds beyond those of a point: of the first point of a run, and of the first of each
    # :meth:`compiled_shape`.
    import_s: ClassVar[float] = 0.0
    compile_s: ClassVar[float] = 0.0
    # Whether a card that has no units for its ``dtype`` cannot run it.
    computes_in_dtype: ClassVar[bool] = False
    # Columns that ``shapes`` of a grid fills; none where it is empty.
    shape_columns: ClassVar[tuple[str, ...]] = ()
    # Names that ``shapes`` may have, and what each derives from a model.
    model_shapes: ClassVar[ModelShapes] = {}
    # Limits that a group may have, and what each bounds, of one point.
    limits: ClassVar[Limits] = {}
    defaults: ClassVar[Mapping[str, int | str]] = {}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    divisors: ClassVar[Mapping[str, str]] = {}

    @property
    def schema(self) -> Operator:
        """The columns of its table."""
        return registry.OPERATORS[self.name]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that make a point: keys, then axes."""
        return tuple(column.name for column in (*self.schema.keys, *self.schema.axes))

    # -- points ------------------------------------------------------------------------------------

    def given_columns(self) -> tuple[str, ...]:
        """Columns that a grid gives; the others follow from them."""
        return self.columns

    def completed(self, given: Values) -> Values:
        """Add the columns that follow from those given."""
        return given

    def impossible(self, given: Values) -> str | None:
        """Return why no kernel can have these sizes, or None."""
        for column, choices in self.choices.items():
            if column in given and given[column] not in choices:
                return f"unknown {column} {given[column]!r}; valid are {', '.join(choices)}"
        for size, divisor in self.divisors.items():
            if size in given and divisor in given and given[size] % given[divisor]:
                return f"{size} {given[size]} is not divisible by {divisor} {given[divisor]}"
        return None

    # -- what measuring costs ------------------------------------------------------------------------

    def flops_shares(self, columns: Columns) -> Floats:
        """Share of the peak FLOP/s that each point's kernel reaches."""
        dtypes = columns.get("dtype", [""] * _count(columns))
        is_fp8 = np.array([PEAK_DTYPE.get(str(dtype)) == "fp8" for dtype in dtypes], np.bool_)
        return np.where(is_fp8, self.fp8_flops_share or self.flops_share, self.flops_share)

    def set_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes of one set of each point's inputs and outputs: what a call moves, unless more is held."""
        return np.maximum(moved_bytes, 1.0)

    def rotates(self, columns: Columns) -> Bools:
        """Whether calls of each point rotate over sets of inputs."""
        return np.full(_count(columns), True)

    def fill_bytes_per_s(self, columns: Columns) -> Floats:
        """Rate at which each point's inputs are made, where that takes longer than setting a point up."""
        return np.full(_count(columns), np.inf)

    def compiled_shape(self, values: Values) -> tuple[Any, ...] | None:
        """Name what kernels are compiled for at their first launch; None if nothing is compiled."""
        return None

    def line(self, values: Values) -> tuple[Any, ...]:
        """Axes of a point that name its kernel's shape, rather than its size."""
        return ()

    # -- how a result is checked ---------------------------------------------------------------------

    def checked_dtype(self, values: Values) -> str:
        """Name in :data:`kernels_bench.run.check.BOUNDS` of the error that a result may have."""
        return str(values.get("dtype") or values.get("kv_dtype", "bf16"))

    def has_result(self, values: Values) -> bool:
        """Whether a call writes anything that could be checked."""
        return True

    def reference_work(self, values: Values) -> float:
        """About the multiply-adds of a float64 reference."""
        return math.prod(float(values[column.name]) for column in self.schema.axes)


def _count(columns: Columns) -> int:
    return len(next(iter(columns.values())))
