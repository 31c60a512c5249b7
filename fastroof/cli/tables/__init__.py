"""``fastroof tables``: list, check, judge and import measured tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import typer

from fastroof.cli.tables import imports, judge, list, validate
from fastroof.command_group import Commands, help_if_alone

__all__ = ["register"]

_COMMANDS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "list": (list.list_tables, list.LIST_EPILOG),
    "show": (list.show, list.SHOW_EPILOG),
    "new": (imports.new, imports.NEW_EPILOG),
    "validate": (validate.validate, validate.VALIDATE_EPILOG),
    "diff": (judge.diff, judge.DIFF_EPILOG),
    "flag": (judge.flag, judge.FLAG_EPILOG),
    "campaigns": (judge.campaigns, judge.CAMPAIGNS_EPILOG),
    "survey": (judge.survey, judge.SURVEY_EPILOG),
    "holdout": (judge.holdout, judge.HOLDOUT_EPILOG),
}
_IMPORTS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "aiconfigurator": (imports.aiconfigurator, imports.AICONFIGURATOR_EPILOG),
    "vidur": (imports.vidur, imports.VIDUR_EPILOG),
    "llmservingsim": (imports.llmservingsim, imports.LLMSERVINGSIM_EPILOG),
}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(
        help="List, show, check, import, judge measured tables.",
        epilog="Without a command it lists them.",
    )
    group.callback(invoke_without_command=True)(list.list_or_command)
    import_group = Commands(help="Convert tables that other programs measured.")
    import_group.callback(invoke_without_command=True)(help_if_alone)
    for name, (command, epilog) in _COMMANDS.items():
        group.command(name, epilog=epilog)(command)
    for name, (command, epilog) in _IMPORTS.items():
        import_group.command(name, epilog=epilog)(command)
    group.add_typer(import_group, name="import")
    app.add_typer(group, name="tables")
