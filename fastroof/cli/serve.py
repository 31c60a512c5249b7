"""``fastroof serve``: plans for other processes, on a pipe or over HTTP."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.named_plans import PLAN_TABLES, PLANS_HELP, PlansArgument, named_plans, plans_words
from fastroof.cli.options import option
from fastroof.cli.output import counted
from fastroof.command_group import Group, GroupValues, taking
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.backends.serve.limits import ServeLimits

EPILOG: Final = f"""{PLANS_HELP}
\b
Examples:
  echo '{{"batch_size": [64, 65], "kv_len": 4096}}' | fastroof serve llama-3.1-8b --stdio
  echo '{{"requests": [[[2048, 0], [1, 4095]]]}}' | fastroof serve llama-3.1-8b --stdio
  echo '{{"simulate": {{"workload": {{"rate": 10, "requests": 500}}}}}}' | fastroof serve llama-3.1-8b --stdio
  fastroof serve llama-3.1-8b llama-3.1-70b,tp=4,dtype=fp8 --http 127.0.0.1:8080 &
  curl --json '{{"plan": 0, "batch_size": [64, 65], "kv_len": 4096}}' http://127.0.0.1:8080/message

--stdio answers every line of JSON with a line, in order: {{"id": 1, "plan": "llama-3.1-8b", "requests":
[[[new, context], ...], ...]}} with {{"id": 1, "latency_us": [...]}}, an invalid one with {{"id": 1,
"error": ..., "message": ...}}; {{"describe": true}} returns the plans and limits.

--http answers the same messages, posted to /message, one as application/json or one per line as
application/jsonl. Arrays of steps are posted to /steps?plan=NAME as an Arrow IPC stream
(application/vnd.apache.arrow.stream). GET /describe, /healthz, /metrics (Prometheus), /openapi.json, which
describes all messages. fastroof.backends.serve.client.PlanClient is its client in Python. For TLS and slow
clients, put a reverse proxy in front of it.

SIGTERM stops a server once what it has read is answered; --stdio also stops at the end of its input.
"""


LIMITS: Final[Group] = {
    "max_steps": option(int, "Maximum steps of a message.  [default: 4194304]", min=1),
    "max_calls": option(int, "Maximum concurrent calls.  [default: 32]", min=1),
    "max_call_s": option(int, "Maximum seconds of a call.  [default: 60]", min=1),
}
"""Fields of :class:`fastroof.backends.serve.limits.ServeLimits`."""


@taking(measured=PLAN_TABLES, given=LIMITS)
def serve(
    *,
    plans: PlansArgument,
    stdio: Annotated[bool, typer.Option("--stdio", help="Answer lines of JSON on standard input.")] = False,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|unix:PATH", help="Listen for HTTP: JSON and Arrow; port 0 picks a free one."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Require the token in this file of HTTP clients.")
    ] = None,
    measured: GroupValues,
    given: GroupValues,
) -> None:
    """Serve step times to other processes, over HTTP or a pipe.

    Serves one or more plans, by name or number, on a pipe to the program that starts the server (--stdio) or
    to many clients (--http), which takes a token to listen beyond this machine. An invalid message gets an
    error and stops nothing. No message names a file.
    """
    if stdio == (http is not None):
        raise BackendError("fastroof serve needs either --stdio or --http HOST:PORT")
    from fastroof.backends.serve.limits import ServeLimits

    limits = ServeLimits(**{name: value for name, value in given.items() if value is not None})
    if stdio:
        if token_file:
            raise BackendError("--token-file goes with --http: a pipe needs none")
        _serve_stdio(plans, measured, limits)
        return
    host, port = _address(http or "")
    token = None if token_file is None else _token(token_file)
    named = named_plans(plans, **measured)
    from fastroof.backends.serve.http_server import serve_http

    def ready(port: int) -> None:
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}" if port else host
        typer.echo(f"serving {counted(len(named), 'plan')} at {where}: {plans_words(named)}")

    serve_http(named, host, port, token=token, limits=limits, ready=ready)


def _serve_stdio(plans: list[str], measured: GroupValues, limits: ServeLimits) -> None:
    from fastroof.backends.serve.stdio import protocol_output, serve_stdio

    with protocol_output() as output_fd:
        named = named_plans(plans, **measured)
        if sys.stdin.isatty():
            example = '{"batch_size": 64, "kv_len": 4096}'
            typer.echo(f"a line of JSON is a request, such as {example}; Ctrl-D ends", err=True)
        serve_stdio(named, limits=limits, output_fd=output_fd)


def _address(text: str) -> tuple[str, int]:
    if text.startswith("unix:"):
        return text, 0
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise BackendError(
            f"--http {text} is not HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080, or unix:PATH"
        )
    return match[1].strip("[]"), int(match[2])


def _token(path: Path) -> str:
    token = path.read_text("utf-8").strip()
    if not token or not token.isascii() or len(token.split()) != 1:
        raise BackendError(f"{path} must hold a token and nothing else: one word of ASCII")
    return token
