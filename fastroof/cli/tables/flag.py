"""``fastroof tables flag``: what tests find wrong with families of rows, written into provenance.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import table_sets, tables_of
from fastroof.cli.options import Json
from fastroof.cli.output import print_json
from fastroof.errors import TableError

__all__ = ["register"]

EPILOG: Final = """\b
A kernel of a flagged family is served from another source that has it sound, and no answer out of one claims
a small error. Flags by hand (of other tests) are kept; no row is changed.

\b
JSON: a list with one object a family: source, operator, keys, test, reason, ratio, excess_us, serves, rows.
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("flag", epilog=EPILOG, short_help="Flag families of rows that no kernel took.")(flag)


def flag(
    where: Annotated[
        list[str],
        typer.Argument(metavar="GPU|PATH...", help="GPUs' names or folders, whose sources are flagged."),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be flagged; write nothing.")
    ] = False,
    modules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Flag nothing; write which modules take longer than their parts."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write into each source's provenance.toml which families of its rows tests find wrong."""
    if modules is not None:
        _write_modules(where, modules)
        return
    said = [one for name in where for one in _flagged(name, dry_run=dry_run)]
    if as_json:
        print_json(said)
        return
    for one in said:
        keys = " ".join(f"{name} {list(cells)}" for name, cells in one["keys"].items())
        typer.echo(f"{one['source']} {one['operator']} {keys}: {one['test']}: {one['reason']}")
    typer.echo(f"{len(said)} families {'would be flagged' if dry_run else 'flagged'}")


def _flagged(where: str, *, dry_run: bool) -> list[dict[str, Any]]:
    from fastroof.load.family_checks import flag_source, siblings_of
    from fastroof.load.soundness import unsound_families

    sets = table_sets(where)
    if any(one.source is None for one in sets):
        raise TableError(f"{where} has no provenance.toml to write into; import the tree first")
    loaded = [one.load() for one in sets]
    said: list[dict[str, Any]] = []
    for measured in loaded:
        provenance = flag_source(measured, siblings_of(measured, loaded), dry_run=dry_run)
        for operator, table in measured.tables.items():
            place = {"source": table.source, "operator": operator}
            said += [{**place, **family.as_dict()} for family in unsound_families(provenance, operator)]
    return said


def _write_modules(where: list[str], file: Path) -> None:
    """Write the list that ships, fastroof/load/known_unsound.toml."""
    from fastroof.load.write import toml_text
    from fastroof.tables.module_check import MODULE, module_families
    from fastroof.whole_files import write_whole

    rows = []
    for name in where:
        tables = tables_of(name)
        for source, families in module_families(tables).items():
            place = {"gpu": tables.gpu.name, "source": source, "operator": MODULE}
            rows += [{**place, **family.as_dict()} for family in families]
    write_whole(file, toml_text({"families": rows}))
    typer.echo(f"wrote {file}: {len(rows)} families")
