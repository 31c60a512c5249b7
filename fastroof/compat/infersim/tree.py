"""Reading an InferSim ``bench_data`` tree as InferSim reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs, Reals
from fastroof.checks import shown
from fastroof.compat.infersim.model import GPUS, MISSING_PREFILL_MFU, InfersimGpu
from fastroof.compiled import compat_infersim as loops
from fastroof.errors import TableError

Key = tuple[int, ...]
Row = tuple[tuple[int, ...], tuple[float, ...]]

KV_DTYPES: Final = ("bf16", "fp8")
LARGEST: Final = 2**31
"""Upper limit of sizes in tables and lookups, so that no distance between two overflows."""
MFU_DECIMALS: Final = 3


class Blocks(NamedTuple):
    """Measured rows by key, both in file order."""

    keys: Longs
    starts: Longs
    axes: Longs
    values: Floats


@dataclass(frozen=True, eq=False)
class InfersimTables:
    """An InferSim tree, read once; see :func:`load`.

    Attributes
    ----------
    root : str
        Path of the tree.
    gpus : mapping of str to InfersimGpu
        Constants of every known device, by lower-case name.
    files : frozenset of str
        The files that were read, relative to the root.
    blocks : mapping of str to Blocks
        Rows of every kind of file: ``mha/decode``, ``gemm``, ...
    """

    root: str
    gpus: Mapping[str, InfersimGpu] = field(repr=False)
    files: frozenset[str] = field(repr=False)
    blocks: Mapping[str, Blocks] = field(repr=False)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, in the order of their numbers in the keys."""
        return tuple(self.gpus)

    def rows(self, kind: str, key: tuple[Longs, ...], at: tuple[Longs, ...]) -> Longs:
        """Return the rows of queries by key and position; negative if InferSim finds none."""
        blocks = self.blocks[kind]
        row = np.empty(len(at[0]), np.int64)
        _KINDS[kind].loop(blocks.keys, blocks.starts, blocks.axes, np.stack(key), np.stack(at), row)
        return row

    def mfu(self, kind: str, row: Longs, default_mfu: Reals | float, column: int = 0) -> Reals:
        """Return the MFUs of rows, else the default; without a file of a prefill's heads, a separate one."""
        if kind in ("mha/prefill", "mla/prefill"):
            default_mfu = np.where(row == loops.NO_KEY, MISSING_PREFILL_MFU, default_mfu)
        return _taken(self.blocks[kind], row, column, default_mfu)

    def hardware(self, constant: str) -> Floats:
        """Return one constant of every device, such as ``default_mfu``."""
        return np.array([getattr(gpu, constant) for gpu in self.gpus.values()], np.float64)


class _Kind(NamedTuple):
    """One kind of file: number of sizes in its name, how a line is read, and which row answers a query."""

    sizes_in_name: int
    key_width: int
    num_axes: int
    num_values: int
    row: Callable[[Sequence[str]], tuple[Key, Row] | None]
    """Return (rest of the key, (axes, values)) of a line's cells; None for a line that no lookup reads."""
    loop: Callable[[Longs, Longs, Longs, Longs, Longs, Longs], None]


def _mfu(cell: str) -> float:
    return round(float(cell), MFU_DECIMALS)


def _decode_row(cells: Sequence[str]) -> tuple[Key, Row] | None:
    row = (int(cells[2]), int(cells[3])), (_mfu(cells[5]),)
    return ((KV_DTYPES.index(cells[1]),), row) if cells[1] in KV_DTYPES else None


def _prefill_row(cells: Sequence[str]) -> tuple[Key, Row]:
    return (), ((int(cells[1]),), (_mfu(cells[3]),))


def _gemm_row(cells: Sequence[str]) -> tuple[Key, Row]:
    return (int(cells[1]), int(cells[2])), ((int(cells[0]),), (_mfu(cells[4]),))


def _grouped_row(cells: Sequence[str]) -> tuple[Key, Row]:
    return tuple(map(int, cells[:6])), ((int(cells[6]),), (_mfu(cells[9]), _mfu(cells[11])))


GDN_COLUMNS: Final = 6
"""Maximum kernels in a GDN file; a file with fewer is padded with zeros."""


def _gdn_row(cells: Sequence[str]) -> tuple[Key, Row]:
    us = [float(cell) for cell in cells[1:]]
    if not 0 < len(us) <= GDN_COLUMNS:
        raise ValueError(f"1 to {GDN_COLUMNS} latencies per line, got {len(us)}")
    return (), ((int(cells[0]),), (*us, *[0.0] * (GDN_COLUMNS - len(us))))


_KINDS: Final[Mapping[str, _Kind]] = {
    "mha/decode": _Kind(3, 5, 2, 1, _decode_row, loops.nearest_row),
    "mla/decode": _Kind(3, 5, 2, 1, _decode_row, loops.nearest_row),
    "mha/prefill": _Kind(3, 4, 1, 1, _prefill_row, loops.floor_row),
    "mla/prefill": _Kind(3, 4, 1, 1, _prefill_row, loops.floor_row),
    "gemm": _Kind(0, 3, 1, 1, _gemm_row, loops.ceiling_shape_row),
    "grouped_gemm/decode": _Kind(0, 7, 1, 2, _grouped_row, loops.nearest_row),
    "grouped_gemm/prefill": _Kind(0, 7, 1, 2, _grouped_row, loops.floor_row),
    "gdn/decode": _Kind(5, 6, 1, GDN_COLUMNS, _gdn_row, loops.nearest_row),
    "gdn/prefill": _Kind(5, 6, 1, GDN_COLUMNS, _gdn_row, loops.nearest_row),
}


def load(root: str | Path, gpus: Mapping[str, InfersimGpu] | None = None) -> InfersimTables:
    """Read an InferSim ``bench_data`` tree unchanged.

    Every quirk of InferSim's reading is reproduced: the first line of a file is dropped, header or not;
    MFUs are rounded to 3 decimals; rows keep their order. Files that InferSim never opens are
    ignored: ``dsa``, and those of devices without constants.

    Parameters
    ----------
    root : str or Path
        The folder that contains ``mha``, ``gemm`` and the others.
    gpus : mapping of str to InfersimGpu, optional
        Constants of further devices by name, in addition to :data:`GPUS`.

    Returns
    -------
    InfersimTables

    Raises
    ------
    TableError
        If the folder does not exist, or a line of a file cannot be read.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise TableError(f"no folder {folder}: give the bench_data folder of an InferSim tree")
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.csv"))}
    try:
        texts = {name: path.read_text("utf-8") for name, path in paths.items() if _place(name) is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"cannot read the tree {folder}: {error}") from None
    return read_files(texts, gpus, root=str(folder))


def read_files(
    files: Mapping[str, str], gpus: Mapping[str, InfersimGpu] | None = None, root: str = "memory"
) -> InfersimTables:
    r"""Read the files of a tree in memory.

    Parameters
    ----------
    files : mapping of str to str
        Text of each file by its path in the tree.
    gpus : mapping of str to InfersimGpu, optional
        Constants of further devices by name, in addition to :data:`GPUS`.
    root : str
        Name of the tree in messages.

    Returns
    -------
    InfersimTables

    Raises
    ------
    TableError
        If a line of a file cannot be read.

    Examples
    --------
    >>> tables = read_files({"gemm/h20/data.csv": "m,k,n,latency_us,mfu\n16,4096,6144,60.5,0.1234\n"})
    >>> tables.blocks["gemm"].values
    array([[0.123]])
    """
    known = {**GPUS, **{name.lower(): gpu for name, gpu in (gpus or {}).items()}}
    numbers = {name: number for number, name in enumerate(known)}
    by_kind: dict[str, dict[Key, list[Row]]] = {kind: {} for kind in _KINDS}
    read = []
    for path, text in files.items():
        place = _place(path)
        if place is None or place[1] not in numbers:
            continue
        kind, device, sizes = place
        head = (numbers[device], *sizes)
        if kind.endswith("/decode") and kind[:3] in ("mha", "mla"):
            # InferSim falls back without the file, but raises for a file without rows of the KV dtype
            for kv_dtype in range(len(KV_DTYPES)):
                by_kind[kind].setdefault((*head, kv_dtype), [])
        for rest, row in _lines(f"{root}/{path}", text, _KINDS[kind]):
            by_kind[kind].setdefault((*head, *rest), []).append(row)
        read.append(path)
    if not read:
        raise TableError(
            f"{root} has no file that InferSim reads, such as gemm/h20/data.csv; "
            f"valid devices are {', '.join(known)}; add others with gpus="
        )
    blocks = {kind: _blocks(by_key, _KINDS[kind]) for kind, by_key in by_kind.items()}
    return InfersimTables(root, known, frozenset(read), blocks)


def file_path(kind: str, device: str, sizes: Iterable[Any]) -> str:
    """Return the path in the tree of one kind of file; without sizes the device's only one."""
    return f"{kind}/{device}/{'-'.join(map(str, sizes)) or 'data'}.csv"


def _place(path: str) -> tuple[str, str, tuple[int, ...]] | None:
    """Return (kind, device, sizes in the name) of a path that InferSim may open."""
    parts = path.removesuffix(".csv").split("/")
    kind = "/".join(parts[:-2])
    if not path.endswith(".csv") or kind not in _KINDS:
        return None
    expected = _KINDS[kind].sizes_in_name
    words = parts[-1].split("-") if expected else []
    if expected:
        # InferSim builds the name from ints: nothing else is ever opened
        if len(words) != expected or any(word != str(int(word)) for word in words if word.isdecimal()):
            return None
        if not all(word.isdecimal() and word.isascii() for word in words):
            return None
    elif parts[-1] != "data":
        return None
    return kind, parts[-2], tuple(map(int, words))


def _lines(name: str, text: str, kind: _Kind) -> Iterator[tuple[Key, Row]]:
    for number, line in enumerate(text.splitlines()[1:], start=2):
        if not line.strip():
            continue
        try:
            read = kind.row([cell.strip() for cell in line.split(",")])
        except (ValueError, IndexError) as error:
            raise TableError(f"{name}, line {number}: {shown(line, 80)} cannot be read: {error}") from None
        if read is None:
            continue
        rest, (axes, values) = read
        if not all(0 < size < LARGEST for size in axes) or not all(0 <= size < LARGEST for size in rest):
            raise TableError(
                f"{name}, line {number}: {shown(line, 80)} has a size that is not in 1 to {LARGEST - 1}"
            )
        if not all(np.isfinite(values)):
            raise TableError(f"{name}, line {number}: {shown(line, 80)} has a value that is not finite")
        yield rest, (axes, values)


def _blocks(by_key: Mapping[Key, Sequence[Row]], kind: _Kind) -> Blocks:
    rows = [row for of_key in by_key.values() for row in of_key]
    counts = [len(of_key) for of_key in by_key.values()]
    return Blocks(
        np.array(list(by_key), np.int64).reshape(-1, kind.key_width),
        np.cumsum([0, *counts], dtype=np.int64),
        np.ascontiguousarray(np.array([axes for axes, _ in rows], np.int64).reshape(-1, kind.num_axes).T),
        np.ascontiguousarray(
            np.array([values for _, values in rows], np.float64).reshape(-1, kind.num_values).T
        ),
    )


def gdn_us_of(blocks: Blocks, row: Longs, tokens: Longs) -> Reals:
    """Return the latencies of gated delta nets scaled to the tokens, us; NaN if there is no row."""
    scale = _taken(blocks, row, None, np.nan) / tokens
    total = np.zeros(len(row))
    for kernel in range(len(blocks.values)):
        total += _taken(blocks, row, kernel, np.nan) / scale
    return total


def _taken(blocks: Blocks, row: Longs, column: int | None, default: Any) -> Reals:
    """Return a column of values, or the first axis for None, where a row exists."""
    values = blocks.axes[0] if column is None else blocks.values[column]
    if not len(values):
        return np.broadcast_to(np.asarray(default, np.float64), row.shape).copy()
    taken: Reals = np.where(row >= 0, values[np.maximum(row, 0)], default)
    return taken
