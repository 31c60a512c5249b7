"""The sizes of a whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastroof.checks import whole_number
from fastroof.errors import ModelError, PlanError

__all__ = ["ModelSpec", "padded_rows"]

VOCAB_PADDING: Final = 64
_SIZES: Final = (
    "num_layers",
    "hidden",
    "intermediate",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "vocab",
    "max_position",
)


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a dense transformer with gated MLPs and RMS norms.

    Attributes
    ----------
    name : str
        Preset name, or what the configuration is called.
    architecture : str
        Hugging Face class: ``"LlamaForCausalLM"``.
    num_layers, hidden, intermediate : int
        Transformer layers, width of the residual stream, width of the MLP.
    num_q_heads, num_kv_heads, head_dim : int
        Attention heads of the whole model, and the width of one.
    vocab : int
        Rows of the embedding, without padding.
    tie_embeddings : bool
        Whether the LM head is the embedding.
    qkv_bias, o_bias, mlp_bias : bool
        Whether those projections add a bias.
    qk_norm : bool
        Whether queries and keys are normalised per head.
    sliding_window : int or None
        Tokens every layer attends within; None for full attention.
    max_position : int
        Longest context, tokens.
    torch_dtype : str or None
        Dtype the weights are published in; what a plan runs in is chosen there.
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

    def __post_init__(self) -> None:
        """Refuse sizes no model has, in specs that were built or changed by hand too."""
        for key in _SIZES:
            whole_number(f"{self.name}: {key}", getattr(self, key), error=ModelError)
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: {self.num_q_heads} query heads do not divide by {self.num_kv_heads} KV heads"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model: embedding, LM head if untied, norms and biases included.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("llama-2-7b").num_parameters
        6738415616
        """
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_width = q_width + 2 * kv_width
        layer = self.hidden * qkv_width + q_width * self.hidden + 3 * self.hidden * self.intermediate
        layer += 2 * self.hidden  # the norms before attention and MLP
        layer += qkv_width * self.qkv_bias + self.hidden * self.o_bias
        layer += (2 * self.intermediate + self.hidden) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden

    def padded_vocab(self, tp: int) -> int:
        """Rows of the LM head over ``tp`` GPUs, padded.

        Parameters
        ----------
        tp : int
            Tensor-parallel size, at least 1.

        Returns
        -------
        int
            The vocabulary rounded up to a multiple of ``64 * tp``.

        Raises
        ------
        PlanError
            If ``tp`` is not a whole number of at least 1.

        Notes
        -----
        Serving engines pad so that every GPU's GEMM is aligned. vLLM rounds up to 64 before it
        splits; here each share is a multiple of 64, which is less than 64 rows more a GPU.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("qwen3-8b").padded_vocab(8) // 8
        19008
        """
        return padded_rows(self.vocab, whole_number("tp", tp, error=PlanError))


def padded_rows(vocab: int, tp: int) -> int:
    """Rows of an LM head over ``tp`` GPUs: the vocabulary, rounded up so that every share is aligned."""
    block = VOCAB_PADDING * tp
    return -(-vocab // block) * block
