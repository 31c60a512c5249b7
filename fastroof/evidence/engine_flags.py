"""The meaning of engine flags: a setting of a run, no effect, or an effect that is not modelled.

TensorRT-LLM's flags are those of tensorrt_llm/commands/serve.py at 00209af149e7774406881a37283dce303571eb11;
vLLM's and SGLang's are those in public recipes and tests of both, and families of flags of vLLM 0.33.0 and
SGLang 0.5.23. Names are compared with ``_`` instead of ``-``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

from fastroof.documents import parse_toml

SETTINGS: Final = (
    "gpu", "engine", "version", "model", "checkpoint", "dtype", "kv_dtype", "tp", "pp", "dp", "ep",
    "max_num_batched_tokens", "max_num_seqs", "chunked_prefill", "prefill_schedule_interval",
    "prefill_decode_interval", "min_free_slots_delay", "num_draft_tokens", "accepted", "draft",
)  # fmt: skip
"""Names that a user's file may use in addition to the engine's flags."""

FALSE: Final = ("false", "0", "no", "off")
"""Values that switch a flag off."""


class EngineFlags(NamedTuple):
    """The flags of an engine, by their effect; families are those that begin alike.

    A setting or switch that is also not modelled is represented in part. ``changing`` are the beginnings of
    those that are not modelled and change every step.
    """

    settings: Mapping[str, str]
    switches: Mapping[str, tuple[str, str]]
    silent: frozenset[str]
    not_modelled: frozenset[str]
    silent_families: frozenset[str] = frozenset()
    families_not_modelled: frozenset[str] = frozenset()
    changing: frozenset[str] = frozenset()

    def changes_steps(self, flag: str, value: str | None) -> bool:
        """Whether a flag changes steps in a way that is not modelled; sizes of 1 and zeros change nothing."""
        name = spelled(flag)
        least = ("1",) if name.endswith("size") or name in ("dcp", "pcp") else ()
        is_off = (value or "").lower() in (*FALSE, "0.0", "none", "null", *least)
        return name.startswith(tuple(self.changing)) and not is_off

    def knows(self, flag: str) -> bool:
        """Whether the engine has a flag."""
        return any(
            is_speculative(name)
            or name in self.settings
            or name in self.switches
            or self.is_silent(name)
            or self.is_not_modelled(name)
            for name in names_of(flag)
        )

    def is_silent(self, name: str) -> bool:
        """Whether a flag has no effect on steps."""
        return name in self.silent or name.startswith(tuple(self.silent_families))

    def is_not_modelled(self, name: str) -> bool:
        """Whether a flag may have an effect that is not modelled."""
        is_of_family = name.startswith(tuple(self.families_not_modelled)) and name not in self.silent
        return name in self.not_modelled or is_of_family


def spelled(flag: str) -> str:
    """Return a flag as in the tables: without leading dashes, ``_`` for ``-`` and ``.``, lower case."""
    return flag.lstrip("-").replace("-", "_").replace(".", "_").lower()


def names_of(flag: str) -> tuple[str, str]:
    """Return a flag's name, and what it is a part of if it is dotted: ``--compilation-config.mode``."""
    return spelled(flag), spelled(flag.partition(".")[0])


def is_speculative(name: str) -> bool:
    """Whether a flag, spelled as in the tables, turns speculative decoding on.

    They begin alike, except for vLLM's ``-sc`` and ``num_speculative_tokens``.
    """
    return name.startswith(("speculative", "spec_")) or name in ("sc", "num_speculative_tokens")


def _read() -> dict[str, EngineFlags]:
    text = (resources.files("fastroof.evidence") / "engine_flags.toml").read_text("utf-8")
    document = parse_toml(text, "engine_flags.toml")
    server = document.pop("server")
    return {engine: _engine_flags(server, **table) for engine, table in document.items()}


def _engine_flags(
    server: str, settings: dict[str, str], switches: dict[str, Any], **flags: str
) -> EngineFlags:
    sets = {effect: frozenset(names.split()) for effect, names in flags.items()}
    sets["silent"] |= frozenset(server.split())
    of_flag = {flag: setting for setting, names in settings.items() for flag in names.split()}
    return EngineFlags(of_flag, {flag: tuple(given) for flag, given in switches.items()}, **sets)


ENGINE_FLAGS: Final[Mapping[str, EngineFlags]] = _read()
"""The known flags of each engine; others are named in a warning."""
