"""The budget of pyproject.toml: lines and files of Python in each folder, and words of READMEs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
BUDGET = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["fastroof"]["size"]
SLACK = 0.02
"""Share by which a limit may exceed what is there: a folder that shrank lowers its limit."""


def python_files(folder: str) -> list[Path]:
    return [path for path in (CHECKOUT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def size_of(folder: str) -> dict[str, int]:
    files = python_files(folder)
    guides = [*(CHECKOUT / folder).rglob("*.md")] if "words" in BUDGET[folder] else []
    sizes = {
        "lines": sum(len(path.read_bytes().splitlines()) for path in files),
        "files": len(files),
        "words": sum(len(path.read_text().split()) for path in guides),
    }
    return {name: sizes[name] for name in BUDGET[folder]}


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_is_within_its_budget(folder: str) -> None:
    for name, size in size_of(folder).items():
        limit = BUDGET[folder][name]
        assert size <= limit, (
            f"{folder} has {size:,} {name}, {size - limit:,} above its budget: delete what this replaces"
        )
        assert limit <= size * (1.0 + SLACK) + 1, (
            f"{folder} has {size:,} {name}: lower its budget of {limit:,} in pyproject.toml"
        )


def test_every_package_has_a_budget() -> None:
    packages = {f"fastroof/{path.parent.name}" for path in (CHECKOUT / "fastroof").glob("*/__init__.py")}
    assert {"fastroof", "kernels_bench", "benchmarks", "tests", *packages} == set(BUDGET)
