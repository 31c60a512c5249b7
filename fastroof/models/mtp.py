"""Multi-token prediction: the layer with which a model drafts its next tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fastroof.models.execution import Execution
from fastroof.models.hf import checked_fields
from fastroof.models.layers import LayerGroup, LayerKind, NoMlp
from fastroof.models.layout import Layout
from fastroof.models.spec import ModelSpec
from fastroof.operators.calls import Call, Elementwise, Gemm
from fastroof.units import ACTIVATION_BYTES


@dataclass(frozen=True)
@checked_fields
class MtpLayer(LayerKind):
    """A layer that first joins a token's embedding with the preceding hidden state."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        """Return the calls of the layer on one GPU, in execution order."""
        norms = Elementwise("mtp_norms", "mtp rmsnorms", 2, 2.0 * hidden * ACTIVATION_BYTES)
        joined = Gemm("mtp_projection", "mtp projection", 1, hidden, 2 * hidden, "bf16")
        return (norms, joined, *super().calls(hidden, layout, execution))

    def other_weights(self, hidden: int, layout: Layout) -> int:
        """Return the weights on one GPU that stay in bf16: norms, biases and the projection."""
        return super().other_weights(hidden, layout) + 2 * hidden + 2 * hidden * hidden


def mtp_model(model: ModelSpec) -> ModelSpec:
    """Return the draft model: one layer like the model's last ones, with its embedding and LM head."""
    kind = _whole(model)
    layer = MtpLayer(**{field.name: getattr(kind, field.name) for field in fields(kind)})
    return replace(model, name=f"{model.name} mtp", layers=(LayerGroup(layer, 1),))


def _whole(model: ModelSpec) -> LayerKind:
    """Return the last layer kind; parts that it lacks come from the last kind that has them."""
    kind = model.layers[-1].kind
    without_attention, without_mlp = _without(kind)
    if without_attention == without_mlp:
        return kind
    others = (one for one in reversed(model.kinds) if not _without(one)[0 if without_attention else 1])
    other = next(others, None)
    if other is None:
        return kind
    formats = (*kind.formats, *other.formats)
    if without_attention:
        return replace(kind, attention=other.attention, formats=formats)
    return replace(kind, mlp=other.mlp, formats=formats)


def _without(kind: LayerKind) -> tuple[bool, bool]:
    """Return whether a kind lacks attention over tokens, and whether it lacks an MLP."""
    one_gpu = Layout()
    return not kind.attention.kv_bytes_per_token(one_gpu, "bf16"), isinstance(kind.mlp, NoMlp)
