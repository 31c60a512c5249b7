"""The page in a browser: it shows the answers it gets, follows its controls, and queries no other server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fastroof.ui.view import View
from tests.reference.browser import Browser, installed

pytest.importorskip("starlette", reason="the page needs starlette: pip install fastroof[ui]")
pytest.importorskip("uvicorn", reason="the page needs uvicorn: pip install fastroof[ui]")

from fastroof.ui.answers import step_answer
from fastroof.ui.deployment import deployment_answer
from fastroof.ui.server import PageServer
from fastroof.ui.simulation import simulation_answer

SMALL = View(model="llama-3.1-8b", tp=1, isl=512, osl=64, batch=8)
WAITS = "document.querySelectorAll('section.waiting').length"
PICTURES = "Number(document.documentElement.dataset.pictures || 0)"


@pytest.fixture(scope="module")
def page() -> Iterator[PageServer]:
    with PageServer(start=SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed()
    if program is None:
        pytest.skip("no Chromium is installed: the page is not looked at")
    with Browser(program, tmp_path_factory.mktemp("browser")) as running:
        size(running, 1280)
        yield running


def size(browser: Browser, width: int, height: int = 900) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )


def until(browser: Browser, script: str, seconds: float = 120.0) -> Any:
    """Wait until an expression of the page is true."""
    deadline = time.monotonic() + seconds
    while not (value := browser.run(script)):
        assert time.monotonic() < deadline, f"{script} does not come true: {browser.complaints}"
        time.sleep(0.05)
    return value


def settled(browser: Browser) -> None:
    """Wait until no request is pending; the page counts a request as pending from its first moment."""
    until(browser, f"{PICTURES} > 0 && !{WAITS}")
    browser.settle()


@pytest.fixture
def opened(browser: Browser, page: PageServer) -> Browser:
    browser.open(page.url)
    settled(browser)
    return browser


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def put(browser: Browser, name: str, value: str) -> None:
    """Give a control a value, as a user's hand does."""
    before = browser.run(PICTURES)
    browser.run(
        f"(() => {{ const c = document.getElementById('controls').elements[{json.dumps(name)}]; "
        f"c.value = {json.dumps(value)}; for (const kind of ['input', 'change']) "
        "c.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )
    until(browser, f"{PICTURES} > {before}")
    settled(browser)


def drawn(browser: Browser, chart: str) -> str:
    """What a chart's canvas shows."""
    return str(browser.run(f"document.querySelector('#{chart} canvas').toDataURL()"))


CHARTS = ("curve", "roofline", "pareto", "capacity")


def test_it_shows_what_it_was_answered(opened: Browser, page: PageServer) -> None:
    assert opened.complaints == []
    answer = step_answer(page.store, SMALL)
    step = answer["step"]
    assert text(opened, "#sentence").startswith("llama-3.1-8b on NVIDIA H100 SXM, bf16 weights")
    shown = float(text(opened, "#tile-step .big").split()[0])
    assert shown == pytest.approx(step["latency_us"] / 1000, rel=0.006)
    assert step["origin"] in text(opened, "#tile-step .quiet")
    assert text(opened, "#tile-step .quiet").startswith("± ")
    for name in ("ttft", "tpot"):
        assert float(text(opened, f"#tile-{name} .big").split()[0]) == pytest.approx(
            answer["serving"][f"{name}_ms"], rel=0.006
        )
    assert float(text(opened, "#tile-energy .big").split()[0]) == pytest.approx(
        answer["serving"]["joules_per_token"], rel=0.006
    )
    energy = step["energy"]
    assert f"modelled, {energy['watts']:.0f} W a GPU" in text(opened, "#tile-energy .quiet")
    assert f", {energy['watts']:.0f} W a GPU \N{PLUS-MINUS SIGN} " in text(opened, "#step-energy")
    rows = opened.run(
        "[...document.querySelectorAll('#operators tbody tr')].map(r => r.cells[0].textContent)"
    )
    assert rows[: len(step["operators"])] == [part["name"] for part in step["operators"]]
    assert text(opened, "#step-command code") == answer["commands"]["step"]
    assert "requests/s" in text(opened, "#capacity-words")
    assert text(opened, "#start-words").startswith("It starts.")
    assert text(opened, "#start-launch code").startswith("vllm serve ")
    assert text(opened, "#best").startswith("Best copy by means: tp ")
    for chart in CHARTS:
        assert len(drawn(opened, chart)) > 5000
        assert opened.run(f"document.getElementById('{chart}').getAttribute('aria-label').length") > 20


def test_no_other_server_is_queried(opened: Browser, page: PageServer) -> None:
    put(opened, "batch", "20")
    opened.run("document.getElementById('theme').dispatchEvent(new Event('change'))")
    requested = set(opened.requests)
    assert {
        f"{page.url}ask/step",
        f"{page.url}ask/start",
        f"{page.url}ask/layouts",
        f"{page.url}ask/capacity",
    } <= requested
    assert [address for address in requested if not address.startswith(page.url)] == []
    # what is not the page's own does not run, and is not loaded
    blocked = opened.run(
        "new Promise(done => {"
        "  document.addEventListener('securitypolicyviolation', e => done(e.violatedDirective));"
        "  const s = document.createElement('script');"
        "  s.textContent = 'window.ran = 1';"
        "  document.head.append(s);"
        "})"
    )
    assert blocked.startswith("script-src")
    assert opened.run("window.ran || 0") == 0
    assert opened.run("fetch('http://127.0.0.1:9/').then(() => 'let', () => 'kept')") == "kept"


def test_pictures_follow_the_controls(opened: Browser) -> None:
    before = {chart: drawn(opened, chart) for chart in CHARTS}
    step = text(opened, "#tile-step .big")
    put(opened, "batch", "64")
    assert text(opened, "#tile-step .big") != step
    assert drawn(opened, "curve") != before["curve"]
    assert drawn(opened, "roofline") != before["roofline"]
    put(opened, "isl", "3000")
    assert all(drawn(opened, chart) != before[chart] for chart in CHARTS)
    assert opened.run("document.querySelector('[data-of=isl]').value > 20")
    put(opened, "tp", "2")
    assert "2 \N{MULTIPLICATION SIGN} NVIDIA H100 SXM" in text(opened, "#sentence")
    put(opened, "model", "qwen3-8b")
    assert text(opened, "#sentence").startswith("qwen3-8b")
    put(opened, "gpu", "h200")
    assert "H200" in text(opened, "#sentence")
    assert opened.complaints == []


@pytest.mark.slow
def test_what_is_requested_again_is_what_changed(opened: Browser, page: PageServer) -> None:
    opened.requests.clear()
    put(opened, "batch", "33")
    assert {address.rpartition("/")[2] for address in opened.requests} == {"step"}
    put(opened, "percentile", "90")
    assert {address.rpartition("/")[2] for address in opened.requests} == {"step", "capacity"}


@pytest.mark.slow
def test_what_to_run_is_requested_by_a_button_and_is_that_of_the_command(
    opened: Browser, page: PageServer
) -> None:
    put(opened, "gpus", "2")
    assert opened.run("document.getElementById('deployment').hidden")
    opened.requests.clear()
    opened.click("#find")
    settled(opened)
    assert {address.rpartition("/")[2] for address in opened.requests} == {"deployment"}
    answer = deployment_answer(page.store, replace(SMALL, gpus=2))
    best = answer["choices"][0]
    words = text(opened, "#deployment-words")
    assert words.startswith(f"Best on 2 GPUs: {best['layout']}: ")
    assert f"{answer['configurations']:,} deployments compared" in words
    assert "p99 TPOT" in words
    rows = opened.run(
        "[...document.querySelectorAll('#deployment tbody tr')].map(r => r.cells[0].textContent)"
    )
    assert rows == [choice["layout"] for choice in answer["choices"]]
    assert text(opened, "#deployment-command code") == answer["command"]
    assert text(opened, "#deployment-families").startswith("Separate workers for prefill and decode: ")
    servers = [one if role == "server" else f"# {role}\n{one}" for role, one in answer["servers"].items()]
    assert text(opened, "#deployment-server code") == "\n".join(servers)
    assert not opened.run("document.getElementById('deployment').classList.contains('stale')")
    put(opened, "tpot_ms", "25")
    assert opened.run("document.getElementById('deployment').classList.contains('stale')")
    assert opened.complaints == []


def simulated(browser: Browser) -> list[str]:
    """Press the button, and return the names of the rows of times."""
    browser.click("#simulate")
    settled(browser)
    rows = browser.run(
        "[...document.querySelectorAll('#simulation-times tbody tr')].map(r => r.cells[0].textContent)"
    )
    return [name for name in rows if name]


def test_traffic_is_simulated_by_a_button(opened: Browser, page: PageServer) -> None:
    put(opened, "num_requests", "300")
    put(opened, "rate", "20")
    put(opened, "turns", "3")
    put(opened, "kv_tiers", "host:2GB:50GB/s")
    assert opened.run("document.getElementById('simulation-times').hidden")
    opened.requests.clear()
    assert simulated(opened) == ["TTFT", "TPOT", "ITL", "E2E", "session"]
    assert {address.rpartition("/")[2] for address in opened.requests} == {"simulation"}
    view = replace(SMALL, num_requests=300, rate=20.0, turns=3, kv_tiers="host:2GB:50GB/s")
    answer = simulation_answer(page.store, view)
    words = text(opened, "#simulation-words")
    assert words.startswith("300 of 300 requests finished in ")
    assert "100\u00a0% within TTFT 1,000 ms and TPOT 30 ms; at p99 TTFT kept, TPOT kept. A session" in words
    assert text(opened, "#simulation-command code") == answer["command"]
    shown = opened.run("[...document.querySelectorAll('#simulation-figures li')].map(i => i.textContent)")
    assert shown == [f"{name}{value}" for name, value in answer["figures"]]
    p99 = opened.run("document.querySelector('#simulation-times tbody tr').cells[5].textContent")
    assert float(p99.replace(",", "")) == pytest.approx(answer["ttft_ms"]["p99"], rel=0.006)
    before = drawn(opened, "simulation-chart")
    opened.run(
        "(s => { s.value = 'use'; s.dispatchEvent(new Event('change')); })"
        "(document.getElementById('simulation-series'))"
    )
    assert drawn(opened, "simulation-chart") != before
    assert text(opened, "#simulation-legend") == "KV cache in usebusy with steps"
    size(opened, 400)
    opened.settle()
    assert opened.run("document.documentElement.scrollWidth") <= 400
    size(opened, 1280)
    assert not opened.run("document.getElementById('simulation-times').classList.contains('stale')")
    put(opened, "clients", "8")
    assert opened.run("document.getElementById('simulation-times').classList.contains('stale')")
    # a rate or clients
    assert opened.run("document.getElementById('controls').elements.rate.value") == ""
    address = "?rate=&clients=8&num_requests=300&turns=3&kv_tiers=host%3A2GB%3A50GB%2Fs"
    until(opened, f"location.search === {address!r}")
    assert opened.complaints == []
    simulated(opened)
    assert opened.run("document.getElementById('simulation-times').hidden")
    assert text(opened, "#simulation-words") == "sessions come at a rate: give turns and calls, or clients"


@pytest.mark.slow
def test_pools_and_autoscaling_are_simulated(opened: Browser) -> None:
    put(opened, "rate", "40")
    put(opened, "fleet", "--prefill-replicas 1 --decode-replicas 1")
    assert simulated(opened) == ["TTFT", "TPOT", "ITL", "E2E", "KV transfer"]
    scale = "--autoscale concurrency:4 --max-replicas 3 --startup 2 --scale-interval 1"
    put(opened, "fleet", scale)
    assert simulated(opened) == ["TTFT", "TPOT", "ITL", "E2E"]
    assert " GPU hours. " in text(opened, "#simulation-words")
    assert text(opened, "#simulation-legend") == "servingstartingdraining"
    assert scale in text(opened, "#simulation-command code")
    assert opened.complaints == []
    opened.open(opened.run("location.href"))
    settled(opened)
    assert opened.run("document.getElementById('controls').elements.fleet.value") == scale


@pytest.mark.slow
def test_a_simulation_ends_when_another_is_requested(opened: Browser, page: PageServer) -> None:
    put(opened, "num_requests", "131072")
    put(opened, "rate", "5")
    ended, press = page.app.calls.abandoned, "document.getElementById('simulate').click()"
    opened.run(press)
    while not page.app.calls.running:
        time.sleep(0.005)
    opened.run(
        "(c => { c.value = '50'; c.dispatchEvent(new Event('input', {bubbles: true})); })"
        f"(document.getElementById('controls').elements.num_requests); {press}"
    )
    settled(opened)
    assert text(opened, "#simulation-words").startswith("50 of 50 requests finished in ")
    assert page.app.calls.abandoned == ended + 1


@pytest.mark.slow
def test_every_kind_of_step_is_drawn(opened: Browser) -> None:
    assert opened.run("document.getElementById('chunk-row').hidden")
    for i, kind in enumerate(("decode", "mixed", "prefill")):
        opened.click("input[name=kind]", at=i)
        settled(opened)
        assert not opened.run("document.getElementById('chunk-row').hidden") or kind == "decode"
        names = opened.run("[...document.querySelectorAll('#operators td.name')].map(c => c.textContent)")
        assert ("prefill attention" in names) == (kind != "decode")
        assert ("decode attention" in names) == (kind != "prefill")
    assert opened.complaints == []


@pytest.mark.slow
def test_an_error_is_a_line_and_goes_away(opened: Browser) -> None:
    put(opened, "dtype", "int8")
    assert "int8" in text(opened, "#problem")
    assert opened.run("document.querySelector('#step-card').classList.contains('stale')")
    assert text(opened, "#sentence") == "llama-3.1-8b on h100: no answer"
    put(opened, "dtype", "auto")
    assert opened.run("document.getElementById('problem').hidden")
    assert not opened.run("document.querySelector('#step-card').classList.contains('stale')")
    put(opened, "model", "llama-3.1-405b")
    assert not opened.run("document.getElementById('notes').hidden")
    assert text(opened, "#tile-ttft .big") == "\N{EN DASH}"
    put(opened, "ttft_ms", "")
    put(opened, "tpot_ms", "")
    assert "set one on TTFT or TPOT" in text(opened, "#capacity-words")


def test_a_view_is_its_address(opened: Browser, page: PageServer) -> None:
    put(opened, "batch", "48")
    put(opened, "tpot_ms", "")
    put(opened, "engine", "trtllm-1.0")
    until(opened, "location.search.length > 0")
    time.sleep(0.4)
    address = opened.run("location.href")
    assert address == f"{page.url}?engine=trtllm-1.0&batch=48&tpot_ms="
    step = text(opened, "#tile-step .big")
    opened.open(address)
    settled(opened)
    assert text(opened, "#tile-step .big") == step
    assert opened.run("document.getElementById('controls').elements.batch.value") == "48"
    opened.click("#reset")
    settled(opened)
    assert opened.run("document.getElementById('controls').elements.batch.value") == "8"
    until(opened, "location.search === ''")
    # what no view has gets a line, not a broken page
    opened.open(f"{page.url}?batch=many&nothing=1&model=%3Cscript%3Ealert(1)%3C/script%3E")
    until(opened, "!document.getElementById('problem').hidden")
    assert "batch" in text(opened, "#problem") or "model" in text(opened, "#problem")


@pytest.mark.slow
def test_adapters_are_part_of_a_view(opened: Browser, page: PageServer) -> None:
    step = float(text(opened, "#tile-step .big").split()[0])
    put(opened, "lora", "16:4")
    assert ", LoRA 16:4, engine" in text(opened, "#sentence")
    assert float(text(opened, "#tile-step .big").split()[0]) > step
    for command in ("step", "serving", "start", "layouts", "capacity"):
        assert "--lora 16:4" in text(opened, f"#{command}-command code")
    until(opened, "location.search === '?lora=16%3A4'")
    opened.open(opened.run("location.href"))
    settled(opened)
    assert opened.run("document.getElementById('controls').elements.lora.value") == "16:4"
    put(opened, "lora", "16:many")
    assert text(opened, "#problem").startswith("unknown lora target 'many'; ")
    put(opened, "lora", "")
    assert opened.run("document.getElementById('problem').hidden")
    assert "LoRA" not in text(opened, "#sentence")


@pytest.mark.slow
def test_a_gpu_without_known_power_has_no_energy(opened: Browser) -> None:
    put(opened, "gpu", "a10")
    assert text(opened, "#tile-energy .big") == "\N{EN DASH}"
    assert "power of NVIDIA A10 is unknown" in text(opened, "#step-energy")
    assert text(opened, "#tile-tpot .big").endswith(" ms")
    assert opened.complaints == []


@pytest.mark.slow
def test_layouts_and_points_can_be_taken(opened: Browser) -> None:
    opened.run("document.getElementById('controls').elements.gpus.value = '4'")
    put(opened, "gpus", "4")
    names = opened.run("[...document.querySelectorAll('#layouts td.name')].map(c => c.textContent)")
    assert sorted(names) == ["tp 1", "tp 2", "tp 4"]
    opened.click("#layouts button", at=names.index("tp 4"))
    settled(opened)
    assert "(tp 4)" in text(opened, "#sentence")
    assert text(opened, "#layouts tr.shown td.name") == "tp 4"
    batch = opened.run("document.getElementById('controls').elements.batch.value")
    opened.click("#curve .u-over")  # its middle
    settled(opened)
    assert opened.run("document.getElementById('controls').elements.batch.value") != batch
    assert not opened.run("document.getElementById('tip').hidden")


@pytest.mark.slow
def test_an_outdated_answer_is_not_shown(opened: Browser, page: PageServer) -> None:
    opened.run("""(() => {
      const real = window.fetch;
      window.open_now = 0; window.most_open = 0; window.requested = []; window.seen = [];
      window.fetch = async (address, given) => {
        if (!String(address).endsWith('layouts')) return real(address, given);
        window.requested.push(JSON.parse(given.body).isl);
        window.most_open = Math.max(window.most_open, ++window.open_now);
        const reply = await real(address, given);
        await new Promise(done => setTimeout(done, 700));
        window.open_now -= 1;
        return reply;
      };
      new MutationObserver(() => window.seen.push(document.querySelector('#layouts-command').textContent))
        .observe(document.getElementById('best'), {childList: true});
    })()""")
    for isl in (600, 700, 800, 900):
        opened.run(
            "(() => { const c = document.getElementById('controls').elements.isl; "
            f"c.value = {isl}; c.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
        )
        time.sleep(0.25)
    settled(opened)
    requested, seen = opened.run("window.requested"), opened.run("window.seen")
    assert requested[0] == 600
    assert requested[-1] == 900
    assert opened.run("window.most_open") == 1
    # those on the way there were overtaken; the last one is shown, and nothing else was
    assert len(seen) == 1
    assert "--isl 900 " in text(opened, "#layouts-command code")


@pytest.mark.slow
def test_a_pinned_view_stays_next_to_the_following_one(opened: Browser) -> None:
    opened.click("#pin")
    assert "llama-3.1-8b on NVIDIA H100 SXM" in text(opened, "#pinned")
    assert text(opened, "#tile-step .quiet").startswith("as pinned, ")
    before = float(text(opened, "#tile-step .big").split()[0])
    put(opened, "dtype", "fp8")
    now = float(text(opened, "#tile-step .big").split()[0])
    shown = text(opened, "#tile-step .quiet").split()[0]
    assert float(shown.replace("\N{MINUS SIGN}", "-")) == pytest.approx((now / before - 1) * 100, abs=0.6)
    assert text(opened, "#curve-legend").endswith("pinned")
    compared = drawn(opened, "curve")
    opened.click("#pin")
    assert opened.run("document.getElementById('pinned').hidden")
    assert drawn(opened, "curve") != compared
    assert text(opened, "#tile-step .quiet").startswith("\N{PLUS-MINUS SIGN}")
    assert opened.complaints == []


@pytest.mark.slow
def test_keys_alone_do_it(opened: Browser) -> None:
    opened.run("document.querySelector('[data-of=batch]').focus()")
    step = text(opened, "#tile-step .big")
    for _ in range(6):
        opened.press("ArrowRight", "ArrowRight", 39)
    settled(opened)
    assert text(opened, "#tile-step .big") != step
    # every control is reached by Tab, and has a name
    nameless = opened.run(
        "[...document.querySelectorAll('input, select, button')].filter(e => !(e.labels && e.labels.length) "
        "&& !e.getAttribute('aria-label') && !e.textContent.trim()).length"
    )
    assert nameless == 0


@pytest.mark.parametrize("width", [400, 820, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_has_both_looks(opened: Browser, width: int, scheme: str) -> None:
    try:
        opened.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        size(opened, width)
        settled(opened)
        assert opened.run("document.documentElement.scrollWidth") <= width
        ground = opened.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(246, 247, 249)" if scheme == "light" else "rgb(20, 23, 28)")
        for chart in CHARTS:
            box = opened.run(f"document.querySelector('#{chart} canvas').getBoundingClientRect().toJSON()")
            assert 200 < box["width"] <= width
            assert box["right"] <= width
        look = drawn(opened, "curve")
        opened.run(
            "(() => { const t = document.getElementById('theme'); "
            f"t.value = '{'dark' if scheme == 'light' else 'light'}'; "
            "t.dispatchEvent(new Event('change')); })()"
        )
        opened.settle()
        assert drawn(opened, "curve") != look
    finally:
        opened.run("localStorage.clear()")
        opened.call("Emulation.setEmulatedMedia", features=[])
        size(opened, 1280)


@pytest.mark.slow
def test_a_slider_is_followed(opened: Browser) -> None:
    """From a control to its picture: bounded here against what one empty round trip takes on this machine."""
    script = """
    (async () => {
      const rounds = [], pictures = [];
      const root = document.documentElement.dataset;
      const slider = document.querySelector('[data-of=batch]');
      for (let i = 0; i < 12; i += 1) {
        const began = performance.now();
        await (await fetch('choices')).json();
        await new Promise(requestAnimationFrame);
        rounds.push(performance.now() - began);
        const before = root.pictures;
        slider.value = 20 + i;
        slider.dispatchEvent(new Event('input', {bubbles: true}));
        while (root.pictures === before) await new Promise(done => setTimeout(done, 1));
        pictures.push(Number(root.pictureMs));
      }
      const middle = (all) => all.sort((a, b) => a - b)[all.length >> 1];
      return [middle(rounds), middle(pictures)];
    })()
    """
    opened.run(script)
    empty, picture = opened.run(script)
    print(f"an empty round trip {empty:.1f} ms, a picture {picture:.1f} ms")
    # 12 ms and 25 ms where nothing else runs
    assert picture < 40 + 8 * empty


@pytest.mark.slow
def test_no_tile_runs_into_the_next_one(opened: Browser) -> None:
    for width in (360, 390, 820, 1280):
        size(opened, width)
        opened.settle()
        wide = "filter(p => p.scrollWidth > p.clientWidth).map(p => p.textContent)"
        parts = ".tile > :is(h2, .big), #start-card .scroll"
        assert opened.run(f"[...document.querySelectorAll({parts!r})].{wide}") == [], width
    size(opened, 1280)


def test_labels_cover_no_point_and_no_other_label(opened: Browser) -> None:
    """Wherever points are; a label without room is left out, the first points keep theirs."""
    boxes = opened.run(
        "import('/assets/chart.js').then(({labelBoxes}) => { let seed = 1;"
        "const draw = (most) => (seed = seed * 16807 % 2147483647) / 2147483647 * most;"
        "return Array.from({length: 200}, () => {"
        "const points = Array.from({length: 8}, (_, i) => ({x: 20 + draw(360), y: 20 + draw(160),"
        "radius: 20 - 2 * i, width: i < 5 ? 20 + draw(80) : 0, height: 14}));"
        "const taken = [{left: 300, right: 395, top: 2, bottom: 16}];"
        "const frame = {left: 0, right: 400, top: 0, bottom: 200};"
        "return [points, taken, labelBoxes(points, taken, frame)]; }); })"
    )
    drawn_labels = 0
    for points, taken, labels in boxes:
        circles = [
            {"left": p["x"] - p["radius"], "right": p["x"] + p["radius"], "top": p["y"] - p["radius"],
             "bottom": p["y"] + p["radius"]}
            for p in points
        ]  # fmt: skip
        placed = [box for box in labels if box]
        drawn_labels += len(placed)
        assert labels[5:] == [None] * 3
        for i, box in enumerate(placed):
            assert 0 <= box["left"] < box["right"] <= 400
            assert 0 <= box["top"] < box["bottom"] <= 200
            for other in (*circles, *taken, *placed[:i]):
                apart = box["right"] <= other["left"] or other["right"] <= box["left"]
                assert apart or box["bottom"] <= other["top"] or other["bottom"] <= box["top"]
    assert drawn_labels > 600
    assert "HBM 3.35 TB/s, bf16 990 TFLOP/s" in text(opened, "#roofline-words")


@pytest.mark.slow
def test_limits_have_the_digits_that_were_typed(opened: Browser) -> None:
    put(opened, "tpot_ms", "30")
    put(opened, "ttft_ms", "1250.5")
    assert text(opened, "#tile-tpot .quiet").endswith("30 ms")
    assert text(opened, "#tile-ttft .quiet").endswith("1,250.5 ms")
    assert "TPOT p99 of 30 ms" in text(opened, "#capacity-legend")
