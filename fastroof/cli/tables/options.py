"""Options that several commands about tables have."""

from __future__ import annotations

from typing import Annotated

import typer

from fastroof.cli.options import GPU_NAMES

__all__ = ["Gpu", "Where"]

Where = Annotated[
    str | None, typer.Argument(metavar="[GPU|PATH]", help="A GPU's name or a folder of measured tables.")
]

Gpu = Annotated[str | None, typer.Option(*GPU_NAMES, help="Which GPU, where a folder holds several.")]
