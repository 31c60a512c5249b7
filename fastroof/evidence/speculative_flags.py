"""An engine's flags of speculative decoding -> draft tokens per step, and what drafts them.

vLLM's are ``--speculative-config`` (JSON, or one flag per key), ``--spec-method``, ``--spec-model`` and
``--spec-tokens``; SGLang's ``--speculative-algorithm`` and its sizes; TensorRT-LLM's the table
``speculative_config`` of its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fastroof.acceptance import MOST_DRAFT_TOKENS, MTP
from fastroof.checks import is_whole_number
from fastroof.documents import parse_json
from fastroof.errors import TableError
from fastroof.evidence.engine_flags import is_speculative, names_of, spelled
from fastroof.models.load import draft_to_serve

NO_DRAFT: Final = "none"
"""Drafter that takes no time, such as n-grams."""

SYNTHETIC: Final = "synthetic_acceptance_length"
"""vLLM's mean tokens per step, the target's own included, of drafts that it accepts unseen."""

Pairs = Sequence[tuple[str, str | None]]

_OFF: Final = ("null", "none", "false")
_WHOLE: Final = ("config", "sc")
_PREFIXES: Final = ("speculative_config_", "speculative_", "spec_", "sc_")
_ONE_LAYER: Final = ("mtp", "nextn", "eagle")
_FREE: Final = ("ngram", "suffix")
_KNOWN: Final = (
    "method", "algorithm", "decoding_type", "model", "draft_model_path", "model_dir", "num_steps",
    "eagle_topk", "num_draft_tokens", "num_speculative_tokens", "tokens", "num_nextn_predict_layers",
    "max_draft_len", "draft_tensor_parallel_size", "adaptive", "rejection_sample_method",
    SYNTHETIC,
)  # fmt: skip
_MODELS: Final = ("draft_model", "drafttarget", "draft_target", "standalone")


class DraftFlags(NamedTuple):
    """Draft tokens per request and step, and their drafter: ``mtp``, ``none`` or a model on ``tp`` GPUs.

    A ``tp`` of 0 is the target's, as engines have it by default.
    """

    num_draft_tokens: int
    draft: str
    tp: int = 0
    notes: tuple[str, ...] = ()


def split_drafts(where: str, pairs: Pairs) -> tuple[list[tuple[str, str | None]], dict[str, str]]:
    """Split flags into those of speculative decoding, by their names without a prefix, and all others."""
    others: list[tuple[str, str | None]] = []
    found: dict[str, str] = {}
    for flag, value in pairs:
        if not any(map(is_speculative, names_of(flag))):
            others.append((flag, value))
            continue
        if value is not None and value.lower() in _OFF:
            continue
        name = _short(spelled(flag))
        # a flag without a value turns drafts on too
        found[name] = "" if value is None else value
        if name not in _WHOLE or value is None:
            continue
        content = parse_json(value, f"{where}: speculative decoding: {flag}", TableError)
        if not isinstance(content, Mapping):
            raise TableError(
                f"{where}: speculative decoding: {flag} must be a JSON object, got {value[:60]!r}"
            )
        found |= {_short(spelled(str(key))): str(one) for key, one in content.items() if one is not None}
    return others, found


def _short(name: str) -> str:
    """Return a flag's name without the words that all of them begin with."""
    prefix = next((one for one in _PREFIXES if name.startswith(one) and name != one), "")
    return _short(name.removeprefix(prefix)) if prefix else name


def draft_flags(where: str, engine: str, found: Mapping[str, str], draft: str = "") -> DraftFlags | None:
    """Return the drafts that flags turn on; ``draft`` names what times them instead of the flags."""
    if not found:
        return None
    method = found.get("method", found.get("algorithm", found.get("decoding_type", ""))).lower()
    model = found.get("model", found.get("draft_model_path", found.get("model_dir", "")))
    if found.get("adaptive", "false").lower() != "false":
        raise TableError(
            f"{where}: speculative decoding: a number of draft tokens that adapts is not modelled"
        )
    tokens = _tokens(where, engine, found)
    drafter, note = (draft, "") if draft else _drafter(where, method, model)
    tp = 0
    if draft:
        drafter, tp = parse_draft(draft)
    elif "draft_tensor_parallel_size" in found:
        tp = _whole(where, "draft_tensor_parallel_size", found["draft_tensor_parallel_size"])
    unknown = [name for name in found if name not in (*_KNOWN, *_WHOLE)]
    unread = f"{where}: flags of drafts that are not modelled: {', '.join(unknown)}" if unknown else ""
    return DraftFlags(tokens, drafter, tp, tuple(one for one in (note, unread) if one))


def parse_draft(text: str) -> tuple[str, int]:
    """Read a draft as options name it: ``mtp``, ``none``, or a model, which ``MODEL,tp=2`` runs on 2 GPUs."""
    name, *pairs = text.split(",")
    tp = 0
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key.strip() != "tp":
            raise TableError(
                f"draft {text[:60]!r}: the draft of a run takes tp=, as MODEL,tp=2; got {pair[:40]!r}"
            )
        tp = _whole("the options", "tp of the draft", value.strip())
    return name, tp


def _tokens(where: str, engine: str, found: Mapping[str, str]) -> int:
    if engine == "sglang":
        if (topk := found.get("eagle_topk", "1")) != "1":
            raise TableError(
                f"{where}: speculative decoding: --speculative-eagle-topk is {topk[:20]!r}, and trees of "
                "drafts are not modelled; use 1"
            )
        if "num_draft_tokens" in found:
            # the token that a step verifies without a draft is counted
            return _whole(where, "speculative-num-draft-tokens", found["num_draft_tokens"], least=2) - 1
        if "num_steps" in found:
            return _whole(where, "speculative-num-steps", found["num_steps"])
    names = ("num_speculative_tokens", "tokens", "num_nextn_predict_layers", "max_draft_len")
    name = next((one for one in names if one in found), None)
    if name is None:
        raise TableError(
            f"{where}: speculative decoding: the number of draft tokens is missing; add it to these arguments"
        )
    return _whole(where, name, found[name])


def _drafter(where: str, method: str, model: str) -> tuple[str, str]:
    """Return what drafts, and a note if it is timed as something else."""
    drafter = method or model.rpartition("/")[2].lower()
    if model and draft_to_serve(model)[1]:
        return model, ""
    layer = next((one for one in _ONE_LAYER if one in drafter), None)
    if layer is not None:
        note = f"{where}: its EAGLE drafter is timed as one layer of the model and its LM head"
        return MTP, note if layer == "eagle" else ""
    if any(one in drafter for one in _FREE):
        return NO_DRAFT, ""
    if model and (not method or any(one in method for one in _MODELS)):
        return model, ""
    raise TableError(
        f"{where}: speculative decoding: drafts by {drafter[:40] or 'an unknown method'} are not modelled; "
        "give --draft mtp (one layer of the model), none, or a draft model"
    )


def _whole(where: str, name: str, text: str, least: int = 1) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not is_whole_number(value, least, MOST_DRAFT_TOKENS):
        raise TableError(
            f"{where}: speculative decoding: {name} must be a whole number from {least} to "
            f"{MOST_DRAFT_TOKENS:,}, got {text[:40]!r}"
        )
    return value
