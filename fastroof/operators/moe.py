"""Routed experts of one layer on one GPU: a fused kernel, by the tokens that enter the layer.

Experts with a gate are three GEMMs (gate, up, down), experts without one are two. They are two operators with
the same keys, since engines run different kernels for them and the shape does not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, ORIGIN_BORROWED, ORIGIN_MODELLED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.operators.borrowing import (
    EXPERTS,
    BorrowedPoints,
    BorrowingErrors,
    Donor,
    borrowed_points,
    borrowing_errors,
    is_routing,
    nearest,
    nearest_routing,
)
from fastroof.operators.calls import Experts
from fastroof.operators.external_rows import PackageFile, TreeFile
from fastroof.operators.moe_rows import GROUPED_GEMM_FILES, PACKAGE_COLUMNS, moe_rows
from fastroof.operators.moe_work import (
    EVENLY_ROUTED,
    GATED_GEMMS,
    NONGATED_GEMMS,
    ExpertShape,
    check_routed,
    moe_bytes,
    moe_flops,
    nodes_of_experts,
    tokens_to_reach_all,
)
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    RowSource,
    SourceTable,
    element_bytes,
    is_measured,
    measured_keys,
)
from fastroof.operators.row_operator import KernelOperator, PackedSizes, RowCost, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, US_PER_S

OTHER_ACTIVATION: Final = "_situ_as_silu"
"""Suffix of kernels that were measured with SiLU instead of the model's activation."""

EXPERT_KEYS: Final = (
    DTYPE,
    Column("hidden", "int", "", "model width"),
    Column("intermediate", "int", "", "width of one expert, before moe_tp"),
    Column("topk", "int", "", "experts a token is routed to"),
    Column("num_experts", "int", "", "experts of the layer, before moe_ep"),
    Column("moe_tp", "int", "", "tensor-parallel size inside an expert"),
    Column("moe_ep", "int", "", "expert-parallel size"),
    Column("distribution", "text", "", "distribution of tokens over experts"),
)


Grids = tuple[HoldoutGrid, ...]


def _judged(operator: str) -> tuple[Grids, Grids]:
    """Hold-outs and coverages: also of whole kernels, where other splits or only other layers remain."""
    layer, routing = ("hidden", "intermediate", "topk", "num_experts"), {"distribution": "power_law_1.2"}
    borrowed = (
        HoldoutGrid(operator, "another split", {}, routing, (*layer, "moe_tp", "moe_ep")),
        HoldoutGrid(operator, "another layer", {}, routing, layer),
    )
    return (
        (HoldoutGrid(operator, "every second", {}, {}), *borrowed),
        (HoldoutGrid(operator, "bf16", {}, {"dtype": "bf16"}), *borrowed),
    )


def _shape(c: Columns) -> tuple[Array, Array, Array, Array, Array, Array]:
    return (c["hidden"], c["intermediate"], c["topk"], c["num_experts"], c["moe_tp"], c["moe_ep"])


class MoeOperator(KernelOperator):
    """Routed experts of ``gemms`` GEMMs each; B grows with the experts that tokens are expected to reach."""

    gemms: ClassVar[int] = GATED_GEMMS
    name = "moe"
    rank = 50
    summary = "Routed experts of one layer, on one GPU."
    keys = EXPERT_KEYS
    axes = (Column("num_tokens", "int", "tokens", "tokens of all GPUs that share the experts"),)
    defaults: ClassVar[Mapping[str, Any]] = {
        "moe_tp": 1,
        "moe_ep": 1,
        "distribution": "balanced",
        "dtype": "bf16",
    }
    holdouts, coverages = _judged(name)
    # vLLM 0.24.0 on H100, bf16 and fp8_block, power_law_1.2, moe_tp up to 8 and ep up to 16: weights move at
    # 0.7 of the bandwidth; GEMMs of few rows per expert, with one rank loaded most, compute at 0.2 of the
    # peak
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "moe": DatasheetClass(30.0, 0.7),
        "moe_compute": DatasheetClass(30.0, 0.2),
    }
    # 0.38 for those rows; 0.39 to 0.48 for three engines on H100 and B200, up to 0.9 for 4-bit weights in
    # bf16
    datasheet_error = 0.48
    package_files = (PackageFile("moe", "moe_perf", PACKAGE_COLUMNS, partial(moe_rows, has_gate=True)),)
    tree_files: ClassVar[tuple[TreeFile, ...]] = GROUPED_GEMM_FILES

    def flops(self, columns: Columns) -> Floats:
        """All GEMMs of every token's experts."""
        c = columns
        experts = (c["hidden"], c["intermediate"], c["topk"], c["moe_tp"], c["moe_ep"])
        return moe_flops(c["num_tokens"], *experts, self.gemms)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes with the experts that even routing is expected to reach; the fewest for uneven routing."""
        width = element_bytes(columns["dtype"])
        expected = moe_bytes(columns["num_tokens"], *_shape(columns), width, self.gemms)
        even = np.isin(columns["distribution"].astype(str), EVENLY_ROUTED)
        return np.where(even, expected, self._one_tokens_experts(columns))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes if all tokens take the same experts."""
        return self._one_tokens_experts(columns)

    def _one_tokens_experts(self, columns: Columns) -> Floats:
        shape = _shape(columns)
        one_token = moe_bytes(1, *shape, element_bytes(columns["dtype"]), self.gemms)
        return one_token + moe_bytes(columns["num_tokens"], *shape, 0) - moe_bytes(1, *shape, 0)

    def roofline(self, key: Key, gpu: GpuSpec, launch_us: float) -> Callable[[Any], Floats]:
        """Launch, FLOPs at the dtype's peak, weights of the touched experts and tokens."""
        dtype, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = key
        width = DTYPE_BYTES[dtype]

        def bound_us(tokens: Any) -> Floats:
            work = moe_flops(tokens, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms)
            experts = (hidden, intermediate, topk, num_experts, moe_tp, moe_ep)
            moved = moe_bytes(tokens, *experts, width, self.gemms)
            seconds = work / gpu.peak(dtype) + moved / gpu.hbm_bytes_per_s
            return launch_us + seconds * US_PER_S

        return bound_us

    # -- unmeasured shapes ------------------------------------------------------------

    def check_key(self, key: Key) -> None:
        """Reject topk above the number of experts."""
        _, _, _, topk, num_experts, _, _, _ = key
        check_routed(topk, num_experts)

    def donors(self, tables: RowSource, key: Key) -> tuple[Donor, ...]:
        """Donors of a shape, nearest first; empty if it was measured.

        Near kernels of the requested engine come before another engine's exact shape.
        """
        return tables.cached(("expert donors", self.name, key), lambda: self._find_donors(tables, key))

    def _find_donors(self, tables: RowSource, key: Key) -> tuple[Donor, ...]:
        candidates = tables.candidates(self.name)
        own = [table for table in candidates if not tables.is_foreign(table)]
        # tables are read on first use: other engines' tables may not be needed
        if any(key in table.groups() and tables.is_sound(table, key) for table in own):
            return ()
        target = ExpertShape(*key)
        if not is_routing(target.distribution):
            # raises: no routing is near an unknown one
            tables.serving(self.name, key)
            return ()
        if len(own) < len(candidates):
            found = self._nearest(tables, target, own, sound=True)
            if found and found[0].is_near:
                return found
        if is_measured(tables, self.name, key):
            return ()
        for sound in (True, False):
            if found := self._nearest(tables, target, candidates, sound=sound):
                return found
        dtypes = ", ".join(sorted({one[0] for one in measured_keys(tables, self.name)}))
        raise MissingTableError(
            f"no {self.name} row of {tables.gpu.name} has dtype={target.dtype}, and dtypes are not borrowed; "
            f"measured: {dtypes}"
        )

    def _nearest(
        self, tables: RowSource, target: ExpertShape, pool: Sequence[SourceTable], *, sound: bool
    ) -> tuple[Donor, ...]:
        """Donors from some tables: the first with the layer, else the first near it, else the nearest."""
        routings = [self._shapes(tables, table, target.dtype, sound) for table in pool]
        distribution = nearest_routing(target.distribution, set().union(*routings))
        alike = [shapes[distribution] for shapes in routings if distribution in shapes]

        def rank(donors: tuple[Donor, ...]) -> tuple[Any, ...]:
            near = donors[0]
            return near.kinds, 0.0 if near.is_near else near.octaves

        return min((nearest(target, shapes, EXPERTS) for shapes in alike), key=rank, default=())

    def _shapes(
        self, tables: RowSource, table: SourceTable, dtype: str, sound: bool
    ) -> dict[str, list[ExpertShape]]:
        """Measured shapes of a table and dtype, by distribution."""

        def shapes() -> dict[str, list[ExpertShape]]:
            by_routing: dict[str, list[ExpertShape]] = {}
            keys = [key for key in table.groups() if key[0] == dtype]
            if sound:
                keys = [key for key in keys if tables.is_sound(table, key)]
            for key in keys:
                by_routing.setdefault(key[-1], []).append(ExpertShape(*key))
            return by_routing

        return tables.cached(("expert shapes", self.name, table.source, dtype, sound), shapes)

    def packed(self, tables: RowSource, key: Key) -> PackedSizes:
        """Curve of one kernel, borrowed if it was not measured."""
        donors = self.donors(tables, key)
        if not donors:
            return super().packed(tables, key)

        def borrowed() -> PackedSizes:
            return self._borrowed(tables, ExpertShape(*key), donors).packed()

        return tables.cached(("borrowed experts", self.name, key), borrowed)

    def _borrowed(self, tables: RowSource, target: ExpertShape, donors: Sequence[Donor]) -> BorrowedPoints:
        return borrowed_points(
            target,
            donors,
            lambda shape: super(MoeOperator, self).packed(tables, shape),
            lambda shape, launch_us: self.roofline(shape, tables.gpu, launch_us),
        )

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up one shape; borrowed points are marked for every method."""
        super().look_up(tables, method, key, sizes, answers)
        if self.donors(tables, key):
            np.maximum(answers[2], ORIGIN_BORROWED, out=answers[2])

    def source_key(self, tables: RowSource, key: Key) -> Key:
        """The nearest donor if it was not measured."""
        donors = self.donors(tables, key)
        return tuple(donors[0].kernel) if donors else key

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error of lookups of one shape."""
        return np.sqrt(self._variance(tables, key, sizes[0]))

    def _variance(self, tables: RowSource, key: Key, tokens: Floats) -> Floats:
        """Variance of a shape's curve, or of its nearest donor's and of borrowing."""
        donors = self.donors(tables, key)
        if not donors:
            return relative_variance(self.local_errors(tables, key), [tokens])
        target, near = ExpertShape(*key), donors[0].kernel
        theirs = tokens * (target.topk * near.num_experts / (target.num_experts * near.topk))
        own = relative_variance(self.local_errors(tables, near), [theirs])
        return own + self.borrowing_errors(tables, near).of(target.distribution, donors[0]) ** 2

    def borrowing_errors(self, tables: RowSource, donor: ExpertShape) -> BorrowingErrors:
        """Errors of borrowing in a donor's table, among its dtype and distribution."""
        table = tables.serving(self.name, donor)
        shapes = self._shapes(tables, table, donor.dtype, sound=False)[donor.distribution]
        alike = [shape for shape in shapes if tables.serving(self.name, shape) is table]

        def log_errors(shape: ExpertShape, donors: Sequence[Donor]) -> Floats:
            measured = super(MoeOperator, self).packed(tables, shape)
            borrowed = self._borrowed(tables, shape, donors)
            return borrowed.log_errors(measured.sizes, measured.curve.value[1:-1])

        return tables.cached(
            ("expert borrowing", self.name, table.source, donor.dtype, donor.distribution),
            lambda: borrowing_errors(alike, log_errors),
        )

    # -- in plans ----------------------------------------------------------------------------------

    @staticmethod
    def row_key(call: Experts) -> Key:
        """Key of the kernel."""
        shape = (call.hidden, call.intermediate, call.topk, call.num_experts, call.moe_tp, call.moe_ep)
        return (call.dtype, *shape, call.distribution)

    def row_cost(self, call: Experts) -> RowCost:
        """FLOPs and bytes per token, and the weights of all experts, which many tokens reach."""
        _, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = self.row_key(call)
        per_row = float(moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms))
        experts = num_experts / moe_ep * self.gemms * hidden * intermediate / moe_tp
        tokens = 2.0 * ACTIVATION_BYTES * hidden
        return RowCost(per_row, tokens, experts * DTYPE_BYTES[call.dtype], call.dtype)

    def row_work(self, call: Experts, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs, and the bytes of the experts that the tokens are expected to reach."""
        _, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = self.row_key(call)
        width = DTYPE_BYTES[call.dtype]
        return (
            moe_flops(rows, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms),
            moe_bytes(rows, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, width, self.gemms),
        )

    def serving(self, call: Experts, tables: RowSource) -> SourceTable:
        """Table of the layer's shape or its nearest donor."""
        return tables.serving(self.name, self.source_key(tables, self.row_key(call)))

    def roofline_nodes(self, call: Experts, packed: PackedSizes) -> RowNodes:
        """A node at every number of tokens until they reach all experts, see :func:`nodes_of_experts`."""
        return nodes_of_experts(packed, tokens_to_reach_all(call.topk, call.num_experts))

    def row_variance(self, call: Experts, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the shape's curve."""
        return self._variance(tables, self.row_key(call), rows)

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """Class of memory-bound calls: few tokens."""
        return MOE.datasheets["moe"]

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """Latency against rows from the datasheet, with the experts that tokens are expected to reach."""
        memory, compute = MOE.datasheets["moe"], MOE.datasheets["moe_compute"]
        rows = np.unique(np.round(2.0 ** np.arange(0.0, np.log2(SIZE_LIMIT) + 0.125, 0.125)))
        flops, moved = self.row_work(call, rows)
        compute_s = flops / gpu.peak(call.dtype) / compute.efficiency
        memory_s = moved / gpu.hbm_bytes_per_s / memory.efficiency
        value = memory.launch_us + np.r_[0.0, np.maximum(compute_s, memory_s)] * US_PER_S
        flag = np.full(len(value), ORIGIN_MODELLED, np.uint8)
        return RowNodes(np.r_[0.0, rows], value, flag, memory.launch_us)

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Note kernels that were measured with another activation than the model's."""
        kernel = columns[self.name]["kernel"].astype(str)
        other = np.char.endswith(kernel, OTHER_ACTIVATION)
        if not other.any():
            return {}
        named = ", ".join(sorted(set(kernel[other])))
        return {
            "activation": f"{int(other.sum())} rows were measured with SiLU instead of the model's own "
            f"activation, as their kernels' names say: {named}"
        }


MOE: Final = MoeOperator()


GATED: Final = 0.28
"""Relative standard error of borrowing experts without a gate from experts with one: 80 % of |ln| within 0.36
for
TensorRT-LLM's bf16 kernels on H200, see README.md."""


class NongatedMoeOperator(MoeOperator):
    """Routed experts of two GEMMs, up and down, for example with a squared ReLU."""

    gemms: ClassVar[int] = NONGATED_GEMMS
    name = "moe_nongated"
    rank = 51
    summary = "Routed experts without a gate."
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {}
    holdouts, coverages = _judged(name)
    package_files = (PackageFile("moe", "moe_perf", PACKAGE_COLUMNS, partial(moe_rows, has_gate=False)),)
    tree_files = ()

    # -- borrowing from experts with a gate -----------------------------------------------------------------

    def _has_own(self, tables: RowSource) -> bool:
        """Whether any kernel without a gate was measured on the GPU."""
        return tables.has(self.name)

    def donors(self, tables: RowSource, key: Key) -> tuple[Donor, ...]:
        """Donors without a gate; experts with a gate if there are none, the same shape first."""
        if self._has_own(tables) or not tables.has(MOE.name):
            return super().donors(tables, key)
        return MOE.donors(tables, key) or (Donor(ExpertShape(*key)),)

    def _borrowed(self, tables: RowSource, target: ExpertShape, donors: Sequence[Donor]) -> BorrowedPoints:
        if self._has_own(tables):
            return super()._borrowed(tables, target, donors)
        return borrowed_points(
            target,
            donors,
            lambda shape: MOE.packed(tables, shape),
            lambda shape, launch_us: self.roofline(shape, tables.gpu, launch_us),
            lambda shape, launch_us: MOE.roofline(shape, tables.gpu, launch_us),
        )

    def _variance(self, tables: RowSource, key: Key, tokens: Floats) -> Floats:
        """Variance as with a gate, plus that of borrowing across the gate."""
        if self._has_own(tables):
            return super()._variance(tables, key, tokens)
        donor = self.donors(tables, key)[0]
        near = donor.kernel
        own = relative_variance(MOE.local_errors(tables, near), [tokens])
        apart = MOE.borrowing_errors(tables, near).of(key[-1], donor)
        return np.asarray(own + (apart * (tuple(near) != tuple(key))) ** 2 + GATED**2)

    def serving(self, call: Experts, tables: RowSource) -> SourceTable:
        """Table of the layer's shape or its nearest donor."""
        if self._has_own(tables):
            return super().serving(call, tables)
        return tables.serving(MOE.name, self.source_key(tables, self.row_key(call)))

    def table_points(self, call: Experts, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """The layer's shape and tokens; None if there is no table."""
        return super().table_points(call, tables, rows) if self._has_own(tables) else None


MOE_NONGATED: Final = NongatedMoeOperator()

OPERATORS: Final = (
    MOE,
    MOE_NONGATED,
)
