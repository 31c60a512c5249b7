"""The report: its rows, the text of its page, and what the page does in a browser."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.columns import ORIGINS
from fastroof.errors import FastroofError
from fastroof.report.front import CURVE_POINTS, MOST_LEADERS, choose_rows, pareto_front
from fastroof.report.html import page as charts
from fastroof.report.html import write_report
from fastroof.report.html.document import embedded_json
from fastroof.report.html.page import packed_columns, rounded
from fastroof.report.plots import GROUPS
from fastroof.report.results_file import read_results
from fastroof.report.steps import StepSource, steps_of_row
from tests.command_line import refused
from tests.reference.browser import Browser
from tests.reference.made_results import CONCURRENCY, LIMITS, write_deployments

CHECKOUT = Path(__file__).resolve().parents[2]
NONE = "\u2013"
HOSTILE = "</script><script>document.title='owned'</script><!-- <b>&amp;\u2028$title"
STEP_SPEC = {
    "models": ["llama-3.1-8b", "qwen3-8b"],
    "tp": [1, 2],
    "batch_size": {"start": 1, "stop": 512, "step": 7},
    "kv_len": [1024, 4096],
    "tpot_ms": 20.0,
}


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "results.parquet"
    fastroof.run_sweep({**STEP_SPEC, "keep": "all"}, path)
    return path


def embedded(page: Path) -> Any:
    found = re.search(
        r'<script type="application/json" id="results">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def column(data: Any, name: str) -> list[Any]:
    packed = next(c for c in data["columns"] if c["name"] == name)
    if "constant" in packed:
        return [packed["constant"]] * data["num_rows"]
    return packed.get("values") or [packed["words"][code] for code in packed["codes"]]


# -- which rows ----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2), st.booleans()), max_size=40)
)
def test_front_is_what_nothing_beats(points: list[tuple[int, int, int, bool]]) -> None:
    x = np.array([float(p[0]) if p[3] else np.nan for p in points])
    y = np.array([float(p[1]) for p in points])
    group = np.array([p[2] for p in points], np.int64)
    front = pareto_front(x, y, group)
    for i in range(len(points)):
        rivals = [j for j in range(len(points)) if group[j] == group[i] and points[j][3]]
        beaten = any(
            x[j] >= x[i] and y[j] >= y[i] and (x[j] > x[i] or y[j] > y[i] or j < i) for j in rivals if j != i
        )
        assert front[i] == (points[i][3] and not beaten)


def test_all_rows_of_a_small_sweep(deployed: Path, rows: list[dict[str, Any]]) -> None:
    results = read_results(deployed)
    chosen = choose_rows(results, 1000)
    assert chosen.indices.tolist() == list(range(len(rows)))
    assert results.load() == "clients"
    taken = results.rows(np.array([3, 99, 100, len(rows) - 1]))
    assert taken["ttft_ms"] == [rows[i]["ttft_ms"] for i in (3, 99, 100, len(rows) - 1)]
    within = [i for i in chosen.leaders.tolist() if rows[i]["exceeds"] is None]
    assert within == chosen.leaders.tolist()
    best = max(range(len(rows)), key=lambda i: (rows[i]["exceeds"] is None) * rows[i]["tokens_per_s_per_gpu"])
    assert chosen.leaders[0] == best


def test_rows_of_a_large_sweep_keep_the_fronts_and_the_leaders_curves(stepped: Path) -> None:
    results = read_results(stepped)
    all_rows = choose_rows(results, 10**6)
    few = choose_rows(results, 300)
    assert results.num_rows > len(few.indices) == len(set(few.indices.tolist())) == 300
    assert np.array_equal(few.leaders, all_rows.leaders)
    assert len(few.leaders) <= MOST_LEADERS
    assert set(few.leaders.tolist()) <= set(few.indices.tolist())
    x = results.numbers("tokens_per_s_per_user")
    y = np.where(results.is_within(), results.numbers("tokens_per_s_per_gpu"), np.nan)
    front = np.flatnonzero(pareto_front(x, y, results.groups(["model", "kv_len"])))
    kept = choose_rows(results, 500)
    assert len(front) > 50
    assert set(front.tolist()) <= set(kept.indices.tolist())
    # a leader's curve keeps both ends
    curve, batch = results.groups(results.series("batch_size")), results.numbers("batch_size")
    for leader in kept.leaders:
        own = np.flatnonzero(curve == curve[leader])
        shown = batch[np.intersect1d(own, kept.indices)]
        assert (shown.min(), shown.max()) == (batch[own].min(), batch[own].max())
        assert len(shown) >= CURVE_POINTS
    assert len(choose_rows(results, 5).indices) == 5
    assert len(choose_rows(results, 5).leaders) == 5


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best batches of many contexts, as the packaged sweep keeps them."""
    path = tmp_path_factory.mktemp("contexts") / "results.parquet"
    kv_len = {"start": 128, "stop": 32768, "num": 129, "scale": "log2"}
    fastroof.run_sweep({**STEP_SPEC, "dtype": ["bf16", "fp8"], "kv_len": kv_len}, path)
    return path


def test_the_first_view_is_complete(contexts: Path) -> None:
    """However many rows the sweep has: the rows that a page starts with, and their steps."""
    results = read_results(contexts)
    start = results.numbers("kv_len") == results.start_workload()["kv_len"]
    chosen = choose_rows(results, 300)
    assert results.num_rows > 3 * len(chosen.indices)
    assert set(np.flatnonzero(start).tolist()) <= set(chosen.leaders.tolist())


def test_step_sweeps_have_the_rates_and_a_load(stepped: Path, tmp_path: Path) -> None:
    results = read_results(stepped)
    assert results.load() == "batch_size"
    step_us = results.numbers("step_us")
    assert np.array_equal(results.numbers("tokens_per_s_per_user"), 1e6 / step_us)
    assert np.array_equal(results.numbers("tpot_ms"), step_us / 1e3)
    best = tmp_path / "best.parquet"
    fastroof.run_sweep(STEP_SPEC, best)
    assert read_results(best).load() == "kv_len"
    assert read_results(best).start_workload() == {"kv_len": 4096}


# -- what is no results file ---------------------------------------------------------------------


def test_wrong_files_are_refused(tmp_path: Path, deployed: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(FastroofError) as caught:
            write_report(tmp_path / name, tmp_path / "out.html")
        assert not (tmp_path / "out.html").exists()
        return str(caught.value)

    table = pq.read_table(deployed)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    capacities = pa.table({"a": [1]}).replace_schema_metadata({"fastroof.kind": "capacities"})
    pq.write_table(capacities, tmp_path / "capacities.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    pq.write_table(table.drop(["ttft_ms"]), tmp_path / "short.parquet")
    swapped = table.drop(["tpot_ms"]).append_column("tpot_ms", pa.array(["1"] * table.num_rows))
    pq.write_table(swapped, tmp_path / "text.parquet")
    (tmp_path / "results.csv").write_text("model,tp\nm,1\n")
    (tmp_path / "cut.parquet").write_bytes(deployed.read_bytes()[:5000])
    assert "does not exist" in refused("absent.parquet")
    assert "is a folder" in refused(".")
    assert "not a Parquet file" in refused("results.csv")
    assert "not a Parquet file" in refused("cut.parquet")
    assert "lacks the columns" in refused("other.parquet")
    assert "has capacities; reports draw results of deployments or steps" in refused("capacities.parquet")
    assert "for deployments it lacks the columns ttft_ms" in refused("short.parquet")
    assert "column tpot_ms is string, need numbers" in refused("text.parquet")
    assert "has no rows" in refused("empty.parquet")


def test_wrong_outputs_are_refused(tmp_path: Path, deployed: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    for output, message in (
        (tmp_path / "a.pdf", r"must end in \.html"),
        (tmp_path / "folder.html", "is a folder"),
        (tmp_path / "absent" / "a.html", "does not exist"),
        (Path("/proc/a.html"), "cannot be written"),
    ):
        with pytest.raises(FastroofError, match=message):
            write_report(deployed, output)
    with pytest.raises(FastroofError, match="max_rows"):
        write_report(deployed, tmp_path / "a.html", max_rows=0)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


# -- the steps behind rows -----------------------------------------------------------------------


def test_steps_of_deployments_are_the_estimates_mean_steps(
    deployed: Path, rows: list[dict[str, Any]]
) -> None:
    source = StepSource(read_results(deployed))
    off: dict[str, list[float]] = {"decode step": [], "step with prompts": []}
    for row in rows:
        steps = source.steps(row)
        assert [step.name for step in steps] == list(off)[: 1 + (row["mixed_share"] > 0)]
        for step, estimated in zip(steps, ("decode_step_ms", "mixed_step_ms"), strict=False):
            assert sum(step.groups_us.values()) == pytest.approx(step.total_us, rel=1e-9)
            assert set(step.groups_us) <= set(GROUPS)
            off[step.name].append(abs(step.total_us / 1e3 / row[estimated] - 1.0))
    # whole requests instead of a mean of them (of fewer than the clients, behind a front end); a few prompt
    # tokens may be a step of a measured GEMM
    assert max(off["decode step"]) < 0.03
    assert np.median(off["step with prompts"]) < 0.01
    assert max(off["step with prompts"]) < 0.25
    assert not source.problems
    assert not source.stale


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"pp": 2}, {"dp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_rows_have_steps_of_their_own_layout(
    deployed: Path, rows: list[dict[str, Any]], split: dict[str, int]
) -> None:
    """Whichever rows of the same model, GPU and tp were broken down before."""
    own = rows[0] | {"model": "qwen3-30b-a3b", "tp": 1, "pp": 1, "dp": 1, "ep": 1, "replicas": 2}
    other = own | split | {"replicas": 1}
    together, alone = StepSource(read_results(deployed)), StepSource(read_results(deployed))
    first, second = together.steps(own), together.steps(other)
    assert not together.problems
    assert [step.total_us for step in second] == [step.total_us for step in alone.steps(other)]
    # as many requests, and what GPUs send each other
    assert first[0].what == second[0].what
    assert "communication" not in first[0].groups_us
    assert second[0].groups_us["communication"] > 0.0


def test_larger_batches_have_larger_plans(stepped: Path) -> None:
    source, row = StepSource(read_results(stepped)), pq.read_table(stepped).to_pylist()[0]
    times = [source.steps({**row, "batch_size": batch})[0].total_us for batch in (1024, 2048, 4096)]
    assert not source.problems
    assert times == sorted(times)


@pytest.mark.slow
def test_tables_that_have_changed_since_a_sweep_are_reported(stepped: Path) -> None:
    results = read_results(stepped)
    row = pq.read_table(stepped).to_pylist()[0]
    there = results.metadata["fastroof.sources_hash"]
    for changed, is_stale in (
        ({}, False),
        ({"fastroof.sources_hash": "other"}, True),
        ({"fastroof.sources_hash": f"other {there}"}, False),
        ({"fastroof.sources_hash": ""}, False),
    ):
        source = StepSource(replace(results, metadata={**results.metadata, **changed}))
        assert source.steps(row)
        assert source.stale == is_stale, changed


def test_steps_of_a_row(rows: list[dict[str, Any]]) -> None:
    row = {**rows[0], "tokens_per_s": 1000.0, "tpot_ms": 32.0, "replicas": 2, "isl": 1000, "osl": 100}
    row["effective_concurrency"] = 40.0
    decode = steps_of_row("deployments", {**row, "mixed_share": 0.0})
    assert [(step.name, len(step.requests), step.requests[0]) for step in decode] == [
        ("decode step", 16, (1, 1049))
    ]
    # 5 requests a second and worker, 19 of 20 by others, 0.032 s a step, 1000 tokens each, half of the steps
    mixed = steps_of_row("deployments", {**row, "mixed_share": 0.5})[1]
    assert mixed.requests[16:] == [(304, 348)]
    cached = steps_of_row("deployments", {**row, "mixed_share": 0.5, "prefix_hit": 0.8})[1]
    assert cached.requests[16:] == [(61, 869)]
    apart = steps_of_row("deployments", {**row, "mode": "disaggregated", "replicas": 0, "decode_workers": 4})
    assert [len(step.requests) for step in apart] == [8, 1]
    assert apart[1].requests == [(1000, 0)]
    assert steps_of_row("steps", {"batch_size": 3, "kv_len": 9})[0].requests == [(1, 8)] * 3
    with pytest.raises(FastroofError, match="no batch"):
        steps_of_row("steps", {"batch_size": 0, "kv_len": 9})
    with pytest.raises(FastroofError, match="no tpot_ms"):
        steps_of_row("deployments", {**row, "tpot_ms": None})


@pytest.mark.slow
def test_rows_that_cannot_be_broken_down_are_reported(
    tmp_path: Path, h100: fastroof.Tables, rows: list[dict[str, Any]]
) -> None:
    gone = [{**row, "model": "gone-7b"} if row["tp"] == 2 else row for row in rows]
    path = write_deployments(tmp_path / "r.parquet", gone, "another hash")
    written = write_report(path, tmp_path / "r.html")
    assert any("no step breakdown" in note and "gone-7b" in note for note in written.notes)
    assert any("tables have changed" in note for note in written.notes)
    assert 0 < written.num_explained < written.num_shown == len(rows)
    strange = [{**row, "gpu": "abacus"} for row in rows]
    path = write_deployments(tmp_path / "s.parquet", strange, h100.content_hash)
    assert write_report(path, tmp_path / "s.html").num_explained == 0
    assert embedded(tmp_path / "s.html")["gpus"] == {}


# -- the page as a file --------------------------------------------------------------------------


def test_page_holds_the_rows(deployed: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    written = write_report(deployed, tmp_path / "r.html")
    assert written.path == tmp_path / "r.html"
    assert written.num_bytes == written.path.stat().st_size
    data = embedded(written.path)
    for name in rows[0]:
        given = [row[name] for row in rows]
        assert column(data, name) == [rounded(value) for value in given]
    assert data["facts"]["limits"] == {**LIMITS, "tokens_per_s_per_user": 1e3 / LIMITS["tpot_ms"]}
    assert data["facts"]["curves"] == ["ttft_ms", "tpot_ms"]
    assert data["notes"] == [f"The sweep counted {len(rows)} evaluated; infeasible: 3 memory."]
    assert data["gpus"]["h100"]["hbm_bytes_per_s"] == 3.35e12
    # the page's script reads an operator's figures by their places
    steps = [step for of_row in data["steps"].values() for step in of_row]
    assert steps
    for step in steps:
        for _, calls, total_us, flops, moved, mfu, bound, origin in step["operators"]:
            assert calls >= 1
            assert 0 < total_us <= step["total_us"]
            assert moved > 0
            assert bound in ("compute", "memory", "launch", "communication")
            assert origin in ORIGINS
            assert (mfu is None) == (flops == 0)
            assert mfu is None or mfu < 1
    assert charts.chart_facts(read_results(deployed))["load"] == "clients"
    assert len(packed_columns(read_results(deployed), {"tp": [1, 1]})) == 1


def test_page_needs_nothing_else(deployed: Path, tmp_path: Path) -> None:
    page = write_report(deployed, tmp_path / "r.html").path.read_text()
    own = page.partition("<script>/*\nMIT License")[0] + page.rpartition("</script>\n<script>")[2]
    assert "http:" not in own
    assert "https:" not in own
    assert re.findall(r'(?:src|href)="([^"]*)"', own) == ["data:,", "#answers"]
    assert "default-src 'none'" in own
    ids = re.findall(r' id="([^"]+)"', own)
    assert len(ids) == len(set(ids))
    assert {label for label in re.findall(r'aria-labelledby="([^"]+)"', own) if " " not in label} <= set(ids)


def test_texts_cannot_leave_their_place(
    h100: fastroof.Tables, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    hostile = [{**row, "model": HOSTILE} for row in rows]
    page = write_report(
        write_deployments(tmp_path / "r.parquet", hostile, h100.content_hash), tmp_path / "r.html"
    )
    text = page.path.read_text()
    assert "document.title='owned'</script>" not in text
    assert text.count("</script>") == 3
    assert column(embedded(page.path), "model") == [HOSTILE] * len(rows)
    assert "<" not in embedded_json({"<a>": "</script>&"})
    assert rounded(float("nan")) is None
    assert rounded(1234567.0) == 1234570


def test_page_is_written_atomically(deployed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "r.html"
    page.write_text("before")

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:1000])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FastroofError, match="No space left on device"):
            write_report(deployed, page)
    assert page.read_text() == "before"
    assert list(tmp_path.iterdir()) == [page]


# -- the commands --------------------------------------------------------------------------------


def test_report_command(stepped: Path, tmp_path: Path) -> None:
    page = tmp_path / "[a].html"
    arguments = ["report", str(stepped), "-o", str(page)]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"wrote {page}: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "absent.parquet"), "absent.parquet does not exist"),
        (("report", "absent.parquet", "-o", "a.pdf"), "must end in .html"),
        (("plot", "pareto", "absent.parquet", "-o", "a.png"), "absent.parquet does not exist"),
        (("plot", "pareto", "absent.parquet", "-o", "a.pdf"), "must end in .png or .svg"),
    ],
)
def test_command_errors(arguments: tuple[str, ...], message: str) -> None:
    done = refused(*arguments)
    assert done.startswith("fastroof: error: ")
    assert message in done
    assert done.count("\n") == 1


@pytest.mark.slow
def test_the_report_needs_no_extra(deployed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['plotly'] = sys.modules['matplotlib'] = None; from fastroof.cli import app; "
        f"app(['report', {str(deployed)!r}, '-o', {str(tmp_path / 'a.html')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_plotly_is_the_file_that_its_provenance_names(deployed: Path, tmp_path: Path) -> None:
    folder = CHECKOUT / "fastroof/report/html/plotly"
    facts = tomllib.loads((folder / "provenance.toml").read_text())
    held = {path.name: path for path in folder.iterdir() if path.name != "provenance.toml"}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in held.items()}
    assert sums == facts["files"]
    program, licence = (held[name].read_text() for name in ("plotly-basic.min.js", "LICENSE"))
    assert program.startswith(f"/**\n* plotly.js (basic - minified) v{facts['package_version']}\n")
    assert facts["copyright"] in licence
    page = write_report(deployed, tmp_path / "r.html", max_rows=1)
    text = page.path.read_text()
    assert licence in text
    assert "</script" not in program
    assert program in text
    assert page.num_bytes < 1_300_000


# -- the page in a browser -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_path(deployed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(deployed, tmp_path_factory.mktemp("page") / "r.html").path


@pytest.fixture
def page(browser: Browser, page_path: Path, tmp_path: Path) -> Browser:
    """The browser on the page of the deployments."""
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=1300, height=900, deviceScaleFactor=1, mobile=False
    )
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    # a page of its own: what another one kept is not this one's
    browser.open(shutil.copy(page_path, tmp_path / "r.html"))
    return browser


def drawn(page: Browser, chart: str = "pareto") -> list[dict[str, Any]]:
    """Name, points and rows of each trace that a chart shows."""
    script = (
        f"document.getElementById('{chart}').data.map(t => "
        "({name: t.name || '', x: [...t.x], y: [...t.y], rows: [...(t.customdata || [])]}))"
    )
    found: list[dict[str, Any]] = page.run(script)
    return found


def choose(page: Browser, select: str, value: str) -> None:
    page.run(
        f"(() => {{ const s = document.getElementById('{select}'); s.value = '{value}';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.settle()


def cells(page: Browser, name: str) -> list[str]:
    at = f"[...document.querySelectorAll('#rows th')].findIndex(th => th.dataset.name === {name!r})"
    found: list[str] = page.run(
        f"[...document.querySelectorAll('#rows tbody tr')].map(tr => tr.cells[{at}].textContent)"
    )
    return found


def test_page_loads_without_a_complaint(page: Browser, rows: list[dict[str, Any]]) -> None:
    assert page.complaints == []
    assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []
    assert len(page.requests) == 1
    for chart in ("pareto", "curve-0", "curve-1", "step", "roofline"):
        assert page.run(f"document.querySelectorAll('#{chart} .main-svg').length") > 0
        assert drawn(page, chart)
    # isl and osl start at their first values: workloads do not compete
    shown = [r for r in rows if (r["isl"], r["osl"]) == (1024, 128) and r["exceeds"] is None]
    assert page.run("document.getElementById('count').textContent") == f"{len(shown)} of {len(rows)} rows"
    points = sum(len(trace["x"]) for trace in drawn(page) if trace["name"])
    assert points == len(shown)


def test_lines_are_the_pareto_fronts(page: Browser, rows: list[dict[str, Any]]) -> None:
    own = [r for r in rows if r["model"] == "qwen3-8b" and r["isl"] == 1024 and r["exceeds"] is None]
    front = {
        (r["tokens_per_s_per_user"], r["tokens_per_s_per_gpu"])
        for r in own
        if not any(
            o["tokens_per_s_per_user"] > r["tokens_per_s_per_user"]
            and o["tokens_per_s_per_gpu"] > r["tokens_per_s_per_gpu"]
            for o in own
        )
    }
    line = next(trace for trace in drawn(page) if trace["name"] == "model qwen3-8b")
    assert set(zip(line["x"], line["y"], strict=True)) == {(rounded(x), rounded(y)) for x, y in front}


def test_a_filter_changes_charts_and_table(page: Browser) -> None:
    before = drawn(page)
    assert {t["name"] for t in before if t["name"].startswith("model")} == {
        "model llama-3.1-8b",
        "model qwen3-8b",
    }
    page.click('#filters input[name="model"]', at=1)
    after = drawn(page)
    assert {t["name"] for t in after if t["name"].startswith("model")} == {"model llama-3.1-8b"}
    assert set(cells(page, "model")) == {"llama-3.1-8b"}
    page.click('#filters input[name="tp"]', at=0)
    assert set(cells(page, "tp")) == {"2", "4"}
    page.click('#filters button[type="reset"]')
    assert [trace for trace in drawn(page) if trace["name"]] == [trace for trace in before if trace["name"]]
    # a keyboard does it too, and a number limits
    page.run("document.querySelector('#filters input[name=\"dtype\"]').focus()")
    page.press(" ", "Space", 32, " ")
    assert set(cells(page, "dtype")) == {"fp8"}
    page.run("document.querySelector('#filters input[name=\"most-tpot_ms\"]').focus()")
    page.call("Input.insertText", text="10")
    page.settle()
    assert max(float(text) for text in cells(page, "tpot_ms")) <= 10
    assert page.complaints == []


@pytest.mark.slow
def test_filters_that_leave_nothing(page: Browser) -> None:
    for at in (0, 1):
        page.click('#filters input[name="model"]', at=at)
    assert page.run("document.getElementById('page').textContent") == "no rows"
    assert "nothing to draw" in page.run("document.getElementById('pareto').textContent")
    assert page.complaints == []
    page.click('#filters input[name="model"]', at=0)
    assert cells(page, "tp")


@pytest.mark.slow
def test_table_sorts_by_any_column(page: Browser) -> None:
    def numbers(name: str) -> list[float]:
        return [float(text.replace(",", "")) for text in cells(page, name)]

    assert numbers("tokens_per_s_per_gpu") == sorted(numbers("tokens_per_s_per_gpu"), reverse=True)
    # what is better comes first: the shortest times
    page.click('#rows th[data-name="ttft_ms"] button')
    rising = numbers("ttft_ms")
    assert rising == sorted(rising)
    page.click('#rows th[data-name="ttft_ms"] button')
    assert numbers("ttft_ms") == rising[::-1]
    sort = "document.querySelector('#rows th[data-name=\"{}\"]').getAttribute('aria-sort')"
    assert page.run(sort.format("ttft_ms")) == "descending"
    assert page.run(sort.format("tp")) == "none"
    page.run("document.querySelector('#rows th[data-name=\"model\"] button').focus()")
    page.press("Enter", "Enter", 13, "\r")
    assert cells(page, "model") == sorted(cells(page, "model"))
    # the best first: within the limits, whatever the rate of those beyond them
    page.click('#filters input[name="within"]')
    page.click("#best-first")
    beyond = cells(page, "exceeds")
    assert set(beyond) > {NONE}
    assert beyond == sorted(beyond, key=lambda words: words != NONE)
    within = [n for n, words in zip(numbers("tokens_per_s_per_gpu"), beyond, strict=True) if words == NONE]
    assert within == sorted(within, reverse=True)
    assert page.complaints == []


def test_selecting_a_row_shows_its_steps(page: Browser, rows: list[dict[str, Any]]) -> None:
    def selected() -> dict[str, str]:
        pairs = "[...document.querySelectorAll('#selected [data-name]')]"
        return dict(page.run(f"{pairs}.map(pair => [pair.dataset.name, pair.lastChild.textContent])"))

    first = selected()
    assert first["model"] == "llama-3.1-8b"
    step_ms = first["decode_step_ms"].removesuffix("\N{NO-BREAK SPACE}ms")
    total = sum(trace["x"][0] for trace in drawn(page, "step"))
    assert total == pytest.approx(float(step_ms), rel=0.06)
    page.click("#rows tbody tr:nth-child(4) button")
    assert page.run("document.querySelector('#rows tr.selected td').textContent") != "1"
    second = selected()
    assert second != first
    # a click on a point of the chart, where no other covers it
    x, y, row = page.run(
        "(() => { const c = document.getElementById('pareto'), l = c._fullLayout;"
        "c.scrollIntoView({block: 'center'});"
        "const t = c.data.find(t => t.name === 'model qwen3-8b'), i = 2, b = c.getBoundingClientRect();"
        "return [b.x + l.xaxis._offset + l.xaxis.d2p(t.x[i]), b.y + l.yaxis._offset + l.yaxis.d2p(t.y[i]),"
        "t.customdata[i]]; })()"
    )
    for kind, more in (
        ("mouseMoved", {}),
        ("mousePressed", {"button": "left"}),
        ("mouseReleased", {"button": "left"}),
    ):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=1, **more)
        page.settle()
    assert "qwen3-8b" in page.run("document.querySelector('#pareto .hoverlayer').textContent")
    assert selected()["model"] == "qwen3-8b"
    clients = rows[row]["clients"]
    assert selected()["clients"] == f"{clients} client{'s' * (clients != 1)}"
    assert page.complaints == []


def test_curves_run_over_the_load(page: Browser) -> None:
    for chart in ("curve-0", "curve-1"):
        curves = [trace for trace in drawn(page, chart) if len(trace["x"]) > 1]
        assert len(curves) == 8
        assert all(trace["x"] == sorted(trace["x"]) for trace in curves)
        assert max(len(trace["x"]) for trace in curves) == len(CONCURRENCY)
    assert page.run("document.getElementById('curves-heading').textContent") == "TTFT and TPOT over clients"


@pytest.mark.slow
def test_light_and_dark(page: Browser) -> None:
    colours = (
        "[getComputedStyle(document.body).backgroundColor, "
        "document.getElementById('pareto').layout.font.color]"
    )
    light = page.run(colours)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.settle()
    dark = page.run(colours)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    choose(page, "theme", "light")
    assert page.run(colours) == light
    choose(page, "theme", "dark")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    page.settle()
    assert page.run(colours) == dark
    assert page.complaints == []


def test_hostile_names_are_only_text(
    browser: Browser, h100: fastroof.Tables, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    names = {"llama-3.1-8b": HOSTILE, "qwen3-8b": "<img src=x onerror=document.title='owned'><b>bold</b>"}
    hostile = [{**row, "model": names[row["model"]], "dtype": "fp8</td>"} for row in rows]
    path = write_deployments(tmp_path / "r.parquet", hostile, h100.content_hash)
    browser.open(write_report(path, tmp_path / "r.html").path)
    browser.click("#rows tbody tr:nth-child(2) button")
    assert browser.complaints == []
    assert browser.run("document.title").endswith(" on h100")
    assert browser.run("document.querySelectorAll('main img, main b').length") == 0
    assert set(cells(browser, "model")) == set(names.values())
    assert "<b>bold</b>" in browser.run("document.querySelector('#pareto .legend').textContent")


@pytest.mark.slow
def test_step_sweeps_and_many_rows(browser: Browser, tmp_path: Path) -> None:
    spec = {
        **STEP_SPEC,
        "tp": [1, 2, 4, 8],
        "batch_size": {"start": 1, "stop": 512, "step": 1},
        "keep": "all",
    }
    fastroof.run_sweep(spec, tmp_path / "r.parquet")
    written = write_report(tmp_path / "r.parquet", tmp_path / "r.html", max_rows=6000)
    assert written.num_rows > 8000
    browser.open(written.path)
    assert browser.complaints == []
    assert "TPOT and tokens/s per GPU over batch size" in browser.run("document.body.textContent")
    assert browser.run("document.querySelectorAll('#rows tbody tr').length") == 100
    first = cells(browser, "batch_size")
    browser.click("#next")
    assert cells(browser, "batch_size") != first
    choose(browser, "axes", "log")
    assert browser.run("document.getElementById('pareto').layout.xaxis.type") == "log"
    assert browser.complaints == []


def test_the_packaged_sweep_opens_on_pictures(browser: Browser, contexts: Path, tmp_path: Path) -> None:
    browser.open(write_report(contexts, tmp_path / "r.html", max_rows=300).path)
    assert browser.complaints == []
    assert "nothing to draw" not in browser.run("document.querySelector('main').textContent")
    for chart in ("pareto", "curve-0", "curve-1", "step", "roofline"):
        assert drawn(browser, chart), chart
    heading = "document.getElementById('curves-heading').textContent"
    assert browser.run(heading) == "Batch size and tokens/s per GPU over kv_len"
    # the best batch falls as contexts grow: no sawtooth
    for curve in drawn(browser, "curve-0"):
        assert curve["y"] == sorted(curve["y"], reverse=True)
    browser.click("#filters input[name='model']", at=0)
    browser.click("#filters input[name='model']", at=1)
    assert browser.run("document.getElementById('step').hidden")
    assert browser.complaints == []


@pytest.mark.slow
def test_axes_are_logarithmic_where_a_linear_one_flattens_a_model(
    browser: Browser, h100: fastroof.Tables, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    slow = {"qwen3-8b": 0.1, "llama-3.1-8b": 1.0}
    two = [row | {"tokens_per_s_per_gpu": slow[row["model"]] * row["tokens_per_s_per_gpu"]} for row in rows]
    path = write_deployments(tmp_path / "r.parquet", two, h100.content_hash)
    browser.open(write_report(path, tmp_path / "r.html").path)
    types = "['xaxis', 'yaxis'].map(axis => document.getElementById('pareto').layout[axis].type)"
    assert browser.run(types) == ["linear", "log"]
    choose(browser, "axes", "linear")
    assert browser.run(types) == ["linear", "linear"]
    assert browser.run("location.hash") == "#axes=linear"
    choose(browser, "axes", "")
    # a model alone needs no other axis
    browser.click("#filters input[name='model']", at=1)
    assert browser.run(types) == ["linear", "linear"]
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1300])
def test_labels_of_roofs_do_not_overlap(page: Browser, width: int) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    page.settle()
    found = page.run(
        "['.textpoint text', '.points path'].map(of => [...document.querySelectorAll('#roofline ' + of)]"
        ".map(e => { const b = e.getBoundingClientRect();"
        "return {words: e.textContent, x0: b.left, x1: b.right, y0: b.top, y1: b.bottom}; }))"
    )
    names, points = found
    assert {"HBM", "bf16", "fp8, int8"} == {name["words"] for name in names} - {""}
    assert len(points) > 5

    def overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return bool(a["x0"] < b["x1"] and b["x0"] < a["x1"] and a["y0"] < b["y1"] and b["y0"] < a["y1"])

    for name in (name for name in names if name["words"]):
        assert 0 <= name["x0"] < name["x1"] <= width
        assert not any(overlap(name, other) for other in points), name
        assert sum(overlap(name, other) for other in names if other["words"]) == 1
    words = page.run("document.getElementById('roofline-words').textContent")
    assert "HBM 3.35 TB/s, fp8, int8 1,979 TFLOP/s, bf16 989.5 TFLOP/s" in words


def test_numbers_of_a_column_have_the_same_decimals(page: Browser) -> None:
    for name in ("tpot_ms", "ttft_ms", "tokens_per_s_per_gpu", "tokens_per_s_per_user"):
        texts = cells(page, name)
        assert len(texts) > 10
        assert len({len(text.partition(".")[2]) for text in texts}) == 1, name


def test_few_rows_without_any_choice(
    browser: Browser, h100: fastroof.Tables, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = write_deployments(tmp_path / "r.parquet", [{**rows[0], "tpot_ms": None, "exceeds": "ttft"}], "")
    browser.open(write_report(path, tmp_path / "r.html").path)
    assert browser.complaints == []
    assert browser.run("document.querySelectorAll('#rows tbody tr').length") == 1


def test_damaged_results_are_refused_by_name(stepped: Path, tmp_path: Path) -> None:
    """A bit of a page flips after the file was opened: nothing is drawn from it."""
    content = stepped.read_bytes()
    with pq.ParquetFile(stepped) as file:
        names = [file.schema_arrow.names[i] for i in range(file.metadata.num_columns)]
        chunk = file.metadata.row_group(0).column(names.index("step_us"))
        start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        end = start + chunk.total_compressed_size
    path = tmp_path / "flipped.parquet"
    flipped = bytearray(content)
    flipped[end - 8] ^= 1
    path.write_bytes(flipped)
    results = read_results(path)
    with pytest.raises(FastroofError, match=r"flipped\.parquet is damaged .*run its sweep again"):
        results.numbers("step_us")
    with pytest.raises(FastroofError, match=r"flipped\.parquet is damaged .*run its sweep again"):
        results.rows(np.array([0]))


@pytest.mark.slow
def test_results_beyond_memory_are_not_called_damaged(stepped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastroof.parquet.usable_memory_bytes", lambda: 10)
    with pytest.raises(
        FastroofError, match=r"needs more memory than is available \([0-9,]+ rows take"
    ) as error:
        read_results(stepped).numbers("step_us")
    assert "again" not in str(error.value)
