"""Tests for unsound families of rows: host launches, falls, slower than wider dtypes, outliers among sources.

A family is an operator's kernels with the same text keys (dtype, mode), not a single point. Tests only read
rows, of one table or of all tables of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.atomic_files import write_whole
from fastroof.columns import LATENCY
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.load.families import (
    EAGER,
    families_of,
    family_keys,
    find_falls,
    paired_points,
    rows_of_family,
)
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.sources import PROVENANCE_FILE
from fastroof.load.unsound import UnsoundFamily, known_unsound, unsound_families
from fastroof.load.write import toml_text
from fastroof.operators.operator import Columns
from fastroof.operators.registry import OPERATORS

Words = Mapping[str, str]

FLOOR_SHARE: Final = 0.01
"""Quantile of a family's latencies that is its floor."""

LAUNCHED: Final = 8.0
"""Ratio of a floor to other families of the table from which the host launched each call. fp8 GEMMs that
quantise
their input have up to 5.9 times the floor of bf16."""

LAUNCHED_UNLIKE_OTHERS: Final = 4.0
"""The same ratio to the same family of another source."""

NARROWER_SLOWER: Final = 1.5
"""Median ratio to bf16 from which a family of narrower weights is unsound."""

NARROWER_EVERYWHERE: Final = 0.95
"""Least tenth percentile of its ratios to bf16: it is faster nowhere."""

LONGEST: Final = 0.8
"""Quantile of bf16 latencies from which the median must be as bad."""

ANOTHER_VERSION: Final = 2.0
"""Median ratio to another version of the same engine from which a family is unsound."""

ALONE: Final = 2.5
"""Median ratio to every other engine, which agree, from which a family is unsound."""

ALONE_OF_TWO: Final = 3.0
"""The same ratio if there is only one other engine."""

AGREE: Final = 1.5
"""Maximum median ratio between other engines that agree."""

FEWEST_POINTS: Final = 50
"""Fewest points of a family for tests of quantiles."""


def find_unsound(table: MeasuredTable, siblings: Sequence[MeasuredTable] = ()) -> tuple[UnsoundFamily, ...]:
    """Find unsound families of a table."""
    operator, columns = table.operator, table.columns
    if not table.num_rows or not OPERATORS[operator].axes:
        return ()
    families = list(families_of(operator, columns))
    floors = [(words, _floor(columns[LATENCY.name][rows])) for words, rows in families]
    complete: list[UnsoundFamily] = []
    for number, (words, rows) in enumerate(families):
        if EAGER in words.values():
            continue
        found = (
            _launched(operator, words, rows, columns, [*floors[:number], *floors[number + 1 :]])
            or _launched_unlike_others(words, rows, columns, operator, siblings)
            or _narrower_slower(operator, words, rows, columns)
            or _slower_than_siblings(table, words, rows, siblings)
        )
        if found is not None:
            complete.append(found)
    known = [family.keys.items() for family in complete]
    falls = [
        fall for fall in find_falls(operator, columns) if not any(fall.keys.items() >= keys for keys in known)
    ]
    return (*complete, *falls)


def flag_unsound(
    provenance: Mapping[str, Any],
    tables: Mapping[str, MeasuredTable],
    siblings: Mapping[str, Sequence[MeasuredTable]] | None = None,
) -> dict[str, Any]:
    """Return a source's provenance with the unsound families found; flags set by hand stay."""
    operators = {name: dict(about) for name, about in provenance.get("operators", {}).items()}
    for name, table in tables.items():
        found = find_unsound(table, (siblings or {}).get(name, ()))
        found += known_unsound(str(provenance.get("gpu")), table.source, name)
        by_hand = [family for family in unsound_families(provenance, name) if family.test not in TESTS]
        about = operators.setdefault(name, {})
        about.pop("unsound", None)
        if by_hand or found:
            about["unsound"] = [family.as_dict() for family in (*by_hand, *found)]
    return {**provenance, "operators": operators}


def siblings_of(own: MeasuredTables, others: Iterable[MeasuredTables]) -> dict[str, list[MeasuredTable]]:
    """Tables of other sources, by operator."""
    siblings: dict[str, list[MeasuredTable]] = {}
    for measured in others:
        for name in measured.tables:
            mine = own.tables.get(name)
            seen = {table.source for table in siblings.get(name, ())} | ({mine.source} if mine else set())
            new = [table for table in measured.candidates(name) if table.source not in seen]
            siblings.setdefault(name, []).extend(new)
    return siblings


def flag_source(
    measured: MeasuredTables, siblings: Mapping[str, Sequence[MeasuredTable]], *, dry_run: bool = False
) -> dict[str, Any]:
    """Write a source's flags into its provenance.toml, and return the new provenance."""
    sources = {table.source for table in measured.tables.values()}
    places = [measured.root / PROVENANCE_FILE, *(measured.root / name / PROVENANCE_FILE for name in sources)]
    found = [place for place in places if place.is_file()]
    if len(sources) != 1 or not found:
        raise TableError(
            f"{measured.root} is not a single source with a {PROVENANCE_FILE}: load the source by name"
        )
    written = read_toml(found[0], TableError)
    flagged = flag_unsound(written, measured.tables, siblings)
    if not dry_run and flagged != written:
        write_whole(found[0], toml_text(flagged))
    return flagged


TESTS: Final = ("launched", "narrower_slower", "another_version", "alone", "falls", "module")


# -- launches --------------------------------------------------------------------------------------


def _launched(
    operator: str, words: Words, rows: Longs, columns: Columns, other_words: Sequence[tuple[Words, float]]
) -> UnsoundFamily | None:
    # families that differ only in dtypes; prefill and decode also differ in sizes
    apart = {"dtype", "kv_dtype"} & words.keys()
    alike = [
        floor_us
        for other, floor_us in other_words
        if all(other[name] == word for name, word in words.items() if name not in apart)
    ]
    if not apart or not alike or len(rows) < FEWEST_POINTS:
        return None
    floor_us, sound_us = _floor(columns[LATENCY.name][rows]), min(alike)
    if floor_us < LAUNCHED * sound_us:
        return None
    reason = f"never below {floor_us:.3g} us, where other families of the table start at {sound_us:.3g}"
    return _launch(operator, words, rows, columns, floor_us, sound_us, reason)


def _launched_unlike_others(
    words: Words, rows: Longs, columns: Columns, operator: str, siblings: Sequence[MeasuredTable]
) -> UnsoundFamily | None:
    # operators without FLOPs include launches on purpose, or are a difference of two kernels
    if np.isnan(OPERATORS[operator].flops(columns)).all():
        return None
    group = {name: values[rows] for name, values in columns.items()}
    for other in siblings:
        part = rows_of_family(other, words)
        common = None if part is None else paired_points(operator, part, group).common()
        if common is None or len(common.a_us) < FEWEST_POINTS:
            continue
        sound_us, floor_us = _floor(common.a_us), _floor(common.b_us)
        if floor_us >= LAUNCHED_UNLIKE_OTHERS * sound_us:
            reason = f"never below {floor_us:.3g} us, where {other.source} starts at {sound_us:.3g}"
            return _launch(operator, words, rows, columns, floor_us, sound_us, reason)
    return None


def _launch(
    operator: str, words: Words, rows: Longs, columns: Columns, floor_us: float, sound_us: float, reason: str
) -> UnsoundFamily:
    latency_us = columns[LATENCY.name][rows]
    flat = latency_us < AGREE * floor_us
    work = OPERATORS[operator].moved_bytes({name: values[rows] for name, values in columns.items()})
    apart = float(work[flat].max() / work[flat].min())
    reason += (
        f"; {flat.mean():.0%} of its rows are within {AGREE} times of that, over {apart:.1g} times the bytes"
    )
    return UnsoundFamily(
        family_keys(words), "launched", reason, excess_us=round(floor_us - sound_us, 3), rows=len(rows)
    )


# -- against others ---------------------------------------------------------------------------------


def _narrower_slower(operator: str, words: Words, rows: Longs, columns: Columns) -> UnsoundFamily | None:
    if words.get("dtype", "bf16") in ("bf16", "fp16") or not OPERATORS[operator].answers_lookups:
        return None
    if OPERATORS[operator].over_link:
        return None
    group = {name: values[rows] for name, values in columns.items()}
    wide = np.full(len(columns[LATENCY.name]), True)
    for name, word in {**words, "dtype": "bf16"}.items():
        wide &= columns[name] == word
    other = {name: values[wide] for name, values in columns.items()}
    other["dtype"] = np.full(int(wide.sum()), words["dtype"], object)
    points = paired_points(operator, other, group).common()
    log_ratio = points.log_ratio
    if len(log_ratio) < FEWEST_POINTS:
        return None
    least, median = np.exp(np.quantile(log_ratio, (0.1, 0.5)))
    # small calls may take longer to quantise their input than to multiply
    longest = log_ratio[points.a_us >= np.quantile(points.a_us, LONGEST)]
    if min(median, np.exp(np.median(longest))) < NARROWER_SLOWER or least < NARROWER_EVERYWHERE:
        return None
    reason = (
        f"{median:.3g} times bf16 of the same shape at the median of {len(log_ratio)} points, "
        f"slower at {(log_ratio > 0).mean():.0%}"
    )
    return UnsoundFamily(family_keys(words), "narrower_slower", reason, ratio=_digits(median), rows=len(rows))


def _slower_than_siblings(
    table: MeasuredTable, words: Words, rows: Longs, siblings: Sequence[MeasuredTable]
) -> UnsoundFamily | None:
    group = {name: values[rows] for name, values in table.columns.items()}
    medians: dict[str, float] = {}
    parts: dict[str, Columns] = {}
    for other in siblings:
        part = rows_of_family(other, words)
        if part is None:
            continue
        log_ratio = paired_points(table.operator, part, group).common().log_ratio
        if len(log_ratio) < FEWEST_POINTS:
            continue
        medians[other.source] = median = float(np.exp(np.median(log_ratio)))
        parts[other.source] = part
        if other.engine and other.engine == table.engine and median >= ANOTHER_VERSION:
            reason = (
                f"{medians[other.source]:.3g} times {other.source} at the median of {len(log_ratio)} points"
            )
            return UnsoundFamily(
                family_keys(words), "another_version", reason, _digits(medians[other.source]), rows=len(rows)
            )
    computes = not np.isnan(OPERATORS[table.operator].flops(group)).all()
    if not medians or min(medians.values()) < (ALONE if len(medians) > 1 else ALONE_OF_TWO):
        return None
    # different measurement conventions of byte-moving kernels differ that much
    if len(medians) == 1 and not computes:
        return None
    if not _agree(table.operator, list(parts.values())):
        return None
    ratios = " and ".join(f"{median:.3g} times {source}" for source, median in medians.items())
    reason = f"{ratios} at the median"
    return UnsoundFamily(family_keys(words), "alone", reason, _digits(min(medians.values())), rows=len(rows))


def _agree(operator: str, parts: list[Columns]) -> bool:
    for number, one in enumerate(parts):
        for other in parts[number + 1 :]:
            log_ratio = paired_points(operator, one, other).common().log_ratio
            if len(log_ratio) and abs(float(np.median(log_ratio))) > np.log(AGREE):
                return False
    return True


# -- figures ---------------------------------------------------------------------------------------


def _floor(latency_us: Floats) -> float:
    return float(np.quantile(latency_us, FLOOR_SHARE))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
