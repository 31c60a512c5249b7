"""Steps with prompts that an engine replays from CUDA graphs, padding tokens to a captured number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastroof.engines.values import check_range, check_size, check_text, holds_for
from fastroof.errors import PlanError


@dataclass(frozen=True)
class PrefillGraphs:
    """The number of tokens to which an engine pads a prefill step.

    Attributes
    ----------
    multiples : tuple of (int, int)
        Pairs of a maximum number of tokens, rising, and the multiple captured up to it: ``((32, 4), (256,
        16))``. A step of more tokens than the last is neither replayed nor padded.
    versions : str
        Range of engine versions within the profile's; empty for all of them. Graphs with a range
        apply only to a profile loaded for a version, as ``sglang-0.5.14``.
    reason : str
        Where this was read.
    """

    multiples: tuple[tuple[int, int], ...]
    versions: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        """Reject invalid multiples."""
        for key in ("versions", "reason"):
            check_text(f"{key} of prefill_graphs", getattr(self, key))
        check_range(self.versions)
        object.__setattr__(self, "multiples", _multiples(self.multiples))

    def padded(self, tokens: int) -> int:
        """Return the tokens that a step of ``tokens`` runs.

        Examples
        --------
        >>> graphs = PrefillGraphs(((32, 4), (256, 16)))
        >>> [graphs.padded(tokens) for tokens in (1, 32, 33, 256, 257)]
        [4, 32, 48, 256, 257]
        """
        for most, multiple in self.multiples:
            if tokens <= most:
                return -(-tokens // multiple) * multiple
        return tokens

    def of_version(self, version: str) -> PrefillGraphs | None:
        """Return the graphs as of an engine version; None outside its range."""
        if not self.versions:
            return self
        return replace(self, versions="") if holds_for(self.versions, version) else None


def _multiples(given: Any) -> tuple[tuple[int, int], ...]:
    """Return checked pairs of a rising number of tokens and the multiple up to it."""
    pairs = given if isinstance(given, list | tuple) else ()
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise PlanError(
            f"multiples of prefill_graphs must be pairs such as [[32, 4], [256, 16]], got {given!r}"
        )
    last = 0
    for most, multiple in pairs:
        check_size("a number of tokens in multiples", most)
        check_size("a multiple of tokens", multiple)
        if most <= last or most % multiple:
            raise PlanError(
                f"multiples of prefill_graphs must rise, each a multiple of its second number, got {given!r}"
            )
        last = most
    return tuple((most, multiple) for most, multiple in pairs)
