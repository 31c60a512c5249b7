"""Metadata of a results file that identifies its sweep: specification, tables, version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from fastroof._version import __version__
from fastroof.config import load_gpu
from fastroof.documents import parse_json
from fastroof.engines import load_engine
from fastroof.errors import SweepError
from fastroof.models import load_model
from fastroof.sweep.kind import GpuTables, SweepKind

IDENTITY_KEYS: Final = (
    "fastroof.version",
    "fastroof.kind",
    "fastroof.spec",
    "fastroof.tables_hash",
    "fastroof.sources_hash",
    "fastroof.inputs_hash",
)
"""Metadata keys that are equal in all pieces of one sweep."""

_MEANINGS: Final = {
    "fastroof.version": "fastroof's version",
    "fastroof.kind": "kind of sweep",
    "fastroof.tables_hash": "the tables' hash",
    "fastroof.sources_hash": "hash of all sources of tables",
    "fastroof.inputs_hash": "hash of the models, GPUs, engines and requests",
}
_SHOWN: Final = 60


def file_metadata(sweep: SweepKind, tables_by_gpu: Mapping[str, GpuTables]) -> dict[str, str]:
    """Return the metadata of a results file: version, spec, and hashes of all inputs."""
    tables = [each.tables for each in tables_by_gpu.values()]
    return {
        "fastroof.version": __version__,
        "fastroof.tables_hash": " ".join("" if each is None else each.content_hash for each in tables),
        # also of the sources that only some kernels or engines use
        "fastroof.sources_hash": " ".join("" if each is None else each.sources_hash for each in tables),
        "fastroof.inputs_hash": inputs_hash(sweep),
        "fastroof.gpu": " ".join(load_gpu(gpu).name for gpu in tables_by_gpu),
        "fastroof.kind": sweep.name,
        "fastroof.spec": sweep.spec.model_dump_json(),
    }


def inputs_hash(sweep: SweepKind) -> str:
    """Hash the models, GPUs, engines and requests of a spec, which may be files that change."""
    meant = [
        *map(load_model, sweep.spec.all_models),
        *map(load_gpu, sweep.spec.all_gpus),
        *map(load_engine, sweep.spec.all_engines),
    ]
    return hashlib.sha256("\n".join([*map(repr, meant), *sweep.spec.other_inputs]).encode()).hexdigest()


def differences(stored: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Describe the differences between the identities of two sweeps; empty for the same sweep."""
    differing = []
    for key in IDENTITY_KEYS:
        if stored.get(key) == here.get(key):
            continue
        if key == "fastroof.spec":
            differing += _spec_differences(stored.get(key), here.get(key))
        else:
            differing.append(
                f"{_MEANINGS[key]}: {_short(stored.get(key))} there, {_short(here.get(key))} here"
            )
    return differing


def _spec_differences(stored: Any, here: Any) -> list[str]:
    old, new = _spec_of(stored), _spec_of(here)
    if old is None or new is None:
        return [f"spec: {_short(stored)} there, {_short(here)} here"]
    return [
        f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} here"
        for key in {**new, **old}
        if old.get(key) != new.get(key)
    ]


def _spec_of(text: Any) -> dict[str, Any] | None:
    """Parse a spec stored in a file; None if it is invalid, for example after editing."""
    if not isinstance(text, str):
        return None
    try:
        spec = parse_json(text, "the spec of a sweep", SweepError)
    except SweepError:
        return None
    return spec if isinstance(spec, dict) else None


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
