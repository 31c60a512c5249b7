"""How many patches and tokens an image is, by the rules of each model's processor."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof.errors import ModelError
from fastroof.models import load_model
from fastroof.models.hf import Fields
from fastroof.models.vision import (
    AreaLimits,
    FilledTokens,
    ImagePieces,
    OneSize,
    PatchLimits,
    Tiles,
    VisionEncoder,
    vision_encoder,
)
from fastroof.operators.calls import Gemm

QWEN = AreaLimits(256**2, 4096**2)
MINIMAX = AreaLimits(4 * 28**2, 576 * 28**2)
KIMI = PatchLimits(16384)
GEMMA = FilledTokens(280)
LLAMA = Tiles(336)


@pytest.mark.parametrize(
    ("rule", "width", "height", "patch", "merge", "pieces", "patches", "tokens"),
    [
        # to the nearest 32: 1920 x 1088
        (QWEN, 1920, 1080, 16, 2, 1, 120 * 68, 60 * 34),
        # half a side goes to the even number of them, as Python rounds
        (QWEN, 1040, 1008, 16, 2, 1, 4 * 32 * 32, 32 * 32),
        # too small: both sides times sqrt(65536 / 100 / 50) = 3.62, up to whole ones: 384 x 192
        (QWEN, 100, 50, 16, 2, 1, 24 * 12, 12 * 6),
        # too large: both over sqrt(6000 x 5000 / 4096^2), down to whole ones: 4480 x 3712
        (QWEN, 6000, 5000, 16, 2, 1, 280 * 232, 140 * 116),
        (MINIMAX, 1920, 1080, 14, 2, 1, 576 * 4, 32 * 18),
        (MINIMAX, 280, 140, 14, 2, 1, 200, 10 * 5),
        # as it is, padded: 28 x 69 and 28 x 39
        (KIMI, 1920, 1080, 14, 2, 1, 138 * 78, 69 * 39),
        (KIMI, 28, 28, 14, 2, 1, 4, 1),
        (KIMI, 1, 1, 14, 2, 1, 4, 1),
        # 285 x 285 patches are 81,225: scale sqrt(16384 / 81225) = 0.449, 1796 pixels, padded to 1820
        (KIMI, 4000, 4000, 14, 2, 1, 130 * 130, 65 * 65),
        # 1000 patches in a row are shrunk to 512, 140 pixels in a column to 71, padded to 84
        (KIMI, 14000, 140, 14, 2, 1, 512 * 6, 256 * 3),
        # as many of 48 pixels as 280 tokens allow: 22 x 12, 16 x 16, one row
        (GEMMA, 1920, 1080, 16, 3, 1, 9 * 264, 22 * 12),
        (GEMMA, 100, 100, 16, 3, 1, 9 * 256, 16 * 16),
        (GEMMA, 10000, 50, 16, 3, 1, 9 * 236, 236),
        (FilledTokens(70), 10000, 50, 16, 3, 1, 9 * 70, 70),
        (FilledTokens(70), 50, 10000, 16, 3, 1, 9 * 70, 70),
        (OneSize(896), 1920, 1080, 14, 4, 1, 4096, 256),
        # 6 x 4 tiles would enlarge by 1.05, of more than 16: 5 x 3 shrinks by 0.875; plus the whole image
        (LLAMA, 1920, 1080, 14, 2, 16, 576, 16 * 144),
        (LLAMA, 336, 336, 14, 2, 1, 576, 144),
        (LLAMA, 300, 200, 14, 2, 1, 576, 144),
        (LLAMA, 672, 336, 14, 2, 3, 576, 3 * 144),
    ],
)
def test_images_become_patches(
    rule: Any, width: int, height: int, patch: int, merge: int, pieces: int, patches: int, tokens: int
) -> None:
    assert rule.pieces(width, height, patch, merge) == ImagePieces(pieces, patches, tokens)


@pytest.mark.parametrize("rule", [QWEN, MINIMAX, KIMI, GEMMA, LLAMA, OneSize(896)])
@pytest.mark.parametrize("size", [(640, 480), (481, 641), (3000, 17), (8000, 6000), (2, 2)])
def test_sides_may_be_swapped_and_limits_hold(rule: Any, size: tuple[int, int]) -> None:
    patch, merge = (16, 3) if isinstance(rule, FilledTokens) else (14, 2)
    found = rule.pieces(*size, patch, merge)
    assert rule.pieces(*size[::-1], patch, merge) == found
    assert found.pieces * found.patches == found.tokens * merge**2
    if isinstance(rule, FilledTokens):
        assert 0 < found.tokens <= rule.most_tokens
    if isinstance(rule, AreaLimits):
        assert rule.least_pixels <= found.patches * patch**2 <= rule.most_pixels


def encoder(wrapper: dict[str, Any]) -> VisionEncoder:
    found = vision_encoder(Fields(wrapper, "config.json"))
    assert found is not None
    return found


KIMI_K25 = {
    "patch_size": 14, "merge_kernel_size": [2, 2], "text_hidden_size": 7168, "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304, "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip
KIMI_K3 = {
    **KIMI_K25, "vt_hidden_size": 1024, "qkv_hidden_size": 1536, "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
}  # fmt: skip
MINIMAX_M3 = {
    "hidden_size": 1280, "num_attention_heads": 16, "num_hidden_layers": 32, "intermediate_size": 5120,
    "patch_size": 14, "image_size": 2016, "projection_dim": 6144, "model_type": "clip_vision_model",
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip


def test_kimis_tower_is_read_by_its_own_names() -> None:
    k25 = encoder({"model_type": "kimi_k25", "vision_config": KIMI_K25})
    assert (k25.num_layers, k25.hidden, k25.num_heads, k25.head_dim, k25.merge) == (27, 1152, 16, 72, 2)
    assert k25.pieces(1920, 1080).tokens == 69 * 39
    merger = [(call.n, call.k) for call in k25.calls(1).after if isinstance(call, Gemm)]
    assert merger == [(4608, 4608), (7168, 4608)]
    k3 = encoder({"model_type": "kimi_k3", "vision_config": KIMI_K3})
    assert k3.head_dim == 128
    qkv = next(call for call in k3.calls(1).layer if call.name == "qkv")
    assert isinstance(qkv, Gemm)
    assert (qkv.n, qkv.k) == (3 * 1536, 1024)
    # four times the patches of K2.5 before it shrinks an image: 256 x 256 and what pads them
    assert (k25.pieces(4000, 4000).tokens, k3.pieces(4000, 4000).tokens) == (65 * 65, 129 * 129)


def test_minimax_projects_patches_before_it_merges_them() -> None:
    m3 = encoder({"model_type": "minimax_m3_vl", "vision_config": MINIMAX_M3})
    assert (m3.merge, m3.frames, m3.head_dim, m3.projection) == (2, 2, 80, 6144)
    calls = m3.calls(1)
    shapes = [(call.n, call.k) for call in (*calls.projection, *calls.after) if isinstance(call, Gemm)]
    assert shapes == [(6144, 1280), (6144, 6144), (6144, 24576), (6144, 6144)]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen3-vl-8b", 2040), ("gemma-3-27b", 256), ("gemma-4-31b", 264), ("llama-4-scout", 2304)],
)
def test_presets_know_their_images(name: str, tokens: int) -> None:
    vision = load_model(name).vision
    assert vision is not None
    assert vision.pieces(1920, 1080).tokens == tokens


def test_invalid_and_unknown_images_are_refused() -> None:
    known = encoder({"model_type": "kimi_k25", "vision_config": KIMI_K25})
    for wrong in ((0, 10), (10, -1), (1.5, 10), (True, 1)):
        with pytest.raises(ModelError, match="an image must be"):
            known.pieces(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="aspect ratio must be at most 200"):
        known.pieces(4020, 20)
    with pytest.raises(ModelError, match="how images are resized for this encoder is unknown"):
        encoder({"model_type": "llava", "vision_config": MINIMAX_M3}).pieces(10, 10)
