"""What a plan holds in one GPU's memory."""

from __future__ import annotations

import dataclasses

import pytest

from fastroof import compile_plan, load_model
from fastroof.units import GIB


def memory(h100, model="llama-3.1-8b", **options):
    return compile_plan(model, "h100", h100, **{"max_tokens": 64, **options}).memory


def test_llama_8b_worked_out_by_hand(h100):
    found = memory(h100)
    layer = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    assert found.weight_bytes == 2 * (32 * layer + 2 * 128256 * 4096 + 4096)
    assert found.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)  # 8.03 B parameters
    assert found.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert found.reserve_bytes == pytest.approx(8 * GIB, abs=1)
    left = 72 * GIB - found.weight_bytes - found.activation_bytes
    assert found.max_kv_tokens == pytest.approx(left / found.kv_bytes_per_token, abs=1)


def test_what_splits_and_what_does_not(h100):
    whole, split = memory(h100), memory(h100, tp=8)
    assert split.kv_bytes_per_token * 8 == whole.kv_bytes_per_token
    norms = 2 * (32 * 2 * 4096 + 4096)
    padding = 2 * 2 * 4096 * (load_model("llama-3.1-8b").padded_vocab(8) - 128256)
    assert (split.weight_bytes - norms) * 8 == whole.weight_bytes - norms + padding
    # fewer KV heads than GPUs: they are replicated
    four, eight = (memory(h100, "qwen2.5-7b", tp=tp).kv_bytes_per_token for tp in (1, 4))
    assert four == 4 * eight


def test_fp8_halves_linear_weights_and_kv(h100):
    wide, narrow = memory(h100), memory(h100, dtype="fp8", kv_dtype="fp8")
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token
    linear = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    assert wide.weight_bytes - narrow.weight_bytes == linear
    assert narrow.max_kv_tokens > 2 * wide.max_kv_tokens


def test_a_model_that_does_not_fit_has_no_room(h100):
    assert memory(h100, "llama-3.1-70b").max_kv_tokens == 0
    assert memory(h100, "llama-3.1-70b", tp=4).max_kv_tokens > 0


def test_activations_grow_with_the_largest_step(h100):
    small, large = (memory(h100, max_tokens=n) for n in (64, 8192))
    assert large.activation_bytes == 128 * small.activation_bytes
    assert large.max_kv_tokens < small.max_kv_tokens


def test_tied_embeddings_are_held_once(h100):
    model = load_model("llama-3.1-8b")
    tied = dataclasses.replace(model, tie_embeddings=True)
    both = [memory(h100, m).weight_bytes for m in (model, tied)]
    assert both[0] - both[1] == 2 * 128256 * 4096
