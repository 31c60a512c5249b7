"""Layouts that an engine accepts, and what its GPUs send each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, one_of
from fastroof.engines.values import check_fields
from fastroof.errors import PlanError

EP_SIZES: Final = ("any", "one_or_all")
"""Valid groups of experts: any that divide the GPUs of a stage, or one, or as many as GPUs."""

ATTENTION_SPLITS: Final = ("both", "tp_or_dp")
"""Whether attention can be split by tp and data parallelism together."""

ALLTOALL_RULES: Final = ("asked", "over_topk")
"""When tokens are sent only to their experts unless a plan sets it: never, or on some GPUs if groups of
experts outnumber the experts of a token."""

TOKEN_SHARES: Final = ("never", "with_ep", "always")
"""When each GPU of a rank takes a share of the rank's tokens to the experts, if attention is split by tp and
dp together; ``with_ep``: only with expert groups."""

ATTENTION_SUMS: Final = ("all_reduce", "reduce_scatter")
"""How attention outputs are summed if tokens are then shared."""


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
        allowed = {
            "ep": EP_SIZES,
            "attention": ATTENTION_SPLITS,
            "alltoall": ALLTOALL_RULES,
            "token_shares": TOKEN_SHARES,
            "attention_sum": ATTENTION_SUMS,
        }
        check_fields(self, but=allowed)
        for name, choices in allowed.items():
            one_of(name, getattr(self, name), choices, PlanError)
        if not is_whole_number(self.wide_experts_over):
            raise PlanError(
                f"wide_experts_over must be a whole number of at least 1, got {self.wide_experts_over!r}"
            )
        object.__setattr__(self, "two_batches_from", _two_tokens(self.two_batches_from))
        object.__setattr__(self, "gathered_bytes", _element_bytes(self.gathered_bytes))

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
