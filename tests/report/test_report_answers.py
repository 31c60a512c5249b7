"""Texts of the report's page and what leaves it: verdicts, links, CSV, the clipboard."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.columns import guarded
from fastroof.report.html import write_report
from fastroof.report.html.page import chart_facts, rounded
from fastroof.report.results_file import read_results
from tests.reference.browser import Browser
from tests.reference.made_results import LIMITS, write_deployments

HOSTILE = ("=1+1", "'=x", "-2", "@a", "\tb", '"quoted", with a comma', "two\nlines", "'tis", "plain")


@pytest.fixture(scope="module")
def page_path(
    h100: fastroof.Tables, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    results = write_deployments(folder / "r.parquet", rows, h100.content_hash, keep="all")
    return write_report(results, folder / "r.html").path


@pytest.fixture
def page(browser: Browser, page_path: Path) -> Iterator[Browser]:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=1300, height=900, deviceScaleFactor=1, mobile=False
    )
    browser.open(page_path)
    yield browser
    assert browser.complaints == []
    assert [at for at in browser.requests if not at.startswith(("file:", "data:", "blob:"))] == []


def text(page: Browser, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r}).textContent"))


def hash_of(page: Browser) -> str:
    return str(page.run("location.hash"))


def shown(page: Browser) -> list[Any]:
    """The state of the form, the table and the selection."""
    script = (
        "[[...document.querySelectorAll('#filters input, #filters select, #colour, #axes')]"
        ".map(e => e.type === 'checkbox' ? e.checked : e.value),"
        "document.getElementById('rows').tBodies[0].textContent,"
        "document.getElementById('selected').textContent,"
        "document.getElementById('verdict').textContent,"
        "document.getElementById('count').textContent]"
    )
    found: list[Any] = page.run(script)
    return found


def saved(page: Browser, folder: Path) -> list[dict[str, str]]:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.click("#csv")
    deadline = time.monotonic() + 60.0
    while not (files := list(folder.glob("*.csv"))):
        assert time.monotonic() < deadline, "nothing is saved"
        time.sleep(0.05)
    (file,) = files
    content = file.read_bytes().decode("utf-8")
    assert content.endswith("\r\n")
    return list(csv.DictReader(io.StringIO(content, newline="")))


# -- words ---------------------------------------------------------------------------------------


def test_the_verdict_is_the_best_row_of_each_model(page: Browser, rows: list[dict[str, Any]]) -> None:
    # with spaces that do not break before units
    found = page.run(
        "[...document.querySelectorAll('#verdict p')].map(p => p.textContent.replaceAll('\\u00a0', ' '))"
    )
    own = [r for r in rows if (r["isl"], r["osl"]) == (1024, 128) and r["exceeds"] is None]
    best = {
        model: max((r for r in own if r["model"] == model), key=lambda r: r["tokens_per_s_per_gpu"])
        for model in ("llama-3.1-8b", "qwen3-8b")
    }
    assert len(found) == 2
    for words, (model, row) in zip(
        found, sorted(best.items(), key=lambda pair: -pair[1]["tokens_per_s_per_gpu"]), strict=True
    ):
        assert words.startswith(f"{model} (isl 1,024, osl 128): run tp {row['tp']} on {row['tp']} x h100")
        assert f"{row['dtype']} weights, with {row['clients']} clients" in words
        assert f"{rounded_words(row['tokens_per_s_per_gpu'])} tokens/s per GPU" in words
        left = {name: 1 - row[name] / limit for name, limit in LIMITS.items()}
        nearest = min(left, key=lambda name: left[name])
        assert f"Nearest limit: {nearest.removesuffix('_ms').upper()} {row[nearest]:.4g} ms of" in words
        # all rows are here, so the next kind and ties are known
        others = [r for r in own if r["model"] == model and kind(r) != kind(row)]
        other = max(others, key=lambda r: r["tokens_per_s_per_gpu"])
        behind = 1 - other["tokens_per_s_per_gpu"] / row["tokens_per_s_per_gpu"]
        assert f"tp {other['tp']} on {other['tp']} x h100, {other['dtype']}, with" in words
        assert f"is {100 * behind:.3g} % behind" in words
    page.click("#verdict button", at=1)
    assert "qwen3-8b" in text(page, "#selected") or "llama-3.1-8b" in text(page, "#selected")
    assert "&row=" in f"&{hash_of(page)[1:]}"
    # who pressed it with the keyboard is where they were
    assert page.run("document.activeElement.textContent") == "Show"


def kind(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["tp"], row["dtype"], row["kv_dtype"]


def rounded_words(value: float) -> str:
    short = float(f"{value:.4g}")
    return f"{short:,.0f}" if short >= 1000 else f"{short:g}"


def test_the_verdict_follows_the_filters(page: Browser) -> None:
    page.click('#filters input[name="model"]', at=0)
    assert text(page, "#verdict p").startswith("qwen3-8b")
    page.click('#filters input[name="model"]', at=1)
    assert "No filtered row is within all limits" in text(page, "#verdict p")
    assert "remove a filter" in text(page, "#verdict p")


def test_nothing_within_the_limits_prints_the_exceeded_ones(
    browser: Browser, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    slow = [{**row, "exceeds": "tpot" if row["tp"] == 1 else "ttft"} for row in rows]
    results = write_deployments(tmp_path / "r.parquet", slow, "")
    browser.open(write_report(results, tmp_path / "r.html").path)
    counts = {
        name: sum(r["exceeds"] == name and (r["isl"], r["osl"]) == (1024, 128) for r in slow)
        for name in ("tpot", "ttft")
    }
    words = text(browser, "#verdict")
    assert "within all limits" in words
    assert all(f"{name} {count}" in words for name, count in counts.items())


@pytest.mark.slow
def test_a_sweep_that_kept_fronts_names_their_other_end(
    browser: Browser, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    own = [r for r in rows if r["model"] == "qwen3-8b" and r["isl"] == 1024 and r["exceeds"] is None]
    results = write_deployments(tmp_path / "r.parquet", own, "", keep="pareto")
    browser.open(write_report(results, tmp_path / "r.html").path)
    fast = max(own, key=lambda r: r["tokens_per_s_per_user"])
    words = text(browser, "#verdict")
    assert "Next best" not in words
    assert f"Fastest for a user: tp {fast['tp']} on {fast['tp']} x h100, {fast['dtype']}" in words


def test_the_objective_of_the_sweep_decides_the_best(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for objective, column in (
        ("cost", "cost_per_million_tokens"),
        ("goodput", "tokens_per_s"),
        ("tokens_per_s_per_user", "tokens_per_s_per_user"),
    ):
        path = write_deployments(tmp_path / "r.parquet", rows, "", objective=objective, keep="all")
        facts = chart_facts(read_results(path))
        assert (facts["best"], facts["is_complete"]) == (column, True)


def test_best_kept_prints_that_rows_are_neighbours(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for keep, are_neighbours in (("best", True), ("pareto", False)):
        path = write_deployments(tmp_path / "r.parquet", rows[:3], "", keep=keep, k=5)
        notes = write_report(path, tmp_path / "r.html").notes
        assert any("often neighbours" in note for note in notes) == are_neighbours


def test_the_selected_row_has_words_units_and_limits(page: Browser, rows: list[dict[str, Any]]) -> None:
    found = dict(
        page.run(
            "[...document.querySelectorAll('#selected [data-name]')]"
            ".map(e => [e.dataset.name, e.textContent.replaceAll('\\u00a0', ' ')])"
        )
    )
    best = max(
        (r for r in rows if r["isl"] == 1024 and r["exceeds"] is None),
        key=lambda r: r["tokens_per_s_per_gpu"],
    )
    ttft = re.fullmatch(r"time to first token \(TTFT\)([\d.,]+) ms \(at most 2,000 ms: .*", found["ttft_ms"])
    # the page has five digits and shows four of them
    assert ttft is not None
    assert float(ttft[1]) == pytest.approx(best["ttft_ms"], rel=6e-4)
    assert found["isl"] == "prompt (isl)1,024 tokens"
    assert found["clients"] == f"concurrent clients{best['clients']} clients"
    assert found["relative_error"] == "standard error of a step4 %"
    assert found["weight_bytes"].endswith(" GB")
    assert "prefill_workers" not in found


# -- the address ---------------------------------------------------------------------------------


def test_filters_go_round_by_the_address(page: Browser, page_path: Path) -> None:
    start = shown(page)
    assert hash_of(page) == ""
    page.click('#filters input[name="tp"]', at=0)
    page.click('#filters input[name="dtype"]', at=1)
    page.click('#filters input[name="within"]')
    page.run(
        "(() => { const e = document.querySelector('#filters select[name=\"isl\"]'); e.value = '';"
        "e.dispatchEvent(new Event('input', {bubbles: true}));"
        "const n = document.querySelector('#filters input[name=\"most-tpot_ms\"]'); n.value = '12.5';"
        "n.dispatchEvent(new Event('input', {bubbles: true}));"
        "const c = document.getElementById('colour'); c.value = 'tp';"
        "c.dispatchEvent(new Event('change'));"
        "const a = document.getElementById('axes'); a.value = 'log';"
        "a.dispatchEvent(new Event('change')); })()"
    )
    page.click('#rows th[data-name="ttft_ms"] button')
    page.click("#rows tbody tr:nth-child(3) button")
    changed, address = shown(page), hash_of(page)
    assert changed[4] != start[4]
    for part in ("tp=2", "tp=4", "dtype=bf16", "beyond=", "all-isl=", "most-tpot_ms=12.5", "sort=ttft_ms",
                 "colour=tp", "axes=log", "row="):  # fmt: skip
        assert part in address
    page.call("Page.navigate", url="about:blank")
    page.call("Page.navigate", url=page_path.resolve().as_uri() + address)
    page.settle()
    while page.run("document.readyState") != "complete":
        time.sleep(0.05)
    page.settle()
    assert shown(page) == changed
    assert hash_of(page) == address
    # another address in the same window, as back and forward give
    page.run("location.hash = ''")
    page.settle()
    assert shown(page) == start
    page.run(f"location.hash = {address!r}")
    page.settle()
    assert shown(page) == changed
    page.click('#filters button[type="reset"]')
    assert "tp=2" not in hash_of(page)


@pytest.mark.slow
def test_unknown_parts_of_an_address_are_reported(page: Browser) -> None:
    start = shown(page)
    page.run("location.hash = 'tp=3&gpu=h300&sort=nothing&row=1000000&colour=none&strange=1'")
    page.settle()
    out = text(page, "#unknown")
    for word in ("tp 3", "a column nothing", "row 1000000", "which this page does not have"):
        assert word in out
    assert shown(page) == start
    # the skip link's place is not a filter
    page.run("location.hash = 'tp=2'")
    page.settle()
    assert page.run("document.getElementById('unknown').hidden")
    kept = shown(page)
    page.run("location.hash = 'answers'")
    page.settle()
    assert shown(page) == kept != start


# -- what leaves the page ------------------------------------------------------------------------


@pytest.mark.slow
def test_csv_holds_the_rows_that_the_filters_leave(
    page: Browser, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    page.click('#filters input[name="tp"]', at=0)
    found = saved(page, tmp_path)
    own = [r for r in rows if (r["isl"], r["osl"]) == (1024, 128) and r["exceeds"] is None and r["tp"] != 1]
    own.sort(key=lambda r: -rounded(r["tokens_per_s_per_gpu"]))
    assert len(found) == len(own) > 10
    assert list(found[0]) == list(rows[0])
    for line, row in zip(found, own, strict=True):
        for name, value in row.items():
            if value is None:
                assert line[name] == ""
            elif isinstance(value, str):
                assert line[name] == value
            else:
                assert float(line[name]) == pytest.approx(value, rel=1e-5)
    assert text(page, "#exported") == f"{len(own)} rows saved"


def test_csv_guards_formulas_as_python_does(
    browser: Browser, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    named = [{**rows[0], "model": name, "exceeds": None} for name in HOSTILE]
    results = write_deployments(tmp_path / "r.parquet", named, "")
    browser.open(write_report(results, tmp_path / "r.html").path)
    found = saved(browser, tmp_path)
    assert sorted(line["model"] for line in found) == sorted(guarded(name) for name in HOSTILE)
    assert browser.complaints == []


@pytest.mark.slow
def test_copying_rows_and_the_selected_one(page: Browser, rows: list[dict[str, Any]]) -> None:
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.click("#copy-selected")
    assert text(page, "#copied") == "copied"
    copied = page.run("navigator.clipboard.readText()")
    assert copied.startswith("llama-3.1-8b, qwen3-8b on h100, row ")
    assert "\n  time to first token (TTFT): " in copied
    page.click("#copy-rows")
    lines = list(csv.DictReader(io.StringIO(page.run("navigator.clipboard.readText()")), delimiter="\t"))
    own = [r for r in rows if (r["isl"], r["osl"]) == (1024, 128) and r["exceeds"] is None]
    assert len(lines) == len(own)
    assert text(page, "#exported") == f"{len(own)} rows copied"
    # where a page has no clipboard
    page.run("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    page.click("#copy-selected")
    assert text(page, "#copied") == "copied"
    page.run("delete navigator.clipboard")
    assert page.run("navigator.clipboard.readText()") == copied


# -- on a phone, and by keyboard -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 400, 800, 1280])
def test_the_page_fits_and_filters_are_folded_where_it_is_narrow(
    browser: Browser, page_path: Path, width: int
) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    browser.open(page_path)
    assert browser.run("document.documentElement.scrollWidth") <= width
    for chart in ("pareto", "curve-0", "curve-1", "step", "roofline"):
        right = browser.run(f"document.getElementById('{chart}').getBoundingClientRect().right")
        assert 0 < right <= width
    is_open = browser.run("document.getElementById('filters-fold').open")
    assert is_open == (width > 900)
    if not is_open:
        # the answer is on the first screen, and the keyboard unfolds the filters
        assert browser.run("document.getElementById('verdict').getBoundingClientRect().top") < 450
        browser.run("document.querySelector('#filters-fold summary').focus()")
        browser.press("Enter", "Enter", 13, "\r")
        assert browser.run("document.getElementById('filters-fold').open")
        browser.click('#filters input[name="tp"]', at=0)
        assert "tp=2" in hash_of(browser)
    assert browser.complaints == []


@pytest.mark.slow
def test_ticks_of_loads_leave_room(browser: Browser, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    near = [{**rows[0], "clients": n, "ttft_ms": 100.0 + n} for n in (64, 65, 66, 67, 154, 155, 156, 157)]
    results = write_deployments(tmp_path / "r.parquet", near, "", keep="best")
    browser.open(write_report(results, tmp_path / "r.html").path)
    for chart in ("curve-0", "curve-1"):
        boxes = browser.run(
            f"[...document.querySelectorAll('#{chart} .xtick text')].map(t => t.getBoundingClientRect())"
            ".map(b => [b.left, b.right])"
        )
        assert len(boxes) >= 2
        for (_, right), (left, _) in zip(sorted(boxes), sorted(boxes)[1:], strict=False):
            assert right < left
    assert browser.complaints == []


@pytest.mark.slow
def test_everything_that_is_pressed_has_a_name(page: Browser) -> None:
    unnamed = page.run(
        "[...document.querySelectorAll('button, select, input')].filter(e => !(e.textContent.trim() ||"
        "e.getAttribute('aria-label') || e.closest('label'))).map(e => e.outerHTML)"
    )
    assert unnamed == []
    names = page.run(
        "[...document.querySelectorAll('section, form')].map(e => e.getAttribute('aria-labelledby'))"
        ".filter(id => !document.getElementById(id))"
    )
    assert names == []
