"""Runs that are known to be defective, by model, GPU, engine and version: named, not fitted, not dropped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.documents import parse_toml
from fastroof.errors import TableError
from fastroof.serving.evidence.rows import ServingRow

__all__ = ["Defect", "defect_of", "known_defects"]

_FILE: Final = "defects.toml"


class Defect(NamedTuple):
    """What is wrong with some runs.

    Attributes
    ----------
    model : str
        Their architecture.
    gpu, engine : str
        Where they ran.
    versions : tuple of str
        Versions of the engine.
    reason, source : str
        What was found, and by what.
    concurrency : float, optional
        Number of clients of the runs; None for all.
    """

    model: str
    gpu: str
    engine: str
    versions: tuple[str, ...]
    reason: str
    source: str
    concurrency: float | None = None

    def holds_for(self, row: ServingRow) -> bool:
        """Whether a run is one of them."""
        return (
            (self.model, self.gpu, self.engine) == (row.whole_model, row.gpu, row.engine)
            and row.engine_version in self.versions
            and self.concurrency in (None, row.concurrency)
        )


@cache
def known_defects() -> tuple[Defect, ...]:
    """Read the list that ships.

    Raises
    ------
    TableError
        If an entry is not one.
    """
    text = Path(__file__).with_name(_FILE).read_text("utf-8")
    try:
        entries = parse_toml(text, _FILE, TableError)["defects"]
        return tuple(Defect(**{**entry, "versions": tuple(entry["versions"])}) for entry in entries)
    except (KeyError, TypeError) as error:
        raise TableError(f"{_FILE}: no list of defects: {error}") from None


def defect_of(row: ServingRow) -> str:
    """Say what is known to be wrong with a run; empty where nothing is.

    Examples
    --------
    >>> sorted({defect.gpu for defect in known_defects()})
    ['b300', 'gb200', 'h100', 'h200']
    """
    return next((defect.reason for defect in known_defects() if defect.holds_for(row)), "")
