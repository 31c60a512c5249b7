"""Decode attention in steps that prefill too: what a kernel that does not split the cache takes at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastroof.checks import is_number
from fastroof.engines.values import check_number
from fastroof.errors import PlanError

__all__ = ["MixedAttention"]


@dataclass(frozen=True)
class MixedAttention:
    """How long decodes attend at least in a step that also prefills.

    Its decodes take ``max(decode attention, ns x query heads of a GPU x KV tokens of all decodes x layers)``:
    one call serves chunks and decodes, which reads the cache for each query head by itself and does not split
    it. Steps of decodes alone, and of prompts alone, are not touched.

    Attributes
    ----------
    ns : float
        A query head of one GPU, KV token and layer, ns.
    interval_ns : tuple of float
        Lowest and highest that the evidence allows, ns; empty where unknown.
    gpu : str
        Of which GPU; empty for any.
    head_dim : int
        Of which size of heads; 0 for any.
    kv_dtype : str
        Of which format of the KV cache; empty for any.
    reason, evidence : str
        Why the engine's kernel does so, and which runs chose and judged the figure.
    """

    ns: float
    interval_ns: tuple[float, ...] = ()
    gpu: str = ""
    head_dim: int = 0
    kv_dtype: str = ""
    reason: str = ""
    evidence: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no time or names nothing."""
        if not is_number(self.ns) or not self.ns > 0:
            raise PlanError(f"ns of mixed_attention must be a number above 0, got {self.ns!r}")
        object.__setattr__(self, "ns", check_number("ns of mixed_attention", self.ns))
        object.__setattr__(self, "interval_ns", _interval(self.interval_ns, self.ns))
        for name in ("gpu", "kv_dtype", "reason", "evidence"):
            if not isinstance(getattr(self, name), str):
                raise PlanError(f"{name} of mixed_attention must be a text, got {getattr(self, name)!r}")
        if not isinstance(self.head_dim, int) or isinstance(self.head_dim, bool) or self.head_dim < 0:
            raise PlanError(
                f"head_dim of mixed_attention must be a whole number of at least 0, got {self.head_dim!r}"
            )

    def is_for(self, gpu: str, head_dim: int, kv_dtype: str) -> bool:
        """Whether it is known of such heads on a GPU."""
        return self.gpu in ("", gpu) and self.head_dim in (0, head_dim) and self.kv_dtype in ("", kv_dtype)


def _interval(given: Any, ns: float) -> tuple[float, ...]:
    """Two numbers with the figure between them, or none."""
    ends = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not ends:
        return ()
    if len(ends) != 2 or not all(is_number(end) for end in ends) or not 0 <= ends[0] <= ns <= ends[1]:
        raise PlanError(
            f"interval_ns of mixed_attention must be two numbers with ns = {ns:g} between them, got {given!r}"
        )
    return float(ends[0]), float(ends[1])
