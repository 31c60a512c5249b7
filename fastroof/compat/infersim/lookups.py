"""InferSim's lookups of MFU and latency, for arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastroof.arrays import Array, Longs, Reals
from fastroof.checks import shown
from fastroof.compat.infersim.tree import KV_DTYPES, LARGEST, InfersimTables, file_path, gdn_us_of
from fastroof.compiled.compat_infersim import EMPTY_BLOCK
from fastroof.errors import GpuError, LookupInputError, MissingTableError
from fastroof.given_arrays import common_shape, is_masked, number_array, refused

Sizes = int | npt.ArrayLike
Result = float | Reals

PHASES: Final = ("prefill", "decode")


class Query:
    """Arguments of one lookup as flat int64 arrays of equal length."""

    def __init__(self, tables: InfersimTables, device: str | npt.ArrayLike, **sizes: Any) -> None:
        checked = {
            name: _flags(name, value) if name == "fp8_kv" else _sizes(name, value)
            for name, value in sizes.items()
        }
        numbers = device_numbers(tables, device)
        arrays = {"device": numbers, **checked}
        self._shape = common_shape({name: array.shape for name, array in arrays.items()}, LookupInputError)
        self._tables = tables
        self.device = self._flat(numbers)
        self.sizes = {name: self._flat(array) for name, array in checked.items()}

    def _flat(self, array: Array) -> Longs:
        return np.ascontiguousarray(np.broadcast_to(array, self._shape), np.int64).reshape(-1)

    @property
    def default_mfu(self) -> Reals:
        """InferSim's default MFU of each query's device."""
        return self._tables.hardware("default_mfu")[self.device]

    def shaped(self, values: Reals) -> Result:
        """Reshape results to the arguments' broadcast shape; a float if all were scalars."""
        return values.reshape(self._shape) if self._shape else float(values[0])

    def path(self, kind: str, in_name: Sequence[Longs], i: int) -> str:
        """Return the path of the file that answers query i."""
        sizes = [int(part[i]) for part in in_name]
        return f"{self._tables.root}/{file_path(kind, self._tables.devices[self.device[i]], sizes)}"


def device_numbers(tables: InfersimTables, device: str | npt.ArrayLike) -> Longs:
    """Return the numbers of devices by name."""
    names = _array("device", device)
    if names.dtype.kind != "U":
        texts = [one if isinstance(one, str) else shown(one) for one in names.reshape(-1).tolist()]
        names = np.array(texts, str).reshape(names.shape)
    try:
        # Arrow's encoding takes a tenth of the time of np.unique, which sorts
        encoded = pa.array(names.reshape(-1)).dictionary_encode()
    except UnicodeError:
        raise GpuError(f"device must be one of {', '.join(tables.gpus)}, got {shown(device)}") from None
    numbers = np.empty(len(encoded.dictionary), np.int64)
    for i, name in enumerate(encoded.dictionary.to_pylist()):
        if name.lower() not in tables.gpus:
            known = ", ".join(tables.gpus)
            raise GpuError(f"device must be one of {known}, got {name!r}; load(gpus=...) adds more")
        numbers[i] = tables.devices.index(name.lower())
    of_each: Longs = numbers[encoded.indices.to_numpy()]
    return of_each.reshape(names.shape)


def _attention(
    tables: InfersimTables,
    device: str | npt.ArrayLike,
    phase: str,
    mha: Mapping[str, Sizes | None],
    mla: Mapping[str, Sizes | None],
    **sizes: Sizes,
) -> tuple[str, Query, tuple[Longs, Longs, Longs]]:
    """Return the kind of file, the query, and the heads in the file's name: MLA's widths are not divided."""
    given = [{name: value for name, value in pair.items() if value is not None} for pair in (mha, mla)]
    if sorted(map(len, given)) != [0, 2]:
        names = [name for pair in given for name in pair]
        raise LookupInputError(
            f"give {' and '.join(mha)} for MHA and GQA, or {' and '.join(mla)} for MLA; "
            f"got {', '.join(names) or 'neither'}"
        )
    kind, pair = ("mla", given[1]) if given[1] else ("mha", given[0])
    query = Query(tables, device, num_heads=sizes.pop("num_heads"), **pair, **sizes)
    q = query.sizes
    middle, last = (q[name] for name in pair)
    heads = q["num_heads"] // q["tp_size"], middle if given[1] else middle // q["tp_size"], last
    return f"{kind}/{phase}", query, heads


def checked_phase(phase: str) -> str:
    """Return the phase if it is valid."""
    if not isinstance(phase, str) or phase not in PHASES:
        raise LookupInputError(f"phase must be prefill or decode, got {shown(phase)}")
    return phase


def _sizes(name: str, value: Any) -> Array:
    array = number_array(value)
    if array is None:
        _array(name, value)
        raise LookupInputError(f"{name} must hold integers of 1 to {LARGEST - 1}, {refused(value)}")
    if array.size and (array.dtype.kind not in "iu" or array.min() < 1 or array.max() >= LARGEST):
        raise LookupInputError(f"{name} must hold integers of 1 to {LARGEST - 1}, got {shown(value)}")
    return array


def _flags(name: str, value: Any) -> Array:
    array = _array(name, value)
    if array.size and (array.dtype.kind not in "biu" or array.min() < 0 or array.max() > 1):
        raise LookupInputError(f"{name} must be True or False, got {shown(value)}")
    return array


def _array(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise LookupInputError(f"{name} must be a scalar or an array, got {shown(value)}") from None
    if is_masked(type(value)):
        raise LookupInputError(f"{name} must be a scalar or an array, {refused(value)}")
    return array


def attn_decode_mfu(
    tables: InfersimTables,
    device: str | npt.ArrayLike,
    *,
    num_heads: Sizes,
    batch_size: Sizes,
    kv_len: Sizes,
    num_kv_heads: Sizes | None = None,
    head_dim: Sizes | None = None,
    kv_lora_rank: Sizes | None = None,
    qk_rope_head_dim: Sizes | None = None,
    tp_size: Sizes = 1,
    fp8_kv: bool | npt.ArrayLike = False,
) -> Result:
    r"""Return the MFU of decode attention: the measured row nearest in ``|batch_size| + |kv_len|``.

    Every argument may be an array; arrays broadcast.

    Parameters
    ----------
    tables : InfersimTables
        Tables from :func:`load`.
    device : str
        The GPU, case-insensitive.
    num_heads : int
        Query heads of the model, before tensor parallelism.
    batch_size, kv_len : int
        Requests, and tokens that each attends to.
    num_kv_heads, head_dim : int
        For MHA and GQA: the model's KV heads and their width.
    kv_lora_rank, qk_rope_head_dim : int
        For MLA, instead of ``num_kv_heads`` and ``head_dim``: compressed and rotary width.
    tp_size : int
        GPUs that share the heads; a remainder is dropped.
    fp8_kv : bool
        Whether the KV cache is FP8.

    Returns
    -------
    float or ndarray of float64
        MFU, as InferSim rounds it. Without a file for the heads, the device's default MFU.

    Raises
    ------
    MissingTableError
        If the file has no row of the KV dtype: InferSim raises too.
    LookupInputError
        If an argument is not a positive integer, or the heads of neither kind of attention are given.
    GpuError
        If the device has no constants.

    Examples
    --------
    >>> from fastroof.compat.infersim import read_files
    >>> text = "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu\nbf16,bf16,1,1024,9.95,0.0104\n"
    >>> tables = read_files({"mha/decode/h20/32-8-128.csv": text})
    >>> heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    >>> attn_decode_mfu(tables, "H20", **heads, batch_size=[1, 9], kv_len=999)
    array([0.01, 0.01])
    """
    kind, query, heads = _attention(
        tables,
        device,
        "decode",
        {"num_kv_heads": num_kv_heads, "head_dim": head_dim},
        {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim},
        num_heads=num_heads,
        tp_size=tp_size,
        batch_size=batch_size,
        kv_len=kv_len,
        fp8_kv=fp8_kv,
    )
    q = query.sizes
    row = tables.rows(kind, (query.device, *heads, q["fp8_kv"]), (q["batch_size"], q["kv_len"]))
    empty = row == EMPTY_BLOCK
    if empty.any():
        i = int(empty.argmax())
        raise MissingTableError(
            f"{query.path(kind, heads, i)} has no rows of kv_dtype {KV_DTYPES[q['fp8_kv'][i]]}"
        )
    return query.shaped(tables.mfu(kind, row, query.default_mfu))


def attn_prefill_mfu(
    tables: InfersimTables,
    device: str | npt.ArrayLike,
    *,
    num_heads: Sizes,
    seq_len: Sizes,
    num_kv_heads: Sizes | None = None,
    head_dim: Sizes | None = None,
    qk_nope_head_dim: Sizes | None = None,
    qk_rope_head_dim: Sizes | None = None,
    tp_size: Sizes = 1,
) -> Result:
    """Return the MFU of prefill attention: the last measured ``seq_len`` that is not longer.

    Every argument may be an array; arrays broadcast.

    Parameters
    ----------
    tables, device, num_heads, num_kv_heads, head_dim, tp_size
        As in :func:`attn_decode_mfu`.
    seq_len : int
        Tokens of the prompt.
    qk_nope_head_dim, qk_rope_head_dim : int
        For MLA, instead of ``num_kv_heads`` and ``head_dim``: widths without and with rotation.

    Returns
    -------
    float or ndarray of float64
        MFU. Without a file for the heads 0.9; below its first row the device's default MFU.

    Raises
    ------
    LookupInputError, GpuError
        As in :func:`attn_decode_mfu`.
    """
    kind, query, heads = _attention(
        tables,
        device,
        "prefill",
        {"num_kv_heads": num_kv_heads, "head_dim": head_dim},
        {"qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim},
        num_heads=num_heads,
        tp_size=tp_size,
        seq_len=seq_len,
    )
    row = tables.rows(kind, (query.device, *heads), (query.sizes["seq_len"],))
    return query.shaped(tables.mfu(kind, row, query.default_mfu))


def gemm_mfu(tables: InfersimTables, device: str | npt.ArrayLike, m: Sizes, k: Sizes, n: Sizes) -> Result:
    r"""Return the MFU of a GEMM: the nearest (k, n) that is not smaller, then the last m that is not larger.

    Parameters
    ----------
    tables, device
        As in :func:`attn_decode_mfu`.
    m, k, n : int or array of int
        Rows (tokens), inputs, outputs.

    Returns
    -------
    float or ndarray of float64
        MFU; the device's default if there is no such row.

    Raises
    ------
    LookupInputError, GpuError
        As in :func:`attn_decode_mfu`.

    Examples
    --------
    >>> from fastroof.compat.infersim import read_files
    >>> tables = read_files({"gemm/h20/data.csv": "m,k,n,latency_us,mfu\n16,4096,6144,60.5,0.1234\n"})
    >>> gemm_mfu(tables, "H20", [8, 16, 32], 4000, 6144)
    array([0.6  , 0.123, 0.123])
    """
    query = Query(tables, device, m=m, k=k, n=n)
    q = query.sizes
    row = tables.rows("gemm", (query.device, q["k"], q["n"]), (q["m"],))
    return query.shaped(tables.mfu("gemm", row, query.default_mfu))


def grouped_gemm_mfu(
    tables: InfersimTables,
    device: str | npt.ArrayLike,
    phase: str,
    *,
    num_experts: Sizes,
    topk: Sizes,
    hidden: Sizes,
    intermediate: Sizes,
    tokens_per_gpu: Sizes,
    num_gpus: Sizes = 1,
    tp_size: Sizes = 1,
) -> tuple[Result, Result]:
    """Return the MFUs of the experts' up and down projections.

    Among the rows of exactly this layer, prefill takes the last one with no more tokens, decode the
    nearest. Every size may be an array; arrays broadcast.

    Parameters
    ----------
    tables, device
        As in :func:`attn_decode_mfu`.
    phase : {"prefill", "decode"}
        Kernel type: contiguous or masked.
    num_experts, topk, hidden, intermediate : int
        The layer: experts, experts a token is routed to, width, width of one expert.
    tokens_per_gpu : int
        Tokens on each GPU.
    num_gpus : int
        GPUs that share the experts.
    tp_size : int
        GPUs that share one expert.

    Returns
    -------
    up, down : float or ndarray of float64
        MFUs; the device's default if there is no such row.

    Raises
    ------
    LookupInputError, GpuError
        As in :func:`attn_decode_mfu`; also if ``tp_size`` is over ``num_gpus``, or the phase is neither.
    """
    kind = f"grouped_gemm/{checked_phase(phase)}"
    query = Query(
        tables,
        device,
        num_experts=num_experts,
        num_gpus=num_gpus,
        topk=topk,
        hidden=hidden,
        intermediate=intermediate,
        tp_size=tp_size,
        tokens_per_gpu=tokens_per_gpu,
    )
    q = query.sizes
    over = q["tp_size"] > q["num_gpus"]
    if over.any():
        i = int(over.argmax())
        raise LookupInputError(
            f"tp_size must be at most num_gpus, got {q['tp_size'][i]} of {q['num_gpus'][i]}"
        )
    local_experts = q["num_experts"] // (q["num_gpus"] // q["tp_size"])
    layer = (
        q["num_experts"], q["num_gpus"], local_experts, q["topk"], q["hidden"],
        q["intermediate"] // q["tp_size"],
    )  # fmt: skip
    row = tables.rows(kind, (query.device, *layer), (q["tokens_per_gpu"],))
    up, down = (tables.mfu(kind, row, query.default_mfu, projection) for projection in (0, 1))
    return query.shaped(up), query.shaped(down)


def gdn_latency_us(
    tables: InfersimTables,
    device: str | npt.ArrayLike,
    phase: str,
    *,
    conv_kernel: Sizes,
    num_key_heads: Sizes,
    key_head_dim: Sizes,
    num_value_heads: Sizes,
    value_head_dim: Sizes,
    tokens: Sizes,
) -> Result:
    """Return the latency of a gated delta net's core: the nearest row, scaled linearly to the query, us.

    Every size may be an array; arrays broadcast. There is no fallback.

    Parameters
    ----------
    tables, device
        As in :func:`attn_decode_mfu`.
    phase : {"prefill", "decode"}
        Kernel type.
    conv_kernel, num_key_heads, key_head_dim, num_value_heads, value_head_dim : int
        The layer.
    tokens : int
        Tokens of the prompt in prefill, requests in decode.

    Returns
    -------
    float or ndarray of float64
        Latency, us.

    Raises
    ------
    MissingTableError, LookupInputError, GpuError
        As in :func:`grouped_gemm_mfu`, and if the layer has no file or no row: InferSim raises too.
    """
    kind = f"gdn/{checked_phase(phase)}"
    query = Query(
        tables,
        device,
        conv_kernel=conv_kernel,
        num_key_heads=num_key_heads,
        key_head_dim=key_head_dim,
        num_value_heads=num_value_heads,
        value_head_dim=value_head_dim,
        tokens=tokens,
    )
    *layer, of_each = query.sizes.values()
    row = tables.rows(kind, (query.device, *layer), (of_each,))
    if (row < 0).any():
        path = query.path(kind, tuple(layer), int((row < 0).argmax()))
        is_there = path.removeprefix(f"{tables.root}/") in tables.files
        raise MissingTableError(f"{path} has no rows" if is_there else f"no file {path}")
    return query.shaped(gdn_us_of(tables.blocks[kind], row, of_each))
