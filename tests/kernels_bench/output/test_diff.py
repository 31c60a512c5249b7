"""A difference counts and compares what both sets have, and draws it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fastroof.config.gpu import load_gpu
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTables
from kernels_bench.cli import app
from kernels_bench.output.diff import compare_campaigns, diff_tables, sizes_of
from kernels_bench.output.diff_plot import draw_difference, save_difference
from kernels_bench.output.table_sets import load_table_set
from kernels_bench.output.tables import write_tables
from tests.reference.made_journals import copy, decode, gemm, write_journal

A = [(gemm(1), 50.0), (gemm(2), 51.0), (gemm(4, dtype="fp8"), 30.0), (decode(1, 64), 9.0)]
B = [(gemm(1), 100.0), (gemm(2), 25.5), (gemm(4), 40.0), (copy(8192), 120.0)]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[MeasuredTables, MeasuredTables]:
    return tuple(  # type: ignore[return-value]
        load_table_set(str(write_journal(tmp_path / f"{name}.jsonl", rows)))
        for name, rows in (("a", A), ("b", B))
    )


def test_points_are_counted_and_compared(pair: tuple[MeasuredTables, MeasuredTables]) -> None:
    difference = diff_tables(*pair)
    total = {d.operator: (d.common, d.only_a, d.only_b) for d in difference.operators}
    assert total == {"gemm": (2, 1, 1), "attention_decode": (0, 1, 0), "elementwise": (0, 0, 1)}
    gemms = difference.operators[0]
    assert (gemms.median, gemms.p10, gemms.p90) == pytest.approx((1.25, 0.65, 1.85))
    # 0.5 and 2 are as far from 1; the first in the order of the keys comes first.
    assert [(w["m"], w["a_us"], w["b_us"], w["ratio"]) for w in gemms.worst] == [
        (1, 50.0, 100.0, 2.0),
        (2, 51.0, 25.5, 0.5),
    ]
    assert difference.operators[1].median is None


def test_each_key_stands_alone(pair: tuple[MeasuredTables, MeasuredTables]) -> None:
    keys = {(d.operator, d.key.get("dtype")): d for d in diff_tables(*pair).keys}
    bf16, fp8 = keys["gemm", "bf16"], keys["gemm", "fp8"]
    assert (bf16.common, bf16.only_a, bf16.only_b) == (2, 0, 1)
    assert (fp8.common, fp8.only_a, fp8.only_b) == (0, 1, 0)
    heads = keys["attention_decode", None].key
    assert heads["num_q_heads"] == 32
    assert all(isinstance(v, str | int) for d in keys.values() for v in d.key.values())


def test_swapping_the_sets_turns_every_ratio_over(pair: tuple[MeasuredTables, MeasuredTables]) -> None:
    there, back = diff_tables(*pair), diff_tables(pair[1], pair[0])
    assert back.common["gemm"].ratio.tolist() == (1 / there.common["gemm"].ratio).tolist()
    assert [(d.only_a, d.only_b) for d in there.operators] == [(d.only_b, d.only_a) for d in back.operators]


@pytest.mark.slow
def test_a_set_equals_itself() -> None:
    tables = load_table_set("h100")
    difference = diff_tables(tables, tables)
    for d in difference.operators:
        assert (d.median, d.p10, d.p90, d.only_a, d.only_b) == (1.0, 1.0, 1.0, 0, 0)
    gemms = next(d for d in difference.operators if d.operator == "gemm")
    assert gemms.common == tables.tables["gemm"].num_rows


def test_repeats_of_a_point_count_with_their_median() -> None:
    tables = load_table_set("h100")
    table = tables.tables["allreduce"]
    rows = len(table.columns["latency_us"])
    points = len({tuple(table.columns[c.name][i] for c in table.schema.required[:-1]) for i in range(rows)})
    assert diff_tables(tables, tables, operators=["allreduce"]).operators[0].common == points < rows


def test_two_gpus_compare(shared: Path) -> None:
    tree = shared / "reference" / "infersim_bench_data"
    sets = [load_table_set(f"{tree}:{gpu}") for gpu in ("h800", "h20")]
    difference = diff_tables(*sets)
    decodes = next(d for d in difference.operators if d.operator == "attention_decode")
    assert decodes.common == 287
    # By hand, mha/decode/{h800,h20}/64-2-128.csv, batch 1, kv 131072.
    assert decodes.worst[0]["ratio"] == pytest.approx(2523.59 / 64.331)


def test_unknown_and_absent_operators(pair: tuple[MeasuredTables, MeasuredTables]) -> None:
    with pytest.raises(MeasureError, match="unknown operator 'conv'"):
        diff_tables(*pair, operators=["conv"])
    with pytest.raises(MeasureError, match="neither A nor B has a table of moe"):
        diff_tables(*pair, operators=["moe"])


# -- several sources of a GPU ------------------------------------------------------------------------


def folder_of_sources(folder: Path, factors: dict[str, float], count: int = 9) -> Path:
    """A GPU's sources, whose bf16 GEMMs take a factor of m + 50 us; the first has an fp8 GEMM too."""
    for name, factor in factors.items():
        rows = [(gemm(m), factor * (m + 50.0)) for m in range(1, count + 1)]
        rows += [(gemm(1, dtype="fp8"), 30.0)] * (name == next(iter(factors)))
        write_tables([write_journal(folder / f"{name}.jsonl", rows)], folder / "h100" / name)
    return folder / "h100"


def test_the_closest_source_is_the_one_with_the_least_rms(tmp_path: Path) -> None:
    sources = load_table_set(str(folder_of_sources(tmp_path, {"a": 1.2, "b": 0.9, "c": 1.0})))
    rows = [(gemm(m), m + 50.0) for m in range(1, 10)] + [(gemm(1, dtype="fp8"), 33.0)]
    campaign = load_table_set(str(write_journal(tmp_path / "own.jsonl", rows)))
    bf16 = [one for one in compare_campaigns(sources, campaign) if one.family == "bf16"]
    # c has exactly the campaign's rows
    assert [(one.source, one.common, one.shared, one.is_closest) for one in bf16] == [
        ("b", 9, 9, True),
        ("a", 9, 9, False),
    ]
    assert [one.median for one in bf16] == pytest.approx([1 / 0.9, 1 / 1.2])
    assert [one.rms for one in bf16] == [one.shared_rms for one in bf16]
    assert bf16[0].rms == pytest.approx(-np.log(0.9))
    fp8 = [one for one in compare_campaigns(sources, campaign) if one.family == "fp8"]
    # of one point no source is the closest
    assert [(one.source, one.common, one.shared_rms, one.is_closest) for one in fp8] == [
        ("a", 1, None, False)
    ]


def test_campaigns_are_ranked_at_points_that_all_have(tmp_path: Path) -> None:
    folder = folder_of_sources(tmp_path, {"a": 1.1, "b": 1.2})
    # beyond the points of both, a is far off
    more = [(gemm(m), 1.1 * (m + 50.0)) for m in range(1, 10)] + [(gemm(m), 900.0) for m in range(10, 20)]
    write_tables([write_journal(tmp_path / "a.jsonl", more)], folder / "a", overwrite=True)
    own = write_journal(tmp_path / "own.jsonl", [(gemm(m), m + 50.0) for m in range(1, 20)])
    first, second = compare_campaigns(load_table_set(str(folder)), load_table_set(str(own)))
    assert (first.source, first.common, first.shared, first.is_closest) == ("a", 19, 9, True)
    assert first.rms > second.rms > first.shared_rms


def test_campaigns_are_printed_with_the_closest_of_each_family(tmp_path: Path) -> None:
    folder = folder_of_sources(tmp_path, {"a": 1.1, "b": 1.2})
    own = write_journal(tmp_path / "own.jsonl", [(gemm(m), m + 50.0) for m in range(1, 10)])
    words = ["diff", str(folder), str(own), "--campaigns"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.endswith("closest"))
    assert line.split()[:5] == ["gemm", "bf16", "a", "9", "0.909"]
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert [(one["source"], one["is_closest"]) for one in document] == [("a", True), ("b", False)]


# -- the picture ---------------------------------------------------------------------------------


def noisy(tables: MeasuredTables) -> MeasuredTables:
    rng = np.random.default_rng(0)
    changed = {}
    for name, table in tables.tables.items():
        us = table.columns["latency_us"]
        factor = 1.2 * np.exp(rng.normal(0.0, 0.05, len(us)))
        changed[name] = replace(table, columns={**table.columns, "latency_us": us * factor})
    return replace(tables, tables=changed)


@pytest.mark.slow
def test_the_picture_has_a_panel_an_operator_and_shows_the_shift(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables, gpu = load_table_set("h100"), load_gpu("h100")
    difference = diff_tables(tables, noisy(tables))
    figure = draw_difference(difference, gpu)
    assert len(figure.axes) == len(difference.common) > 20
    gemms = figure.axes[0]
    assert gemms.get_xscale() == gemms.get_yscale() == "log"
    assert gemms.get_title(loc="left").startswith("GEMM: median 1.2")
    low, high = gemms.get_ylim()
    assert low < 1.0 < 1.2 < high
    lines = [line.get_ydata() for line in gemms.get_lines() if len(line.get_xdata()) > 5]
    assert lines
    assert all(abs(np.median(np.asarray(line, float)) - 1.2) < 0.02 for line in lines)
    drawn = gemms.collections[0].get_offsets()
    assert len(drawn) <= 6000


@pytest.mark.slow
def test_files_are_written_and_repeat(tmp_path: Path, pair: tuple[MeasuredTables, MeasuredTables]) -> None:
    pytest.importorskip("matplotlib")
    difference, gpu = diff_tables(*pair), load_gpu("h100")
    first = save_difference(difference, gpu, tmp_path / "a.svg").read_bytes()
    assert save_difference(difference, gpu, tmp_path / "b.svg").read_bytes() == first
    assert save_difference(difference, gpu, tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(MeasureError, match=r"must end in \.png or \.svg"):
        save_difference(difference, gpu, tmp_path / "d.jpg")
    with pytest.raises(MeasureError, match="does not exist"):
        save_difference(difference, gpu, tmp_path / "no" / "d.png")
    lonely = diff_tables(*pair, operators=["elementwise"])
    with pytest.raises(MeasureError, match="no point in common"):
        save_difference(lonely, gpu, tmp_path / "e.png")


def test_without_matplotlib_only_the_picture_fails(
    tmp_path: Path, pair: tuple[MeasuredTables, MeasuredTables], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MeasureError, match=r"pip install fastroof\[report\]"):
        save_difference(diff_tables(*pair), load_gpu("h100"), tmp_path / "a.png")


@pytest.mark.slow
def test_comparing_loads_neither_matplotlib_nor_torch() -> None:
    code = (
        "import sys, kernels_bench.commands.diff, kernels_bench.commands.export; "
        "from kernels_bench.output.diff import diff_tables; "
        "from kernels_bench.output.table_sets import load_table_set as load; "
        "diff_tables(load('h100'), load('h100')); "
        "bad = {'matplotlib', 'torch', 'pydantic', 'numba'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sizes_grow_with_the_work() -> None:
    columns: dict[str, Any] = {
        "dtype": np.array(["bf16"] * 2, object),
        "m": np.array([1, 64]),
        "n": np.array([128, 128]),
        "k": np.array([256, 256]),
        "latency_us": np.ones(2),
    }
    size, unit = sizes_of("gemm", columns, load_gpu("h100"))
    assert (size.tolist(), unit) == ([2.0 * 128 * 256, 2.0 * 64 * 128 * 256], "FLOP")


def test_the_command(tmp_path: Path) -> None:
    a, b = (str(write_journal(tmp_path / f"{n}.jsonl", rows)) for n, rows in (("a", A), ("b", B)))
    shown = CliRunner().invoke(app, ["diff", a, b, "--keys"])
    assert shown.exit_code == 0, shown.output
    line = next(line for line in shown.output.splitlines() if line.startswith("gemm "))
    assert line.split() == ["gemm", "2", "1", "1", "1.250", "0.650", "1.850"]
    document = json.loads(CliRunner().invoke(app, ["diff", a, b, "--json", "--operator", "gemm"]).output)
    assert [d["operator"] for d in document["operators"]] == ["gemm"]
    assert len(document["keys"]) == 2
