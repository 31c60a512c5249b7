"""Models known by name: presets, their Hugging Face ids, and the error for other names."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any, Final, NamedTuple

from fastroof.checks import MOST_SUGGESTED, suggestion
from fastroof.models.families.registry import REFUSALS
from fastroof.models.hf import read_config

DYNAMIC: Final = "-fp8-dynamic"
_FP8_DYNAMIC: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
"""The ``quantization_config`` of all of them: scales per output channel and token, routers in bf16."""


class KnownId(NamedTuple):
    """A Hugging Face id: its preset or unsupported family, its format, and a public file that names it."""

    preset: str
    hf_id: str
    dtype: str
    source: str


def _known_ids() -> tuple[KnownId, ...]:
    text = (resources.files("fastroof.models") / "ids.csv").read_text("utf-8")
    return tuple(KnownId(*row) for row in csv.reader(text.splitlines()[1:]))


_UNSUPPORTED: Final[Mapping[str, str]] = {
    **REFUSALS,
    "qwen3.8-flash-next": (
        "one layer of four attends to blocks of keys that an indexer picks (QSA), and n-grams are looked up "
        "(Engram): no operator times these"
    ),
}
"""Why the models of a family are not supported, by its name in ids.csv."""

KNOWN_IDS: Final = _known_ids()
"""All ids, in the order of ids.csv: by preset, the checkpoint of the preset's own name first."""

PRESETS: Final[Mapping[str, tuple[str, ...]]] = {
    preset: tuple(known.hf_id for known in KNOWN_IDS if known.preset == preset)
    for preset in dict.fromkeys(known.preset for known in KNOWN_IDS if known.preset not in _UNSUPPORTED)
}
"""Preset names and the Hugging Face models that have exactly these layers in the same formats.

Where base and instruct models differ in ``max_position_embeddings`` the preset uses the instruct model's.
"""

# parts of names of distilled models, which have another family's layers
_DISTILLED: Final = ("distill", "llama", "qwen3-8b")
_MOST_SUPPORTED: Final = 2
_HUB: Final = "https://huggingface.co"

HF_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A Hugging Face id: owner and name."""

# parts of a name that distinguish models of one family but not their layers
_SIZE: Final = re.compile(r"(\d+x)?\d+(\.\d+)?[bm]|a\d+(\.\d+)?b|\d+e")
_VARIANT: Final = re.compile(
    r"base|chat|hf|instruct|it|thinking|sft|rl|v\d+(\.\d+)?|\d{4}|awq|gptq|w?\d*a?\d*fp\d+|int\d|nvfp4|dynamic"
)


def model_names() -> list[str]:
    """Return the names of the packaged presets, sorted.

    Returns
    -------
    list of str
        Preset names.

    Examples
    --------
    >>> "llama-3.1-8b" in model_names()
    True
    """
    return sorted(PRESETS)


@cache
def _spellings() -> dict[str, str]:
    spellings = {name: name for name in PRESETS}
    for preset, ids in PRESETS.items():
        for hf_id in ids:
            spellings[hf_id.casefold()] = preset
            spellings[_own_name(hf_id)] = preset
    return spellings


def preset_named(name: str) -> str | None:
    """Return the preset with this name or Hugging Face id, case-insensitive; None if unknown."""
    return _spellings().get(name.casefold())


def preset_config(preset: str) -> dict[str, Any]:
    """Return the contents of a preset: a config.json with the fields that fastroof reads."""
    if preset.endswith(DYNAMIC):
        return {**preset_config(preset.removesuffix(DYNAMIC)), "quantization_config": _FP8_DYNAMIC}
    # The folder is package data; as_file also serves a package imported from a zip.
    with resources.as_file(resources.files("fastroof.models") / "presets" / f"{preset}.json") as path:
        config = dict(read_config(path))
    sizes = config.pop("preset", None)
    return config if sizes is None else {**preset_config(sizes), **config}


def _family(name: str) -> tuple[str, ...]:
    """Return the part of a name that its family shares: llama, 3.1 for ``org/Llama-3.1-9B-Instruct``."""
    parts = _own_name(name).split("-")
    return tuple(p for p in parts if p and not _SIZE.fullmatch(p) and not _VARIANT.fullmatch(p))


def _relatives(text: str) -> list[str]:
    """Return presets of the same family: equal in the first two parts, or in all parts of the family."""
    own, shared = _family(text), dict[str, int]()
    for name in PRESETS:
        family = _family(name)
        if not any(_VARIANT.fullmatch(part) for part in name.split("-")):
            common = sum(1 for _ in takewhile(bool, (a == b for a, b in zip(own, family, strict=False))))
            shared[name] = common if common >= min(2, len(family)) else 0
    most = max(shared.values())
    return sorted(name for name, common in shared.items() if common == most > 0)


def _is_distilled(name: str) -> bool:
    return any(word in name.rpartition("/")[2].casefold() for word in _DISTILLED)


def unsupported_id(name: str) -> str | None:
    """Return one line for an id that is known, but whose layers no operator times; None for other names."""
    for known in KNOWN_IDS:
        names = known.hf_id.casefold(), _own_name(known.hf_id)
        if known.preset in _UNSUPPORTED and name.casefold() in names:
            supported = " and ".join(_close(name)[:_MOST_SUPPORTED])
            return f"{known.hf_id} has no plan yet: {_UNSUPPORTED[known.preset]}; supported: {supported}"
    return None


def _own_name(hf_id: str) -> str:
    return hf_id.rpartition("/")[2].casefold()


def _close(text: str) -> list[str]:
    """Return presets with similar names, the closest first within a family."""
    relatives = _relatives(text)
    if _is_distilled(text):
        relatives = [name for name in relatives if _is_distilled(name)]
    spelled = difflib.get_close_matches(text.casefold(), _spellings(), n=MOST_SUGGESTED)
    start = f"{_own_name(text)}-"
    longer = [name for name in PRESETS if name.startswith(start)]
    return sorted(
        dict.fromkeys([*longer, *relatives, *(_spellings()[name] for name in spelled)]),
        key=lambda name: (
            name not in longer,
            name not in relatives,
            -difflib.SequenceMatcher(None, _own_name(text), name).ratio(),
        ),
    )


def unknown_name(text: str) -> str:
    """Return one line for a name that is neither a file nor a preset."""
    line = suggestion("model", text, _close(text), model_names(), "fastroof models")
    if HF_ID.fullmatch(text):
        name = text.rpartition("/")[2]
        url = f"{_HUB}/{text}/resolve/main/config.json"
        return f"{line}, or save {url} as {name}/config.json and give {name} (--model {name})"
    return f"{line}, or give the path of a config.json"
