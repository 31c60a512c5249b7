"""Defaults shared by the command line and Python, so that their answers agree."""

from __future__ import annotations

from typing import Any, Final

from fastroof.errors import FastroofError

DEFAULT_ENGINE: Final = "vllm"
"""Serving engine if none is given."""

DEFAULT_GPU: Final = "h100"

MEASURED: Final = "measured"
"""Value of ``tables``: the GPU's measured tables, or the datasheet model if it has none."""

DATASHEET: Final = "datasheet"
"""Value of ``tables``: the datasheet model."""

FORMER_KEYS: Final = {
    "runtime": "engine",
    "max_batched_tokens": "max_num_batched_tokens",
    "max_seqs": "max_num_seqs",
}
"""Former names of keys and columns, which are accepted too."""


def chosen_engine(engine: Any, runtime: Any, error: type[FastroofError]) -> Any:
    """Return the engine that ``engine=``, or ``runtime=``, its former name, gives."""
    if runtime is None:
        return engine
    if not (engine is None or (isinstance(engine, str) and engine == DEFAULT_ENGINE)):
        raise error("runtime= is the former name of engine=; give only engine=")
    return runtime
