"""``fastroof tables import aiconfigurator``: tables from that package's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.gpu_tables import import_progress
from fastroof.cli.options import GPU_NAMES
from fastroof.cli.output import print_table
from fastroof.errors import TableError

__all__ = ["register"]

EPILOG: Final = """\b
Without a backend all that was measured on the GPU is converted, as it is when the GPU is first named: the
version in use of each engine, and what others add. With one it is a source of your own and stays as it is.

\b
Examples:
  fastroof tables import aiconfigurator h200
  fastroof tables import aiconfigurator h200 --backend sglang --version 0.5.10 -o my_tables
  fastroof step --model llama-3.1-8b --decode 64x4096 --tables my_tables/h200
"""


def register(imports: typer.Typer) -> None:
    """Add the command."""
    imports.command("aiconfigurator", epilog=EPILOG)(aiconfigurator)


def aiconfigurator(
    gpu: Annotated[
        str | None, typer.Argument(metavar="[GPU]", help="GPU, or the package's system: h200, b300_sxm.")
    ] = None,
    system: Annotated[str | None, typer.Option(*GPU_NAMES, help="The same as an option.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="vllm, sglang or trtllm.  [default: all there are]")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of the backend.  [default: the one in use]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder that gets <gpu>/<source>/.  [default: the user's]"),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="Folder of the package aiconfigurator_core.  [default: the installed one]"),
    ] = None,
    table_format: Annotated[str, typer.Option("--format", help="parquet or csv of a backend.")] = "parquet",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a source of one backend that is already there.")
    ] = False,
) -> None:
    """Convert what aiconfigurator-core measured on a GPU."""
    from fastroof.load.aiconfigurator import SYSTEMS, system_of

    if table_format not in ("parquet", "csv"):
        raise TableError(f"--format is parquet or csv, got {table_format!r}")
    named = [name for name in (gpu, system) if name is not None]
    if len({system_of(name) for name in named}) != 1:
        raise TableError(f"name one GPU; the package has tables of {', '.join(SYSTEMS.values())}")
    chosen = system_of(named[0])
    if backend is None:
        for option, given in (("--version", version), ("--format", table_format != "parquet")):
            if given:
                raise TableError(f"{option} goes with --backend: without one all there is is converted")
        folder = _import_all(SYSTEMS[chosen], output, root)
    else:
        folder = _import_one(chosen, backend, version, output, root, table_format, overwrite)
    _print(folder)


def _import_all(gpu: str, output: Path | None, root: Path | None) -> Path:
    from fastroof.load.aiconfigurator import data_folder
    from fastroof.load.by_name import ensure_imported

    data_folder(root)  # says what to install
    with import_progress(gpu) as progress:
        folder = ensure_imported(gpu, progress=progress, always=True, root=output, package=root)
    assert folder is not None
    return folder


def _import_one(
    system: str,
    backend: str,
    version: str | None,
    output: Path | None,
    root: Path | None,
    table_format: str,
    overwrite: bool,
) -> Path:
    from fastroof.config.paths import user_tables_root
    from fastroof.load.aiconfigurator import convert_aiconfigurator, data_folder
    from fastroof.load.package_sources import ENGINES, LAST_RANK, current_version

    in_use = current_version(data_folder(root).parent, system, backend)
    if version is None:
        version = in_use
    place = user_tables_root() if output is None else output
    # registered beside what the GPU has, it serves what that lacks, and what is asked of it by name
    rank = None if output is not None else ENGINES.get(backend) if version == in_use else LAST_RANK
    return convert_aiconfigurator(
        system,
        backend,
        version,
        place,
        root,
        "csv" if table_format == "csv" else "parquet",
        overwrite,
        rank=rank,
    )


def _print(folder: Path) -> None:
    from fastroof.load.listing import list_tables

    if not any(folder.rglob("provenance.toml")):
        typer.echo("all that the package measured on it ships with fastroof")
        return
    rows = [
        (source.source, table.operator, f"{table.rows:,}")
        for source in list_tables([folder])
        for table in source.operators
    ]
    print_table(("source", "operator", "rows"), rows, left=("source", "operator"))
    typer.echo(f"wrote {folder}")
