"""Tiers of KV cache below the GPU's: what users ask for, and what the loops and the results need of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Ints, Longs
from fastroof.checks import is_number, one_of, shown, true_or_false, unknown_word
from fastroof.compiled.simulation import records
from fastroof.compiled.simulation.records import Fleet
from fastroof.documents import parse_toml
from fastroof.errors import SimulationError
from fastroof.traces.prompt_tree import GIVEN
from fastroof.units import GB, GIB, US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.settings import EngineSettings

WRITES: Final = {"write_through": records.WRITE_THROUGH, "write_back": records.WRITE_BACK}
FETCHES: Final = {
    "wait": records.WAITED_FOR,
    "before_step": records.BEFORE_STEP,
    "by_layer": records.BY_LAYER,
}

MOST_TIERS: Final = 4
"""Maximum number of tiers."""

_MOST_BLOCKS: Final = 2**40
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class KvTier:
    """A tier of KV cache below the GPU's, of one engine, all of its GPUs together.

    Attributes
    ----------
    name : str
        Name in the results: lower-case letters, digits and underscores.
    capacity_bytes : float
        How much it holds; inf for no limit.
    bytes_per_s : float
        Bandwidth of fetches; inf for none of their time.
    latency_us : float
        Time from a fetch's start to its first byte, us.
    writes : {"write_through", "write_back"}
        A tier that is written through gets a copy of all blocks; one that is written back to gets those that
        the tier above it, or the GPU, has no room for.
    fetch : {"wait", "before_step", "by_layer"}
        A request waits for its blocks while others go on; or the step that it starts in begins when they are
        there; or that step computes each layer when the layer's part is there.
    stores_answers : bool
        Whether blocks of answers are stored, too; always if it is written back to.

    Raises
    ------
    SimulationError
        If an attribute is invalid.

    Examples
    --------
    >>> KvTier("host", 200e9, 54e9, fetch="by_layer").writes
    'write_through'
    """

    name: str
    capacity_bytes: float
    bytes_per_s: float
    latency_us: float = 0.0
    writes: str = "write_through"
    fetch: str = "wait"
    stores_answers: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise SimulationError(
                "name of a KV tier must be lower-case letters, digits and underscores, "
                f"got {shown(self.name)}"
            )
        for name, least, most in (
            ("capacity_bytes", 0.0, 1e30),
            ("bytes_per_s", 1.0, 1e30),
            ("latency_us", 0.0, 1e9),
        ):
            value: Any = getattr(self, name)
            is_inf = isinstance(value, float) and value == math.inf and name != "latency_us"
            if not is_inf and (not is_number(value) or not least <= float(value) <= most):
                raise SimulationError(
                    f"{name} of KV tier {self.name} must be a number from {least:g} to {most:g}, "
                    f"got {shown(value)}"
                )
            object.__setattr__(self, name, float(value))
        one_of("writes", self.writes, tuple(WRITES), SimulationError)
        one_of("fetch", self.fetch, tuple(FETCHES), SimulationError)
        true_or_false("stores_answers", self.stores_answers, SimulationError)
        if self.writes == "write_back" and not self.stores_answers:
            raise SimulationError(
                f"KV tier {self.name} is written back to, so it stores answers, too: leave stores_answers on"
            )


@cache
def named_tiers() -> dict[str, dict[str, Any]]:
    """Return the packaged tiers by name."""
    text = (resources.files("fastroof.simulation") / "kv_tiers.toml").read_text("utf-8")
    return parse_toml(text, "kv_tiers.toml", SimulationError)


def tiers_of(given: Any, plan: StepPlan, settings: EngineSettings) -> tuple[KvTier, ...]:
    """Return tiers that are given as text, or one by one, for an engine.

    The text has tiers with commas between, each ``NAME[:SIZE][:BANDWIDTH][:LATENCY][:WORD]...``: the name
    of a packaged tier, or another with at least a size and a bandwidth.
    """
    if given is None:
        return ()
    parts: Any = given.split(",") if isinstance(given, str) else given
    if isinstance(parts, KvTier):
        parts = (parts,)
    if not isinstance(parts, list | tuple):
        raise SimulationError(f"kv_tiers must be text or a list of KvTier, got {shown(given)}")
    tiers = tuple(one if isinstance(one, KvTier) else _parsed(one, plan, settings) for one in parts)
    if len(tiers) > MOST_TIERS:
        raise SimulationError(f"kv_tiers has {len(tiers)} tiers; there are at most {MOST_TIERS}")
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise SimulationError(f"kv_tiers must have different names, got {', '.join(names)}")
    policies = [tier.writes for tier in tiers]
    if policies != sorted(policies):
        raise SimulationError(
            "KV tiers that are written back to must come before those that are written through, got "
            f"{', '.join(f'{tier.name} ({tier.writes})' for tier in tiers)}"
        )
    if tiers and not plan.memory.kv_bytes_per_token:
        raise SimulationError(f"KV tiers need a KV cache, and no layer of {plan.model.name} has one")
    return tiers


def _parsed(text: Any, plan: StepPlan, settings: EngineSettings) -> KvTier:
    """Return one tier from its text."""
    if not isinstance(text, str) or not text.strip():
        known = f"a name ({', '.join(named_tiers())})"
        raise SimulationError(
            f"a KV tier must be {known}, text like host:200GB:50GB/s or a KvTier, got {shown(text)}"
        )
    name, *words = (word.strip() for word in text.split(":"))
    shipped = named_tiers().get(name)
    values: dict[str, Any] = {"name": name}
    if shipped is not None:
        gpus = plan.layout.world_size
        values = {field.name: shipped[field.name] for field in fields(KvTier) if field.name in shipped}
        if "gib_per_gpu" in shipped:
            values["capacity_bytes"] = shipped["gib_per_gpu"] * GIB * gpus
        if "cache_ratio" in shipped:
            cache_blocks = settings.num_gpu_blocks * plan.layout.dp
            values["capacity_bytes"] = shipped["cache_ratio"] * cache_blocks * block_bytes(plan, settings)
        if "gb_per_s_per_gpu" in shipped:
            values["bytes_per_s"] = shipped["gb_per_s_per_gpu"] * GB * gpus
        if "gb_per_s" in shipped:
            values["bytes_per_s"] = shipped["gb_per_s"] * GB
    for word in words:
        values |= _meaning(text, word)
    lacks = [
        f"{words} ({example})"
        for key, words, example in (
            ("capacity_bytes", "a size", "200GB"),
            ("bytes_per_s", "a bandwidth", "50GB/s"),
        )
        if key not in values
    ]
    if lacks and shipped is None and len(words) == 0:
        raise SimulationError(
            unknown_word("KV tier", name, named_tiers())
            + ", or give it a size and bandwidth: host:200GB:50GB/s"
        )
    if lacks:
        raise SimulationError(f"KV tier {shown(text)} needs {' and '.join(lacks)}, with colons between")
    return KvTier(**values)


_UNITS: Final = {"": 1.0} | {
    f"{prefix}{binary}": base**power
    for binary, base in (("", 1e3), ("i", 2.0**10))
    for power, prefix in enumerate("KMGT", 1)
}
_AMOUNT: Final = re.compile(r"(inf|[0-9]{1,20}(?:\.[0-9]{0,20})?) ?(?:([KMGT]i?)?B)?(/s)?")
_TIME: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?) ?(us|ms)")


def _meaning(text: str, word: str) -> dict[str, Any]:
    """Return the attribute that one word of a tier's text sets."""
    if word in WRITES:
        return {"writes": word, **({"stores_answers": True} if word == "write_back" else {})}
    if word in FETCHES:
        return {"fetch": word}
    if word in ("prompts", "answers"):
        return {"stores_answers": word == "answers"}
    if found := _TIME.fullmatch(word):
        return {"latency_us": float(found[1]) * (US_PER_MS if found[2] == "ms" else 1.0)}
    found = _AMOUNT.fullmatch(word)
    if found and (word.endswith(("B", "B/s")) or found[1] == "inf"):
        amount = float(found[1]) * _UNITS[found[2] or ""]
        return {"bytes_per_s" if found[3] else "capacity_bytes": amount}
    raise SimulationError(
        f"{shown(word)} in KV tier {shown(text)} is not a size (200GB, inf), bandwidth (50GB/s, inf/s), "
        f"latency (20us), {', '.join((*WRITES, *FETCHES))}, prompts or answers"
    )


def block_bytes(plan: StepPlan, settings: EngineSettings) -> int:
    """Return the bytes of a block on all GPUs of one scheduler, with copies of what they do not share out."""
    ranks = plan.layout.world_size // plan.layout.dp
    return int(plan.memory.kv_bytes_per_token) * ranks * settings.block_size


class Tiers(NamedTuple):
    """Tiers of the schedulers of an engine, each of which has an equal part."""

    tiers: tuple[KvTier, ...] = ()
    rows: Floats = np.zeros(0)
    block_bytes: int = 0

    @classmethod
    def of_plan(cls, given: Any, plan: StepPlan, settings: EngineSettings) -> Tiers:
        """Return given tiers as the loops read them."""
        tiers = tiers_of(given, plan, settings)
        size, ranks = block_bytes(plan, settings), plan.layout.dp
        rows = [
            (
                min(tier.capacity_bytes / ranks / size, _MOST_BLOCKS) // 1,
                size / (tier.bytes_per_s / ranks) * US_PER_S,
                tier.latency_us,
                WRITES[tier.writes],
                FETCHES[tier.fetch],
                0.0 if tier.stores_answers else 1.0,
                plan.model.num_layers,
            )
            for tier in tiers
        ]
        return cls(tiers, np.array(rows, np.float64).reshape(-1), size)


NO_TIERS: Final = Tiers()


def tiers_below(given: Any, plan: StepPlan, settings: EngineSettings, prefix_cache: str) -> Tiers:
    """Return given tiers of engines whose prefix cache is simulated, or refuse them."""
    tiers = Tiers.of_plan(given, plan, settings)
    if tiers.tiers and prefix_cache == GIVEN:
        raise SimulationError('kv_tiers needs a simulated prefix cache: give prefix_cache="lru"')
    return tiers


class TierUse(NamedTuple):
    """What a run's tiers did, an element each: of all engines together.

    ``tokens[request, tier]`` are those found when it was first admitted. ``peak_blocks`` are the sum of each
    engine's own. Each of ``replicas`` has tiers of its own.
    """

    tiers: tuple[KvTier, ...]
    block_bytes: int
    tokens: Ints
    found_tokens: Longs
    fetched_blocks: Longs
    written_blocks: Longs
    evicted_blocks: Longs
    peak_blocks: Longs
    wait_us: float
    step_wait_us: float
    replicas: int


def use_of(tiers: Tiers, fleet: Fleet, replicas: int) -> TierUse | None:
    """Return what the tiers of a fleet's first pool did; None without tiers."""
    if not tiers.tiers:
        return None
    stores, ranks = fleet.stores.reshape(-1, len(tiers.tiers)), fleet.ranks
    return TierUse(
        tiers.tiers,
        tiers.block_bytes,
        tokens=fleet.tier_tokens,
        found_tokens=stores["found_there"].sum(0),
        fetched_blocks=stores["fetched"].sum(0),
        written_blocks=stores["written"].sum(0),
        evicted_blocks=stores["lost"].sum(0),
        peak_blocks=stores["most_resident"].sum(0),
        wait_us=float(ranks["wait_us"].sum()),
        step_wait_us=float(ranks["step_wait_us"].sum()),
        replicas=replicas,
    )


def tier_answers(use: TierUse | None, counters: dict[str, Any]) -> dict[str, Any]:
    """Return the results of tiers by the names of :meth:`fastroof.simulation.Simulation.summary`."""
    if use is None:
        return {}
    looked_up = counters["looked_up_tokens"]

    def share(tokens: int) -> float:
        return tokens / looked_up if looked_up else math.nan

    rows = [
        {
            "name": tier.name,
            "hit_rate": share(int(use.found_tokens[i])),
            "found_tokens": int(use.found_tokens[i]),
            "fetched_bytes": int(use.fetched_blocks[i]) * use.block_bytes,
            "written_bytes": int(use.written_blocks[i]) * use.block_bytes,
            "evicted_bytes": int(use.evicted_blocks[i]) * use.block_bytes,
            "peak_bytes": int(use.peak_blocks[i]) * use.block_bytes,
        }
        for i, tier in enumerate(use.tiers)
    ]
    in_gpu = counters["found_tokens"] - int(use.found_tokens.sum())
    return {
        "kv_tiers": {
            "gpu_hit_rate": share(in_gpu),
            "tiers": rows,
            "request_wait_s": use.wait_us / US_PER_S,
            "step_wait_s": use.step_wait_us / US_PER_S,
        }
    }


def tier_notes(use: TierUse | None, duration_s: float) -> list[str]:
    """Return warnings about tiers that get more than their links can carry, which is not simulated."""
    notes: list[str] = []
    if use is None or duration_s <= 0.0:
        return notes
    for i, tier in enumerate(use.tiers):
        rate = int(use.written_blocks[i]) * use.block_bytes / duration_s
        carried = tier.bytes_per_s * use.replicas
        if rate > carried:
            notes.append(
                f"KV tier {tier.name} gets {rate / GB:,.3g} GB/s to store, more than the "
                f"{carried / GB:,.3g} of its link: it would hold less than simulated"
            )
    return notes


def added_use(uses: Sequence[TierUse], tokens: Ints) -> TierUse:
    """Add the uses of replicas that ran by themselves; ``tokens`` are of all of their requests."""
    names = TierUse._fields[TierUse._fields.index("found_tokens") :]
    return uses[0]._replace(
        tokens=tokens, **{name: sum(getattr(one, name) for one in uses) for name in names}
    )
