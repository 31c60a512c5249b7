"""Prompts with images: what a client waits longer, and what others pay for it."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof import PlanError, StepBatch, StepPlan, Tables, compile_plan, serving
from fastroof.compiled import steps
from fastroof.errors import BatchError, ModelError
from fastroof.serving import estimate_with_images
from fastroof.serving.images import plan_that_encodes

estimate = serving.estimate

pytestmark = pytest.mark.loops

IMAGES = [(1024, 768), (640, 640)]


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return compile_plan("qwen3-vl-8b", "h100", h100, engine="vllm", front_end=0)


@pytest.mark.parametrize("budget", [512, 2048, 8192])
def test_one_client_waits_for_its_encoder(plan: StepPlan, budget: int) -> None:
    """It waits once, however its prompt is cut; decodes are those of a text prompt as long."""
    encoded = plan.encode(IMAGES)
    of_text = estimate(plan, 300 + encoded.tokens, 64, 1, budget)
    found = estimate_with_images(plan, 300, 64, 1, images=IMAGES, max_num_batched_tokens=budget)
    assert found.ttft_ms - of_text.ttft_ms == pytest.approx(encoded.latency_us / 1e3)
    assert found.tpot_ms == of_text.tpot_ms
    assert isinstance(found.ttft_ms, float)


def test_others_wait_for_it_too(plan: StepPlan) -> None:
    clients = np.array([8, 32])
    tokens = plan.encode(IMAGES).tokens
    of_text = estimate(plan, 300 + tokens, 64, clients)
    found = estimate_with_images(plan, 300, 64, clients, images=IMAGES)
    assert (found.tpot_ms > of_text.tpot_ms).all()
    assert (found.mixed_step_us > of_text.mixed_step_us).all()
    assert (found.decode_step_us == of_text.decode_step_us).all()
    assert (found.tokens_per_s_per_gpu < of_text.tokens_per_s_per_gpu).all()


def test_lengths_are_answered_one_by_one(plan: StepPlan) -> None:
    isl, clients = np.array([[100], [400]]), np.array([1, 16, 4])
    found = estimate_with_images(plan, isl, 32, clients, images=IMAGES)
    for row, length in enumerate((100, 400)):
        for column, count in enumerate((1, 16, 4)):
            one = estimate_with_images(plan, length, 32, count, images=IMAGES)
            assert found.ttft_ms[row, column] == one.ttft_ms
            assert found.kv_len[row, column] == one.kv_len
    assert found.made_from.items() >= plan.made_from.items()
    assert estimate_with_images(plan, 100, 32, 4, images=[]).ttft_ms == estimate(plan, 100, 32, 4).ttft_ms


def test_steps_with_prompts_take_longer_by_their_tokens(plan: StepPlan) -> None:
    """Naively: each step, a token at a time."""
    longer = plan_that_encodes(plan, 3.5)
    batch = StepBatch.from_requests([[(1, 99)] * 8, [(500, 0)], [(500, 0), (1, 99)], [(20, 400)]])
    more = longer.step_us(batch) - plan.step_us(batch)
    assert more.tolist() == pytest.approx([0.0, 500 * 3.5, 501 * 3.5, 20 * 3.5])
    assert longer.arena[steps.ARENA_SIZE] == len(longer.arena)
    assert longer.decode_us(64, 1000) == plan.decode_us(64, 1000)


def test_models_without_images_are_refused(plan: StepPlan, h100: Tables) -> None:
    with pytest.raises(PlanError, match="images require pp 1"):
        estimate_with_images(
            compile_plan("qwen3-vl-8b", "h100", h100, pp=2, engine="kernels"), 100, 8, 1, images=[(640, 480)]
        )
    with pytest.raises(ModelError, match="no vision encoder"):
        estimate_with_images(
            compile_plan("qwen3-8b", "h100", h100, engine="kernels"), 100, 8, 1, images=[(640, 480)]
        )
    with pytest.raises(BatchError, match="at least 1 token of text"):
        estimate_with_images(plan, [10, 0], 8, 1, images=[(640, 480)])
