"""``python -m tests.engines.arguments WHEEL ..``: record options of engines' wheels, print what changed.

``--dry-run`` prints without writing. Releases are best given from the oldest to the newest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from tests.engines.arguments import Option, Recorded, recorded, write
from tests.engines.arguments.passed import passed_options
from tests.engines.arguments.wheels import PACKAGES, package_of, read_wheel


def differences(before: Recorded, now: Recorded) -> Iterator[str]:
    """Yield what changed from one release to another, a line a kind."""
    names = {name: next(iter(_same(before, name, option)), "") for name, option in now.options.items()}
    pairs = [(name, before.options[old], now.options[name]) for name, old in sorted(names.items()) if old]
    found = {
        "appeared": sorted(name for name, old in names.items() if not old),
        "vanished": sorted(before.options.keys() - set(names.values())),
        "became deprecated": [
            f"{name} (use {new.use})" if new.use else name
            for name, new in sorted(now.options.items())
            if new.is_deprecated and not (names[name] and before.options[names[name]].is_deprecated)
        ],
        "other default": [
            f"{name} {old.default or 'none'} -> {new.default or 'none'}"
            for name, old, new in pairs
            if old.default != new.default
        ],
        "other spellings": [
            f"{name} {_changed(old.also, new.also)}"
            for name, old, new in pairs
            if {names[name], *old.also} != {name, *new.also}
        ],
        "other choices": [
            f"{name} {_changed(old.choices, new.choices)}"
            for name, old, new in pairs
            if set(old.choices) != set(new.choices)
        ],
    }  # fmt: skip
    for kind, names in found.items():
        if names:
            yield f"  {kind} ({len(names)}): {', '.join(names)}"


def _same(before: Recorded, name: str, option: Option) -> list[str]:
    """Return the names of the options that had one of an option's spellings."""
    return [old for old, one in before.options.items() if {old, *one.also} & {name, *option.also}]


def _changed(old: tuple[str, ...], new: tuple[str, ...]) -> str:
    signed = [f"+{one}" for one in new if one not in old] + [f"-{one}" for one in old if one not in new]
    return " ".join(signed)


def affected(engine: str, record: Recorded) -> Iterator[str]:
    """Yield the options of fastroof's own commands that a release lacks or deprecates."""
    for name in sorted(passed_options(engine, record)):
        option = record.find(name)
        if option is None:
            yield f"  fastroof passes {name}, which this release does not have"
        elif option.is_deprecated:
            yield f"  fastroof passes {name}, which is deprecated; use {option.use or 'another'}"


def report(engine: str, records: list[Recorded]) -> Iterator[str]:
    """Yield what changed in the commands of a release."""
    for number, record in enumerate(records):
        same = [one.command for one in records[:number] if one.options == record.options]
        older = [
            one for one in recorded(engine)
            if one.command == record.command and Version(one.release) < Version(record.release)
        ]  # fmt: skip
        since = f", compared with {older[0].release}" if older else ", the first that is recorded"
        note = "; the engine recommends another command" if record.is_deprecated else ""
        yield f"{record.command} {record.release}: {len(record.options)} options{since}{note}"
        if same:
            yield f"  the same options as {same[0]}"
        elif older:
            yield from differences(older[0], record)
        yield from affected(engine, record)


def main() -> None:
    """Read wheels, print what changed, and write their records."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.arguments", description=__doc__)
    parser.add_argument(
        "wheels", nargs="+", type=Path, metavar="WHEEL", help=f"wheels of {', '.join(PACKAGES)}"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what changed, and write nothing")
    given = parser.parse_args()
    for path in given.wheels:
        package = package_of(path)
        records = read_wheel(path)
        print("\n".join(report(package.engine, records)))
        if not given.dry_run:
            print(f"written to {write(records, package.program, package.engine)}")


if __name__ == "__main__":
    main()
