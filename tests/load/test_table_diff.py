"""Two table sets at the points that both have: pairing, families, flags, and sets by one word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fastroof.cli import app
from fastroof.errors import GpuError, TableError
from fastroof.load import MeasuredTable, MeasuredTables, load_measured
from fastroof.load.compare import FAR_APART, diff_tables, find_moved
from fastroof.load.families import paired_points, region_sizes
from fastroof.load.write import write_source


def gemms(*rows: tuple[str, int, int, int, float]) -> dict[str, Any]:
    columns = zip(*rows, strict=True)
    named: dict[str, Any] = dict(
        zip(("dtype", "m", "n", "k", "latency_us"), map(np.array, columns), strict=True)
    )
    return named | {"dtype": named["dtype"].astype(object)}


def tables_of(columns: dict[str, Any]) -> MeasuredTables:
    return MeasuredTables("h100", {"gemm": MeasuredTable("gemm", columns, "made")}, Path())


def grid(dtype: str, factor: float, k: int = 64) -> list[tuple[str, int, int, int, float]]:
    return [
        (dtype, m, n, k, factor * (5.0 + m * n / 1e4)) for m in (1, 2, 5, 8, 9, 64) for n in (64, 128, 256)
    ]


def test_what_moved_is_a_median_by_family_and_size_without_equal_rows() -> None:
    before = gemms(*grid("bf16", 1.0), *grid("fp8", 1.0), ("fp8", 512, 64, 64, 8.0), ("fp8", 1, 8, 8, 7.0))
    after = gemms(*grid("bf16", 1.0), *grid("fp8", 0.5), ("fp8", 512, 64, 64, 12.0))
    moved = find_moved(tables_of(before), tables_of(after))
    assert [(*one.place, one.points) for one in moved] == [
        ("gemm", "fp8", "small", 18), ("gemm", "fp8", "large", 1),
    ]  # fmt: skip
    assert [one.median for one in moved] == pytest.approx([0.5, 1.5])
    assert moved[0].text == "0.50 (0.50 to 0.50)"
    back = find_moved(tables_of(after), tables_of(before))
    assert [one.median for one in back] == pytest.approx([2.0, 2 / 3])
    with pytest.raises(TableError, match="unknown operator"):
        find_moved(tables_of(before), tables_of(after), ["gemms"])


def test_the_command_sums_up_by_gpu(tmp_path: Path) -> None:
    for gpu, factor in (("h100", 0.5), ("h200", 2.0)):
        write_source(tmp_path / "old" / gpu / "a", {"gemm": gemms(*grid("fp8", 1.0))}, {"gpu": gpu})
        write_source(tmp_path / "new" / gpu / "a", {"gemm": gemms(*grid("fp8", factor))}, {"gpu": gpu})
    sets = [f"{tmp_path}/{which}/{{gpu}}" for which in ("old", "new")]
    args = ["tables", "diff", *sets, "--gpu", "h100"]
    out = json.loads(CliRunner().invoke(app, [*args, "--gpu", "h200", "--json"]).stdout)
    assert [(one["gpu"], one["operator"], one["family"], one["size"], one["points"]) for one in out] == [
        (gpu, "gemm", "fp8", "small", 18) for gpu in ("h100", "h200")
    ]
    assert [one["median"] for one in out] == pytest.approx([0.5, 2.0])
    line = CliRunner().invoke(app, args).stdout.splitlines()[-1]
    assert line.split() == ["gemm", "fp8", "small", "0.50", "(0.50", "to", "0.50)"]


def test_a_point_counts_once_with_its_median() -> None:
    a = gemms(
        ("bf16", 1, 8, 8, 10.0), ("bf16", 1, 8, 8, 30.0), ("bf16", 1, 8, 8, 11.0), ("bf16", 2, 8, 8, 5.0)
    )
    b = gemms(("bf16", 1, 8, 8, 22.0), ("fp8", 2, 8, 8, 1.0))
    points = paired_points("gemm", a, b)
    assert points.a_us.tolist()[:2] == [11.0, 5.0]
    assert np.isnan(points.a_us[2])
    common = points.common()
    assert (common.a_us.tolist(), common.b_us.tolist()) == ([11.0], [22.0])
    np.testing.assert_allclose(common.log_ratio, [np.log(2.0)])
    assert common.columns["m"].tolist() == [1]


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("gemm", ["m", "n k"]),
        ("attention_decode", ["batch_size", "kv_len"]),
        ("attention_prefill", ["batch_size", "q_len"]),
        ("moe", ["num_tokens"]),
        ("allreduce", ["message_bytes"]),
        ("elementwise", ["m", "width"]),
    ],
)
def test_sizes_of_operators(operator: str, names: list[str]) -> None:
    tokens = ("batch_size", "kv_len", "q_len", "num_tokens")
    every = ("m", "n", "k", *tokens, "message_bytes", "width", "io_bytes")
    assert list(region_sizes(operator, dict.fromkeys(every, np.array([2])))) == names


def test_families_are_compared_apart() -> None:
    a = gemms(*grid("bf16", 1.0), *grid("fp8", 1.0), ("bf16", 3, 8, 8, 1.0))
    b = gemms(*grid("bf16", 1.1), *grid("fp8", 2.0), ("fp8", 3, 8, 8, 1.0), ("fp8", 3, 16, 8, 1.0))
    found = diff_tables(tables_of(a), tables_of(b), ("one", "other"))
    bf16, fp8 = found
    assert (bf16.family, bf16.points, bf16.only_a, bf16.only_b) == ({"dtype": "bf16"}, 18, 1, 0)
    assert (fp8.family, fp8.points, fp8.only_a, fp8.only_b) == ({"dtype": "fp8"}, 18, 0, 2)
    assert (bf16.median, bf16.rms, bf16.p10, bf16.p90) == pytest.approx((1.1, np.log(1.1), 1.1, 1.1))
    assert (bf16.is_flagged, fp8.is_flagged) == (False, True)


@pytest.mark.parametrize(
    ("factor", "flagged"), [(FAR_APART * 1.01, True), (1 / FAR_APART / 1.01, True), (1.49, False)]
)
def test_a_family_is_flagged_whichever_is_slower(factor: float, flagged: bool) -> None:
    one, other = (tables_of(gemms(*grid("bf16", f))) for f in (1.0, factor))
    (family,) = diff_tables(one, other)
    assert family.is_flagged is flagged


def test_without_common_points_the_ratio_is_missing() -> None:
    one, other = tables_of(gemms(*grid("bf16", 1.0))), tables_of(gemms(*grid("bf16", 1.0, k=32)))
    (family,) = diff_tables(one, other)
    assert (family.points, family.only_a, family.only_b, family.median, family.rms) == (0, 18, 18, None, None)


def test_operators_that_are_not_there_are_refused() -> None:
    one = tables_of(gemms(*grid("bf16", 1.0)))
    with pytest.raises(TableError, match="unknown operator 'gem'"):
        diff_tables(one, one, operators=["gem"])
    with pytest.raises(TableError, match="neither A nor B has a table of moe"):
        diff_tables(one, one, operators=["moe"])


def test_sets_by_one_word(tmp_path: Path) -> None:
    source = "aiconfigurator-trtllm-1.3.0rc20"
    assert set(load_measured(f"h100/{source}").sources.values()) == {source}
    assert "gemm" in load_measured("h100").sources
    shipped = Path(__file__).resolve().parents[2] / "bench_data" / "h100"
    assert set(load_measured(str(shipped / source)).sources.values()) == {source}


@pytest.mark.parametrize("word", ["package:h100/vllm", "package:h100//0.24.0", "package:"])
def test_half_a_name_in_the_package_is_refused(word: str) -> None:
    with pytest.raises(TableError, match=r"as package:h200/vllm/0\.24\.0"):
        load_measured(word)


def test_words_that_name_nothing_are_refused() -> None:
    with pytest.raises(
        TableError, match="h1000/mine is not a folder of measured tables; need GPU, GPU/SOURCE"
    ):
        load_measured("h1000/mine")
    with pytest.raises(TableError, match="no source 'mine'"):
        load_measured("h100/mine")
    with pytest.raises(GpuError, match="h1000"):
        load_measured("h1000")
