"""What the page starts with, as a command line names it: models and GPUs by name, or files of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fastroof.config import gpu_names, load_gpu
from fastroof.models import load_model, model_names
from fastroof.ui.view import View

__all__ = ["NamedStart", "named_start"]


class NamedStart(NamedTuple):
    """A first view, and what the page lists for it beside what is known by name."""

    view: View
    models: dict[str, str]
    gpus: dict[str, str]


def named_start(model: str | None = None, gpu: str | None = None) -> NamedStart:
    """Return what the page starts with."""
    models: dict[str, str] = {}
    gpus: dict[str, str] = {}
    chosen: dict[str, Any] = {} if model is None else {"tp": 1}
    if model is not None:
        spec = load_model(model)
        chosen["model"] = spec.name
        if spec.name not in model_names() or load_model(spec.name) != spec:
            chosen["model"] = _free(spec.name, model_names())
            models[chosen["model"]] = str(Path(model))
    if gpu is not None:
        card = load_gpu(gpu)
        chosen["gpu"] = card.name
        if card.name not in gpu_names() or load_gpu(card.name) != card:
            chosen["gpu"] = _free(card.name, gpu_names())
            gpus[chosen["gpu"]] = str(Path(gpu))
    return NamedStart(View(**chosen), models, gpus)


def _free(name: str, taken: tuple[str, ...] | list[str]) -> str:
    return f"{name} (own)" if name in taken else name
