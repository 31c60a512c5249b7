"""What comes nearest to limits that no deployment keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.kinds import load_spec

__all__ = ["Nearest", "nearest_spec", "nearest_to_limits"]

MOST_ROWS: Final = 200_000
FEW_LOADS: Final = 8
_KEY_OF: Final = {"request_rate_per_s": "request_rate"}


class Nearest(NamedTuple):
    """The deployment that comes nearest to limits which none keeps, of the fewest clients."""

    row: dict[str, Any]
    exceeds: dict[str, float]


def nearest_spec(spec: DeploymentSpec, model: str, group: Mapping[str, Any]) -> DeploymentSpec | None:
    """Return the sweep whose rows are looked at: all of them, under few loads; None if they are too many."""
    changes: dict[str, Any] = {_KEY_OF.get(name, name): [value] for name, value in group.items()}
    changes |= {"models": [model], "keep": "all", "histogram": False, "per": ["model"]}
    load = "concurrency" if spec.request_rate is None else "request_rate"
    if load not in changes:
        changes[load] = _few(getattr(spec, load))
    narrowed = load_spec(spec, {**changes, "objective": spec.objective, "keep": "best"})
    assert isinstance(narrowed, DeploymentSpec)
    if narrowed.num_candidates > MOST_ROWS:
        return None
    narrowed = load_spec(spec, changes)
    assert isinstance(narrowed, DeploymentSpec)
    return narrowed


def _few(values: Sequence[float]) -> list[float]:
    """The least value, and those that are twice the one before."""
    few = [values[0]]
    for value in values:
        if value >= 2 * few[-1] and len(few) < FEW_LOADS:
            few.append(value)
    return few


def nearest_to_limits(
    spec: DeploymentSpec, rows_of: Callable[[DeploymentSpec], Sequence[dict[str, Any]]]
) -> Nearest | None:
    """Find the row whose worst excess over a limit is the least."""
    limits = {name: limit for name, limit in spec.constraints.model_dump().items() if limit is not None}

    def excess(row: Mapping[str, Any]) -> dict[str, float]:
        shares = {name: row[name] / limit for name, limit in limits.items() if row[name] is not None}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    found = [(excess(row), row) for row in rows_of(spec)]
    if not found:
        return None
    exceeds, row = min(found, key=lambda pair: max(pair[0].values(), default=0.0))
    return Nearest(row, exceeds)
