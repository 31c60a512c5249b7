"""How an engine makes steps of requests, and how much it has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import is_number, one_of, shown, whole_number
from fastroof.engines.profile import STEP_ORDERS
from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

MOST_BLOCKS: Final = 2**40
"""More blocks of KV cache than any engine has."""

MOST_SLOTS: Final = 2**16
"""Most requests that an engine runs at once."""

MOST_BLOCK_TOKENS: Final = 2**16
"""Most tokens of a block."""

_FLAGS: Final = ("chunked_prefill", "admit_whole_prompt", "reserve_output", "async_scheduling")


MOST_STEP_TOKENS: Final = 2**40
"""More than any plan has."""


@dataclass(frozen=True)
class EngineSettings:
    """How one engine schedules.

    Attributes
    ----------
    max_num_batched_tokens : int
        New tokens of a step at most, of all its requests.
    max_num_seqs : int
        Requests that run at once at most.
    num_gpu_blocks : int
        Blocks of KV cache that requests can have. vLLM never gives one of those that it prints to a request.
    block_size : int
        Tokens of a block.
    order : str
        ``mixed``: prompts share steps with decodes; ``prefill_first``: a step is prompts alone while there is
        one to compute, else decodes alone.
    chunked_prefill : bool
        Whether prompts are cut where a step has no room for the whole.
    admit_whole_prompt : bool
        Whether a request starts only when all of its prompt has room, though it takes blocks chunk by chunk.
    reserve_output : bool
        Whether a request takes the blocks of its prompt and its whole output when it starts, so that none is
        ever preempted.
    async_scheduling : bool
        Whether a step is scheduled while the one before it runs: arrivals, free places and free blocks are
        seen a step late.
    timeout_s : float
        Seconds after its arrival at which a client gives up a request that it does not have in full.

    Raises
    ------
    SimulationError
        If one is no such number, or they contradict each other.

    Examples
    --------
    >>> EngineSettings(2048, 256, 10_000).block_size
    16
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    num_gpu_blocks: int
    block_size: int = 16
    order: str = "mixed"
    chunked_prefill: bool = True
    admit_whole_prompt: bool = True
    reserve_output: bool = False
    async_scheduling: bool = False
    timeout_s: float = math.inf

    def __post_init__(self) -> None:
        """Refuse what no engine does."""
        for name, most in (
            ("max_num_batched_tokens", MOST_STEP_TOKENS),
            ("max_num_seqs", MOST_SLOTS),
            ("num_gpu_blocks", MOST_BLOCKS),
            ("block_size", MOST_BLOCK_TOKENS),
        ):
            whole = whole_number(name, getattr(self, name), most=most, error=SimulationError)
            object.__setattr__(self, name, whole)
        one_of("order", self.order, STEP_ORDERS, SimulationError)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise SimulationError(f"{name} must be true or false, got {shown(getattr(self, name))}")
        timeout_s = self.timeout_s
        is_time = isinstance(timeout_s, Real) and timeout_s == math.inf
        if not is_time and (not is_number(timeout_s) or timeout_s <= 0.0):
            raise SimulationError(
                f"timeout_s must be seconds above 0, or inf for none; got {shown(timeout_s)}"
            )
        object.__setattr__(self, "timeout_s", float(timeout_s))
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise SimulationError(
                f"max_num_seqs {self.max_num_seqs:,} must not be above max_num_batched_tokens "
                f"{self.max_num_batched_tokens:,}: a step has a token for each running request"
            )
        if self.order == "prefill_first" and not self.admit_whole_prompt:
            raise SimulationError(
                "prompts that run ahead of decodes are admitted whole; leave admit_whole_prompt on"
            )

    @classmethod
    def of_plan(cls, plan: StepPlan, **given: Any) -> EngineSettings:
        """Return what was given, and of the rest what the plan's engine and its memory say.

        Parameters
        ----------
        plan : StepPlan
            Its engine's profile schedules; its memory has so many blocks.
        **given
            Attributes of :class:`EngineSettings`; None and what is left out are the engine's own.

        Raises
        ------
        SimulationError
            If one is no such setting, steps are larger than the plan, or its memory has no room.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), runtime="vllm")
        >>> settings = EngineSettings.of_plan(plan, max_num_seqs=128)
        >>> settings.max_num_seqs, settings.max_num_batched_tokens, settings.async_scheduling
        (128, 8192, True)
        """
        from fastroof.plan.compile import check_plan

        check_plan("plan", plan, SimulationError)
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise SimulationError(
                f"an engine has no setting {', '.join(sorted(unknown))}; "
                f"it has {', '.join(cls.__dataclass_fields__)}"
            )
        own, memory = plan.engine.scheduling, plan.engine.memory
        settings: dict[str, Any] = {
            "max_num_batched_tokens": own.max_num_batched_tokens,
            "max_num_seqs": own.max_num_seqs,
            "block_size": memory.block_tokens,
            "order": own.order,
            "chunked_prefill": own.chunked_prefill,
            "reserve_output": memory.kv_reservation == "full",
            "async_scheduling": own.async_scheduling,
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        # checked before memory is asked about them
        known = cls(**{"num_gpu_blocks": 1, **settings})
        for name, most in (("max_num_batched_tokens", plan.max_tokens), ("max_num_seqs", plan.max_seqs)):
            if getattr(known, name) > most:
                limit = "max_tokens" if name == "max_num_batched_tokens" else "max_seqs"
                raise SimulationError(
                    f"{name} {getattr(known, name):,} is above the plan's {limit} {most:,}: compile it with "
                    f"{limit}={getattr(known, name)}"
                )
        if "num_gpu_blocks" in settings:
            return known
        return replace(known, num_gpu_blocks=_blocks_of(plan, known))


def _blocks_of(plan: StepPlan, settings: EngineSettings) -> int:
    """Blocks that a plan's memory has room for beside weights and the states of running requests."""
    memory = plan.memory_of(max_seqs=settings.max_num_seqs)
    if not memory.kv_bytes_per_token:
        return MOST_BLOCKS
    tokens = memory.max_kv_tokens
    if memory.state_bytes_per_sequence:
        tokens = memory.tokens_beside_states(settings.max_num_seqs)
    blocks = tokens // settings.block_size
    if blocks < 1:
        raise SimulationError(
            f"{plan.model.name} on {plan.gpu.name} at tp {plan.tp} leaves no room for KV cache beside "
            f"{memory.weight_bytes / 1e9:.1f} GB of weights; split it over more GPUs, or give num_gpu_blocks"
        )
    return min(blocks, MOST_BLOCKS)
