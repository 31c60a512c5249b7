"""What a plan is: its model on its GPUs, its curves and blocks, and how it is told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.arrow import facts_html
from fastroof.checks import is_number, shown, whole_number
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.errors import PlanError
from fastroof.lazy_property import lazy_property
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import AttentionCall
from fastroof.plan.arena import decode_lines
from fastroof.plan.attention import PlanAttention, heads_of
from fastroof.plan.curves import RowCurve
from fastroof.plan.explain import EncoderTime, images_us
from fastroof.plan.memory import PlanMemory, plan_memory
from fastroof.plan.options import EXCHANGES
from fastroof.units import GB

if TYPE_CHECKING:
    from fastroof.plan.step_error import ErrorSource
    from fastroof.plan.step_plan import StepPlan


def kernel_sources(plan: PlanFacts) -> dict[str, tuple[str, ...]]:
    """Sources by operator, in the order of the step."""
    sources: dict[str, dict[str, None]] = {}
    for curve in plan.row_curves:
        sources.setdefault(curve.operator.operator, {})[curve.source] = None
    for part in plan.attention:
        for operator, source in zip((ATTENTION_DECODE, ATTENTION_PREFILL), part.sources, strict=True):
            sources.setdefault(operator.name, {})[source] = None
    return {operator: tuple(names) for operator, names in sources.items()}


def source_words(plan: PlanFacts) -> str:
    """The source of most operators, and by name the operators that come from another."""
    by_operator = {operator: " and ".join(names) for operator, names in kernel_sources(plan).items()}
    names = list(by_operator.values())
    most = max(dict.fromkeys(names), key=names.count)
    others = [f"{operator} from {name}" for operator, name in by_operator.items() if name != most]
    return "; ".join([most, *others])


@dataclass(frozen=True, eq=False, repr=False)
class PlanFacts:
    """All that a plan holds, and what follows of it without timing a step."""

    model: ModelSpec
    gpu: GpuSpec
    layout: Layout
    dtype: str
    kv_dtype: str
    execution: Execution
    engine: EngineProfile
    method: str
    max_tokens: int
    max_seqs: int
    tables_hash: str
    arena: Floats
    row_curves: tuple[RowCurve, ...]
    attention: tuple[PlanAttention, ...]
    error_source: ErrorSource
    version: str = field(default=__version__)
    stage: int | None = None
    stage_plans: tuple[StepPlan, ...] = ()

    @property
    def batches_in_flight(self) -> float:
        """Batches as large as its steps that its GPUs work on at once: one a rank and pipeline stage."""
        flight, imbalance = self.layout.batches_in_flight, self.execution.dp_imbalance
        return flight if imbalance == 1.0 else flight / imbalance

    @property
    def tp(self) -> int:
        """GPUs that share each layer."""
        return self.layout.tp

    @property
    def runtime(self) -> str:
        """Name of the engine's profile."""
        return self.engine.name

    @property
    def heads(self) -> HeadShape:
        """What one GPU's attention kernels are keyed by, in a plan of one kind of layers."""
        if len(self.attention) > 1:
            _ = self.model.only_kind
        call = self.attention[0].call
        if not isinstance(call, AttentionCall):
            raise PlanError(
                f"{self.model.name} has no attention of grouped heads: plan.attention has what it runs"
            )
        return heads_of(call)

    @lazy_property
    def memory(self) -> PlanMemory:
        """Weight bytes, KV bytes a token and the most KV tokens that fit, on one GPU."""
        return self.memory_of()

    def memory_of(self, *, max_tokens: int | None = None, max_seqs: float | None = None) -> PlanMemory:
        """Work out ``memory`` of other limits than the plan's and its engine's own."""
        rule, own = self.engine.memory, self.engine.scheduling
        is_any = max_seqs is None or (type(max_seqs) is float and max_seqs == math.inf)
        if not is_any and not is_number(max_seqs):
            raise PlanError(f"max_seqs must be a number, got {shown(max_seqs)}")
        tokens = self.max_tokens
        if max_tokens is not None:
            tokens = whole_number("max_tokens", max_tokens, most=2**31 - 1, error=PlanError)
        if rule.room != "datasheet":
            # a plan may time larger steps than its engine runs
            tokens = min(tokens, own.max_num_batched_tokens)
        return plan_memory(
            self.model,
            self.layout,
            self.gpu,
            self.execution,
            tokens,
            stage=self.stage,
            rule=rule,
            max_seqs=int(own.max_num_seqs if max_seqs is None else min(own.max_num_seqs, max_seqs)),
        )

    @property
    def has_room(self) -> bool:
        """Whether weights and a step leave room for KV cache in nine tenths of the datasheet's memory."""
        parts = (self.model, self.layout, self.gpu, self.execution)
        return plan_memory(*parts, self.max_tokens, stage=self.stage).max_kv_tokens > 0

    @lazy_property
    def decode_lines(self) -> Floats | None:
        """Steps of equal decodes by batch size and kv_len, tabulated when first needed."""
        return decode_lines(self.arena)

    @lazy_property
    def made_from(self) -> dict[str, str]:
        """What its answers carry as metadata of their Arrow tables."""
        return {
            "fastroof.version": self.version,
            "fastroof.tables_hash": self.tables_hash,
            "fastroof.model": self.model.name,
            "fastroof.gpu": self.gpu.name,
            "fastroof.tp": str(self.tp),
            "fastroof.dtype": self.dtype,
            "fastroof.kv_dtype": self.kv_dtype,
            "fastroof.runtime": self.runtime,
            "fastroof.method": self.method,
            "fastroof.kernels": self.kernels,
            **{f"fastroof.{name}": str(value) for name, value in self._split().items()},
        }

    def __getstate__(self) -> dict[str, Any]:
        made = (
            "decode_lines",
            "made_from",
            "memory",
            "_paced",
            "scalar",
            "step_scalar",
            "verification_arena",
        )
        # a list: another thread may be adding one of them
        return {name: value for name, value in list(self.__dict__.items()) if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.arena.flags.writeable = False

    def _split(self) -> dict[str, str | int]:
        """What tells it apart from a dense model that is split by tp alone."""
        layout, split = self.layout, dict[str, str | int]()
        if layout.world_size > self.tp or layout.ep > 1:
            split |= {"pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "moe_tp": layout.moe_tp}
        if layout.cp > 1:
            split["cp"] = layout.cp
        if self.stage is not None:
            split["stage"] = self.stage
        if self.model.has_experts:
            split["routing"] = self.execution.routing
            if self.execution.exchange.alltoall != "never":
                library = self.execution.exchange.libraries[0]
                split["exchange"] = library if library in EXCHANGES else "alltoall"
            if self.execution.wide_experts:
                split["experts"] = "wide"
            if self.execution.num_slots:
                split["num_slots"] = self.execution.num_slots
            if self.execution.two_batches_from:
                split["two_batch_overlap"] = "yes"
        if self.execution.dp_imbalance != 1.0:
            split["dp_imbalance"] = str(self.execution.dp_imbalance)
        return split

    def __repr__(self) -> str:
        layout = self.layout
        gpus = f"{layout.world_size} x {self.gpu.name}"
        if layout.world_size > self.tp or layout.ep > 1:
            gpus += f" ({layout})"
        stage = "" if self.stage is None else f"stage {self.stage} of "
        routing = f", routing {self.execution.routing}" if self.model.has_experts else ""
        return (
            f"StepPlan({stage}{self.model.name} on {gpus}, {self.dtype} weights, {self.kv_dtype} KV"
            f"{routing}, runtime {self.runtime!r}, up to {self.max_tokens} tokens)"
        )

    def _repr_html_(self) -> str:
        """Return what it is a plan of, and its memory, as a notebook shows it."""
        units = {"tp": "GPU" if self.tp == 1 else "GPUs", "max_tokens": "tokens", "max_seqs": "requests"}
        said = {k: v for k, v in self.describe().items() if k not in ("tables_hash", "version")}
        facts: list[tuple[str, Any, str]] = [(k, v, units.get(k, "")) for k, v in said.items()]
        # a plan that times steps may leave no room for a cache, which its memory refuses to speak of
        with suppress(PlanError):
            memory = self.memory
            kept = "tokens" if memory.kv_bytes_per_token else "bytes"
            facts += [
                ("weights", memory.weight_bytes / GB, "GB a GPU"),
                ("KV cache", int(memory.max_kv_tokens), f"{kept} that fit beside the weights"),
            ]
        return facts_html(facts, repr(self))

    @lazy_property
    def kernels(self) -> str:
        """Which measured tables its kernels come from, in words; ``datasheet`` without any."""
        return source_words(self)

    def encode(self, images: Iterable[tuple[int, int]]) -> EncoderTime:
        """Time the model's vision encoder over some images, and count the tokens that they are."""
        return images_us(self, images)

    def describe(self) -> dict[str, str | int]:
        """Say what it is a plan of, as JSON can hold it: what other programs are told of a plan."""
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "tp": self.tp,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "runtime": self.runtime,
            "method": self.method,
            "max_tokens": self.max_tokens,
            "max_seqs": self.max_seqs,
            "tables_hash": self.tables_hash,
            "kernels": self.kernels,
            "version": self.version,
            **self._split(),
        }
