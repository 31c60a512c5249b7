"""What engines call their arguments, as their own sources have it: facts, by release.

``ENGINE-RELEASE.toml`` next to this file is written from a wheel by ``python -m tests.engines.arguments``.
It has a table a command, with the options that differ from those of the release before it (``after``).
``trtllm.toml`` is written by hand: its ``options`` are a list, with the values that some take (``values``),
``keys`` of a YAML file, and ``rules`` on what an option counts.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

HERE = Path(__file__).parent


class Option(NamedTuple):
    """An option: other spellings, default and choices (empty if the source computes them), replacement."""

    also: tuple[str, ...] = ()
    default: str = ""
    choices: tuple[str, ...] = ()
    is_deprecated: bool = False
    use: str = ""


class Recorded(NamedTuple):
    """Options of a command in a release; of a server of ``takes_also`` (``vllm-0.31.0``) it takes all too."""

    command: str
    release: str
    read_in: tuple[str, ...]
    options: dict[str, Option]
    keys: frozenset[str] = frozenset()
    takes_also: str = ""
    is_deprecated: bool = False

    def find(self, spelling: str) -> Option | None:
        by_name = self.options.get(spelling)
        return by_name or next((one for one in self.options.values() if spelling in one.also), None)


def _option(one: dict[str, Any]) -> Option:
    return Option(
        tuple(one.get("also", ())), one.get("default", ""), tuple(one.get("choices", ())),
        one.get("is_deprecated", False), one.get("use", ""),
    )  # fmt: skip


def _by_hand(names: list[str], values: dict[str, list[str]]) -> dict[str, Option]:
    return {name: Option(choices=tuple(values.get(name, ()))) for name in names}


@cache
def recorded(engine: str) -> tuple[Recorded, ...]:
    """Every command of an engine, by release, the newest first."""
    files = [path for path in HERE.glob(f"{engine}*.toml") if path.stem.split("-")[0] == engine]
    found = [one for path in files for one in _read(path)]
    return tuple(sorted(found, key=lambda one: Version(one.release), reverse=True))


@cache
def _read(path: Path) -> tuple[Recorded, ...]:
    content = tomllib.loads(path.read_text("utf-8"))
    after = content.get("after", "")
    before = (
        {one.command: one for one in _read(HERE / f"{path.stem.split('-')[0]}-{after}.toml")} if after else {}
    )
    found: dict[str, Recorded] = {}
    for one in content["arguments"]:
        command, given = one["command"], one.get("options", {})
        if isinstance(given, list):
            options = _by_hand(given, one.get("values", {}))
        elif same := one.get("same_options_as"):
            options = found[same].options
        else:
            kept = before[command].options if command in before else {}
            options = {name: option for name, option in kept.items() if name not in one.get("gone", ())}
            options |= {name: _option(option) for name, option in given.items()}
        found[command] = Recorded(
            command, content.get("release") or one["release"], tuple(one["read_in"]), options,
            frozenset(one.get("keys", ())), one.get("takes_also", ""), one.get("is_deprecated", False),
        )  # fmt: skip
    return tuple(found.values())


def write(records: list[Recorded], program: str, engine: str) -> Path:
    """Write the records of a release as differences from the newest one before it."""
    release = records[0].release
    older = [one for one in recorded(engine) if Version(one.release) < Version(release)]
    after = older[0].release if older else ""
    before = {one.command: one.options for one in older if one.release == after}
    lines = [f"# {program} {release}, read from its wheel by python -m tests.engines.arguments"]
    if after:
        lines += [f"# options as in {after}, but for these and those that are gone", f'after = "{after}"']
    lines += [f'release = "{release}"', ""]
    for number, record in enumerate(records):
        lines += ["[[arguments]]", f"command = {json.dumps(record.command)}"]
        lines.append(f"read_in = {json.dumps(list(record.read_in))}")
        if record.takes_also:
            lines.append(f"takes_also = {json.dumps(record.takes_also)}")
        if record.is_deprecated:
            lines.append("is_deprecated = true")
        same = next((one.command for one in records[:number] if one.options == record.options), "")
        if same:
            lines += [f"same_options_as = {json.dumps(same)}", ""]
            continue
        kept = before.get(record.command, {})
        if gone := sorted(kept.keys() - record.options.keys()):
            lines.append(f"gone = {json.dumps(gone)}")
        lines.append("[arguments.options]")
        lines += [
            f"{name} = {_written(option)}"
            for name, option in sorted(record.options.items())
            if kept.get(name) != option
        ]
        lines.append("")
    path = HERE / f"{engine}-{release}.toml"
    path.write_text("\n".join(lines), "utf-8")
    _read.cache_clear()
    recorded.cache_clear()
    return path


def _written(option: Option) -> str:
    parts = [f"{name} = {json.dumps(value)}" for name, value in option._asdict().items() if value]
    return f"{{ {', '.join(parts)} }}" if parts else "{}"
