"""What commands and Python functions assume where nothing is named, so that their answers agree."""

from __future__ import annotations

from typing import Any, Final

from fastroof.errors import FastroofError

DEFAULT_ENGINE: Final = "vllm"
"""Serving engine."""

DEFAULT_GPU: Final = "h100"

MEASURED: Final = "measured"
"""Value of ``tables``: the GPU's measured tables; the datasheet model if nothing was measured on it."""

DATASHEET: Final = "datasheet"
"""Value of ``tables``: the datasheet model."""


def chosen_engine(engine: Any, runtime: Any, error: type[FastroofError]) -> Any:
    """Return the engine that ``engine=``, or ``runtime=``, its former name, gives."""
    if runtime is None:
        return engine
    if not (engine is None or (isinstance(engine, str) and engine == DEFAULT_ENGINE)):
        raise error("runtime= is the former name of engine=; give engine= alone")
    return runtime
