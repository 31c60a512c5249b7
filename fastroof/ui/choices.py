"""What the page's controls offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastroof._version import __version__
from fastroof.columns import ORIGINS
from fastroof.engines import engine_names
from fastroof.load.by_name import can_import, table_folders
from fastroof.models.execution import AUTO, DTYPES, KV_DTYPES
from fastroof.report.leading_steps import GROUPS
from fastroof.ui.view import KINDS, PERCENTILES, SIZES

if TYPE_CHECKING:
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View

__all__ = ["choices"]


def choices(store: PlanStore, start: View) -> dict[str, Any]:
    """Return what can be chosen, and what the page starts with."""
    return {
        "version": __version__,
        "models": list(store.models),
        "gpus": [_gpu(store, name) for name in store.gpus],
        "choices": {
            "dtype": [AUTO, *DTYPES],
            "kv_dtype": [AUTO, *KV_DTYPES],
            "runtime": list(engine_names()),
            "kind": list(KINDS),
            "percentile": list(PERCENTILES),
        },
        "sizes": SIZES,
        "start": start.document(),
        "groups": list(GROUPS),
        "origins": list(ORIGINS),
    }


def _gpu(store: PlanStore, name: str) -> dict[str, str]:
    written = store.gpus[name]
    known = "measured"
    if written == name and not table_folders(name):
        known = "importable" if can_import(name) else "datasheet"
    return {"name": name, "title": store.gpu(name).title, "known": known}
