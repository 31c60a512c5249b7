"""Which layouts an engine accepts for a mixture of experts, and what its GPUs send each other in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number
from fastroof.errors import PlanError

__all__ = ["ALLTOALL_RULES", "ANY_LAYOUT", "ATTENTION_SPLITS", "EP_SIZES", "LayoutRules"]

EP_SIZES: Final = ("any", "one_or_all")
"""Groups of experts: any that the GPUs of a stage divide by, or one, or as many as GPUs."""

ATTENTION_SPLITS: Final = ("both", "tp_or_dp")
"""Whether attention can be split by tp and data parallel at once."""

ALLTOALL_RULES: Final = ("asked", "over_topk")
"""When tokens are sent to their experts alone unless a plan says how: never, or on some GPUs where groups of
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
        """Refuse what is no rule."""
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
                if value not in allowed[key.name]:
                    choices = ", ".join(allowed[key.name])
                    raise PlanError(f"{key.name} must be one of {choices}, got {value!r}")
            elif key.name == "wide_experts_over":
                if not is_whole_number(value):
                    raise PlanError(f"wide_experts_over must be a whole number of at least 1, got {value!r}")
            elif key.name == "two_batches_from":
                object.__setattr__(self, key.name, _two_tokens(value))
            elif key.name == "gathered_bytes":
                object.__setattr__(self, key.name, _element_bytes(value))
            elif isinstance(key.default, bool):
                if not isinstance(value, bool):
                    raise PlanError(f"{key.name} must be true or false, got {value!r}")
            elif isinstance(key.default, str):
                if not isinstance(value, str):
                    raise PlanError(f"{key.name} must be a text, got {value!r}")
            else:
                if isinstance(value, str) or not all(isinstance(name, str) for name in value):
                    raise PlanError(f"{key.name} must be a list of names, got {value!r}")
                object.__setattr__(self, key.name, tuple(value))

    def obstacles(self, engine: str, sizes: Mapping[str, int]) -> list[str]:
        """Say why an engine does not run a mixture of experts so, each with what would do."""
        tp, dp, ep = (sizes[name] for name in ("tp", "dp", "ep"))
        ranks, reasons = tp * dp, []
        if self.ep == "one_or_all" and ep not in (1, ranks):
            reasons.append(
                f"{engine} splits experts over all GPUs of a stage or none: ep {ep} of tp {tp} x dp {dp} "
                f"would have to be 1 or {ranks}"
            )
        if self.attention == "tp_or_dp" and tp > 1 and dp > 1:
            reasons.append(
                f"{engine} splits attention by tp or data parallel, not by both: "
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
            f"gathered_bytes must be a table of formats and bytes an element, 0.01 to 2: "
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
"""Of no engine: every layout that fills its GPUs."""
