"""Operations with deliberate errors, which the fault runs must find."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.faults.operations import Operation

__all__ = ["PLANTED"]


def _in_place(folder: Path, inputs: Path, version: int, again: bool) -> None:
    with (folder / "a").open("w") as file:
        for line in range(3):
            file.write(f"{version} {line}\n")
            file.flush()


def _left(folder: Path, inputs: Path, version: int, again: bool) -> None:
    (folder / "a.part").write_text(f"{version}")
    (folder / "a.part").replace(folder / "a")


def _silent(folder: Path, inputs: Path, version: int, again: bool) -> None:
    with contextlib.suppress(OSError):
        (folder / "a").write_text(f"{version}")


def _apart(folder: Path, inputs: Path, version: int, again: bool) -> None:
    for name in "ab":
        (folder / f".{name}.{'0' * 32}").write_text(f"{version}")
        (folder / f".{name}.{'0' * 32}").replace(folder / name)


def _stuck(folder: Path, inputs: Path, version: int, again: bool) -> None:
    (folder / "lock").open("x").close()
    (folder / "a").write_text(f"{version}")
    (folder / "lock").unlink()


PLANTED = {
    "is half": Operation("writes in place", _in_place),
    "leaves a.part": Operation("leaves its half", _left),
    "reports success and is not new": Operation("silent", _silent),
    "to new": Operation("writes one after the other", _apart),
    "repeated it fails": Operation("leaves its lock", _stuck, leaves="lock"),
}
"""By the finding that they cause."""
