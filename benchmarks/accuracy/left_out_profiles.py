"""The profile that predicts each run: its engine's, or one that was fitted without what the run is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, cast

from benchmarks.accuracy.calibration import Calibration, calibrate
from benchmarks.accuracy.fit_errors import Split
from benchmarks.accuracy.predicted_runs import ProfileOf
from fastroof.engines import EngineProfile, load_engine
from fastroof.errors import FastroofError, TableError
from fastroof.serving.evidence.rows import ServingRow
from fastroof.tables import Tables

__all__ = ["SPLITS", "profiles_of", "profiles_without"]

SPLITS: Final = ("model", "gpu", "version")
"""What can be left out of the fits that predict it."""


def profiles_of(runtime: str | Path | EngineProfile) -> ProfileOf:
    """Return each run's own profile for ``auto``, else one for all.

    Raises
    ------
    FastroofError
        If the profile is unknown.
    """
    if runtime != "auto":
        one = load_engine(runtime)
        return lambda row: one
    return lambda row: row.engine_profile


def profiles_without(
    split: str, rows: Iterable[ServingRow], tables: Mapping[str, Tables], say: Callable[[str], None]
) -> ProfileOf:
    """Fit each engine's costs without each model, GPU or version.

    Parameters
    ----------
    split : str
        One of :data:`SPLITS`.
    rows : iterable of ServingRow
        What may be fitted; runs that are left out or known to be defective are not.
    tables : mapping of str to Tables
        Kernels by GPU.
    say : callable
        Called with words about what is being done.

    Returns
    -------
    callable
        The profile that has not seen a run's model, GPU or version; its engine's kernels alone where nothing
        else of the engine was measured, or nothing is ever fitted.

    Raises
    ------
    TableError
        If there is no such split.
    """
    if split not in SPLITS:
        raise TableError(f"what is left out is one of {', '.join(SPLITS)}, got {split!r}")
    known = [row for row in rows if not row.left_out]
    fitted: dict[str, Calibration] = {}
    for name in dict.fromkeys(row.engine_profile.name for row in known):
        if load_engine(name).fit is None:
            continue
        say(f"fitting {name} without each of its {split}s")
        try:
            fitted[name] = calibrate(known, tables, name, resamples=0, splits=(cast("Split", split),))
        except FastroofError as error:
            say(f"{name} is predicted by its kernels alone: {error}")

    def profile_of(row: ServingRow) -> EngineProfile:
        own = row.engine_profile
        of_engine = fitted.get(own.name)
        unseen = None if of_engine is None else of_engine.profile_without(row, cast("Split", split))
        return own.kernels_alone() if unseen is None else unseen

    return profile_of
