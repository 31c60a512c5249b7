"""Recipes: the settings of a public benchmark's runs, from its scripts."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fastroof import compile_plan, load_tables
from fastroof.engines import Recipe, engine_of_version, recipe_for, recipes_of, serving_engines
from fastroof.errors import PlanError

FILE = {"engine": "vllm", "file": "run.sh", "commit": "0" * 40}


def test_every_engine_has_recipes_with_their_source():
    for engine in serving_engines():
        recipes = recipes_of(engine)
        assert recipes
        for recipe in recipes:
            assert recipe.engine == engine
            assert re.fullmatch("[0-9a-f]{40}", recipe.commit)
            assert recipe.file.split()[0].endswith((".sh", ".yaml"))
            assert recipe.versions or recipe.builds
            # values from no script are marked as chosen, with the reason
            assert {name for name in ("accepted", "accepted_dp") if getattr(recipe, name)} <= {
                *recipe.by_rows
            }
    assert recipes_of("tgi") == ()


@pytest.mark.parametrize(
    ("run", "kv_dtype", "labelled", "ran"),
    [
        (("vllm", "0.17.0", "b200", "minimax-m2.5", "fp8_block"), "bf16", (4, 1, 1), (4, 1, 4)),
        (("vllm", "0.18.0", "h200", "minimax-m2.5", "fp8_block"), "bf16", (8, 1, 1), (8, 1, 8)),
        (("vllm", "0.16.0", "h200", "minimax-m2.5", "fp8_block"), "bf16", (4, 1, 1), (4, 1, 1)),
        (("vllm", "0.18.0", "h100", "minimax-m2.5", "fp8_block"), "bf16", (1, 4, 4), (4, 1, 4)),
        (("vllm", "0.19.0", "b200", "minimax-m2.5-nvfp4", "nvfp4"), "fp8", (1, 4, 4), (1, 4, 4)),
        (("vllm", "0.17.0", "b200", "kimi-k2.5", "nvfp4"), "fp8", (1, 4, 4), (4, 1, 1)),
        (("sglang", "glm5-hopper", "h200", "glm-5-fp8", "fp8_block"), "bf16", (8, 1, 1), (8, 1, 1)),
        (("trtllm", "1.1.0rc2.post2", "h200", "deepseek-r1", "fp8_block"), "fp8", (8, 1, 8), (8, 1, 1)),
        (("trtllm", "1.1.0rc2.post2", "h200", "deepseek-r1", "fp8_block"), "fp8", (1, 8, 8), (1, 8, 8)),
    ],
)
def test_a_run_is_found_by_its_version(run, kv_dtype, labelled, ran):
    recipe = recipe_for(*run)
    assert recipe is not None
    assert recipe.kv_dtype == kv_dtype
    assert recipe.layout(*labelled) == ran
    assert recipe.layout(*ran) == ran


def test_days_distinguish_runs_of_one_version():
    run = ("vllm", "0.19.0", "b200", "minimax-m2.5", "fp8_block")
    early, late = (recipe_for(*run, measured_on=day) for day in ("2026-04-03", "2026-04-22"))
    assert early is not None
    assert late is not None
    assert (early.kv_dtype, late.kv_dtype) == ("", "fp8")
    assert recipe_for(*run, measured_on="2026-05-01") is None
    # a run without a version has a recipe of its days
    november = ("sglang", "", "b200", "deepseek-v3", "nvfp4")
    recipe = recipe_for(*november, measured_on="2025-11-10")
    assert recipe is not None
    assert recipe.layout(4, 1, 1) == (4, 1, 4)
    assert recipe_for(*november, measured_on="2026-03-25") is None


def test_drafts_are_known_where_an_image_ran_with_them():
    post3 = recipe_for("trtllm", "1.2.0rc6.post3", "b200", "deepseek-v3", "nvfp4")
    assert post3 is not None
    assert (post3.drafts(1), post3.drafts(8)) == ((3, 2.2), (1, 1.6))
    run = ("trtllm", "1.1.0rc2.post2", "h200", "deepseek-r1", "fp8_block")
    for speculative, drafts in ((None, (0, 0.0)), (False, (0, 0.0)), (True, (3, 2.2))):
        recipe = recipe_for(*run, speculative=speculative)
        assert recipe is not None
        assert recipe.drafts(1) == drafts
    assert recipe_for("trtllm", "1.2.0rc6.post3", "b200", "deepseek-v3", "nvfp4", speculative=False) is None


def test_the_size_of_a_layout_distinguishes_recipes():
    run = ("sglang", "0.5.9", "b200", "deepseek-v3", "fp8_block")
    found = {tp: recipe_for(*run, layout=(tp, 1, 1)) for tp in (4, 8)}
    assert {tp: recipe and recipe.max_num_batched_tokens for tp, recipe in found.items()} == {
        4: 8192,
        8: 32768,
    }


def test_layouts_can_go_by_prompts_outputs_and_clients():
    recipe = recipe_for("trtllm", "", "b200", "deepseek-v3.1-nvfp4", "nvfp4", measured_on="2025-11-02")
    assert recipe is not None
    ran = {
        (tp, isl, osl, clients): recipe.layout(tp, 1, 1, isl=isl, osl=osl, clients=clients)
        for tp, isl, osl, clients in [
            (4, 1024, 1024, 32), (4, 1024, 1024, 64), (4, 1024, 1024, 256),
            (8, 8192, 1024, 32), (8, 8192, 1024, 64),
        ]
    }  # fmt: skip
    assert list(ran.values()) == [(4, 1, 1), (4, 1, 4), (1, 4, 4), (8, 1, 1), (1, 8, 8)]
    assert recipe.layout(4, 1, 1) == (4, 1, 1)


def test_a_layout_can_decide_whether_drafts_ran():
    run = ("sglang", "0.5.9", "b200", "qwen3.5-397b-a17b", "fp8_block")
    found = {layout: recipe_for(*run, layout=layout) for layout in ((4, 1, 1), (4, 1, 4), (8, 1, 1))}
    assert [recipe and recipe.speculative for recipe in found.values()] == [True, False, False]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"versions": "0.12"}, "versions must be bounds"),
        ({"gpus": "h200"}, "gpus must be a list of names, got 'h200'"),
        ({"measured": ["2026-01-01"]}, "measured must be a first and a last day"),
        ({"kv_dtype": "int8"}, "kv_dtype must be one of bf16, fp8, got 'int8'"),
        ({"attention": "dp"}, "attention must be one of tp, got 'dp'"),
        ({"experts": "all"}, "experts must be one of tp, ep"),
        ({"max_num_seqs": -1}, "max_num_seqs must be a whole number"),
        ({"memory_fraction": "most"}, "memory_fraction must be a number of at least 0"),
        ({"speculative": True}, "num_draft_tokens must be above 0 exactly if speculative"),
        ({"num_draft_tokens": 3}, "num_draft_tokens must be above 0 exactly if speculative"),
        ({"labelled": [8]}, "labelled must be tp, dp and ep, got"),
        ({"ep_from": {"4": 8}}, "ep_from must be a table of clients"),
        ({"dp_from": {"4x1024x1024": "most"}}, "dp_from must be a table of clients"),
    ],
)
def test_invalid_recipes_are_refused(keys, words):
    with pytest.raises(PlanError, match=words):
        Recipe(**FILE, **keys)


def test_kernels_of_a_version_come_first_and_others_are_gone():
    minimax, other = "MiniMaxM2ForCausalLM", "Qwen3MoeForCausalLM"

    def source(version: str, gpu: str, architecture: str) -> str:
        kernels = engine_of_version("vllm", version).kernels
        kernel = kernels.of("moe", gpu, "fp8_block", {"tp": 4}, architecture)
        return "" if kernel is None else kernel.source

    older = "aiconfigurator-vllm-0.19.0"
    assert [source(version, "b200", minimax) for version in ("0.16.0", "0.17.0", "0.18.0")] == ["", older, ""]
    assert source("0.17.0", "b200", other) == ""
    assert [source(version, "h200", other) for version in ("0.15.1", "0.18.0", "0.24.0")] == ["", older, ""]
    # of no version what every version runs
    assert [source(version, "b200", minimax) for version in ("", "nightly")] == ["", ""]
    of_kernels = {
        version: engine_of_version("trtllm", version).kernels.of("moe", "b200", "fp8_block", {"dp": dp})
        for version, dp in (("1.2.0rc6.post2", 1), ("1.1.0rc2.post2", 1))
    }
    assert {
        version: kernel and (kernel.engine, kernel.shared_experts) for version, kernel in of_kernels.items()
    } == {"1.2.0rc6.post2": ("sglang", "apart"), "1.1.0rc2.post2": ("", "apart")}
    kernels = engine_of_version("trtllm", "1.2.0rc6.post2").kernels
    assert kernels.of("moe", "b200", "fp8_block", {"dp": 8}) is None


def test_recipes_of_vllm_0_10_on_b200_fuse_their_all_reduces() -> None:
    """Over 8 GPUs vLLM's own take longer for 256 and 512 KB than for 1 MB; those runs did not."""

    def engine(version: str, gpu: str) -> str:
        kernel = engine_of_version("vllm", version).kernels.of("allreduce", gpu, "fp8", {"tp": 8})
        return "" if kernel is None else kernel.engine

    runs = (("0.10.2", "b200"), ("0.12.0", "b200"), ("0.10.2", "h100"), ("", "b200"))
    assert [engine(*run) for run in runs] == ["trtllm", "", "", ""]
    tables = load_tables("b200")
    own, fused = (
        compile_plan(
            "llama-3.1-70b",
            "b200",
            tables,
            tp=8,
            dtype="fp8",
            engine=engine_of_version("vllm", version).kernels_alone(),
        )
        for version in ("0.12.0", "0.10.2")
    )
    tokens = [8, 16, 32, 64]
    assert (
        np.diff(own.decode_us(tokens, 1024)).min()
        < -80.0
        < 0.0
        < np.diff(fused.decode_us(tokens, 1024)).min()
    )
    sources = {part.source for part in fused.explain([(1, 1023)] * 16).operators if "all-reduce" in part.name}
    assert len(sources) == 1
    assert "trtllm" in sources.pop()


def test_prompts_wait_if_a_script_makes_them() -> None:
    trtllm = recipe_for("trtllm", "1.1.0rc2.post2", "b200", "llama-3.1-70b", "nvfp4")
    assert trtllm is not None
    wanted = ((1024, 1024, 4, 8), (1024, 1024, 8, 8), (1024, 8192, 4, 8))
    assert [trtllm.steps_to_wait(*one) for one in wanted] == [20, 0, 0]
    sglang = recipe_for("sglang", "0.5.9", "b200", "deepseek-v3", "fp8_block", layout=(8, 1, 1))
    assert sglang is not None
    assert [sglang.steps_to_wait(8192, 1024, 8, clients) for clients in (4, 15, 16, 512)] == [10, 10, 30, 30]
    with pytest.raises(PlanError, match="wait_steps must be pairs of clients and steps"):
        Recipe("sglang", "a", "b", wait_steps=((1, 2, 3),))
    with pytest.raises(PlanError, match="wait_lengths must be an isl and an osl"):
        Recipe("sglang", "a", "b", wait_lengths=(1024,))
