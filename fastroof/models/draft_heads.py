"""Draft heads: checkpoints of a few layers that draft from hidden states of their target.

Read in vLLM 0.33.0 (Apache-2.0, ``model_executor/models/llama_eagle3.py``, ``qwen3_dflash.py``,
``qwen3_dspark.py``, ``v1/worker/gpu/spec_decode``) and SGLang 0.5.23 (Apache-2.0, ``srt/speculative``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Execution
from fastroof.models.hf import Fields, checked_fields
from fastroof.models.layers import LayerGroup, LayerKind
from fastroof.models.layout import Layout
from fastroof.models.spec import ModelSpec
from fastroof.operators.calls import Call, Elementwise, Gemm
from fastroof.units import ACTIVATION_BYTES

EAGLE3, DFLASH, DSPARK = "eagle3", "dflash", "dspark"

METHODS: Final = {
    **dict.fromkeys(
        (
            "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM",
        ),
        EAGLE3,
    ),
    "DFlashDraftModel": DFLASH,
    **dict.fromkeys(("Qwen3DSparkModel", "Qwen3OmniDSparkModel", "DSparkDraftModel"), DSPARK),
}  # fmt: skip
"""Methods of heads by the class in their config.json; files of Speculators name the method."""

_EAGLE3_STATES: Final = 3
"""Hidden states that an EAGLE-3 head joins if its file does not say."""


class Passes(NamedTuple):
    """Passes of a draft around one step: the first over the step's tokens, then later ones.

    ``first`` and ``later`` are the tokens of each request, of which the heads take logits; a draft without
    a first pass has 0. ``steps`` counts one first pass, even if missing, and the later ones.
    """

    steps: int
    first: int = 1
    first_head: int = 1
    later: int = 1
    later_head: int = 1

    @classmethod
    def of(cls, head: HeadLayer | None, drafted: int) -> Passes:
        """Return the passes that draft so many tokens, one after another without a head of the target."""
        if head is None:
            return cls(drafted)
        if head.method == EAGLE3:
            return cls(drafted, 1 + drafted)
        return cls(2, 0, 0, drafted if head.anchors else 1 + drafted, drafted)


@dataclass(frozen=True)
@checked_fields
class HeadLayer(LayerKind):
    """The first layer of a draft head.

    Attributes
    ----------
    method : str
        ``eagle3``, ``dflash`` or ``dspark``.
    states, target_hidden : int
        Hidden states of the target that a projection joins, and their width.
    num_layers : int
        Number of layers of the head, whose keys and values DFlash computes at once.
    vocab, markov_rank : int
        Rows and rank of DSpark's head over pairs of tokens; the rank is 0 without.
    anchors : bool
        Whether the first of a block's tokens predicts one too.
    with_target : bool
        Whether the calls include those that the target's step runs for the head, and the Markov head.
    """

    method: str = EAGLE3
    states: int = 0
    target_hidden: int = 0
    num_layers: int = 1
    vocab: int = 0
    markov_rank: int = 0
    anchors: bool = False
    with_target: bool = True

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of the layer on one GPU, in execution order."""
        own, row_bytes = super().calls(hidden, layout, execution), float(hidden * ACTIVATION_BYTES)
        if self.method == EAGLE3:
            norms = Elementwise("mtp_norms", "draft rmsnorm and concatenation", 2, 3.0 * row_bytes)
            own = (norms, *map(_doubled, own))
        if not self.with_target:
            return own
        joined = self.states * self.target_hidden
        before: list[Call] = [Gemm("mtp_projection", "draft projection", 1, hidden, joined, "bf16")]
        if self.method != EAGLE3:
            # copied apart, keys normed and rotated, then written layer by layer
            width, kernels = self._context_width(layout), 3 + self.num_layers
            written = self.num_layers * self.attention.kv_bytes_per_token(layout, execution.kv_dtype)
            moved = (width * 5.0 * ACTIVATION_BYTES + written) / kernels
            before += [
                Elementwise("mtp_norms", "context rmsnorm", 1, 2.0 * row_bytes),
                Gemm("qkv", "context keys and values", 1, width, hidden, "bf16"),
                Elementwise("kv_write", "context norm, rope and kv write", kernels, moved),
            ]
        if self.markov_rank:
            rows = 3.0 * self.vocab * ACTIVATION_BYTES
            head = Gemm("lm_head", "markov head", 1, self.vocab, self.markov_rank, "bf16", rows="sequences")
            before += [head, Elementwise("lm_head", "markov bias", 1, rows, rows="sequences")]
        return (*before, *own)

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        """Return the linear weights of the layer on one GPU, by the role of their call."""
        weights = super().linear_weights(hidden, layout)
        return weights | ({"qkv": 2 * weights["qkv"]} if self.method == EAGLE3 else {})

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights on one GPU that stay in bf16: norms, the projection and the Markov head."""
        own = super().other_weights(hidden, layout) + hidden * (1 + self.states * self.target_hidden)
        return own + 2 * self.vocab * self.markov_rank

    def copied_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights that vLLM copies to compute the context's keys and values of all layers."""
        return 0 if self.method == EAGLE3 else self._context_width(layout) * hidden

    def _context_width(self, layout: Layout) -> int:
        """Return the key and value elements of a token in all layers on one GPU."""
        elements = self.attention.kv_bytes_per_token(layout, "bf16") / ACTIVATION_BYTES
        return self.num_layers * int(elements)


def _doubled(call: Call) -> Call:
    """Return a layer's call; queries, keys and values are of the token's embedding and the hidden state."""
    return replace(call, k=2 * call.k) if isinstance(call, Gemm) and call.role == "qkv" else call


def head_of(model: ModelSpec) -> HeadLayer | None:
    """Return the first layer of a draft head; None for another model."""
    kind = model.layers[0].kind
    return kind if isinstance(kind, HeadLayer) else None


def method_of(model: ModelSpec) -> str:
    """Return the method of a draft head; empty for another model."""
    head = head_of(model)
    return "" if head is None else head.method


def alone(model: ModelSpec) -> ModelSpec:
    """Return a draft head without what runs in the target's step and without its Markov head."""
    (first, *others) = model.layers
    kind: Any = first.kind
    return replace(model, layers=(LayerGroup(replace(kind, with_target=False), 1), *others))


class HeadFields(NamedTuple):
    """The file of a draft head: its method, the fields of its layers, and of the head."""

    method: str
    layers: Fields
    head: Fields

    @classmethod
    def of(cls, wrapper: Fields) -> HeadFields | None:
        """Return the fields of a draft head's config.json; None for another model."""
        architectures = wrapper.texts("architectures") or []
        named = next((METHODS[name] for name in architectures if name in METHODS), None)
        method = wrapper.text("speculators_model_type") or named
        if method is None:
            return None
        if method not in (EAGLE3, DFLASH, DSPARK):
            raise wrapper.error(f"drafts by {method} are not modelled; valid: {EAGLE3}, {DFLASH}, {DSPARK}")
        inner = wrapper.part("transformer_layer_config") or wrapper
        layers = {key: value for key, value in inner.config.items() if key != "architectures"}
        nested: dict[str, Any] = {}
        for section in ("eagle_config", "dflash_config"):
            part = wrapper.part(section)
            nested |= {} if part is None else part.config
        return cls(
            method, Fields(layers, inner.where), Fields({**layers, **wrapper.config, **nested}, wrapper.where)
        )

    @property
    def vocab(self) -> int:
        """Rows of the head's own vocabulary."""
        return self.head.size_or("draft_vocab_size", self.layers.size("vocab_size"))

    def kinds(self, kinds: list[LayerKind]) -> list[LayerKind]:
        """Return the layers of a head from those of its file."""
        first, head = kinds[0], self.head
        if not isinstance(first.attention, GroupedQueryAttention) or first.mlp.has_experts:
            raise head.error("draft heads with latent attention or experts are not modelled")
        if len(set(kinds)) > 1 or head.flag("use_swa", default=False):
            raise head.error("draft heads whose layers differ, or with use_swa, are not modelled")
        if not head.flag("use_aux_hidden_state", default=True):
            raise head.error("draft heads without hidden states of several layers are not modelled")
        names = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
                 "dspark_target_layer_ids")  # fmt: skip
        listed = next((ids for name in names if (ids := head.numbers(name))), None)
        states = head.size_or(
            "num_aux_hidden_states", _EAGLE3_STATES if self.method == EAGLE3 else len(kinds)
        )
        is_saved = head.has("speculators_model_type")
        rank = head.count("markov_rank") if self.method == DSPARK else 0
        layer = HeadLayer(
            **{field.name: getattr(first, field.name) for field in fields(first)},
            method=self.method,
            states=len(listed) if listed else states,
            target_hidden=head.size_or("target_hidden_size", head.size("hidden_size")),
            num_layers=len(kinds),
            vocab=self.vocab if rank else 0,
            markov_rank=rank,
            anchors=self.method == DSPARK and head.flag("sample_from_anchor", default=not is_saved),
        )
        return [layer, *kinds[1:]]
