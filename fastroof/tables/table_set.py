"""Tables of one GPU: measured rows, their packed form (made on first use), and lookups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from fastroof._version import __version__
from fastroof.arrays import Array, Bools, Longs
from fastroof.caching import BoundedCache, computed_once, lazy_property
from fastroof.columns import LATENCY, ORIGIN
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import DATASHEET, MEASURED
from fastroof.errors import MissingTableError, TableError
from fastroof.load import MeasuredTable, MeasuredTables, SourceChoice, load_measured, load_measured_of
from fastroof.load.by_name import what_would_bring_more
from fastroof.load.measured import Progress
from fastroof.load.scaled import scaled_from
from fastroof.load.unsound import UnsoundFamily, unsound_families
from fastroof.operators.operator import Key, Packer, SourceTable, is_measured, measured_keys
from fastroof.operators.registry import OPERATORS
from fastroof.progress import Phase
from fastroof.tables.completed import Campaign, Completion, completed, may_complete
from fastroof.tables.holdout import run_holdout
from fastroof.tables.kernel_order import BY_RANK, KernelOrder
from fastroof.tables.lookup import Lookup, run_lookup
from fastroof.tables.spike_free_rows import SpikeFreeRows, spike_free_rows

T = TypeVar("T")

BOUNDED_CACHE_BYTES: Final = 2**27
"""Size of the bounded cache: some 1,500 curves at every number of tokens up to 8,192."""


def _cache() -> BoundedCache[Any]:
    return BoundedCache(BOUNDED_CACHE_BYTES)


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of one GPU: look up kernels, or compile them into plans.

    Made by :func:`load_tables`. Packed forms are made on first use and cached; pickling drops the cache.

    Attributes
    ----------
    measured : MeasuredTables
        The rows.
    gpu : GpuSpec
        The GPU they were measured on.
    order : KernelOrder
        Order of preference of engines, see :meth:`in_order` (default: the ranks of the sources).
    """

    measured: MeasuredTables
    gpu: GpuSpec
    order: KernelOrder = BY_RANK
    _cached: dict[tuple[Hashable, ...], Any] = field(init=False, repr=False, default_factory=dict)
    _bounded: BoundedCache[Any] = field(init=False, repr=False, default_factory=_cache)
    _of_all: Tables | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        made = {"_cached": {}, "_bounded": _cache(), "_of_all": None}
        return {"measured": self.measured, "gpu": self.gpu, "order": self.order, **made}

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {t.num_rows:,}" for name, t in self.measured.tables.items())
        return f"Tables({self.gpu.name}: {rows} rows)"

    @property
    def sources(self) -> dict[str, str]:
        """Preferred source of each operator; others serve kernels that it has not measured."""
        return {name: self.candidates(name)[0].source for name in self.measured.tables}

    @property
    def content_hash(self) -> str:
        """SHA-256 of the measured rows, stored with results."""
        return self.measured.content_hash

    @property
    def sources_hash(self) -> str:
        """SHA-256 of all sources, and of those of the GPU with the same links."""
        like = self.of_like_links()
        return f"{self.measured.sources_hash}{'' if like is None else f' {like.measured.sources_hash}'}"

    @lazy_property
    def scaled_sources(self) -> frozenset[str]:
        """Names of sources whose kernels were measured on another card (``kernels_of`` in the GPU's file)."""
        every = (table for name in self.measured.tables for table in self.measured.candidates(name))
        return frozenset(table.source for table in every if scaled_from(table.provenance))

    @lazy_property
    def made_from(self) -> dict[str, str]:
        """Metadata of lookups' Arrow tables."""
        return {
            "fastroof.version": __version__,
            "fastroof.tables_hash": self.content_hash,
            "fastroof.gpu": self.gpu.name,
        }

    def lookup(
        self, operator: str, *, method: str = "roofline", with_error: bool = False, **sizes: Any
    ) -> Lookup:
        """Look up kernels by their sizes; arrays broadcast.

        Parameters
        ----------
        operator : str
            ``gemm`` (m, n, k, dtype), ``attention_prefill`` (num_q_heads, num_kv_heads, head_dim,
            q_len, kv_len, batch_size=1, kv_dtype, window=0), ``attention_decode`` (num_q_heads,
            num_kv_heads, head_dim, batch_size, kv_len, kv_dtype, window=0), ``allreduce`` (num_gpus,
            message_bytes, dtype, mode="graph"), ``moe`` (num_tokens, hidden, intermediate, topk,
            num_experts, moe_tp=1, moe_ep=1, distribution="balanced", dtype). dtype and kv_dtype
            default to bf16; a window of 0 is full attention. Sizes are integers or integer
            arrays of at least 1.
        method : str
            ``roofline`` interpolates latency in roofline coordinates; ``linear_mfu`` interpolates
            MFU; ``nearest`` (in log2 of the axes) and ``floor`` take the MFU of one measured point.
            A measured point comes back exactly, whatever the method, unless it is an isolated spike
            (:mod:`fastroof.load.spikes`); a prefix is priced the same way in all of them.
        with_error : bool
            Also return the relative standard error, see :mod:`fastroof.uncertainty`; roofline only.

        Returns
        -------
        Lookup
            latency_us, mfu and origin, of the broadcast shape; relative_error if requested.

        Raises
        ------
        LookupInputError
            For an invalid size, or an unknown operator or method.
        MissingTableError
            If no measured table has the dtype or shape.

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
        21.16
        """
        return run_lookup(self, operator, method, with_error, sizes)

    def holdout(self, **options: Any) -> Any:
        """Thin every table, look up the hidden points, and report the errors.

        See :func:`fastroof.tables.holdout.run_holdout` for the options and the returned rows.
        """
        return run_holdout(self, **options)

    def in_order(self, order: KernelOrder) -> Tables:
        """Return the same tables with another order of preference of engines.

        Operators whose source was chosen by name are unchanged.
        """
        if order == self.order:
            return self
        of_all = self._of_all or self
        if order == BY_RANK:
            return of_all
        return of_all.cached(("in order", order), lambda: Tables(self.measured, self.gpu, order, of_all))

    def of_like_links(self) -> Tables | None:
        """Tables of the GPU with the same links (``links_of`` in the GPU's file), if there are any."""

        def tables() -> Tables | None:
            if not self.gpu.links_of:
                return None
            try:
                return load_tables(self.gpu.links_of).in_order(self.order)
            except TableError:
                return None

        return self.cached(("of like links",), tables)

    def candidates(self, operator: str) -> tuple[MeasuredTable, ...]:
        """Tables of an operator in order of preference; the first may be completed by the second.

        Raises
        ------
        MissingTableError
            If there is none.
        """
        return self.cached(("candidates", operator), lambda: self._candidates(operator))

    def _candidates(self, operator: str) -> tuple[MeasuredTable, ...]:
        """Tables in order; your own is completed by the next (:mod:`fastroof.tables.completed`)."""
        own, *others = ordered = self._measured(operator)
        if not others or not may_complete(own, others[0]) or any(map(self.is_foreign, ordered[:2])):
            return ordered

        def build() -> MeasuredTable:
            sides = [functools.partial(self._campaign, table) for table in ordered[:2]]
            return completed(own, others[0], Completion(*sides))

        key = ("completed", operator, own.source, others[0].source)
        return ((self._of_all or self).cached(key, build), *others)

    def _campaign(self, table: MeasuredTable) -> Campaign:
        alone = Tables(replace(self.measured, tables={table.operator: table}, others={}), self.gpu)
        return Campaign(
            table,
            self.spike_free_rows(table),
            lambda key: self.is_sound(table, key),
            functools.partial(alone.lookup, table.operator),
        )

    def _measured(self, operator: str) -> tuple[MeasuredTable, ...]:
        """Tables of an operator as measured, in order of preference."""
        return self.cached(("in order", operator), lambda: self._in_order(operator))

    def _in_order(self, operator: str) -> tuple[MeasuredTable, ...]:
        tables = self.measured.candidates(operator)
        if not tables:
            have = ", ".join(sorted(self.measured.tables))
            is_measured = operator in OPERATORS and bool(OPERATORS[operator].package_files)
            more = what_would_bring_more(self.gpu.name) if is_measured else ""
            more = f"; {more}" if more else ""
            raise MissingTableError(f"{self.gpu.name} has no {operator} table; it has {have}{more}")
        return self.order.sorted(tables, operator)

    def table(self, operator: str) -> MeasuredTable:
        """Measured rows of one operator from its preferred source.

        Raises
        ------
        MissingTableError
            If this set has none.
        """
        return self._measured(operator)[0]

    def serving(self, operator: str, key: Key) -> MeasuredTable:
        """Table that serves one kernel: the first candidate with sound rows of it, else the first with any.

        Raises
        ------
        MissingTableError
            If no candidate has a row with that key; the message names the closest keys.
        """
        return self.cached(("serving", operator, key), lambda: self._serving(operator, key))

    def _serving(self, operator: str, key: Key) -> MeasuredTable:
        unsound = None
        for table in self.candidates(operator):
            if key not in table.groups():
                continue
            if self.is_sound(table, key):
                return table
            unsound = unsound or table
        if unsound is None:
            raise MissingTableError(self._missing(operator, key))
        return unsound

    def has(self, operator: str) -> bool:
        """Whether any source measured an operator."""
        return operator in self.measured.tables

    def serves(self, operator: str, key: Key) -> bool:
        """Whether any source measured a kernel; reads no further source once one has it."""
        return is_measured(self, operator, key)

    def source_of(self, operator: str, key: Key) -> str:
        """Name of the source that serves a kernel."""
        return self.serving(operator, key).source

    def is_foreign(self, table: SourceTable) -> bool:
        """Whether a table has the kernels of another engine than the requested one."""
        return self.order.is_foreign(table)

    def some_rows(self, operator: str, rows: Longs | Bools) -> Tables:
        """Tables of some rows of one operator only, for hold-outs.

        Parameters
        ----------
        operator : str
            The operator.
        rows : array of int or bool
            Indices of the rows, or a mask.
        """
        changed = self.table(operator).some(rows)
        return Tables(replace(self.measured, tables={operator: changed}, others={}), self.gpu)

    def packed(self, operator: Packer[T], key: Key, variant: str = "", source: str = "") -> T:
        """Packed rows of one kernel, made once.

        Parameters
        ----------
        operator : Operator
            The operator, which packs its rows.
        key : tuple
            The kernel, in the order of ``operator.keys``.
        variant : str
            Another way of packing that the operator has.
        source : str
            The source whose rows are packed (default: the one that serves the kernel).

        Raises
        ------
        MissingTableError
            If no row has that key; the message names the closest keys.
        """
        table = self._from_source(operator.name, key, source)

        def pack() -> T:
            return operator.pack(key, self._rows(table, key), self.gpu, variant)

        # every engine order shares the packed form of a source's kernel
        return (self._of_all or self).cached(("packed", operator.name, table.source, key, variant), pack)

    def rows(self, operator: Packer[Any], key: Key, source: str = "") -> dict[str, Array]:
        """Columns of one kernel's rows as lookups use them, and their ``origin``.

        Isolated spikes are replaced by what their neighbours give, see
        :mod:`fastroof.tables.spike_free_rows`; all other rows are as measured. Raises as :meth:`packed`.
        """
        return self._rows(self._from_source(operator.name, key, source), key)

    def _from_source(self, operator: str, key: Key, source: str) -> MeasuredTable:
        if not source:
            return self.serving(operator, key)
        return next(table for table in self.candidates(operator) if table.source == source)

    def _rows(self, table: MeasuredTable, key: Key) -> dict[str, Array]:
        usable = self.spike_free_rows(table)
        rows = table.groups()[key]
        columns = {name: values[rows] for name, values in table.columns.items()}
        return columns | {LATENCY.name: usable.latency_us[rows], ORIGIN: usable.origin[rows]}

    def spike_free_rows(self, table: MeasuredTable) -> SpikeFreeRows:
        """Latency and origin of every row of one source, without isolated spikes."""

        def build() -> SpikeFreeRows:
            if ORIGIN in table.columns:
                return SpikeFreeRows(table.columns[LATENCY.name], table.columns[ORIGIN])
            return spike_free_rows(table, self.gpu)

        return (self._of_all or self).cached(("spike-free rows", table.operator, table.source), build)

    def cached(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """Return the value cached under a key, made on first use; the first part of a key names its type."""
        return computed_once(self._cached, key, make)

    def cached_bounded(
        self,
        key: tuple[Hashable, ...],
        make: Callable[[], T],
        bytes_of: Callable[[T], int],
        serves: Callable[[T], bool] | None = None,
    ) -> T:
        """Return a value from the bounded cache that all orders share, see :class:`BoundedCache`."""
        bounded: BoundedCache[T] = (self._of_all or self)._bounded
        return bounded.get((self.order, *key), make, bytes_of, serves)

    def groups(self, operator: str) -> dict[Key, Longs]:
        """Row indices by key of an operator's preferred table."""
        return self.table(operator).groups()

    def every_key(self, operator: str) -> list[Key]:
        """Keys that any source measured, those of preferred sources first."""
        return measured_keys(self, operator)

    def is_sound(self, table: SourceTable, key: Key) -> bool:
        """Whether no check found a kernel's rows of a table wrong."""

        def unsound() -> list[UnsoundFamily]:
            return [f for f in unsound_families(table.provenance, table.operator) if not f.serves]

        families = self.cached(("unsound families", table.operator, table.source), unsound)
        if not families:
            return True
        columns = dict(zip((c.name for c in OPERATORS[table.operator].keys), key, strict=True))
        return not any(family.holds_key(columns) for family in families)

    def _missing(self, operator: str, key: Key) -> str:
        """Error message for a missing key, with the closest measured keys."""
        names = [c.name for c in OPERATORS[operator].keys]

        def shared(other: Key) -> int:
            return sum(a == b for a, b in zip(key, other, strict=True))

        def text(k: Key) -> str:
            return " ".join(f"{name}={value}" for name, value in zip(names, k, strict=True))

        measured = self.every_key(operator)
        for name, value, others in zip(names, key, zip(*measured, strict=True), strict=True):
            if name in ("dtype", "kv_dtype") and value not in others:
                formats = ", ".join(sorted(set(others)))
                return f"{self.gpu.name} has no {operator} table of {name} {value}; measured: {formats}"
        keys = sorted(measured, key=lambda k: (-shared(k), str(k)))
        near = "; ".join(text(k) for k in keys[:3])
        return (
            f"no {operator} row of {self.gpu.name} has {text(key)}; "
            f"{len(keys)} kernels were measured, the closest: {near}"
        )


def load_tables(
    name: str | Path, *, gpu: str | None = None, source: SourceChoice = None, progress: Progress | None = None
) -> Tables:
    """Load the measured tables of a GPU.

    Parameters
    ----------
    name : str or Path
        A GPU (``"h100"``), one of its sources (``"h100/SOURCE"``), a version that an installed
        aisimulate measured (``"package:h200/vllm/0.31.0"``), or the path of a folder: one GPU's,
        one source's, or a tree as InferSim or roofline V2 lay it out.
    gpu : str, optional
        Which GPU, if a tree holds several; it must match if there is only one.
    source : str or mapping of str to str, optional
        Use only this source, or a source per operator; other operators use their best-ranked one.
    progress : callable, optional
        Called with files done, files in all and a file's name while tables of a package are converted.

    Returns
    -------
    Tables
        ``sources`` names the source of each operator.

    Raises
    ------
    TableError
        If a file is missing, malformed, or must not be used (the message names file, row and column), or the
        tables are another GPU's than ``gpu``.
    GpuError
        If the name is neither a known GPU nor a folder.

    Examples
    --------
    >>> import fastroof
    >>> fastroof.load_tables("h100").sources["gemm"]
    'aiconfigurator-vllm-0.25.0'
    >>> own = {"allreduce": "aiconfigurator-trtllm-1.3.0rc20"}
    >>> fastroof.load_tables("h100", source=own).sources["allreduce"]
    'aiconfigurator-trtllm-1.3.0rc20'
    """
    with Phase("reading tables"):
        measured = load_measured(name, gpu=gpu, source=source, progress=progress)
    return Tables(measured, measured.gpu_spec)


def load_gpu_tables(
    gpu: Any, *, source: SourceChoice = None, progress: Progress | None = None
) -> Tables | None:
    """Load the tables of a GPU, given as :func:`fastroof.load_gpu` takes it; None if nothing was measured."""
    with Phase("reading tables"):
        measured = load_measured_of(gpu, source=source, progress=progress)
    return None if measured is None else Tables(measured, measured.gpu_spec)


def chosen_tables(given: Any, gpu: Any, source: SourceChoice = None) -> Any:
    """Return the tables that a ``tables`` argument means: None for the datasheet model."""
    if isinstance(given, str | Path):
        if given == MEASURED:
            return load_gpu_tables(gpu, source=source)
        spec = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
        return None if given == DATASHEET else load_tables(given, gpu=spec.name, source=source)
    return given
