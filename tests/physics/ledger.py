"""Violations of a check, and the committed list that explains each of them.

An entry of violations.toml explains one cluster: the violations of ``check`` whose coordinates lie in
``where`` (``[least, most]`` for numbers, a list of words for text; ``ratio`` is one of them) and in no
earlier entry. It is true only with exactly ``count`` violations, the worst of them at ``worst``.

Outliers are not in that file but in the provenance of the tables that hold them: its ``outliers`` of an
operator are entries of the check "near its neighbours".
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CAUSES", "Entry", "Found", "complaints", "flagged_outliers", "load_entries", "settled"]

Array = npt.NDArray[Any]

LEDGER = Path(__file__).with_name("violations.toml")
CAUSES = {
    "two measurement states": "the same kernel was measured at either of two speeds, 17 % apart",
    "kernel switch": "the library picks another kernel or tile at the next size; inferred from a clean step "
    "where the kernel column names one library call for all",
    "tile edge": "a last tile that is partly filled costs more than a full one",
    "launch": "the latency is a launch and its jitter, the work does not show",
    "quantisation": "fp8 rows include quantising the input",
    "fp8 kernel": "the fp8 kernel is slower than the bf16 one there",
    "large GEMMs": "the MFU falls as the GEMM grows past its best size",
    "L2 cache": "about as many bytes as the L2 cache holds: how many stay in it varies",
    "extrapolated": "beyond the measured range, where the datasheet's roofline is part of what is added",
    "other work": "the row did less than its keys imply",
    "outlier": "one point off its neighbours on every axis; flagged in provenance.toml",
}
WORST_WITHIN = 6e-4
"""``worst`` is written with three decimals."""


@dataclass(frozen=True)
class Found:
    """Violations of one check.

    Attributes
    ----------
    check : str
        What was checked.
    limit : float
        What the ratio must not be under.
    ratio : ndarray of float64, shape (violations,)
        The smaller, the worse.
    at : mapping of str to ndarray
        Coordinates of each, of that shape.
    checked : int
        How many cases were looked at.
    """

    check: str
    limit: float
    ratio: npt.NDArray[np.float64]
    at: Mapping[str, Array]
    checked: int

    @classmethod
    def under(cls, check: str, limit: float, ratio: Array, at: Mapping[str, Any]) -> Found:
        """Keep the cases whose ratio is under the limit; coordinates broadcast to the ratios' shape."""
        if not np.isfinite(ratio).all():
            raise ValueError(f"{check}: a ratio is not a number")
        bad = ratio < limit
        kept = {name: np.broadcast_to(values, ratio.shape)[bad] for name, values in at.items()}
        return cls(check, limit, ratio[bad], kept, ratio.size)

    @classmethod
    def joined(cls, parts: Iterable[Found]) -> Found:
        """Violations of one check over several tables or plans."""
        parts = list(parts)
        first = parts[0]
        return cls(
            first.check,
            first.limit,
            np.concatenate([p.ratio for p in parts]),
            {name: np.concatenate([p.at[name] for p in parts]) for name in first.at},
            sum(p.checked for p in parts),
        )

    def case(self, row: int) -> str:
        """One violation in words."""
        at = ", ".join(f"{name}={values[row]}" for name, values in self.at.items())
        return f"{self.check} [{at}]: ratio {self.ratio[row]:.4f}, limit {self.limit:g}"


@dataclass(frozen=True)
class Entry:
    """One explained cluster of the list."""

    check: str
    count: int
    worst: float
    cause: str
    why: str
    where: Mapping[str, list[Any]]

    def holds(self, found: Found) -> npt.NDArray[np.bool_]:
        """Say which violations lie in the cluster."""
        inside = np.ones(len(found.ratio), bool)
        for name, allowed in self.where.items():
            values = found.ratio if name == "ratio" else found.at[name]
            if isinstance(allowed[0], str):
                inside &= np.isin(values.astype(str), allowed)
            else:
                least, most = allowed
                inside &= (values >= least) & (values <= most)
        return inside


def load_entries(path: Path = LEDGER) -> list[Entry]:
    listed = tomllib.loads(path.read_text("utf-8"))["violations"]
    return [Entry(**{"where": {}, **entry}) for entry in listed]


def flagged_outliers(operator: str, provenance: Mapping[str, Any]) -> list[Entry]:
    """Entries of the outliers that a source flags: keys, points, ratio, reason."""
    return [
        Entry(
            f"{operator}: near its neighbours",
            flag["points"],
            flag["ratio"],
            "outlier",
            flag["reason"],
            flag["keys"],
        )
        for flag in provenance["operators"][operator].get("outliers", [])
    ]


def settled(found: Found, entries: Iterable[Entry]) -> tuple[list[tuple[Entry, Array]], Array]:
    """Give each violation to the first entry that holds it.

    Returns
    -------
    list of (Entry, ndarray of int), ndarray of int
        Entries of this check with the rows that they explain, and the rows that none explains.
    """
    left = np.ones(len(found.ratio), bool)
    taken = []
    for entry in entries:
        if entry.check == found.check:
            mine = left & entry.holds(found)
            left &= ~mine
            taken.append((entry, np.flatnonzero(mine)))
    return taken, np.flatnonzero(left)


def complaints(found: Found, entries: Iterable[Entry]) -> list[str]:
    """Say where a check and the list disagree: what is new, worse, or no longer so."""
    taken, new = settled(found, entries)
    got = []
    if len(new):
        worst = new[np.argsort(found.ratio[new])[:5]]
        got.append(f"{len(new)} violations are in no entry: " + "; ".join(found.case(row) for row in worst))
    for entry, rows in taken:
        label = f"{entry.check} {dict(entry.where)}"
        if not len(rows):
            got.append(f"{label}: listed {entry.count}, but none occurs any more")
            continue
        worst_row = rows[np.argmin(found.ratio[rows])]
        if len(rows) != entry.count:
            got.append(f"{label}: listed {entry.count}, found {len(rows)}")
        if abs(found.ratio[worst_row] - entry.worst) > WORST_WITHIN:
            got.append(f"{label}: worst listed {entry.worst}, found {found.case(int(worst_row))}")
    return got
