"""``fastroof ui``: a page in the browser where all of it follows the controls."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fastroof.cli.options import GPU_NAMES

EPILOG: Final = """\b
Examples:
  fastroof ui --open
  fastroof ui --model mine/config.json --gpu mine/gpu.toml --port 8050

The page listens on 127.0.0.1 only and loads nothing from the network. Each answer shows the command that
prints it. The address holds all settings: bookmark it, or open it on another machine that runs `fastroof ui`
on the same --port. Ctrl-C stops the server.
"""


def ui(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model to start with: a preset, or a config.json to add."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(*GPU_NAMES, metavar="GPU", help="GPU to start with: a name, or a gpu.toml to add."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on.  [default: a free one]")
    ] = 0,
    opens_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Explore models, GPUs and layouts in a browser."""
    from fastroof.ui.plans import named_start
    from fastroof.ui.server import serve_page

    start = named_start(model, gpu)
    serve_page(
        port,
        start=start.view,
        models=start.models,
        gpus=start.gpus,
        ready=lambda url: typer.echo(f"{url}  (Ctrl-C ends it)"),
        opens_browser=opens_browser,
    )
