"""Plans whose decodes take longer beside prompts: who gets that too, and who refuses such a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.backends.dynamo import dynamo_profile
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.engines import EngineProfile, KernelChoices, MixedAttention
from fastroof.errors import BackendError
from tests.backends.llmservingsim_reader import Bundle

SLOWER = EngineProfile("made up", kernels=KernelChoices(mixed_attention=(MixedAttention(0.3),)))


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=SLOWER, max_tokens=512, max_seqs=64)


def test_a_program_that_adds_up_both_refuses_it(plan: fastroof.StepPlan) -> None:
    with pytest.raises(BackendError, match=r"Dynamo's mocker adds .* use an engine without it"):
        dynamo_profile(plan)


def test_rows_of_both_have_it(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    bundle = Bundle(export_llmservingsim(plan, tmp_path).folder, plan.tp)
    chunk, decodes = [(256, 0)], [(1, 3000)] * 16
    batch = fastroof.StepBatch.from_requests([chunk, decodes, chunk + decodes])
    alone_us, slower_us = plan.run(batch).components.decode_attention_us[1:]
    assert slower_us > 1.5 * alone_us
    got_us = (
        np.array([bundle.step_ns(step, plan.model.num_layers) for step in (chunk, decodes, chunk + decodes)])
        / 1e3
    )
    np.testing.assert_allclose(got_us, plan.step_us(batch), rtol=2e-3)


def test_dynamos_profile_with_decodes_has_the_added_time(plan: fastroof.StepPlan) -> None:
    with pytest.raises(BackendError, match="mixed_attention"):
        dynamo_profile(plan, max_batch_size=64)
    added = dynamo_profile(plan, max_batch_size=64, points=1, beside=(8, 1000))["prefill_ttft_ms"]
    step = fastroof.StepBatch([100] + [1] * 8, [0] + [999] * 8, [0, 9])
    assert added[99] == (plan.step_us(step)[0] - plan.decode_us(8, 1000)) / 1e3
