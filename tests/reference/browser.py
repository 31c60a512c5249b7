"""Headless Chromium, driven over its DevTools protocol through two pipes; nothing else is needed.

``python -m tests.reference.browser`` renews the pictures of the local page in README.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--window-size=1280,900",
)  # fmt: skip


TAKE_PIPES = """
import fcntl, os, sys
high = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The protocol is spoken on descriptors 3 and 4."""


def installed() -> str | None:
    """Path of a Chromium, or None."""
    named = os.environ.get("FASTROOF_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a headless Chromium; its complaints and network requests are recorded.

    Attributes
    ----------
    complaints : list of str
        Errors and warnings of the console, and exceptions.
    requests : list of str
        Addresses that the page requested.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._received = b""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        arguments = [program, *QUIET, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_PIPES, str(to_browser), str(from_browser), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(to_browser, from_browser), start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> Any:
        """Send one command, and wait for its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        while True:
            answer = self._next(30.0)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path | str) -> None:
        """Load a file, or an address, and wait until the page is done."""
        self.requests.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        # those until now are of the page before, whose questions may have been wrong ones
        self.complaints.clear()
        deadline = time.monotonic() + 60.0
        while self.run("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)
        self.settle()

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        self.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => done(1)), 120))")

    def click(self, selector: str, *, at: int = 0) -> None:
        """Click the middle of an element with the mouse."""
        script = f"document.querySelectorAll({json.dumps(selector)})[{at}]"
        self.run(f"{script}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        box = self.run(
            f"(() => {{ const b = {script}.getBoundingClientRect(); "
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **box, **pressed)
        self.settle()

    def press(self, key: str, code: str, number: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number, **given
            )
        self.settle()

    def _next(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], timeout_s)
            assert ready, f"the browser is silent for {timeout_s:g} s"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has gone"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        self._keep(found)
        return found

    def _keep(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(a.get("value", a)) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def photograph_page() -> None:
    """Write .github/page-light.webp and page-dark.webp, of the view that `fastroof ui` opens with."""
    served = subprocess.Popen(
        [sys.executable, "-m", "fastroof", "ui", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert served.stdout is not None
    address = served.stdout.readline().split()[0]
    program = installed()
    assert program, f"no Chromium: {', '.join(NAMES)}"
    for scheme in ("light", "dark"):
        with tempfile.TemporaryDirectory() as folder, Browser(program, Path(folder)) as browser:
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=features)
            browser.open(address)
            time.sleep(15.0)
            picture = browser.call("Page.captureScreenshot", format="webp", quality=80)["data"]
            Path(f".github/page-{scheme}.webp").write_bytes(base64.b64decode(picture))
    served.terminate()


if __name__ == "__main__":
    photograph_page()
