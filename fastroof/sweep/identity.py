"""What tells two sweeps apart: version, tables, spec, and what the names in the spec stand for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from fastroof.config import load_gpu
from fastroof.engines import load_engine
from fastroof.models import load_model
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.spec import SweepSpec

__all__ = ["IDENTITY_KEYS", "differences", "inputs_hash"]

IDENTITY_KEYS: Final = (
    "fastroof.version",
    "fastroof.kind",
    "fastroof.spec",
    "fastroof.tables_hash",
    "fastroof.inputs_hash",
)
"""Metadata that are the same for all pieces of one sweep."""

_MEANT: Final = {
    "fastroof.version": "fastroof's version",
    "fastroof.kind": "kind of sweep",
    "fastroof.tables_hash": "the tables' hash",
    "fastroof.inputs_hash": "hash of the models, GPUs and runtimes",
}
_SHOWN: Final = 60


def inputs_hash(spec: SweepSpec | DeploymentSpec) -> str:
    """Hash what the models, GPUs and runtimes of a spec are, which may be files that change."""
    gpus, runtimes = (
        ((spec.gpu,), (spec.runtime,)) if isinstance(spec, SweepSpec) else (spec.gpus, spec.runtime)
    )
    meant = [
        *map(load_model, spec.models),
        *map(load_gpu, gpus),
        *map(load_engine, runtimes),
    ]
    return hashlib.sha256("\n".join(map(repr, meant)).encode()).hexdigest()


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Say what differs between the identities of two sweeps; nothing where they are the same sweep."""
    found = []
    for key in IDENTITY_KEYS:
        if there.get(key) == here.get(key):
            continue
        if key == "fastroof.spec":
            found += _spec_differences(there.get(key), here.get(key))
        else:
            found.append(f"{_MEANT[key]}: {_short(there.get(key))} there, {_short(here.get(key))} here")
    return found


def _spec_differences(there: str | None, here: str | None) -> list[str]:
    old, new = json.loads(there or "{}"), json.loads(here or "{}")
    return [
        f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} here"
        for key in {**new, **old}
        if old.get(key) != new.get(key)
    ]


def _short(value: Any) -> str:
    said = "none" if value is None else str(value)
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
