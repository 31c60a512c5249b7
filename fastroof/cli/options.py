"""Options that several commands have, and parsers of their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fastroof.checks import beyond_context, shown
from fastroof.command_group import warn
from fastroof.errors import BatchError

GPU_NAMES: Final = ("--gpu", "--system")
"""Spellings of the option that names a GPU; the second is aiconfigurator's."""

Model = Annotated[
    str, typer.Option(metavar="MODEL", help="Preset (see fastroof models) or path of a config.json.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        *GPU_NAMES, metavar="GPU", help="GPU (see fastroof gpus) or path of a gpu.toml.  [default: h100]"
    ),
]
FolderGpu = Annotated[str | None, typer.Option(*GPU_NAMES, help="GPU, or one of the GPUs of a folder.")]
TablesPath = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Measured tables: a folder, GPU/SOURCE, or datasheet for none.  [default: the GPU's own]",
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Source of the tables, or OPERATOR=SOURCE,... for some operators.  [default: the best-ranked]",
    ),
]
Results = Annotated[
    Path, typer.Argument(metavar="RESULTS.parquet", help="Results of fastroof sweep.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def option(
    kind: Any, help_text: str, metavar: str | None = None, *names: str, default: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Return an option of a group: its type, which takes None where that is its default, and default."""
    kind = kind | None if default is None else kind
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help_text, **settings)], default


_LIMIT: Final = re.compile(r"([a-z0-9_]+)[=:]([0-9]*\.?[0-9]+)")
_LIMIT_NAMES: Final = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "e2e": "e2e_ms",
    "e2el": "e2e_ms",
    "ttft_ms": "ttft_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
}
"""Limits by their names, those of vLLM's ``bench serve --goodput`` included."""


def parse_limits(text: str | None) -> dict[str, Any]:
    """Read a request's limits, as ``ttft=500,tpot=50`` in ms."""
    limits: dict[str, Any] = {}
    for part in text.split(",") if text is not None else ():
        match = _LIMIT.fullmatch(part.strip())
        name = _LIMIT_NAMES.get(match[1]) if match else None
        if match is None or name is None or name in limits or float(match[2]) <= 0.0:
            raise BatchError(
                "--slo needs milliseconds above 0 as ttft=500,tpot=50,e2e=10000, each at most once; "
                f"got {shown(part)}"
            )
        limits[name] = float(match[2])
    return limits


def warn_beyond_context(name: str, max_position: int, longest: float) -> None:
    """Warn if a request has more tokens than the model's context."""
    if why := beyond_context(name, max_position, longest):
        warn(why)
