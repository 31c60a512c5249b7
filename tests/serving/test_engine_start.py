"""Whether an engine starts: `fastroof.fit` and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastroof
from fastroof.config import load_gpu
from fastroof.errors import FastroofError
from fastroof.models import model_names
from fastroof.models.named import preset_config
from tests.command_line import run

QUESTIONS = [
    ("llama-3.1-70b", "h100", {"tp": 2}),
    ("llama-3.1-8b", "l40s", {"engine": "sglang"}),
    ("gemma-3-27b", "h100", {"engine": "vllm-0.12"}),
    ("qwen3.5-27b", "h100", {}),
    ("deepseek-v3", "h200", {"tp": 8}),
    ("gpt-oss-120b", "h100", {"engine": "trtllm"}),
]


ENGINES = ("vllm", "sglang", "trtllm-1.1", "vllm-0.12", "trtllm-1.0", "kernels", "infersim")

KINDS = (
    "bamba-9b", "deepseek-v3", "deepseek-v4-flash", "falcon-h1-34b", "gemma-3-12b", "glm-5.3-flash",
    "gpt-oss-20b", "kimi-linear-48b-a3b", "llama-4-scout", "mistral-7b-v0.1", "qwen3.5-27b",
)  # fmt: skip
"""One model for each way to keep tokens and states."""


run_fit = partial(run, "fit")


@pytest.mark.parametrize(("model", "gpu", "options"), QUESTIONS)
def test_largest_limits_start_and_one_more_does_not(model, gpu, options):
    found = fastroof.fit(model, gpu, **options)
    longest, most = found.largest_max_model_len, found.largest_max_num_seqs
    if longest:
        assert fastroof.fit(model, gpu, max_model_len=longest, **options).starts
    if 0 < longest < fastroof.load_model(model).max_position and found.engine.startswith("vllm"):
        assert not fastroof.fit(model, gpu, max_model_len=longest + 1, **options).starts
    if most:
        assert fastroof.fit(model, gpu, max_num_seqs=most, **options).starts
    if 0 < most < 65_536:
        assert not fastroof.fit(model, gpu, max_num_seqs=most + 1, **options).starts


@pytest.mark.parametrize(("model", "gpu", "options"), QUESTIONS)
def test_memory_is_that_of_the_plan(model, gpu, options):
    found = fastroof.fit(model, gpu, max_num_seqs=64, **options)
    with pytest.warns(UserWarning, match="datasheet"):
        plan = fastroof.compile_plan(model, gpu, "datasheet", allow_modelled=True, **options)
    assert found.memory == plan.memory_of(
        max_num_batched_tokens=found.max_num_batched_tokens, max_num_seqs=64
    )


def test_a_refused_start_names_changes_that_start():
    found = fastroof.fit("llama-3.1-70b", "h100", tp=2)
    assert not found.starts
    assert [one.code for one in found.refusals if not one.is_warning]
    assert {"tp", "dtype"} <= {name for change in found.changes for name in change.settings}
    for change in found.changes:
        changed = fastroof.fit("llama-3.1-70b", "h100", **{"tp": 2, **change.settings})
        assert changed.starts
        assert (changed.largest_max_model_len, changed.concurrency) == (
            change.max_model_len,
            change.concurrency,
        )


def test_a_start_has_no_changes_and_the_command_of_its_limits():
    found = fastroof.fit(
        "llama-3.1-8b", "h100", max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048
    )
    assert found.starts
    assert found.changes == ()
    arguments = dict(pair for pair in found.command.arguments if len(pair) == 2)
    assert arguments["--max-model-len"] == "4096"
    assert arguments["--max-num-seqs"] == "32"
    assert arguments["--max-num-batched-tokens"] == "2048"


def test_a_given_cache_is_taken_and_must_fit():
    given_cache = fastroof.fit("llama-3.1-8b", "h100", kv_cache_gib=10)
    assert given_cache.memory.kv_cache_bytes == 10 * 2**30
    assert ("--kv-cache-memory-bytes", str(10 * 2**30)) in given_cache.command.arguments
    too_much = fastroof.fit("llama-3.1-8b", "h100", kv_cache_gib=70)
    assert [one.code for one in too_much.refusals] == ["E"]
    assert not too_much.starts


def test_limits_above_the_engines_own_take_their_memory():
    sizes = [fastroof.fit("llama-3.1-8b", "h100", max_num_seqs=n).memory.sampler_bytes for n in (1024, 4096)]
    assert sizes[1] == pytest.approx(4 * sizes[0])
    assert fastroof.fit("llama-3.1-8b", "h100").largest_max_num_seqs < 65_536
    small, large = (fastroof.fit("llama-3.1-8b", "h100", max_num_batched_tokens=n) for n in (8192, 32_768))
    assert large.memory.forward_bytes == pytest.approx(4 * small.memory.forward_bytes)
    for tokens, tp in ((2048, 2), (8192, 4)):  # what makes room is judged with the same limits
        refused = fastroof.fit("qwen3-32b", "l40s", engine="sglang", max_num_batched_tokens=tokens)
        assert refused.refusals[0].remedy == f"tp={tp}"


def test_default_limits_are_those_of_the_card():
    small, large = fastroof.fit("llama-3.1-8b", "l40s"), fastroof.fit("llama-3.1-8b", "h100")
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)
    assert (large.max_num_batched_tokens, large.max_num_seqs) == (8192, 1024)


def test_the_estimate_of_graphs_names_its_variable():
    found = fastroof.fit("llama-3.1-8b", "h100")
    assert "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0" in dict(found.facts())["CUDA graphs"]
    assert fastroof.fit("llama-3.1-8b", "h100", engine="vllm-0.16.0").graphs_variable == ""


def test_what_other_processes_hold_keeps_it_from_starting():
    held = fastroof.fit("llama-3.1-8b", "h100", free_gib=40)
    assert [one.code for one in held.refusals] == ["A"]
    share = float(held.refusals[0].remedy.partition("=")[2].partition(",")[0])
    assert fastroof.fit("llama-3.1-8b", "h100", free_gib=40, memory_fraction=share).starts


def test_a_draft_takes_weights_and_cache():
    plain = fastroof.fit("llama-3.1-8b", "h100")
    drafted = fastroof.fit("llama-3.1-8b", "h100", num_draft_tokens=3, draft="mtp")
    assert drafted.memory.weight_bytes > plain.memory.weight_bytes
    assert drafted.memory.max_kv_tokens < plain.memory.max_kv_tokens


@settings(max_examples=15)
@given(st.integers(1, 4096), st.integers(1, 131_072), st.sampled_from([512, 2048, 8192, 16384]))
def test_smaller_limits_never_keep_a_start_from_starting(seqs, length, tokens):
    limits = {"max_num_seqs": seqs, "max_model_len": length, "max_num_batched_tokens": tokens}
    if not fastroof.fit("llama-3.1-70b", "h100", tp=2, **limits).starts:
        return
    for name, value in limits.items():
        smaller = {**limits, name: max(value // 2, 1)}
        # vLLM takes no more requests than tokens of a step
        smaller["max_num_seqs"] = min(smaller["max_num_seqs"], smaller["max_num_batched_tokens"])
        assert fastroof.fit("llama-3.1-70b", "h100", tp=2, **smaller).starts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 131_073}, "max_model_len must be a whole number from 1 to 131,072"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number"),
        ({"draft": "mtp"}, "draft needs num_draft_tokens"),
        ({"draft": "eagle", "num_draft_tokens": 2}, "unknown model 'eagle'"),
        ({"kv_cache_gib": -1}, "kv_cache_gib must be GiB from 0.001"),
        ({"kv_cache_gib": 10, "engine": "kernels"}, "kv_cache_gib needs a serving engine"),
        ({"tp": 3}, "tp"),
    ],
)
def test_invalid_questions_are_one_line(options, words):
    with pytest.raises(FastroofError) as caught:
        fastroof.fit("llama-3.1-8b", "h100", **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("model", "gpu", "options"), QUESTIONS)
def test_the_command_prints_the_answers_of_python(model, gpu, options):
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code, out, _ = run_fit("--model", model, "--gpu", gpu, *words, "--json")
    assert code == 0
    expected = fastroof.fit(model, gpu, **options).document()
    assert json.loads(out) == json.loads(json.dumps(expected))


def test_text_names_reasons_memory_and_changes():
    code, out, _ = run_fit("--model", "llama-3.1-70b", "--tp", "2")
    assert code == 0
    assert "starts: no" in out
    assert "one request of 131,072 tokens needs" in out
    assert "any of these makes it start" in out
    assert "--tp 4" in out
    code, out, _ = run_fit("--model", "llama-3.1-8b", "--max-num-seqs", "64")
    assert code == 0
    assert "starts: yes" in out
    assert "vllm serve meta-llama/" in out
    code, out, err = run_fit("--model", "llama-3.1-8b", "--max-num-seqs", "none")
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1


def test_vllm_refuses_more_requests_than_tokens_in_a_step() -> None:
    options = {"max_num_seqs": 1024, "max_num_batched_tokens": 512}
    found = fastroof.fit("llama-3.1-8b", "h100", **options)
    assert [one.code for one in found.refusals] == ["F"]
    assert next(dict(one.settings) for one in found.changes) == {"max_num_seqs": 512}
    assert found.largest_max_num_seqs == 512
    assert fastroof.fit("llama-3.1-8b", "h100", max_num_batched_tokens=512).starts
    assert fastroof.fit("llama-3.1-8b", "h100", engine="sglang", **options).starts


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        pytest.param(
            model, engine, marks=[] if model in KINDS and engine in ENGINES[:3] else pytest.mark.slow
        )
        for model in model_names()
        for engine in ENGINES
    ],
)
def test_blocks_are_the_room_and_hold_the_tokens(model: str, engine: str) -> None:
    # large enough for every model, so that no change is searched
    gpu = replace(load_gpu("b300"), hbm_bytes=16 * 2**40)
    try:
        found = fastroof.fit(model, gpu, engine=engine, max_num_seqs=16)
    except FastroofError as error:
        pytest.skip(str(error))
    memory, facts, document = found.memory, dict(found.facts()), found.document()["memory"]
    assert not [name for name in document if "part" in name]
    assert document["blocks"] == memory.blocks
    if memory.blocks is None or memory.block_bytes is None:
        # layers of other windows have pools of their own, and the blocks of DeepSeek-V4 are not known
        assert memory.window_parts or "deepseek-v4" in model
        assert document["block_bytes"] is document["block_tokens"] is None
        assert "blocks" not in facts["KV cache"]
        return
    assert 0 <= memory.kv_cache_bytes - memory.blocks * memory.block_bytes < memory.block_bytes
    assert memory.block_bytes >= 1024
    if memory.groups == 1 and engine != "sglang":
        assert memory.block_bytes == memory.block_tokens * memory.kv_bytes_per_token
    tokens = memory.blocks * memory.block_tokens
    assert found.cache_line_tokens <= tokens
    assert memory.max_kv_tokens <= tokens
    if memory.block_tokens > 1:
        assert facts["KV cache"].startswith(f"{memory.blocks:,} blocks of {memory.block_tokens:,} tokens")


def test_a_model_of_states_alone_has_no_blocks_of_tokens(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(preset_config("bamba-9b") | {"attn_layer_indices": []}), "utf-8")
    for engine in ("vllm", "trtllm-1.1", "kernels"):
        found = fastroof.fit(config, "h100", engine=engine)
        assert found.cache_line_tokens == 0
        assert dict(found.facts())["KV cache"] == "no layer caches tokens"
        assert found.memory.blocks is None
