"""Figures of decode attention beside prefill in a profile: read, checked, listed."""

from __future__ import annotations

import dataclasses

import pytest

from fastroof.config import gpu_names, load_gpu
from fastroof.engines import EngineProfile, KernelChoices, MixedAttention, load_engine
from fastroof.errors import PlanError
from fastroof.evidence.profile_file import profile_text

FIGURE = MixedAttention(
    0.13, (0.1, 0.19), gpu="h100", head_dim=128, kv_dtype="bf16", reason="r", evidence="e"
)


def test_a_file_has_figures(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[[kernels.mixed_attention]]\nns = 0.13\ninterval_ns = [0.1, 0.19]\ngpu = 'h100'\nhead_dim = 128\n"
        "kv_dtype = 'bf16'\nreason = 'r'\nevidence = 'e'\n[[kernels.mixed_attention]]\nns = 1\n",
        "utf-8",
    )
    profile = load_engine(path)
    assert profile.kernels.mixed_attention == (FIGURE, MixedAttention(1.0))
    assert load_engine(dataclasses.asdict(profile)) == profile
    assert profile.kernels_alone().kernels == profile.kernels
    again = tmp_path / "again.toml"
    again.write_text(profile_text(profile), "utf-8")
    assert dataclasses.replace(load_engine(again), name="mine") == profile
    hash(profile)
    wanted = (("h100", 128, "bf16", 0.13), ("h100", 64, "bf16", 1.0), ("b200", 128, "fp8", 1.0))
    for gpu, head_dim, kv_dtype, ns in wanted:
        assert profile.kernels.mixed_attention_ns(gpu, head_dim, kv_dtype) == ns
    assert KernelChoices(mixed_attention=(FIGURE,)).mixed_attention_ns("b200", 128, "bf16") == 0.0
    assert load_engine("kernels").kernels.mixed_attention == ()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ns": 0}, "ns of mixed_attention must be a number above 0, got 0"),
        ({"ns": -0.1}, "above 0"),
        ({"ns": True}, "above 0"),
        ({"ns": float("inf")}, "above 0"),
        ({"ns": float("nan")}, "above 0"),
        ({"ns": "0.1"}, "above 0"),
        ({"ns": 0.1, "interval_ns": [0.2, 0.3]}, "two numbers with ns = 0.1 between them"),
        ({"ns": 0.1, "interval_ns": [0.1]}, "two numbers"),
        ({"ns": 0.1, "interval_ns": 0.1}, "two numbers"),
        ({"ns": 0.1, "interval_ns": ["a", "b"]}, "two numbers"),
        ({"ns": 0.1, "gpu": 5}, "gpu of mixed_attention must be text, got 5"),
        ({"ns": 0.1, "head_dim": -1}, "head_dim of mixed_attention must be a whole number"),
        ({"ns": 0.1, "head_dim": 64.5}, "whole number"),
        ({"ns": 0.1, "head_dim": True}, "whole number"),
        ({"gpu": "h100"}, "kernels.mixed_attention 1: ns is missing"),
        (5, "kernels.mixed_attention 1: must be a table, got 5"),
        ({"ns": 0.1, "rate": 2}, "unknown key 'rate'; valid: ns"),
    ],
)
def test_invalid_figures_are_refused(keys, words):
    with pytest.raises(PlanError, match=words):
        load_engine({"name": "mine", "kernels": {"mixed_attention": [keys]}})


def test_figures_are_a_list():
    with pytest.raises(PlanError, match="mixed_attention must be a list of tables"):
        load_engine({"name": "mine", "kernels": {"mixed_attention": {"ns": 0.1}}})
    assert EngineProfile("mine").kernels.mixed_attention == ()


@pytest.mark.parametrize("engine", ["vllm", "vllm-0.12"])
def test_every_card_with_flash_attention_has_one_call(engine: str) -> None:
    """It needs capability 8, with which bf16 came, and is not the default on 10."""
    capability_10 = {"b200", "b300", "gb200", "gb300", "vr200"}
    cards = [load_gpu(name) for name in gpu_names()]
    flash = {
        card.kernel_name
        for card in cards
        if card.title.startswith("NVIDIA") and card.half_dtype == "bf16" and card.name not in capability_10
    }
    assert sorted(flash) == sorted(load_engine(engine).kernels.one_attention_call)
