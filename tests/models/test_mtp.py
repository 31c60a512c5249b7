"""The layer that a model drafts its own next tokens with."""

from __future__ import annotations

import pytest

from fastroof.models import Layout, load_model
from fastroof.models.execution import Execution
from fastroof.models.mtp import mtp_model
from fastroof.operators.calls import Elementwise, Gemm


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_weights_of_the_projection_are_those_of_its_gemm(name: str, tp: int) -> None:
    """Every GPU keeps the matrix that it multiplies by, and two norms, beside the model's last layer."""
    model, layout = load_model(name), Layout(tp)
    (group,) = mtp_model(model).layers
    calls = group.kind.calls(model.hidden, layout, Execution("bf16"))
    (joined,) = (call for call in calls if isinstance(call, Gemm) and call.name == "mtp projection")
    # from the embedding and the hidden state together
    assert (joined.n, joined.k) == (model.hidden, 2 * model.hidden)
    more = group.kind.other_weights(model.hidden, layout)
    more -= model.layers[-1].kind.other_weights(model.hidden, layout)
    assert more == joined.n * joined.k + 2 * model.hidden


def test_both_inputs_of_the_projection_are_normalised() -> None:
    """Each is read and written once, in bf16."""
    model = load_model("llama-3.1-8b")
    (group,) = mtp_model(model).layers
    calls = group.kind.calls(model.hidden, Layout(), Execution("bf16"))
    (norms,) = (call for call in calls if isinstance(call, Elementwise) and call.name == "mtp rmsnorms")
    assert norms.times * norms.row_bytes == 2 * 2 * 4096 * 2
