"""Which releases of other programs the adapters were run against, read from ``releases.toml``.

``python -m fastroof.backends.releases`` prints the table of fastroof/backends/README.md.
"""

from __future__ import annotations

import datetime
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from typing import Any

from fastroof.documents import parse_toml
from fastroof.errors import BackendError


class ReleaseWarning(UserWarning):
    """An installed program is of a release that its adapter was not run against."""


@dataclass(frozen=True)
class Program:
    """A program that an adapter serves.

    Attributes
    ----------
    name : str
        What it is called.
    adapter : str
        The adapter's file, below ``fastroof/backends``.
    repository, licence : str
        Where its source is, as ``owner/name`` on GitHub, and under which licence, by its SPDX identifier.
    interface : str
        What of it defines the interface.
    checked : date
        When that was last read or run.
    distribution : str
        Its name on PyPI; empty if it is not there.
    ran : tuple of str
        Releases or commits that the adapter was run with.
    result : str
        What came out, as benchmarks/upstream prints it.
    signatures : tuple of str
        Releases or commits that were not run: stand-ins are held to their signatures, which
        tests/backends/interfaces records.
    followed : tuple of str
        Releases or commits that stand-ins were written after, with no record that holds them to it.
    note : str
        What else a user has to know to choose a release.
    """

    name: str
    adapter: str
    repository: str
    licence: str
    interface: str
    checked: datetime.date
    distribution: str = ""
    ran: tuple[str, ...] = ()
    result: str = ""
    signatures: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()
    note: str = ""

    def installed(self) -> str:
        """Return the installed version; empty if there is none."""
        if not self.distribution:
            return ""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return ""


@cache
def programs() -> tuple[Program, ...]:
    """Return the programs that adapters serve.

    Examples
    --------
    >>> [one.ran for one in programs() if one.adapter == "vidur/native.py"]
    [('0.0.26',)]
    """
    text = resources.files("fastroof.backends").joinpath("releases.toml").read_text("utf-8")
    listed: list[dict[str, Any]] = parse_toml(text, "releases.toml", BackendError)["program"]
    for one in listed:
        one.update({name: tuple(one.get(name, ())) for name in ("ran", "signatures", "followed")})
    return tuple(Program(**one) for one in listed)


def warn_of_release(adapter: str) -> None:
    """Warn if the installed program is of a release that the adapter was not run against."""
    served = [one for one in programs() if one.adapter == adapter]
    if not served:
        known = ", ".join(sorted({one.adapter for one in programs()}))
        raise BackendError(f"no adapter {adapter!r} is listed in releases.toml: {known}")
    for program in served:
        version = program.installed()
        if version and version not in program.ran:
            warnings.warn(
                f"{program.distribution} {version} is installed: fastroof/backends/{adapter} was run with "
                f"{', '.join(program.ran)}; other releases are untested",
                ReleaseWarning,
                stacklevel=3,
            )


def releases_markdown() -> str:
    """Return the table of releases as the README shows it.

    Examples
    --------
    >>> releases_markdown().splitlines()[0].split(" | ")[0]
    '| program'
    """
    columns = (
        "program",
        "adapter",
        "run for real",
        "result",
        "held to signatures",
        "written after",
        "defined by",
        "checked",
    )
    rows = [
        (
            one.name,
            f"`{one.adapter}`",
            ", ".join(one.ran) or "none",
            one.result,
            ", ".join(one.signatures),
            ", ".join(one.followed),
            f"{one.repository} ({one.licence}): {one.interface}" + (f". {one.note}" if one.note else ""),
            one.checked.isoformat(),
        )
        for one in programs()
    ]
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(releases_markdown(), end="")
