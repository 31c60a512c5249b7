"""GEMMs: m rows (tokens), n outputs, k inputs; one table per dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, LATENCY, ORIGIN, QUANTISES, Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators import external_rows as external
from fastroof.operators.calls import Gemm
from fastroof.operators.elementwise import ELEMENTWISE
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    Real,
    RowSource,
    SourceTable,
    as_floats,
    element_bytes,
    input_bytes,
    is_measured,
    unit_us,
)
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.pack import PackedGemm, pack_gemm
from fastroof.pack.bands import ALIGNED, bands_of, residue_start
from fastroof.pack.curves import sorted_points
from fastroof.uncertainty.leave_one_out import (
    LocalErrors,
    band_errors,
    calibrated_errors,
    is_replaced,
    measured_grid,
    relative_variance,
    residue_errors,
    with_unmeasured_bands,
)
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, INPUT_BYTES, PEAK_DTYPE, US_PER_S

T = TypeVar("T")

LARGEST_SMOOTHED_M: Final = 256

RESIDUES: Final = ("aligned", "padded")
"""Packed variants: the curve of m that are multiples of 4, and the curve of all other m."""


def gemm_flops(m: Real, n: Real, k: Real) -> Floats:
    """FLOPs of an m x n x k GEMM: ``2 m n k``."""
    return 2.0 * as_floats(m) * as_floats(n) * as_floats(k)


FLOPS_OF_ONE: Final = float(gemm_flops(1, 1, 1))
"""FLOPs of m = n = k = 1; a constant, because computing it takes 10 us per chunk of a lookup."""


def gemm_bytes(m: Real, n: Real, k: Real, element_bytes: float, input_bytes: float | None = None) -> Floats:
    """Bytes of a GEMM: weights at ``element_bytes``, inputs at ``input_bytes`` or alike, output in bf16."""
    outputs = as_floats(m) * as_floats(n)
    inputs = as_floats(m) * as_floats(k) + as_floats(n) * as_floats(k)
    moved = element_bytes * inputs + ACTIVATION_BYTES * outputs
    if input_bytes is None:
        return moved
    return moved + (input_bytes - element_bytes) * as_floats(m) * as_floats(k)


def median_of_three(
    m: Floats,
    n: Floats,
    k: Floats,
    latency_us: Floats,
    peak_flops_per_us: float,
    bytes_per_us: float,
    element_bytes: float,
) -> Floats:
    """Smooth memory-bound GEMMs of one (n, k) along m, up to m = 256: a running median of latency / bytes.

    The H100's bf16 GEMMs were measured in one of two states some 17 % apart, at random; see README.md.
    """
    moved = gemm_bytes(m, n, k, element_bytes)
    is_small = (m <= LARGEST_SMOOTHED_M) & (moved / bytes_per_us > gemm_flops(m, n, k) / peak_flops_per_us)
    smoothed = latency_us.copy()
    order = np.lexsort((m, n, k))
    order = order[is_small[order]]
    is_new = np.r_[False, (np.diff(n[order]) != 0) | (np.diff(k[order]) != 0)] if len(order) else order > 0
    for rows in np.split(order, np.flatnonzero(is_new)):
        if len(rows) < 2:
            continue
        ratio = latency_us[rows] / moved[rows]
        middle = np.median(np.stack([ratio[:-2], ratio[1:-1], ratio[2:]]), axis=0)
        ratio = np.r_[ratio[:2].mean(), middle, ratio[-2:].mean()]
        smoothed[rows] = ratio * moved[rows]
    return smoothed


def _of_all_rows(find: Callable[[Floats, Floats, Floats, Floats], T], *columns: Array) -> T:
    """Call a function of points sorted by k, n and m with unsorted columns m, n, k and latency."""
    m, n, k, latency_us = columns
    (k, n, m), latency_us = sorted_points((k, n, m), latency_us)
    return find(m, n, k, latency_us)


def _package_rows(raw: external.Raw) -> external.ExternalRows:
    return external.package_rows(raw, "m", "n", "k", dtype="gemm_dtype")


def _tree_columns(read: external.Raw, _: external.Heads) -> dict[str, Array]:
    return {name: read[name] for name in ("dtype", "m", "n", "k") if name in read}


class GemmOperator(PerRowOperator):
    """Lookups interpolate along n, then k, then m, see :mod:`fastroof.pack.curves`."""

    name = "gemm"
    rank = 10
    summary = "GEMM of m tokens, n outputs, k inputs."
    keys = (DTYPE,)
    axes = (
        Column("m", "int", "tokens", "rows of the activations"),
        Column("n", "int", "", "outputs"),
        Column("k", "int", "", "inputs"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "bf16"}
    # Projections are (n, k) pairs, not a product of n and k.
    paired_axes = ("n", "k")
    completed_within = ("dtype",)
    holdouts = (
        HoldoutGrid(
            "gemm",
            "coarse",
            {"m": tuple(2**i for i in range(3, 13)), "n": (6144, 10240), "k": (2048, 3584, 4096, 8192)},
            {"dtype": "bf16"},
        ),
        HoldoutGrid("gemm", "every second", {}, {"dtype": "bf16"}),
        HoldoutGrid("gemm", "every second (fp8)", {}, {"dtype": "fp8"}),
    )
    coverages = (
        HoldoutGrid("gemm", "bf16", {}, {"dtype": "bf16"}),
        HoldoutGrid("gemm", "fp8", {}, {"dtype": "fp8"}),
    )
    # Over vLLM 0.24.0's H100 GEMMs of m >= 1024 and n, k >= 2048; fp8 includes quantising the input.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "gemm": DatasheetClass(2.5, 0.79),
        "gemm_fp8": DatasheetClass(4.6, 0.45),
    }
    package_files = (
        external.PackageFile(
            "gemm",
            "gemm_perf",
            (*external.text_columns("gemm_dtype"), *external.size_columns("m", "n", "k"), *external.MEASURED),
            _package_rows,
        ),
    )
    tree_files = (
        external.TreeFile(
            "gemm",
            "",
            (*axes, LATENCY),
            (DTYPE, external.MFU),
            ("m", "k", "n", "latency_us", "mfu"),
            _tree_columns,
            computes_in_any_dtype=True,
            named_by_heads=False,
        ),
    )

    def flops(self, columns: Columns) -> Floats:
        """``2 m n k``."""
        return gemm_flops(columns["m"], columns["n"], columns["k"])

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights and inputs in the row's dtype, output in bf16."""
        sizes = (columns["m"], columns["n"], columns["k"])
        return gemm_bytes(*sizes, element_bytes(columns["dtype"]), input_bytes(columns["dtype"]))

    def package_notes(self, columns: Mapping[str, Columns], gpu: GpuSpec) -> dict[str, Any]:
        """Note that an fp8 row includes quantising its bf16 input, with the evidence."""
        own = columns[self.name]
        if "fp8" not in own["dtype"]:
            return {}
        evidence = (
            "the package's engine takes this row for fp8 with dynamic scales, subtracts computescale for "
            "static scales, and scale_matrix as well where the input already is fp8"
        )
        quantise = columns.get(ELEMENTWISE.name)
        if quantise is not None and "copy_bytes_per_s" in ELEMENTWISE.package_notes(columns, gpu):
            rows = zip(*(quantise[name] for name in ("kind", "m", "width", "latency_us")), strict=True)
            alone = {(m, k): t for kind, m, k, t in rows if kind == "fp8_quantise"}
            fp8 = own["dtype"] == "fp8"
            times = zip(own["m"][fp8], own["k"][fp8], own["latency_us"][fp8], strict=True)
            slower = [latency > alone[m, k] for m, k, latency in times if (m, k) in alone]
            evidence += (
                f"; {sum(slower)} of {len(slower)} rows take longer than quantising an m x k input alone"
            )
        return {"fp8_includes_input_quantisation": True, "evidence": evidence}

    def roofline(self, dtype: str, gpu: GpuSpec, launch_us: float) -> Callable[[Any, Any, Any], Any]:
        """B at (m, n, k), us; ``launch_us`` is the smallest latency of the table."""
        flops_per_us, bytes_per_us = gpu.peak(dtype) / US_PER_S, gpu.hbm_bytes_per_s / US_PER_S
        widths = DTYPE_BYTES[dtype], INPUT_BYTES[dtype]

        def bound_us(m: Any, n: Any, k: Any) -> Any:
            return (
                launch_us + gemm_flops(m, n, k) / flops_per_us + gemm_bytes(m, n, k, *widths) / bytes_per_us
            )

        return bound_us

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> PackedGemm:
        """Pack all GEMMs of one dtype: ``median3`` (smoothed), ``measured`` (no bands) or one of RESIDUES."""
        (dtype,) = key
        m, n, k = (rows[c].astype(np.float64) for c in ("m", "n", "k"))
        latency_us = rows["latency_us"]
        if variant == "median3":
            rates = (gpu.peak(dtype) / US_PER_S, gpu.hbm_bytes_per_s / US_PER_S, DTYPE_BYTES[dtype])
            latency_us = median_of_three(m, n, k, latency_us, *rates)
        origin = rows.get(ORIGIN)
        launch_us = float(latency_us.min())
        if variant in RESIDUES:
            above = _of_all_rows(residue_start, m, n, k, latency_us) or 0.0
            own = (m <= above) | ((m % ALIGNED == 0) == (variant == "aligned"))
            m, n, k, latency_us = m[own], n[own], k[own], latency_us[own]
            origin = None if origin is None else origin[own]
        bound_us = self.roofline(dtype, gpu, launch_us)
        has_bands = variant in ("", "median3")
        return pack_gemm(m, n, k, latency_us, bound_us, origin, has_bands=has_bands)

    def packed(self, tables: RowSource, dtype: str, smoothing: str = "none") -> PackedGemm:
        """Packed GEMMs of one dtype; ``median3`` smooths small bf16 GEMMs along m."""
        is_smoothed = smoothing != "none" and dtype == "bf16"
        return tables.packed(self, (dtype,), "median3" if is_smoothed else "")

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up GEMMs of one dtype at (m, n, k)."""
        from fastroof.compiled import gemms, points

        m, n, k = sizes
        out, mfu, origin = answers
        # methods that interpolate MFU use measured points only
        packed = self.packed(tables, *key) if method == "roofline" else tables.packed(self, key, "measured")
        if method == "roofline" and self._residue_start(tables, key) is not None:
            for variant, part in zip(RESIDUES, (m % ALIGNED == 0, m % ALIGNED != 0), strict=True):
                us, flag = np.empty(int(part.sum())), np.empty(int(part.sum()), np.uint8)
                own = tables.packed(self, key, variant)
                gemms.gemm_latency_us(own, m[part], n[part], k[part], us, flag)
                out[part], origin[part] = us, flag
        elif method == "roofline":
            gemms.gemm_latency_us(packed, m, n, k, out, origin)
        elif method == "linear_mfu":
            gemms.gemm_linear_mfu_us(packed, m, n, k, out, origin)
        elif method == "floor":
            gemms.gemm_floor_us(packed, m, n, k, out, origin)
        else:
            log2_sizes = (np.log2(m), np.log2(n), np.log2(k))
            gemms.gemm_nearest_us(packed, self._log2_axes(tables, key), (m, n, k), log2_sizes, out, origin)
        points.gemm_mfu(m, n, k, unit_us(tables.gpu, key[0], FLOPS_OF_ONE), out, mfu)

    def _residue_start(self, tables: RowSource, key: Key) -> float | None:
        """The m above which multiples of 4 have a separate curve."""

        def start() -> float | None:
            rows = tables.rows(self, key)
            return _of_all_rows(residue_start, *(rows[c] for c in ("m", "n", "k", "latency_us")))

        return tables.cached(("residue start", self.name, key), start)

    def _log2_axes(self, tables: RowSource, key: Key) -> tuple[Floats, Floats, Floats]:
        """Axes m, n and k of a table in log2, cached."""

        def log2_axes() -> tuple[Floats, Floats, Floats]:
            packed = tables.packed(self, key, "measured")
            with np.errstate(divide="ignore"):
                return np.log2(packed.m_axis), np.log2(packed.n_axis), np.log2(packed.k_axis)

        return tables.cached(("log2 axes", self.name, key), log2_axes)

    def local_errors(self, tables: RowSource, dtype: str) -> LocalErrors:
        """Local errors of the GEMMs of one dtype, over (m, n, k)."""

        def errors() -> LocalErrors:
            rows = tables.rows(self, (dtype,))
            latency_us = rows["latency_us"]
            sizes = tuple(rows[name].astype(np.float64) for name in self.axis_names)
            bound_us = self.roofline(dtype, tables.gpu, float(latency_us.min()))
            is_spike = is_replaced(rows[ORIGIN])
            grid = measured_grid(sizes, latency_us, bound_us, is_spike=is_spike)
            bands = _of_all_rows(bands_of, *sizes, latency_us)
            if bands is not None:
                plain = calibrated_errors(grid, first=band_errors(grid, bands))
                return with_unmeasured_bands(plain, grid, bands)
            above = self._residue_start(tables, (dtype,))
            return calibrated_errors(grid, first=None if above is None else residue_errors(grid, above))

        return tables.cached(("local errors", self.name, dtype), errors)

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency."""
        return np.sqrt(relative_variance(self.local_errors(tables, *key), sizes))

    # -- in plans ----------------------------------------------------------------------------------

    def quantises_inputs_apart(self, tables: RowSource, dtype: str) -> bool:
        """Whether latencies of fp8 or fp8_block exclude quantising the input."""
        if not is_measured(tables, self.name, (dtype,)):
            return dtype == "fp8"
        table = tables.serving(self.name, (dtype,))
        if QUANTISES.name in table.columns:
            return not table.columns[QUANTISES.name][table.groups()[(dtype,)]].all()
        # without the column: kernels-bench left it out, others include it in fp8_block and note it of fp8
        is_own = str(table.provenance.get("tool")).startswith("kernels_bench ")
        return (is_own or dtype == "fp8") and not table.about.get("fp8_includes_input_quantisation", False)

    def row_cost(self, call: Gemm) -> RowCost:
        """FLOPs and bytes of rows x n x k."""
        widths = DTYPE_BYTES[call.dtype], INPUT_BYTES[call.dtype]
        fixed = float(gemm_bytes(0, call.n, call.k, *widths))
        a_row = float(gemm_bytes(1, call.n, call.k, *widths)) - fixed
        return RowCost(float(gemm_flops(1, call.n, call.k)), a_row, fixed, call.dtype)

    def row_key(self, call: Gemm) -> Key:
        """dtype, n and k."""
        return (call.dtype, call.n, call.k)

    def serving(self, call: Gemm, tables: RowSource) -> SourceTable:
        """Table of all GEMMs of the dtype."""
        return tables.serving(self.name, (call.dtype,))

    def has_every_row(self, call: Gemm, tables: RowSource, options: CurveOptions) -> bool:
        """Also if multiples of 4 have a separate curve."""
        key = (call.dtype,)
        is_plain = not is_measured(tables, self.name, key) or self._residue_start(tables, key) is None
        return super().has_every_row(call, tables, options) or not is_plain

    def row_nodes(self, call: Gemm, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Latency at every m of the measured neighbours of (n, k)."""
        from fastroof.compiled.gemms import gemm_latency_us
        from fastroof.compiled.guides import bracket

        packed = self.packed(tables, call.dtype, options.gemm_smoothing)
        launch_us = float(packed.value[packed.flag == 0].min())
        if self.has_every_row(call, tables, options):
            key, sizes = self.table_points(call, tables, np.arange(1.0, max_rows + 1.0))
            return self.every_row_nodes(tables, options.method, key, sizes, launch_us)
        n, k = float(call.n), float(call.k)
        row = bracket(packed.k_axis, 0, len(packed.k_axis), k)
        parts = []
        for i in (row, row + 1):
            first = bracket(packed.n_axis, packed.row_start[i], packed.row_start[i + 1], n)
            parts.append(packed.m_axis[packed.curve_start[first] : packed.curve_start[first + 2]])
        m = np.unique(np.concatenate(parts))
        value = np.empty(len(m))
        flag = np.empty(len(m), np.uint8)
        gemm_latency_us(packed, m, np.full(len(m), n), np.full(len(m), k), value, flag)
        is_static = call.dtype == "fp8" and options.fp8_scales == "static"
        if is_static and not self.quantises_inputs_apart(tables, "fp8"):
            source = tables.serving(self.name, (call.dtype,)).source
            value = np.maximum(value - ELEMENTWISE.fp8_scale_us(tables, m, call.k, source), 0.0)
        return RowNodes(m, value, flag, launch_us)

    def table_points(self, call: Gemm, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]]:
        """(rows, n, k) of the dtype."""
        return (call.dtype,), [rows, *(np.full(len(rows), float(size)) for size in (call.n, call.k))]

    def row_variance(self, call: Gemm, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the table at (rows, n, k)."""
        _, sizes = self.table_points(call, tables, rows)
        return relative_variance(self.local_errors(tables, call.dtype), sizes)

    def row_datasheet(self, call: Gemm) -> DatasheetClass:
        """Class of the dtype that the kernel computes in."""
        return self.datasheets["gemm_fp8" if PEAK_DTYPE[call.dtype] == "fp8" else "gemm"]


GEMM: Final = GemmOperator()
OPERATORS: Final = (GEMM,)
