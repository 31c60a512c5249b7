"""Serving engines: what each adds to its kernels, and the evidence for it, by range of versions."""

from __future__ import annotations

from fastroof.engines.profile import EngineProfile, engine_names, load_engine

__all__ = ["EngineProfile", "engine_names", "load_engine"]
