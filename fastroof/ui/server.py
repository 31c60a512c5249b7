"""The page served on this machine, until it is told to stop."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Final

from fastroof.errors import BackendError, FastroofError

try:
    from fastroof.backends.serve.http_listener import HttpListener
    from fastroof.ui.page_app import MOST_CALLS, PageApp
except ModuleNotFoundError as error:
    missing = str(error.name).partition(".")[0]
    raise BackendError(f"the page needs {missing}: pip install 'fastroof[ui]' would do") from None

from fastroof.backends.serve.http_listener import serve_until_told
from fastroof.backends.serve.limits import listening_socket
from fastroof.ui.layouts_answer import layouts_answer
from fastroof.ui.plans import PlanStore
from fastroof.ui.step_answer import step_answer
from fastroof.ui.view import View

__all__ = ["PageServer", "serve_page"]

HOST: Final = "127.0.0.1"
CLOSING_S: Final = 1.0
"""Seconds that open questions have to be answered in, once the page is told to close."""


class PageServer(HttpListener):
    """The page, at this machine's own address, from when it is made to when it is drained.

    Parameters
    ----------
    port : int
        Where to listen; 0 picks a free one.
    start : View, optional
        What it shows first.
    models, gpus : mapping of str to str, optional
        What it lists beside all that is known by name, as :class:`fastroof.ui.plans.PlanStore` has it.

    Raises
    ------
    BackendError
        If the port cannot be had.
    FastroofError
        If what it is to list cannot be loaded.

    Examples
    --------
    >>> import urllib.request
    >>> with PageServer() as page:
    ...     with urllib.request.urlopen(page.url) as reply:
    ...         reply.headers["Content-Type"]
    'text/html; charset=utf-8'
    """

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
        app = PageApp(self.store, self.start)
        super().__init__(app, listening_socket(HOST, port, None, tls=False), MOST_CALLS)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.port}/"

    def warm(self) -> None:
        """Load the tables and loops of the first view meanwhile, so that the page need not wait for them."""

        def answer() -> None:
            # what is wrong with it the page says
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
    """Serve the page until SIGINT (Ctrl-C) or SIGTERM.

    Parameters
    ----------
    port, start, models, gpus
        As of :class:`PageServer`.
    ready : callable, optional
        Called with the page's address once it is there.
    opens_browser : bool
        Whether to show it in this machine's browser.

    Raises
    ------
    BackendError
        As :class:`PageServer`; or outside of a program's main thread, the only one to get signals.
    """
    made: list[PageServer] = []

    def make() -> PageServer:
        made.append(PageServer(port, start=start, models=models, gpus=gpus))
        return made[0]

    def listens(_: int) -> None:
        page = made[0]
        page.warm()
        if ready is not None:
            ready(page.url)
        if opens_browser:
            webbrowser.open(page.url)

    serve_until_told(make, listens, CLOSING_S)
