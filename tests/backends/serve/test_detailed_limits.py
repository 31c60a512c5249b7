"""What a message may ask for beside times: as many steps as the limit says, each in all its stages."""

from __future__ import annotations

import pytest

from fastroof import compile_plan, load_tables
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.questions import pipeline_answer
from fastroof.errors import BackendError


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_micro_batches_count_once_a_stage(pp: int) -> None:
    """An answer has a time for each micro-batch in each stage: that is what the limit holds down."""
    plan = compile_plan(
        "llama-3.1-8b", "h100", load_tables("h100"), pp=pp, max_tokens=64, max_seqs=64, engine="kernels"
    )
    limits = ServeLimits(max_detailed_steps=8)
    most = 8 // pp
    stage_us = pipeline_answer(plan, [[[1, 99]]] * most, limits)["stage_us"]
    assert sum(len(times) for times in stage_us) == 8
    with pytest.raises(BackendError, match=f"{most + 1} steps.* are more than the 8 of a message"):
        pipeline_answer(plan, [[[1, 99]]] * (most + 1), limits)
