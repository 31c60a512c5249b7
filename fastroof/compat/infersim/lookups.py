"""InferSim's lookups of MFU and latency, in bulk."""

from __future__ import annotations

import numpy.typing as npt

from fastroof.compat.infersim import rows
from fastroof.compat.infersim.query import Query, Result, Sizes, attention_kind, checked_phase
from fastroof.compat.infersim.tree import KV_DTYPES, InfersimTables
from fastroof.compiled.compat_infersim import EMPTY_BLOCK
from fastroof.errors import LookupInputError, MissingTableError

__all__ = ["attn_decode_mfu", "attn_prefill_mfu", "gdn_latency_us", "gemm_mfu", "grouped_gemm_mfu"]


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
    strict: bool = False,
) -> Result:
    r"""MFU of decode attention: the measured row nearest in ``|batch_size| + |kv_len|``.

    Every argument but ``strict`` may be an array; arrays broadcast.

    Parameters
    ----------
    tables : InfersimTables
        What :func:`load` returned.
    device : str
        The GPU, in any case.
    num_heads : int
        Query heads of the model, before tensor parallelism.
    batch_size, kv_len : int
        Requests, and tokens that each attends to.
    num_kv_heads, head_dim : int
        For MHA and GQA: the KV heads of the model and their width.
    kv_lora_rank, qk_rope_head_dim : int
        For MLA, in place of ``num_kv_heads`` and ``head_dim``: compressed and rotary width.
    tp_size : int
        GPUs that share the heads; a remainder is dropped.
    fp8_kv : bool
        Whether the KV cache is FP8.
    strict : bool
        Whether to raise where InferSim falls back.

    Returns
    -------
    float or ndarray of float64
        MFU, as InferSim rounds it. Without a file for the heads, the device's default MFU.

    Raises
    ------
    MissingTableError
        If the file has no row of the KV dtype (InferSim raises too), or, if strict, there is no file.
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
    mla, pair = attention_kind(
        {"num_kv_heads": num_kv_heads, "head_dim": head_dim},
        {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim},
    )
    query = Query(
        tables,
        device,
        num_heads=num_heads,
        **pair,
        tp_size=tp_size,
        batch_size=batch_size,
        kv_len=kv_len,
        fp8_kv=fp8_kv,
    )
    kind = "mla/decode" if mla else "mha/decode"
    q = query.sizes
    middle, last = (q[name] for name in pair)
    heads = rows.shared_heads(mla, q["num_heads"], middle, last, q["tp_size"])
    row = rows.attn_decode_rows(tables, kind, query.device, heads, q["fp8_kv"], q["batch_size"], q["kv_len"])
    empty = row == EMPTY_BLOCK
    if empty.any():
        i = int(empty.argmax())
        raise MissingTableError(
            f"{query.path(kind, heads, i)} has no rows of kv_dtype {KV_DTYPES[q['fp8_kv'][i]]}"
        )
    query.refuse_fallbacks(strict, row, kind, heads, ())
    return query.shaped(rows.mfu_of(tables.blocks[kind], row, query.default_mfu))


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
    strict: bool = False,
) -> Result:
    """MFU of prefill attention: the last measured ``seq_len`` that is not longer.

    Every argument but ``strict`` may be an array; arrays broadcast.

    Parameters
    ----------
    tables, device, num_heads, num_kv_heads, head_dim, tp_size, strict
        As in :func:`attn_decode_mfu`.
    seq_len : int
        Tokens of the prompt.
    qk_nope_head_dim, qk_rope_head_dim : int
        For MLA, in place of ``num_kv_heads`` and ``head_dim``: widths without and with rotation.

    Returns
    -------
    float or ndarray of float64
        MFU. Without a file for the heads 0.9; under its first row the device's default MFU.

    Raises
    ------
    MissingTableError
        If strict and InferSim would fall back.
    LookupInputError
        If an argument is not a positive integer, or the heads of neither kind of attention are given.
    GpuError
        If the device has no constants.
    """
    mla, pair = attention_kind(
        {"num_kv_heads": num_kv_heads, "head_dim": head_dim},
        {"qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim},
    )
    query = Query(tables, device, num_heads=num_heads, **pair, tp_size=tp_size, seq_len=seq_len)
    kind = "mla/prefill" if mla else "mha/prefill"
    q = query.sizes
    middle, last = (q[name] for name in pair)
    heads = rows.shared_heads(mla, q["num_heads"], middle, last, q["tp_size"])
    row = rows.attn_prefill_rows(tables, kind, query.device, heads, q["seq_len"])
    query.refuse_fallbacks(strict, row, kind, heads, ("seq_len",))
    return query.shaped(rows.prefill_mfu_of(tables.blocks[kind], row, query.default_mfu))


def gemm_mfu(
    tables: InfersimTables,
    device: str | npt.ArrayLike,
    m: Sizes,
    k: Sizes,
    n: Sizes,
    *,
    strict: bool = False,
) -> Result:
    r"""MFU of a GEMM: the nearest (k, n) that is not smaller, then the last m that is not larger.

    Parameters
    ----------
    tables, device, strict
        As in :func:`attn_decode_mfu`.
    m, k, n : int or array of int
        Rows (tokens), inputs, outputs.

    Returns
    -------
    float or ndarray of float64
        MFU; the device's default where no row answers.

    Raises
    ------
    MissingTableError
        If strict and InferSim would fall back.
    LookupInputError
        If an argument is not a positive integer.
    GpuError
        If the device has no constants.

    Examples
    --------
    >>> from fastroof.compat.infersim import read_files
    >>> tables = read_files({"gemm/h20/data.csv": "m,k,n,latency_us,mfu\n16,4096,6144,60.5,0.1234\n"})
    >>> gemm_mfu(tables, "H20", [8, 16, 32], 4000, 6144)
    array([0.6  , 0.123, 0.123])
    """
    query = Query(tables, device, m=m, k=k, n=n)
    q = query.sizes
    row = rows.gemm_rows(tables, query.device, q["m"], q["k"], q["n"])
    query.refuse_fallbacks(strict, row, "gemm", (), ("k", "n", "m"))
    return query.shaped(rows.mfu_of(tables.blocks["gemm"], row, query.default_mfu))


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
    strict: bool = False,
) -> tuple[Result, Result]:
    """MFU of the experts' up and down projections.

    Of the rows of exactly this layer, prefill takes the last that has no more tokens, decode the
    nearest. Every size may be an array; arrays broadcast.

    Parameters
    ----------
    tables, device, strict
        As in :func:`attn_decode_mfu`.
    phase : {"prefill", "decode"}
        Which kernels: contiguous or masked.
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
        MFUs; the device's default where no row answers.

    Raises
    ------
    MissingTableError
        If strict and InferSim would fall back.
    LookupInputError
        If a size is not a positive integer, ``tp_size`` is over ``num_gpus``, or the phase is neither.
    GpuError
        If the device has no constants.
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
    row = rows.grouped_gemm_rows(tables, kind, query.device, layer, q["tokens_per_gpu"])
    query.refuse_fallbacks(strict, row, kind, (), tuple(q))
    blocks = tables.blocks[kind]
    up, down = (rows.mfu_of(blocks, row, query.default_mfu, projection) for projection in (0, 1))
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
    """Latency of a gated delta net's core: the nearest row, scaled linearly to the query, us.

    Every size may be an array; arrays broadcast. There is no fallback.

    Parameters
    ----------
    tables, device
        As in :func:`attn_decode_mfu`.
    phase : {"prefill", "decode"}
        Which kernels.
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
    MissingTableError
        If there is no file for the layer, where InferSim raises too.
    LookupInputError
        If a size is not a positive integer, or the phase is neither.
    GpuError
        If the device has no constants.
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
    row = rows.gdn_rows(tables, kind, query.device, tuple(layer), of_each)
    query.refuse_fallbacks(True, row, kind, tuple(layer), (), has_default=False)
    return query.shaped(rows.gdn_us_of(tables.blocks[kind], row, of_each))
