"""Grouped-query attention over a KV cache: prefill and decode; encoder attention without a mask.

Each head shape and KV dtype has a grid over batch and length; a head shape that was not measured is borrowed
(:mod:`fastroof.operators.attention_grids`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, KV_DTYPE, ORIGIN_MODELLED, Column
from fastroof.compiled.layout import FORM_DECODE_RATE, FORM_PREFILL_RATE
from fastroof.config.gpu import GpuSpec
from fastroof.operators import external_rows as external
from fastroof.operators.attention_blocks import PlannedAttention
from fastroof.operators.attention_grids import AttentionOperator, attention_variance
from fastroof.operators.attention_work import (
    BATCH,
    DECODE_AXES,
    PREFILL_ABOUT,
    PREFILL_AXES,
    SEQ_LEN,
    HeadShape,
    attention_bytes,
    check_kv_len,
    decode_attention_flops,
    pairs_within,
    prefill_flops_conventions,
    prefix_bound_us,
    prefix_within,
)
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    RowSource,
    as_floats,
)
from fastroof.pack.grids import BatchBound
from fastroof.uncertainty.leave_one_out import PREFIX
from fastroof.units import US_PER_S

_WINDOWS: Final = ((128, 64), (1024, 256), (8192, 128))
"""Windows of published models, and their head_dim."""

Grids = tuple[HoldoutGrid, ...]


def _judged(operator: str, kept: Mapping[str, tuple[int, ...]], **only: int) -> tuple[Grids, Grids]:
    """Hold-outs and coverages: full attention of head_dim 128, also on a coarse grid, and windows."""
    full = {"head_dim": 128, "window": 0}
    windows = [HoldoutGrid(operator, f"window {w}", {}, {"head_dim": d, "window": w}) for w, d in _WINDOWS]
    coarse = HoldoutGrid(operator, "coarse", kept, full | only)
    return (
        (coarse, HoldoutGrid(operator, "every second", {}, full), *windows),
        (HoldoutGrid(operator, "head_dim 128", {}, full), *windows),
    )


# -- rows of external programs ---------------------------------------------------------------------


_PACKAGE_COLUMNS: Final = (
    *external.size_columns("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "beam_width"),
    *external.size_columns("step", minimum=0),
    *external.text_columns("attn_dtype", "kv_cache_dtype"),
    *external.MEASURED,
)
_PACKAGE_OPTIONAL: Final = (*external.size_columns("window_size", minimum=0), *external.RUN)


def _package_rows(raw: external.Raw) -> external.ExternalRows:
    # The schema's attention computes in bf16 for every KV dtype.
    out = external.others("computes in", external.dtype_names(raw["attn_dtype"]), ("bf16",))
    return external.package_rows(
        raw,
        "head_dim",
        "batch_size",
        kv_dtype="kv_cache_dtype",
        num_q_heads="num_heads",
        num_kv_heads="num_key_value_heads",
        window=raw.get("window_size", np.zeros_like(raw["batch_size"])),
        kv_len=raw["isl"] + raw["step"],
    ).without(out | {"beam search": raw["beam_width"] > 1})


def _package_prefill(raw: external.Raw) -> external.ExternalRows:
    return _package_rows(raw).with_columns(q_len=raw["isl"])


def _package_decode(raw: external.Raw) -> external.ExternalRows:
    return _package_rows(raw).without({"more than one new token": raw["isl"] > 1})


def _tree_rows(read: external.Raw, heads: external.Heads) -> dict[str, Array]:
    return external.tree_attention(read, heads, ("num_q_heads", "num_kv_heads", "head_dim"), window=0)


# -- operators -------------------------------------------------------------------------------------


class AttentionPrefill(PlannedAttention):
    """Causal attention of prompts or chunks: a grid of (batch, q_len); a prefix is priced by its roofline."""

    name = "attention_prefill"
    rank = 20
    summary = "Causal attention of whole prompts or chunks."
    about = PREFILL_ABOUT
    axes = PREFILL_AXES
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, "kv_dtype": "bf16", "window": 0}
    equal_axes: ClassVar[Mapping[str, str]] = {"kv_len": "q_len"}
    is_additive = False
    length_axis = "q_len"
    rate_form = FORM_PREFILL_RATE
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"attention_prefill": DatasheetClass(11.0, 0.50)}
    holdouts, coverages = _judged(name, {"q_len": (1024, 4096, 8192, 16384)}, batch_size=1)
    package_files = (
        external.PackageFile(
            "attention", "context_attention_perf", _PACKAGE_COLUMNS, _package_prefill, _PACKAGE_OPTIONAL
        ),
    )
    tree_files = (external.attention_file("mha", "prefill", (DTYPE, SEQ_LEN), _tree_rows),)

    def q_len(self, columns: Columns) -> Array:
        """New tokens of each sequence."""
        return columns["q_len"]

    def flops_conventions(self, columns: Columns) -> dict[str, Floats]:
        """FLOPs by each convention of published files for the causal triangle."""
        return prefill_flops_conventions(columns, columns["head_dim"], self.flops(columns))

    def independent_axes(self, columns: Columns) -> dict[str, Array]:
        """Context length instead of kv_len."""
        context_len = columns["kv_len"] - columns["q_len"]
        return {"batch_size": columns["batch_size"], "q_len": columns["q_len"], "context_len": context_len}

    def bound(self, shape: HeadShape, gpu: GpuSpec, launch_us: float) -> BatchBound:
        """B against (batch, q_len), without a prefix; linear beyond the window."""
        flops_us = US_PER_S / gpu.peak("bf16")
        one, two = (float(shape.flops(q, q)) for q in (1, 2))
        square = (two - 2.0 * one) / 2.0
        token_us = float(shape.moved_bytes(1, 1)) * US_PER_S / gpu.hbm_bytes_per_s
        slope = (one - square) * flops_us + token_us
        beyond_us = float(shape.flops(1, shape.window)) * flops_us + token_us
        return BatchBound(launch_us, square * flops_us, slope, 0.0, shape.window or math.inf, beyond_us)

    def sequence_bytes(self, shape: HeadShape) -> tuple[float, float]:
        """Zero, and a query, an output, keys and values."""
        return 0.0, float(shape.moved_bytes(1, 1))

    def mfu_work(self, batch: Any, length: Any, window: float = math.inf) -> Any:
        """Causal (query, token) pairs; a window's width of pairs for each query beyond it."""
        within = np.minimum(length, window)
        return batch * (within * (within + 1.0) * 0.5 + (length - within) * within)

    def equal_work(self, batch: Floats, length: Floats, window: float) -> tuple[Floats, Floats]:
        """Prompts longer than the window become shorter ones with as many tokens and pairs."""
        alike = 2.0 * pairs_within(length, window) / np.maximum(length, 1.0) - 1.0
        alike = np.where(length > window, alike, length)
        return np.where(length > window, batch * length / np.maximum(alike, 1.0), batch), alike

    def prefix_us(self, tables: RowSource, shape: HeadShape) -> tuple[float, float]:
        """Roofline of the prefix, times latency / B of the longest measured sequence."""
        ratio = self.grid(tables, shape).longest_ratio
        pair_us, token_us = prefix_bound_us(shape, tables.gpu)
        return ratio * pair_us, ratio * token_us

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up (batch, q_len, kv_len): the call without prefix plus the price of the prefix."""
        from fastroof.compiled import points

        batch, q_len, kv_len = sizes
        out, mfu, origin = answers
        table = self.ready(tables, key)
        self.own_us(table, method, (batch, q_len), out, origin)
        window = key[4]
        if window:
            pairs, tokens = prefix_within(q_len, kv_len, window)
            out += batch * (table.prefix_us[0] * pairs + table.prefix_us[1] * tokens)
            mfu[:] = (self.mfu_work(batch, q_len, window) + batch * pairs) * table.unit_us / out
            origin[kv_len > q_len] = ORIGIN_MODELLED
            good = bool((kv_len >= q_len).all())
        else:
            prices = (*table.prefix_us, table.unit_us)
            good = points.prefill_us_and_mfu(batch, q_len, kv_len, prices, out, mfu, origin)
        if not good:
            check_kv_len(q_len, kv_len)

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error: that of the grid on its part, that of the price on the prefix."""
        batch, q_len, kv_len = sizes
        shape = HeadShape(*key)
        variance = attention_variance(self.local_errors(tables, shape), batch, q_len)
        pair_us, token_us = self.prefix_us(tables, shape)
        if shape.window:
            pairs, tokens = prefix_within(q_len, kv_len, shape.window)
            prefix_us = batch * (pair_us * pairs + token_us * tokens)
        else:
            prefix_us = batch * (kv_len - q_len) * (pair_us * q_len + token_us)
        own_us = latency_us - prefix_us
        us2: Any = variance * own_us**2 + (PREFIX * prefix_us) ** 2
        return np.asarray(np.sqrt(us2) / latency_us)


class AttentionDecode(PlannedAttention):
    """Paged attention of one new token per sequence: a grid of (batch, kv_len)."""

    name = "attention_decode"
    rank = 30
    summary = "Paged attention of one new token per sequence."
    axes = DECODE_AXES
    defaults: ClassVar[Mapping[str, Any]] = {"kv_dtype": "bf16", "window": 0}
    is_additive = True
    length_axis = "kv_len"
    rate_form = FORM_DECODE_RATE
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"attention_decode": DatasheetClass(11.0, 0.87)}
    holdouts, coverages = _judged(
        name,
        {
            "batch_size": (1, 16, 32, 64, 128, 256, 512),
            "kv_len": (1024, 4096, 8192, 16384, 32768, 65536, 131072),
        },
    )
    package_files = (
        external.PackageFile(
            "attention", "generation_attention_perf", _PACKAGE_COLUMNS, _package_decode, _PACKAGE_OPTIONAL
        ),
    )
    tree_files = (external.attention_file("mha", "decode", (DTYPE, KV_DTYPE, *axes), _tree_rows),)

    def bound(self, shape: HeadShape, gpu: GpuSpec, launch_us: float) -> BatchBound:
        """B against (batch, kv_len); constant beyond the window."""
        bytes_us = US_PER_S / gpu.hbm_bytes_per_s
        fixed, one = self.sequence_bytes(shape)
        slope = float(shape.flops(1, 1)) * (US_PER_S / gpu.peak("bf16")) + (one - fixed) * bytes_us
        return BatchBound(launch_us, 0.0, slope, fixed * bytes_us, shape.window or math.inf)

    def sequence_bytes(self, shape: HeadShape) -> tuple[float, float]:
        """A query and an output, and these with one key and value."""
        return float(shape.moved_bytes(1, 0)), float(shape.moved_bytes(1, 1))

    def mfu_work(self, batch: Any, length: Any, window: float = math.inf) -> Any:
        """One query per sequence."""
        return batch * np.minimum(length, window)

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up (batch, kv_len)."""
        from fastroof.compiled import points

        batch, kv_len = sizes
        out, mfu, origin = answers
        table = self.ready(tables, key)
        self.own_us(table, method, (batch, kv_len), out, origin)
        points.decode_mfu(batch, np.minimum(kv_len, key[4] or math.inf), table.unit_us, out, mfu)


ATTENTION_PREFILL: Final = AttentionPrefill()
ATTENTION_DECODE: Final = AttentionDecode()
ATTENTION: Final[Mapping[str, PlannedAttention]] = {o.name: o for o in (ATTENTION_PREFILL, ATTENTION_DECODE)}
"""Operators that plans look up on a grid, by name."""


def _package_encoder(raw: external.Raw) -> external.ExternalRows:
    sizes = {"num_q_heads": "num_heads", "num_kv_heads": "num_heads", "kv_len": "isl"}
    window = np.zeros_like(raw["num_heads"])
    rows = external.package_rows(raw, "head_dim", "batch_size", kv_dtype="attn_dtype", window=window, **sizes)
    return external.ExternalRows(
        rows.columns, external.others("computes in", rows.columns["kv_dtype"], ("bf16",))
    )


class EncoderAttention(AttentionOperator):
    """Attention without a mask: B is quadratic in a sequence's tokens."""

    name = "encoder_attention"
    rank = 36
    summary = "Attention of an encoder: no mask, no cache."
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens of each sequence, all of them new"))
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, "kv_dtype": "bf16"}
    constants: ClassVar[Mapping[str, Any]] = {"window": 0}
    is_additive = False
    length_axis = "kv_len"
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"encoder_attention": DatasheetClass(7.7, 0.47)}
    holdouts = (HoldoutGrid("encoder_attention", "every second", {}, {"window": 0}),)
    coverages = (HoldoutGrid("encoder_attention", "all", {}, {"window": 0}),)
    package_files = (
        external.PackageFile(
            "encoder_attention",
            "encoder_attention_perf",
            (
                *external.size_columns("batch_size", "isl", "num_heads", "head_dim"),
                *external.text_columns("attn_dtype"),
                *external.MEASURED,
            ),
            _package_encoder,
        ),
    )

    def flops(self, columns: Columns) -> Floats:
        """``4 nh dh S^2`` per sequence: the full square."""
        tokens, batch = as_floats(columns["kv_len"]), columns["batch_size"]
        return decode_attention_flops(columns["num_q_heads"], columns["head_dim"], tokens, tokens * batch)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Queries, keys, values and outputs of every token once."""
        heads = (columns["num_q_heads"], columns["num_kv_heads"], columns["head_dim"])
        tokens = columns["kv_len"]
        return attention_bytes(*heads, tokens, tokens, columns["batch_size"])

    def bound(self, shape: HeadShape, gpu: GpuSpec, launch_us: float) -> BatchBound:
        """B against (batch, tokens)."""
        square = float(decode_attention_flops(shape.num_q_heads, shape.head_dim, 1, 1)) / gpu.peak("bf16")
        a_token = float(shape.moved_bytes(1, 1))
        return BatchBound(launch_us, square * US_PER_S, a_token / gpu.hbm_bytes_per_s * US_PER_S, 0.0)

    def mfu_work(self, batch: Any, length: Any, window: float = math.inf) -> Any:
        """The full square."""
        return batch * (length * length)

    def look_up(
        self, tables: RowSource, method: str, key: Key, sizes: list[Floats], answers: Answers
    ) -> None:
        """Look up (batch, tokens)."""
        from fastroof.compiled.points import gemm_mfu

        batch, tokens = sizes
        out, mfu, origin = answers
        table = self.ready(tables, key)
        self.own_us(table, method, (batch, tokens), out, origin)
        gemm_mfu(batch, tokens, tokens, table.unit_us, out, mfu)


ENCODER_ATTENTION: Final = EncoderAttention()

OPERATORS: Final = (
    ATTENTION_PREFILL,
    ATTENTION_DECODE,
    ENCODER_ATTENTION,
)
