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
    """A checkpoint that an engine can be given.

    Attributes
    ----------
    name : str
        Hugging Face id, or the folder of a model of one's own.
    dtype, kv_dtype : str
        Formats of its weights and of the KV cache it asks for.
    is_given : bool
        Whether it is the one that was named, rather than another of the same model in the wanted format.
    """

    name: str
    dtype: str
    kv_dtype: str
    is_given: bool


def published_checkpoint(given: str | Path, dtype: str) -> Published:
    """Return the checkpoint of a model to serve in a format.

    Parameters
    ----------
    given : str or Path
        A preset, a Hugging Face id of one, or the path of a config.json or of its folder.
    dtype : str
        Format of its linear layers that is meant.

    Returns
    -------
    Published
        The one that was named, by its own spelling of its id, where it has the format or none of the same
        model does; else the first published one that does. A preset without an id is its first.

    Raises
    ------
    ModelError
        If there is no such model.

    Examples
    --------
    >>> published_checkpoint("qwen/qwen3-32b", "bf16").name
    'Qwen/Qwen3-32B'
    >>> published_checkpoint("qwen3-32b", "fp8_block")
    Published(name='Qwen/Qwen3-32B-FP8', dtype='fp8_block', kv_dtype='bf16', is_given=False)
    """
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
