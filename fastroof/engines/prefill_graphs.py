"""Steps with prompts that an engine replays from CUDA graphs, padding tokens to a captured number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from fastroof.checks import one_of, whole_number
from fastroof.engines.values import MOST, check_fields
from fastroof.errors import PlanError

WITHOUT: Final = ("dp", "alltoall", "speculation", "disaggregation", "lora", "offload")
"""What may prevent graphs: ranks of attention data parallelism, an all-to-all, draft tokens, separate prefill
engines, LoRA, and KV cache or weights in the host's memory. Pipeline stages, context parallelism and two
overlapping batches always do."""


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
    eager : tuple of str
        Hugging Face classes of models whose prompts run without graphs.
    eager_on : tuple of (str, str)
        Pairs of a GPU and such a class, for those that do so on some GPUs.
    encoders : tuple of str
        Classes with a vision encoder that are captured; others with one are not.
    latent_tokens, sparse_tokens : int
        Maximum number of tokens captured of models with latent attention, over all tokens or selected ones;
        0 if they are not captured.
    not_with : tuple of str
        What else prevents graphs, of :data:`WITHOUT`.
    is_optional : bool
        Whether the engine captures only if it is told to.
    """

    multiples: tuple[tuple[int, int], ...]
    versions: str = ""
    reason: str = ""
    eager: tuple[str, ...] = ()
    eager_on: tuple[tuple[str, str], ...] = ()
    encoders: tuple[str, ...] = ()
    latent_tokens: int = MOST
    sparse_tokens: int = MOST
    not_with: tuple[str, ...] = ()
    is_optional: bool = False

    def __post_init__(self) -> None:
        check_fields(self, " of prefill_graphs")
        object.__setattr__(self, "multiples", _multiples(self.multiples))
        for name in self.not_with:
            one_of("not_with of prefill_graphs", name, WITHOUT, PlanError)
        for key in ("latent_tokens", "sparse_tokens"):
            whole_number(key, getattr(self, key), 0, MOST, PlanError)
        object.__setattr__(self, "eager_on", tuple(_pair(one) for one in _listed(self.eager_on)))

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

    def is_eager(self, architecture: str, gpu: str, has_encoder: bool) -> bool:
        """Whether prompts of a model run without graphs on a GPU."""
        if self.is_optional or (has_encoder and architecture not in self.encoders):
            return True
        return architecture in self.eager or (gpu, architecture) in self.eager_on

    def forced(self) -> PrefillGraphs:
        """Return the graphs of an engine that is told to capture: nothing prevents them."""
        return PrefillGraphs(self.multiples, self.versions, self.reason)

    def up_to(self, tokens: int) -> PrefillGraphs | None:
        """Return the graphs of at most ``tokens``; None if there are none."""
        kept = [(most, multiple) for most, multiple in self.multiples if most <= tokens]
        last = kept[-1][0] if kept else 0
        cut = next(((tokens // by * by, by) for most, by in self.multiples if most > tokens), (0, 1))
        pairs = (*kept, cut) if cut[0] > last else tuple(kept)
        return replace(self, multiples=pairs) if pairs else None


def _listed(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _pair(given: Any) -> tuple[str, str]:
    pair = tuple(given) if isinstance(given, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(text, str) and text for text in pair):
        raise PlanError(
            f"eager_on of prefill_graphs must be pairs of a GPU and an architecture, got {given!r}"
        )
    return pair[0], pair[1]


def _multiples(given: Any) -> tuple[tuple[int, int], ...]:
    """Return checked pairs of a rising number of tokens and the multiple up to it."""
    pairs = given if isinstance(given, list | tuple) else ()
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise PlanError(
            f"multiples of prefill_graphs must be pairs such as [[32, 4], [256, 16]], got {given!r}"
        )
    last = 0
    for most, multiple in pairs:
        whole_number("a number of tokens in multiples", most, most=MOST, error=PlanError)
        whole_number("a multiple of tokens", multiple, most=MOST, error=PlanError)
        if most <= last or most % multiple:
            raise PlanError(
                f"multiples of prefill_graphs must rise, each a multiple of its second number, got {given!r}"
            )
        last = most
    return tuple((most, multiple) for most, multiple in pairs)
