"""HTTP server of the page, on this machine only, until it is stopped."""

from __future__ import annotations

import webbrowser
from asyncio import Semaphore
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import PurePath
from threading import Thread
from typing import Any, Final

from fastroof.errors import BackendError, BatchError, FastroofError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from fastroof.backends.serve.http_calls import (
        JSON_TYPE,
        LOCAL_HOSTS,
        Calls,
        Endpoint,
        Refused,
        check_host,
        content_type,
        fixed,
        guarded,
        not_routed,
    )
    from fastroof.backends.serve.http_listener import HttpListener, serve_until_stopped
except ModuleNotFoundError as error:
    missing = str(error.name).partition(".")[0]
    raise BackendError(f"the page needs {missing}: run pip install 'fastroof[ui]'") from None

from fastroof.backends.serve.answers import for_json, write_reply
from fastroof.backends.serve.limits import listening_socket
from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.stopping import check_stopped
from fastroof.ui.answers import capacity_answer, layouts_answer, start_answer, step_answer
from fastroof.ui.commands import choices
from fastroof.ui.deployment import deployment_answer
from fastroof.ui.plans import PlanStore
from fastroof.ui.simulation import simulation_answer
from fastroof.ui.view import View

HOST: Final = "127.0.0.1"
CLOSING_S: Final = 1.0
"""Seconds for open questions to finish on shutdown."""


class PageServer(HttpListener):
    """Server of the page on the loopback address; it listens from its creation until it is drained."""

    def __init__(
        self,
        port: int = 0,
        *,
        start: View | None = None,
        models: Mapping[str, str] | None = None,
        gpus: Mapping[str, str] | None = None,
    ) -> None:
        self.start = start or View()
        self.store = PlanStore(models, gpus)
        self.store.model(self.start.model)
        self.app = PageApp(self.store, self.start)
        super().__init__(self.app.asgi, listening_socket(HOST, port, None), MOST_CALLS)

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://{HOST}:{self.port}/"

    def warm(self) -> None:
        """Load the tables and loops of the first view in the background, to answer its questions sooner."""

        def answer() -> None:
            # the page will show the error
            with suppress(FastroofError):
                step_answer(self.store, self.start)
                layouts_answer(self.store, self.start)

        Thread(target=answer, name="fastroof-ui-warm", daemon=True).start()


def serve_page(
    port: int = 0,
    *,
    start: View | None = None,
    models: Mapping[str, str] | None = None,
    gpus: Mapping[str, str] | None = None,
    ready: Callable[[str], None] | None = None,
    opens_browser: bool = False,
) -> None:
    """Serve the page until SIGINT (Ctrl-C) or SIGTERM."""

    def listens(page: PageServer) -> None:
        page.warm()
        if ready is not None:
            ready(page.url)
        if opens_browser:
            webbrowser.open(page.url)

    serve_until_stopped(lambda: PageServer(port, start=start, models=models, gpus=gpus), listens, CLOSING_S)


MOST_BYTES: Final = 2**12
"""Maximum size of a view; the longest valid one has half."""

MOST_CALLS: Final = 16
"""Maximum number of concurrent questions; a page has six."""

MOST_CALL_S: Final = 300
"""Seconds that a question may take: the first ones wait for tables and for compilation."""

MOST_BODIES_BYTES: Final = 2**20
"""Maximum size of all views being read."""

QUICK, LONG = 2, 2
"""Number of quick answers at a time, and of those that take longer."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Content types of the served files, by suffix."""


def page_files() -> dict[str, bytes]:
    """Return the page's files by their path in ``assets``; ``shared`` are those of reports too."""
    assets = resources.files("fastroof.ui") / "assets"
    shared = resources.files("fastroof.report.html").joinpath("assets", "shared")
    folders = {"": assets, "vendored/": assets / "vendored", "shared/": shared}
    return {
        path + file.name: file.read_bytes()
        for path, folder in folders.items()
        for file in folder.iterdir()
        if PurePath(file.name).suffix in TYPES
    }


class PageApp:
    """The page's web application: files, choices and questions."""

    def __init__(self, store: PlanStore, start: View) -> None:
        self._store = store
        self._files = page_files()
        page, offered = self._files["index.html"], write_reply(choices(store, start))
        quick, long = Semaphore(QUICK), Semaphore(LONG)
        questions = {
            "step": (step_answer, quick),
            "start": (start_answer, quick),
            "layouts": (layouts_answer, long),
            "deployment": (deployment_answer, long),
            "capacity": (capacity_answer, long),
            "simulation": (simulation_answer, long),
        }
        asked = [f"/ask/{name}" for name in questions]
        served = f"; valid: GET /, /choices, /assets/; POST {', '.join(asked)}"
        self.calls = Calls(MOST_CALLS, MOST_CALL_S, MOST_BODIES_BYTES, "questions")
        self.asgi = Starlette(
            routes=[
                Route("/", self._guarded(fixed(page, TYPES[".html"]))),
                Route("/assets/{path:path}", self._guarded(self._file)),
                Route("/choices", self._guarded(fixed(offered, JSON_TYPE))),
                *(
                    Route(path, self._question(*how), methods=["POST"])
                    for path, how in zip(asked, questions.values(), strict=True)
                ),
            ],
            exception_handlers={HTTPException: not_routed(served, headers=HEADERS)},
        )

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        return guarded(endpoint, _check_origin, headers=HEADERS)

    async def _file(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path not in self._files:
            raise Refused(404, f"the page has no file {shown(path)}")
        return Response(self._files[path], headers={"Content-Type": TYPES[PurePath(path).suffix]})

    def _question(self, answer: Callable[[PlanStore, View], dict[str, Any]], turns: Semaphore) -> Endpoint:
        def answered(body: bytes) -> bytes:
            check_stopped()
            view = View.of(parse_json(body, "a view", BatchError, is_strict=True))
            return write_reply(for_json(answer(self._store, view)))

        async def handled(request: Request) -> Response:
            if content_type(request) != JSON_TYPE:
                raise Refused(415, f"a view must be {JSON_TYPE}, got {shown(content_type(request))}")
            with self.calls.take(request) as call:
                body = await call.body(MOST_BYTES)
                async with turns:
                    return Response(await call.run(answered, body), media_type=JSON_TYPE)

        return self._guarded(handled)


def _check_origin(request: Request) -> None:
    """Reject other hosts' names, and what the browser marks as sent by another site, but for navigation."""
    check_host(request, LOCAL_HOSTS, "the page serves only this machine")
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and request.headers.get("sec-fetch-mode") != "navigate":
        raise Refused(403, f"the page accepts only its own requests, got {shown(site)}")
