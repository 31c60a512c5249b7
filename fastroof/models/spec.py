"""A whole model: its layers, and the parts before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from fastroof.checks import shown, whole_number
from fastroof.errors import ModelError, PlanError
from fastroof.models.attention import Attention
from fastroof.models.compressed import CompressedAttention
from fastroof.models.execution import ROUTING, UNQUANTISED, Checkpoint, Execution
from fastroof.models.experts import RoutedExperts
from fastroof.models.hf import checked_fields
from fastroof.models.layers import LayerGroup, LayerKind, NoAttention, NoMlp
from fastroof.models.layout import ALL_TP_SIZES, SIZES_OF_TP, TP_SIZES, Layout, check_sizes
from fastroof.models.lora import adapter_bytes
from fastroof.models.mlp import Mlp
from fastroof.models.sparse import SparseLatentAttention
from fastroof.models.vision import VisionEncoder
from fastroof.operators.calls import Call, Elementwise, Gemm, SendReceive
from fastroof.units import ACTIVATION_BYTES

VOCAB_PADDING: Final = 64


@dataclass(frozen=True)
@checked_fields
class ModelSpec:
    """A transformer: layers of one or several kinds between an embedding and an LM head.

    Attributes
    ----------
    name : str
        Preset name, or name of the configuration.
    architecture : str
        Hugging Face class: ``"LlamaForCausalLM"``.
    hidden : int
        Width of the residual stream.
    vocab : int
        Rows of the embedding, without padding.
    tie_embeddings : bool
        Whether the LM head is the embedding.
    max_position : int
        Longest context, tokens, including the configuration's rope scaling.
    torch_dtype : str or None
        Dtype of the published weights; a plan chooses its own.
    layers : tuple of LayerGroup
        Kinds of layers, and how many of each.
    checkpoint : Checkpoint
        Formats of the published weights; layer kinds record which modules have them.
    vision : VisionEncoder or None
        The image encoder before the text model; not part of a step.
    """

    name: str
    architecture: str
    hidden: int
    vocab: int
    tie_embeddings: bool
    max_position: int
    torch_dtype: str | None
    layers: tuple[LayerGroup, ...]
    checkpoint: Checkpoint = UNQUANTISED
    vision: VisionEncoder | None = None

    def __post_init__(self) -> None:
        """Reject invalid sizes, also in specs built or modified by hand."""
        try:
            check_sizes(self, "hidden", "vocab", "max_position")
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from None
        if not self.layers:
            raise ModelError(f"{self.name}: a model needs at least one layer")
        if all(isinstance(kind.attention, NoAttention) for kind in self.kinds):
            raise ModelError(
                f"{self.name}: none of {self.num_layers} layers has attention, and a plan needs one "
                "with it; use fewer pipeline stages so that each has one"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return sum(group.count for group in self.layers)

    @property
    def num_blocks(self) -> float:
        """Layers in units of one attention and one MLP, by launched kernels: a single part counts half.

        An engine's floor per layer uses this unit: it was fitted on layers with both parts.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("nemotron-h-56b").num_blocks, load_model("qwen3-8b").num_blocks
        (59.0, 36.0)
        """
        return self.sum_layers(lambda kind: (_is_there(kind.attention) + _is_there(kind.mlp)) / 2)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers without their counts; with the other sizes, they determine a plan's lookups."""
        return tuple(group.kind for group in self.layers)

    @property
    def only_kind(self) -> LayerKind:
        """The kind of all layers, for code that supports models of one kind only."""
        self.check_one_kind()
        return self.layers[0].kind

    def check_one_kind(self) -> None:
        """Raise a :class:`fastroof.ModelError` if the layers are of several kinds."""
        if len(self.layers) > 1:
            names = ", ".join(f"{group.count} {group.kind.name}" for group in self.layers)
            raise ModelError(
                f"{self.name} has layers of several kinds ({names}), and only one kind is supported here"
            )

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(kind.mlp.has_experts for kind in self.kinds)

    def ranks(self, dp: int) -> int:
        """Return the ranks of attention data parallelism that share experts; 1 if each is a replica."""
        return dp if self.has_experts else 1

    @property
    def routing(self) -> str:
        """How tokens spread over experts if a plan does not say."""
        mlps = (kind.mlp for kind in self.kinds)
        return next((mlp.routing for mlp in mlps if isinstance(mlp, RoutedExperts)), ROUTING)

    @property
    def is_dense(self) -> bool:
        """Whether no layer has routed experts or a state."""
        return not self.has_experts and not any(kind.state_bytes(Layout()) for kind in self.kinds)

    @property
    def has_sparse_attention(self) -> bool:
        """Whether an indexer picks the tokens of latent attention."""
        return any(isinstance(kind.attention, SparseLatentAttention) for kind in self.kinds)

    @property
    def has_compressed_attention(self) -> bool:
        """Whether layers cache entries of several tokens."""
        return any(isinstance(kind.attention, CompressedAttention) for kind in self.kinds)

    @property
    def encoder(self) -> VisionEncoder:
        """The vision encoder.

        Raises
        ------
        ModelError
            If the model has no encoder.
        """
        if self.vision is None:
            raise ModelError(f"{self.name} has no vision encoder: its config.json has no vision_config")
        return self.vision

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model: embedding, LM head if untied, norms and biases included.

        Excluded are a vision encoder and layers that predict further tokens.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("llama-2-7b").num_parameters
        6738415616
        """
        embeddings = self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
        layers = sum(group.count * group.kind.num_parameters(self.hidden) for group in self.layers)
        return embeddings + layers + self.hidden

    @property
    def active_parameters(self) -> int:
        """Weights that a token passes: those of its routed experts, and all weights outside experts.

        Embedding and LM head count in full, as in :attr:`num_parameters`; some model cards exclude one of
        them.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("mixtral-8x7b").active_parameters
        12879925248
        """
        idle = sum(
            group.count * (group.kind.num_parameters(self.hidden) - group.kind.active_parameters(self.hidden))
            for group in self.layers
        )
        return self.num_parameters - idle

    @property
    def residual_rows(self) -> int:
        """Rows of the residual per token; more than one with hyper-connections."""
        return max(kind.residual_rows for kind in self.kinds)

    @property
    def window(self) -> int | None:
        """The smallest window of any layer, tokens; None if all layers have full attention."""
        windows = [kind.attention.window for kind in self.kinds]
        return min((window for window in windows if window is not None), default=None)

    def with_full_attention(self) -> ModelSpec:
        """Return the model without attention windows.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("mistral-7b").with_full_attention().window is None
        True
        """
        if self.window is None:
            return self

        def without(kind: LayerKind) -> LayerKind:
            attention: Any = kind.attention
            if isinstance(getattr(type(attention), "window", None), property) and attention.window:
                raise ModelError(f"{self.name} has layers with only a window")
            return replace(kind, attention=replace(attention, window=None)) if attention.window else kind

        return replace(self, layers=tuple(replace(g, kind=without(g.kind)) for g in self.layers))

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> int:
        """Return the KV-cache bytes per token on one GPU, over all layers, without padding of an engine.

        Parameters
        ----------
        layout : Layout
            The layout; ``Layout()`` for one GPU, with every KV head once.
        kv_dtype : str
            Format of the KV cache.
        """
        return int(self.sum_layers(lambda kind: kind.kv_bytes_per_token(layout, kv_dtype)))

    def state_bytes(self, layout: Layout) -> int:
        """Return the fixed state bytes per sequence on one GPU, over all layers.

        Parameters
        ----------
        layout : Layout
            The layout; ``Layout()`` for one GPU, with every head once.
        """
        return int(self.sum_layers(lambda kind: kind.state_bytes(layout)))

    @property
    def linear_roles(self) -> set[str]:
        """Roles of the linear layers of all kinds."""
        return {role for kind in self.kinds for role in kind.linear_weights(self.hidden, Layout())}

    def sum_layers(self, of_layer: Callable[[LayerKind], float]) -> float:
        """Return the sum of a per-layer quantity over all layers."""
        return sum(group.count * of_layer(group.kind) for group in self.layers)

    def check_layout(self, layout: Layout) -> None:
        """Reject layouts that this model cannot be split into, or that a plan cannot time.

        Raises
        ------
        PlanError
            The message names every obstacle and the valid tensor-parallel sizes.
        """
        if layout.tp not in ALL_TP_SIZES:
            raise PlanError(f"tp must be one of {SIZES_OF_TP}, got {shown(layout.tp)}")
        if layout.pp > self.num_layers:
            raise PlanError(
                f"pp {layout.pp}: {self.name} has {self.num_layers} layers, and every stage needs one"
            )
        dense = [kind.name for kind in self.kinds if not kind.mlp.has_experts]
        if layout.ep > 1 and len(dense) == len(self.layers):
            raise PlanError(f"ep {layout.ep}: {self.name} has no experts to split")
        obstacles = self._obstacles(layout)
        if obstacles:
            works = [tp for tp in TP_SIZES if not self._obstacles(Layout(tp, dp=layout.dp))]
            valid = f"; valid: tp={', '.join(map(str, works))}" if works else ""
            raise PlanError(f"{self.name} cannot run with tp={layout.tp}: {'; '.join(obstacles)}{valid}")

    def _obstacles(self, layout: Layout) -> list[str]:
        return list(dict.fromkeys(what for kind in self.kinds for what in kind.obstacles(layout)))

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of the LM head over ``tp`` GPUs, padded.

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
        Serving engines pad so that every GPU's GEMM is aligned. vLLM rounds up to 64 before it splits;
        here each share is a multiple of 64, which adds fewer than 64 rows per GPU.

        Examples
        --------
        >>> from fastroof.models import load_model
        >>> load_model("qwen3-8b").padded_vocab(8) // 8
        19008
        """
        return padded_rows(self.vocab, whole_number("tp", tp, error=PlanError))


def _is_there(part: Attention | Mlp) -> bool:
    return not isinstance(part, NoAttention | NoMlp)


def padded_rows(vocab: int, tp: int) -> int:
    """Return the vocabulary rounded up so that every GPU's share of an LM head is aligned."""
    block = VOCAB_PADDING * tp
    return -(-vocab // block) * block


class Stage(NamedTuple):
    """One pipeline stage."""

    number: int
    stages: int
    counts: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Return whether the stage has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the LM head and sends nothing on."""
        return self.number == self.stages - 1

    def model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with only this stage's layers."""
        groups = zip(model.layers, self.counts, strict=True)
        return replace(model, layers=tuple(LayerGroup(g.kind, count) for g, count in groups if count))


def stages_of(model: ModelSpec, stages: int) -> tuple[Stage, ...]:
    """Split a model into pipeline stages."""
    places = [
        ((layer + 0.5) / group.count, kind)
        for kind, group in enumerate(model.layers)
        for layer in range(group.count)
    ]
    order = [kind for _, kind in sorted(places)]
    least, more = divmod(len(order), stages)
    groups, start = [], 0
    for number in range(stages):
        held = order[start : start + least + (number < more)]
        start += len(held)
        groups.append(Stage(number, stages, tuple(held.count(kind) for kind in range(len(model.layers)))))
    return tuple(groups)


class StepCalls(NamedTuple):
    """The calls of a step on one GPU, in the order in which its time is summed."""

    before: tuple[Call, ...]
    layers: tuple[tuple[Call, ...], ...]
    after: tuple[Call, ...]


def step_calls(model: ModelSpec, layout: Layout, execution: Execution) -> StepCalls:
    """Return every call of a step on one GPU."""
    row_bytes = float(model.hidden * ACTIVATION_BYTES)
    residual_bytes = model.residual_rows * row_bytes
    embedded_rows = max(kind.embedded_rows for kind in model.kinds)
    vocab_rows = model.padded_vocab(layout.tp) // layout.tp
    head_dtype = execution.of_head().kernel("lm_head")
    head = Gemm("lm_head", "lm_head", 1, vocab_rows, model.hidden, head_dtype, rows="sequences")
    embedding, beside_head = adapters_of_ends(model, execution, head)
    return StepCalls(
        (Elementwise("embedding", "embedding", 1, row_bytes + embedded_rows * row_bytes), *embedding),
        tuple(kind.calls(model.hidden, layout, execution) for kind in model.kinds),
        (
            *_sent_on(layout, residual_bytes),
            Elementwise("final_norm", "final rmsnorm", 1, 4.0 * row_bytes),
            head,
            *beside_head,
        ),
    )


def adapters_of_ends(
    model: ModelSpec, execution: Execution, head: Gemm
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Return the calls of LoRA adapters next to the embedding and next to the LM head."""
    adapters = execution.adapters
    if adapters is None:
        return (), ()
    return adapters.of_embedding(model.vocab, model.hidden), adapters.of_head(model.vocab, head)


def adapter_buffers(
    model: ModelSpec, layout: Layout, execution: Execution, *, is_first: bool, is_last: bool
) -> int:
    """Return the bytes of LoRA adapters of a stage's layers, embedding and LM head on one GPU."""
    if execution.adapters is None:
        return 0
    layers = model.sum_layers(lambda kind: kind.adapter_bytes(model.hidden, layout, execution))
    calls = step_calls(model, layout, execution)
    ends = (*(calls.before if is_first else ()), *(calls.after if is_last else ()))
    return int(layers) + adapter_bytes(ends, execution.adapters.held)


def _sent_on(layout: Layout, row_bytes: float) -> tuple[Call, ...]:
    """Return the calls that send a token's hidden state across every pipeline-stage boundary."""
    if layout.pp == 1:
        return ()
    stage_gpus = layout.stage_gpus
    return (SendReceive("stage_send", "pipeline send", layout.pp - 1, row_bytes, layout.pp, stage_gpus),)
