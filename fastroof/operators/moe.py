"""Routed experts of one layer on one GPU: a fused kernel, by the tokens that enter the layer.

Experts with a gate are three GEMMs (gate, up, down), those without one two: two operators with equal keys,
since an engine runs other kernels for them and a shape alone does not tell which it is. Those without are in
:mod:`.moe_nongated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MODELLED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.calls import Experts
from fastroof.operators.expert_borrowing import (
    BorrowedPoints,
    BorrowingErrors,
    ExpertShape,
    Lender,
    borrowed_points,
    borrowing_errors,
    borrowing_grids,
    is_routing,
    nearest,
    nearest_routing,
)
from fastroof.operators.expert_rows import GROUPED_GEMM_FILES, PACKAGE_COLUMNS, gated_rows, nongated_rows
from fastroof.operators.foreign_rows import RUN, PackageFile, TreeFile
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    Real,
    as_floats,
    dtype_peaks,
    element_bytes,
)
from fastroof.operators.row_operator import (
    CurveOptions,
    PackedSizes,
    PerRowOperator,
    RowCost,
    RowNodes,
    SizedOperator,
)
from fastroof.pack import SIZE_LIMIT
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables


GATED_GEMMS: Final = 3
NONGATED_GEMMS: Final = 2

EVENLY_ROUTED: Final = ("balanced", "uniform")
"""Distributions of tokens over experts for which the expectation of uniform routing holds."""


def check_routed(topk: int, num_experts: int) -> None:
    """Refuse a token that is routed to more experts than there are, which no kernel can be asked for."""
    if topk > num_experts:
        raise LookupInputError(f"topk {topk} is more than num_experts {num_experts}: it can be {num_experts}")


def moe_touched_experts(num_tokens: Real, topk: Real, num_experts: Real, moe_ep: Real = 1) -> Floats:
    """Experts of one GPU that at least one token reaches, for uniform routing."""
    experts = as_floats(num_experts)
    return experts / as_floats(moe_ep) * (1.0 - (1.0 - as_floats(topk) / experts) ** as_floats(num_tokens))


UNREACHED: Final = 2.0**-60
"""Share of experts below which a float64 of their bytes does not change any more."""


def tokens_to_reach_all(topk: int, num_experts: int) -> int:
    """Tokens from which the expectation of :func:`moe_touched_experts` is all experts, to the last bit."""
    if topk >= num_experts:
        return 1
    return math.ceil(math.log(UNREACHED) / math.log1p(-topk / num_experts))


def moe_flops(
    num_tokens: Real,
    hidden: Real,
    intermediate: Real,
    topk: Real,
    moe_tp: Real = 1,
    moe_ep: Real = 1,
    gemms: int = GATED_GEMMS,
) -> Floats:
    """FLOPs of the expert GEMMs on one GPU: ``2 gemms tokens topk hidden intermediate / (tp ep)``."""
    per_token = 2.0 * gemms * as_floats(topk) * as_floats(hidden) * as_floats(intermediate)
    return as_floats(num_tokens) * per_token / (as_floats(moe_tp) * as_floats(moe_ep))


def moe_bytes(
    num_tokens: Real,
    hidden: Real,
    intermediate: Real,
    topk: Real,
    num_experts: Real,
    moe_tp: Real = 1,
    moe_ep: Real = 1,
    element_bytes: float = 2,
    gemms: int = GATED_GEMMS,
) -> Floats:
    """Bytes of the routed experts on one GPU: weights of the touched experts, tokens in and out."""
    expert = float(gemms) * as_floats(hidden) * as_floats(intermediate) / as_floats(moe_tp) * element_bytes
    tokens = 2.0 * ACTIVATION_BYTES * as_floats(num_tokens) * as_floats(hidden)
    return moe_touched_experts(num_tokens, topk, num_experts, moe_ep) * expert + tokens


OTHER_ACTIVATION: Final = "_situ_as_silu"
"""Ending of kernels that were measured with SiLU in place of the model's own activation."""

EXPERT_KEYS: Final = (
    DTYPE,
    Column("hidden", "int", "", "model width"),
    Column("intermediate", "int", "", "width of one expert, before moe_tp"),
    Column("topk", "int", "", "experts a token is routed to"),
    Column("num_experts", "int", "", "experts of the layer, before moe_ep"),
    Column("moe_tp", "int", "", "tensor-parallel size inside an expert"),
    Column("moe_ep", "int", "", "expert-parallel size"),
    Column("distribution", "text", "", "how tokens spread over experts"),
)


DENSE_ROWS: Final = 2**16
"""Tokens up to which a curve has a node at every number: far more than reach all experts of any model."""

NODES_AN_OCTAVE: Final = 256
"""Beyond: lines between nodes so near are within 1e-6 of the expectation of reached experts."""


def nodes_of_experts(packed: PackedSizes, all_reached: int) -> RowNodes:
    """A curve's latency against tokens: at every number until they reach all experts."""
    from fastroof.compiled.guides import curve_latency_us

    launch_us = float(packed.curve.value[1:-1].min())
    dense = min(all_reached, DENSE_ROWS)
    octaves = np.log2(min(all_reached, SIZE_LIMIT / 2.0) / dense)
    close = np.rint(dense * 2.0 ** (np.arange(1.0, octaves * NODES_AN_OCTAVE + 1.0) / NODES_AN_OCTAVE))
    beyond = np.union1d(close, packed.sizes[packed.sizes > dense])
    rows = np.r_[np.arange(1.0, dense + 1.0), beyond]
    value, flag = np.empty(len(rows)), np.empty(len(rows), np.uint8)
    curve_latency_us(packed.curve, packed.coordinate(rows), value, flag)
    ends = packed.coordinate(np.array([rows[-1], SIZE_LIMIT]))
    # beyond the last node latency / B is held, which is the last of these rows'
    last_us = value[-1] * ends[1] / ends[0]
    beyond_flag = max(flag[-1], ORIGIN_EXTRAPOLATED)
    return RowNodes(
        np.r_[0.0, rows, SIZE_LIMIT],
        np.r_[value[0], value, last_us],
        np.r_[flag[0], flag, np.uint8(beyond_flag)],
        launch_us,
    )


def _shape(c: Columns) -> tuple[Array, Array, Array, Array, Array, Array]:
    return (c["hidden"], c["intermediate"], c["topk"], c["num_experts"], c["moe_tp"], c["moe_ep"])


class MoeOperator(SizedOperator, PerRowOperator):
    """Routed experts; B grows with the experts that tokens are expected to reach."""

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
    holdouts = (HoldoutGrid("moe", "every second", {}, {}), *borrowing_grids("moe"))
    coverages = (HoldoutGrid("moe", "bf16", {}, {"dtype": "bf16"}), *borrowing_grids("moe"))
    # Over vLLM 0.24.0's bf16 and fp8_block rows of the H100, power_law_1.2, moe_tp up to 8 and ep up to 16:
    # weights come at 0.7 of the bandwidth, and GEMMs of few rows an expert, one rank loaded more than the
    # others, compute at 0.2 of the peak.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "moe": DatasheetClass(30.0, 0.7),
        "moe_compute": DatasheetClass(30.0, 0.2),
    }
    # 0.38 there; 0.39 to 0.48 over three engines' rows of H100 and B200, 4-bit weights in bf16 up to 0.9
    datasheet_error = 0.48
    package_files = (PackageFile("moe", "moe_perf", PACKAGE_COLUMNS, gated_rows, RUN),)
    tree_files: ClassVar[tuple[TreeFile, ...]] = GROUPED_GEMM_FILES

    def flops(self, columns: Columns) -> Floats:
        """All GEMMs of every token's experts."""
        c = columns
        experts = (c["hidden"], c["intermediate"], c["topk"], c["moe_tp"], c["moe_ep"])
        return moe_flops(c["num_tokens"], *experts, self.gemms)

    def moved_bytes(self, columns: Columns) -> Floats:
        """With the experts that even routing is expected to reach; for uneven routing the fewest."""
        width = element_bytes(columns["dtype"])
        expected = moe_bytes(columns["num_tokens"], *_shape(columns), width, self.gemms)
        even = np.isin(columns["distribution"].astype(str), EVENLY_ROUTED)
        return np.where(even, expected, self._one_tokens_experts(columns))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """Bytes of a call whose tokens all take the experts of the first one."""
        return self._one_tokens_experts(columns)

    def _one_tokens_experts(self, columns: Columns) -> Floats:
        shape = _shape(columns)
        one_token = moe_bytes(1, *shape, element_bytes(columns["dtype"]), self.gemms)
        return one_token + moe_bytes(columns["num_tokens"], *shape, 0) - moe_bytes(1, *shape, 0)

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of the row's dtype."""
        peak = dtype_peaks(columns["dtype"], gpu)
        return peak, peak

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

    def flops_per_unit(self, key: Key) -> float:
        """FLOPs of one token."""
        _, hidden, intermediate, topk, _, moe_tp, moe_ep, _ = key
        return float(moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms))

    # -- shapes that were not measured -------------------------------------------------------------

    def check_key(self, key: Key) -> None:
        """Refuse a token of more experts than there are."""
        _, _, _, topk, num_experts, _, _, _ = key
        check_routed(topk, num_experts)

    def lenders(self, tables: Tables, key: Key) -> tuple[Lender, ...]:
        """Measured shapes that stand in for one, the nearest first; none where it was measured itself."""
        return tables.kept(("expert lenders", self.name, key), lambda: self._lenders(tables, key))

    def _lenders(self, tables: Tables, key: Key) -> tuple[Lender, ...]:
        candidates = tables.candidates(self.name)
        own = [table for table in candidates if not tables.order.is_foreign(table)]
        # tables are read when they are asked, and those of other engines may not have to be
        if any(key in tables.keys_of(table) and tables.is_sound(table, key) for table in own):
            return ()
        wanted = ExpertShape(*key)
        if not is_routing(wanted.distribution):
            # nobody measured it: no other routing is near it
            tables.serving(self.name, key)
            return ()
        if len(own) < len(candidates):
            found = self._nearest(tables, wanted, own, sound=True)
            if found and found[0].is_near(wanted):
                return found
        if tables.serves(self.name, key):
            return ()
        for sound in (True, False):
            if found := self._nearest(tables, wanted, candidates, sound=sound):
                return found
        dtypes = ", ".join(sorted({one[0] for one in tables.every_key(self.name)}))
        raise MissingTableError(
            f"no {self.name} row of {tables.gpu.name} has dtype={wanted.dtype}, and experts of another dtype "
            f"run other kernels; measured: {dtypes}"
        )

    def _nearest(
        self, tables: Tables, wanted: ExpertShape, pool: Sequence[MeasuredTable], *, sound: bool
    ) -> tuple[Lender, ...]:
        """Lenders out of some tables: of the first that has the layer, else any near it, else the nearest."""
        routings = [self._shapes(tables, table, wanted.dtype, sound) for table in pool]
        distribution = nearest_routing(wanted.distribution, set().union(*routings))
        alike = [shapes[distribution] for shapes in routings if distribution in shapes]
        alike.sort(key=lambda shapes: all(shape.layer != wanted.layer for shape in shapes))
        lenders: list[tuple[Lender, ...]] = []
        for shapes in alike:
            lenders.append(nearest(wanted, shapes))
            if lenders[-1][0].is_near(wanted):
                return lenders[-1]
        return min(lenders, key=lambda found: found[0].octaves, default=())

    def _shapes(
        self, tables: Tables, table: MeasuredTable, dtype: str, sound: bool
    ) -> dict[str, list[ExpertShape]]:
        """Measured shapes of a table and dtype, by distribution."""

        def shapes() -> dict[str, list[ExpertShape]]:
            by_routing: dict[str, list[ExpertShape]] = {}
            keys = [key for key in tables.keys_of(table) if key[0] == dtype]
            for key in tables.sound_keys(table, keys) if sound else keys:
                by_routing.setdefault(key[-1], []).append(ExpertShape(*key))
            return by_routing

        return tables.kept(("expert shapes", self.name, table.source, dtype, sound), shapes)

    def packed(self, tables: Tables, key: Key) -> PackedSizes:
        """One kernel's curve, borrowed where it was not measured."""
        lenders = self.lenders(tables, key)
        if not lenders:
            return super().packed(tables, key)

        def borrowed() -> PackedSizes:
            return self._borrowed(tables, ExpertShape(*key), lenders).packed()

        return tables.kept(("borrowed experts", self.name, key), borrowed)

    def _borrowed(self, tables: Tables, wanted: ExpertShape, lenders: Sequence[Lender]) -> BorrowedPoints:
        return borrowed_points(
            wanted,
            lenders,
            lambda shape: super(MoeOperator, self).packed(tables, shape),
            lambda shape, launch_us: self.roofline(shape, tables.gpu, launch_us),
        )

    def look_up(self, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look one shape up; what is borrowed says so, whatever the method."""
        super().look_up(tables, method, key, sizes, answers)
        if self.lenders(tables, key):
            np.maximum(answers[2], ORIGIN_BORROWED, out=answers[2])

    def source_key(self, tables: Tables, key: Key) -> Key:
        """Its nearest lender where it was not measured itself."""
        lenders = self.lenders(tables, key)
        return tuple(lenders[0].shape) if lenders else key

    def relative_error(self, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency."""
        return np.sqrt(self._variance(tables, key, sizes[0]))

    def _variance(self, tables: Tables, key: Key, tokens: Floats) -> Floats:
        """Of a shape's curve; of a borrowed one that of its nearest lender, and of borrowing."""
        lenders = self.lenders(tables, key)
        if not lenders:
            return relative_variance(self.local_errors(tables, key), [tokens])
        wanted, near = ExpertShape(*key), lenders[0].shape
        theirs = tokens * (wanted.topk * near.num_experts / (wanted.num_experts * near.topk))
        own = relative_variance(self.local_errors(tables, near), [theirs])
        return own + self.borrowing_errors(tables, near).of(wanted, lenders) ** 2

    def borrowing_errors(self, tables: Tables, lender: ExpertShape) -> BorrowingErrors:
        """How far off borrowing is in the table that has a lender, among its dtype and distribution."""
        table = tables.serving(self.name, lender)
        shapes = self._shapes(tables, table, lender.dtype, sound=False)[lender.distribution]
        alike = [shape for shape in shapes if tables.serving(self.name, shape) is table]

        def log_errors(shape: ExpertShape, lenders: Sequence[Lender]) -> Floats:
            measured = super(MoeOperator, self).packed(tables, shape)
            borrowed = self._borrowed(tables, shape, lenders)
            return borrowed.log_errors(measured.sizes, measured.curve.value[1:-1])

        return tables.kept(
            ("expert borrowing", self.name, table.source, lender.dtype, lender.distribution),
            lambda: borrowing_errors(alike, log_errors),
        )

    # -- in plans ----------------------------------------------------------------------------------

    @staticmethod
    def row_key(call: Experts) -> Key:
        """The kernel's keys."""
        shape = (call.hidden, call.intermediate, call.topk, call.num_experts, call.moe_tp, call.moe_ep)
        return (call.dtype, *shape, call.distribution)

    def row_cost(self, call: Experts) -> RowCost:
        """FLOPs and bytes of a token, and the weights of all experts: those of many tokens."""
        _, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = self.row_key(call)
        per_row = float(moe_flops(1, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms))
        experts = num_experts / moe_ep * self.gemms * hidden * intermediate / moe_tp
        tokens = 2.0 * ACTIVATION_BYTES * hidden
        return RowCost(per_row, tokens, experts * DTYPE_BYTES[call.dtype], call.dtype)

    def row_work(self, call: Experts, rows: Floats) -> tuple[Floats, Floats]:
        """FLOPs, and the bytes of the experts that so many tokens are expected to reach."""
        _, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = self.row_key(call)
        width = DTYPE_BYTES[call.dtype]
        return (
            moe_flops(rows, hidden, intermediate, topk, moe_tp, moe_ep, self.gemms),
            moe_bytes(rows, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, width, self.gemms),
        )

    def serving(self, call: Experts, tables: Tables) -> MeasuredTable:
        """The table that has the layer's shape, or its nearest lender."""
        return tables.serving(self.name, self.source_key(tables, self.row_key(call)))

    def row_nodes(self, call: Experts, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """The curve of the layer's shape: at every number of tokens until they reach all experts."""
        key = self.row_key(call)
        packed = self.packed(tables, key)
        launch_us = float(packed.curve.value[1:-1].min())
        if options.method != "roofline":
            sizes = dict(zip((c.name for c in self.keys), key, strict=True))
            tokens = np.arange(1, max_rows + 1)
            return self.looked_up_nodes(
                tables, options.method, max_rows, sizes | {"num_tokens": tokens}, launch_us
            )
        return nodes_of_experts(packed, tokens_to_reach_all(call.topk, call.num_experts))

    def table_points(self, call: Experts, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """So many tokens of the layer's shape."""
        return self.row_key(call), [rows]

    def row_variance(self, call: Experts, tables: Tables, rows: Floats) -> Floats:
        """Of the shape's curve."""
        return self._variance(tables, self.row_key(call), rows)

    def row_datasheet(self, call: Experts) -> DatasheetClass:
        """Of calls that the weights' bytes take: few tokens."""
        return MOE.datasheets["moe"]

    def datasheet_nodes(self, call: Experts, gpu: GpuSpec) -> RowNodes:
        """Latency against rows, from a datasheet: with the experts that tokens are expected to reach."""
        memory, compute = MOE.datasheets["moe"], MOE.datasheets["moe_compute"]
        rows = np.unique(np.round(2.0 ** np.arange(0.0, np.log2(SIZE_LIMIT) + 0.125, 0.125)))
        flops, moved = self.row_work(call, rows)
        compute_s = flops / gpu.peak(call.dtype) / compute.efficiency
        memory_s = moved / gpu.hbm_bytes_per_s / memory.efficiency
        value = memory.launch_us + np.r_[0.0, np.maximum(compute_s, memory_s)] * US_PER_S
        flag = np.full(len(value), ORIGIN_MODELLED, np.uint8)
        return RowNodes(np.r_[0.0, rows], value, flag, memory.launch_us)

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Name the kernels that were measured with another activation than the model's."""
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

OPERATORS: Final = (
    MOE,
    MOE_NONGATED,
)
