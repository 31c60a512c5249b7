"""Measured acceptance lengths: ``accepted="auto"``.

``bench_data/acceptance.csv`` has one row per model, drafter, thinking mode and number of draft tokens. Every
number of draft tokens up to the largest was measured: nothing is interpolated, nothing is extrapolated.
"""

from __future__ import annotations

import csv
import difflib
import re
from functools import cache
from typing import Final, NamedTuple

from fastroof.acceptance import MTP
from fastroof.config.paths import bench_data_root
from fastroof.errors import BatchError
from fastroof.models import ModelSpec, load_model
from fastroof.models.draft_heads import DFLASH, DSPARK, EAGLE3, method_of

CURVES_FILE: Final = "acceptance.csv"
DATASET: Final = "SPEED-Bench coding"
MEASURED_BY: Final = "InferenceX"
ONE_LAYER: Final = ("MTP", "EAGLE-3")
"""Drafters that draft one token after another with one layer, as :func:`fastroof.serving.mtp_draft` does."""

_BY_METHOD: Final = {EAGLE3: ("EAGLE-3", "EAGLE-3 (GQA)"), DSPARK: ("DSpark",), DFLASH: ("DFlash",)}
"""Drafters by the method of a draft head."""

MOST_NAMED: Final = 5

_FORMAT: Final = re.compile(r"-(bf16|fp8|fp8_block|fp4|nvfp4|mxfp4|int4|int8|awq|gptq|w4a16)$")


class AcceptanceCurve(NamedTuple):
    """Mean tokens per request and step with 1, 2, ... draft tokens."""

    model: str
    drafter: str
    thinking: str
    lengths: tuple[float, ...]

    def source(self, draft: str | None) -> str:
        """Name what was measured, for an answer that uses it."""
        timed = "; timed as a layer of the model" if draft == MTP and self.drafter != "MTP" else ""
        return (
            f"{self.model} with {self.drafter}, {DATASET}, thinking {self.thinking}, by {MEASURED_BY}{timed}"
        )


def accepted_auto(model: str, num_draft_tokens: int, draft: object) -> tuple[float, str]:
    """Return the measured acceptance length of a model, and what it was measured on.

    The first curve of the file that fits the draft: thinking on before off, a model's usual drafter first.
    """
    curves = [curve for curve in acceptance_curves() if _base(curve.model) == _base(model)]
    if not curves:
        names = list(dict.fromkeys(curve.model for curve in acceptance_curves()))
        names.sort(key=lambda name: -difflib.SequenceMatcher(None, _base(model), _base(name)).ratio())
        raise BatchError(
            f"accepted='auto' needs a measured acceptance length, and {model} has none; give the mean tokens "
            f"per step, or use a model that has: {', '.join(names[:MOST_NAMED])}, ..."
        )
    drafters = " and ".join(dict.fromkeys(curve.drafter for curve in curves))
    timed = _BY_METHOD.get(_head_method(draft), ONE_LAYER)
    if draft is not None and draft != MTP and timed is ONE_LAYER:
        raise BatchError(
            f"accepted='auto' with a draft model: that of {model} was measured with {drafters}; give the "
            "mean tokens per step, or no draft model"
        )
    fitting = [curve for curve in curves if draft is None or curve.drafter in timed]
    if not fitting and draft != MTP:
        raise BatchError(
            f"accepted='auto' with a draft head of {' or '.join(timed)}: that of {model} was measured with "
            f"{drafters}; give the mean tokens per step"
        )
    if not fitting:
        raise BatchError(
            f"accepted='auto' with draft 'mtp': that of {model} was measured with {drafters}, which drafts "
            "all tokens at once; give the mean tokens per step, or no draft (drafts then take no time)"
        )
    curve = fitting[0]
    if num_draft_tokens > len(curve.lengths):
        raise BatchError(
            f"accepted='auto' of {model} was measured with 1 to {len(curve.lengths)} draft tokens, got "
            f"{num_draft_tokens}; give the mean tokens per step"
        )
    return curve.lengths[num_draft_tokens - 1], curve.source(MTP if draft == MTP else None)


def _head_method(draft: object) -> str:
    """Return the method of a draft head, which is a plan or a name; empty for another draft."""
    model = load_model(draft) if isinstance(draft, str) and draft != MTP else getattr(draft, "model", None)
    return method_of(model) if isinstance(model, ModelSpec) else ""


@cache
def acceptance_curves() -> tuple[AcceptanceCurve, ...]:
    """Return all measured curves, in the order of the file."""
    lengths: dict[tuple[str, str, str], list[float]] = {}
    with (bench_data_root() / CURVES_FILE).open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            lengths.setdefault((row["model"], row["drafter"], row["thinking"]), []).append(
                float(row["accepted"])
            )
    return tuple(AcceptanceCurve(*key, tuple(values)) for key, values in lengths.items())


def _base(model: str) -> str:
    """Return a model's name without its organisation and format, which do not change what is accepted."""
    name = model.rpartition("/")[2].casefold()
    return _FORMAT.sub("", name)
