"""Measured acceptance lengths: the shipped curves, and what ``accepted="auto"`` takes from them."""

from __future__ import annotations

import json
import pickle

import pytest
from typer.testing import CliRunner

from fastroof import SpeculativeDecoding, compile_plan
from fastroof.cli import app
from fastroof.errors import BatchError, FastroofError
from fastroof.plan.acceptance_curves import ONE_LAYER, acceptance_curves, accepted_auto
from fastroof.serving import estimate
from fastroof.sweep import load_spec

MODELS = sorted({curve.model for curve in acceptance_curves()})


@pytest.fixture(scope="module")
def plan():
    return compile_plan("minimax-m3-nvfp4", "b200", tp=4, engine="vllm", allow_modelled=True)


def test_every_curve_has_every_number_of_draft_tokens():
    assert len(acceptance_curves()) == 14
    for curve in acceptance_curves():
        assert len(curve.lengths) == 8
        # one draft token or more, of which not all are accepted
        assert all(1.0 < length < count + 2 for count, length in enumerate(curve.lengths))
        # the first steps of a curve gain; later ones are within noise
        assert list(curve.lengths[:4]) == sorted(curve.lengths[:4])


def test_the_curve_of_a_model_is_that_of_any_of_its_formats():
    for name in ("qwen3.5-397b-a17b", "qwen3.5-397b-a17b-nvfp4", "Qwen/Qwen3.5-397B-A17B-FP8"):
        assert accepted_auto(name, 4, "mtp")[0] == 3.97
    assert accepted_auto("glm-5.2", 1, None) == accepted_auto("glm-5.2-fp8", 1, "mtp") != (0.0, "")
    # another model that begins alike
    with pytest.raises(BatchError, match=r"glm-5 has none; .*glm-5\.2-fp8"):
        accepted_auto("glm-5", 1, None)


def test_the_source_names_what_was_measured():
    assert accepted_auto("glm-5.2", 3, "mtp")[1] == (
        "glm-5.2-fp8 with MTP, SPEED-Bench coding, thinking on, by InferenceX"
    )
    source = accepted_auto("kimi-k2.5", 3, "mtp")[1]
    assert source.startswith("kimi-k2.5-nvfp4 with EAGLE-3, ")
    assert source.endswith("; timed as a layer of the model")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("draft", [None, "mtp"])
def test_every_model_with_a_curve_has_an_answer_or_one_line(model, draft):
    drafters = {curve.drafter for curve in acceptance_curves() if curve.model == model}
    if draft and not drafters & set(ONE_LAYER):
        with pytest.raises(BatchError, match="drafts all tokens at once; give the mean tokens per step"):
            accepted_auto(model, 2, draft)
        return
    lengths = [accepted_auto(model, count, draft)[0] for count in range(1, 9)]
    assert tuple(lengths) in {curve.lengths for curve in acceptance_curves() if curve.model == model}
    with pytest.raises(BatchError, match="measured with 1 to 8 draft tokens, got 9"):
        accepted_auto(model, 9, draft)


def test_auto_is_the_number_that_was_measured(plan):
    wanted = SpeculativeDecoding(3, "auto", draft="mtp")
    given = SpeculativeDecoding(3, 2.83, draft="mtp")
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    found = estimate(plan, 1024, 256, [1, 16], speculation=wanted)
    same = estimate(plan, 1024, 256, [1, 16], speculation=given)
    assert found.tpot_ms.tolist() == same.tpot_ms.tolist()
    got = found.made_from["fastroof.speculative_decoding"]
    assert got.startswith("3 draft tokens by mtp, 2.83 tokens accepted a step (minimax-m3 with EAGLE-3")
    assert wanted.for_model("minimax-m3").for_model("any") == wanted.for_model("minimax-m3-nvfp4")
    assert SpeculativeDecoding(0, "auto").for_model("any").acceptance_length == 1.0
    assert given.for_model("any") is given
    with pytest.raises(BatchError, match=r"for_model\(name\)"):
        _ = wanted.acceptance_length


def test_a_draft_model_has_no_measured_length(plan):
    draft = compile_plan("llama-3.1-8b", "b200", tp=4, engine="kernels")
    with pytest.raises(BatchError, match=r"with a draft model: .* was measured with EAGLE-3"):
        estimate(plan, 1024, 256, 1, speculation=SpeculativeDecoding(3, "auto", draft))


@pytest.mark.parametrize("accepted", ["Auto", "", "automatic", ("auto",)])
def test_nothing_else_is_auto(accepted):
    with pytest.raises(FastroofError, match=r"number from 1 to 4.*'auto'|3 rates from 0 to 1"):
        SpeculativeDecoding(3, accepted)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_commands_name_the_source():
    words = (
        "--model", "minimax-m3-nvfp4", "--gpu", "b200", "--isl", 1024, "--osl", 256, "--num-draft-tokens", 3,
        "--draft", "mtp", "--allow-modelled",
    )  # fmt: skip
    answers = {}
    for accepted in ("auto", "2.83"):
        served = run("serving", *words, "--tp", 4, "--clients", 8, "--accepted", accepted, "--json")
        assert served.exit_code == 0, served.output
        answers[accepted] = json.loads(served.output)
    assert answers["auto"].pop("accepted_from").startswith("minimax-m3 with EAGLE-3")
    assert answers["auto"] == answers["2.83"]
    shown = run("serving", *words, "--tp", 4, "--clients", 8, "--accepted", "auto")
    assert "2.83 tokens a step (minimax-m3 with EAGLE-3" in shown.output
    refused = run(
        "serving", "--model", "llama-3.1-8b", "--isl", 99, "--osl", 9, "--clients", 8,
        "--num-draft-tokens", 3, "--accepted", "auto",
    )  # fmt: skip
    assert refused.exit_code == 2
    assert "accepted='auto' needs a measured acceptance length, and llama-3.1-8b" in refused.output


def test_a_sweep_takes_auto_per_model():
    options = {"num_draft_tokens": 3, "accepted": "auto", "draft": "mtp"}
    spec = load_spec(
        {
            "models": ["minimax-m3-nvfp4", "glm-5.2-fp8"], "gpus": "b200", "tp": [8], "mode": "aggregated",
            "isl": 1024, "osl": 128, "clients": [8], "replicas": [1], "speculation": options,
        }
    )  # fmt: skip
    sources = spec.accepted_sources()
    assert sources["glm-5.2-fp8"].startswith("2.99 tokens a step (glm-5.2-fp8 with MTP")
    assert sources["minimax-m3-nvfp4"].startswith("2.83 tokens a step (minimax-m3 with EAGLE-3")
