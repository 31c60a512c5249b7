"""Published checkpoints of presets: what an engine downloads to serve one, in the format that is meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.models.hf import CONFIG_FILE
from fastroof.models.load import load_model
from fastroof.models.named import PRESETS, preset_named

__all__ = ["Published", "published_checkpoint"]

_FORMATS: Final = ("fp8", "nvfp4", "static", "mxfp4", "int4", "awq", "gptq")
"""What the names of presets end in where they are another format of a model."""


class Published(NamedTuple):
    """A checkpoint that an engine can be given."""

    name: str
    dtype: str
    kv_dtype: str
    is_given: bool


def published_checkpoint(given: str | Path, dtype: str) -> Published:
    """Return the checkpoint of a model to serve in a format."""
    model = load_model(given)
    own = Published(_name(given), *model.checkpoint.formats, True)
    preset = preset_named(str(given))
    if own.dtype == dtype or preset is None:
        return own
    for other in sorted(PRESETS):
        if _weights(other) == _weights(preset) and load_model(other).checkpoint.dtype == dtype:
            return Published(PRESETS[other][0], *load_model(other).checkpoint.formats, False)
    return own


def _weights(preset: str) -> str:
    """What presets of the same weights are called but for their formats; sizes alone may be another's."""
    return re.sub(rf"(-({'|'.join(_FORMATS)}))+$", "", preset)


def _name(given: str | Path) -> str:
    """What an engine is to be given for a model that was named so."""
    preset = preset_named(str(given))
    if preset is None:
        path = Path(given)
        return str(path.parent if path.name == CONFIG_FILE or path.suffix == ".json" else path)
    folded = str(given).casefold()
    ids = PRESETS[preset]
    return next((one for one in ids if folded in (one.casefold(), one.rpartition("/")[2].casefold())), ids[0])
