"""How far the rules of KV cache room are off, by engine and version: what logged starts of engines say.

``bench_data/kv_room_errors.csv`` has one row per engine and range of versions, of the logged starts that
chose no constant of a rule. ``python -m benchmarks.accuracy kv-room`` writes it.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.config.paths import bench_data_root
from fastroof.engines import serving_engines
from fastroof.engines.values import holds_for, includes_newest, is_version
from fastroof.models import Layout, ModelSpec

ROOM_ERRORS_FILE: Final = "kv_room_errors.csv"
MOST: Final = 0.9
"""Share of the starts that :attr:`RoomErrors.most_gib` covers."""


class RoomErrors(NamedTuple):
    """Errors of the KV cache room of one GPU in logged starts, GiB: the median size, and that of 9 in 10."""

    engine: str
    versions: str
    kind: str
    starts: int
    median_gib: float
    most_gib: float

    @property
    def words(self) -> str:
        """Return the errors as a sentence."""
        title = " ".join(filter(None, (self.engine, self.versions, self.kind and f"({self.kind})")))
        return (
            f"median {self.median_gib:.2g} GiB, 90th percentile {self.most_gib:.2g}, over {self.starts} "
            f"logged starts of {title}"
        )


STATES, SPARSE, NVFP4, OTHER = "states", "sparse", "nvfp4 mixtures", "others"
"""Kinds of models, whose errors are apart where enough starts were logged."""


def room_kind(model: ModelSpec, dtype: str) -> str:
    """Return the kind of a model."""
    if model.has_sparse_attention or model.has_compressed_attention:
        return SPARSE
    if any(kind.state_bytes(Layout()) for kind in model.kinds):
        return STATES
    return NVFP4 if model.has_experts and dtype == "nvfp4" else OTHER


def room_errors_of(engine: object, kind: str = "") -> RoomErrors | None:
    """Return the errors of an engine, given as plans take it; None if no logged start judges its rules.

    Those of a kind of model if there are any, else those of all models.

    Profiles and files that a user wrote are not judged, nor are versions without a number.
    """
    if not isinstance(engine, str):
        return None
    name, _, version = engine.partition("-")
    if name not in serving_engines() or (version and not is_version(version)):
        return None
    found = [
        one
        for one in recorded_errors()
        if one.engine == name
        and one.kind in ("", kind)
        and (holds_for(one.versions, version) if version else includes_newest(one.versions))
    ]
    return max(found, key=lambda one: bool(one.kind), default=None)


def errors_path() -> Path:
    """Return the path of the recorded file."""
    return bench_data_root() / ROOM_ERRORS_FILE


@cache
def recorded_errors() -> tuple[RoomErrors, ...]:
    """Return the recorded errors of all engines and ranges of versions."""
    with errors_path().open(encoding="utf-8", newline="") as lines:
        return tuple(
            RoomErrors(
                row["engine"],
                row["versions"],
                row["kind"],
                int(row["starts"]),
                float(row["median_gib"]),
                float(row["most_gib"]),
            )
            for row in csv.DictReader(lines)
        )
