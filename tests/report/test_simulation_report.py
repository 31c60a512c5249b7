"""The page of a simulated run: what it holds, what its texts may be, and what it does in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.errors import BatchError, FastroofError
from fastroof.report.html import write_simulation_report
from fastroof.report.html.simulation_page import cumulative, requests_over_time
from fastroof.simulation import Autoscaler
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.simulation import Simulation
from fastroof.traces.trace import Trace
from tests.reference.browser import Browser
from tests.report.test_report import embedded

HOSTILE = "</script><script>document.title='owned'</script><!-- <b>&amp;\u2028$title"
LIMITS = {"ttft_ms": 500.0, "tpot_ms": 50.0}


def made(plan: fastroof.StepPlan, count: int, rate_per_s: float) -> Simulation:
    rng = np.random.default_rng(3)
    arrival_s = np.cumsum(rng.exponential(1.0 / rate_per_s, count))
    trace = Trace(arrival_s, rng.integers(10, 2000, count), rng.integers(1, 200, count), name="made")
    settings = EngineSettings.of_plan(plan, max_num_batched_tokens=2048, max_num_seqs=128)
    return Simulation([EnginePool(plan, settings)], trace, run_engine(plan, trace, settings))


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")


@pytest.fixture(scope="module")
def sim(plan: fastroof.StepPlan) -> Simulation:
    """A run near saturation, of so many requests that percentiles of stretches are drawn."""
    return made(plan, 3000, 36.0)


def test_page_holds_the_answers(sim: Simulation, tmp_path: Path) -> None:
    page = write_simulation_report(sim, tmp_path / "r.html", limits=LIMITS)
    data, answers = embedded(page), sim.summary(**LIMITS)
    assert "J a token" not in dict(data["figures"])
    answers["energy"] = sim.energy()
    write_simulation_report(sim, page, limits=LIMITS, answers=answers)
    assert dict(embedded(page)["figures"])["J a token"].startswith(
        f"{answers['energy']['joules_per_token']:.4f} (\N{PLUS-MINUS SIGN}"
    )
    assert data["warnings"] == answers["warnings"] != []
    assert data["facts"]["limits"] == LIMITS
    rows = {row["name"]: row for row in data["percentiles"]}
    assert list(rows) == ["TTFT", "TPOT", "ITL, all gaps", "E2E"]
    for words, name in (("TTFT", "ttft_ms"), ("ITL, all gaps", "itl_ms")):
        assert rows[words]["values"] == pytest.approx(answers[name], rel=1e-5)
        assert rows[words]["range"]["p99"] == pytest.approx(answers["range"][name]["p99"], rel=1e-5)
    assert dict(data["figures"])["requests finished"] == "3,000 of 3,000"
    assert len(data["series"]["time_s"]) == sim.series().num_rows
    for of_run in data["distributions"].values():
        assert list(of_run) == ["here", "fast", "slow"]
        for found in of_run.values():
            assert found["ms"] == sorted(found["ms"])
            assert found["share"] == sorted(found["share"])
            assert found["share"][-1] == 1
    assert page.stat().st_size < 6e6


def test_the_page_counts_the_blocks_of_all_ranks(tmp_path: Path) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h200", dp=4, ep=1)
    ranks = fastroof.simulate(plan, fastroof.Workload(rate=20.0, requests=50).trace())
    page = write_simulation_report(ranks, tmp_path / "r.html").read_text()
    blocks = 4 * ranks.settings.num_gpu_blocks
    assert ranks.outcomes.counters["num_gpu_blocks"] == blocks
    assert f"{blocks:,} blocks of 16" in page


def test_a_calm_run_has_no_range(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    data = embedded(write_simulation_report(made(plan, 300, 2.0), tmp_path / "r.html"))
    assert data["error"] is None
    assert [row["range"] for row in data["percentiles"]] == [None] * 4
    assert {tuple(of_run) for of_run in data["distributions"].values()} == {("here",)}
    assert any("one standard error of a step is" in note.lower() for note in data["notes"])
    assert set(data["by_arrival"]["ttft_ms"]) == {"time_s", "ms"}


@pytest.mark.slow
def test_pools_that_prefill_and_decode_apart_have_a_page(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    trace = made(plan, 600, 20.0).trace
    pools = [fastroof.Pool(plan, replicas=2), fastroof.Pool(plan, max_num_seqs=16)]
    apart = fastroof.simulate(fastroof.Fleet(pools), trace)
    page = write_simulation_report(apart, tmp_path / "r.html", limits=LIMITS)
    data = embedded(page)
    rows = {row["name"]: row for row in data["percentiles"]}
    transfer = rows["Transfer of KV cache"]
    assert transfer["values"] == pytest.approx(apart.summary()["transfer_ms"], rel=1e-5)
    # the same on other steps
    assert transfer["range"] is None
    assert rows["TTFT"]["range"] is not None
    assert dict(data["figures"])["prefill engines"].startswith("2 of tp 1, ")
    assert "3 engines on 3 GPUs" in page.read_text()


def test_distributions_are_those_of_the_requests(sim: Simulation) -> None:
    values = sim.requests["ttft_ms"].to_numpy()
    found = cumulative(values)
    for ms, share in zip(found["ms"], found["share"], strict=True):
        # few digits: what is drawn lies beside the value itself
        assert abs((values <= ms * (1 + 1e-5)).mean() - share) <= 2e-3
    assert 100 < len(found["ms"]) <= 240
    assert np.diff(found["share"]).max() < 0.02
    assert cumulative(np.array([])) == {"ms": [], "share": []}


def test_times_by_arrival_are_percentiles_of_stretches(sim: Simulation) -> None:
    found = requests_over_time(sim, "ttft_ms")
    rows = sim.requests.sort_by("arrival_s")
    sent, ttft = rows["arrival_s"].to_numpy(), rows["ttft_ms"].to_numpy()
    half = (found["time_s"][1] - found["time_s"][0]) / 2
    middle = found["time_s"][40]
    inside = ttft[(sent >= middle - half) & (sent < middle + half)]
    assert found["p50"][40] == pytest.approx(np.percentile(inside, 50), rel=0.2)
    assert all(low <= high for low, high in zip(found["p50"], found["p99"], strict=True))


def test_wrong_places_and_limits_are_refused(sim: Simulation, tmp_path: Path) -> None:
    for name, message in (("a.pdf", r"must end in \.html"), ("absent/a.html", "does not exist")):
        with pytest.raises(FastroofError, match=message):
            write_simulation_report(sim, tmp_path / name)
    with pytest.raises(BatchError, match="must be milliseconds above 0"):
        write_simulation_report(sim, tmp_path / "a.html", limits={"ttft_ms": -1.0})
    assert list(tmp_path.iterdir()) == []


def test_texts_cannot_leave_their_place(sim: Simulation, tmp_path: Path) -> None:
    trace = replace(sim.trace, name=HOSTILE)
    named = Simulation(sim.pools, trace, sim.outcomes)
    text = write_simulation_report(named, tmp_path / "r.html").read_text()
    assert "document.title='owned'</script>" not in text
    assert text.count("</script>") == 3
    assert "<h1>llama-3.1-8b on 1 x NVIDIA H100 SXM: &lt;/script&gt;" in text


def test_page_needs_nothing_else(sim: Simulation, tmp_path: Path) -> None:
    page = write_simulation_report(sim, tmp_path / "r.html").read_text()
    own = page.partition("<script>/*\nMIT License")[0] + page.rpartition("</script>\n<script>")[2]
    assert "http:" not in own
    assert "https:" not in own
    assert re.findall(r'(?:src|href)="([^"]*)"', own) == ["data:,", "#answers"]
    ids = re.findall(r' id="([^"]+)"', own)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'byId\("([^"]+)"\)|draw\("([^"]+)"', own))
    assert {first or second for first, second in used} <= {*ids, "results"}


# -- the page in a browser -----------------------------------------------------------------------

CHARTS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "requests", "use", "tokens", "by-arrival")


def test_page_in_a_browser(browser: Browser, sim: Simulation, tmp_path: Path) -> None:
    page = write_simulation_report(sim, tmp_path / "r.html", limits=LIMITS)
    browser.open(page)
    assert browser.complaints == []
    assert len(browser.requests) == 1
    for chart in CHARTS:
        assert browser.run(f"document.querySelectorAll('#{chart} .main-svg').length") > 0
        assert browser.run(f"document.getElementById('{chart}').data.length") > 1
    shown = browser.run("[...document.querySelectorAll('#warnings li')].map(li => li.textContent)")
    assert [words.lower() for words in shown] == [words.lower() for words in embedded(page)["warnings"]]
    lines = "document.getElementById('ttft_ms')"
    assert browser.run(f"{lines}._fullLayout.shapes.length") == 1
    before = browser.run(f"{lines}.data[0].y[0]")
    browser.click("#tail")
    after = browser.run(f"{lines}.data[0].y[0]")
    assert (before, after) == (pytest.approx(1 - after), pytest.approx(1 - before))
    assert browser.run(f"{lines}._fullLayout.yaxis.type") == "log"
    browser.run("document.getElementById('theme').value = 'dark'; "
                "document.getElementById('theme').dispatchEvent(new Event('change'))")  # fmt: skip
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert browser.complaints == []


def test_long_runs_have_readable_times(browser: Browser, plan: fastroof.StepPlan, tmp_path: Path) -> None:
    page = write_simulation_report(made(plan, 50, 0.002), tmp_path / "r.html")
    figures = dict(embedded(page)["figures"])
    seconds = float(figures["duration"].partition("(")[2].removesuffix(" s)").replace(",", ""))
    assert 1e4 < seconds < 1e5
    assert figures["duration"] == f"{seconds / 3600:.1f} h ({seconds:,.0f} s)"
    assert figures["requests/s"] == f"{50 / seconds:.6f}"
    browser.open(page)
    text = browser.run("document.querySelector('main').textContent")
    assert not re.search(r"\de[+-]?\d|NaN|undefined", text)
    assert "time (h)" in text
    assert browser.run("Math.max(...document.getElementById('requests').data[0].x)") < 24
    assert browser.complaints == []


def test_numbers_of_a_row_have_the_same_decimals(
    browser: Browser, plan: fastroof.StepPlan, tmp_path: Path
) -> None:
    browser.open(write_simulation_report(made(plan, 300, 2.0), tmp_path / "r.html"))
    for row in browser.run(
        "[...document.querySelectorAll('#percentiles tbody tr')]"
        ".map(tr => [...tr.cells].slice(1).map(td => td.firstChild.textContent))"
    ):
        assert len(row) == 5
        assert len({len(text.partition(".")[2]) for text in row}) == 1


@pytest.mark.parametrize("width", [360, 800, 1500])
def test_page_fits_its_window(browser: Browser, sim: Simulation, tmp_path: Path, width: int) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    browser.open(write_simulation_report(sim, tmp_path / "r.html"))
    assert browser.run("document.documentElement.scrollWidth") <= width
    scroll = "document.querySelector('#answers .scroll')"
    assert browser.run(f"{scroll}.scrollWidth <= {scroll}.clientWidth")
    for chart in CHARTS:
        right = browser.run(f"document.getElementById('{chart}').getBoundingClientRect().right")
        assert 0 < right <= width
    assert browser.complaints == []


def test_hostile_names_are_shown_as_they_are(browser: Browser, sim: Simulation, tmp_path: Path) -> None:
    named = Simulation(sim.pools, replace(sim.trace, name=HOSTILE), sim.outcomes)
    browser.open(write_simulation_report(named, tmp_path / "r.html"))
    assert HOSTILE in browser.run("document.querySelector('h1').textContent")
    assert browser.run("document.title") != "owned"
    assert browser.complaints == []


def test_autoscaled_replicas_are_drawn_over_time(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    rule = Autoscaler("concurrency", 8, max_replicas=4, startup_s=5, scale_down_delay_s=30)
    sim = fastroof.simulate(plan, made(plan, 600, 20.0).trace, autoscaler=rule)
    page = write_simulation_report(sim, tmp_path / "r.html", limits=LIMITS)
    data = embedded(page)
    held = [sum(numbers) for numbers in zip(*(data["series"][name] for name in STATES), strict=True)]
    # the first interval begins before the first request
    assert 0.99 < min(held[1:]) < max(held) < 4.01
    figures = dict(data["figures"])
    assert set(figures) >= {"GPU hours", "GPU hours, fixed at the peak", "GPU hours, fewest fixed"}
    assert "up to 4 engines on 4 GPUs" in page.read_text()


STATES = ("starting", "serving", "draining")
