"""The page's server: to whom it answers, what it sends with every answer, its files, and how it ends."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import posixpath
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastroof.backends.serve.http_calls import Calls
from fastroof.errors import BackendError
from fastroof.simulation import Workload, simulate
from fastroof.ui import answers
from fastroof.ui.deployment import deployment_answer
from fastroof.ui.view import View
from tests.fuzz.mutators import mutated_bytes
from tests.http_replies import JSON, Reply, send
from tests.reference.waiting import is_idle, until

pytest.importorskip("starlette", reason="the page needs starlette: pip install fastroof[ui]")
pytest.importorskip("uvicorn", reason="the page needs uvicorn: pip install fastroof[ui]")

from fastroof.backends.serve.answers import for_json
from fastroof.ui import server as page_app
from fastroof.ui.answers import step_answer
from fastroof.ui.server import PageServer, serve_page
from fastroof.ui.simulation import simulation_answer

CHECKOUT = Path(__file__).resolve().parents[2]
ASSETS = CHECKOUT / "fastroof/ui/assets"
SHARED = CHECKOUT / "fastroof/report/html/assets/shared"
SMALL = View(model="llama-3.1-8b", tp=1, isl=512, osl=64, batch=8)
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.fixture(scope="module")
def page() -> Iterator[PageServer]:
    with PageServer(start=SMALL) as running:
        yield running


def post(page: PageServer, question: str, document: Any, **headers: str) -> Reply:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return send(page, "POST", f"/ask/{question}", body, JSON, **headers)


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_question_gets_what_python_gets(page: PageServer) -> None:
    for question, answer in (
        ("step", step_answer),
        ("start", answers.start_answer),
        ("layouts", answers.layouts_answer),
        ("capacity", answers.capacity_answer),
        ("deployment", deployment_answer),
        ("simulation", simulation_answer),
    ):
        reply = post(page, question, SMALL.document())
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert reply.read == json.loads(json.dumps(for_json(answer(page.store, SMALL))))


def test_choices_list_what_is_available(page: PageServer) -> None:
    choices = send(page, "GET", "/choices").read
    assert choices["start"] == SMALL.document()
    assert {"llama-3.1-8b", "qwen3-32b-fp8"} <= set(choices["models"])
    known = {gpu["name"]: gpu["known"] for gpu in choices["gpus"]}
    assert (known["h100"], known["h100_nvl"], known["l4"]) == ("measured", "scaled", "datasheet")
    assert "vllm" in choices["choices"]["engine"]
    for name, allowed in choices["choices"].items():
        for value in allowed:
            View.of({name: value})


def test_an_error_is_one_line_that_names_valid_values(page: PageServer) -> None:
    reply = post(page, "step", {**SMALL.document(), "tp": 3})
    assert (reply.status, reply.read["error"]) == (400, "PlanError")
    assert "1, 2, 4, 8" in reply.read["message"]
    assert "\n" not in reply.read["message"]
    reply = post(page, "step", b'{"tp": 1, "tp": 2}')
    assert (reply.status, "the key 'tp' is given twice" in reply.read["message"]) == (400, True)
    reply = post(page, "capacity", {**SMALL.document(), "ttft_ms": None, "tpot_ms": None})
    assert (reply.status, reply.read["error"]) == (400, "SimulationError")


def test_a_fault_is_reported_and_printed(page, monkeypatch, capsys) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of the page")

    monkeypatch.setattr(page.store, "plan", fails)
    reply = post(page, "step", SMALL.document())
    assert reply.status == 500
    assert "ZeroDivisionError: of the page" in reply.read["message"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_seeded_bytes_are_refused_or_answered(page: PageServer) -> None:
    whole = json.dumps(SMALL.document()).encode()
    dice = random.Random(5)
    statuses = set()
    for _ in range(150):
        reply = post(page, "step", mutated_bytes(whole, dice))
        assert reply.status in (200, 400, 413), reply
        statuses.add(reply.status)
        assert json.loads(reply.body)
    assert {200, 400} <= statuses


# -- clients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "0.0.0.0"]
)
def test_another_hosts_name_is_refused(page: PageServer, host: str) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", "/choices"),
        ("POST", "/ask/step"),
        ("GET", "/assets/page.js"),
    ):
        reply = send(page, method, path, b"{}" if method == "POST" else None, JSON, Host=host)
        assert reply.status == 421
        assert "127.0.0.1, ::1, localhost" in reply.read["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8050", "127.0.0.1", "[::1]:9"])
def test_this_machines_names_are_answered(page: PageServer, host: str) -> None:
    assert send(page, "GET", "/", Host=host).status == 200


def test_other_sites_are_refused(page: PageServer) -> None:
    # the headers that a browser sends for a script of another page
    for site in ("cross-site", "same-site"):
        reply = post(page, "step", SMALL.document(), Sec_Fetch_Site=site, Sec_Fetch_Mode="cors")
        assert reply.status == 403
        assert send(page, "GET", "/choices", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors").status == 403
    # a link on another page may lead here
    assert send(page, "GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200
    assert post(page, "step", SMALL.document(), Sec_Fetch_Site="same-origin").status == 200
    # before it posts JSON elsewhere a browser sends a preflight; a form's body is not JSON
    preflight = send(
        page, "OPTIONS", "/ask/step", Origin="https://evil.example", Access_Control_Request_Method="POST"
    )
    assert preflight.status == 405
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert post(page, "step", SMALL.document(), Content_Type=kind).status == 415


def test_every_answer_limits_what_browsers_may_do_with_it(page: PageServer) -> None:
    replies = [
        send(page, "GET", "/"), send(page, "GET", "/choices"), send(page, "GET", "/assets/page.css"),
        send(page, "GET", "/nothing"), send(page, "PUT", "/"), send(page, "GET", "/", Host="evil.example"),
        post(page, "step", SMALL.document()), post(page, "step", b"nothing"),
        post(page, "step", b" " * 10_000), send(page, "GET", "/assets/nothing.js"),
    ]  # fmt: skip
    assert [reply.status for reply in replies] == [200, 200, 200, 404, 405, 421, 200, 400, 413, 404]
    for reply in replies:
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        assert "server" not in reply.headers
        for name, value in page_app.HEADERS.items():
            assert reply.headers[name.lower()] == value
        policy = dict(
            part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}  # nothing inline, nothing from elsewhere


def test_it_listens_to_this_machine_alone(page: PageServer) -> None:
    assert page.url == f"http://127.0.0.1:{page.port}/"
    sockets = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for path in sockets if path.exists() for line in path.read_text().splitlines()[1:]]
    listens = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{page.port:04X}")]
    assert listens == [f"0100007F:{page.port:04X}"] or not sockets[0].exists()


def test_too_many_questions_are_refused() -> None:
    with PageServer(start=SMALL) as page:
        page.app.calls = Calls(0, page_app.MOST_CALL_S, page_app.MOST_BODIES_BYTES, "questions")
        reply = post(page, "step", SMALL.document())
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


def test_the_longest_view_is_read(page: PageServer) -> None:
    longest = View(lora="256:64/1024:attention+mlp+experts", kv_tiers="\u20ac" * 256, fleet="\u20ac" * 256)
    body = json.dumps(longest.document(), ensure_ascii=False).encode()
    assert page_app.MOST_BYTES // 4 < len(body) < page_app.MOST_BYTES * 3 // 4
    assert post(page, "simulation", body).status == 400


def _long_answer(store: Any, view: View) -> dict[str, Any]:
    """Simulate for minutes."""
    plan = store.plan(view, view.simulated_sizes).plan
    trace = Workload(rate=1e5, requests=2**18, isl=1, osl=2).trace()
    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "router": "least_kv"}
    simulate(plan, trace.limited(10), **options, replicas=2)
    return simulate(plan, trace, **options, replicas=4096).summary()


def _ends(page: PageServer) -> None:
    until(lambda: not page.app.calls.running)
    until(is_idle)


@pytest.mark.slow
def test_a_question_without_a_waiting_client_ends(monkeypatch) -> None:
    monkeypatch.setattr(page_app, "capacity_answer", _long_answer)
    with PageServer(start=SMALL) as page:
        for _ in range(3):  # more than there are threads
            connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
            connection.request("POST", "/ask/capacity", json.dumps(SMALL.document()), JSON)
            while not page.app.calls.running:
                time.sleep(0.01)
            time.sleep(0.5)
            connection.close()
        _ends(page)
        assert post(page, "step", SMALL.document()).status == 200


@pytest.mark.slow
def test_a_question_ends_at_its_time_limit(monkeypatch) -> None:
    monkeypatch.setattr(page_app, "capacity_answer", _long_answer)
    monkeypatch.setattr(page_app, "MOST_CALL_S", 1)
    with PageServer(start=SMALL) as page:
        assert post(page, "step", SMALL.document()).status in (200, 503)  # with its tables and plan
        reply = post(page, "capacity", SMALL.document())
        assert (reply.status, reply.read["error"]) == (503, "StoppedError")
        assert "longer than the limit of 1 s" in reply.read["message"]
        _ends(page)


# -- files -----------------------------------------------------------------------------------------


def files_of_the_page() -> dict[str, Path]:
    own = {path.relative_to(ASSETS).as_posix(): path for path in ASSETS.rglob("*") if path.is_file()}
    return own | {f"shared/{path.name}": path for path in SHARED.iterdir()}


def test_all_files_are_served_as_they_are(page: PageServer) -> None:
    files = files_of_the_page()
    for name, path in files.items():
        reply = send(page, "GET", f"/assets/{name}")
        assert (reply.status, reply.body) == (200, path.read_bytes()) or path.suffix == ".toml"
    assert send(page, "GET", "/").body == files["index.html"].read_bytes()
    for path in (
        "../view.py",
        "..%2fview.py",
        "/etc/passwd",
        "%2e%2e/__init__.py",
        "vendored/provenance.toml",
        "vendored",
    ):
        assert send(page, "GET", f"/assets/{path}").status == 404, path


def test_what_the_page_names_is_there_and_nothing_lies_about() -> None:
    files = files_of_the_page()
    index = files["index.html"].read_text()
    named = {place.removeprefix("assets/") for place in re.findall(r'(?:src|href)="([^"#]+)"', index)}
    seen: set[str] = set()
    waiting = set(named)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        text = files[name].read_text()
        if name.endswith(".js") and "vendored" not in name:
            folder = name.rpartition("/")[0]
            imported = {posixpath.join(folder, one) for one in re.findall(r'from "\./([\w./]+)"', text)}
            waiting |= imported - seen
            assert not re.findall(r"https?://|innerHTML|eval\(|setAttribute\(\"style", text), name
    assert files.keys() - seen == {"index.html", "vendored/provenance.toml", "vendored/uPlot.LICENSE.txt"}
    # a strict policy would not run them
    assert not re.findall(r"\son\w+=|style=|<style|<script(?![^>]*src)", index)


def test_ids_that_scripts_use_are_on_the_page() -> None:
    index = (ASSETS / "index.html").read_text()
    ids = set(re.findall(r'id="([\w-]+)"', index))
    for script in ASSETS.glob("*.js"):
        used = set(re.findall(r'(?:byId|showCommand|legend|Chart)\("([\w-]+)"', script.read_text()))
        assert used <= ids, script.name
    # every control has a label of its own
    for control in re.findall(r"<(?:input|select)[^>]*>", index):
        own = re.search(r'id="([\w-]+)"', control)
        is_labelled = "aria-label" in control or (own and f'for="{own[1]}"' in index)
        assert is_labelled or re.search(rf"<label[^>]*>[^<]*{re.escape(control)}", index), control


def test_third_party_files_are_unchanged() -> None:
    provenance = tomllib.loads((ASSETS / "vendored/provenance.toml").read_text())
    assert provenance["files"] == UPLOT
    for name, digest in UPLOT.items():
        assert hashlib.sha256((ASSETS / "vendored" / name).read_bytes()).hexdigest() == digest
    assert f"v{provenance['package_version']}" in (ASSETS / "vendored/uPlot.iife.min.js").read_text()[:100]
    licence = (ASSETS / "vendored/uPlot.LICENSE.txt").read_text()
    assert "MIT License" in licence
    assert provenance["copyright"] in licence


# -- beginning and end -------------------------------------------------------------------------------


def test_a_port_in_use_is_reported(page: PageServer) -> None:
    with pytest.raises(BackendError, match=f"cannot listen on 127.0.0.1:{page.port}: "):
        PageServer(page.port)


@pytest.mark.slow
def test_what_is_missing_is_named_and_nothing_else_is_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(sys.argv[1:]))\n"
        "try: import fastroof.ui.server\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for modules in (("starlette",), ("uvicorn",), ("prometheus_client", "matplotlib", "plotly")):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *modules],
            cwd=CHECKOUT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        needed = f"BackendError the page needs {modules[0]}: run pip install 'fastroof[ui]'\n"
        assert (done.stdout, done.stderr) == (needed if len(modules) == 1 else "", "")


def test_signals_need_the_main_thread() -> None:
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            serve_page()
        except BackendError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(60)
    assert "main thread" in str(failed[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_cleanly(number: int, tmp_path: Path) -> None:
    # a browser that keeps what it was to show
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "shown"}\n')
    browser.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "fastroof", "ui", "--model", "llama-3.1-8b", "--open"],
        cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "BROWSER": f"{browser} %s"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        line = process.stdout.readline()
        found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/)  \(Ctrl-C ends it\)\n", line)
        assert found, line + process.stderr.read()
        # a browser's connection that stays open, and a question that is being answered
        with socket.create_connection(("127.0.0.1", int(found[2]))) as kept:
            kept.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert kept.recv(12) == b"HTTP/1.1 200"
            while not (tmp_path / "shown").exists() or not (tmp_path / "shown").read_text():
                time.sleep(0.05)
            assert (tmp_path / "shown").read_text().strip() == found[1]
            process.send_signal(number)
            began = time.monotonic()
            rest, errors = process.communicate(timeout=60)
            assert (process.returncode, rest, errors) == (0, "", "")
            assert time.monotonic() - began < 30.0
