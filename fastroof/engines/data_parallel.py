"""How an engine runs ranks of attention data parallelism: which wait for each other, what experts compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fastroof.checks import one_of, whole_number
from fastroof.engines.values import MOST, check_fields, includes_newest, of_version
from fastroof.errors import PlanError

LOCKSTEPS: Final = ("experts", "all")
"""Which ranks step together: only those that share routed experts, or also those of dense models."""

PADDINGS: Final = ("sum", "fullest", "graphs", "half_full")
"""Tokens that experts compute: those of all ranks, or for each rank the fullest rank's: always, in steps
that run as CUDA graphs, or if the ranks together have at least half of that."""

ASSIGNMENTS: Final = ("least_load", "round_robin", "fewest_tokens")
"""How a request gets its rank: least loaded (a waiting request counts as four running ones), round robin, or
fewest tokens to compute among ranks with room for it."""


@dataclass(frozen=True)
class GraphTokens:
    """The largest CUDA graph of some GPUs, in a range of versions; empty for any version.

    Attributes
    ----------
    gpus : tuple of str
        The GPUs.
    tokens : int
        Maximum tokens of a step that runs as CUDA graphs.
    versions : str
        Range of the engine's versions.
    """

    gpus: tuple[str, ...]
    tokens: int
    versions: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("tokens", self.tokens, most=MOST, error=PlanError)


@dataclass(frozen=True)
class DataParallel:
    """Ranks of attention data parallelism.

    Attributes
    ----------
    lockstep : str
        ``experts``: ranks that share routed experts start their steps together, and ranks of dense models are
        replicas; ``all``: ranks of dense models start their steps together too.
    prompt_tokens, decode_tokens : str
        Tokens that experts compute in a step in which a rank has a prompt, and in a decode-only step:
        ``sum``, ``fullest``, ``graphs`` or ``half_full`` (:data:`PADDINGS`).
    graph_tokens : int
        Maximum tokens of a rank's step that runs as CUDA graphs, for ``graphs``.
    graphs : tuple of GraphTokens
        The same on some GPUs, in ranges of versions.
    idle_tokens : int
        Tokens of a rank without requests in a step of the others: 1 if it runs a dummy request.
    assignment : str
        How a request gets its rank: ``least_load``, ``round_robin`` or ``fewest_tokens``
        (:data:`ASSIGNMENTS`).
    balance_steps : int
        Prompts wait until every rank has one, until a rank has no decodes, or at most this many steps; 0: no
        wait.
    source : str
        Files and versions that this was read in, and versions that were not read.
    """

    lockstep: str = "experts"
    prompt_tokens: str = "sum"
    decode_tokens: str = "sum"
    graph_tokens: int = 0
    graphs: tuple[GraphTokens, ...] = ()
    idle_tokens: int = 1
    assignment: str = "least_load"
    balance_steps: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        one_of("lockstep", self.lockstep, LOCKSTEPS, PlanError)
        for name in ("prompt_tokens", "decode_tokens"):
            one_of(name, getattr(self, name), PADDINGS, PlanError)
        one_of("assignment", self.assignment, ASSIGNMENTS, PlanError)
        for name, most in (("graph_tokens", MOST), ("idle_tokens", 1), ("balance_steps", MOST)):
            whole_number(name, getattr(self, name), least=0, most=most, error=PlanError)
        check_fields(self)

    def at(self, version: str) -> DataParallel:
        """Return the rules of one of the engine's versions; those of all versions if it is empty."""
        kept = of_version(self.graphs, version)
        return self if kept == self.graphs else replace(self, graphs=kept)

    def largest_graph(self, gpu: str) -> int:
        """Return the maximum tokens of a step that runs as CUDA graphs on a GPU, in the newest version."""
        known = (one.tokens for one in self.graphs if gpu in one.gpus and includes_newest(one.versions))
        return next(known, self.graph_tokens)


ONE_SUM: Final = DataParallel()
"""Experts compute the tokens of all ranks in every step: the default of profiles without this part."""
