"""Roofline V2's lookups on broadcast arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.checks import shown
from fastroof.compat.roofline_v2.tables import RooflineV2Tables
from fastroof.compiled import compat_roofline_v2 as loops
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.run.arrays import int_array

__all__ = ["decode_at", "decode_mfu", "gemm_mfu", "nearest_attention", "prefill_mfu", "size_array"]


LARGEST_SIZE = 2**31


def prefill_mfu(tables: RooflineV2Tables, attn_config: Any, seq_len: Any) -> Floats:
    """MFU of prefill attention: linear in seq_len, held outside the measured lengths.

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
        Of the broadcast shape.

    Raises
    ------
    LookupInputError
        If a size is no integer of at least 0, or shapes do not broadcast.
    MissingTableError
        If a head shape has no table; lists those that have.
    """
    places = dict(zip(tables.attn_configs, tables.prefill_at, strict=True))
    names, which = _shapes(attn_config)
    at = np.array([_known(places, name, "prefill") for name in names], np.int64)[which]
    (at, x), shape = _broadcast(attn_config=at, seq_len=size_array("seq_len", seq_len))
    out = np.empty(len(x))
    loops.curve_mfus(tables.arena, at, x.astype(np.float64), out)
    return out.reshape(shape)


def decode_mfu(tables: RooflineV2Tables, attn_config: Any, batch_size: Any, kv_len: Any, tp: Any) -> Floats:
    """MFU of decode attention: bilinear in batch_size and kv_len, held outside the measured range.

    A cell that was not measured counts as 0. Where the result is below 1e-4 it is the nearest row's that
    is not, by distance in (batch_size, kv_len), the first in the file of a tie.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    attn_config : str or array_like of str
        Head shape with a decode table, before tensor parallelism.
    batch_size, kv_len : int or array_like of int
        Sequences and tokens, at least 0.
    tp : int or array_like of int
        Tensor-parallel size; one that was not measured takes the nearest, of a tie the smaller.

    Returns
    -------
    ndarray of float64
        Of the broadcast shape.

    Raises
    ------
    LookupInputError
        If a size is no integer of at least 0, tp is below 1, or shapes do not broadcast.
    MissingTableError
        If a head shape has no table; lists those that have.
    """
    tps, tp_of = np.unique(size_array("tp", tp, minimum=1), return_inverse=True)
    shapes, shape_of = _shapes(attn_config)
    # one search a pair of names, not one an element
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
    """MFU of a GEMM: linear in m for the nearest measured (k, n) that holds the wanted one.

    Where none does, the largest measured (k, n) serves. m is held inside the measured range.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    m, k, n : int or array_like of int
        Tokens, inputs, outputs; at least 0.

    Returns
    -------
    ndarray of float64
        Of the broadcast shape.

    Raises
    ------
    LookupInputError
        If a size is no integer of at least 0, or shapes do not broadcast.
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
    """Name the head shape whose tables serve a model: its own, or the nearest with a prefill table.

    Parameters
    ----------
    tables : RooflineV2Tables
        Loaded tables.
    num_heads, num_kv_heads, head_dim : int
        The model's head shape, before tensor parallelism.

    Returns
    -------
    str
        The attn_config nearest in (num_heads, num_kv_heads, head_dim), the first in file-name order of a tie.

    Raises
    ------
    LookupInputError
        If a size is no integer of at least 1.
    """
    wanted = []
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        size = size_array(name, value, minimum=1)
        if size.ndim:
            raise LookupInputError(f"{name} must be one integer, got {shown(value)}")
        wanted.append(int(size))

    def distance(shape: str) -> int:
        have = (int(part) for part in shape.split("-"))
        return sum((a - b) ** 2 for a, b in zip(have, wanted, strict=True))

    return min(tables.attn_configs, key=distance)


def decode_at(tables: RooflineV2Tables, attn_config: str, tp: int) -> int:
    """Place of the decode grid that serves a head shape at a tensor-parallel size."""
    measured = {have: at for (shape, have), at in tables.decode_at.items() if shape == attn_config}
    if not measured:
        _known(dict.fromkeys((shape for shape, _ in tables.decode_at), 0), attn_config, "decode")
    return measured[min(measured, key=lambda have: (abs(have - tp), have))]


def size_array(name: str, value: Any, minimum: int = 0) -> Array:
    """Integers of an argument as an array."""
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
            f"no {phase} table of attn_config {shown(shape)}; there are {', '.join(known)}: "
            "nearest_attention() names the nearest"
        )
    return known[shape]


def _shapes(attn_config: Any) -> tuple[list[str], Array]:
    """Distinct head shapes of an argument, and which one each of its elements is."""
    try:
        array = np.asarray(attn_config)
    except (TypeError, ValueError):
        raise LookupInputError(f"attn_config must be a name or names, got {shown(attn_config)}") from None
    if array.dtype.kind == "O" and all(isinstance(name, str) for name in array.flat):
        array = array.astype(np.str_)
    if array.dtype.kind != "U" and array.size:
        raise LookupInputError(f"attn_config must be a name or names, got {shown(attn_config)}")
    names, which = np.unique(array, return_inverse=True)
    return [str(name) for name in names], which.reshape(array.shape)


def _broadcast(**given: Array) -> tuple[list[Array], tuple[int, ...]]:
    """All arguments flat and of one length, and the shape of the answer."""
    try:
        shape = np.broadcast_shapes(*(a.shape for a in given.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {a.shape}" for name, a in given.items() if a.ndim)
        raise LookupInputError(f"shapes do not broadcast: {shapes}") from None
    return [np.ascontiguousarray(np.broadcast_to(a, shape)).reshape(-1) for a in given.values()], shape
