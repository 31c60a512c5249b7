"""Dense transformers whose layers are all identical, with every size on one class."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from fastroof.errors import ModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.layers import LayerGroup, LayerKind
from fastroof.models.layout import Layout, check_sizes
from fastroof.models.mlp import GatedMlp
from fastroof.models.spec import ModelSpec, padded_rows


class DenseSizes(Protocol):
    """Sizes that tensor parallelism splits, of a :class:`DenseModel` or a measured-only model."""

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


class DenseShard(NamedTuple):
    """Sizes of one GPU's share of a dense model."""

    num_q_heads: int
    num_kv_heads: int
    qkv_out: int
    o_in: int
    intermediate: int
    vocab_rows: int


def split(sizes: DenseSizes, tp: int) -> DenseShard:
    """Divide sizes over ``tp`` GPUs; ``tp`` must divide the heads and the MLP."""
    layout = Layout(tp)
    attention = GroupedQueryAttention(sizes.num_q_heads, sizes.num_kv_heads, sizes.head_dim)
    width = GatedMlp(sizes.intermediate).shard(layout)
    return DenseShard(*attention.shard(layout), width, padded_rows(sizes.vocab, tp) // tp)


@dataclass(frozen=True)
class DenseModel:
    """Sizes of a dense transformer with one kind of layer: what other programs call a model.

    Attributes
    ----------
    name, architecture : str
        As in :class:`ModelSpec`.
    num_layers, hidden, intermediate : int
        Transformer layers, width of the residual stream, width of the MLP.
    num_q_heads, num_kv_heads, head_dim : int
        Attention heads of the whole model, and width of one head.
    vocab, tie_embeddings, max_position, torch_dtype
        As in :class:`ModelSpec`.
    qkv_bias, o_bias, mlp_bias : bool
        Whether those projections add a bias.
    qk_norm : bool
        Whether queries and keys are normalised per head.
    sliding_window : int or None
        Tokens that every layer attends to; None for full attention.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from fastroof.models import load_model
    >>> replace(DenseModel.of(load_model("qwen3-8b")), num_layers=2).spec().num_layers
    2
    """

    name: str
    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    max_position: int
    torch_dtype: str | None

    @classmethod
    def of(cls, model: ModelSpec) -> DenseModel:
        """Return the sizes of a dense model.

        Raises
        ------
        ModelError
            If its layers are not dense or of several kinds, or it has parts that this class cannot represent.
        """
        kind = model.only_kind
        attention, mlp = kind.attention, kind.mlp
        if not isinstance(attention, GroupedQueryAttention) or not isinstance(mlp, GatedMlp):
            raise ModelError(f"{model.name} is not a dense transformer: its layers are {kind.name}")
        parts, names = (model, attention, mlp), [field.name for field in fields(cls)]
        same = {name: getattr(part, name) for part in parts for name in names if hasattr(part, name)}
        sizes = cls(**same, mlp_bias=mlp.bias, sliding_window=attention.window)
        plain = sizes.spec().only_kind
        for part, layer_part in ((attention, plain.attention), (mlp, plain.mlp)):
            more = [f.name for f in fields(part) if getattr(part, f.name) != getattr(layer_part, f.name)]
            if more:
                raise ModelError(
                    f"{model.name} is not a plain transformer: its layers have {', '.join(more)}"
                )
        return sizes

    def spec(self) -> ModelSpec:
        """Return the model as plans take it.

        Raises
        ------
        ModelError
            If a size is invalid.
        """
        try:
            check_sizes(self, "num_layers")
            attention = GroupedQueryAttention(
                self.num_q_heads,
                self.num_kv_heads,
                self.head_dim,
                self.qkv_bias,
                self.o_bias,
                self.qk_norm,
                self.sliding_window,
            )
            layers = LayerGroup(
                LayerKind(attention, GatedMlp(self.intermediate, self.mlp_bias)), self.num_layers
            )
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from None
        return ModelSpec(
            name=self.name,
            architecture=self.architecture,
            hidden=self.hidden,
            vocab=self.vocab,
            tie_embeddings=self.tie_embeddings,
            max_position=self.max_position,
            torch_dtype=self.torch_dtype,
            layers=(layers,),
        )
