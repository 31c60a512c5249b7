"""Steps with prompts that an engine replays from graphs, whose tokens it pads to a captured number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastroof.engines.values import check_range, check_size, check_text, holds_for
from fastroof.errors import PlanError


@dataclass(frozen=True)
class PrefillGraphs:
    """Number of tokens that an engine pads a prefill step to.

    Attributes
    ----------
    multiples : tuple of (int, int)
        Up to how many tokens, rising, the captured numbers are multiples of what: ``((32, 4), (256, 16))``. A
        step of more tokens than the last is not replayed, and not padded.
    versions : str
        Of which versions of the engine, a range within the profile's; empty for all of them. One with a range
        counts in a profile that was loaded for a version, as ``sglang-0.5.14``.
    reason : str
        Where that was read.
    """

    multiples: tuple[tuple[int, int], ...]
    versions: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse what names no numbers of tokens."""
        for key in ("versions", "reason"):
            check_text(f"{key} of prefill_graphs", getattr(self, key))
        check_range(self.versions)
        object.__setattr__(self, "multiples", _multiples(self.multiples))

    def padded(self, tokens: int) -> int:
        """Tokens that a step of so many runs.

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
        """Return the graphs as a version of the engine has them; None if its range does not hold it."""
        if not self.versions:
            return self
        return replace(self, versions="") if holds_for(self.versions, version) else None


def _multiples(given: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of a number of tokens, rising, and what it and those below it are multiples of."""
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
