"""``fastroof ui``: a page in the browser where all of it follows the controls."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fastroof.cli.options import GPU_NAMES

EPILOG: Final = """\b
Examples:
  fastroof ui --open
  fastroof ui --model mine/config.json --gpu mine/gpu.toml --port 8050

The page is served to this machine alone (127.0.0.1), and loads nothing from elsewhere. It asks the plans that
all commands ask: beside each answer is the command that gives it. Its address holds all that is chosen, so
that a view can be kept, or sent to whoever runs `fastroof ui` at the same --port. Ctrl-C ends it.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ui", epilog=EPILOG)(ui)


def ui(
    model: Annotated[
        str | None,
        typer.Option(help="What it starts with: a preset, or a config.json, which joins its models."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(*GPU_NAMES, help="Likewise: a GPU, or a gpu.toml, which joins its GPUs."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens.  [default: a free one]")] = 0,
    opens_browser: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
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
