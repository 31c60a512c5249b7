"""Commands of engines: every argument is one that the engine has, and counts what the engine counts by it."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.engines import load_engine, serving_engines
from fastroof.engines.launch import (
    BenchmarkLoad,
    Command,
    LaunchSettings,
    engine_commands,
    sglang,
    trtllm,
    vllm,
)
from tests.engines.arguments import recorded

MODULES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}
ONE = LaunchSettings(
    model="org/a-model", tp=2, pp=1, dp=1, ep=1, has_experts=False, max_batched_tokens=2048, max_seqs=1024,
    max_context=32_768, running=40, memory_fraction=0.9, dtype="bf16", kv_dtype="bf16",
    checkpoint_dtype="bf16", checkpoint_kv_dtype="bf16",
)  # fmt: skip


def some_settings() -> Iterator[LaunchSettings]:
    axes: dict[str, tuple[Any, ...]] = {
        "split": ((1, 1, 1, 1), (8, 2, 1, 1), (1, 1, 8, 8), (2, 1, 4, 1)),
        "has_experts": (False, True),
        "dtype": ("bf16", "fp8", "nvfp4"),
        "kv_dtype": ("bf16", "fp8"),
        "checkpoint_kv_dtype": ("bf16", "fp8"),
        "draft": ("", "mtp", "small"),
        "role": ("", "prefill", "decode"),
        "memory_fraction": (0.0, 0.9),
        "balance_steps": (0, 60),
    }
    for values in itertools.product(*axes.values()):
        changes = dict(zip(axes, values, strict=True))
        tp, pp, dp, ep = changes.pop("split")
        drafts = 3 if changes["draft"] else 0
        yield LaunchSettings(
            **{**vars(ONE), **changes, "tp": tp, "pp": pp, "dp": dp, "ep": ep, "num_draft_tokens": drafts}
        )


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return found


def check(engine: str, command: Command) -> None:
    program = " ".join(command.program)
    records = [one for one in recorded(engine) if one.command == program]
    assert {one.release for one in records} == set(MODULES[engine].RELEASES), program
    options = {group[0]: group[1:] for group in command.arguments if group[0].startswith("--")}
    if command.config:
        options[command.config_option] = ("engine.yaml",)
    for record in records:
        assert set(options) <= record.options, record.release
        assert set(flat(command.config)) <= record.keys, record.release
        for option, allowed in record.values.items():
            assert not options.get(option) or options[option][0] in allowed, (option, options[option])


@pytest.mark.slow
@pytest.mark.parametrize("engine", serving_engines())
def test_every_argument_is_one_that_the_engine_has(engine: str) -> None:
    commands = engine_commands(engine)
    assert commands is not None
    for asked in some_settings():
        check(engine, commands.server(asked))
    for prefix, rate in itertools.product((0, 400), (0.0, 2.5)):
        load = BenchmarkLoad("org/a-model", 1000, 100, 40, prefix, requests_per_s=rate)
        check(engine, commands.benchmark(load))


@pytest.mark.parametrize("engine", serving_engines())
def test_a_record_says_where_it_was_read(engine: str) -> None:
    assert all(one.read_in and one.options for one in recorded(engine))


def test_every_serving_engine_has_commands_and_what_is_none_has_not() -> None:
    assert set(MODULES) == set(serving_engines())
    assert engine_commands("") is None
    vllm_now, vllm_before = (load_engine(name) for name in ("vllm", "vllm-0.12"))
    assert engine_commands("vllm", vllm_now.versions).release == "0.24.0"  # type: ignore[union-attr]
    before = engine_commands("vllm", vllm_before.versions)
    assert before is not None
    assert (before.release, before.is_of_profile, before.image) == (
        "0.13.0",
        True,
        "vllm/vllm-openai:v0.13.0",
    )
    old = engine_commands("trtllm", load_engine("trtllm-1.0").versions)
    assert old is not None
    assert not old.is_of_profile


def options_of(command: Command) -> dict[str, str]:
    return {group[0]: group[1] if len(group) > 1 else "" for group in command.arguments}


def asked(**changes: Any) -> LaunchSettings:
    return LaunchSettings(**{**vars(ONE), **changes})


def test_ranks_and_stages_count_as_each_engine_counts_them() -> None:
    ranks = asked(tp=1, dp=8, ep=8, has_experts=True)
    vllms, sglangs, trtllms = (options_of(module.server(ranks)) for module in (vllm, sglang, trtllm))
    # vLLM: tp of a rank, limits of a rank
    assert (vllms["--tensor-parallel-size"], vllms["--data-parallel-size"], vllms["--max-num-seqs"]) == (
        "1",
        "8",
        "1024",
    )
    assert "--enable-expert-parallel" in vllms
    # SGLang: tp of all GPUs, and it divides chunk and requests by the ranks
    assert (sglangs["--tp-size"], sglangs["--dp-size"], sglangs["--ep-size"]) == ("8", "8", "8")
    assert "--enable-dp-attention" in sglangs
    assert (sglangs["--chunked-prefill-size"], sglangs["--max-running-requests"]) == (
        str(8 * 2048),
        str(8 * 1024),
    )
    assert sglangs["--max-prefill-tokens"] == "2048"
    # TensorRT-LLM: tp of all GPUs, the YAML says that ranks attend for themselves
    assert (trtllms["--tp_size"], trtllms["--ep_size"], trtllms["--max_batch_size"]) == ("8", "8", "1024")
    config = trtllm.server(ranks).config
    assert config["enable_attention_dp"] is True
    assert "attention_dp_config" not in config
    for name in ("trtllm-1.0", "trtllm-1.1"):
        steps = load_engine(name).data_parallel.balance_steps
        balance = trtllm.server(replace(ranks, balance_steps=steps)).config["attention_dp_config"]
        assert balance == {"enable_balance": True, "batching_wait_iters": 0, "timeout_iters": steps}
    stages = asked(tp=4, pp=2)
    assert options_of(vllm.server(stages))["--max-num-seqs"] == "2048"
    assert options_of(sglang.server(stages))["--max-running-requests"] == "2048"
    assert options_of(trtllm.server(stages))["--max_batch_size"] == "1024"


def test_ranks_of_a_dense_model_are_copies() -> None:
    copies = asked(tp=2, dp=4)
    found = options_of(sglang.server(copies))
    assert (found["--tp-size"], found["--dp-size"]) == ("2", "4")
    assert "--enable-dp-attention" not in found
    assert found["--max-running-requests"] == "1024"
    command = trtllm.server(copies)
    assert options_of(command)["--tp_size"] == "2"
    assert "enable_attention_dp" not in command.config
    assert command.unsaid == ("4 copies behind one port: start it 4 times",)


def test_formats_are_the_checkpoints_or_said() -> None:
    for module in (vllm, sglang):
        own = module.server(asked(dtype="nvfp4", checkpoint_dtype="nvfp4"))
        assert "--quantization" not in options_of(own)
        assert own.unsaid == ()
        online = module.server(asked(dtype="fp8"))
        assert options_of(online)["--quantization"] == "fp8"
        assert online.unsaid == ()
        impossible = module.server(asked(dtype="nvfp4"))
        assert "--quantization" not in options_of(impossible)
        assert "nvfp4 weights" in impossible.unsaid[0]
    assert "fp8 weights" in trtllm.server(asked(dtype="fp8")).unsaid[0]
    # a checkpoint that asks for an fp8 cache, and a deployment that does not
    other = asked(checkpoint_kv_dtype="fp8")
    assert options_of(vllm.server(other))["--kv-cache-dtype"] == "bfloat16"
    assert options_of(sglang.server(other))["--kv-cache-dtype"] == "bf16"
    assert "KV cache" in trtllm.server(other).unsaid[0]
    smaller = asked(kv_dtype="fp8")
    assert options_of(vllm.server(smaller))["--kv-cache-dtype"] == "fp8"
    assert options_of(sglang.server(smaller))["--kv-cache-dtype"] == "fp8_e4m3"
    assert trtllm.server(smaller).config["kv_cache_config"]["dtype"] == "fp8"


def test_drafts_are_given_or_said() -> None:
    by_itself = asked(num_draft_tokens=3, draft="mtp")
    assert json.loads(options_of(vllm.server(by_itself))["--speculative-config"]) == {
        "method": "mtp", "num_speculative_tokens": 3,
    }  # fmt: skip
    found = options_of(sglang.server(by_itself))
    assert (found["--speculative-num-steps"], found["--speculative-num-draft-tokens"]) == ("3", "4")
    for module, draft in itertools.product(MODULES.values(), ("mtp", "small")):
        command = module.server(asked(num_draft_tokens=3, draft=draft))
        said = any("specul" in option for option in options_of(command))
        assert said != any("3 draft tokens" in text for text in command.unsaid), (module.TITLE, draft)


@pytest.mark.parametrize(("running", "graph"), [(1, 8), (40, 64), (64, 64), (700, 1024), (5000, 1024)])
def test_cuda_graphs_hold_what_runs(running: int, graph: int) -> None:
    config = trtllm.server(asked(running=running)).config
    assert config["cuda_graph_config"]["max_batch_size"] == graph


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.integers(20, 120),
)
@settings(max_examples=60, deadline=None)
def test_a_shell_takes_a_command_as_it_is_meant(model: str, width: int) -> None:
    for module in MODULES.values():
        command = module.server(asked(model=model))
        path = "a folder/engine.yaml"
        text = command.shell(path, width=width)
        assert shlex.split(text.replace(" \\\n", " ")) == command.words(path)
        assert not any(
            word.startswith("-") and model.startswith("-") for word in command.words() if model in word
        )


def test_scripts_put_their_own_variables_in() -> None:
    text = vllm.server(asked()).shell(raw={"--port": '"$port"'})
    assert text.endswith('--port "$port"')
