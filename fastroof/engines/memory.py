"""How an engine uses memory: what it leaves for KV cache, and what requests reserve of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, shown, whole_number
from fastroof.engines.values import check_bool, check_names, check_number, check_one_of, check_text
from fastroof.errors import PlanError
from fastroof.units import GB, GIB, MIB

KV_RESERVATIONS: Final[dict[str, float]] = {"mean": 0.5, "full": 1.0}
"""Mean share of its output for which a request holds KV cache: as it grows, or from the start."""

ROOMS: Final[dict[str, str]] = {
    "datasheet": "of the datasheet's memory, minus weights and the working set of a step",
    "all": "of all memory, minus weights and a profiling run",
    "free": "of the memory that weights and a profiling run leave free",
    "static": "of the memory free before loading, minus weights",
}
"""What the memory fraction refers to, by the name of the rule."""

FAST_LINK_BYTES_PER_S: Final = 400 * GB
"""Limit between fast and slow links: NVLink of Hopper GPUs has 450 GB/s per direction, of A100 300."""

MOST_SEQS: Final = 2**20
LEAST_FRACTION: Final = 1e-3
"""Minimum memory fraction: less leaves no room to serve a model."""
_AMOUNTS: Final = (
    "context_gib",
    "group_gib",
    "slow_group_gib",
    "graphs_gib",
    "activation",
    "sample_bytes",
    "small_gib",
)


def checked_fraction(name: str, value: Any) -> float:
    """Return a checked fraction of a GPU's memory: above 0, at most 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise PlanError(f"{name} must be a number above 0 and at most 1, got {shown(value)}")
    if value < LEAST_FRACTION:
        raise PlanError(f"{name} must be at least {LEAST_FRACTION:g}, got {shown(value)}")
    return float(value)


@dataclass(frozen=True)
class StaticReserve:
    """Bytes that an engine leaves free by its own formula if no memory fraction is given."""

    mib: float = 0.0
    mib_per_token: float = 0.0
    mib_per_graph: float = 0.0
    mib_per_gpu: float = 0.0
    mib_per_rank_graph: float = 0.0
    least_tokens: int = 1
    least_gib: float = 0.0
    large_gib: float = 0.0
    graphs: tuple[tuple[float, int, int], ...] = ()

    def __post_init__(self) -> None:
        """Reject an invalid reserve."""
        for key in fields(self):
            if key.name not in ("graphs", "least_tokens"):
                object.__setattr__(self, key.name, check_number(key.name, getattr(self, key.name)))
        whole_number("least_tokens", self.least_tokens, most=MOST_SEQS, error=PlanError)
        given = self.graphs
        if not isinstance(given, list | tuple) or not all(
            isinstance(row, list | tuple) and len(row) == 3 for row in given
        ):
            raise PlanError(
                f"graphs must be rows of [GiB below, batch, batch from tp 4 on], got {shown(given, 80)}"
            )
        for below, *batches in given:
            check_number("the GiB of a row of graphs", below)
            for batch in batches:
                whole_number("a batch of graphs", batch, most=MOST_SEQS, error=PlanError)
        object.__setattr__(self, "graphs", tuple((float(row[0]), *row[1:]) for row in given))

    def bytes(self, gpu_bytes: int, tokens: int, tp: int, pp: int, ranks: int) -> int:
        """Return the bytes left free on one GPU, by the tokens of a step and the layout of a replica."""
        gib = gpu_bytes / GIB
        graph = next((batches[tp >= 4] for below, *batches in self.graphs if below == 0 or gib < below), 0)
        mib = self.mib + self.mib_per_token * max(tokens, self.least_tokens)
        mib += self.mib_per_graph * graph + self.mib_per_gpu * tp * pp
        if ranks > 1:
            mib += self.mib_per_rank_graph * graph * ranks
        if gib > self.large_gib:
            mib = max(mib, self.least_gib * GIB / MIB)
        return round(mib * MIB)


@dataclass(frozen=True)
class KvMemory:
    """How an engine reserves memory, and KV cache in it.

    Attributes
    ----------
    kv_reservation : str
        ``mean``: a request takes KV cache as it grows, for half its output on average; ``full``: it
        reserves its whole output before it starts.
    room : str
        Rule for the KV-cache size: what ``fraction`` refers to, one of :data:`ROOMS`.
    fraction : float
        ``gpu_memory_utilization``, ``free_gpu_memory_fraction`` or ``mem_fraction_static``; 0, only with the
        static rule, is what ``reserve`` leaves.
    context_gib : float
        CUDA context, handles and library workspaces on each GPU, GiB.
    group_gib, slow_group_gib : float
        Buffers of collectives in a replica of several GPUs, GiB: over links of at least
        ``FAST_LINK_BYTES_PER_S``, whose switches multicast, and over slower ones.
    graphs_gib : float
        CUDA graphs, if the engine counts them before it reserves KV cache, GiB.
    activation : float
        Memory of the profiling run's forward pass, in working sets of a step (``activation_bytes`` of the
        datasheet rule).
    sample_bytes : float
        Memory of its sampling per request and vocabulary entry; the larger of both counts.
    small_gib, small_seqs : float, int
        On GPUs smaller than this (GiB) the engine runs at most this many concurrent requests; 0 for no limit.
    small_gpus : tuple of str
        Larger GPUs with the same limit.
    block_tokens : int
        Tokens per block of KV cache.
    reserve : StaticReserve, optional
        For the static rule; a table in TOML.
    """

    kv_reservation: str = "mean"
    room: str = "datasheet"
    fraction: float = 0.9
    context_gib: float = 0.0
    group_gib: float = 0.0
    slow_group_gib: float = 0.0
    graphs_gib: float = 0.0
    activation: float = 1.0
    sample_bytes: float = 0.0
    small_gib: float = 0.0
    small_seqs: int = 1
    small_gpus: tuple[str, ...] = ()
    block_tokens: int = 1
    reserve: StaticReserve | None = None

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_one_of("kv_reservation", self.kv_reservation, tuple(KV_RESERVATIONS))
        check_one_of("room", self.room, tuple(ROOMS))
        for name in _AMOUNTS:
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        gpus = self.small_gpus
        object.__setattr__(self, "small_gpus", check_names("small_gpus", gpus))
        for name in ("small_seqs", "block_tokens"):
            whole_number(name, getattr(self, name), most=MOST_SEQS, error=PlanError)
        given = self.reserve
        if isinstance(given, Mapping):
            known = [key.name for key in fields(StaticReserve)]
            unknown = sorted(str(key) for key in given if key not in known)
            if unknown:
                raise PlanError(f"reserve: unknown {', '.join(unknown)}; it has {', '.join(known)}")
            object.__setattr__(self, "reserve", StaticReserve(**given))
        elif given is not None and not isinstance(given, StaticReserve):
            raise PlanError(f"reserve must be a table, got {shown(given)}")
        if self.room == "static" and self.fraction == 0 and is_number(self.fraction):
            if self.reserve is None:
                raise PlanError("a fraction of 0 needs a reserve")
            object.__setattr__(self, "fraction", 0.0)
            return
        object.__setattr__(self, "fraction", checked_fraction("fraction", self.fraction))

    @property
    def osl_reserved(self) -> float:
        """Mean share of its output for which a request holds KV cache."""
        return KV_RESERVATIONS[self.kv_reservation]

    def seqs(self, gpu: str, gpu_bytes: int, most: int) -> int:
        """Return the requests that a profiling run samples for, at most the engine's maximum."""
        is_small = gpu_bytes < self.small_gib * GIB or gpu in self.small_gpus
        return min(most, self.small_seqs) if is_small else most

    def context_bytes(self, link_bytes_per_s: float, gpus: int) -> int:
        """Return the bytes of contexts, collectives and CUDA graphs on one of a replica's GPUs."""
        gib = self.context_gib + self.graphs_gib
        if gpus > 1:
            gib += self.group_gib if link_bytes_per_s >= FAST_LINK_BYTES_PER_S else self.slow_group_gib
        return round(gib * GIB)


DATASHEET_MEMORY: Final = KvMemory()
"""Memory rules of a profile without a memory part."""


EP_SIZES: Final = ("any", "one_or_all")
"""Valid groups of experts: any that divide the GPUs of a stage, or one, or as many as GPUs."""

ATTENTION_SPLITS: Final = ("both", "tp_or_dp")
"""Whether attention can be split by tp and data parallelism together."""

ALLTOALL_RULES: Final = ("asked", "over_topk")
"""When tokens are sent only to their experts unless a plan sets it: never, or on some GPUs if groups of
experts outnumber the experts of a token."""

_TOKEN_SHARES: Final = ("never", "with_ep", "always")
_ATTENTION_SUMS: Final = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class LayoutRules:
    """How an engine splits mixtures of experts."""

    ep: str = "any"
    attention: str = "both"
    alltoall: str = "asked"
    alltoall_gpus: tuple[str, ...] = ()
    alltoall_needs_dp: bool = False
    decode_library: str = "deepep_ll"
    prefill_library: str = "deepep_ht"
    rack_library: str = ""
    comm_dtypes: tuple[str, ...] = ()
    gathered_bytes: tuple[tuple[str, float], ...] = ()
    gathered_gpus: tuple[str, ...] = ()
    token_shares: str = "never"
    attention_sum: str = "all_reduce"
    copies_embedding: bool = False
    two_batches_from: tuple[int, ...] = (2, 2)
    wide_experts_over: int = 8
    context_parallel: bool = True
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Reject invalid rules."""
        allowed = {
            "ep": EP_SIZES,
            "attention": ATTENTION_SPLITS,
            "alltoall": ALLTOALL_RULES,
            "token_shares": _TOKEN_SHARES,
            "attention_sum": _ATTENTION_SUMS,
        }
        for key in fields(self):
            value: Any = getattr(self, key.name)
            if key.name in allowed:
                check_one_of(key.name, value, allowed[key.name])
            elif key.name == "wide_experts_over":
                if not is_whole_number(value):
                    raise PlanError(f"wide_experts_over must be a whole number of at least 1, got {value!r}")
            elif key.name == "two_batches_from":
                object.__setattr__(self, key.name, _two_tokens(value))
            elif key.name == "gathered_bytes":
                object.__setattr__(self, key.name, _element_bytes(value))
            elif isinstance(key.default, bool):
                check_bool(key.name, value)
            elif isinstance(key.default, str):
                check_text(key.name, value)
            else:
                object.__setattr__(self, key.name, check_names(key.name, value))

    def obstacles(self, engine: str, sizes: Mapping[str, int]) -> list[str]:
        """Return why an engine cannot run a mixture of experts with these sizes, each with a valid value."""
        tp, dp, ep = (sizes[name] for name in ("tp", "dp", "ep"))
        ranks, reasons = tp * dp, []
        if self.ep == "one_or_all" and ep not in (1, ranks):
            reasons.append(
                f"{engine} splits experts over all GPUs of a stage or none: ep must be 1 or {ranks} "
                f"with tp {tp} x dp {dp}, got {ep}"
            )
        if self.attention == "tp_or_dp" and tp > 1 and dp > 1:
            reasons.append(
                f"{engine} splits attention by tp or data parallelism, not both: use "
                f"tp {ranks} with dp 1, or tp 1 with dp {ranks}"
            )
        return reasons


def _element_bytes(value: Any) -> tuple[tuple[str, float], ...]:
    try:
        sizes = tuple(dict(value).items())
    except (TypeError, ValueError):
        sizes = ()
    if (value and not sizes) or not all(
        isinstance(name, str) and is_number(size) and 0.01 <= size <= 2.0 for name, size in sizes
    ):
        raise PlanError(
            f"gathered_bytes must be a table of formats and bytes per element, 0.01 to 2: "
            f"{{nvfp4 = 0.5625}}, got {value!r}"
        )
    return tuple((name, float(size)) for name, size in sizes)


def _two_tokens(value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple)
    if not is_list or len(value) not in (0, 2) or not all(is_whole_number(one) and one >= 2 for one in value):
        raise PlanError(
            f"two_batches_from must be tokens of decodes and of prefill, at least 2, or empty: [32, 512], "
            f"got {value!r}"
        )
    return tuple(value)


ANY_LAYOUT: Final = LayoutRules()
"""No engine: every layout that fills its GPUs."""
