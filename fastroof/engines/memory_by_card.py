"""Memory rules that depend on the card and the model: cache formats, workspaces, padded experts, states.

Each is a row with conditions: versions, cards (a name, or a generation such as ``sm9``) and architectures;
empty for any. The first row whose conditions hold counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

from fastroof.checks import is_whole_number, one_of, shown
from fastroof.engines.values import check_fields, includes_newest
from fastroof.errors import PlanError


class Card(Protocol):
    """The part of a card that rules read."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def generation(self) -> str:
        """Its architecture: ``sm9``."""


@dataclass(frozen=True)
class CardRule:
    """Conditions of a row."""

    versions: str = ""
    cards: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for key in fields(self):
            # multiples and numbers of states are divided by
            value = getattr(self, key.name)
            if key.type == "float" and key.default and value < 1:
                raise PlanError(f"{key.name} must be at least 1, got {shown(value)}")

    def holds(self, card: Card, architecture: str) -> bool:
        """Return whether the row counts for a model on a card, in the version of its rule."""
        of_card = not self.cards or card.name in self.cards or card.generation in self.cards
        return (
            of_card
            and includes_newest(self.versions)
            and (not self.architectures or architecture in self.architectures)
        )


_Row = TypeVar("_Row", bound=CardRule)


def first_row(rows: Iterable[_Row], card: Card, architecture: str) -> _Row | None:
    """Return the first row that counts, or None."""
    return next((one for one in rows if one.holds(card, architecture)), None)


@dataclass(frozen=True)
class SparseCache(CardRule):
    """What the kernel of sparse latent attention stores of a token in a layer.

    Attributes
    ----------
    kv_dtypes : tuple of str
        Requested formats; empty for any.
    name : str
        Name of the layout.
    row_bytes : int
        Bytes of the latent vector with its scales; 0 for those of the format.
    gathers : bool
        Whether prompts are gathered in bf16 in a workspace that grows with the longest context.
    all_layers : bool
        Whether an indexer's key counts in layers that share another's, too.
    has_kernel : bool
        Whether there is a kernel at all.
    """

    kv_dtypes: tuple[str, ...] = ()
    name: str = ""
    row_bytes: float = 0.0
    gathers: bool = False
    all_layers: bool = False
    has_kernel: bool = True


@dataclass(frozen=True)
class AutoCache(CardRule):
    """Whether ``auto`` means fp8 or bf16 for the KV cache where it is not the checkpoint's format."""

    fp8: bool = False


@dataclass(frozen=True)
class KvFormat(CardRule):
    """A further format of the KV cache that the engine has for keys and values of heads.

    Attributes
    ----------
    name : str
        The format.
    head_dims : tuple of int
        Widths of heads that its kernels take; empty for any.
    """

    name: str = ""
    head_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.head_dims, tuple) or not all(map(is_whole_number, self.head_dims)):
            raise PlanError(f"head_dims must be a list of whole numbers, got {shown(self.head_dims)}")


@dataclass(frozen=True)
class SparseWorkspace(CardRule):
    """Workspaces of attention with an indexer, which grow with the longest context.

    Attributes
    ----------
    factor, long_factor, long_tokens : float
        Longest contexts that a gather of prompts holds, and for contexts of more than some tokens.
    head_multiple : float
        To which the heads of its queries are padded.
    keys_per_factor : float
        Contexts of indexer keys for each of these.
    pools_keys : bool
        Whether the keys are counted as pooled.
    logits_mib : float
        Indexer logits in the peak of the profiling run.
    pooled_logits : float
        Tokens per logit of an indexer of pooled keys, which has logits of its own; 0 without.
    decode_rows : str
        ``tokens`` or ``requests``: rows of decode logits of the longest context; empty without.
    """

    factor: float = 5.0
    long_factor: float = 5.0
    long_tokens: float = 0.0
    head_multiple: float = 1.0
    keys_per_factor: float = 8.0
    pools_keys: bool = False
    logits_mib: float = 0.0
    pooled_logits: float = 0.0
    decode_rows: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("decode_rows", self.decode_rows, ("", "tokens", "requests"), PlanError)

    def contexts(self, length: int) -> float:
        """Return how many longest contexts a gather holds."""
        return self.long_factor if self.long_tokens and length > self.long_tokens else self.factor


@dataclass(frozen=True)
class ExpertPadding(CardRule):
    """To which sizes a kernel rounds the experts of a GPU up.

    Attributes
    ----------
    formats : tuple of str
        Formats of the experts.
    kernel : str
        Its name.
    intermediate, hidden : float
        Multiples of an expert's width on a GPU and of the model's.
    values_hidden : float
        The latter of values alone, whose scales are not rounded up.
    needs : str
        What must be installed; without it the next row counts. Empty if always there.
    """

    formats: tuple[str, ...] = ()
    kernel: str = ""
    intermediate: float = 1.0
    hidden: float = 1.0
    values_hidden: float = 1.0
    needs: str = ""


@dataclass(frozen=True)
class StateBuffers(CardRule):
    """How many states a running request has in an engine whose states have a pool, by the strategy chosen."""

    slots: float = 1.0


@dataclass(frozen=True)
class RunExtra(CardRule):
    """GiB that logs of some models have in the profiling run next to its forward pass and sampling."""

    gib: float = 0.0


@dataclass(frozen=True)
class GraphKind(CardRule):
    """What an engine takes off for CUDA graphs of one kind of models.

    Attributes
    ----------
    formats : tuple of str
        Formats of a mixture of experts; empty for any model.
    kinds : tuple of str
        Of ``states`` and ``sparse``: layers that the model must have.
    gib, low_gib, high_gib : float
        Taken off, and the least and the most that logs have.
    high_share : float
        Of the room, the most where it does not follow from the model alone; 0 for ``high_gib``.
    """

    formats: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    gib: float = 0.0
    low_gib: float = 0.0
    high_gib: float = 0.0
    high_share: float = 0.0

    def is_of(self, expert_format: str, kinds: frozenset[str]) -> bool:
        """Return whether a model is of this kind."""
        return (not self.formats or expert_format in self.formats) and kinds.issuperset(self.kinds)
