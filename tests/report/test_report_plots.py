"""PNG and SVG of a report's charts: what is on them, and what the commands refuse."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.errors import FastroofError
from fastroof.report import draw_pareto, read_results, save_figure
from fastroof.report.front import pareto_front, rows_where, swept_words
from fastroof.report.results_file import Results
from tests.command_line import refused
from tests.reference.made_results import write_deployments

pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install fastroof[report]")


@pytest.fixture(scope="module")
def results(deployed: Path) -> Results:
    return read_results(deployed)


def words(figure: Any) -> str:
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")]
        found += [label.get_text() for label in (*axes.texts, *axes.get_yticklabels())]
        if axes.get_legend():
            found += [text.get_text() for text in axes.get_legend().get_texts()]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "\n".join(found)


def test_pareto_lines_are_fronts(results: Results, rows: list[dict[str, Any]]) -> None:
    figure = draw_pareto(results, colour_by="tp", isl=1024)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens/s per user", "tokens/s per GPU")
    for word in ("tp 1", "tp 2", "tp 4", "isl 1024, osl 128", "TPOT 30 ms", "llama-3.1-8b, qwen3-8b on h100"):
        assert word in words(figure)
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    own = [r for r in rows if r["tp"] == 2 and r["isl"] == 1024 and r["exceeds"] is None]
    x, y = (np.array([r[f"tokens_per_s_per_{of}"] for r in own]) for of in ("user", "gpu"))
    front = pareto_front(x, y)
    assert {tuple(point) for point in lines["tp 2"]} == set(zip(x[front], y[front], strict=True))
    points = np.concatenate([np.asarray(c.get_offsets()) for c in axes.collections])
    assert len(points) == sum(r["isl"] == 1024 for r in rows)
    for limits, places in zip((axes.get_xlim(), axes.get_ylim()), points.T, strict=True):
        assert limits[0] < places.min()
        assert places.max() < limits[1]
    figure.draw_without_rendering()
    (limit,) = axes.texts
    assert not limit.get_window_extent().padded(3).count_contains(axes.transData.transform(points))


def faster(rows: list[dict[str, Any]], model: str, factor: float) -> list[dict[str, Any]]:
    """The rows of qwen3-8b at one workload as another model, with other rates for GPUs."""
    return [
        row | {"model": model, "tokens_per_s_per_gpu": factor * row["tokens_per_s_per_gpu"]}
        for row in rows
        if row["model"] == "qwen3-8b" and row["isl"] == 1024
    ]


def test_the_slower_model_is_not_flattened(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    two = faster(rows, "slow", 0.1) + faster(rows, "fast", 1.0)
    figure = draw_pareto(read_results(write_deployments(tmp_path / "r.parquet", two, "")))
    (axes,) = figure.axes
    figure.draw_without_rendering()
    fronts = {line.get_label(): axes.transData.transform(line.get_xydata())[:, 1] for line in axes.lines}
    heights = {name: float(np.ptp(fronts[name])) / axes.bbox.height for name in ("slow", "fast")}
    # the same front: as high as the other one, and a third of the picture
    assert heights["slow"] == pytest.approx(heights["fast"], rel=0.01)
    assert heights["slow"] > 0.33
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert len(ticks) >= 4
    assert not any("e" in tick or "$" in tick for tick in ticks)
    # without fronts there is nothing to flatten
    beyond = [row | {"exceeds": "ttft"} for row in two]
    (axes,) = draw_pareto(read_results(write_deployments(tmp_path / "b.parquet", beyond, ""))).axes
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0.0


def test_many_models_have_looks_of_their_own(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    many = [row for i in range(15) for row in faster(rows, f"model-{i}", 1.0 + 0.1 * i)]
    figure = draw_pareto(read_results(write_deployments(tmp_path / "r.parquet", many, "")))
    (axes,) = figure.axes
    looks = {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"}
    assert len(looks) == 15
    found = boxes(figure)
    assert len(figure.legends[0].get_texts()) == 15
    assert not found["legend 0"].overlaps(found["axes 0"])


def boxes(figure: Any) -> dict[str, Any]:
    """Boxes of titles, legends, axes with labels, and ticks of the first axis, pixels."""
    figure.draw_without_rendering()
    found = {f"text {text.get_text()}": text.get_window_extent() for text in figure.texts}
    found |= {f"legend {i}": legend.get_window_extent() for i, legend in enumerate(figure.legends)}
    for i, axes in enumerate(figure.axes):
        found[f"axes {i}"] = axes.get_tightbbox()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("length", [12, 60, 110])
def test_nothing_is_cut_and_nothing_collides(
    rows: list[dict[str, Any]], h100: fastroof.Tables, tmp_path: Path, length: int
) -> None:
    long = {name: (f"{name}-" + "instruct-" * 12)[:length] for name in ("llama-3.1-8b", "qwen3-8b")}
    named = [
        {**row, "model": long[row["model"]], "max_num_batched_tokens": 8192 // row["tp"]} for row in rows
    ]
    path = write_deployments(tmp_path / "r.parquet", named, h100.content_hash)
    figure = draw_pareto(read_results(path))
    found = boxes(figure)
    width, height = figure.bbox.width, figure.bbox.height
    for name, box in found.items():
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= width, name
        assert box.y1 <= height, name
    for a, b in itertools.combinations(found, 2):
        assert not found[a].overlaps(found[b]), (a, b)
    assert all(axes.get_position().height > 0.3 for axes in figure.axes)


def test_impossible_plots_are_refused(results: Results, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(FastroofError, match="cannot colour by 'ttft_ms'"):
        draw_pareto(results, colour_by="ttft_ms")
    with pytest.raises(FastroofError, match="no column kv_len"):
        draw_pareto(results, kv_len=3)
    with pytest.raises(FastroofError, match="has isl 3; valid: 1024, 4000"):
        draw_pareto(results, isl=3)
    with pytest.raises(FastroofError, match="no estimated row"):
        draw_pareto(results, isl=1024, osl=500)
    assert swept_words(results, rows_where(results, isl=1024))[1] == "isl 1024, osl 128"


def test_a_plot_is_the_same_file_each_time(results: Results, tmp_path: Path) -> None:
    for suffix in ("png", "svg"):
        files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
        for file in files:
            save_figure(draw_pareto(results), file)
        assert files[0].read_bytes() == files[1].read_bytes()


def test_plot_command(deployed: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    chosen = "--colour-by", "dtype", "--where", "model=qwen3-8b"
    done = CliRunner().invoke(app, ["plot", "pareto", str(deployed), "-o", str(file), *chosen])
    assert (done.exit_code, done.stderr, done.stdout) == (0, "", f"wrote {file}\n")
    assert file.stat().st_size > 1000


@pytest.mark.parametrize(
    ("where", "message"),
    [("isl", "not COLUMN=VALUE"), ("colour=3", "the columns are"), ("isl=3", "valid: 1024, 4000")],
)
def test_plot_command_refuses(deployed: Path, tmp_path: Path, where: str, message: str) -> None:
    arguments = ["plot", "pareto", str(deployed), "-o", str(tmp_path / "a.png"), "--where", where]
    done = refused(*arguments)
    assert message in done
    assert done.count("\n") == 1
