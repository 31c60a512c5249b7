"""What engines call their arguments, as their own sources have it: facts, by release.

``ENGINE.toml`` beside this file has a table a command and release: ``options``, the values that some of them
take (``values``), ``keys`` of a YAML file, and ``rules`` on what an option counts, where the source says so.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Recorded(NamedTuple):
    """Arguments of one command in one release."""

    command: str
    release: str
    read_in: tuple[str, ...]
    options: frozenset[str]
    values: dict[str, list[str]]
    keys: frozenset[str]


def recorded(engine: str) -> list[Recorded]:
    """Every command of an engine, by release."""
    text = tomllib.loads((HERE / f"{engine}.toml").read_text("utf-8"))
    return [
        Recorded(
            one["command"], one["release"], tuple(one["read_in"]), frozenset(one["options"]),
            one.get("values", {}), frozenset(one.get("keys", ())),
        )
        for one in text["arguments"]
    ]  # fmt: skip
