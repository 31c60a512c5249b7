"""Roofline V2 reproduced: its own program's answers, those of a naive port, and what must always hold."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastroof.compat import roofline_v2 as v2
from fastroof.compiled import compat_roofline_v2 as loops
from fastroof.errors import (
    BatchError,
    GpuError,
    LookupInputError,
    MissingTableError,
    ModelError,
    PlanError,
    TableError,
)
from tests.reference import roofline_v2 as naive

SAMPLE = Path(__file__).parents[1] / "golden_sample" / "roofline_v2"
COMPONENTS = ("prefill_compute_s", "prefill_memory_s", "decode_compute_s", "decode_memory_s")
SHAPE = "32-8-128"
MODEL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "bytes_per_param": 2,
}
HARDWARE = {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35, "bwEfficiencyFactor": 0.82, "perLayerOverhead": 100}


class Golden(NamedTuple):
    folder: Path
    tables: v2.RooflineV2Tables
    naive: naive.Tables

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.folder / name).open(newline="") as file:
            return list(csv.DictReader(file))

    def columns(self, name: str) -> dict[str, Any]:
        rows = self.rows(name)
        return {
            key: [row[key] if key == "attn_config" else _number(row[key]) for row in rows] for key in rows[0]
        }


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    root = naive.write_tree(SAMPLE, tmp_path_factory.mktemp("roofline_v2") / "bench_data")
    return Golden(SAMPLE, v2.load(root), naive.Tables(root))


@pytest.fixture(scope="session", params=["sample", "shared"])
def golden(request: pytest.FixtureRequest, sample: Golden) -> Golden:
    if request.param == "sample":
        return sample
    shared: Path = request.getfixturevalue("shared")
    root = shared / "reference" / "h100_roofline_v2"
    return Golden(shared / "golden" / "roofline_v2", v2.load(root), naive.Tables(root / "bench_data"))


@pytest.fixture(scope="session")
def tables(sample: Golden) -> v2.RooflineV2Tables:
    return sample.tables


# Its own program's answers, to the last bit


def test_golden_prefill_mfu(golden: Golden) -> None:
    g = golden.columns("mfu_prefill.csv")
    np.testing.assert_array_equal(v2.prefill_mfu(golden.tables, g["attn_config"], g["seq_len"]), g["mfu"])


def test_golden_decode_mfu(golden: Golden) -> None:
    g = golden.columns("mfu_decode.csv")
    got = v2.decode_mfu(golden.tables, g["attn_config"], g["batch_size"], g["kv_len"], g["tp"])
    np.testing.assert_array_equal(got, g["mfu"])


def test_golden_gemm_mfu(golden: Golden) -> None:
    g = golden.columns("mfu_gemm.csv")
    np.testing.assert_array_equal(v2.gemm_mfu(golden.tables, g["m"], g["k"], g["n"]), g["mfu"])


def test_golden_nearest_attention(shared: Path) -> None:
    """A probe per head shape and phase shows which table its program had taken."""
    tables = v2.load(shared / "reference" / "h100_roofline_v2")
    with (shared / "golden" / "roofline_v2" / "attn_nearest.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert len(rows) == 10
    for nh, nkv, dh, prefill_1024, prefill_9000, decode_tp1, decode_tp2 in rows:
        shape = v2.nearest_attention(tables, int(nh), int(nkv), int(dh))
        assert v2.prefill_mfu(tables, shape, [1024, 9000]).tolist() == [
            float(prefill_1024),
            float(prefill_9000),
        ]
        got = v2.decode_mfu(tables, shape, 64, 5000, [1, 2])
        assert got.tolist() == [float(decode_tp1), float(decode_tp2)]


def _parsed(row: dict[str, str]) -> tuple[list[tuple[int, int]], list[int]]:
    pairs = [request.split(":") for request in row["prefill_requests"].split(";") if request]
    decodes = [int(progress) for progress in row["decode_progress"].split(";") if progress]
    return [(int(progress), int(new)) for progress, new in pairs], decodes


def test_golden_step_times(golden: Golden) -> None:
    """Steps of one model, hardware and tp go in together, as a caller would."""
    configs = json.loads((golden.folder / "configs.json").read_text())
    groups: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    for row in golden.rows("step_times.csv"):
        groups.setdefault((row["model"], row["hw"], int(row["tp"])), []).append(row)
    assert len(groups) > 10
    for (model, hw, tp), rows in groups.items():
        config, hardware = configs["models"][model]["config"], configs["hardware"][hw]
        steps = [_parsed(row) for row in rows]
        us, parts = v2.step_parts(golden.tables, config, hardware, tp, steps)
        assert us.tolist() == [float(row["step_us_float"]) for row in rows]
        assert np.floor(us + 0.5).astype(int).tolist() == [int(row["step_us_int"]) for row in rows]
        assert tuple(parts) == COMPONENTS
        for name, seconds in parts.items():
            assert seconds.tolist() == [float(row[name]) for row in rows], name
        reference = naive.Model(golden.naive, config, hardware, tp)
        assert [reference.step(*step)[0] for step in steps] == us.tolist()


# Against the naive port, on made tables and steps

MFUS = st.sampled_from([0.0, 0.00005, 0.0001, 0.001, 0.012, 0.25, 0.731]) | st.integers(0, 999).map(
    lambda thousandths: thousandths / 1000
)
SIZE = st.integers(0, 200_000) | st.integers(0, 64)


@st.composite
def trees(draw: Any) -> dict[str, Any]:
    """Rows of two head shapes with holes, in any order."""

    def curve(axis: Any) -> list[tuple[int, float]]:
        return [(x, draw(MFUS)) for x in draw(st.lists(axis, min_size=1, max_size=5, unique=True))]

    def grid() -> list[tuple[int, int, float]]:
        batches = draw(st.lists(st.integers(1, 512), min_size=1, max_size=4, unique=True))
        kvs = draw(st.lists(st.integers(1, 131_072), min_size=1, max_size=5, unique=True))
        cells = draw(st.permutations([(b, kv) for b in batches for kv in kvs]))
        kept = draw(st.integers(1, len(cells)))
        return [(b, kv, draw(MFUS)) for b, kv in cells[:kept]]

    pairs = draw(
        st.lists(
            st.tuples(st.integers(64, 8192), st.integers(64, 11008)), min_size=1, max_size=4, unique=True
        )
    )
    assume(len({k * k + n * n for k, n in pairs}) == len(pairs))
    axis = st.integers(1, 131_072)
    return {
        "gemm": [(m, k, n, mfu) for k, n in pairs for m, mfu in curve(axis)],
        "prefill": {shape: curve(axis) for shape in ("28-4-128", SHAPE)},
        "decode": {
            (shape, tp): grid()
            for shape in ("28-4-128", SHAPE)
            for tp in draw(st.sampled_from([(1,), (2, 4)]))
        },
    }


def _both(tree: dict[str, Any]) -> tuple[v2.RooflineV2Tables, naive.Tables]:
    def columns(rows: list[Any], *names: str) -> dict[str, Any]:
        return dict(zip(names, zip(*rows, strict=True), strict=True))

    mine = v2.tables_of(
        columns(tree["gemm"], "m", "k", "n", "mfu"),
        {shape: columns(rows, "seq_len", "mfu") for shape, rows in tree["prefill"].items()},
        {key: columns(rows, "batch_size", "kv_len", "mfu") for key, rows in tree["decode"].items()},
    )
    return mine, naive.Tables.of_rows(tree["gemm"], tree["prefill"], tree["decode"])


PREFILL = st.tuples(SIZE, st.integers(1, 9000) | st.just(1))
STEP = st.tuples(st.lists(PREFILL, max_size=4), st.lists(SIZE, max_size=6))


@pytest.mark.loops
@given(tree=trees(), sizes=st.tuples(SIZE, SIZE, SIZE), tp=st.integers(1, 9))
def test_lookups_are_the_naive_ones(tree: Any, sizes: Any, tp: int) -> None:
    mine, reference = _both(tree)
    x, y, z = sizes
    for shape in tree["prefill"]:
        assert v2.prefill_mfu(mine, shape, x) == naive.prefill_mfu(reference, shape, x)
        assert v2.decode_mfu(mine, shape, y % 600, x, tp) == naive.decode_mfu(
            reference, shape, y % 600, x, tp
        )
    assert v2.gemm_mfu(mine, x, y, z) == naive.gemm_mfu(reference, x, y, z)
    assert v2.gemm_mfu(mine, x, y % 4096, z % 4096) == naive.gemm_mfu(reference, x, y % 4096, z % 4096)


@pytest.mark.loops
@given(tree=trees(), steps=st.lists(STEP, max_size=4), tp=st.integers(1, 9))
def test_steps_are_the_naive_ones(tree: Any, steps: Any, tp: int) -> None:
    mine, reference = _both(tree)
    us, parts = v2.step_parts(mine, MODEL, HARDWARE, tp, steps)
    model = naive.Model(reference, MODEL, HARDWARE, tp)
    for i, step in enumerate(steps):
        assert (us[i], *(seconds[i] for seconds in parts.values())) == model.step(*step)


# What must hold without the golden files


SMALL_GRID = {"batch_size": [1], "kv_len": [8], "mfu": [0.1]}


@pytest.fixture(scope="module")
def handmade() -> v2.RooflineV2Tables:
    """One head shape; the grid's corner (32, 4096) was not measured, (1, 1024) reads 0."""
    return v2.tables_of(
        gemm={"m": [8, 16, 8], "k": [4096, 4096, 64], "n": [4096, 4096, 64], "mfu": [0.1, 0.3, 0.5]},
        prefill={SHAPE: {"seq_len": [4096, 1024], "mfu": [0.6, 0.2]}},
        decode={
            (SHAPE, 1): {"batch_size": [1, 1, 32], "kv_len": [1024, 4096, 1024], "mfu": [0.0, 0.02, 0.04]},
            (SHAPE, 4): {"batch_size": [1], "kv_len": [1024], "mfu": [0.0]},
        },
    )


@pytest.mark.loops
def test_a_cell_that_was_not_measured_is_zero_and_interpolated_with(handmade: v2.RooflineV2Tables) -> None:
    assert v2.decode_mfu(handmade, SHAPE, 32, 2560, 1) == 0.02  # half of (32, 1024), half of nothing
    assert v2.decode_mfu(handmade, SHAPE, 32, [3072, 5000], 1).tolist() == pytest.approx([0.04 / 3, 0.02])


@pytest.mark.loops
def test_a_zero_takes_the_nearest_row_and_the_first_of_a_tie(handmade: v2.RooflineV2Tables) -> None:
    assert v2.decode_mfu(handmade, SHAPE, 1, 0, 1) == 0.04  # 31 sequences away, not 4096 tokens
    tied = {"batch_size": [8, 4, 12], "kv_len": [64] * 3, "mfu": [0.0, 0.03, 0.05]}
    for order, expected in (([0, 1, 2], 0.03), ([0, 2, 1], 0.05)):
        rows = {name: [column[i] for i in order] for name, column in tied.items()}
        tables = v2.tables_of(
            {"m": [8], "k": [64], "n": [64], "mfu": [0.0]},
            {SHAPE: {"seq_len": [8], "mfu": [0.1]}},
            {(SHAPE, 1): rows},
        )
        assert v2.decode_mfu(tables, SHAPE, 8, 64, 1) == expected
        assert v2.gemm_mfu(tables, 8, 64, 64) == 1e-4  # no row at all
    assert v2.decode_mfu(handmade, SHAPE, 1, 1024, 4) == 1e-4


@pytest.mark.loops
def test_a_zero_in_a_curve_takes_the_nearest_row_too() -> None:
    for order, expected in (([0, 1, 2, 3], 0.3), ([0, 3, 2, 1], 0.2)):
        x, mfu = (np.array(column)[order] for column in ([100, 50, 101, 150], [0.0, 0.3, 0.0, 0.2]))
        curve = {"seq_len": x, "mfu": mfu}
        tables = v2.tables_of(
            {"m": x, "k": [64] * 4, "n": [64] * 4, "mfu": mfu}, {SHAPE: curve}, {(SHAPE, 1): SMALL_GRID}
        )
        assert v2.prefill_mfu(tables, SHAPE, [100, 101, 75]).tolist() == [expected, 0.2, 0.15]
        assert v2.gemm_mfu(tables, [100, 101, 75], 64, 64).tolist() == [expected, 0.2, 0.15]


def half_of_2e_4() -> v2.RooflineV2Tables:
    """Tables whose MFU is 0 at 100, 2e-4 at 102, and 1e-4 between them."""
    half = {"m": [100, 102], "k": [64] * 2, "n": [64] * 2, "mfu": [0.0, 0.0002]}
    grid = {"batch_size": [1, 1], "kv_len": [100, 102], "mfu": [0.0, 0.0002]}
    return v2.tables_of(half, {SHAPE: {"seq_len": [8], "mfu": [0.1]}}, {(SHAPE, 1): grid})


@pytest.mark.loops
def test_an_mfu_of_1e_4_counts_as_measured() -> None:
    tables = half_of_2e_4()
    assert v2.gemm_mfu(tables, 101, 64, 64) == v2.decode_mfu(tables, SHAPE, 1, 101, 1) == 1e-4
    assert v2.gemm_mfu(tables, 100, 64, 64) == v2.decode_mfu(tables, SHAPE, 1, 100, 1) == 2e-4


@pytest.mark.slow
@pytest.mark.loops
def test_an_mfu_of_1e_4_counts_as_measured_in_a_step() -> None:
    tables = half_of_2e_4()
    mfu = {progress: _attention_mfu(tables, progress) for progress in (100, 101)}
    assert mfu == pytest.approx({100: 2e-4, 101: 1e-4}, rel=1e-9)


def _attention_mfu(tables: v2.RooflineV2Tables, progress: int) -> float:
    """MFU that a step of one decode must have used: from its compute time with and without a context."""
    with_context, without = (_parts(tables, ([], [p]))["decode_compute_s"] for p in (progress, 0))
    return 4.0 * 32 * 128 * 32 * progress / ((with_context - without) * 989.5e12)


@pytest.mark.loops
def test_a_gemm_takes_the_nearest_measured_one_that_holds_it(handmade: v2.RooflineV2Tables) -> None:
    k = [64, 65, 64, 5000]
    assert v2.gemm_mfu(handmade, 8, k, [64, 64, 65, 1]).tolist() == [0.5, 0.1, 0.1, 0.1]
    assert v2.gemm_mfu(handmade, [0, 12, 99], 4096, 4096).tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_a_tp_that_was_not_measured_takes_the_nearest_and_the_smaller_of_a_tie(
    tables: v2.RooflineV2Tables,
) -> None:
    got = v2.decode_mfu(tables, SHAPE, 1, 16384, [1, 2, 3, 4, 5, 8, 99])
    one, two, four = v2.decode_mfu(tables, SHAPE, 1, 16384, [1, 2, 4])
    assert len({one, two, four}) == 3
    assert got.tolist() == [one, two, two, four, four, four, four]


def test_a_measured_point_comes_back(sample: Golden) -> None:
    for shape, by_tp in sample.naive.decode.items():
        for tp, rows in by_tp.items():
            batch, kv, mfu = (np.array(column) for column in zip(*rows, strict=True))
            got = v2.decode_mfu(sample.tables, shape, batch.astype(int), kv.astype(int), tp)
            assert (got[mfu >= 1e-4] == mfu[mfu >= 1e-4]).all()
            assert (got > 0).all()
    for (k, n), points in sample.naive.gemm.items():
        m, mfu = (np.array(column) for column in zip(*points, strict=True))
        assert (v2.gemm_mfu(sample.tables, m.astype(int), int(k), int(n)) == mfu).all()


@given(steps=st.lists(STEP, max_size=6), tp=st.sampled_from([1, 2, 4, 8]))
def test_a_batch_is_its_steps_and_a_step_its_longest_component(tables: Any, steps: Any, tp: int) -> None:
    us, parts = v2.step_parts(tables, MODEL, HARDWARE, tp, steps)
    alone = [float(v2.step_us(tables, MODEL, HARDWARE, tp, [step])[0]) for step in steps]
    assert us.tolist() == alone
    longest = np.max(list(parts.values()), axis=0)
    assert us == pytest.approx(longest * 1e6 + 3200 / tp, rel=1e-14)
    free, _ = v2.step_parts(tables, MODEL, HARDWARE | {"perLayerOverhead": 0}, tp, steps)
    assert free == pytest.approx(np.maximum(us - 3200 / tp, 1.0), rel=1e-9)
    for i, (prefill, decode) in enumerate(steps):
        assert (parts["prefill_compute_s"][i] > 0) == (parts["prefill_memory_s"][i] > 0) == bool(prefill)
        assert (parts["decode_compute_s"][i] > 0) == (parts["decode_memory_s"][i] > 0) == bool(decode)


@given(steps=st.lists(STEP, min_size=1, max_size=3), data=st.data())
def test_the_order_of_requests_changes_nothing_but_rounding(tables: Any, steps: Any, data: Any) -> None:
    other = [(data.draw(st.permutations(p)), data.draw(st.permutations(d))) for p, d in steps]
    us = v2.step_us(tables, MODEL, HARDWARE, 1, steps)
    assert v2.step_us(tables, MODEL, HARDWARE, 1, other) == pytest.approx(us, rel=1e-12)


def _parts(tables: v2.RooflineV2Tables, step: Any, model: Any = MODEL, tp: int = 1) -> dict[str, float]:
    _, parts = v2.step_parts(tables, model, HARDWARE, tp, [step])
    return {name: float(seconds[0]) for name, seconds in parts.items()}


def test_buckets_run_one_after_the_other(tables: v2.RooflineV2Tables) -> None:
    """A request that ends at 512 and one that ends at 513 share no GEMM; two that end at 512 do."""
    name = "prefill_compute_s"
    ends_512, ends_513 = _parts(tables, ([(500, 12)], []))[name], _parts(tables, ([(501, 12)], []))[name]
    assert _parts(tables, ([(500, 12), (501, 12)], []))[name] == ends_512 + ends_513
    assert _parts(tables, ([(500, 12), (500, 12)], []))[name] < 1.5 * ends_512


def test_a_chunk_of_one_token_moves_what_a_decode_moves(tables: v2.RooflineV2Tables) -> None:
    chunk, decode = _parts(tables, ([(777, 1)], [])), _parts(tables, ([], [777]))
    assert chunk["prefill_memory_s"] == decode["decode_memory_s"]
    assert chunk["prefill_compute_s"] != decode["decode_compute_s"]


@pytest.mark.loops
def test_decode_attention_takes_the_mean_mfu_and_not_the_mean_time(tables: v2.RooflineV2Tables) -> None:
    gemms = _parts(tables, ([], [0, 0]))["decode_compute_s"]
    mixed = _parts(tables, ([], [1024, 65536]))["decode_compute_s"] - gemms
    flops = 4.0 * 32 * 128 * 32 * np.array([1024.0, 65536.0])
    mfu = v2.decode_mfu(tables, SHAPE, 2, [1024, 65536], 1)
    peak = 989.5e12
    assert mixed == pytest.approx(flops.sum() / (peak * (flops @ mfu / flops.sum())), rel=1e-12)
    assert mixed < 0.999 * (flops / mfu).sum() / peak


def test_head_dim_is_derived_and_defaults_are_filled_in(tables: v2.RooflineV2Tables) -> None:
    step = ([(0, 300)], [100, 5000])
    expected = _parts(tables, step)
    assert _parts(tables, step, MODEL | {"head_dim": 64, "torch_dtype": "bfloat16"}) == expected
    wide = {
        key: value for key, value in MODEL.items() if key not in ("num_key_value_heads", "intermediate_size")
    }
    assert _parts(tables, step, wide) == _parts(
        tables, step, MODEL | {"num_key_value_heads": 32, "intermediate_size": 16384}
    )
    bare = {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35}
    full = bare | {"bwEfficiencyFactor": 1.0, "perLayerOverhead": 0.0}
    assert v2.step_us(tables, MODEL, bare, 1, [step]) == v2.step_us(tables, MODEL, full, 1, [step])


def test_requests_as_arrays_are_the_same_steps(tables: v2.RooflineV2Tables) -> None:
    steps = [([(0, 512), (100, 1)], [1000]), ([], []), ([], [7, 8]), ([(4096, 2048)], [])]
    expected = v2.step_us(tables, MODEL, HARDWARE, 2, steps)
    for dtype in (np.int32, np.int64, np.uint16):
        batch = v2.StepRequests(
            np.array([0, 100, 4096], dtype),
            np.array([512, 1, 2048], dtype),
            np.array([0, 2, 2, 2, 3], dtype),
            np.array([1000, 7, 8], dtype),
            np.array([0, 1, 1, 3, 3], dtype),
        )
        assert len(batch) == 4
        assert v2.step_us(tables, MODEL, HARDWARE, 2, batch).tolist() == expected.tolist()
    assert expected[1] == 1600.0
    assert v2.step_us(tables, MODEL, HARDWARE, 2, []).shape == (0,)


def test_lookups_broadcast(tables: v2.RooflineV2Tables) -> None:
    shapes = np.array([[SHAPE], ["28-4-128"]], dtype=object)
    assert v2.prefill_mfu(tables, SHAPE, 2000).shape == ()
    assert v2.prefill_mfu(tables, shapes, [1024, 2048, 4096]).shape == (2, 3)
    got = v2.decode_mfu(tables, shapes, [1, 2, 3], 4096, 2)
    assert got.shape == (2, 3)
    assert got[1, 2] == v2.decode_mfu(tables, "28-4-128", 3, 4096, 2)
    assert v2.gemm_mfu(tables, np.zeros((0, 4), int), 1, 1).shape == (0, 4)
    assert v2.decode_mfu(tables, [], [], [], []).shape == (0,)
    assert v2.gemm_mfu(tables, [8, 16], 64, 64).dtype == np.float64


def test_tables_pickle(tables: v2.RooflineV2Tables) -> None:
    again = pickle.loads(pickle.dumps(tables))
    step = [([(0, 700)], [100, 5000])]
    assert v2.step_us(again, MODEL, HARDWARE, 4, step) == v2.step_us(tables, MODEL, HARDWARE, 4, step)


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: v2.prefill_mfu(t, "1-2-3", 5), MissingTableError, "no prefill .*'1-2-3'; valid: 28-4"),
        (lambda t: v2.decode_mfu(t, "1-2-3", 1, 1, 1), MissingTableError, "no decode .*'1-2-3'; .* 28-4"),
        (lambda t: v2.prefill_mfu(t, 32, 5), LookupInputError, "attn_config must be a name or names, got 32"),
        (lambda t: v2.prefill_mfu(t, SHAPE, -1), LookupInputError, "seq_len must be at least 0 .* got -1"),
        (lambda t: v2.prefill_mfu(t, SHAPE, 1.5), LookupInputError, "seq_len must hold integers, got float"),
        (lambda t: v2.prefill_mfu(t, SHAPE, [[1], [1, 2]]), LookupInputError, "seq_len must hold integers"),
        (lambda t: v2.prefill_mfu(t, SHAPE, 2**40), LookupInputError, r"at most 2\*\*31, got 1099511627776"),
        (lambda t: v2.decode_mfu(t, SHAPE, [1, -2], 1, 1), LookupInputError, "batch_size must be .* got -2"),
        (lambda t: v2.decode_mfu(t, SHAPE, 1, 1, 0), LookupInputError, "tp must be at least 1 .* got 0"),
        (lambda t: v2.gemm_mfu(t, [1, 2], [1, 2, 3], 1), LookupInputError, r"m \(2,\), k \(3,\)"),
        (lambda t: v2.gemm_mfu(t, "8", 1, 1), LookupInputError, "m must hold integers"),
        (lambda t: v2.nearest_attention(t, 0, 8, 128), LookupInputError, "num_heads must be at least 1"),
        (lambda t: v2.nearest_attention(t, 8, [8], 128), LookupInputError, "num_kv_heads must be one"),
    ],
)  # fmt: skip
def test_bad_lookups(tables: v2.RooflineV2Tables, call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(tables)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [([], []), ([(0, 5), (-1, 5)], [])],
            "progress must be at least 0 .* got -1 in prefill request 1 of step 1",
        ),
        ([([], []), ([(0, 0)], [])], "new_tokens must be at least 1 .* got 0 in prefill request 0 of step 1"),
        ([([], [3]), ([], []), ([], [5, -7])], "progress must be .* got -7 in decode request 1 of step 2"),
        ([([], [2**40])], "at most 2147483648, got 1099511627776"),
        ([([], [1.5])], "decode progress must hold integers, got float64"),
        ([([(1, 2, 3)], [])], r"step 0 must be \(\[\(progress, new_tokens\), ...\], \[progress, ...\]\)"),
        ([[1]], "step 0 must be"),
        (7, "steps must be a list, got 7"),
        ([([], [2**64])], "decode progress must hold integers|must fit int64"),
        ([([], [2**63])], "decode progress must fit int64, got 9223372036854775808"),
    ],
)
def test_bad_steps(tables: v2.RooflineV2Tables, steps: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        v2.step_us(tables, MODEL, HARDWARE, 1, steps)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([1], [], [0, 1], [], [0, 0]), "prefill_progress has 1 requests, prefill_new_tokens 0"),
        (([1], [1], [0, 2], [], [0, 0]), "prefill_offsets must start at 0 and end at the 1 requests"),
        (
            ([], [], [0, 0], [1, 2], [0, 2, 1, 2]),
            "decode_offsets must not decrease: 2 is followed by 1 at step 1",
        ),
        (([], [], [0, 0], [1], [0, 0, 1]), "prefill_offsets have 1 steps, decode_offsets 2"),
        (([], [], [], [], []), "prefill_offsets must start at 0"),
        (([], [], [0], [[1]], [0]), r"decode_progress must be one-dimensional, got shape \(1, 1\)"),
        (([], [], [0], [[1], [1, 2]], [0]), "decode_progress must hold integers"),
    ],
)
def test_bad_request_arrays(arrays: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        v2.StepRequests(*arrays)


@pytest.mark.loops
@pytest.mark.parametrize("name", ["prefill_offsets", "decode_offsets"])
@pytest.mark.parametrize("wrong", [-1, 10**9, 0])
def test_arrays_that_were_written_to_are_never_read_outside(tables: Any, name: str, wrong: int) -> None:
    batch = v2.StepRequests([5, 5], [5, 5], [0, 1, 2], [1, 2], [0, 1, 2])
    getattr(batch, name)[:] = [2, wrong, wrong]
    with pytest.raises(BatchError, match=f"{name} must start at 0 and end at the 2 requests"):
        v2.step_us(tables, MODEL, HARDWARE, 1, batch)


@pytest.mark.loops
def test_bad_requests_give_codes(tables: v2.RooflineV2Tables) -> None:
    for name, value in (("prefill_progress", -1), ("prefill_new_tokens", 0), ("decode_progress", -(2**63))):
        batch = v2.StepRequests([5, 5], [5, 5], [0, 1, 2], [1, 2], [0, 1, 2])
        getattr(batch, name)[1] = value
        with pytest.raises(BatchError, match=f"got {value} in .* request 0 of step 1"):
            v2.step_us(tables, MODEL, HARDWARE, 1, batch)


@pytest.mark.parametrize(
    ("model", "hardware", "tp", "error", "message"),
    [
        ({}, {}, 1, ModelError, "num_hidden_layers must .* missing; hidden_size .*; bytes_per_param"),
        ({"hidden_size": "4096"}, {}, 1, ModelError, "^model_config: hidden_size must be [^;]*, got '4096'$"),
        ({"num_hidden_layers": 0}, {}, 1, ModelError, "num_hidden_layers must be a whole number .* got 0"),
        ({"num_hidden_layers": True}, {}, 1, ModelError, "num_hidden_layers must be .* got True"),
        ({"bytes_per_param": float("nan")}, {}, 1, ModelError, "bytes_per_param must be .* above 0, got nan"),
        ({"num_key_value_heads": -8}, {}, 1, ModelError, "num_key_value_heads must be .* got -8"),
        ({"num_experts": 128}, {}, 1, ModelError, "num_experts is 128: roofline V2 has no experts"),
        ({"n_routed_experts": 256}, {}, 1, ModelError, "n_routed_experts is 256: roofline V2 has no experts"),
        ({"num_attention_heads": 33}, {}, 1, ModelError, "must be a multiple of .* got 4096 and 33"),
        ([], {}, 1, ModelError, r"model_config must be a dict, got \[\]"),
        ({"": 0}, None, 1, GpuError, "hardware must be a dict, got None"),
        ({"": 0}, {"TFlopsPeak": 0, "BwPeakTBs": -1}, 1, GpuError, "TFlopsPeak .* 0; BwPeakTBs .* -1$"),
        ({"": 0}, {"perLayerOverhead": -1}, 1, GpuError, "perLayerOverhead must be .* 0, got -1"),
        ({"": 0}, {}, 0, PlanError, "tp must be a whole number of at least 1, got 0"),
        ({"": 0}, {}, 1.0, PlanError, "tp must be a whole number of at least 1, got 1.0"),
    ],
)  # fmt: skip
def test_bad_configs(tables: Any, model: Any, hardware: Any, tp: Any, error: Any, message: str) -> None:
    given_model = MODEL | model if model else model
    given_hardware = HARDWARE | hardware if isinstance(hardware, dict) else hardware
    with pytest.raises(error, match=message):
        v2.step_us(tables, given_model, given_hardware, tp, [])


# Trees


def test_load_finds_the_tree_and_keeps_its_order(tmp_path: Path, sample: Golden) -> None:
    root = naive.write_tree(SAMPLE, tmp_path / "somewhere" / "bench_data")
    # in name order 32-8-128.csv comes after 32-32-128.csv; what is no head shape is not roofline V2's
    folder = root / "mha" / "prefill" / "h100"
    (folder / "32-32-128.csv").write_text("dtype,seq_len,latency_us,mfu\nbf16,1024,1,0.5\n")
    (folder / "notes.csv").write_text("nothing\n")
    for given_root in (root, root.parent, str(root)):
        tables = v2.load(given_root, gpu="h100")
        assert tables.attn_configs == ("28-4-128", "32-32-128", "32-8-128")
    assert v2.nearest_attention(tables, 32, 20, 128) == "32-32-128"  # a tie: the first
    assert v2.nearest_attention(sample.tables, 30, 6, 128) == "28-4-128"
    with pytest.raises(MissingTableError, match="no decode table of attn_config '32-32-128'"):
        v2.step_us(tables, MODEL | {"num_key_value_heads": 32}, HARDWARE, 1, [])
    (root / "gemm" / "a100").mkdir()
    (root / "gemm" / "a100" / "data.csv").write_text("m,k,n,mfu\n1,1,1,0.5\n")
    with pytest.raises(TableError, match=r"has tables of several GPUs \(a100, h100\): choose one with gpu="):
        v2.load(root)
    with pytest.raises(MissingTableError, match="no tables of gpu 'b200'; it has a100, h100"):
        v2.load(root, gpu="b200")
    with pytest.raises(MissingTableError, match=r"a100: no prefill table; expected <attn_config>\.csv"):
        v2.load(root, gpu="a100")


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        MissingTableError, match="no/such/tree: folder does not exist; need a bench_data tree"
    ):
        v2.load("no/such/tree")
    with pytest.raises(MissingTableError, match=r"not a roofline V2 tree; expected gemm/<gpu>/data.csv"):
        v2.load(tmp_path)
    root = naive.write_tree(SAMPLE, tmp_path / "tree")
    decode = root / "mha" / "decode" / "h100"
    for path in list(decode.iterdir()):
        path.rename(decode / path.name.replace("-tp", "_tp"))
    with pytest.raises(MissingTableError, match=r"no decode table; expected <attn_config>-tp<T>\.csv"):
        v2.load(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m,k,n,mfu\n8,64,64,0.1\n9,64,64,0.1\n8,64,64,0.2\n", "row 3: the point 8 x 64 x 64 is a duplicate"),
        ("m,k,n\n8,64,64\n", "missing column mfu"),
        ("m,k,n,mfu\n8,64,64,-0.1\n", "row 1 .*column mfu: found '-0.1'"),
        ("m,k,n,mfu\n8,64,6.4,0.1\n", "row 1 .*column n: found '6.4'"),
    ],
)
def test_load_refuses_a_bad_file(tmp_path: Path, text: str, message: str) -> None:
    root = naive.write_tree(SAMPLE, tmp_path)
    (root / "gemm" / "h100" / "data.csv").write_text(text)
    with pytest.raises(TableError, match=rf"data\.csv.*{message}"):
        v2.load(root)


GEMM = {"m": [8], "k": [64], "n": [64], "mfu": [0.1]}
LENGTHS = {SHAPE: {"seq_len": [8], "mfu": [0.1]}}
GRID = {(SHAPE, 1): SMALL_GRID}


@pytest.mark.parametrize(
    ("gemm", "prefill", "decode", "error", "message"),
    [
        (GEMM, {}, GRID, MissingTableError, "prefill: no table was given"),
        (GEMM, LENGTHS, {}, MissingTableError, "decode: no table was given"),
        (GEMM, {"32-8": LENGTHS[SHAPE]}, GRID, TableError, "'32-8' is not an attn_config"),
        (GEMM, LENGTHS, {(SHAPE, 0): GRID[SHAPE, 1]}, TableError, "tp must be a whole number of at least 1"),
        ({"m": [8], "mfu": [1]}, LENGTHS, GRID, TableError, "gemm: missing column n, k; it has m, mfu"),
        (
            GEMM | {"m": [8, 9]},
            LENGTHS,
            GRID,
            TableError,
            "gemm: columns differ in length: m 2, n 1, k 1, mfu 1",
        ),
        (
            GEMM | {"m": ["x"]},
            LENGTHS,
            GRID,
            TableError,
            "gemm, row 1, column m: found not a number, need a whole number",
        ),
        (GEMM | {"m": [0.5]}, LENGTHS, GRID, TableError, "gemm, row 1, column m: found 0.5"),
        (GEMM | {"m": []}, LENGTHS, GRID, TableError, "gemm, column m: need a list of at least one number"),
        (
            GEMM | {"mfu": [-1]},
            LENGTHS,
            GRID,
            TableError,
            "column mfu: found -1, need a finite number of at least 0",
        ),
        (
            GEMM,
            {SHAPE: {"seq_len": [8, 8], "mfu": [1, 1]}},
            GRID,
            TableError,
            "row 2: the point 8 is a duplicate",
        ),
    ],
)
def test_tables_of_refuses_bad_columns(
    gemm: Any, prefill: Any, decode: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        v2.tables_of(gemm, prefill, decode)


def test_tables_in_memory_are_the_files(sample: Golden) -> None:
    gemm = sample.columns("tables_gemm.csv")
    prefill: dict[str, Any] = {}
    decode: dict[Any, Any] = {}
    for row in sample.rows("tables_prefill.csv"):
        for name in ("seq_len", "mfu"):
            prefill.setdefault(row["attn_config"], {}).setdefault(name, []).append(float(row[name]))
    for row in sample.rows("tables_decode.csv"):
        for name in ("batch_size", "kv_len", "mfu"):
            key = (row["attn_config"], int(row["tp"]))
            decode.setdefault(key, {}).setdefault(name, []).append(float(row[name]))
    tables = v2.tables_of(gemm, dict(reversed(prefill.items())), decode)
    assert tables.arena.tolist() == sample.tables.arena.tolist()
    assert tables.attn_configs == sample.tables.attn_configs
    assert loops.MODEL_SIZE == loops.BUCKET_MFU + loops.NUM_BUCKETS
