"""Kernels and steps against physics: what breaks it is on a committed list, explained, and nothing else does.

The list is tests/physics/violations.toml; outliers are flagged in the tables' own provenance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import fastroof
from fastroof.load.measured import MeasuredTable
from tests.physics import kernels, steps
from tests.physics.ledger import CAUSES, Entry, Found, complaints, flagged_outliers, load_entries

ENTRIES = load_entries()
DENSE = ("gemm", "attention_prefill", "attention_decode", "elementwise")
FP8_TABLES = ("gemm", "attention_prefill", "attention_decode", "moe")


@pytest.fixture(scope="module")
def measured(h100):
    return h100.measured


@pytest.fixture(scope="module")
def bandwidth(h100):
    return kernels.highest_bandwidth(h100.measured, h100.gpu).bytes_per_s


@pytest.fixture(scope="module")
def cases(h100):
    return steps.plan_cases(h100)


def kernel_checks(h100: fastroof.Tables, bytes_per_s: float) -> Iterator[Found]:
    for operator, axes in kernels.AXES.items():
        table = kernels.of_kernels(h100.measured.tables[operator])
        if operator != "allreduce":
            yield from kernels.under_work(table, h100.gpu, bytes_per_s)
        for axis in axes:
            yield kernels.falls(table, axis)
        if operator in FP8_TABLES:
            yield kernels.fp8_over_bf16(table)


# -- the shipped tables and plans --------------------------------------------------------------------


def test_the_highest_measured_bandwidth_is_a_memory_bandwidth(h100):
    found = kernels.highest_bandwidth(h100.measured, h100.gpu)
    assert (found.operator, found.row["batch_size"], found.row["kv_len"]) == ("attention_decode", 128, 16384)
    assert 0.94 < found.bytes_per_s / h100.gpu.hbm_bytes_per_s < 0.95


def test_kernels_obey_physics_but_for_the_list(h100, bandwidth):
    assert [line for found in kernel_checks(h100, bandwidth) for line in complaints(found, ENTRIES)] == []


@pytest.mark.parametrize("check", steps.STEP_CHECKS, ids=lambda check: check.__name__)
def test_steps_obey_physics_but_for_the_list(cases, bandwidth, check):
    found = check(cases, bandwidth)
    assert found.checked > 3_000
    assert complaints(found, ENTRIES) == []


def test_every_preset_tp_and_dtype_is_checked(cases):
    plans = {(p.model.name, p.tp, p.dtype, p.kv_dtype) for p, *_ in cases}
    assert len(plans) == len(cases) == 4 * (4 * len(steps.PRESETS) - 1)
    assert ("qwen2.5-7b", 8, "bf16", "bf16") not in plans, "28 query heads do not divide by 8"


@pytest.mark.slow
def test_every_entry_names_a_check_and_a_cause(h100, cases, bandwidth):
    checks = {found.check for found in kernel_checks(h100, bandwidth)}
    checks |= {check(cases, bandwidth).check for check in steps.STEP_CHECKS}
    assert {entry.check for entry in ENTRIES} <= checks
    assert {entry.cause for entry in ENTRIES} <= set(CAUSES)
    assert all(entry.why and entry.count > 0 for entry in ENTRIES)


@pytest.mark.parametrize("operator", kernels.AXES)
def test_outliers_are_flagged_in_provenance(measured, operator):
    # of attention both versions' tables, of which the older serves first
    for measured_table in measured.candidates(operator):
        if measured_table.engine == "vllm":
            table = kernels.of_kernels(measured_table)
            flags = flagged_outliers(operator, table.provenance)
            assert complaints(kernels.outliers(table), flags) == [], table.source


# -- that the checks can fail ------------------------------------------------------------------------


def changed(table: MeasuredTable, rows, factor: float) -> MeasuredTable:
    latency_us = table.columns["latency_us"].copy()
    latency_us[rows] *= factor
    return replace(table, columns={**table.columns, "latency_us": latency_us})


def shape_rows(table: MeasuredTable, **sizes):
    return np.flatnonzero(np.all([table.columns[name] == size for name, size in sizes.items()], axis=0))


def test_one_new_slow_point_fails(measured):
    table = measured.tables["gemm"]
    rows = shape_rows(table, dtype="bf16", m=1024, n=4096, k=4096)
    slow = changed(table, rows, 3.0)
    count, worst = complaints(kernels.falls(slow, "m"), ENTRIES)
    listed, found = (int(word) for word in re.findall(r"(?:listed|found) (\d+)", count))
    assert found == listed + 1
    assert "m=1024, n=4096, k=4096" in worst
    flags = flagged_outliers("gemm", table.provenance)
    (new,) = complaints(kernels.outliers(slow), flags)
    assert new.startswith("1 violations are in no entry")


def test_kernels_that_are_too_fast_fail(h100, bandwidth):
    for operator in DENSE:
        table = h100.measured.tables[operator]
        fast = changed(table, slice(None), 0.1)
        assert all(len(found.ratio) for found in kernels.under_work(fast, h100.gpu, bandwidth)), operator


def test_steps_that_are_too_fast_fail(cases, bandwidth):
    fast = [steps.Case(c.plan, c.decode_us * 0.3, c.prefill_us * 0.3) for c in cases]
    assert len(steps.at_least_its_bytes(fast, bandwidth).ratio)
    assert len(steps.prefill_at_least_its_flops(fast, bandwidth).ratio)
    assert not len(steps.chunks_against_one_piece(fast, bandwidth).ratio)


def test_a_plan_that_beats_its_gpus_fails(cases, bandwidth):
    unfair = [c._replace(decode_us=c.decode_us * (0.5 if c.plan.tp == 8 else 1.0)) for c in cases]
    found = steps.tp_no_better_than_its_gpus(unfair, bandwidth)
    assert set(found.at["tp"].tolist()) == {8}
    assert complaints(found, ENTRIES)[0].startswith(f"{len(found.ratio)} violations are in no entry")


def found_of(*ratios: float) -> Found:
    place = np.arange(len(ratios))
    words = np.array(["even", "odd"])[place % 2]
    return Found.under("made", 1.0, np.array(ratios), {"place": place, "parity": words})


def entry_of(count: int, worst: float, **where) -> Entry:
    return Entry("made", count, worst, "outlier", "made up", where)


def test_a_listed_violation_passes_and_an_earlier_entry_takes_it_first():
    found = found_of(0.5, 0.6, 1.2, 0.7)
    assert found.checked == 4
    assert len(found.ratio) == 3
    entries = [entry_of(1, 0.5, parity=["even"]), entry_of(2, 0.6, place=[0, 3])]
    assert complaints(found, entries) == []
    assert complaints(found, [entry_of(1, 0.5, ratio=[0, 0.55]), entry_of(2, 0.6)]) == []


@pytest.mark.parametrize(
    ("entries", "message"),
    {
        "new": ([entry_of(1, 0.5, place=[0, 0])], "1 violations are in no entry: made [place=1"),
        "more": ([entry_of(1, 0.5)], "listed 1, found 2"),
        "fewer": ([entry_of(3, 0.5)], "listed 3, found 2"),
        "gone": ([entry_of(2, 0.5), entry_of(1, 0.5, place=[5, 9])], "listed 1, but none occurs any more"),
        "worse": ([entry_of(2, 0.55)], "worst listed 0.55, found made [place=0"),
        "better": ([entry_of(2, 0.45)], "worst listed 0.45, found"),
        "another check": ([replace(entry_of(2, 0.5), check="other")], "2 violations are in no entry"),
    }.values(),
)
def test_a_list_that_is_not_true_fails(entries, message):
    (found,) = complaints(found_of(0.5, 0.6), entries)
    assert message in found


def test_a_ratio_of_nan_is_an_error():
    with pytest.raises(ValueError, match="made: a ratio is not a number"):
        found_of(0.5, float("nan"))
