"""Compare sources of one GPU (figures of :mod:`fastroof.uncertainty.campaign`), and two sets of tables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.columns import KERNEL, LATENCY
from fastroof.errors import TableError
from fastroof.load.families import (
    PairedPoints,
    families_of,
    paired_points,
    region_sizes,
    requested_operators,
    rows_of_family,
)
from fastroof.load.family_checks import find_unsound
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.unsound import UnsoundFamily
from fastroof.operators.operator import Columns
from fastroof.operators.registry import OPERATORS
from fastroof.uncertainty.campaign import LONG, CampaignFigure, common_scale, engine_pair, scale_of

FEWEST_POINTS: Final = 40
"""Fewest common points of a campaign figure."""

COPIED: Final = 0.3
"""Share of bit-equal points from which two sources are copies of one campaign."""

FAMILY_WORDS: Final = ("dtype", "kv_dtype", "mode", "kind")
"""Text keys that separate families of campaigns; other ones name the work or are too many."""

LIBRARIES: Final = (
    (r"situ_as_silu", ""),
    (r"marlin", "marlin"),
    (r"flashinfer_trtllm|trtllm_?mha|trtllmdecode|trtllmprefill", "trtllm-gen"),
    (r"fa2$|flash_attn_2", "flash-attention 2"),
    (r"fa3$|fa3 paged|attention_v3", "flash-attention 3"),
    (r"fa4$|attention_v4", "flash-attention 4"),
    (r"fused_moe_triton$|_tritonexperts$|fused_experts \(triton\)", "fused_moe"),
    (r"deepgemm", "deepgemm"),
    (r"flashinfer_cutlass|torch_flow_cutlass", "cutlass"),
    (r"fidecode|fiprefill|^flashinfer( paged|$)|_flashinfer$", "flashinfer"),
    (r"cutlass(fp8)?(block)?_?scaled_?mm", "vllm cutlass"),
)
"""Patterns of kernel names and their libraries; an empty library is the engine's own. Triton attention and
custom
all-reduces belong to each engine: they have a common origin, but are up to 1.6 times apart."""

LINEAR: Final = ("gemm", "bf16", "cublas")
"""bf16 GEMMs are torch's linear in all three engines, under different names."""


def campaign_family(operator: str, words: Mapping[str, str]) -> str:
    """Name of a kernel's family in campaign figures."""
    text = [c.name for c in OPERATORS[operator].keys if c.name in FAMILY_WORDS]
    return " ".join(str(words[name]) for name in text)


def compare_sources(operator: str, gpu: str, tables: Sequence[MeasuredTable]) -> Iterator[CampaignFigure]:
    """Compare every two sources of an operator at their sound rows."""
    sound = [(one, sound_rows(one, [t for t in tables if t is not one])) for one in tables]
    for (one, is_sound), (other, is_sound_there) in itertools.combinations(sound, 2):
        a, b = one.some(is_sound), other.some(is_sound_there)
        if not a.num_rows or not b.num_rows:
            continue
        for family, points in same_kernels(a, b):
            for kernels, part in points.items():
                yield from _figures(family, gpu, kernels, part)
            if a.engine and b.engine and a.engine != b.engine and "any" in points:
                yield from _figures(family, gpu, engine_pair(a.engine, b.engine), points["any"])


def _figures(family: str, gpu: str, kernels: str, points: PairedPoints) -> Iterator[CampaignFigure]:
    if is_copy(points):
        return
    between_us = np.sqrt(points.a_us * points.b_us)
    is_long = between_us >= LONG * between_us.min()
    for length, part in (("short", ~is_long), ("long", is_long)):
        some = points.some(part)
        count = int(part.sum())
        if count >= FEWEST_POINTS:
            log_ratio = some.log_ratio
            common = common_scale(log_ratio, _octaves(some))
            scale = scale_of(log_ratio)
            yield CampaignFigure(points.operator, family, gpu, kernels, length, scale, common, 1, count)


def same_kernels(a: MeasuredTable, b: MeasuredTable) -> Iterator[tuple[str, dict[str, PairedPoints]]]:
    """Pair two sources' points by family: all, and those of the same library's kernels."""
    by_family: dict[str, list[dict[str, str]]] = {}
    for words, _ in families_of(a.operator, a.columns):
        by_family.setdefault(campaign_family(a.operator, words), []).append(words)
    for family, members in by_family.items():
        parts: dict[str, list[PairedPoints]] = {}
        for words in members:
            one, other = rows_of_family(a, words), rows_of_family(b, words)
            if one is None or other is None:
                continue
            of_one, of_other = _libraries(a, family, one), _libraries(b, family, other)
            for library in sorted(set(of_one)):
                left = _rows(one, of_one == library)
                for kernels, keep in (("same", of_other == library), ("any", np.full(len(of_other), True))):
                    if keep.any():
                        points = paired_points(a.operator, left, _rows(other, keep)).common()
                        parts.setdefault(kernels, []).append(points)
        joined = {kernels: _joined(points) for kernels, points in parts.items()}
        yield family, {kernels: points for kernels, points in joined.items() if len(points.a_us)}


def _libraries(table: MeasuredTable, family: str, columns: Columns) -> Array:
    """Library of each row's kernel; the source's own kernel name if it has no library."""
    if (table.operator, family) == LINEAR[:2]:
        return np.full(len(columns[LATENCY.name]), LINEAR[2], object)
    words = columns.get(KERNEL.name)
    prefix = f"{table.engine or table.source} "
    if words is None:
        return np.full(len(columns[LATENCY.name]), prefix, object)
    libraries = {word: _library(str(word)) or prefix + str(word) for word in set(words.tolist())}
    return np.array([libraries[word] for word in words.tolist()], object)


def _library(kernel: str) -> str:
    found = (name for pattern, name in LIBRARIES if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "")


def is_copy(points: PairedPoints) -> bool:
    """Whether two sources have the same campaign's rows, such as NCCL's in several engines."""
    return bool(np.mean(points.log_ratio == 0.0) > COPIED)


def sound_rows(table: MeasuredTable, siblings: Sequence[MeasuredTable]) -> Bools:
    """Rows of a table outside unsound families."""
    keep = np.full(table.num_rows, True)
    found: tuple[UnsoundFamily, ...] = find_unsound(table, siblings)
    for family in found:
        if not family.serves:
            keep &= ~family.holds(table.columns)
    return keep


def _rows(columns: Columns, keep: Bools) -> dict[str, Array]:
    return {name: values[keep] for name, values in columns.items()}


def _joined(parts: list[PairedPoints]) -> PairedPoints:
    columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in parts[0].columns}
    a_us, b_us = (np.concatenate([getattr(p, side) for p in parts]) for side in ("a_us", "b_us"))
    return PairedPoints(parts[0].operator, columns, a_us, b_us)


def _octaves(points: PairedPoints) -> Longs:
    """Octave of each point's first size: tokens, batch or message."""
    sizes = next(iter(region_sizes(points.operator, points.columns).values()))
    return np.asarray(np.floor(np.log2(sizes)), np.int64)


FAR_APART: Final = 1.5
"""Median ratio beyond which two campaigns did not measure the same kernel."""

FEWEST_DIFF_POINTS: Final = 8
"""Fewest points of a family that can be flagged."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of two tables over a family."""

    operator: str
    family: Mapping[str, str]
    points: int
    only_a: int
    only_b: int
    median: float | None
    rms: float | None
    p10: float | None
    p90: float | None
    is_flagged: bool


def diff_tables(
    a: MeasuredTables,
    b: MeasuredTables,
    names: tuple[str, str] = ("A", "B"),
    operators: Sequence[str] | None = None,
) -> list[Comparison]:
    """Compare two sets of tables at their common points, by family."""
    families: list[Comparison] = []
    for operator in requested_operators(a, b, names, operators, TableError):
        columns = (t.tables[operator].columns if operator in t.tables else None for t in (a, b))
        points = paired_points(operator, *columns)
        families += [_compared(some, family) for family, some in _families(points)]
    return families


def diff_sources(
    a: MeasuredTables, b: MeasuredTables, operators: Sequence[str] | None = None
) -> list[tuple[str, Comparison]]:
    """Compare a set with each source of another by family, the closest first; equal rows are left out."""
    found = []
    for operator in requested_operators(a, b, ("A", "B"), operators, TableError):
        if operator not in b.tables:
            continue
        for table in a.candidates(operator):
            points = paired_points(operator, table.columns, b.tables[operator].columns)
            found += [(table.source, _compared(some, family)) for family, some in _families(points)]
    apart = [one for one in found if one[1].rms]
    return sorted(apart, key=lambda one: (one[1].operator, *one[1].family.values(), one[1].rms))


SMALL: Final = {"message_bytes": 2.0**16}
"""Largest first size of a small call; others: 64 tokens, rows or sequences."""


class Moved(NamedTuple):
    """Ratio of a family's latencies in one set of tables to those in another, for small or large calls."""

    operator: str
    family: str
    size: str
    points: int
    median: float
    p10: float
    p90: float

    @property
    def place(self) -> tuple[str, str, str]:
        """Operator, family and size."""
        return self[:3]

    @property
    def text(self) -> str:
        """Median, and the range of four fifths of the points."""
        return f"{self.median:.2f} ({self.p10:.2f} to {self.p90:.2f})"


def find_moved(a: MeasuredTables, b: MeasuredTables, operators: Sequence[str] | None = None) -> list[Moved]:
    """Sum up the ratio of B to A at common points by operator, dtypes and size; equal rows are left out."""
    moved = []
    for operator in requested_operators(a, b, ("A", "B"), operators, TableError):
        columns = [t.tables[operator].columns if operator in t.tables else None for t in (a, b)]
        points = paired_points(operator, *columns).common()
        if not len(points.a_us):
            continue
        first, sizes = next(iter(region_sizes(operator, points.columns).items()))
        is_large = sizes > SMALL.get(first, 64.0)
        names = np.array([campaign_family(operator, words) for words in _words(points)], object)
        for family in sorted(set(names)):
            for size, part in (("small", ~is_large), ("large", is_large)):
                log_ratio = points.some(part & (names == family)).log_ratio
                if len(log_ratio) and log_ratio.any():
                    p10, median, p90 = np.exp(np.quantile(log_ratio, (0.1, 0.5, 0.9))).tolist()
                    moved.append(Moved(operator, family, size, len(log_ratio), median, p10, p90))
    return moved


def _words(points: PairedPoints) -> Iterator[dict[str, str]]:
    texts = [c.name for c in OPERATORS[points.operator].keys if c.kind == "text"]
    for row in zip(*(points.columns[name].tolist() for name in texts), strict=True):
        yield dict(zip(texts, row, strict=True))


def _families(points: PairedPoints) -> Iterator[tuple[dict[str, str], PairedPoints]]:
    for words, rows in families_of(points.operator, {**points.columns, LATENCY.name: points.a_us}):
        yield words, points.some(rows)


def _compared(points: PairedPoints, family: Mapping[str, str]) -> Comparison:
    log_ratio = points.common().log_ratio
    count = len(log_ratio)
    p10, median, p90 = (
        np.exp(np.quantile(log_ratio, (0.1, 0.5, 0.9))).tolist() if count else (None, None, None)
    )
    return Comparison(
        operator=points.operator,
        family=family,
        points=count,
        only_a=int(np.isnan(points.b_us).sum()),
        only_b=int(np.isnan(points.a_us).sum()),
        median=median,
        rms=float(np.sqrt(np.mean(log_ratio**2))) if count else None,
        p10=p10,
        p90=p90,
        is_flagged=median is not None
        and count >= FEWEST_DIFF_POINTS
        and max(median, 1.0 / median) > FAR_APART,
    )
