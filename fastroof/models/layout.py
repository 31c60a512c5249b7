"""Tensor parallelism: what one GPU of a group holds of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from fastroof.checks import is_whole_number
from fastroof.errors import PlanError
from fastroof.models.spec import ModelSpec, padded_rows

__all__ = ["TP_SIZES", "ShardedShape", "SplitSizes", "shard", "split"]

TP_SIZES: Final = (1, 2, 4, 8)
"""Tensor-parallel sizes a plan can have: the GPUs of one NVLink node."""


class SplitSizes(Protocol):
    """Sizes that tensor parallelism splits, of a :class:`ModelSpec` or of a model that is only measured."""

    @property
    def num_q_heads(self) -> int:
        """Query heads of the whole model."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the whole model."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    def intermediate(self) -> int:
        """Width of the MLP, or of one expert."""

    @property
    def vocab(self) -> int:
        """Rows of the LM head, without padding."""


@dataclass(frozen=True)
class ShardedShape:
    """Sizes of one GPU's share of a model.

    Attributes
    ----------
    tp : int
        GPUs the model is split over.
    num_q_heads, num_kv_heads : int
        Heads on one GPU; KV heads are replicated where there are fewer than GPUs.
    intermediate : int
        Width of the MLP on one GPU.
    vocab_rows : int
        Rows of the LM head on one GPU, padding included.
    qkv_out : int
        Outputs of the fused QKV projection on one GPU.
    o_in : int
        Inputs of the attention output projection on one GPU.
    """

    tp: int
    num_q_heads: int
    num_kv_heads: int
    intermediate: int
    vocab_rows: int
    qkv_out: int
    o_in: int


def shard(model: ModelSpec, tp: int) -> ShardedShape:
    """Split a model over ``tp`` GPUs.

    Parameters
    ----------
    model : ModelSpec
        The whole model.
    tp : int
        Tensor-parallel size: 1, 2, 4 or 8.

    Returns
    -------
    ShardedShape
        What one GPU runs.

    Raises
    ------
    PlanError
        If ``tp`` is another number, or does not divide the query heads or the MLP width, or neither
        divides the KV heads nor is a multiple of them.

    Examples
    --------
    >>> from fastroof.models import load_model
    >>> shard(load_model("llama-3.1-70b"), 4).qkv_out
    2560
    """
    if not is_whole_number(tp) or tp not in TP_SIZES:
        raise PlanError(f"tp must be one of {', '.join(map(str, TP_SIZES))}, got {tp!r}")
    obstacles = _obstacles(model, tp)
    if obstacles:
        works = ", ".join(str(size) for size in TP_SIZES if not _obstacles(model, size))
        raise PlanError(f"{model.name} cannot run with tp={tp}: {'; '.join(obstacles)}; tp={works} would do")
    return split(model, tp)


def split(sizes: SplitSizes, tp: int) -> ShardedShape:
    """Divide sizes over ``tp`` GPUs, for any number of them that divides the heads and the MLP.

    Parameters
    ----------
    sizes : SplitSizes
        Of the whole model.
    tp : int
        GPUs, at least 1.

    Returns
    -------
    ShardedShape
        What one of them holds.
    """
    q_heads = sizes.num_q_heads // tp
    kv_heads = max(1, sizes.num_kv_heads // tp)
    return ShardedShape(
        tp=tp,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        intermediate=sizes.intermediate // tp,
        vocab_rows=padded_rows(sizes.vocab, tp) // tp,
        qkv_out=(q_heads + 2 * kv_heads) * sizes.head_dim,
        o_in=q_heads * sizes.head_dim,
    )


def _obstacles(model: ModelSpec, tp: int) -> list[str]:
    found = []
    if model.num_q_heads % tp:
        found.append(f"{model.num_q_heads} query heads do not divide by {tp}")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        found.append(f"{model.num_kv_heads} KV heads neither divide by {tp} nor can be replicated evenly")
    if model.intermediate % tp:
        found.append(f"an MLP width of {model.intermediate} does not divide by {tp}")
    return found
