"""How an engine holds and runs LoRA adapters: which layers have them, their ranks and their buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fastroof.checks import is_whole_number, whole_number
from fastroof.engines.values import MOST, check_fields
from fastroof.errors import PlanError

ANY_MODEL: Final = "any"
"""Stands for all architectures in ``embeddings``."""


@dataclass(frozen=True)
class LoraRules:
    """What an engine reserves and launches for adapters, whether a request uses one or not.

    Attributes
    ----------
    ranks : tuple of int
        Ranks that its buffers can have; empty for any. An adapter's buffers have the next larger one.
    max_loras : int
        Adapters that a step may use by default, which is as many as it holds on a GPU.
    fills : bool
        Whether a kernel zeroes what the first of both GEMMs adds to.
    gates : bool
        Whether small layers of gates and routers have adapters if all layers do.
    embeddings : tuple of str
        Architectures whose embedding and LM head have adapters if all layers do, or ``any``.
    refused : tuple of str
        Architectures that it starts without adapters only.
    splits_head : bool
        Whether each GPU has only its rows of the LM head's adapters.
    source : str
        Files that the rules were read in.
    """

    ranks: tuple[int, ...] = ()
    max_loras: int = 1
    fills: bool = False
    gates: bool = True
    embeddings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    splits_head: bool = True
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        ranks = self.ranks
        if not isinstance(ranks, list | tuple) or not all(is_whole_number(rank) for rank in ranks):
            raise PlanError(f"ranks must be whole numbers of at least 1, got {ranks!r}")
        object.__setattr__(self, "ranks", tuple(sorted(ranks)))
        whole_number("max_loras", self.max_loras, most=MOST, error=PlanError)
        check_fields(self)

    def adapts_embeddings(self, architecture: str) -> bool:
        """Return whether a model's embedding and LM head have adapters if all layers do."""
        return ANY_MODEL in self.embeddings or architecture in self.embeddings


ANY_LORA: Final = LoraRules()
"""Rules without an engine."""
