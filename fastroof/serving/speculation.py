"""Speculative decoding: tokens that a request verifies in a step, those it keeps, and what drafting takes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fastroof.acceptance import MTP, acceptance_length
from fastroof.arrays import Floats
from fastroof.checks import shown
from fastroof.errors import BatchError, PlanError, PlanRangeError
from fastroof.models import Layout
from fastroof.models.mtp import mtp_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.arena import verification_arena
from fastroof.plan.memory import PlanMemory, window_kv_bytes

if TYPE_CHECKING:
    from fastroof.tables import Tables


@dataclass(frozen=True)
class SpeculativeDecoding:
    """Steps in which every request verifies draft tokens, and keeps those that its model confirms.

    Attributes
    ----------
    num_draft_tokens : int
        Tokens that are drafted for a request before a step; it verifies them and the one that is its own.
    accepted : float or tuple of float
        Mean tokens that a request says in a step, its own included: what engines log as mean acceptance
        length. Or the acceptance rate of each position, as vLLM logs them: the share of drafts whose token at
        that position was accepted, with all before it. The length is 1 and their sum.
    draft : StepPlan, str or None
        What drafts: the plan of a second, smaller model, at its own tp; ``"mtp"``, the model's own
        multi-token prediction layer (:func:`mtp_draft`); None where drafts take no time (n-grams).

    Raises
    ------
    BatchError
        If a number is wrong.
    PlanError
        If the draft is something else.

    Examples
    --------
    >>> from fastroof import SpeculativeDecoding
    >>> SpeculativeDecoding(3, accepted=(0.8, 0.5, 0.25)).acceptance_length
    2.55
    """

    num_draft_tokens: int
    accepted: float | tuple[float, ...]
    draft: StepPlan | str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        acceptance_length(self.num_draft_tokens, self.accepted)
        if isinstance(self.accepted, list):
            object.__setattr__(self, "accepted", tuple(self.accepted))
        draft = self.draft
        if not (draft is None or isinstance(draft, StepPlan) or (isinstance(draft, str) and draft == MTP)):
            raise PlanError(
                f"draft must be a StepPlan, {MTP!r} for the model's own layer, or None, "
                f"got {shown(self.draft)}"
            )

    @property
    def tokens(self) -> int:
        """Tokens that a request verifies in a step."""
        return self.num_draft_tokens + 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a request says in a step."""
        return acceptance_length(self.num_draft_tokens, self.accepted)

    @property
    def draft_name(self) -> str:
        """What drafts, in a word: a model's name, ``mtp`` or ``none``."""
        return self.draft.model.name if isinstance(self.draft, StepPlan) else self.draft or "none"

    def __str__(self) -> str:
        drafted = "" if self.draft is None else f" by {self.draft_name}"
        accepted = f"{self.acceptance_length:g} tokens accepted a step"
        return f"{self.num_draft_tokens} draft tokens{drafted}, {accepted}"


class SpeculatedPlan(NamedTuple):
    """A plan as the loops of serving read it."""

    plan: StepPlan
    arena: Floats
    tokens: int = 1
    draft: StepPlan | None = None
    draft_weight_bytes: int = 0

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The target's plan, and the draft's where there is one."""
        return (self.plan,) if self.draft is None else (self.plan, self.draft)

    def whole_kv_bytes(self) -> PlanMemory:
        """What all layers and GPUs keep of a sequence, the draft's included; no weights, no room."""
        window = self.plan.memory.window
        kinds = [(plan.model, plan.kv_dtype, plan.memory.window == window) for plan in self.plans]
        held = sum(model.kv_bytes_per_token(Layout(), kv_dtype) for model, kv_dtype, _ in kinds)
        within = [window_kv_bytes(model, Layout(), kv_dtype) for model, kv_dtype, is_same in kinds if is_same]
        state = sum(model.state_bytes(Layout()) for model, _, _ in kinds)
        return PlanMemory(0, held, 0, 0, 0, window, sum(within), state)

    def memory(self, memory: PlanMemory | None = None, *, max_seqs: float | None = None) -> PlanMemory:
        """One GPU's memory with the draft in it: its weights and cache leave less room."""
        if memory is None:
            engine = self.plan.engine
            is_own = max_seqs is None or max_seqs >= engine.scheduling.max_num_seqs
            is_own = is_own or not engine.memory.sample_bytes
            memory = self.plan.memory if is_own else self.plan.memory_of(max_seqs=max_seqs)
        if self.draft is None:
            return memory
        drafts = self.draft.memory
        kv_bytes = memory.kv_bytes_per_token + drafts.kv_bytes_per_token
        room = max(memory.max_kv_tokens * memory.token_bytes - self.draft_weight_bytes, 0)
        # a separate window counts as none
        within = drafts.window_kv_bytes_per_token if drafts.window == memory.window else 0
        return memory._replace(
            weight_bytes=memory.weight_bytes + self.draft_weight_bytes,
            kv_bytes_per_token=kv_bytes,
            max_kv_tokens=room // max(kv_bytes, 1),
            window_kv_bytes_per_token=memory.window_kv_bytes_per_token + within,
            state_bytes_per_sequence=memory.state_bytes_per_sequence + drafts.state_bytes_per_sequence,
        )


def mtp_draft(plan: StepPlan, tables: Tables | None = None) -> StepPlan:
    """Compile what a model drafts with by itself: one of its layers, and its LM head, a draft token.

    Parameters
    ----------
    plan : StepPlan
        The model's.
    tables : Tables, optional
        What it was compiled from; by default the plan's own, which it no longer has once unpickled.

    Returns
    -------
    StepPlan
        Of one layer like the model's last ones, before which the token's embedding and its hidden state are
        joined by a projection, on the same GPUs and in the same dtypes.

    Raises
    ------
    PlanError
        If no tables are given.

    Notes
    -----
    As the modules of DeepSeek-V3 (arXiv:2412.19437, section 2.2), whose weights are used again for every
    draft token. A model need not have such a layer: this is what one would take.
    """
    source = plan.error_source
    tables = source.tables if tables is None else tables
    if tables is None and not source.is_datasheet:
        raise PlanError("an unpickled plan has no tables any more: draft=mtp_draft(plan, tables) takes them")
    layout = plan.layout
    with warnings.catch_warnings():
        # of the datasheet model, as the plan's own did
        warnings.simplefilter("ignore")
        return compile_plan(
            mtp_model(plan.model),
            plan.gpu,
            tables,
            tp=layout.tp,
            # the last stage drafts
            dp=layout.dp,
            ep=layout.ep,
            moe_tp=layout.moe_tp,
            dtype=plan.dtype if plan.execution.formats is None else "auto",
            kv_dtype=plan.kv_dtype,
            routing=plan.execution.routing,
            # what the plan's own layers were allowed
            allow_modelled=True,
            engine=plan.engine,
            method="roofline" if tables is None else plan.method,
            max_tokens=plan.max_tokens,
            max_seqs=plan.max_seqs,
        )


def speculated(plan: StepPlan, speculation: SpeculativeDecoding | None) -> SpeculatedPlan:
    """Lay a plan out for the loops of serving."""
    plan = plan.bottleneck
    if speculation is None:
        return SpeculatedPlan(plan, plan.arena)
    if not isinstance(speculation, SpeculativeDecoding):
        raise BatchError(f"speculation must be a SpeculativeDecoding or None, got {shown(speculation)}")
    if speculation.num_draft_tokens == 0:
        return SpeculatedPlan(plan, plan.arena)
    if plan.layout.pp > 1:
        raise PlanError(
            f"speculative decoding with pp {plan.layout.pp}: drafting stages are not modelled; use pp 1"
        )
    draft, weight_bytes = None, 0
    if isinstance(speculation.draft, StepPlan):
        draft = speculation.draft
        _check_draft(plan, draft)
        weight_bytes = draft.memory.weight_bytes
    elif speculation.draft == MTP:
        draft = mtp_draft(plan)
        (group,) = draft.model.layers
        two = replace(draft, model=replace(draft.model, layers=(replace(group, count=2),)))
        # embedding and LM head are the model's own
        weight_bytes = two.memory.weight_bytes - draft.memory.weight_bytes
    drafted = (0, None) if draft is None else (speculation.num_draft_tokens, draft)
    arena = verification_arena(plan, speculation.tokens, speculation.acceptance_length, *drafted)
    return SpeculatedPlan(plan, arena, speculation.tokens, draft, weight_bytes)


def made_from(plan: StepPlan, speculation: SpeculativeDecoding | None) -> dict[str, str]:
    """What an estimate's answers carry as metadata: the plan's, and the speculation."""
    if speculation is None:
        return plan.made_from
    return {**plan.made_from, "fastroof.speculative_decoding": str(speculation)}


def _check_draft(plan: StepPlan, draft: StepPlan) -> None:
    if draft.gpu.name != plan.gpu.name or draft.tp > plan.tp:
        raise PlanError(
            f"the draft runs on GPUs of its target, got a draft on {draft.tp} x {draft.gpu.name} for "
            f"{plan.tp} x {plan.gpu.name}"
        )
    for name in ("max_tokens", "max_seqs"):
        most, needed = getattr(draft, name), getattr(plan, name)
        if most < needed:
            raise PlanRangeError(
                f"the draft's plan times up to {most} {name[4:]} and its target's {needed}: "
                f"use compile_plan({draft.model.name!r}, ..., {name}={needed})"
            )
