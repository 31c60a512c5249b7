"""The calls of a step: embedding, the layers of every kind, the last norm and the LM head."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.models.execution import Execution
from fastroof.models.layout import Layout
from fastroof.models.spec import ModelSpec
from fastroof.operators.calls import Call, Elementwise, Gemm, SendReceive
from fastroof.units import ACTIVATION_BYTES


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
    return StepCalls(
        (Elementwise("embedding", "embedding", 1, row_bytes + embedded_rows * row_bytes),),
        tuple(kind.calls(model.hidden, layout, execution) for kind in model.kinds),
        (
            *_sent_on(layout, residual_bytes),
            Elementwise("final_norm", "final rmsnorm", 1, 4.0 * row_bytes),
            Gemm("lm_head", "lm_head", 1, vocab_rows, model.hidden, head_dtype, "sequences"),
        ),
    )


def _sent_on(layout: Layout, row_bytes: float) -> tuple[Call, ...]:
    """Return the calls that send a token's hidden state across every pipeline-stage boundary."""
    if layout.pp == 1:
        return ()
    stage_gpus = layout.stage_gpus
    return (SendReceive("stage_send", "pipeline send", layout.pp - 1, row_bytes, layout.pp, stage_gpus),)
