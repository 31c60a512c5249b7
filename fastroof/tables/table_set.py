"""Tables: measured rows with their packed form, made when first asked for; what ``load_tables`` returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from fastroof._version import __version__
from fastroof.arrays import Array, Bools, Longs
from fastroof.bounded_cache import BoundedCache
from fastroof.columns import LATENCY, ORIGIN, Column
from fastroof.config import GpuSpec
from fastroof.errors import MissingTableError, TableError
from fastroof.lazy_property import lazy_property
from fastroof.load import MeasuredTable, MeasuredTables, SourceChoice, load_measured
from fastroof.load.by_name import what_would_bring_more
from fastroof.load.own import unsound_families
from fastroof.operators.operator import Columns
from fastroof.operators.registry import OPERATORS
from fastroof.tables.lookup import BY_RANK, KernelOrder, Lookup
from fastroof.tables.served_rows import ServedRows, served_rows

Key = tuple[Any, ...]
T = TypeVar("T")
Packed = TypeVar("Packed", covariant=True)

LATELY_BYTES: Final = 2**27
"""Of what is made from tables in any number: some 1,500 curves at every number of tokens up to 8,192."""


def _cache() -> BoundedCache[Any]:
    return BoundedCache(LATELY_BYTES)


class _Packs(Protocol[Packed]):
    """An operator, and what its packed form is."""

    @property
    def name(self) -> str: ...
    @property
    def keys(self) -> tuple[Column, ...]: ...
    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> Packed: ...


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one GPU: look kernels up, or compile them into plans.

    Made by :func:`load_tables`. Packed forms are built when first used and kept, curves at every number of
    rows as long as there is room; pickling drops both.

    Attributes
    ----------
    measured : MeasuredTables
        The rows.
    gpu : GpuSpec
        The GPU they were measured on.
    order : KernelOrder
        Whose kernels are asked first, see :meth:`in_order`; by default as the ranks of the sources say.
    """

    measured: MeasuredTables
    gpu: GpuSpec
    order: KernelOrder = BY_RANK
    _kept: dict[tuple[Hashable, ...], Any] = field(init=False, repr=False, default_factory=dict)
    _lately: BoundedCache[Any] = field(init=False, repr=False, default_factory=_cache)
    _of_all: Tables | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        made = {"_kept": {}, "_lately": _cache(), "_of_all": None}
        return {"measured": self.measured, "gpu": self.gpu, "order": self.order, **made}

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {t.num_rows:,}" for name, t in self.measured.tables.items())
        return f"Tables({self.gpu.name}: {rows} rows)"

    @property
    def sources(self) -> dict[str, str]:
        """Which source serves which operator, but for kernels that it has not measured."""
        return {name: self.candidates(name)[0].source for name in self.measured.tables}

    @property
    def content_hash(self) -> str:
        """SHA-256 of the measured rows: results carry it."""
        return self.measured.content_hash

    @property
    def sources_hash(self) -> str:
        """SHA-256 of every source, and of those of the GPU whose links stand for this one's."""
        like = self.of_like_links()
        return f"{self.measured.sources_hash}{'' if like is None else f' {like.measured.sources_hash}'}"

    @lazy_property
    def made_from(self) -> dict[str, str]:
        """What lookups carry as metadata of their Arrow tables."""
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
            Also say how good each answer is, see :mod:`fastroof.uncertainty`; roofline only.

        Returns
        -------
        Lookup
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

    def in_order(self, order: KernelOrder) -> Tables:
        """The same tables, served by the kernels of an engine where they were measured.

        Made once an order. Of operators whose source was asked for by name nothing changes.
        """
        if order == self.order:
            return self
        of_all = self._of_all or self
        if order == BY_RANK:
            return of_all
        return of_all.kept(("in order", order), lambda: Tables(self.measured, self.gpu, order, of_all))

    def of_like_links(self) -> Tables | None:
        """Tables of the GPU that has the same link and switches, if this one's file names one with tables."""

        def tables() -> Tables | None:
            if not self.gpu.links_of:
                return None
            try:
                return load_tables(self.gpu.links_of).in_order(self.order)
            except TableError:
                return None

        return self.kept(("of like links",), tables)

    def candidates(self, operator: str) -> tuple[MeasuredTable, ...]:
        """Tables that may serve an operator, in the order in which they are asked.

        Raises
        ------
        MissingTableError
            If there is none.
        """
        return self.kept(("candidates", operator), lambda: self._candidates(operator))

    def _candidates(self, operator: str) -> tuple[MeasuredTable, ...]:
        tables = self.measured.candidates(operator)
        if not tables:
            have = ", ".join(sorted(self.measured.tables))
            is_measured = operator in OPERATORS and bool(OPERATORS[operator].package_files)
            more = what_would_bring_more(self.gpu.name) if is_measured else ""
            more = f"; {more}, where aiconfigurator-core measured it" if more else ""
            raise MissingTableError(f"{self.gpu.name} has no {operator} table; it has {have}{more}")
        return self.order.sorted(tables, operator)

    def table(self, operator: str) -> MeasuredTable:
        """Measured rows of one operator, of the source that serves it first.

        Raises
        ------
        MissingTableError
            If this set has none.
        """
        return self.candidates(operator)[0]

    def serving(self, operator: str, key: Key) -> MeasuredTable:
        """The table that serves one kernel.

        The first candidate that has measured it and is sound there; where none is, the first that has
        measured it at all.

        Raises
        ------
        MissingTableError
            If no candidate has a row with that key; the message names the closest that have.
        """
        return self.kept(("serving", operator, key), lambda: self._serving(operator, key))

    def _serving(self, operator: str, key: Key) -> MeasuredTable:
        doubtful = None
        for table in self.candidates(operator):
            if key not in table.groups():
                continue
            if self.is_sound(table, key):
                return table
            doubtful = doubtful or table
        if doubtful is None:
            raise MissingTableError(self._missing(operator, key))
        return doubtful

    def serves(self, operator: str, key: Key) -> bool:
        """Whether some row has that key; without reading other sources where the first has it."""
        return any(key in table.groups() for table in self.candidates(operator))

    def source_of(self, operator: str, key: Key | None = None) -> str:
        """Name of the source that serves a kernel, or without a key an operator."""
        return (self.table(operator) if key is None else self.serving(operator, key)).source

    def is_foreign(self, operator: str, key: Key | None = None) -> bool:
        """Whether a kernel is served as another engine runs it than the one asked for."""
        return self.order.is_foreign(self.table(operator) if key is None else self.serving(operator, key))

    def some_rows(self, operator: str, rows: Longs | Bools) -> Tables:
        """Tables of some rows of one operator, and of nothing else: what a hold-out leaves.

        Parameters
        ----------
        operator : str
            Whose table.
        rows : array of int or bool
            Indices of its rows, or whether each is kept.
        """
        table = self.table(operator)
        columns = {name: values[rows] for name, values in table.columns.items()}
        kept = replace(table, columns=columns, written=None)
        return Tables(replace(self.measured, tables={operator: kept}, others={}), self.gpu)

    def packed(self, operator: _Packs[T], key: Key, variant: str = "") -> T:
        """The packed form of one kernel's rows, made once.

        Parameters
        ----------
        operator : Operator
            Whose table.
        key : tuple
            The kernel, in the order of ``operator.keys``.
        variant : str
            Another way of packing it that the operator has.

        Raises
        ------
        MissingTableError
            If no row has that key; the message names the closest that have.
        """

        def pack() -> T:
            return operator.pack(key, self.rows(operator, key), self.gpu, variant)

        # whichever engine asks, one source's kernel is packed once
        source = self.serving(operator.name, key).source
        return (self._of_all or self).kept(("packed", operator.name, source, key, variant), pack)

    def packed_of(self, operator: _Packs[T], key: Key, source: str) -> T:
        """The packed form of one source's rows of a kernel, whether or not it serves it."""

        def pack() -> T:
            (table,) = (one for one in self.candidates(operator.name) if one.source == source)
            return operator.pack(key, self._rows(table, key), self.gpu, "")

        return (self._of_all or self).kept(("packed", operator.name, source, key, ""), pack)

    def has(self, table: MeasuredTable, key: Key) -> bool:
        """Whether one source has measured a kernel."""
        return key in table.groups()

    def rows(self, operator: _Packs[Any], key: Key) -> dict[str, Array]:
        """Columns of the rows of one kernel as they are served, and their ``origin``.

        Isolated spikes have the latency that their neighbours make and are interpolated, see
        :mod:`fastroof.tables.served_rows`; all other rows are as measured.

        Raises
        ------
        MissingTableError
            As :meth:`packed`.
        """
        return self._rows(self.serving(operator.name, key), key)

    def _rows(self, table: MeasuredTable, key: Key) -> dict[str, Array]:
        served = self.served_rows(table)
        rows = table.groups()[key]
        columns = {name: values[rows] for name, values in table.columns.items()}
        return columns | {LATENCY.name: served.latency_us[rows], ORIGIN: served.origin[rows]}

    def served_rows(self, table: MeasuredTable) -> ServedRows:
        """Latency and origin of every row of one source as lookups serve it."""

        def made() -> ServedRows:
            return served_rows(table, self.gpu)

        return (self._of_all or self).kept(("served rows", table.operator, table.source), made)

    def kept(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """Return what was made from these tables under a key, made now if it was not yet.

        Parameters
        ----------
        key : tuple
            Its first part is a word that says what it is: things of one type.
        make : callable
            Makes it; two threads may, and one answer is kept.
        """
        if key in self._kept:
            kept: T = self._kept[key]
            return kept
        made: T = self._kept.setdefault(key, make())
        return made

    def kept_lately(
        self,
        key: tuple[Hashable, ...],
        make: Callable[[], T],
        bytes_of: Callable[[T], int],
        serves: Callable[[T], bool] | None = None,
    ) -> T:
        """Return a value cached under a key; bounded, for values of which there may be any number.

        All orders of the tables share a cache of :data:`LATELY_BYTES`.

        Parameters
        ----------
        key, make : tuple, callable
            As of :meth:`kept`.
        bytes_of, serves : callable
            As of :meth:`fastroof.bounded_cache.BoundedCache.get`.
        """
        lately: BoundedCache[T] = (self._of_all or self)._lately
        return lately.get((self.order, *key), make, bytes_of, serves)

    def groups(self, operator: str) -> dict[Key, Longs]:
        """Row indices by key of the table that serves an operator first."""
        return self.table(operator).groups()

    def every_key(self, operator: str) -> list[Key]:
        """Keys that some source has measured; the first source's before the next one's."""
        keys = (key for table in self.candidates(operator) for key in table.groups())
        return list(dict.fromkeys(keys))

    def keys_of(self, table: MeasuredTable) -> Iterable[Key]:
        """Kernels that one source has measured."""
        return table.groups().keys()

    def is_sound(self, table: MeasuredTable, key: Key) -> bool:
        """Whether nothing is known against one source's rows of a kernel."""
        return bool(self.sound_keys(table, [key]))

    def sound_keys(self, table: MeasuredTable, keys: Iterable[Key]) -> list[Key]:
        """Those kernels of one source against whose rows nothing is known."""
        families = [f for f in unsound_families(table.provenance, table.operator) if not f.serves]
        if not families:
            return list(keys)
        names = [c.name for c in OPERATORS[table.operator].keys]
        words = {key: dict(zip(names, key, strict=True)) for key in keys}
        return [key for key, one in words.items() if not any(family.holds_key(one) for family in families)]

    def _missing(self, operator: str, key: Key) -> str:
        """Say which key was asked for, and the measured keys that share most with it."""
        names = [c.name for c in OPERATORS[operator].keys]

        def shared(other: Key) -> int:
            return sum(a == b for a, b in zip(key, other, strict=True))

        def words(k: Key) -> str:
            return " ".join(f"{name}={value}" for name, value in zip(names, k, strict=True))

        measured = self.every_key(operator)
        for name, value, others in zip(names, key, zip(*measured, strict=True), strict=True):
            if name in ("dtype", "kv_dtype") and value not in others:
                formats = ", ".join(sorted(set(others)))
                return f"{self.gpu.name} has no {operator} table of {name} {value}; measured: {formats}"
        keys = sorted(measured, key=lambda k: (-shared(k), str(k)))
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
        Which GPU, where a tree holds several; where there is one, that must be it.
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
        If a file is missing, malformed, or must not be used (the message names file, row and column), or the
        tables are another GPU's than ``gpu``.
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
