"""How an engine was started: command lines and files come down to one, and what contradicts is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fastroof.errors import FastroofError, TableError
from fastroof.models import Layout
from fastroof.serving.evidence.engine_arguments import EngineArguments, read_engine_arguments

LLAMA = "meta-llama/Llama-3.1-70B-Instruct"


def started(tmp_path: Path, command: str, name: str = "serve.txt", **given: Any) -> EngineArguments:
    path = tmp_path / name
    path.write_text(command)
    return read_engine_arguments(path, {"gpu": "h100"} | given)


def test_vllm(tmp_path: Path) -> None:
    engine = started(
        tmp_path,
        "export HF_HOME=/x\n# as started\nVLLM_USE_V1=1 vllm serve "
        + LLAMA
        + " --tensor-parallel-size 4 \\\n"
        "  --kv-cache-dtype fp8 --max-num-batched-tokens=16384 --max-num-seqs 256 "
        "--gpu-memory-utilization 0.95 "
        "--port 8000 | tee log\n",
        version="0.15.1",
    )
    assert (engine.engine, engine.version, engine.model) == ("vllm", "0.15.1", LLAMA)
    assert (engine.dtype, engine.kv_dtype, engine.layout) == ("bf16", "fp8", Layout(4))
    schedule = engine.profile.scheduling
    assert (schedule.max_num_batched_tokens, schedule.max_num_seqs) == (16384, 256)
    assert engine.warnings == ()


def test_vllm_in_a_container(tmp_path: Path) -> None:
    engine = started(
        tmp_path,
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.15.1 --model Qwen/Qwen3-30B-A3B -tp 2 -dp 2 "
        "--enable-expert-parallel --no-enable-chunked-prefill",
    )
    assert engine.version == "0.15.1"
    assert engine.layout == Layout(2, dp=2, ep=4)
    assert not engine.profile.scheduling.chunked_prefill


def test_sglang_with_attention_by_ranks(tmp_path: Path) -> None:
    engine = started(
        tmp_path,
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 8 --ep 8 --dp 8 "
        "--enable-dp-attention --chunked-prefill-size 16384 --cuda-graph-bs 1 2 4",
    )
    assert (engine.engine, engine.dtype, engine.layout) == ("sglang", "fp8_block", Layout(1, dp=8, ep=8))
    assert engine.profile.scheduling.max_num_batched_tokens == 16384


def test_trtllm_with_its_options(tmp_path: Path) -> None:
    options = {
        "command": "trtllm-serve nvidia/Llama-3.1-8B-Instruct-FP8 --tp_size 2 --max_num_tokens 8192",
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.9},
        "enable_chunked_prefill": True,
        "gpu": "h200",
    }
    (tmp_path / "a.json").write_text(json.dumps(options))
    engine = read_engine_arguments(tmp_path / "a.json")
    assert (engine.gpu, engine.engine, engine.dtype, engine.kv_dtype) == ("h200", "trtllm", "fp8", "fp8")
    assert engine.profile.scheduling.chunked_prefill
    options |= {"enable_attention_dp": True, "moe_expert_parallel_size": 2}
    (tmp_path / "a.json").write_text(json.dumps(options))
    assert read_engine_arguments(tmp_path / "a.json").layout == Layout(1, dp=2, ep=2)


def test_files_agree_with_the_command(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    command = f"vllm serve {LLAMA} --tensor-parallel-size 4 --kv-cache-dtype fp8"
    own = started(tmp_path, command)
    toml = f'engine = "vllm"\nmodel = "{LLAMA}"\ntensor-parallel-size = 4\nkv_cache_dtype = "fp8"\n'
    yaml = f"engine: vllm\nmodel: {LLAMA}\ntp: 4\nkv_dtype: fp8\n"
    assert started(tmp_path, toml, "a.toml") == own
    assert started(tmp_path, yaml, "a.yaml") == own
    listed = json.dumps({"command": command.split()})
    assert started(tmp_path, listed, "a.json") == own


@pytest.mark.parametrize(
    ("words", "chunks", "seqs"),
    [
        ("--enable-chunked-prefill", True, 64),
        ("--enable-chunked-prefill True", True, 64),
        ("--enable-chunked-prefill False", False, 64),
        ("--no-enable-chunked-prefill", False, 64),
        ("--no-enable-chunked-prefill false", True, 64),
    ],
)
def test_a_switch_may_be_told_whether_it_is_on(tmp_path: Path, words: str, chunks: bool, seqs: int) -> None:
    engine = started(tmp_path, f"vllm serve {LLAMA} {words} --max-num-seqs {seqs}")
    schedule = engine.profile.scheduling
    assert (schedule.chunked_prefill, schedule.max_num_seqs) == (chunks, seqs)
    assert engine.warnings == ()


def test_a_word_after_a_switch_is_not_its_value(tmp_path: Path) -> None:
    """Any other word after a switch is overlooked: only a truth value belongs to it."""
    engine = started(tmp_path, f"vllm serve {LLAMA} --enable-chunked-prefill 0.5 --max-num-seqs 64")
    assert engine.profile.scheduling.chunked_prefill


def test_a_dtype_of_ones_own(tmp_path: Path) -> None:
    command = f"vllm serve {LLAMA}"
    assert started(tmp_path, command, dtype="auto").dtype == "bf16"
    assert started(tmp_path, command, dtype="fp8").dtype == "fp8"
    with pytest.raises(TableError, match=r"dtype must be auto or one of bf16, .*, got 'int3'"):
        started(tmp_path, command, dtype="int3")


def test_a_refusal_of_a_long_value_is_short(tmp_path: Path) -> None:
    options = {"engine": "vllm", "model": LLAMA, "tp": 2, "kv_dtype": list(range(5000))}
    with pytest.raises(TableError) as error:
        started(tmp_path, json.dumps(options), "a.json")
    assert "'[0, 1, 2, 3, " in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) < 400


def test_flags_that_are_not_represented_are_named(tmp_path: Path) -> None:
    engine = started(tmp_path, f"vllm serve {LLAMA} --frobnicate 3 --enforce-eager --dtype float16")
    unknown, overlooked, half = engine.warnings
    assert unknown.endswith("ignored: --frobnicate")
    assert overlooked.endswith("not modelled: --enforce-eager")
    assert "float16" in half


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        (f"vllm serve {LLAMA} -tp 4 --tensor-parallel-size 8", {}, "tp is 4 in"),
        (f"vllm serve {LLAMA} -tp 4", {"tp": 8}, "tp is 4 in"),
        (f"vllm serve {LLAMA}", {"engine": "sglang"}, "engine is vllm in"),
        (f"vllm serve {LLAMA} --model other", {}, "model is"),
        (f"vllm serve {LLAMA} -tp four", {}, "tp must be a whole number"),
        (f"vllm serve {LLAMA} -tp", {}, "-tp needs a value"),
        (f"vllm serve {LLAMA} --kv-cache-dtype int3", {}, "'int3' is not modelled"),
        (f"vllm serve {LLAMA} --dtype float32", {}, "'float32' is not modelled"),
        (f"vllm serve {LLAMA} --quantization magic", {}, "quantization 'magic'"),
        (f"vllm serve {LLAMA} --speculative-config {{}}", {}, "speculative decoding"),
        ("vllm serve --port 80", {}, "does not name the model"),
        (f"ollama run {LLAMA}", {}, "no engine command"),
        (f"vllm serve {LLAMA} 'x", {}, "not a command line"),
        (f"vllm serve {LLAMA} && trtllm-serve {LLAMA}", {}, "starts trtllm and vllm"),
        ("python -m sglang.launch_server --model-path x --tp 8 --dp 3 --enable-dp-attention", {}, ""),
        (f"vllm serve {LLAMA}", {"speed": 3}, "'speed' is not a setting"),
        ("", {}, "no engine command"),
    ],
)
def test_what_contradicts_or_is_missing_is_said(
    tmp_path: Path, command: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(FastroofError) as error:
        started(tmp_path, command, **given)
    assert words in str(error.value)


def test_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"vllm serve {LLAMA}")
    with pytest.raises(TableError, match="give --gpu h100"):
        read_engine_arguments(tmp_path / "a.txt")


def test_a_changed_file_is_read_or_refused(tmp_path: Path) -> None:
    command = f"vllm serve {LLAMA} --tensor-parallel-size 4 --kv-cache-dtype fp8 --max-num-seqs 64 --port 80"
    generator = random.Random(5)
    for suffix in (".txt", ".json", ".toml", ".yaml"):
        document = json.dumps({"engine": "vllm", "model": LLAMA, "tp": 4, "a": {"b": [1, {"c": None}]}})
        text = {".txt": command, ".toml": f'engine="vllm"\nmodel="{LLAMA}"\ntp=4'}.get(suffix, document)
        for _ in range(60):
            cut = list(text)
            for _ in range(generator.randint(1, 4)):
                cut[generator.randrange(len(cut))] = generator.choice("'\"{}[]=-\\ \n#9x\0")
            try:
                started(tmp_path, "".join(cut[: generator.randint(1, len(cut))]), f"a{suffix}")
            except FastroofError:
                continue
