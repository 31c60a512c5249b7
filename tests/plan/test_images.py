"""Vision encoders: a sum of lookups a layer, once an image."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from fastroof import StepBatch, StepPlan, Tables, compile_plan, load_model, load_tables
from fastroof.errors import BatchError, MissingTableError, ModelError, PlanError
from fastroof.plan.curves import TableCurves
from fastroof.plan.explain import image_us


@pytest.mark.loops
@pytest.mark.parametrize(("patches", "images"), [(1024, 1), (4096, 2)])
def test_an_encoder_is_the_sum_of_its_lookups(h100: Tables, patches: int, images: int) -> None:
    m = patches * images

    def gemm(n: int, k: int, rows: int = m) -> float:
        return float(h100.lookup("gemm", m=rows, n=n, k=k).latency_us)

    # Qwen3-VL-8B: 27 layers of 1152, 16 heads of 72, MLPs of 4304; patches of 2 x 16 x 16 pixels in three
    # colours; four mergers of 2 x 2 patches
    attention = h100.lookup(
        "encoder_attention", num_q_heads=16, num_kv_heads=16, head_dim=72, kv_len=patches, batch_size=images
    )
    layer = gemm(3456, 1152) + gemm(1152, 1152) + gemm(4304, 1152) + gemm(1152, 4304)
    ends = gemm(1152, 1536) + 4 * (gemm(4608, 4608, m // 4) + gemm(4096, 4608, m // 4))
    found = image_us("qwen3-vl-8b", h100, patches, images)
    streamed = sum(part.total_us for part in found.parts if part.name in ("norms", "activation"))
    assert found.latency_us - streamed == pytest.approx(27 * (layer + float(attention.latency_us)) + ends)
    assert found.latency_us == pytest.approx(sum(part.total_us for part in found.parts))
    assert 0 < streamed < 0.3 * found.latency_us
    assert (found.tokens, found.origin) == (images * patches // 4, max(part.origin for part in found.parts))


@pytest.mark.loops
def test_streams_are_what_norms_and_activations_move(h100: Tables) -> None:
    """Two norms read and write two rows each, the activation reads and writes one of the MLP's width."""
    encoder = load_model("qwen3-vl-8b").vision
    assert encoder is not None
    moved = {
        call.name: call.times * call.row_bytes
        for call in encoder.calls(1).layer
        if call.name in ("norms", "activation")
    }  # type: ignore[union-attr]
    assert moved == {"norms": 2 * 4 * 1152 * 2, "activation": 2 * 4304 * 2}
    norms = next(call for call in encoder.calls(1).layer if call.name == "norms")
    part = next(part for part in image_us("qwen3-vl-8b", h100, 64).parts if part.name == "norms")
    assert part.total_us == 27 * 2 * TableCurves(h100).row_values(norms, 64)[0][64]


@pytest.mark.loops
def test_measured_attention_is_marked_and_more_patches_take_longer(h100: Tables) -> None:
    times = [image_us("qwen3-vl-8b", h100, patches) for patches in (256, 1024, 4000, 4096)]
    origins = [next(part.origin for part in time.parts if part.name == "attention") for time in times]
    assert origins == [0, 0, 1, 0]
    assert [time.latency_us for time in times] == sorted({time.latency_us for time in times})
    # patches of one image attend to each other, those of two do not
    assert image_us("qwen3-vl-8b", h100, 2048, 2).latency_us < times[-1].latency_us


@pytest.mark.loops
def test_text_models_get_pooled_tokens(h100: Tables) -> None:
    """Gemma 3 makes 256 tokens of 64 x 64 patches, Gemma 4 one of 3 x 3."""
    assert image_us("gemma-3-27b", h100, 4096).tokens == 256
    assert image_us("gemma-4-31b", h100, 2304).tokens == 256


@pytest.mark.loops
def test_unmeasured_heads_are_reported(h100: Tables) -> None:
    with pytest.raises(MissingTableError, match="head_dim 88"):
        image_us("llama-4-scout", h100, 576)


@pytest.mark.loops
def test_gpus_share_heads_and_widths_and_sum_twice_a_layer(h100: Tables) -> None:
    one, two = (image_us("qwen3-vl-8b", h100, 4096, tp=tp) for tp in (1, 2))
    assert two.latency_us < one.latency_us
    assert [part.name for part in two.parts if part.name not in {part.name for part in one.parts}] == [
        "all-reduce"
    ]
    encoder = load_model("qwen3-vl-8b").vision
    assert encoder is not None
    (reduced,) = (call for call in encoder.calls(2).layer if call.name == "all-reduce")
    assert reduced.times == 2


@pytest.mark.loops
def test_images_that_cannot_be_encoded_are_refused(h100: Tables) -> None:
    with pytest.raises(ModelError, match=r"llama-3\.1-8b has no vision encoder"):
        image_us("llama-3.1-8b", h100, 1024)
    with pytest.raises(ModelError, match="16 heads and MLPs of 4304 does not divide by tp=32"):
        image_us("qwen3-vl-8b", h100, 1024, tp=32)
    for wrong in ({"patches": 0}, {"patches": 1.5}, {"patches": 64, "images": 0}, {"patches": 2**18}):
        with pytest.raises(PlanError):
            image_us("qwen3-vl-8b", h100, **wrong)  # type: ignore[arg-type]
    # as many as there may be: 32 images of 4,096
    assert image_us("qwen3-vl-8b", h100, 2**12, 2**5).tokens == 2**15
    with pytest.raises(PlanError, match="131,072 at once"):
        image_us("qwen3-vl-8b", h100, 2**17 + 1)
    model = load_model("qwen3-vl-8b")
    assert model.vision is not None
    unsaid = replace(model, vision=replace(model.vision, patch_size=None))
    with pytest.raises(ModelError, match="vision_config does not define patch_size"):
        image_us(unsaid, h100, 1024)


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return compile_plan("qwen3-vl-8b", "h100", h100, tp=2, engine="kernels")


IMAGES = [(1024, 768), (640, 640), (640, 640)]


@pytest.mark.loops
def test_images_of_several_sizes_are_the_sum_of_their_lookups(h100: Tables, plan: StepPlan) -> None:
    """Rows of every image together; attention within each, on half of the heads; sums over both GPUs."""
    sizes = [(64 * 48, 1), (40 * 40, 2)]
    m = sum(patches * count for patches, count in sizes)

    def gemm(n: int, k: int, rows: int = m) -> float:
        return float(h100.lookup("gemm", m=rows, n=n, k=k).latency_us)

    attention = sum(
        float(
            h100.lookup(
                "encoder_attention",
                num_q_heads=8,
                num_kv_heads=8,
                head_dim=72,
                kv_len=patches,
                batch_size=count,
            ).latency_us
        )
        for patches, count in sizes
    )
    layer = gemm(3 * 576, 1152) + gemm(1152, 576) + gemm(2152, 1152) + gemm(1152, 2152)
    ends = gemm(1152, 1536) + 4 * (gemm(4608, 4608, m // 4) + gemm(4096, 4608, m // 4))
    encoded = plan.encode(IMAGES)
    others = ("norms", "activation", "all-reduce")
    streamed = sum(part.total_us for part in encoded.parts if part.name.endswith(others))
    assert encoded.latency_us - streamed == pytest.approx(27 * (layer + attention) + ends)
    assert encoded.tokens == m // 4 == sum(plan.encode([image]).tokens for image in IMAGES)
    assert {part.source for part in encoded.parts} <= set(h100.measured.sources.values())


@pytest.mark.loops
def test_a_step_with_images_is_the_step_and_its_encoder(plan: StepPlan) -> None:
    tokens = plan.encode(IMAGES).tokens
    requests = [(tokens + 100, 0), (1, 999)]
    step, with_images = plan.explain(requests), plan.explain(requests, images=IMAGES)
    encoded = plan.encode(IMAGES)
    own = [(part.name, part.total_us) for part in (*encoded.parts, *step.operators)]
    assert [(part.name, part.total_us) for part in with_images.operators] == own
    assert with_images.total_us == step.total_us + encoded.latency_us
    assert with_images.origin == max(step.origin, encoded.origin)
    assert all(part.name.startswith("vision encoder ") for part in encoded.parts)
    assert with_images.to_arrow().num_rows == len(with_images.operators)
    batch = StepBatch.from_requests([requests, [(1, 5)], [(64, 0)]])
    bare = plan.step_us(batch)
    times = plan.step_us(batch, images=[IMAGES, [], [(64, 64)]])
    assert times.tolist() == [with_images.total_us, bare[1], bare[2] + plan.encode([(64, 64)]).latency_us]
    assert plan.explain(requests, images=[]).total_us == step.total_us


@pytest.mark.loops
def test_images_need_a_prompt_and_a_list_a_step(plan: StepPlan) -> None:
    batch = StepBatch.from_requests([[(100, 0)], [(1, 5)]])
    with pytest.raises(BatchError, match="2 steps, 1 lists"):
        plan.step_us(batch, images=[[]])
    with pytest.raises(BatchError, match="1 images in a decode-only step"):
        plan.step_us(batch, images=[[], [(64, 64)]])
    with pytest.raises(BatchError, match="images in a decode-only step"):
        plan.explain([(1, 5)], images=[(64, 64)])
    with pytest.raises(BatchError, match="an image must be"):
        plan.encode([64])  # type: ignore[list-item]
    with pytest.raises(PlanError, match="max 131,072 at once"):
        plan.encode([(4096, 4096)] * 3)
    with pytest.raises(PlanError, match="with_error cannot be used with images"):
        plan.explain([(100, 0)], images=[(64, 64)], with_error=True)
    assert plan.encode([]) == (0.0, 0, 0, ())


@pytest.mark.loops
def test_a_plan_that_travelled_has_no_tables_for_images(plan: StepPlan) -> None:
    unpickled = pickle.loads(pickle.dumps(plan))
    with pytest.raises(PlanError, match="an unpickled plan has no tables"):
        unpickled.encode([(64, 64)])
    assert unpickled.explain([(100, 0)]).total_us == plan.explain([(100, 0)]).total_us


@pytest.mark.loops
def test_heads_that_no_table_has_are_modelled_on_request(h100: Tables) -> None:
    """Llama 4's are 88 wide: launch, and the longer of FLOPs and bytes over their efficiency."""
    bare = compile_plan("llama-4-scout", "h100", h100, tp=8, engine="kernels")
    with pytest.raises(MissingTableError, match=r"head_dim 88.*allow_modelled=True"):
        bare.encode([(336, 336)])
    plan = compile_plan("llama-4-scout", "h100", h100, tp=8, allow_modelled=True, engine="kernels")
    part = next(part for part in plan.encode([(336, 336)]).parts if part.name.endswith("attention"))
    flops = 4 * 2 * 88 * 576**2
    longest_us = max(flops / 989.5e12, 2 * 4 * 2 * 88 * 576 / 3.35e12) * 1e6
    assert part.total_us == pytest.approx(34 * (7.7 + longest_us / 0.47))
    assert (part.origin, part.source, part.calls) == (4, "datasheet", 34)
    assert part.flops == 34 * flops
    assert part.mfu == pytest.approx(part.flops / (part.total_us / 1e6) / 989.5e12)


@pytest.mark.loops
def test_without_tables_all_of_an_encoder_is_modelled() -> None:
    with pytest.warns(UserWarning, match="datasheet"):
        plan = compile_plan("qwen3-vl-8b", "h100", None, engine="kernels")
    encoded = plan.encode([(1024, 768)])
    assert {part.origin for part in encoded.parts} == {4}
    with pytest.raises(ModelError, match="no vision encoder"):
        compile_plan("qwen3-8b", "h100", load_tables("h100"), engine="kernels").encode([(64, 64)])
