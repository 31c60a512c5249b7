"""Vision encoders: each wrapper's own way of saying what becomes of patches."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof.errors import ModelError
from fastroof.models import load_model
from fastroof.models.vision import VisionEncoder

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": 14,
    "image_size": 896,
}


def encoder(wrapper: dict[str, Any], vision: dict[str, Any], text: str = "llama") -> VisionEncoder:
    """The image encoder of a small wrapper model."""
    model = load_model(
        {
            "architectures": ["AnyForConditionalGeneration"],
            "text_config": {**CONFIG, "model_type": text},
            "vision_config": {**VISION, **vision},
            **wrapper,
        }
    )
    assert model.vision is not None
    return model.vision


@pytest.mark.parametrize(
    ("wrapper", "vision", "merge"),
    [
        ({"model_type": "llava"}, {}, 1),
        ({"model_type": "other"}, {"spatial_merge_size": 2}, 2),
        ({"model_type": "mistral3", "spatial_merge_size": 2}, {}, 2),
        ({"model_type": "internvl", "downsample_ratio": 0.5}, {}, 2),
        ({"model_type": "other"}, {"pixel_shuffle_ratio": 0.25}, 4),
        ({"model_type": "other"}, {"pooling_kernel_size": 3}, 3),
        ({"model_type": "other", "mm_tokens_per_image": 1024}, {}, 2),
        ({"model_type": "other", "mm_tokens_per_image": 256}, {"image_size": [896, 896]}, 4),
        # more tokens than patches: none are pooled
        ({"model_type": "other", "mm_tokens_per_image": 256}, {"image_size": 56}, 1),
    ],
)
def test_patches_of_a_token(wrapper: dict[str, Any], vision: dict[str, Any], merge: int) -> None:
    assert encoder(wrapper, vision).merge == merge


@pytest.mark.parametrize(("name", "merge"), [("gemma-3-27b", 4), ("llama-4-scout", 2), ("gemma-4-31b", 3)])
def test_patches_of_a_token_of_presets(name: str, merge: int) -> None:
    found = load_model(name).vision
    assert found is not None
    assert found.merge == merge


@pytest.mark.parametrize(
    ("given", "patch_size"), [(14, 14), ([14, 14], 14), ([14, 28], None), ([0, 0], None), ([], None)]
)
def test_patches_have_one_side(given: Any, patch_size: int | None) -> None:
    """A wrapper whose patches are no squares loads as its text model, and its encoder cannot be timed."""
    found = encoder({"model_type": "internvl"}, {"patch_size": given})
    assert found.patch_size == patch_size
    if patch_size is None:
        with pytest.raises(ModelError, match="vision_config does not define patch_size"):
            found.calls(1)


def test_more_heads_than_elements_are_refused() -> None:
    assert encoder({"model_type": "llava"}, {"num_attention_heads": 64}).head_dim == 1
    found = encoder({"model_type": "llava"}, {"num_attention_heads": 65})
    with pytest.raises(ModelError, match="vision_config does not define head_dim"):
        found.calls(1)


def test_pixtral_has_a_gate_and_clip_does_not() -> None:
    widths = {}
    for model_type in ("pixtral", "clip_vision_model"):
        layer = encoder({"model_type": "llava"}, {"model_type": model_type}).calls(1).layer
        widths[model_type] = next(call.n for call in layer if call.name == "up")  # type: ignore[union-attr]
    assert widths == {"pixtral": 256, "clip_vision_model": 128}


@pytest.mark.parametrize("ratio", ["half", True, 0, -0.5, 2, [0.5], float("nan")])
def test_a_ratio_is_a_share(ratio: Any) -> None:
    with pytest.raises(ModelError, match=r"pixel_shuffle_ratio must be a number from 0\.01 to 1"):
        encoder({"model_type": "other"}, {"pixel_shuffle_ratio": ratio})
