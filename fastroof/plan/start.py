"""Whether an engine starts with a plan's memory, and what makes it start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.engines import KvMemory
from fastroof.errors import FastroofError, ModelError, PlanError
from fastroof.memory.gpu_memory import (
    NO_DRAFTS,
    Drafts,
    MemoryUse,
    longest_that_starts,
    most_that_start,
    plan_memory,
)
from fastroof.memory.plan_memory import PlanMemory
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
        F: more requests than tokens in a step; K: no kernel for the model on the card; A: other processes
        hold memory that the engine needs; W: weights do not fit; P: the profiling run does not fit; B: no
        memory is left for blocks of KV cache; C: one request of the longest context needs more blocks than
        there are; D: more requests than blocks of states; E: out of memory, or perhaps, after the KV cache is
        taken.
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
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    drafts: Drafts = NO_DRAFTS
    free_bytes: int | None = None

    def memory(self, plan: PlanData, max_num_seqs: int | None = None) -> PlanMemory:
        """Return the memory with these arguments, of some number of requests."""
        seqs = max_num_seqs or self.max_num_seqs or plan.profile.scheduling.max_num_seqs
        return plan.memory_of(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=seqs,
            prefix_caching=self.prefix_caching,
            drafts=self.drafts,
            lowers=False,
            max_model_len=self.max_model_len,
        )

    def length(self, plan: PlanData) -> int:
        """Return the longest context."""
        return self.max_model_len or plan.model.max_position

    def longest(self, plan: PlanData) -> int:
        """Return the longest context of which one request fits; 0 if none does."""
        return longest_that_starts(
            lambda length: replace(self, max_model_len=length).memory(plan), plan.model.max_position
        )


class Margin(NamedTuple):
    """By how much the check that decides is passed, or failed if negative, GiB; and which one it is."""

    gib: float
    code: str


def margin_of(plan: PlanData, question: StartQuestion = StartQuestion()) -> Margin:
    """Return the smallest margin of the checks of KV cache: B, C and D."""
    memory, rule = question.memory(plan), plan.profile.memory
    room = memory.kv_cache_bytes - max(memory.missing_bytes - memory.part_bytes, 0)
    if memory.state_slots and memory.missing_bytes:
        # of states
        room = -memory.missing_bytes
    margins = [Margin(room / GIB, "B")]
    if memory.parts and rule.room == "all":
        spare = memory.offered_bytes - memory.needed_bytes(question.length(plan))
        margins.append(Margin(spare / GIB, "C"))
        if rule.states_limit_seqs and memory.state_parts:
            seqs = question.max_num_seqs or plan.profile.scheduling.max_num_seqs
            margins.append(Margin((memory.parts - seqs) * memory.part_bytes / GIB, "D"))
    return min(margins)


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
    return tuple(
        one if one.remedy or one.is_warning else replace(one, remedy=_remedy(plan, question, one.code))
        for one in _checks(plan, question)
    )


def _starts(plan: PlanData, question: StartQuestion) -> bool:
    return all(one.is_warning for one in _checks(plan, question))


def _remedy(plan: PlanData, question: StartQuestion, code: str) -> str:
    """Return arguments with which the engine starts; empty if these alone are not enough."""
    seqs = question.max_num_seqs or plan.profile.scheduling.max_num_seqs
    if code in "WPB":
        tokens = question.max_num_batched_tokens or plan.max_num_batched_tokens
        return what_makes_room(replace(plan, max_num_batched_tokens=tokens), seqs)
    changes: dict[str, int] = {}
    if code == "F":
        changes["max_num_seqs"] = question.max_num_batched_tokens or 1
    elif code == "C":
        changes["max_model_len"] = question.longest(plan)
    elif code == "D":
        changes["max_num_seqs"] = seqs_that_start(plan, question)
    if not all(changes.values()):
        return ""
    changed: StartQuestion = replace(question, **changes)  # type: ignore[arg-type]
    if not _starts(plan, changed):
        most = seqs_that_start(plan, changed)
        if "max_num_seqs" in changes or not most:
            return ""
        changes["max_num_seqs"] = most
    return " and ".join(f"{name}={value}" for name, value in changes.items())


def _checks(plan: PlanData, question: StartQuestion) -> Iterator[Refusal]:
    """Yield what an engine refuses, in the order of its checks; without most remedies."""
    memory = question.memory(plan)
    seqs = question.max_num_seqs or plan.profile.scheduling.max_num_seqs
    context = question.length(plan)
    rule = plan.profile.memory.of_model(plan.model.architecture, is_dense=plan.model.is_dense)
    tokens = question.max_num_batched_tokens or seqs
    if rule.room == "all" and seqs > tokens:
        # vLLM checks it with its arguments (vllm/config/scheduler.py)
        reason = f"max_num_seqs {seqs:,} is above max_num_batched_tokens {tokens:,}"
        yield Refusal("F", reason, seqs, tokens, "requests")
    row = plan.cache_format.row
    if row is not None and not row.has_kernel and plan.model.has_sparse_attention:
        reason = f"{plan.engine} has no kernel of {plan.model.name}'s sparse attention for {plan.gpu.title}"
        yield Refusal("K", reason, 1, 0, "kernels")
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
    held = memory.weight_bytes + memory.adapter_bytes
    if rule.room != "datasheet":
        loaded = held + memory.workspace_bytes + memory.context_bytes
        for code, what, used in (
            ("W", "weights", loaded),
            ("P", "weights and the profiling run", loaded + memory.activation_bytes),
        ):
            if used > memory.total_bytes:
                reason = (
                    f"{what} take {used / GIB:.2f} GiB of a GPU, which has {memory.total_bytes / GIB:.2f} GiB"
                )
                yield Refusal(code, reason, used, memory.total_bytes, "bytes")
                break
    graph = graphs_limit(plan, memory)
    if graph and seqs > graph:
        yield Refusal(
            "D",
            f"max_num_seqs {seqs:,} is above the {graph:,} blocks with which this version profiles CUDA "
            "graphs, and it wants one for the states of each request",
            seqs,
            graph,
            "requests",
            f"max_num_seqs={graph}",
        )
    if memory.parts < 1:
        reason = no_room(plan, memory)
        if memory.state_pool_bytes:
            reason = f"the pool of states holds {memory.state_slots:,}, fewer than a running request takes"
        yield Refusal("B", reason, memory.missing_bytes, 0, "bytes")
        return
    if not memory.holds(context) and rule.room != "datasheet":
        longest = question.longest(plan)
        # vLLM refuses to start; SGLang and TensorRT-LLM lower the length
        is_lowered = rule.room != "all" and longest > 0
        yield Refusal(
            "C",
            f"one request of {context:,} tokens needs {memory.needed_bytes(context) / GIB:.2f} GiB of KV "
            f"cache, and {memory.kv_cache_bytes / GIB:.2f} GiB are left"
            + f": requests of more than {longest:,} tokens are refused"
            * is_lowered,
            memory.needed_bytes(context),
            memory.offered_bytes,
            "bytes",
            f"max_model_len={longest}" if is_lowered else "",
            is_warning=is_lowered,
        )
    if rule.states_limit_seqs and memory.state_parts and seqs > memory.parts:
        yield Refusal(
            "D",
            f"max_num_seqs {seqs:,} is above the {memory.parts:,} blocks, and each request that decodes "
            "needs one for its states",
            seqs,
            memory.parts,
            "requests",
        )
    yield from _out_of_memory_later(rule, memory, held)


def _out_of_memory_later(rule: KvMemory, memory: PlanMemory, held_bytes: int) -> Iterator[Refusal]:
    """Yield what may fail after the KV cache is reserved."""
    used = held_bytes + memory.workspace_bytes + memory.context_bytes + memory.kv_cache_bytes
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
        return
    spare = memory.total_bytes - memory.requested_bytes
    later = {
        "CUDA graphs, which this version does not count,": rule.later_graphs_gib * GIB,
        "prompts of recurrent layers": rule.later_states_gib * GIB * bool(memory.state_parts),
    }
    for what, after in later.items():
        if after > spare:
            yield Refusal(
                "E",
                f"{what} took up to {after / GIB:.2f} GiB after the KV cache in logged starts, and "
                f"{spare / GIB:.2f} GiB are left outside the engine's share",
                after,
                spare,
                "bytes",
                "a smaller memory_fraction",
                is_warning=True,
            )


def graphs_limit(plan: PlanData, memory: PlanMemory) -> int:
    """Return the most requests with which a version profiles graphs of states; 0 without a limit."""
    rule = plan.profile.memory.of_model(plan.model.architecture, is_dense=plan.model.is_dense)
    if not rule.graphs_limit_seqs or not memory.state_parts:
        return 0
    return plan.profile.data_parallel.largest_graph(plan.gpu.name)


def seqs_that_start(
    plan: PlanData, question: StartQuestion = StartQuestion(), most: int | None = None
) -> int:
    """Return the most requests (``max_num_seqs``) with which an engine starts; 0 if it does with none.

    Parameters
    ----------
    plan : StepPlan
        The model on its GPUs.
    question : StartQuestion
        The engine's other arguments.
    most : int, optional
        The most to try (default: the engine's own).
    """
    most = most or plan.profile.scheduling.max_num_seqs
    graph = graphs_limit(plan, question.memory(plan, 1))
    # engines that lower a length that does not fit need room for one token
    context = question.length(plan) if plan.profile.memory.room == "all" else 1
    return most_that_start(
        lambda seqs: question.memory(plan, seqs), min(most, graph) if graph else most, context
    )


def cache_line_tokens(rule: KvMemory, memory: PlanMemory, context: int) -> int:
    """Return the tokens of KV cache that an engine's version prints, by its longest context."""
    if not memory.token_parts:
        return 0
    if rule.kv_cache != "groups":
        return memory.max_kv_tokens
    if rule.prints_requests:
        return memory.parts * context // memory.printed_parts(context)
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
        "workspaces of sparse attention": memory.workspace_bytes,
        "contexts and collectives": memory.context_bytes,
        "CUDA graphs": memory.graphs_bytes,
    }
    uses_text = ", ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in uses.items() if size)
    return (
        f"{plan.model.name} on {plan.layout.world_size} x {plan.gpu.name}: {uses_text} leave no room for KV "
        f"cache in {memory.requested_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB a GPU"
    )


def what_makes_room(plan: PlanData, max_num_seqs: int, kv_len: int = 1) -> str:
    """Return which single settings make room for a request of ``kv_len`` tokens, as a text."""
    found = []
    rules = plan.profile.memory

    def fits(memory: PlanMemory) -> bool:
        return memory.parts > 0 and memory.holds(kv_len)

    seqs = most_that_start(lambda n: plan.memory_of(max_num_seqs=n, lowers=False), max_num_seqs, kv_len)
    if 0 < seqs < max_num_seqs:
        found.append(f"max_num_seqs={seqs} or less")
    sizes = (tp for tp in TP_SIZES if tp > plan.layout.tp)
    larger = next((tp for tp in sizes if _has_room(plan, tp, max_num_seqs, fits)), 0)
    if larger:
        found.append(f"tp={larger}")
    if rules.room == "all" and rules.fraction < HIGH_FRACTION:
        wider = replace(plan.profile, memory=replace(rules, fraction=HIGH_FRACTION))
        if fits(replace(plan, profile=wider).memory_of(max_num_seqs=max_num_seqs)):
            found.append(f"memory_fraction={HIGH_FRACTION:g}")
    if plan.dtype == "bf16" and not found:
        found.append("a smaller dtype such as fp8")
    return " or ".join(found) or "more GPUs, or a smaller dtype or kv_dtype"


def _has_room(plan: PlanData, tp: int, max_num_seqs: int, fits: Callable[[PlanMemory], bool]) -> bool:
    """Whether a plan's model has room with another tp."""
    try:
        ep = 1 if plan.layout.ep == 1 else tp * plan.layout.dp
        layout = Layout(tp, plan.layout.pp, plan.layout.dp, ep, cp=plan.layout.cp)
        plan.model.check_layout(layout)
    except (PlanError, ModelError):
        return False
    use = MemoryUse(plan.memory_tokens, max_num_seqs)
    parts = (plan.model, layout, plan.gpu, plan.execution, use)
    return fits(plan_memory(*parts, rule=plan.profile.memory))


def check_hand_over(prefill: PlanData, decode: PlanData, error: type[FastroofError]) -> None:
    """Refuse plans of which one cannot decode what the other prefilled."""
    if (prefill.model, prefill.kv_dtype) != (decode.model, decode.kv_dtype):
        one, other = (f"{plan.model.name} with {plan.kv_dtype} KV" for plan in (prefill, decode))
        raise error(f"prefill and decode need one model and kv_dtype, got {one} and {other}")


def check_room(
    plan: PlanData, memory: PlanMemory, max_num_seqs: float | None, error: type[FastroofError]
) -> None:
    """Raise if an engine has no room for KV cache, with the settings that make some."""
    if memory.parts < 1:
        limit = plan.profile.scheduling.max_num_seqs
        most = int(min(limit, limit if max_num_seqs is None else max_num_seqs))
        raise error(f"{no_room(plan, memory)}; use {what_makes_room(plan, most)}")
