"""Captured numbers of tokens in a profile: read, checked, written, of which versions."""

from __future__ import annotations

import dataclasses

import pytest

from fastroof.engines import PrefillGraphs, load_engine
from fastroof.engines.values import MOST
from fastroof.errors import PlanError
from fastroof.evidence.profile_file import profile_text

SIZES = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
)
"""What SGLang 0.5.14 captures, as its cuda_graph_config.py lists them."""


def test_sglang_pads_to_the_next_captured_number_from_0_5_10_on():
    (graphs,) = load_engine("sglang-0.5.14").kernels.prefill_graphs
    for tokens in range(1, 8193):
        assert graphs.padded(tokens) == min(size for size in SIZES if size >= tokens)
    assert graphs.padded(8193) == 8193
    for version in ("0.5.10", "0.5.10.post1", "0.5.23"):
        assert [one.versions for one in load_engine(f"sglang-{version}").kernels.prefill_graphs] == [""]


@pytest.mark.parametrize("engine", ["sglang", "sglang-0.5.3"])
def test_prefill_graphs_need_a_known_version(engine):
    assert not [one for one in load_engine(engine).kernels.prefill_graphs if not one.versions]


@pytest.mark.parametrize("version", ["0.5.4", "0.5.9", "0.5.6.post2"])
def test_before_0_5_10_graphs_are_captured_on_request(version):
    engine = load_engine(f"sglang-{version}")
    (graphs,) = engine.kernels.prefill_graphs
    assert graphs.is_eager("LlamaForCausalLM", "h100", has_encoder=False)
    (wanted,) = engine.started_with({"graphs"}).kernels.prefill_graphs
    assert not wanted.is_eager("LlamaForCausalLM", "h100", has_encoder=False)
    assert engine.started_with({"no_graphs", "speculation"}).kernels.prefill_graphs == ()


@pytest.mark.parametrize(
    ("version", "architecture", "gpu", "has_encoder", "is_eager"),
    [
        ("0.5.10", "LlamaForCausalLM", "h100", False, False),
        ("0.5.10", "Qwen3_5MoeForConditionalGeneration", "h200", True, True),
        ("0.5.10", "GlmMoeDsaForCausalLM", "h200", False, True),
        ("0.5.10", "DeepseekV3ForCausalLM", "h200", False, False),
        ("0.5.10", "DeepseekV3ForCausalLM", "b200", False, True),
        ("0.5.14", "GlmMoeDsaForCausalLM", "h200", False, False),
        ("0.5.14", "Qwen3NextForCausalLM", "h200", False, True),
        ("0.5.15", "Qwen3_5MoeForConditionalGeneration", "h200", True, True),
        ("0.5.16", "Qwen3_5MoeForConditionalGeneration", "h200", True, False),
        ("0.5.17", "NemotronHForCausalLM", "h200", False, True),
        ("0.5.18", "NemotronHForCausalLM", "h200", False, False),
        ("0.5.20", "KimiLinearForCausalLM", "h200", False, True),
        ("0.5.20", "Gemma4ForConditionalGeneration", "h200", True, True),
        ("0.5.23", "Glm5NextForConditionalGeneration", "h200", True, False),
        ("0.5.23", "DeepseekV4ForCausalLM", "b200", False, True),
    ],
)
def test_models_of_which_sglang_captures_prompts(version, architecture, gpu, has_encoder, is_eager):
    (graphs,) = load_engine(f"sglang-{version}").kernels.prefill_graphs
    assert graphs.is_eager(architecture, gpu, has_encoder) == is_eager


def test_latent_attention_is_captured_up_to_a_number_of_tokens():
    limits = {}
    for version in ("0.5.10", "0.5.14", "0.5.15", "0.5.17", "0.5.18", "0.5.23"):
        (graphs,) = load_engine(f"sglang-{version}").kernels.prefill_graphs
        limits[version] = graphs.latent_tokens, graphs.sparse_tokens
    captured, never, chunk = 2048, 0, MOST
    assert limits == {
        "0.5.10": (captured, never), "0.5.14": (captured, captured), "0.5.15": (never, never),
        "0.5.17": (never, captured), "0.5.18": (captured, captured), "0.5.23": (chunk, chunk),
    }  # fmt: skip


def test_graphs_up_to_a_number_of_tokens():
    (graphs,) = load_engine("sglang-0.5.14").kernels.prefill_graphs
    short = graphs.up_to(2048)
    for tokens in range(1, 2049):
        assert short.padded(tokens) == graphs.padded(tokens)
    assert [short.padded(tokens) for tokens in (2049, 5000)] == [2049, 5000]
    assert graphs.up_to(1024).multiples[-1] == (1024, 64)
    assert graphs.up_to(35).multiples == ((32, 4),)
    assert graphs.up_to(0) is None
    assert graphs.up_to(8192) == graphs.up_to(MOST) == graphs


@pytest.mark.parametrize("word", ["dp", "alltoall", "speculation", "disaggregation", "lora", "offload"])
def test_settings_that_prevent_graphs(word):
    engine = load_engine("sglang-0.5.14")
    assert engine.started_with({word}).kernels.prefill_graphs == ()
    assert engine.started_with({word, "graphs"}).kernels.prefill_graphs == (
        engine.kernels.prefill_graphs[0].forced(),
    )
    later = load_engine("sglang-0.5.18")
    assert later.started_with({word}) is later
    assert engine.started_with(set()) is engine


def test_a_file_has_captured_numbers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[[kernels.prefill_graphs]]\nversions = '>=2'\nmultiples = [[32, 4], [256, 16]]\nreason = 'r'\n"
        "eager_on = [['b200', 'A']]\nlatent_tokens = 64\nnot_with = ['dp']\n"
        "[[kernels.prefill_graphs]]\nmultiples = [[64, 64]]\n",
        "utf-8",
    )
    profile = load_engine(path)
    ranged = PrefillGraphs(
        ((32, 4), (256, 16)), ">=2", "r", eager_on=(("b200", "A"),), latent_tokens=64, not_with=("dp",)
    )
    plain = PrefillGraphs(((64, 64),))
    assert profile.kernels.prefill_graphs == (ranged, plain)
    assert load_engine(dataclasses.asdict(profile)) == profile
    assert profile.at("1.0").kernels.prefill_graphs == (plain,)
    assert profile.at("2.0").kernels.prefill_graphs == (dataclasses.replace(ranged, versions=""), plain)
    again = tmp_path / "again.toml"
    again.write_text(profile_text(profile), "utf-8")
    assert dataclasses.replace(load_engine(again), name="mine") == profile
    hash(profile)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"multiples": []}, "must be pairs"),
        ({"multiples": 4}, "must be pairs"),
        ({"multiples": [[4]]}, "must be pairs"),
        ({"multiples": [[32, 4], [32, 16]]}, "must rise"),
        ({"multiples": [[33, 4]]}, "must rise, each a multiple"),
        ({"multiples": [[0, 4]]}, "a number of tokens in multiples"),
        ({"multiples": [[4, 0]]}, "a multiple of tokens"),
        ({"multiples": [[4.0, 4]]}, "a number of tokens in multiples"),
        ({"multiples": [[4, 4]], "versions": "2"}, "versions must be bounds"),
        ({"multiples": [[4, 4]], "versions": 2}, "versions of prefill_graphs must be text"),
        ({"multiples": [[4, 4]], "reason": 2}, "reason of prefill_graphs must be text"),
        ({"multiples": [[4, 4]], "sizes": 2}, "unknown key 'sizes'"),
        ({"multiples": [[4, 4]], "eager": "A"}, "eager of prefill_graphs must be a list"),
        ({"multiples": [[4, 4]], "eager_on": [["b200"]]}, "eager_on of prefill_graphs must be pairs"),
        ({"multiples": [[4, 4]], "eager_on": 5}, "eager_on of prefill_graphs must be pairs"),
        ({"multiples": [[4, 4]], "not_with": ["tp"]}, "not_with of prefill_graphs must be one of dp"),
        ({"multiples": [[4, 4]], "latent_tokens": -1}, "latent_tokens must be a whole number"),
        ({"multiples": [[4, 4]], "is_optional": 1}, "is_optional of prefill_graphs must be"),
        ({"versions": ">=2"}, "kernels.prefill_graphs 1: multiples is missing"),
        (5, "kernels.prefill_graphs 1: must be a table, got 5"),
    ],
)
def test_invalid_numbers_of_tokens_are_refused(keys, words):
    with pytest.raises(PlanError, match=words):
        load_engine({"name": "mine", "kernels": {"prefill_graphs": [keys]}})
    with pytest.raises(PlanError, match="prefill_graphs must be a list"):
        load_engine({"name": "mine", "kernels": {"prefill_graphs": 5}})
