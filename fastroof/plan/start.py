"""Whether an engine starts with a plan's memory, and what makes it start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from fastroof.errors import FastroofError, ModelError, PlanError
from fastroof.memory.plan_memory import NO_DRAFTS, Drafts, MemoryUse, PlanMemory, most_that_start, plan_memory
from fastroof.models.layout import TP_SIZES, Layout
from fastroof.units import GIB

if TYPE_CHECKING:
    from fastroof.plan.plan_data import PlanData

HIGH_FRACTION: Final = 0.95
"""A share of the GPU's memory that users set, to name one that makes room."""


@dataclass(frozen=True)
class Refusal:
    """Why an engine does not start.

    Attributes
    ----------
    code : str
        A: other processes hold memory that the engine asks for; B: no memory is left for blocks of KV cache;
        C: one request of the longest context needs more blocks than there are; D: more requests than blocks
        of states; E: out of memory, or perhaps, after the KV cache is taken; F: more requests than tokens in
        a step.
    reason : str
        The reason, with its numbers.
    needed, available : float
        The two numbers that do not match.
    unit : str
        Their unit: ``bytes`` or ``requests``.
    remedy : str
        What makes it start; empty if unknown.
    is_warning : bool
        Whether the engine starts nevertheless.
    """

    code: str
    reason: str
    needed: float
    available: float
    unit: str
    remedy: str = ""
    is_warning: bool = False


@dataclass(frozen=True)
class StartQuestion:
    """With which arguments an engine is started; None for its own defaults."""

    max_model_len: int | None = None
    max_seqs: int | None = None
    max_tokens: int | None = None
    prefix_caching: bool = False
    drafts: Drafts = NO_DRAFTS
    free_bytes: int | None = None

    def memory(self, plan: PlanData, max_seqs: int | None = None) -> PlanMemory:
        """Return the memory with these arguments, of some number of requests."""
        seqs = max_seqs or self.max_seqs or plan.profile.scheduling.max_num_seqs
        return plan.memory_of(
            max_tokens=self.max_tokens,
            max_seqs=seqs,
            prefix_caching=self.prefix_caching,
            drafts=self.drafts,
            lowers=False,
        )


def refusals(plan: PlanData, question: StartQuestion = StartQuestion()) -> tuple[Refusal, ...]:
    """Return why a plan's engine does not start with some arguments; empty if it does.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    question : StartQuestion
        The engine's arguments.

    Returns
    -------
    tuple of Refusal
        In the order in which the engine finds them. One that is a warning does not keep it from starting.
    """
    return tuple(_refusals(plan, question))


def _refusals(plan: PlanData, question: StartQuestion) -> Iterator[Refusal]:
    memory = question.memory(plan)
    seqs = question.max_seqs or plan.profile.scheduling.max_num_seqs
    context = question.max_model_len or plan.model.max_position
    rule = plan.profile.memory.of_model(plan.model.architecture, is_dense=plan.model.is_dense)
    tokens = question.max_tokens or seqs
    if rule.room == "all" and seqs > tokens:
        # vLLM checks it with its arguments (vllm/config/scheduler.py)
        yield Refusal(
            "F",
            f"max_num_seqs {seqs:,} is above max_num_batched_tokens {tokens:,}",
            seqs,
            tokens,
            "requests",
            f"max_num_seqs={tokens}",
        )
    if question.free_bytes is not None and question.free_bytes < memory.requested_bytes:
        share = question.free_bytes / memory.total_bytes
        yield Refusal(
            "A",
            f"{question.free_bytes / GIB:.2f} of {memory.total_bytes / GIB:.2f} GiB are free, and the "
            f"engine asks for {memory.requested_bytes / GIB:.2f} GiB",
            memory.requested_bytes,
            question.free_bytes,
            "bytes",
            f"memory_fraction={int(share * 100) / 100:g}, or end the other processes",
        )
    if memory.parts < 1:
        yield Refusal(
            "B",
            no_room(plan, memory),
            memory.missing_bytes,
            0,
            "bytes",
            what_makes_room(replace(plan, max_tokens=question.max_tokens or plan.max_tokens), seqs),
        )
        return
    needed = memory.reserved_parts(context)
    if needed > memory.parts and rule.room != "datasheet":
        longest = memory.largest_context()
        # vLLM refuses to start; SGLang and TensorRT-LLM lower the length
        is_lowered = rule.room != "all" and longest > 0
        yield Refusal(
            "C",
            f"one request of {context:,} tokens needs {needed * memory.part_bytes / GIB:.2f} GiB of KV "
            f"cache, and {memory.kv_cache_bytes / GIB:.2f} GiB are left"
            + f": requests of more than {longest:,} tokens are refused"
            * is_lowered,
            needed * memory.part_bytes,
            memory.parts * memory.part_bytes,
            "bytes",
            f"max_model_len={longest}" if longest else "",
            is_lowered,
        )
    if rule.states_limit_seqs and memory.state_parts and seqs > memory.parts:
        most = seqs_that_start(plan, question)
        yield Refusal(
            "D",
            f"max_num_seqs {seqs:,} is above the {memory.parts:,} blocks, and each request that decodes "
            "needs one for its states",
            seqs,
            memory.parts,
            "requests",
            f"max_num_seqs={most}" if most else "",
        )
    held = memory.weight_bytes + memory.adapter_bytes
    used = held + memory.context_bytes + memory.kv_cache_bytes
    if rule.cache_gib and used > memory.total_bytes:
        most_gib = (memory.total_bytes - used + memory.kv_cache_bytes - memory.activation_bytes) / GIB
        yield Refusal(
            "E",
            f"{rule.cache_gib:g} GiB of KV cache do not fit next to "
            f"{(used - memory.kv_cache_bytes) / GIB:.2f} GiB of weights and contexts in "
            f"{memory.total_bytes / GIB:.2f} GiB",
            used,
            memory.total_bytes,
            "bytes",
            f"at most {most_gib:.1f} GiB of KV cache" if most_gib > 0 else "",
        )
    after, spare = memory.graphs_high_bytes - memory.graphs_bytes, memory.total_bytes - memory.requested_bytes
    if rule.room == "all" and after > spare:
        yield Refusal(
            "E",
            f"CUDA graphs may take {after / GIB:.2f} GiB more than the engine counts, and "
            f"{spare / GIB:.2f} GiB are left outside its share",
            after,
            spare,
            "bytes",
            "a smaller memory_fraction",
            is_warning=True,
        )


def seqs_that_start(plan: PlanData, question: StartQuestion = StartQuestion()) -> int:
    """Return the most requests (``max_num_seqs``) with which an engine starts; 0 if it does with none.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    question : StartQuestion
        The engine's other arguments.
    """
    context = question.max_model_len or 1

    def memory(seqs: int) -> PlanMemory:
        return question.memory(plan, seqs)

    return most_that_start(memory, plan.profile.scheduling.max_num_seqs, context)


def cache_line_tokens(plan: PlanData, memory: PlanMemory, max_model_len: int | None = None) -> int:
    """Return the tokens of KV cache that the engine's version prints.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    memory : PlanMemory
        Its memory.
    max_model_len : int, optional
        Longest context (default: the model's).
    """
    rule = plan.profile.memory
    if not memory.token_parts:
        return 0
    if rule.kv_cache != "groups":
        return memory.max_kv_tokens
    if rule.prints_requests:
        context = max_model_len or plan.model.max_position
        return memory.parts * context // int(memory.reserved_parts(context))
    if not memory.parts_per_block:
        return memory.max_kv_tokens
    sizes = [memory.block_tokens] * bool(memory.full_parts) + [memory.window_block_tokens] * bool(
        memory.window_parts
    )
    return memory.parts // memory.groups * min(sizes)


def no_room(plan: PlanData, memory: PlanMemory) -> str:
    """Return why there is no room for KV cache."""
    uses = {
        "weights": memory.weight_bytes,
        "LoRA adapters": memory.adapter_bytes,
        "a profiling run": memory.activation_bytes,
        "contexts and collectives": memory.context_bytes,
        "CUDA graphs": memory.graphs_bytes,
    }
    uses_text = ", ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in uses.items() if size)
    return (
        f"{plan.model.name} on {plan.layout.world_size} x {plan.gpu.name}: {uses_text} leave no room for KV "
        f"cache in {memory.requested_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB a GPU"
    )


def what_makes_room(plan: PlanData, max_seqs: int, kv_len: int = 1) -> str:
    """Return which single settings make room for a request of ``kv_len`` tokens, as a text."""
    found = []
    rules = plan.profile.memory

    def fits(memory: PlanMemory) -> bool:
        return bool(memory.parts >= memory.reserved_parts(kv_len))

    seqs = most_that_start(lambda n: plan.memory_of(max_seqs=n, lowers=False), max_seqs, kv_len)
    if 0 < seqs < max_seqs:
        found.append(f"max_num_seqs={seqs} or less")
    larger = next((tp for tp in TP_SIZES if tp > plan.layout.tp and _has_room(plan, tp, max_seqs, fits)), 0)
    if larger:
        found.append(f"tp={larger}")
    if rules.room == "all" and rules.fraction < HIGH_FRACTION:
        wider = replace(plan.profile, memory=replace(rules, fraction=HIGH_FRACTION))
        if fits(replace(plan, profile=wider).memory_of(max_seqs=max_seqs)):
            found.append(f"memory_fraction={HIGH_FRACTION:g}")
    if plan.dtype == "bf16" and not found:
        found.append("a smaller dtype such as fp8")
    return " or ".join(found) or "more GPUs, or a smaller dtype or kv_dtype"


def _has_room(plan: PlanData, tp: int, max_seqs: int, fits: Callable[[PlanMemory], bool]) -> bool:
    """Whether a plan's model has room with another tp."""
    try:
        ep = 1 if plan.layout.ep == 1 else tp * plan.layout.dp
        layout = Layout(tp, plan.layout.pp, plan.layout.dp, ep, cp=plan.layout.cp)
        plan.model.check_layout(layout)
    except (PlanError, ModelError):
        return False
    use = MemoryUse(plan.memory_tokens, max_seqs)
    parts = (plan.model, layout, plan.gpu, plan.execution, use)
    return fits(plan_memory(*parts, rule=plan.profile.memory))


def check_room(
    plan: PlanData, memory: PlanMemory, max_seqs: float | None, error: type[FastroofError]
) -> None:
    """Raise if an engine has no room for KV cache, with the settings that make some."""
    if memory.parts < 1:
        limit = plan.profile.scheduling.max_num_seqs
        most = int(min(limit, limit if max_seqs is None else max_seqs))
        raise error(f"{no_room(plan, memory)}; use {what_makes_room(plan, most)}")
