"""Options that several commands have, and parsers of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fastroof.checks import beyond_context
from fastroof.command_group import Group, warn
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


def flag_of(name: str) -> str:
    """Return the option of a parameter: ``--max-num-seqs`` of ``max_num_seqs``."""
    return f"--{name.replace('_', '-')}"


LIMITS_MS: Final[Group] = {
    "ttft": option(float, "Maximum time to first token.", "MS"),
    "tpot": option(float, "Maximum mean time per output token of a request.", "MS"),
    "itl": option(float, "Maximum time between two tokens.", "MS"),
    "e2e": option(float, "Maximum time of a request.", "MS"),
    "percentile": option(float, "Percentile of each time that limits apply to.  [default: 99]", "P"),
    "mean": option(bool, "Apply limits to means instead.", None, "--mean", default=False),
}
"""Limits on times, and what they apply to."""


def limited_percentile(percentile: float | None, mean: bool) -> float | None:
    """Return the percentile that limits apply to; None for means."""
    if mean and percentile is not None:
        raise BatchError("give --mean or --percentile, got both")
    return None if mean else 99.0 if percentile is None else percentile


def warn_beyond_context(name: str, max_position: int, longest: float) -> None:
    """Warn if a request has more tokens than the model's context."""
    if why := beyond_context(name, max_position, longest):
        warn(why)
