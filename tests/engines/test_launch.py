"""Commands of engines: every argument is one that the engine has, and counts what the engine counts by it."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.engines import load_engine, serving_engines
from fastroof.engines.launch import Command, LaunchSettings, engine_commands, sglang, vllm
from fastroof.engines.launch.settings import BenchmarkLoad
from fastroof.engines.load import version_named
from tests.engines.arguments import Option, recorded
from tests.engines.arguments.passed import MODULES, ONE, OTHERS, check, commands, options_of, record_of

NEWEST = {engine: module.RELEASES[0] for engine, module in MODULES.items()}


def server(engine: str, settings: LaunchSettings) -> Command:
    return MODULES[engine].server(settings, NEWEST[engine])


RELEASES = [(engine, release) for engine, module in MODULES.items() for release in module.RELEASES]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "release"), [*RELEASES, *OTHERS.items()])
def test_every_argument_is_one_that_the_release_has(engine: str, release: str) -> None:
    records = {one.command: one for one in recorded(engine) if one.release == release}
    for command in commands(engine, release, all_together=True):
        check(command, records[" ".join(command.program)])
    used = {" ".join(command.program) for command in commands(engine, release)}
    assert not any(records[program].is_deprecated for program in used)


@pytest.mark.parametrize(("engine", "release"), [*RELEASES, *OTHERS.items()])
def test_arguments_of_each_setting_are_those_of_the_release(engine: str, release: str) -> None:
    for command in commands(engine, release):
        check(command, record_of(engine, release, " ".join(command.program)))


def test_a_record_names_where_it_was_read() -> None:
    for engine in (*MODULES, *OTHERS):
        assert all(one.read_in and one.options for one in recorded(engine))
        releases = [one.release for one in recorded(engine)]
        known = (OTHERS[engine],) if engine in OTHERS else MODULES[engine].RELEASES
        assert tuple(dict.fromkeys(releases)) == known


def test_choices_and_defaults_are_recorded() -> None:
    """Without them, no value would be compared."""
    serve = record_of("vllm", "0.33.0", "vllm serve")
    assert {"auto", "bfloat16", "fp8"} <= set(serve.options["--kv-cache-dtype"].choices)
    assert {"fp8", "modelopt_fp4"} <= set(serve.options["--quantization"].choices)
    assert serve.options["--gpu-memory-utilization"].default == "0.92"
    assert record_of("vllm", "0.12.0", "vllm serve").options["--gpu-memory-utilization"].default == "0.9"
    sglang = record_of("sglang", "0.5.23", "sglang serve")
    assert {"auto", "bf16", "fp8_e4m3"} <= set(sglang.options["--kv-cache-dtype"].choices)
    assert "--tensor-parallel-size" in sglang.options["--tp-size"].also
    assert sglang.options["--enable-dp-attention"] == Option(
        is_deprecated=True, use="--attn-dp-size <dp-size>"
    )
    for engine in ("vllm", "sglang"):
        for one in recorded(engine):
            if one.command in ("vllm serve", "sglang serve"):
                with_choices = [name for name, option in one.options.items() if option.choices]
                assert len(with_choices) > 15, (one.release, with_choices)


def test_every_serving_engine_has_commands_and_others_have_none() -> None:
    assert set(MODULES) == set(serving_engines())
    assert engine_commands("") is None
    vllm_now, vllm_before = (load_engine(name) for name in ("vllm", "vllm-0.12"))
    assert engine_commands("vllm", vllm_now.versions).release == NEWEST["vllm"]  # type: ignore[union-attr]
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


@pytest.mark.parametrize(
    ("named", "release", "is_known"),
    [
        ("vllm-0.33.0", "0.33.0", True),
        ("vllm-0.31", "0.31.0", True),
        ("vllm-0.25.1", "0.24.0", False),
        ("vllm-0.40.0", NEWEST["vllm"], False),
        ("vllm-0.10.2", "0.12.0", False),
        ("sglang-0.5.9", "0.5.9", True),
        ("sglang-0.5.21.post1", "0.5.21", False),
        ("vllm", NEWEST["vllm"], True),
    ],
)
def test_a_version_has_the_commands_of_a_release_before_it(named: str, release: str, is_known: bool) -> None:
    engine, version = named.partition("-")[0], version_named(named)
    found = engine_commands(engine, load_engine(engine).versions, version)
    assert found is not None
    assert (found.release, found.is_of_profile) == (release, is_known)
    assert found.image.rpartition(":")[2] == f"v{release}"


def test_names_of_profiles_are_ranges_and_no_versions() -> None:
    for name in ("vllm", "vllm-0.12", "trtllm-1.1", "my.toml", "kernels", "", None):
        assert version_named(name) == ""
    assert version_named("vllm-0.12.0") == "0.12.0"


def launch_settings(**changes: Any) -> LaunchSettings:
    return LaunchSettings(**{**vars(ONE), **changes})


def test_ranks_and_stages_count_as_each_engine_counts_them() -> None:
    ranks = launch_settings(tp=1, dp=8, ep=8, has_experts=True)
    vllms, sglangs, trtllms = (options_of(server(engine, ranks)) for engine in ("vllm", "sglang", "trtllm"))
    # vLLM: tp of a rank, limits of a rank
    assert (vllms["--tensor-parallel-size"], vllms["--data-parallel-size"], vllms["--max-num-seqs"]) == (
        "1",
        "8",
        "1024",
    )
    assert "--enable-expert-parallel" in vllms
    # SGLang: tp of all GPUs, and it divides chunk and requests by the ranks
    assert (sglangs["--tp-size"], sglangs["--attn-dp-size"], sglangs["--ep-size"]) == ("8", "8", "8")
    assert not {"--dp-size", "--enable-dp-attention"} & set(sglangs)
    before = options_of(MODULES["sglang"].server(ranks, "0.5.21"))
    assert "--attn-dp-size" not in before
    assert (before["--tp-size"], before["--dp-size"], before["--enable-dp-attention"]) == ("8", "8", "")
    assert (sglangs["--chunked-prefill-size"], sglangs["--max-running-requests"]) == (
        str(8 * 2048),
        str(8 * 1024),
    )
    assert sglangs["--max-prefill-tokens"] == "2048"
    # TensorRT-LLM: tp of all GPUs, the YAML makes ranks attend for themselves
    assert (trtllms["--tp_size"], trtllms["--ep_size"], trtllms["--max_batch_size"]) == ("8", "8", "1024")
    config = server("trtllm", ranks).config
    assert config["enable_attention_dp"] is True
    assert "attention_dp_config" not in config
    for name in ("trtllm-1.0", "trtllm-1.1"):
        steps = load_engine(name).data_parallel.balance_steps
        balance = server("trtllm", replace(ranks, balance_steps=steps)).config["attention_dp_config"]
        assert balance == {"enable_balance": True, "batching_wait_iters": 0, "timeout_iters": steps}
    stages = launch_settings(tp=4, pp=2)
    assert options_of(server("vllm", stages))["--max-num-seqs"] == "2048"
    assert options_of(server("sglang", stages))["--max-running-requests"] == "2048"
    assert options_of(server("trtllm", stages))["--max_batch_size"] == "1024"


def test_ranks_of_a_dense_model_are_copies() -> None:
    copies = launch_settings(tp=2, dp=4)
    found = options_of(server("sglang", copies))
    assert (found["--tp-size"], found["--dp-size"]) == ("2", "4")
    assert "--enable-dp-attention" not in found
    assert found["--max-running-requests"] == "1024"
    command = server("trtllm", copies)
    assert options_of(command)["--tp_size"] == "2"
    assert "enable_attention_dp" not in command.config
    assert command.unsaid == ("4 copies behind one port: start it 4 times",)


def test_formats_are_the_checkpoints_or_options() -> None:
    for engine in ("vllm", "sglang"):
        own = server(engine, launch_settings(dtype="nvfp4", checkpoint_dtype="nvfp4"))
        assert "--quantization" not in options_of(own)
        assert own.unsaid == ()
        online = server(engine, launch_settings(dtype="fp8"))
        assert options_of(online)["--quantization"] == "fp8"
        assert online.unsaid == ()
        impossible = server(engine, launch_settings(dtype="nvfp4"))
        assert "--quantization" not in options_of(impossible)
        assert "nvfp4 weights" in impossible.unsaid[0]
    assert "fp8 weights" in server("trtllm", launch_settings(dtype="fp8")).unsaid[0]
    # a checkpoint with an fp8 cache, and a deployment without
    other = launch_settings(auto_kv_dtype="fp8")
    assert options_of(server("vllm", other))["--kv-cache-dtype"] == "bfloat16"
    assert options_of(server("sglang", other))["--kv-cache-dtype"] == "bf16"
    assert "KV cache" in server("trtllm", other).unsaid[0]
    smaller = launch_settings(kv_dtype="fp8")
    assert options_of(server("vllm", smaller))["--kv-cache-dtype"] == "fp8"
    assert options_of(server("sglang", smaller))["--kv-cache-dtype"] == "fp8_e4m3"
    assert server("trtllm", smaller).config["kv_cache_config"]["dtype"] == "fp8"


@pytest.mark.parametrize(
    ("clients", "requests_per_s", "prompts"), [(1, 0.0, 20), (8, 0.0, 80), (8, 3.0, 1000), (200, 3.0, 2000)]
)
def test_a_benchmark_sends_whole_prompts_and_enough_of_them(
    clients: int, requests_per_s: float, prompts: int
) -> None:
    load = BenchmarkLoad("org/model", 1000, 50, clients, 300, requests_per_s=requests_per_s)
    for engine, module in MODULES.items():
        command = module.benchmark(load, NEWEST[engine])
        found = options_of(command)
        prefix = int(found.get("--random-prefix-len", 0))
        assert int(found["--random-input-len"]) + prefix == 1000
        assert (prefix == 300) != bool(command.unsaid)
        assert found["--num-prompts"] == str(prompts)


def test_drafts_are_arguments_or_unsaid_limits() -> None:
    by_itself = launch_settings(num_draft_tokens=3, draft="mtp")
    assert json.loads(options_of(server("vllm", by_itself))["--speculative-config"]) == {
        "method": "mtp", "num_speculative_tokens": 3,
    }  # fmt: skip
    found = options_of(server("sglang", by_itself))
    assert (found["--speculative-num-steps"], found["--speculative-num-draft-tokens"]) == ("3", "4")
    for engine, draft in itertools.product(MODULES, ("mtp", "small")):
        command = server(engine, launch_settings(num_draft_tokens=3, draft=draft))
        is_option = any("specul" in option for option in options_of(command))
        assert is_option != any("3 draft tokens" in text for text in command.unsaid), (engine, draft)


def test_draft_heads_are_arguments_of_releases_that_have_them() -> None:
    head = launch_settings(num_draft_tokens=3, draft="org/head", draft_method="dflash", draft_tp=1, tp=2)
    config = options_of(vllm.server(head, "0.24.0"))["--speculative-config"]
    assert json.loads(config) == {
        "method": "dflash", "num_speculative_tokens": 3, "model": "org/head", "draft_tensor_parallel_size": 1,
    }  # fmt: skip
    on_all = replace(head, draft_tp=0)
    assert options_of(sglang.server(on_all, "0.5.23"))["--speculative-algorithm"] == "DFLASH"
    for command in (
        vllm.server(head, "0.19.0"),
        sglang.server(on_all, "0.5.20"),
        sglang.server(head, "0.5.23"),
    ):
        assert "3 draft tokens by org/head: see" in " ".join(command.unsaid)
        assert not any("speculative" in option for option in options_of(command))


@pytest.mark.parametrize(("running", "graph"), [(1, 8), (40, 64), (64, 64), (700, 1024), (5000, 1024)])
def test_cuda_graphs_hold_what_runs(running: int, graph: int) -> None:
    config = server("trtllm", launch_settings(running=running)).config
    assert config["cuda_graph_config"]["max_batch_size"] == graph


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.integers(20, 120),
)
@settings(max_examples=60, deadline=None)
def test_a_shell_splits_a_command_into_its_words(model: str, width: int) -> None:
    for engine in MODULES:
        command = server(engine, launch_settings(model=model))
        path = "a folder/engine.yaml"
        text = command.shell(path, width=width)
        assert shlex.split(text.replace(" \\\n", " ")) == command.words(path)
        # no option, as which an engine would read it
        assert not model.startswith("-") or model not in command.words()


def test_scripts_put_their_own_variables_in() -> None:
    text = server("vllm", launch_settings()).shell(raw={"--port": '"$port"'})
    assert text.endswith('--port "$port"')
