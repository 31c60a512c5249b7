"""Roofline V2's tables: MFU columns as in the files, packed for the loops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array, Floats, Longs
from fastroof.checks import shown, whole_number
from fastroof.columns import Column
from fastroof.compiled import compat_roofline_v2 as loops
from fastroof.compiled.compat_roofline_v2 import LEAST_MFU
from fastroof.errors import LookupInputError, MissingTableError, TableError
from fastroof.given_arrays import common_shape
from fastroof.load.rows import read_columns
from fastroof.load.trees import gpu_of_tree
from fastroof.operators.registry import OPERATORS
from fastroof.run.batch import int_array

MFU: Final = Column("mfu", "float", "", "the file's own MFU", 0)
GEMM_COLUMNS: Final = (*OPERATORS["gemm"].axes, MFU)
PREFILL_COLUMNS: Final = (Column("seq_len", "int", "tokens", "tokens of the one sequence"), MFU)
DECODE_COLUMNS: Final = (*OPERATORS["attention_decode"].axes, MFU)

SHAPE = r"[1-9]\d*-[1-9]\d*-[1-9]\d*"


@dataclass(frozen=True, eq=False)
class RooflineV2Tables:
    """Roofline V2's MFU tables of one GPU; create them with :func:`load` or :func:`tables_of`.

    Attributes
    ----------
    attn_configs : tuple of str
        Head shapes ``<num_heads>-<num_kv_heads>-<head_dim>`` with a prefill table, in order of file names.
    arena : ndarray of float64
        All tables, one block each (:mod:`fastroof.compiled.compat_roofline_v2` defines their form).
    prefill_at : ndarray of int64
        Block of each of ``attn_configs``.
    decode_at : mapping of (str, int) to int
        Block of a head shape at a measured tensor-parallel size.
    gemm_k, gemm_n : ndarray of float64
        The measured (k, n) pairs, in the order of their first rows.
    gemm_at : ndarray of int64
        Block of each pair.
    """

    attn_configs: tuple[str, ...]
    arena: Floats
    prefill_at: Longs
    decode_at: Mapping[tuple[str, int], int]
    gemm_k: Floats
    gemm_n: Floats
    gemm_at: Longs


def load(root: str | Path, gpu: str | None = None) -> RooflineV2Tables:
    """Load roofline V2's tables from an unmodified bench_data tree.

    The files are ``gemm/<gpu>/data.csv``, ``mha/prefill/<gpu>/<attn_config>.csv`` and
    ``mha/decode/<gpu>/<attn_config>-tp<T>.csv``; their sizes and ``mfu`` columns are read.

    Parameters
    ----------
    root : str or Path
        The tree, or the folder that contains it as ``bench_data``.
    gpu : str, optional
        Name of the GPU's folders; required if the tree has several.

    Returns
    -------
    RooflineV2Tables

    Raises
    ------
    MissingTableError
        If the folder does not exist, or lacks one of the three kinds of tables.
    TableError
        If the tree has several GPUs and none was named, or a file cannot be read or measures a point
        twice. The message names the file and row.
    """
    root = Path(root)
    if not root.is_dir():
        raise MissingTableError(f"{root}: folder does not exist; need a bench_data tree")
    if not (root / "gemm").is_dir() and (root / "bench_data").is_dir():
        root = root / "bench_data"
    name = _gpu_folder(root, gpu)
    gemm = root / "gemm" / name / "data.csv"
    prefill = _attention_files(root, "prefill", name, f"({SHAPE})", "<attn_config>.csv")
    decode = _attention_files(root, "decode", name, rf"({SHAPE})-tp([1-9]\d*)", "<attn_config>-tp<T>.csv")
    return _packed(
        gemm=(str(gemm), _columns(gemm, GEMM_COLUMNS)),
        prefill=[(groups[0], str(path), _columns(path, PREFILL_COLUMNS)) for path, groups in prefill],
        decode=[
            ((groups[0], int(groups[1])), str(path), _columns(path, DECODE_COLUMNS))
            for path, groups in decode
        ],
    )


def tables_of(
    gemm: Mapping[str, Any],
    prefill: Mapping[str, Mapping[str, Any]],
    decode: Mapping[tuple[str, int], Mapping[str, Any]],
) -> RooflineV2Tables:
    """Build roofline V2's tables from columns in memory, without files.

    Parameters
    ----------
    gemm : mapping of str to array_like
        Columns ``m``, ``k``, ``n`` (integers) and ``mfu``.
    prefill : mapping of str to mapping
        Columns ``seq_len`` and ``mfu``, by attn_config ``<num_heads>-<num_kv_heads>-<head_dim>``.
    decode : mapping of (str, int) to mapping
        Columns ``batch_size``, ``kv_len`` and ``mfu``, by attn_config and tp.

    Returns
    -------
    RooflineV2Tables
        As if loaded from files named after the keys: rows in the given order, tables in order of file names.

    Raises
    ------
    TableError
        If a name is not a head shape, or a column is missing, has another length, contains invalid sizes or
        MFUs, or measures a point twice.
    MissingTableError
        If a kind of table is empty.

    Examples
    --------
    >>> tables = tables_of(
    ...     gemm={"m": [8], "k": [4096], "n": [4096], "mfu": [0.1]},
    ...     prefill={"32-8-128": {"seq_len": [1024], "mfu": [0.5]}},
    ...     decode={("32-8-128", 1): {"batch_size": [1], "kv_len": [1024], "mfu": [0.01]}},
    ... )
    >>> tables.attn_configs
    ('32-8-128',)
    """
    for kind, given in (("prefill", prefill), ("decode", decode)):
        if not given:
            raise MissingTableError(f"{kind}: no table was given; need at least one head shape")
    for shape in (*prefill, *(shape for shape, _ in decode)):
        if not isinstance(shape, str) or not re.fullmatch(SHAPE, shape):
            raise TableError(
                f"{shown(shape)} is not an attn_config; expected <num_heads>-<num_kv_heads>-<head_dim>"
            )
    for key in decode:
        whole_number(f"decode table {shown(key)}: tp", key[1], error=TableError)
    return _packed(
        gemm=("gemm", _given_columns("gemm", gemm, GEMM_COLUMNS)),
        prefill=[
            (shape, f"prefill {shape}", _given_columns(f"prefill {shape}", prefill[shape], PREFILL_COLUMNS))
            for shape in sorted(prefill, key=lambda shape: f"{shape}.csv")
        ],
        decode=[
            (key, f"decode {key}", _given_columns(f"decode {key}", columns, DECODE_COLUMNS))
            for key, columns in decode.items()
        ],
    )


# -- reading -----------------------------------------------------------------------------------


def _gpu_folder(root: Path, gpu: str | None) -> str:
    """Return the name of the GPU whose tables are read."""
    have = sorted(path.parent.name for path in root.glob("gemm/*/data.csv"))
    if not have:
        raise MissingTableError(f"{root}: not a roofline V2 tree; expected gemm/<gpu>/data.csv below it")
    return gpu_of_tree(root, have, gpu)


def _attention_files(
    root: Path, phase: str, gpu: str, pattern: str, need: str
) -> list[tuple[Path, tuple[str, ...]]]:
    """Return one phase's files in name order, with the meaning of their names; others are ignored."""
    folder = root / "mha" / phase / gpu
    files = []
    for path in sorted(folder.glob("*.csv"), key=lambda path: path.name):
        match = re.fullmatch(pattern, path.stem)
        if match is not None:
            files.append((path, match.groups()))
    if not files:
        raise MissingTableError(f"{folder}: no {phase} table; expected {need} in it")
    return files


def _columns(path: Path, columns: Sequence[Column]) -> list[Floats]:
    read = read_columns(path, columns)
    return [read[column.name].astype(np.float64) for column in columns]


def _given_columns(label: str, given: Mapping[str, Any], columns: Sequence[Column]) -> list[Floats]:
    """Return columns in memory as floats, with the checks of :func:`read_columns`."""
    missing = [column.name for column in columns if column.name not in given]
    if missing:
        raise TableError(f"{label}: missing column {', '.join(missing)}; it has {', '.join(given) or 'none'}")
    arrays = []
    for column in columns:
        try:
            array = np.asarray(given[column.name], np.float64)
        except (TypeError, ValueError):
            array = np.full(1, np.nan)
        if array.ndim != 1 or not len(array):
            raise TableError(f"{label}, column {column.name}: need a list of at least one number")
        wrong = ~np.isfinite(array) | (array < column.minimum)
        if column.kind == "int":
            wrong |= array != np.floor(array)
        if wrong.any():
            row = int(np.argmax(wrong))
            what = "whole" if column.kind == "int" else "finite"
            cell = "not a number" if np.isnan(array[row]) else f"{array[row]:g}"
            raise TableError(
                f"{label}, row {row + 1}, column {column.name}: found {cell}, "
                f"need a {what} number of at least {column.minimum}"
            )
        arrays.append(array)
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(f"{c.name} {len(a)}" for c, a in zip(columns, arrays, strict=True))
        raise TableError(f"{label}: columns differ in length: {lengths}")
    return arrays


# -- packing -----------------------------------------------------------------------------------


def _packed(
    gemm: tuple[str, list[Floats]],
    prefill: Sequence[tuple[str, str, list[Floats]]],
    decode: Sequence[tuple[tuple[str, int], str, list[Floats]]],
) -> RooflineV2Tables:
    label, (m, n, k, mfu) = gemm
    _refuse_repeats(label, (m, n, k))
    pairs, first, pair_of_row = np.unique(np.stack([k, n], 1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rows = [pair_of_row.reshape(-1) == pair for pair in order]
    for _, label, columns in (*prefill, *decode):
        _refuse_repeats(label, columns[:-1])
    blocks = [_curve_block(m[own], mfu[own]) for own in rows]
    blocks += [_curve_block(*columns) for _, _, columns in prefill]
    blocks += [_grid_block(*columns) for _, _, columns in decode]
    at = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
    gemm_at, prefill_at, decode_at = np.split(at[:-1], [len(rows), len(rows) + len(prefill)])
    return RooflineV2Tables(
        attn_configs=tuple(shape for shape, _, _ in prefill),
        arena=np.concatenate(blocks),
        prefill_at=prefill_at,
        decode_at={key: int(place) for (key, _, _), place in zip(decode, decode_at, strict=True)},
        gemm_k=np.ascontiguousarray(pairs[order, 0]),
        gemm_n=np.ascontiguousarray(pairs[order, 1]),
        gemm_at=gemm_at,
    )


def _refuse_repeats(label: str, axes: Sequence[Floats]) -> None:
    points = np.stack(axes, 1)
    _, first = np.unique(points, axis=0, return_index=True)
    if len(first) < len(points):
        row = int(np.setdiff1d(np.arange(len(points)), first)[0])
        at = " x ".join(f"{x:g}" for x in points[row])
        raise TableError(f"{label}, row {row + 1}: the point {at} is a duplicate; keep one of them")


def _padded(axis: Floats) -> Floats:
    return np.append(axis, axis[-1] + 1.0)


def _curve_block(x: Floats, mfu: Floats) -> Floats:
    order = np.argsort(x)
    filled = mfu >= LEAST_MFU
    nodes = [_padded(x[order]), mfu[order], mfu[order[-1:]]]
    return np.concatenate([[len(x) + 1, filled.sum()], *nodes, x[filled], mfu[filled]])


def _grid_block(batch: Floats, kv: Floats, mfu: Floats) -> Floats:
    batch_axis, i = np.unique(batch, return_inverse=True)
    kv_axis, j = np.unique(kv, return_inverse=True)
    grid = np.zeros((len(batch_axis), len(kv_axis)))
    grid[i, j] = mfu
    cells = np.pad(grid, ((0, 1), (0, 1)), mode="edge")
    filled = mfu >= LEAST_MFU
    header = [len(cells), cells.shape[1], filled.sum()]
    axes = [_padded(batch_axis), _padded(kv_axis)]
    return np.concatenate([header, *axes, cells.reshape(-1), batch[filled], kv[filled], mfu[filled]])


LARGEST_SIZE = 2**31


def prefill_mfu(tables: RooflineV2Tables, attn_config: Any, seq_len: Any) -> Floats:
    """Return the MFU of prefill attention: linear in seq_len, constant outside the measured lengths.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    attn_config : str or array_like of str
        Head shape with a prefill table, ``<num_heads>-<num_kv_heads>-<head_dim>``.
    seq_len : int or array_like of int
        Tokens, at least 0.

    Returns
    -------
    ndarray of float64
        Array of the broadcast shape.

    Raises
    ------
    LookupInputError
        If a size is not an integer of at least 0, or shapes do not broadcast.
    MissingTableError
        If a head shape has no table; the message lists those with one.
    """
    places = dict(zip(tables.attn_configs, tables.prefill_at, strict=True))
    names, which = _shapes(attn_config)
    at = np.array([_known(places, name, "prefill") for name in names], np.int64)[which]
    (at, x), shape = _broadcast(attn_config=at, seq_len=size_array("seq_len", seq_len))
    out = np.empty(len(x))
    loops.curve_mfus(tables.arena, at, x.astype(np.float64), out)
    return out.reshape(shape)


def decode_mfu(tables: RooflineV2Tables, attn_config: Any, batch_size: Any, kv_len: Any, tp: Any) -> Floats:
    """Return the MFU of decode attention: bilinear in batch_size and kv_len, constant outside the range.

    An unmeasured cell counts as 0. If the result is below 1e-4, the nearest row that is not is used instead,
    by distance in (batch_size, kv_len), and on a tie the first in the file.

    Result and errors are those of :func:`prefill_mfu`.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    attn_config : str or array_like of str
        Head shape with a decode table, before tensor parallelism.
    batch_size, kv_len : int or array_like of int
        Sequences and tokens, at least 0.
    tp : int or array_like of int
        Tensor-parallel size; the nearest measured one is used, on a tie the smaller.
    """
    tps, tp_of = np.unique(size_array("tp", tp, minimum=1), return_inverse=True)
    shapes, shape_of = _shapes(attn_config)
    # one search per pair of names, not per element
    at = np.array([[decode_at(tables, shape, int(t)) for t in tps] for shape in shapes], np.int64)
    at = at.reshape(len(shapes), len(tps))
    (i, j, batch, kv), shape = _broadcast(
        attn_config=shape_of,
        tp=tp_of.reshape(np.shape(tp)),
        batch_size=size_array("batch_size", batch_size),
        kv_len=size_array("kv_len", kv_len),
    )
    out = np.empty(len(batch))
    loops.grid_mfus(tables.arena, at[i, j], batch.astype(np.float64), kv.astype(np.float64), out)
    return out.reshape(shape)


def gemm_mfu(tables: RooflineV2Tables, m: Any, k: Any, n: Any) -> Floats:
    """Return the MFU of a GEMM: linear in m for the nearest measured (k, n) at least as large.

    If there is none, the largest measured (k, n) is used. m is clamped to the measured range.

    Result and errors are those of :func:`prefill_mfu`.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    m, k, n : int or array_like of int
        Tokens, inputs, outputs; at least 0.
    """
    given = {name: size_array(name, value) for name, value in (("m", m), ("k", k), ("n", n))}
    flat, shape = _broadcast(**given)
    out = np.empty(len(flat[0]))
    m, k, n = (x.astype(np.float64) for x in flat)
    at = np.empty(len(out), np.int64)
    pairs = (tables.gemm_k, tables.gemm_n, tables.gemm_at)
    loops.gemm_mfus(tables.arena, pairs, m, k, n, at, out)
    return out.reshape(shape)


def nearest_attention(tables: RooflineV2Tables, num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    """Return the head shape whose tables serve a model: its own, or the nearest with a prefill table.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    num_heads, num_kv_heads, head_dim : int
        The model's head shape, before tensor parallelism.

    Returns
    -------
    str
        The attn_config nearest in (num_heads, num_kv_heads, head_dim), on a tie the first by file name.

    Raises
    ------
    LookupInputError
        If a size is not an integer of at least 1.
    """
    target = []
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        size = size_array(name, value, minimum=1)
        if size.ndim:
            raise LookupInputError(f"{name} must be one integer, got {shown(value)}")
        target.append(int(size))

    def distance(shape: str) -> int:
        have = (int(part) for part in shape.split("-"))
        return sum((a - b) ** 2 for a, b in zip(have, target, strict=True))

    return min(tables.attn_configs, key=distance)


def decode_at(tables: RooflineV2Tables, attn_config: str, tp: int) -> int:
    """Return the index of the decode grid for a head shape at a tensor-parallel size."""
    measured = {have: at for (shape, have), at in tables.decode_at.items() if shape == attn_config}
    if not measured:
        _known(dict.fromkeys((shape for shape, _ in tables.decode_at), 0), attn_config, "decode")
    return measured[min(measured, key=lambda have: (abs(have - tp), have))]


def size_array(name: str, value: Any, minimum: int = 0) -> Array:
    """Return the integers of an argument as an array."""
    array = int_array(name, value, LookupInputError)
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if array.min() < minimum or array.max() > LARGEST_SIZE:
        wrong = array[(array < minimum) | (array > LARGEST_SIZE)].flat[0]
        raise LookupInputError(f"{name} must be at least {minimum} and at most 2**31, got {wrong}")
    return array.astype(np.int64)


def _known(known: dict[str, int], shape: str, phase: str) -> int:
    if shape not in known:
        raise MissingTableError(
            f"no {phase} table of attn_config {shown(shape)}; valid: {', '.join(known)}; "
            "nearest_attention() returns the nearest"
        )
    return known[shape]


def _shapes(attn_config: Any) -> tuple[list[str], Array]:
    """Return the distinct head shapes of an argument, and which of them each element has."""
    try:
        array = np.asarray(attn_config)
    except (TypeError, ValueError):
        array = np.array([0])
    if array.dtype.kind == "O" and all(isinstance(name, str) for name in array.flat):
        array = array.astype(np.str_)
    if array.dtype.kind != "U" and array.size:
        raise LookupInputError(f"attn_config must be a name or names, got {shown(attn_config)}")
    names, which = np.unique(array, return_inverse=True)
    return [str(name) for name in names], which.reshape(array.shape)


def _broadcast(**given: Array) -> tuple[list[Array], tuple[int, ...]]:
    """Return all arguments flat with one length, and the shape of the result."""
    shape = common_shape({name: a.shape for name, a in given.items()}, LookupInputError)
    return [np.ascontiguousarray(np.broadcast_to(a, shape)).reshape(-1) for a in given.values()], shape
