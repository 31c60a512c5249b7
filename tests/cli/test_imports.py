"""What the command line imports: public names alone, and no command another before it runs."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import fastroof.cli

FOLDER = Path(fastroof.cli.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def imports(file: Path) -> list[tuple[str, str]]:
    """Module and name of every import from fastroof, those in functions included."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fastroof"
        for alias in node.names
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_commands_use_public_names(file: Path) -> None:
    for module, name in imports(file):
        if (module, name) == ("fastroof._version", "__version__"):
            continue
        found = importlib.import_module(module)
        public = getattr(found, "__all__", dir(found))
        is_module = (Path(found.__file__ or "").parent / f"{name}.py").exists() or (
            Path(found.__file__ or "").parent / name
        ).is_dir()
        assert name in public or is_module, f"{file.name} imports {module}.{name}, which is not public"
        assert not any(part.startswith("_") for part in (*module.split("."), name))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_no_command_is_imported_with_another_module(file: Path) -> None:
    group = file.parent.relative_to(FOLDER.parent.parent).as_posix().replace("/", ".")
    others = {f"fastroof.cli.{name}" for name in fastroof.cli.COMMANDS} - {group}
    statements = ast.parse(file.read_text("utf-8")).body
    assert others.isdisjoint(node.module for node in statements if isinstance(node, ast.ImportFrom))
