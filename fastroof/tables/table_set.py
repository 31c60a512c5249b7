"""Tables: measured rows with their packed form, made when first asked for; what ``load_tables`` returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from fastroof import flops
from fastroof.columns import OPERATORS
from fastroof.config import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.load import MeasuredTable, MeasuredTables, SourceChoice, load_measured
from fastroof.pack import PackedCurve, PackedGemm, PackedGrid, pack_curve, pack_gemm, pack_grid
from fastroof.pack.smoothing import median_of_three
from fastroof.roofline import HeadShape, Roofline, decode_roofline, prefill_roofline, prefix_roofline_us
from fastroof.tables.answers import NO_STREAMS, Lookup, LookupWithError, Streaming
from fastroof.tables.borrow import AttentionGrid, attention_grid
from fastroof.units import DTYPE_BYTES, US_PER_S

__all__ = ["Tables", "load_tables"]

Key = tuple[Any, ...]
L2_MULTIPLE = 8
"""A kernel that moves this many times the L2 streams from memory."""


class PackedMoe(NamedTuple):
    """One MoE kernel: its curve against B in us, its measured token counts, and B of a token count."""

    curve: PackedCurve
    tokens: npt.NDArray[np.float64]
    roofline_us: Callable[[Any], npt.NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one GPU: look kernels up, or compile them into plans.

    Made by :func:`load_tables`. Packed forms are built when first used and kept; pickling drops them.

    Attributes
    ----------
    measured : MeasuredTables
        The rows.
    gpu : GpuSpec
        The GPU they were measured on.
    """

    measured: MeasuredTables
    gpu: GpuSpec
    _packed: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"measured": self.measured, "gpu": self.gpu, "_packed": {}}

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {t.num_rows:,}" for name, t in self.measured.tables.items())
        return f"Tables({self.gpu.name}: {rows} rows)"

    @property
    def sources(self) -> dict[str, str]:
        """Which source serves which operator."""
        return self.measured.sources

    @property
    def content_hash(self) -> str:
        """SHA-256 of the measured rows: results carry it."""
        return self.measured.content_hash

    @overload
    def lookup(
        self, operator: str, *, method: str = ..., with_error: Literal[False] = ..., **sizes: Any
    ) -> Lookup: ...
    @overload
    def lookup(
        self, operator: str, *, method: str = ..., with_error: Literal[True], **sizes: Any
    ) -> LookupWithError: ...
    def lookup(
        self, operator: str, *, method: str = "roofline", with_error: bool = False, **sizes: Any
    ) -> Lookup | LookupWithError:
        """Look up kernels by their sizes; arrays broadcast.

        Parameters
        ----------
        operator : str
            ``gemm`` (m, n, k, dtype), ``attention_prefill`` (num_q_heads, num_kv_heads, head_dim,
            q_len, kv_len, batch_size=1, kv_dtype), ``attention_decode`` (num_q_heads, num_kv_heads,
            head_dim, batch_size, kv_len, kv_dtype), ``allreduce`` (num_gpus, message_bytes, dtype,
            mode="graph"), ``moe`` (num_tokens, hidden, intermediate, topk, num_experts, moe_tp=1,
            moe_ep=1, distribution="balanced", dtype). dtype and kv_dtype default to bf16. Sizes are
            integers or integer arrays of at least 1.
        method : str
            ``roofline`` interpolates latency in roofline coordinates; ``linear_mfu`` interpolates
            MFU; ``nearest`` (in log2 of the axes) and ``floor`` take the MFU of one measured point.
            A measured point comes back exactly, whatever the method; a prefix is priced the same way
            in all of them.
        with_error : bool
            Also say how good each answer is, see :mod:`fastroof.tables.local_error`; roofline only.

        Returns
        -------
        Lookup or LookupWithError
            latency_us, mfu and origin, of the broadcast shape; relative_error where it was asked for.

        Raises
        ------
        LookupInputError
            For a size that no kernel can have, or an unknown operator or method.
        MissingTableError
            If no measured table serves the dtype or shape.

        Notes
        -----
        Interpolation is linear in latency with weight (B(x) - B(x0)) / (B(x1) - B(x0)), where
        B = t_launch + flops / peak + bytes / bandwidth: linear in m, n, k, batch and kv_len,
        quadratic in q_len. Outside the measured range see :mod:`fastroof.pack`.

        Examples
        --------
        >>> import fastroof
        >>> tables = fastroof.load_tables("h100")
        >>> float(tables.lookup("gemm", m=64, n=6144, k=4096).latency_us.round(2))
        23.07
        """
        from fastroof.tables.lookup import run_lookup

        return run_lookup(self, operator, method, with_error, sizes)

    def holdout(self, **options: Any) -> Any:
        """Thin every table, look the left-out points up, and report the errors.

        See :func:`fastroof.tables.holdout.run_holdout` for the options and the returned rows.
        """
        from fastroof.tables.holdout import run_holdout

        return run_holdout(self, **options)

    def table(self, operator: str) -> MeasuredTable:
        """Measured rows of one operator.

        Raises
        ------
        MissingTableError
            If this set has none.
        """
        if operator not in self.measured.tables:
            have = ", ".join(sorted(self.measured.tables))
            raise MissingTableError(f"{self.gpu.name} has no {operator} table; it has {have}")
        return self.measured.tables[operator]

    def gemm(self, dtype: str, smoothing: str = "none") -> PackedGemm:
        """Packed GEMMs of one dtype; small bf16 ones smoothed along m with ``median3``."""

        def pack(rows: Mapping[str, Any]) -> PackedGemm:
            m, n, k = (rows[c].astype(np.float64) for c in ("m", "n", "k"))
            flops_per_us = self.gpu.peak(dtype) / US_PER_S
            bytes_per_us = self.gpu.hbm_bytes_per_s / US_PER_S
            rates = (flops_per_us, bytes_per_us, DTYPE_BYTES[dtype])
            latency_us = rows["latency_us"]
            if smoothed:
                latency_us = median_of_three(m, n, k, latency_us, *rates)
            return pack_gemm(m, n, k, latency_us, *rates)

        smoothed = smoothing != "none" and dtype == "bf16"
        return self._pack_once("gemm", (dtype,), pack, "median3" if smoothed else "")  # type: ignore[no-any-return]

    def attention(self, operator: str, shape: HeadShape) -> AttentionGrid:
        """Packed attention grid of a head shape, borrowed where it was not measured."""
        cache = self._packed
        if (operator, shape) not in cache:
            is_decode = operator == "attention_decode"
            roofline = decode_roofline if is_decode else prefill_roofline

            def roofline_of(wanted: HeadShape, t_launch_us: float) -> Roofline:
                return roofline(wanted, self.gpu, t_launch_us)

            def grid_of(lender: HeadShape) -> PackedGrid:
                def pack(rows: Mapping[str, Any]) -> PackedGrid:
                    x = rows["kv_len"]
                    keep = np.full(len(x), True) if is_decode else rows["q_len"] == x
                    batch, x = (a[keep].astype(np.float64) for a in (rows["batch_size"], x))
                    latency_us = rows["latency_us"][keep]
                    bound = roofline(lender, self.gpu, float(latency_us.min()))
                    return pack_grid(batch, x, latency_us, bound, is_decode=is_decode)

                return self._pack_once(operator, (*lender, 0), pack)  # type: ignore[no-any-return]

            shapes = [HeadShape(*key[:4]) for key in self.groups(operator) if key[4] == 0]
            cache[operator, shape] = attention_grid(shape, shapes, grid_of, roofline_of)
        return cache[operator, shape]  # type: ignore[no-any-return]

    def prefix_us(self, shape: HeadShape) -> tuple[float, float]:
        """Price of a prefix in prefill attention: us a (query, prefix token) pair, us a prefix token.

        The roofline of the prefix alone, times latency / B of the longest measured sequence: never
        under the roofline, nothing at an empty prefix, and growing with it.
        """
        ratio = self.attention("attention_prefill", shape).longest_ratio
        pair_us, token_us = prefix_roofline_us(shape, self.gpu)
        return ratio * pair_us, ratio * token_us

    def allreduce(self, dtype: str, num_gpus: int, mode: str = "graph") -> PackedCurve:
        """Packed all-reduce latency against message bytes."""

        def pack(rows: Mapping[str, Any]) -> PackedCurve:
            launch_us = float(rows["latency_us"].min())
            link = self.gpu.nvlink_bytes_per_s / US_PER_S

            def bound(message_bytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
                return launch_us + flops.allreduce_wire_bytes(message_bytes, num_gpus) / link

            return pack_curve(rows["message_bytes"].astype(np.float64), rows["latency_us"], bound)

        return self._pack_once("allreduce", (dtype, num_gpus, mode), pack)  # type: ignore[no-any-return]

    def moe(self, key: Key) -> PackedMoe:
        """Packed MoE latency of one kernel, against B of its tokens."""
        dtype, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, _ = key

        def pack(rows: Mapping[str, Any]) -> PackedMoe:
            width = DTYPE_BYTES[dtype]
            launch_us = float(rows["latency_us"].min())

            def bound(tokens: Any) -> npt.NDArray[np.float64]:
                work = flops.moe_flops(tokens, hidden, intermediate, topk, moe_tp, moe_ep)
                moved = flops.moe_bytes(
                    tokens, hidden, intermediate, topk, num_experts, moe_tp, moe_ep, width
                )
                seconds = work / self.gpu.peak(dtype) + moved / self.gpu.hbm_bytes_per_s
                return launch_us + seconds * US_PER_S

            tokens = rows["num_tokens"].astype(np.float64)
            return PackedMoe(
                pack_curve(bound(tokens), rows["latency_us"], lambda b: b), np.unique(tokens), bound
            )

        return self._pack_once("moe", key, pack)  # type: ignore[no-any-return]

    @property
    def streaming(self) -> Streaming | None:
        """Launch floor and copy bandwidth from the measured streaming kernels; None without them.

        Plain copies give the bandwidth where there are any, and an empty launch counts for neither.
        """
        if "elementwise" not in self.measured.tables:
            return None
        columns = self.measured.tables["elementwise"].columns
        kind, io_bytes, latency_us = columns["kind"], columns["io_bytes"], columns["latency_us"]
        streams = ~np.isin(kind, NO_STREAMS)
        large = streams & (io_bytes > L2_MULTIPLE * max(self.gpu.l2_bytes, 1))
        copies = large & (kind == "copy")
        large = copies if copies.any() else large
        if not large.any():
            return None
        rate = np.median(io_bytes[large] / latency_us[large]) * US_PER_S
        return Streaming(float(latency_us[streams].min()), float(rate))

    def fp8_scale_us(self, m: Any, k: int) -> npt.NDArray[np.float64]:
        """What finding its input's scale takes a dynamically quantised fp8 GEMM of m x k inputs, us.

        Bilinear between the measured m and k, and held outside.

        Raises
        ------
        MissingTableError
            If nothing of the kind was measured.
        """
        columns = self.table("elementwise").columns
        rows = columns["kind"] == "fp8_scale"
        if not rows.any():
            raise MissingTableError(
                f"{self.gpu.name} has no fp8_scale rows, which fp8 GEMMs with static scales need: "
                "compile with a runtime profile whose fp8_scales are dynamic"
            )
        m_axis, at_m = np.unique(columns["m"][rows], return_inverse=True)
        k_axis, at_k = np.unique(columns["width"][rows], return_inverse=True)
        table = np.full((len(m_axis), len(k_axis)), np.nan)
        table[at_m, at_k] = columns["latency_us"][rows]
        known = ~np.isnan(table)
        along_k = [np.interp(k, k_axis[has], row[has]) for row, has in zip(table, known, strict=True)]
        return np.asarray(np.interp(m, m_axis, along_k))

    def kept(self, name: Hashable) -> dict[Any, Any]:
        """What a later stage made from these tables and keeps with them, under a name of its own."""
        return self._packed.setdefault(("kept", name), {})  # type: ignore[no-any-return]

    def groups(self, operator: str) -> dict[Key, npt.NDArray[np.int64]]:
        """Row indices by key of one operator's table."""
        cache = self._packed
        if ("groups", operator) not in cache:
            cache["groups", operator] = self.table(operator).groups()
        return cache["groups", operator]  # type: ignore[no-any-return]

    def _pack_once(
        self, operator: str, key: Key, pack: Callable[[Mapping[str, Any]], Any], how: str = ""
    ) -> Any:
        cache = self._packed
        where = ("packed", operator, key, how)
        if where not in cache:
            rows = self.groups(operator).get(key)
            if rows is None:
                raise MissingTableError(self._missing(operator, key))
            columns = self.table(operator).columns
            cache[where] = pack({name: values[rows] for name, values in columns.items()})
        return cache[where]

    def _missing(self, operator: str, key: Key) -> str:
        """Say which key was asked for, and the measured keys that share most with it."""
        names = [c.name for c in OPERATORS[operator].keys]

        def shared(other: Key) -> int:
            return sum(a == b for a, b in zip(key, other, strict=True))

        def words(k: Key) -> str:
            return " ".join(f"{name}={value}" for name, value in zip(names, k, strict=True))

        keys = sorted(self.groups(operator), key=lambda k: (-shared(k), str(k)))
        near = "; ".join(words(k) for k in keys[:3])
        return (
            f"no {operator} row of {self.gpu.name} has {words(key)}; "
            f"{len(keys)} kernels were measured, the closest: {near}"
        )


def load_tables(name: str | Path, *, gpu: str | None = None, source: SourceChoice = None) -> Tables:
    """Load the measured tables of a GPU.

    Parameters
    ----------
    name : str or Path
        A GPU of bench_data (``"h100"``), or the path of a folder: one GPU's folder, one source's
        folder, or a tree as InferSim or roofline V2 lay it out.
    gpu : str, optional
        Which GPU, where a tree holds several.
    source : str or mapping of str to str, optional
        Take only this source; or of the operators named their sources. All others are served by
        their best-ranked one.

    Returns
    -------
    Tables
        With ``sources`` saying which source serves which operator.

    Raises
    ------
    TableError
        If a file is missing, malformed, or must not be used; the message names file, row and column.
    GpuError
        If the name is neither a known GPU nor a folder.

    Examples
    --------
    >>> import fastroof
    >>> fastroof.load_tables("h100").sources["gemm"]
    'aiconfigurator-vllm-0.24.0'
    >>> own = {"allreduce": "aiconfigurator-trtllm-1.3.0rc20"}
    >>> fastroof.load_tables("h100", source=own).sources["allreduce"]
    'aiconfigurator-trtllm-1.3.0rc20'
    """
    measured = load_measured(name, gpu=gpu, source=source)
    return Tables(measured, measured.gpu_spec)
