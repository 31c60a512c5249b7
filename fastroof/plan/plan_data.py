"""A plan's data: what compiling makes and timing reads, and the facts that need no timed step."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.arrow import facts_html
from fastroof.caching import lazy_property
from fastroof.checks import is_number, shown, whole_number
from fastroof.columns import MODELLED_FROM
from fastroof.config import GpuSpec, is_shipped
from fastroof.engines import EngineProfile
from fastroof.errors import PlanError
from fastroof.memory.gpu_memory import NO_DRAFTS, Drafts, MemoryUse, most_that_start, plan_memory
from fastroof.memory.plan_memory import PlanMemory
from fastroof.memory.workspaces import CacheFormat, cache_format
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.attention_work import HeadShape, PrefixUs, prefix_within
from fastroof.operators.calls import AttentionCall, MixerCall
from fastroof.plan.attention import StepAttention, heads_of, scaled_block, step_attention
from fastroof.plan.curves import CurveSource, DatasheetCurves, RowCurve, TableCurves
from fastroof.plan.options import EXCHANGES
from fastroof.tables import Tables
from fastroof.units import GB


class PlanAttention(NamedTuple):
    """Attention of one kind's layers: ``call.times`` of them, before row curve ``before``.

    A recipe has one layer of each kind, a plan all of them; blocks are None in a plan of one kind: the arena
    has them.
    """

    kind: int
    call: AttentionCall | MixerCall
    before: int
    decode_block: Any
    prefill_block: Any
    prefix_us: PrefixUs
    sources: tuple[str, str]

    def phase(self, is_decode: bool) -> StepAttention:
        """Return decode or prefill as a lookup."""
        return step_attention(self.call, is_decode)

    def prefixes_us(self, new_tokens: Any, context_len: Any) -> Any:
        """Time of each chunk's prefix in all of the layers, us."""
        price, window = self.prefix_us, self.call.window
        total = price.pair * (new_tokens * context_len) + price.token * context_len
        if window:
            pairs, tokens = prefix_within(new_tokens, new_tokens + context_len, window)
            total = total + (price.window_pair * pairs + price.window_token * tokens)
        return total

    def in_layers(self, count: int) -> PlanAttention:
        """Return the attention of ``count`` times as many layers."""
        decode, prefill = (
            None if block is None else scaled_block(block, count)
            for block in (self.decode_block, self.prefill_block)
        )
        call = replace(self.call, times=self.call.times * count)
        return self._replace(
            call=call, decode_block=decode, prefill_block=prefill, prefix_us=self.prefix_us.times(count)
        )


@dataclass(frozen=True, eq=False)
class ErrorSource:
    """What a plan's errors are computed from on first use; not pickled."""

    tables: Tables | None
    is_datasheet: bool
    curves: CurveSource | None = None

    @classmethod
    def of(cls, curves: CurveSource) -> ErrorSource:
        """Return where the errors of curves come from."""
        tables = curves.tables if isinstance(curves, TableCurves) else None
        return cls(tables, isinstance(curves, DatasheetCurves), curves)

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": None, "is_datasheet": self.is_datasheet, "curves": None}


@dataclass(frozen=True, eq=False, repr=False)
class PlanData:
    """A compiled plan, as compiling made it and as everything that times steps reads it."""

    model: ModelSpec
    gpu: GpuSpec
    layout: Layout
    dtype: str
    kv_dtype: str
    execution: Execution
    profile: EngineProfile
    method: str
    max_num_batched_tokens: int
    max_num_seqs: int
    tables_hash: str
    arena: Floats
    row_curves: tuple[RowCurve, ...]
    attention: tuple[PlanAttention, ...]
    error_source: ErrorSource
    version: str = field(default=__version__)
    stage: int | None = None
    stage_plans: tuple[Self, ...] = ()

    @property
    def tp(self) -> int:
        """GPUs that share each layer."""
        return self.layout.tp

    @property
    def engine(self) -> str:
        """Name of the engine's profile."""
        return self.profile.name

    @property
    def is_beyond_evidence(self) -> bool:
        """Whether its card is your own or modelled, or kernels or layer costs come from a donor.

        Its engine's errors on measured runs do not cover these; its own step error does.
        """
        sources = (name for names in kernel_sources(self).values() for name in names)
        has_modelled = any(MODELLED_FROM in name for name in sources)
        is_modelled = has_modelled or self.error_source.is_datasheet or not is_shipped(self.gpu)
        return is_modelled or self.profile.costs.of_other_layers(self.model.architecture)

    @property
    def batches_in_flight(self) -> float:
        """Batches of a step's size that its GPUs work on at once: one per rank and pipeline stage."""
        flight, imbalance = self.layout.batches_in_flight, self.execution.dp_imbalance
        return flight if imbalance == 1.0 else flight / imbalance

    @property
    def lora_text(self) -> str:
        """Its LoRA adapters as words that follow its formats; empty without adapters."""
        return "".join(f", LoRA {words}" for words in self.lora_facts.values())

    @property
    def lora_facts(self) -> dict[str, str]:
        """The same for JSON."""
        adapters = self.execution.adapters
        return {} if adapters is None else {"lora": adapters.words}

    @property
    def heads(self) -> HeadShape:
        """Attention heads of one GPU, in a plan of one kind of layers."""
        if len(self.attention) > 1:
            self.model.check_one_kind()
        call = self.attention[0].call
        if not isinstance(call, AttentionCall):
            raise PlanError(f"{self.model.name} has no grouped-head attention; use plan.attention instead")
        return heads_of(call)

    @property
    def cache_format(self) -> CacheFormat:
        """How its engine stores the KV cache on its GPU."""
        return cache_format(self.profile.memory, self.gpu, self.model.architecture, self.kv_dtype)

    @lazy_property
    def memory(self) -> PlanMemory:
        """Weight bytes, KV bytes per token and the most KV tokens that fit, on one GPU."""
        return self.memory_of()

    def memory_of(
        self,
        *,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: float | None = None,
        prefix_caching: bool | None = None,
        drafts: Drafts = NO_DRAFTS,
        lowers: bool = True,
        max_model_len: int | None = None,
    ) -> PlanMemory:
        """Return ``memory`` for other limits than the plan's and its engine's.

        Parameters
        ----------
        max_num_batched_tokens : int, optional
            Tokens of the largest step (default: the plan's, up to the engine's own limit).
        max_num_seqs : float, optional
            Maximum number of concurrent sequences, ``inf`` for the engine's own limit, which is the default.
            If each needs a block of states and there are fewer, the engine does not start: the memory is then
            that of the most with which it does, ``max_running``.
        prefix_caching : bool, optional
            Whether a hybrid model's states are cached with prefixes, which takes more blocks of a request
            (default: the engine's own).
        drafts : Drafts
            Draft model and tokens of speculative decoding.
        lowers : bool
            Whether ``max_num_seqs`` is lowered until the engine starts.
        max_model_len : int, optional
            Tokens of the longest sequence, with which workspaces grow (default: the model's).

        Returns
        -------
        PlanMemory
            One GPU's memory, bytes.

        Raises
        ------
        PlanError
            If a limit is not a number.
        """
        rule, scheduling = self.profile.memory, self.profile.scheduling
        is_unlimited = max_num_seqs is None or (type(max_num_seqs) is float and max_num_seqs == math.inf)
        if not is_unlimited and not is_number(max_num_seqs):
            raise PlanError(f"max_num_seqs must be a number, got {shown(max_num_seqs)}")
        tokens = self.memory_tokens
        if max_num_batched_tokens is not None:
            name = "max_num_batched_tokens"
            tokens = whole_number(name, max_num_batched_tokens, most=2**31 - 1, error=PlanError)

        def memory(seqs: int) -> PlanMemory:
            use = MemoryUse(tokens, seqs, max_num_seqs is not None, prefix_caching, drafts, max_model_len)
            return plan_memory(
                self.model, self.layout, self.gpu, self.execution, use, stage=self.stage, rule=rule
            )

        most = scheduling.max_num_seqs
        most = most if is_unlimited else int(min(most, max_num_seqs or 0))
        if max_num_batched_tokens is not None and rule.room == "all":
            # vLLM samples for at most as many requests as a step has tokens when it warms up
            most = min(most, tokens)
        used = memory(most)
        if not rule.states_limit_seqs or not used.state_parts or not 0 < used.parts < most or not lowers:
            return used
        seqs = most_that_start(memory, most)
        return memory(seqs)._replace(max_running=seqs)

    @property
    def memory_tokens(self) -> int:
        """Tokens of the largest step that its engine reserves memory for."""
        if self.profile.memory.room == "datasheet":
            return self.max_num_batched_tokens
        # a plan may time larger steps than its engine runs
        return min(self.max_num_batched_tokens, self.profile.scheduling.max_num_batched_tokens)

    @property
    def has_room(self) -> bool:
        """Whether weights and one step fit into nine tenths of the datasheet's memory."""
        parts = (self.model, self.layout, self.gpu, self.execution, MemoryUse(self.max_num_batched_tokens))
        return plan_memory(*parts, stage=self.stage).parts > 0

    @lazy_property
    def kernels(self) -> str:
        """Names of the measured tables that its kernels come from; ``datasheet`` without any."""
        by_operator = {operator: " and ".join(names) for operator, names in kernel_sources(self).items()}
        names = list(by_operator.values())
        most = max(dict.fromkeys(names), key=names.count)
        exceptions = [f"{operator} from {name}" for operator, name in by_operator.items() if name != most]
        return "; ".join([most, *exceptions])

    def describe(self) -> dict[str, str | int]:
        """Return what it is a plan of, as JSON holds it."""
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "tp": self.tp,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "engine": self.engine,
            "method": self.method,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "tables_hash": self.tables_hash,
            "kernels": self.kernels,
            "version": self.version,
            **self._layout_facts(),
        }

    @lazy_property
    def made_from(self) -> dict[str, str]:
        """Metadata of its answers' Arrow tables."""
        facts = self.describe()
        first, sizes = ("version", "tables_hash"), ("max_num_batched_tokens", "max_num_seqs")
        names = [*first, *(name for name in facts if name not in (*first, *sizes))]
        return {f"fastroof.{name}": str(facts[name]) for name in names}

    def _layout_facts(self) -> dict[str, str | int]:
        """What distinguishes it from a plan of a dense model split by tp only."""
        layout, execution = self.layout, self.execution
        facts: dict[str, str | int] = {}
        if layout.world_size > self.tp or layout.ep > 1:
            facts |= {"pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "moe_tp": layout.moe_tp}
        if layout.cp > 1:
            facts["cp"] = layout.cp
        if self.stage is not None:
            facts["stage"] = self.stage
        if self.model.has_experts:
            facts["routing"] = execution.routing
            if execution.exchange.alltoall != "never":
                library = execution.exchange.libraries[0]
                facts["exchange"] = library if library in EXCHANGES else "alltoall"
            if execution.wide_experts:
                facts["experts"] = "wide"
            if execution.num_slots:
                facts["num_slots"] = execution.num_slots
            if execution.two_batches_from:
                facts["two_batch_overlap"] = "yes"
        facts |= self.lora_facts
        if execution.dp_imbalance != 1.0:
            facts["dp_imbalance"] = str(execution.dp_imbalance)
        return facts

    def __repr__(self) -> str:
        layout = self.layout
        gpus = f"{layout.world_size} x {self.gpu.name}"
        if layout.world_size > self.tp or layout.ep > 1:
            gpus += f" ({layout})"
        stage = "" if self.stage is None else f"stage {self.stage} of "
        routing = f", routing {self.execution.routing}" if self.model.has_experts else ""
        return (
            f"StepPlan({stage}{self.model.name} on {gpus}, {self.dtype} weights, {self.kv_dtype} KV"
            f"{routing}{self.lora_text}, engine {self.engine!r}, up to {self.max_num_batched_tokens} tokens)"
        )

    def _repr_html_(self) -> str:
        """Return what it is a plan of, and its memory, as a notebook shows it."""
        units = {"max_num_batched_tokens": "tokens", "max_num_seqs": "requests"}
        units["tp"] = "GPU" if self.tp == 1 else "GPUs"
        shown = {k: v for k, v in self.describe().items() if k not in ("tables_hash", "version")}
        facts: list[tuple[str, Any, str]] = [(k, v, units.get(k, "")) for k, v in shown.items()]
        # a plan that times steps may have no room for a cache
        with suppress(PlanError):
            memory = self.memory
            unit = "tokens" if memory.kv_bytes_per_token else "bytes"
            facts += [
                ("weights", memory.weight_bytes / GB, "GB a GPU"),
                ("KV cache", int(memory.max_kv_tokens), f"{unit} that fit beside the weights"),
            ]
        return facts_html(facts, repr(self))


def kernel_sources(plan: PlanData) -> dict[str, tuple[str, ...]]:
    """Sources by operator, in the order of the step."""
    sources: dict[str, dict[str, None]] = {}
    for curve in plan.row_curves:
        sources.setdefault(curve.operator.operator, {})[curve.source] = None
    for part in plan.attention:
        for operator, source in zip((ATTENTION_DECODE, ATTENTION_PREFILL), part.sources, strict=True):
            sources.setdefault(operator.name, {})[source] = None
    return {operator: tuple(names) for operator, names in sources.items()}
