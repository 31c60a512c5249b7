"""Speculative decoding: tokens verified and accepted per step, and the time of drafting."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fastroof.acceptance import AUTO, MTP, acceptance_length, check_accepted
from fastroof.arrays import Floats
from fastroof.checks import check_flag, shown
from fastroof.errors import BatchError, PlanError, PlanRangeError
from fastroof.memory.gpu_memory import NO_DRAFTS, Drafts
from fastroof.memory.plan_memory import PlanMemory
from fastroof.memory.workspaces import model_kv_bytes
from fastroof.models import Layout, ModelSpec
from fastroof.models.draft_heads import EAGLE3, HeadLayer, Passes, alone, head_of
from fastroof.models.mtp import mtp_model
from fastroof.plan.acceptance_curves import accepted_auto
from fastroof.plan.arena import verification_arena
from fastroof.plan.compile import compile_plan
from fastroof.plan.step_plan import StepPlan
from fastroof.units import ACTIVATION_BYTES

if TYPE_CHECKING:
    from fastroof.tables import Tables


@dataclass(frozen=True)
class SpeculativeDecoding:
    """Speculative decoding: each request verifies draft tokens in a step and keeps the accepted ones.

    Attributes
    ----------
    num_draft_tokens : int
        Tokens drafted per request before a step; the request verifies them plus one token of its own.
    accepted : float, tuple of float or "auto"
        Mean tokens that a request produces per step, its own included: what engines log as mean acceptance
        length. Or the acceptance rate of each position, as vLLM logs them: the share of drafts whose token at
        that position was accepted, with all before it. The acceptance length is then 1 plus their sum.
        ``"auto"`` is the acceptance length measured for the plan's model, if there is one.
    draft : StepPlan, str or None
        The draft: the plan of a second, smaller model or of a draft head (EAGLE-3, DFlash, DSpark), at its
        own tp; ``"mtp"``, the model's own multi-token prediction layer (:func:`mtp_draft`); None if drafts
        take no time (n-grams).
    accepted_from : str
        What an acceptance length of ``"auto"`` was measured on, in the result of :meth:`for_model`.

    Raises
    ------
    BatchError
        If a number is invalid.
    PlanError
        If the draft is of another type.

    Examples
    --------
    >>> from fastroof import SpeculativeDecoding
    >>> SpeculativeDecoding(3, accepted=(0.8, 0.5, 0.25)).acceptance_length
    2.55
    """

    num_draft_tokens: int
    accepted: float | tuple[float, ...] | str
    draft: StepPlan | str | None = None
    accepted_from: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_accepted(self.num_draft_tokens, self.accepted)
        if isinstance(self.accepted, list):
            object.__setattr__(self, "accepted", tuple(self.accepted))
        draft = self.draft
        if not (draft is None or isinstance(draft, StepPlan) or (isinstance(draft, str) and draft == MTP)):
            raise PlanError(
                f"draft must be a StepPlan, {MTP!r} for the model's own layer, or None; "
                f"got {shown(self.draft)}"
            )

    @property
    def tokens(self) -> int:
        """Tokens that a request verifies per step."""
        return self.num_draft_tokens + 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a request produces per step; with ``"auto"`` see :meth:`for_model`."""
        if self.accepted == AUTO:
            raise BatchError("accepted='auto' depends on the model; use speculation.for_model(name) first")
        return acceptance_length(self.num_draft_tokens, self.accepted)

    def for_model(self, model: str) -> SpeculativeDecoding:
        """Replace an acceptance length of ``"auto"`` by the one measured for a model.

        Parameters
        ----------
        model : str
            The target model's name.

        Returns
        -------
        SpeculativeDecoding
            Itself if its acceptance length is given.

        Raises
        ------
        BatchError
            If none was measured for the model, the draft or the number of draft tokens.

        Examples
        --------
        >>> from fastroof import SpeculativeDecoding
        >>> SpeculativeDecoding(3, "auto", draft="mtp").for_model("glm-5.2-fp8").acceptance_length
        2.99
        """
        if self.accepted != AUTO:
            return self
        if self.num_draft_tokens == 0:
            return replace(self, accepted=1.0)
        length, source = accepted_auto(model, self.num_draft_tokens, self.draft)
        return replace(self, accepted=length, accepted_from=source)

    @property
    def draft_name(self) -> str:
        """Name of the draft: a model's name, ``mtp`` or ``none``."""
        return self.draft.model.name if isinstance(self.draft, StepPlan) else self.draft or "none"

    @property
    def facts(self) -> dict[str, Any]:
        """Its numbers and draft by the names of options, in answers as JSON."""
        facts = {
            "num_draft_tokens": self.num_draft_tokens,
            "accepted": self.acceptance_length,
            "draft": self.draft_name,
        }
        return facts | ({"accepted_from": self.accepted_from} if self.accepted_from else {})

    def __str__(self) -> str:
        drafted = "" if self.draft is None else f" by {self.draft_name}"
        if self.accepted == AUTO:
            return f"{self.num_draft_tokens} draft tokens{drafted}, accepted as measured"
        source = f" ({self.accepted_from})" if self.accepted_from else ""
        accepted = f"{self.acceptance_length:g} tokens accepted a step{source}"
        return f"{self.num_draft_tokens} draft tokens{drafted}, {accepted}"


class SpeculatedPlan(NamedTuple):
    """A plan with its draft as the loops of serving read it."""

    plan: StepPlan
    arena: Floats
    tokens: int = 1
    draft: StepPlan | None = None
    draft_weight_bytes: int = 0
    accepted: float = 1.0

    @property
    def passes(self) -> Passes:
        """The draft's passes around a step."""
        return Passes.of(None if self.draft is None else head_of(self.draft.model), self.tokens - 1)

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The target's plan, and the draft's if it has one."""
        return (self.plan,) if self.draft is None else (self.plan, self.draft)

    def whole_kv_bytes(self) -> PlanMemory:
        """Return the cache bytes of a sequence over all layers and GPUs, with the draft's; no weights."""
        window = self.plan.memory.window
        held = sum(model_kv_bytes(plan.model, Layout(), plan.cache_format) for plan in self.plans)
        within = sum(
            model_kv_bytes(plan.model, Layout(), plan.cache_format, windowed=True)
            for plan in self.plans
            if plan.memory.window == window
        )
        state = sum(plan.model.state_bytes(Layout()) for plan in self.plans)
        return PlanMemory.of_sequence(held, window, within, state)

    @property
    def drafts(self) -> Drafts:
        """What the draft takes of the memory."""
        return (
            drafts_of(self.draft, self.draft_weight_bytes, self.tokens - 1) if self.tokens > 1 else NO_DRAFTS
        )

    def memory(
        self,
        *,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: float | None = None,
        prefix_caching: bool | None = None,
    ) -> PlanMemory:
        """Return one GPU's memory including the draft, whose weights and cache reduce the capacity."""
        given: dict[str, Any] = {
            "max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs,
            "prefix_caching": prefix_caching,
        }  # fmt: skip
        if self.tokens == 1 and all(value is None for value in given.values()):
            return self.plan.memory
        return self.plan.memory_of(**given, drafts=self.drafts)


def mtp_draft(plan: StepPlan, tables: Tables | None = None) -> StepPlan:
    """Compile a model's own draft: one of its layers and its LM head per draft token.

    Parameters
    ----------
    plan : StepPlan
        The model's plan.
    tables : Tables, optional
        The tables it was compiled from (default: the plan's own, which an unpickled plan lacks).

    Returns
    -------
    StepPlan
        A plan of one layer like the model's last ones, preceded by a projection that joins the token's
        embedding and its hidden state, on the same GPUs and in the same dtypes.

    Raises
    ------
    PlanError
        If there are no tables.

    Notes
    -----
    As the modules of DeepSeek-V3 (arXiv:2412.19437, section 2.2), whose weights are reused for every
    draft token. A model need not have such a layer: this is what one would cost.
    """
    source = plan.error_source
    tables = source.tables if tables is None else tables
    if tables is None and not source.is_datasheet:
        raise PlanError("an unpickled plan has no tables; use draft=mtp_draft(plan, tables)")
    return compiled_like(plan, mtp_model(plan.model), tables)


def compiled_like(
    plan: StepPlan, model: ModelSpec, tables: Tables | None, dtype: str | None = None
) -> StepPlan:
    """Compile another model on a plan's GPUs, in its dtypes or another."""
    layout = plan.layout
    if dtype is None:
        dtype = plan.dtype if plan.execution.formats is None else "auto"
    with warnings.catch_warnings():
        # from the datasheet model, as the plan's own
        warnings.simplefilter("ignore")
        return compile_plan(
            model,
            plan.gpu,
            tables,
            tp=layout.tp,
            # the last stage drafts
            dp=layout.dp,
            ep=layout.ep,
            moe_tp=layout.moe_tp,
            dtype=dtype,
            kv_dtype=plan.kv_dtype,
            routing=plan.execution.routing,
            # what the plan's layers were allowed to use
            allow_modelled=True,
            engine=plan.profile,
            method="roofline" if tables is None else plan.method,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_num_seqs=plan.max_num_seqs,
        )


def draft_of(plan: StepPlan, draft: StepPlan | str | None) -> tuple[StepPlan | None, int]:
    """Return the plan of a draft's passes, and the bytes of its weights on a GPU; None and 0 without."""
    if isinstance(draft, StepPlan):
        _check_draft(plan, draft)
        head = head_of(draft.model)
        if head is None:
            return draft, draft.memory.weight_bytes
        if head.target_hidden != plan.model.hidden:
            raise PlanError(
                f"{draft.model.name} drafts from hidden states of {head.target_hidden:,} numbers, and those "
                f"of {plan.model.name} have {plan.model.hidden:,}: use a head that was trained for it"
            )
        source = draft.error_source
        if source.tables is None and not source.is_datasheet:
            raise PlanError("an unpickled plan of a draft head has no tables; compile it again")
        passes = compiled_like(draft, alone(draft.model), source.tables)
        return passes, _head_bytes(plan, draft, head)
    if draft != MTP:
        return None, 0
    mtp = mtp_draft(plan)
    (group,) = mtp.model.layers
    two = replace(mtp, model=replace(mtp.model, layers=(replace(group, count=2),)))
    # embedding and LM head are shared with the model
    return mtp, two.memory.weight_bytes - mtp.memory.weight_bytes


def _head_bytes(plan: StepPlan, draft: StepPlan, head: HeadLayer) -> int:
    """Return the weights of a draft head on a GPU: its embedding, and a whole LM head, are its target's.

    vLLM shares them where they are equal, and SGLang takes the target's.
    """
    model, layout = draft.model, draft.layout
    memory, rows = draft.memory, model.padded_vocab(layout.tp) // layout.tp
    shared = rows * model.hidden * ACTIVATION_BYTES
    if model.vocab == plan.model.vocab and head.method != EAGLE3:
        shared *= 1 if model.tie_embeddings else 2
    copied = head.copied_weights(model.hidden, layout) if plan.engine == "vllm" else 0
    return memory.weight_bytes - shared + copied * ACTIVATION_BYTES


def drafts_of(draft: StepPlan | None, weight_bytes: int, tokens: int) -> Drafts:
    """Return what a draft takes of the memory of its target."""
    models = () if draft is None else ((draft.model, draft.layout, draft.kv_dtype),)
    return Drafts(models, weight_bytes, tokens)


def speculated(plan: StepPlan, speculation: SpeculativeDecoding | None) -> SpeculatedPlan:
    """Lay out a plan for the loops of serving."""
    plan = plan.bottleneck
    if speculation is None:
        return SpeculatedPlan(plan, plan.arena)
    if not isinstance(speculation, SpeculativeDecoding):
        raise BatchError(f"speculation must be a SpeculativeDecoding or None, got {shown(speculation)}")
    if speculation.num_draft_tokens == 0:
        return SpeculatedPlan(plan, plan.arena)
    if plan.layout.pp > 1:
        raise PlanError(
            f"speculative decoding with pp {plan.layout.pp}: drafting across stages is not modelled; use pp 1"
        )
    accepted = speculation.for_model(plan.model.name).acceptance_length
    draft, weight_bytes = draft_of(plan, speculation.draft)
    joined = speculation.draft if isinstance(speculation.draft, StepPlan) else None
    arena = verification_arena(plan, speculation.tokens, accepted, draft, joined)
    return SpeculatedPlan(plan, arena, speculation.tokens, draft, weight_bytes, accepted)


def made_from(plan: StepPlan, speculation: SpeculativeDecoding | None) -> dict[str, str]:
    """Return the metadata of an estimate's answers: the plan's, and the speculation."""
    if speculation is None:
        return plan.made_from
    return {
        **plan.made_from,
        "fastroof.speculative_decoding": str(speculation.for_model(plan.model.name)),
    }


def _check_draft(plan: StepPlan, draft: StepPlan) -> None:
    if draft.gpu.name != plan.gpu.name or draft.tp > plan.tp:
        raise PlanError(
            f"the draft must run on GPUs of its target, got a draft on {draft.tp} x {draft.gpu.name} for "
            f"{plan.tp} x {plan.gpu.name}"
        )
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        most, needed = getattr(draft, name), getattr(plan, name)
        if most < needed:
            raise PlanRangeError(
                f"the draft's plan times up to {most} {name.rpartition('_')[2]} and its target's {needed}: "
                f"use compile_plan({draft.model.name!r}, ..., {name}={needed})"
            )


def check_errors(with_error: bool, tokens: int) -> None:
    """Reject standard errors of steps that verify draft tokens."""
    check_flag("with_error", with_error, BatchError)
    if with_error and tokens > 1:
        raise BatchError("with_error requires speculation=None: verification steps were not measured")
