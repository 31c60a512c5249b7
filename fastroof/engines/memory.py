"""How an engine uses memory: what it leaves for KV cache, and what requests reserve of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from fastroof.checks import is_number, is_whole_number, one_of, shown, whole_number
from fastroof.documents import Table
from fastroof.engines.memory_by_card import (
    AutoCache,
    Card,
    ExpertPadding,
    GraphKind,
    KvFormat,
    RunExtra,
    SparseCache,
    SparseWorkspace,
    StateBuffers,
    first_row,
)
from fastroof.engines.values import check_fields, check_number, check_range, check_text, holds_for, of_version
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
KV_CACHES: Final = ("bytes", "groups", "pools")
"""How an engine divides the KV cache: by bytes, blocks of groups of layers, or pools of tokens and states."""

_COUNTS: Final = (
    "small_seqs", "block_tokens", "state_slots", "cached_state_slots", "step_batches", "latent_block_tokens",
)  # fmt: skip


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
    mib_per_large_rank_graph: float = 0.0
    large_graph: int = 300
    mib_per_prefill_graph: float = 0.0
    latent_graphs_mib: float = 0.0
    alltoall_mib: float = 0.0
    least_tokens: int = 1
    least_gib: float = 0.0
    large_gib: float = 0.0
    graphs: tuple[tuple[float, int, int], ...] = ()
    prefill_sizes: tuple[tuple[int, int], ...] = ()
    vision_share: float = 1.0
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("least_tokens", "large_graph"):
            whole_number(name, getattr(self, name), most=MOST_SEQS, error=PlanError)
        sizes = self.prefill_sizes
        if not isinstance(sizes, list | tuple) or not all(
            isinstance(row, list | tuple) and len(row) == 2 and all(is_whole_number(one) for one in row)
            for row in sizes
        ):
            raise PlanError(
                f"prefill_sizes must be rows of [tokens up to, multiple], got {shown(self.prefill_sizes, 80)}"
            )
        object.__setattr__(self, "prefill_sizes", tuple(tuple(row) for row in sizes))
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

    def num_prefill_graphs(self, tokens: int) -> int:
        """Return how many prefill graphs of up to some tokens are captured."""
        count, start = 0, 0
        for up_to, multiple in self.prefill_sizes:
            count += max(min(up_to, tokens) - start, 0) // multiple
            start = up_to
        return count

    def bytes(
        self,
        gpu_bytes: int,
        tokens: int,
        tp: int,
        pp: int,
        ranks: int,
        *,
        latent: bool = False,
        alltoall: bool = False,
    ) -> int:
        """Return the bytes left free on one GPU, by the tokens of a step and the layout of a replica.

        ``latent``: latent attention, whose prefill graphs take more; ``alltoall``: experts send tokens.
        """
        gib = gpu_bytes / GIB
        graph = next((batches[tp >= 4] for below, *batches in self.graphs if below == 0 or gib < below), 0)
        mib = self.mib + self.mib_per_token * max(tokens, self.least_tokens)
        mib += self.mib_per_graph * graph + self.mib_per_gpu * tp * pp
        if ranks > 1:
            mib += self.mib_per_rank_graph * graph * ranks
            mib += self.mib_per_large_rank_graph * graph * ranks * (graph > self.large_graph)
        elif self.prefill_sizes:
            own = self.mib_per_prefill_graph * self.num_prefill_graphs(tokens)
            mib += self.latent_graphs_mib if latent else own
        if gib > self.large_gib:
            mib = max(mib, self.least_gib * GIB / MIB)
        mib += self.alltoall_mib * alltoall
        return round(mib * MIB)


class ModelKind(NamedTuple):
    """What of a model decides an engine's memory.

    ``expert_format`` is empty without experts; ``kinds`` may have ``states``, ``sparse`` and ``compressed``.
    """

    architecture: str = ""
    expert_format: str = ""
    kinds: frozenset[str] = frozenset()
    is_latent: bool = False


@dataclass(frozen=True)
class GraphEstimate:
    """Memory that an engine takes off for CUDA graphs before it reserves KV cache.

    Attributes
    ----------
    kinds : tuple of GraphKind
        By kind of model, the first that fits; tables in TOML.
    variable : str
        What switches the estimate off.
    """

    kinds: tuple[GraphKind, ...] = ()
    variable: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "kinds", _rows("kinds", GraphKind, self.kinds))

    def of_model(self, card: Card, model: ModelKind) -> GraphKind:
        """Return what is taken off for a model on a card."""
        of_card = (one for one in self.kinds if one.holds(card, model.architecture))
        return next((one for one in of_card if one.is_of(model.expert_format, model.kinds)), GraphKind())


@dataclass(frozen=True)
class RunnerMemory:
    """Sampling and graphs of the runner that an engine takes for some architectures, or for all.

    With ``dense`` also for all models without routed experts and states. ``later_graphs_gib`` are taken after
    the KV cache is; with ``graphs_limit_seqs``, requests need blocks of states when graphs are profiled.
    """

    architectures: tuple[str, ...] = ()
    sample_bytes: float = 0.0
    graphs: GraphEstimate | None = None
    dense: bool = False
    later_graphs_gib: float = 0.0
    graphs_limit_seqs: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.graphs is not None:
            object.__setattr__(self, "graphs", _table("graphs", GraphEstimate, self.graphs))


@dataclass(frozen=True)
class RunningLimit:
    """Default maximum number of running requests, where an engine derives it from the KV cache.

    Attributes
    ----------
    seqs_per_context : int
        Requests for a cache of one longest context; 0 if there is no such rule.
    least, most : int
        Bounds of that.
    tokens_per_seq : int
        Tokens of the cache for each request at least.
    speculative : int
        The default with draft tokens; 0 for the same.
    """

    seqs_per_context: int = 0
    least: int = 1
    most: int = MOST_SEQS
    tokens_per_seq: int = 1
    speculative: int = 0

    def __post_init__(self) -> None:
        for key in fields(self):
            least = 0 if key.default == 0 else 1
            whole_number(key.name, getattr(self, key.name), least, MOST_SEQS, PlanError)

    def seqs(self, tokens: int, context: int, ranks: int, draft_tokens: int) -> int:
        """Return the limit of one rank's requests without the user's."""
        if draft_tokens and self.speculative:
            return max(self.speculative // ranks, 1)
        limit = self.most
        if self.seqs_per_context:
            limit = min(max(tokens * self.seqs_per_context // max(context, 1), self.least), self.most)
        return max(min(limit, tokens // self.tokens_per_seq), 1)


def _table(name: str, made: type, given: Any) -> Any:
    """Return a part of the memory rule from its table."""
    return given if isinstance(given, made) else Table(given, name, PlanError).build(made)


def _rows(name: str, made: type, given: Any) -> tuple[Any, ...]:
    """Return parts of the memory rule from a list of tables."""
    if not isinstance(given, list | tuple):
        raise PlanError(f"{name} must be a list of tables, got {shown(given)}")
    return tuple(_table(name, made, one) for one in given)


_TABLES: Final[dict[str, type]] = {"graphs": GraphEstimate, "running": RunningLimit, "reserve": StaticReserve}
_VERSIONED: Final[dict[str, type]] = {
    "auto_caches": AutoCache,
    "kv_formats": KvFormat,
    "sparse_caches": SparseCache,
    "workspaces": SparseWorkspace,
    "expert_padding": ExpertPadding,
    "state_buffers": StateBuffers,
    "run_extras": RunExtra,
}
"""Lists whose rows have their own versions."""
_LISTS: Final[dict[str, type]] = {"runners": RunnerMemory, **_VERSIONED}


def _tiers(given: Any) -> tuple[tuple[float, int], ...]:
    """Return rows of [GiB below, tokens]."""
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(isinstance(row, list | tuple) and len(row) == 2 for row in given):
        raise PlanError(f"token_tiers must be rows of [GiB below, tokens], got {shown(given, 80)}")
    for below, tokens in given:
        check_number("the GiB of a row of token_tiers", below)
        whole_number("the tokens of a row of token_tiers", tokens, most=MOST_SEQS, error=PlanError)
    return tuple((float(below), tokens) for below, tokens in given)


def _by_version(given: Any) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Return the values of other versions, each checked by the rule that it makes."""
    if not isinstance(given, list | tuple):
        raise PlanError(f"by_version must be a list of tables, got {shown(given)}")
    known = [key.name for key in fields(KvMemory) if key.name != "by_version"]
    rows = []
    for row in given:
        if isinstance(row, Mapping):
            versions, values = row.get("versions", ""), {k: v for k, v in row.items() if k != "versions"}
        elif isinstance(row, list | tuple) and len(row) == 2:
            versions, values = row[0], dict(row[1])
        else:
            raise PlanError(f"each of by_version must be a table with versions, got {shown(row)}")
        check_text("versions", versions)
        check_range(versions)
        Table(values, "by_version", PlanError).allow(["versions", *known])
        made = KvMemory(**values) if "room" in values else KvMemory(**{"room": "all", **values})
        rows.append((versions, tuple((name, getattr(made, name)) for name in values)))
    return tuple(rows)


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
    cache_gib : float
        Memory of the KV cache on each GPU if the user sets it (``--kv-cache-memory-bytes``), GiB; 0 for what
        the rule leaves.
    context_gib : float
        CUDA context, handles and library workspaces on each GPU, GiB.
    group_gib, slow_group_gib : float
        Buffers of collectives in a replica of several GPUs, GiB: over links of at least
        ``FAST_LINK_BYTES_PER_S``, whose switches multicast, and over slower ones.
    expert_group_gib : float, optional
        The first of a mixture of experts (default: the same).
    graphs : GraphEstimate, optional
        What the engine takes off for CUDA graphs before it reserves KV cache; a table in TOML.
    activation : float
        Memory of the profiling run's forward pass, in working sets of a step (``activation_bytes`` of the
        datasheet rule).
    compressed_activation : float
        The same of compressed attention; 0 for no other.
    sample_bytes, other_sample_bytes : float
        Memory of its sampling per request and vocabulary entry; the larger of both counts. And that of
        FlashInfer's sampler, where it may be installed; 0 where not.
    decoder_bytes : float
        Decoder buffers per request and vocabulary entry, next to the profiling run.
    other_share, other_share_gpus : float, tuple of str
        Factor of the static rule's fraction on some GPUs, also if it is given.
    runners : tuple of RunnerMemory
        Other sampling and graphs of some architectures; tables in TOML.
    small_gib, small_seqs : float, int
        On GPUs smaller than this (GiB) the engine runs at most this many concurrent requests; 0 for no limit.
    small_gpus : tuple of str
        Larger GPUs with the same limit.
    token_tiers : tuple of (float, int)
        The engine's default tokens of a step on GPUs below some GiB, 0 for all others; empty if there is one.
    ranks_share_tokens : bool
        Whether ranks of attention that share experts divide the default tokens of a step among them.
    block_tokens : int
        Tokens per block of KV cache.
    kv_cache : str
        How the KV cache is divided, one of :data:`KV_CACHES`: vLLM's groups of layers share blocks, SGLang
        has pools of tokens and of states.
    state_slots, cached_state_slots : int
        Recurrent states of a running request, and with a prefix cache or draft tokens.
    draft_slots : bool
        Whether each draft token has a state more.
    state_pool : float
        Bytes of the pool of states relative to the pool of tokens (``mamba_full_memory_ratio``).
    window_pool : float
        Tokens of the pool of windowed layers relative to those of the others (``swa_full_tokens_ratio``).
    step_batches : int
        Steps in flight whose tokens a request of windowed layers reserves.
    states_limit_seqs : bool
        Whether the engine does not start with more requests than there are blocks of states.
    prints_requests : bool
        Whether the tokens that it prints of the cache are requests of the longest context times its length,
        not blocks of one group.
    latent_copies : bool
        Whether absorbed projections of latent attention have a copy in bf16 next to the weights.
    latent_block_tokens : int
        Of whose multiples blocks of latent attention are next to states.
    pooled_cards : tuple of str
        Cards, or generations, on which pages hold twice as many tokens of pooled indexer keys.
    compressed_blocks : str
        Bytes of a block of DeepSeek-V4: ``layers`` (pages of each kind as if a group had them all), ``pages``
        (the same of entries, other pages by their number) or ``widest`` (of the widest group).
    later_graphs_gib, later_states_gib : float
        What graphs, and prompts of recurrent layers, were logged to take after the KV cache is reserved.
    graphs_limit_seqs : bool
        Whether a model of states starts only with as many requests as the largest CUDA graph has.
    null_block : bool
        Whether the check of one request leaves a block out.
    caches_prefixes : bool
        Whether states are cached with prefixes by default.
    padding_slots : int
        States of the pool that no request gets.
    draft_share : bool
        Whether draft tokens share the pool of states.
    running : RunningLimit, optional
        Default maximum number of running requests, if the engine derives it; a table in TOML.
    reserve : StaticReserve, optional
        For the static rule; a table in TOML.
    auto_caches, kv_formats, sparse_caches, workspaces, expert_padding, state_buffers, run_extras : tuple
        Rules by version, card and architecture, see :mod:`fastroof.engines.memory_by_card`; tables in TOML.
    by_version : tuple of (str, tuple)
        Values of other versions: a range and its values; tables with ``versions`` in TOML.
    logged : str
        Newest version of logged starts that judge the rule; empty if unknown.
    source : str
        Where the rule was read.
    """

    kv_reservation: str = "mean"
    room: str = "datasheet"
    fraction: float = 0.9
    cache_gib: float = 0.0
    context_gib: float = 0.0
    group_gib: float = 0.0
    slow_group_gib: float = 0.0
    graphs: GraphEstimate | None = None
    expert_group_gib: float | None = None
    activation: float = 1.0
    compressed_activation: float = 0.0
    sample_bytes: float = 0.0
    other_sample_bytes: float = 0.0
    decoder_bytes: float = 0.0
    other_share: float = 1.0
    other_share_gpus: tuple[str, ...] = ()
    runners: tuple[RunnerMemory, ...] = ()
    small_gib: float = 0.0
    small_seqs: int = 1
    small_gpus: tuple[str, ...] = ()
    token_tiers: tuple[tuple[float, int], ...] = ()
    ranks_share_tokens: bool = False
    block_tokens: int = 1
    kv_cache: str = "bytes"
    state_slots: int = 1
    cached_state_slots: int = 1
    draft_slots: bool = False
    state_pool: float = 0.0
    window_pool: float = 1.0
    step_batches: int = 1
    states_limit_seqs: bool = False
    prints_requests: bool = False
    latent_copies: bool = False
    latent_block_tokens: int = 1
    pooled_cards: tuple[str, ...] = ()
    compressed_blocks: str = "widest"
    later_graphs_gib: float = 0.0
    later_states_gib: float = 0.0
    graphs_limit_seqs: bool = False
    null_block: bool = False
    caches_prefixes: bool = False
    padding_slots: int = 0
    draft_share: bool = False
    running: RunningLimit | None = None
    reserve: StaticReserve | None = None
    auto_caches: tuple[AutoCache, ...] = ()
    kv_formats: tuple[KvFormat, ...] = ()
    sparse_caches: tuple[SparseCache, ...] = ()
    workspaces: tuple[SparseWorkspace, ...] = ()
    expert_padding: tuple[ExpertPadding, ...] = ()
    state_buffers: tuple[StateBuffers, ...] = ()
    run_extras: tuple[RunExtra, ...] = ()
    by_version: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    logged: str = ""
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_fields(self, but=("kv_reservation", "kv_cache", "room", "fraction", "compressed_blocks"))
        check_range(f">={self.logged}" if self.logged else "")
        one_of("kv_reservation", self.kv_reservation, tuple(KV_RESERVATIONS), PlanError)
        one_of("kv_cache", self.kv_cache, KV_CACHES, PlanError)
        one_of("room", self.room, tuple(ROOMS), PlanError)
        one_of("compressed_blocks", self.compressed_blocks, ("layers", "pages", "widest"), PlanError)
        object.__setattr__(self, "token_tiers", _tiers(self.token_tiers))
        if self.expert_group_gib is not None:
            check_number("expert_group_gib", self.expert_group_gib)
        for name in _COUNTS:
            whole_number(name, getattr(self, name), most=MOST_SEQS, error=PlanError)
        for name, made in _TABLES.items():
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else _table(name, made, given))
        for name, made in _LISTS.items():
            object.__setattr__(self, name, _rows(name, made, getattr(self, name)))
        object.__setattr__(self, "by_version", _by_version(self.by_version))
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

    @property
    def ranges(self) -> tuple[str, ...]:
        """Ranges of versions in which its values or rows differ."""
        rows = (one.versions for name in _VERSIONED for one in getattr(self, name))
        return (*(versions for versions, _ in self.by_version), *dict.fromkeys(rows))

    def at(self, version: str) -> KvMemory:
        """Return the rule of one of the engine's versions."""
        rows = {name: of_version(getattr(self, name), version) for name in _VERSIONED}
        changed: dict[str, Any] = {
            name: found for name, found in rows.items() if found != getattr(self, name)
        }
        for versions, values in self.by_version:
            if holds_for(versions, version):
                return replace(self, **changed | dict(values), by_version=())
        return replace(self, **changed) if changed else self

    def auto_kv_dtype(self, card: Card, architecture: str, stored: str) -> str:
        """Return the format of the KV cache that ``auto`` means for a checkpoint with its own, on a card."""
        row = first_row(self.auto_caches, card, architecture)
        return stored if row is None else "fp8" if row.fp8 else "bf16"

    def of_model(self, architecture: str, *, is_dense: bool) -> KvMemory:
        """Return the rule with the runner that the engine takes for a model."""
        for runner in self.runners:
            of_all = not runner.architectures and not runner.dense
            if of_all or architecture in runner.architectures or (runner.dense and is_dense):
                return replace(
                    self,
                    sample_bytes=runner.sample_bytes,
                    other_sample_bytes=0.0,
                    graphs=runner.graphs,
                    later_graphs_gib=runner.later_graphs_gib,
                    graphs_limit_seqs=runner.graphs_limit_seqs,
                    runners=(),
                )
        return self

    def alternatives(self) -> dict[str, KvMemory]:
        """Return the rule of an engine with other packages installed, by words that say with which."""
        packages = dict.fromkeys(one.needs for one in self.expert_padding if one.needs)
        found = {f"without {package}": self.without(package) for package in packages}
        if self.other_sample_bytes:
            found["with FlashInfer's sampler"] = replace(self, sample_bytes=self.other_sample_bytes)
        return found

    def without(self, package: str) -> KvMemory:
        """Return the rule of an engine without a package that some kernels need."""
        return replace(self, expert_padding=tuple(one for one in self.expert_padding if one.needs != package))

    def seqs(self, gpu: str, gpu_bytes: int, most: int) -> int:
        """Return the requests that a profiling run samples for, at most the engine's maximum."""
        is_small = gpu_bytes < self.small_gib * GIB or gpu in self.small_gpus
        return min(most, self.small_seqs) if is_small else most

    def default_limits(self, gpu: str, gpu_bytes: int, tokens: int, seqs: int) -> tuple[int, int]:
        """Return the engine's own tokens and requests of a step on a GPU, from those of its profile."""
        gib = min(gpu_bytes / GIB, self.small_gib - 1.0) if gpu in self.small_gpus else gpu_bytes / GIB
        found = next((size for below, size in self.token_tiers if below == 0 or gib < below), tokens)
        return found, self.seqs(gpu, gpu_bytes, seqs)

    def context_bytes(self, link_bytes_per_s: float, gpus: int, *, has_experts: bool = False) -> int:
        """Return the bytes of contexts and collectives on one of a replica's GPUs."""
        gib = self.context_gib
        if gpus > 1:
            fast = self.group_gib
            if has_experts and self.expert_group_gib is not None:
                fast = self.expert_group_gib
            gib += fast if link_bytes_per_s >= FAST_LINK_BYTES_PER_S else self.slow_group_gib
        return round(gib * GIB)


DATASHEET_MEMORY: Final = KvMemory()
"""Memory rules of a profile without a memory part."""
