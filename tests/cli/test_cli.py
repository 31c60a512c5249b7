"""The command line: what it prints, how it fails, and that it gives the library's own numbers."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastroof
from fastroof import compile_plan, load_tables
from fastroof.cli.output import ORIGIN_WORDS, percent, print_table, scaled, time_words
from fastroof.cli.tables import validate as validate_command
from fastroof.cli.workload_options import Requests, parse_requests, parse_sizes
from fastroof.columns import ORIGINS
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import EngineProfile, KernelChoices, OperatorKernel, engine_names, load_engine
from fastroof.errors import BatchError, LookupInputError
from fastroof.load.aiconfigurator import import_aiconfigurator, installed_root
from fastroof.serving import estimate
from tests.command_line import run

CHECKOUT = Path(__file__).resolve().parents[2]
H100 = CHECKOUT / "bench_data" / "h100"


def good(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, err) == (0, ""), err
    return out


def parsed(*arguments: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(good(*arguments, "--json"), parse_constant=refuse)


def refused(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("fastroof: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("fastroof: error: ").rstrip()


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "fastroof", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, **options)


# -- help and start ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("step",), ("lookup",), ("lookup", "gemm"), ("lookup", "moe"), ("models",), ("gpus",),
        ("engines",), ("sweep",), ("best",), ("capacity",),
        ("bench",), ("serving",), ("simulate",), ("validate",), ("calibrate",),
        ("fit",), ("report",), ("ui",), ("warm",), ("doctor",),
        ("tables",), ("tables", "list"), ("tables", "show"), ("tables", "validate"), ("tables", "import"),
        ("tables", "import", "aiconfigurator"), ("tables", "import", "vidur"),
        ("tables", "import", "llmservingsim"), ("tables", "holdout"), ("tables", "diff"),
        ("tables", "flag"), ("tables", "campaigns"), ("tables", "survey"),
        ("plot",), ("plot", "roofline"), ("export", "trace"),
        ("plot", "step"),
    ],
)  # fmt: skip
def test_every_command_has_help(arguments: tuple[str, ...]) -> None:
    text = good(*arguments, "--help")
    assert text.startswith(f"Usage: {' '.join(('fastroof', *arguments))} ")
    listing, shown = text.partition("\nCommands:\n")[2], []
    for line in listing.splitlines():
        if not line.startswith("  "):
            break
        shown.append(line)
    assert not any(line.endswith("...") for line in shown), "a short help does not fit its line"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("input", "isl"), ("output-len", "osl"), ("qps", "rate"), ("users", "clients"),
        ("tensor-parallel-size", "tp"), ("ttft-p99", "ttft"), ("max_num_seqs", "max-num-seqs"),
        ("engin", "engine"),
    ],
)  # fmt: skip
def test_an_unknown_option_suggests_what_it_means(given: str, meant: str) -> None:
    assert f"no such option: --{given}; did you mean --{meant}?" in refused("simulate", f"--{given}", "1")
    assert "did you mean" not in refused("simulate", "--zzz")


def test_help_shows_the_most_used_options_and_help_all_the_others() -> None:
    short, every = good("simulate", "--help"), good("simulate", "--help-all")
    for text in (short, every):
        assert all(f"\n{group}:\n" in text for group in ("Model and GPU", "Load", "Limits", "Output and run"))
    assert short.count("\n  --") <= 12 < every.count("\n  --")
    assert ("--kv-tiers TIERS" in short, "--kv-tiers TIERS" in every) == (False, True)
    assert ("\n  JSON" in short, "JSON: version" in every) == (False, True)


@pytest.mark.slow
@pytest.mark.parametrize("group", [(), ("lookup",), ("tables", "import"), ("plot",)])
def test_a_group_alone_prints_its_help(group: tuple[str, ...]) -> None:
    assert good(*group) == good(*group, "--help")


@pytest.mark.parametrize(
    ("arguments", "document"),
    [
        (("step", "--model", "llama-3.1-8b", "--decode", "8x1024", "--explain"), "step"),
        (("gpus",), "gpus"),
        (("models",), "models"),
        (("engines",), "engines"),
        (("lookup", "gemm", "--m", "8", "--n", "4096", "--k", "4096"), "lookup gemm"),
        (("tables", "list"), "tables list"),
        (("tables", "show", "gemm"), "tables show"),
        (("tables", "holdout", "--operator", "allreduce", "--method", "roofline"), "tables holdout"),
        # flags all that it finds, which takes seconds
        pytest.param(("tables", "flag", "h100", "--dry-run"), "tables flag", marks=pytest.mark.slow),
        (("tables", "diff", "h100", "h100/aiconfigurator-trtllm-1.3.0rc20"), "tables diff"),
    ],
)
def test_json_keys_are_documented(arguments: tuple[str, ...], document: str) -> None:
    explained = good(*document.split(), "--help-all")
    found = parsed(*arguments)
    for entry in found if isinstance(found, list) else [found]:
        for key in entry:
            assert key in explained


@pytest.mark.slow
def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; from fastroof.cli import app\n"
        "try: app(['--help'])\n"
        # seconds of a processor, which other tests may be waiting for too
        "except SystemExit as end: print(time.process_time(), end.code, *sorted(sys.modules))"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=True,
        )
        cpu_s, *last = done.stdout.splitlines()[-1].split()
        seconds.append(float(cpu_s))
    assert min(seconds) < 0.5
    assert last[0] == "0"
    heavy = {"numba", "llvmlite", "numpy", "pyarrow", "pydantic", "matplotlib", "torch"}
    assert heavy.isdisjoint(last)


def test_version() -> None:
    assert good("--version") == f"fastroof {fastroof.__version__}\n"


# -- step ----------------------------------------------------------------------------------------


def test_requests_are_parsed() -> None:
    assert parse_requests(["64x4096"], []) == [Requests(64, 1, 4095)]
    assert parse_requests([], ["2048@1024", "4x2048@0"]) == [Requests(1, 2048, 1024), Requests(4, 2048, 0)]


@pytest.mark.parametrize(
    ("decode", "prefill", "message"),
    [
        (["64"], [], "--decode 64 is not BATCHxKV_LEN"),
        (["64x-1"], [], "not BATCHxKV_LEN"),
        (["64x1"], [], "kv_len is at least 2"),
        (["0x16"], [], "at least 1 request"),
        ([], ["2048"], "--prefill 2048 is not"),
        ([], ["0@16"], "at least 1 new token"),
        ([], ["2048@1.5"], "is not"),
        (["9999999x2"], [], "more than"),
        ([], [], "nothing to time"),
    ],
)
def test_wrong_requests_are_refused(decode: list[str], prefill: list[str], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        parse_requests(decode, prefill)


def test_step_gives_what_the_plan_gives(h100: fastroof.Tables) -> None:
    options = {"tp": 2, "dtype": "fp8", "kv_dtype": "fp8", "engine": DEFAULT_ENGINE}
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **options})
    requests = [(1, 4095)] * 64 + [(2048, 1024)] + [(512, 0)] * 4
    times = plan.run(fastroof.StepBatch.from_requests([requests]), with_error=True)
    assert times.relative_error is not None
    found = parsed(
        "step", "--model", "llama-3.1-8b", "--gpu", "H100-SXM", "--tp", "2", "--dtype", "fp8", "--kv-dtype",
        "fp8",
        "--decode", "64x4096", "--prefill", "2048@1024", "--prefill", "4x512@0", "--explain",
    )  # fmt: skip
    assert found["latency_us"] == float(times.latency_us[0])
    assert found["origin"] == ORIGINS[times.origin[0]] == "modelled"
    assert (found["tokens"], found["sequences"]) == (64 + 2048 + 4 * 512, 69)
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["latency_us"] * 1e6)
    assert found["relative_error"] == times.relative_error[0]
    assert found["tokens_per_s_per_gpu"] == pytest.approx(found["tokens_per_s"] / 2)
    assert sum(found["components_us"].values()) == pytest.approx(found["latency_us"], rel=1e-12)
    assert found["requests"][1] == {"count": 1, "new_tokens": 2048, "context_len": 1024}
    assert sum(o["share"] for o in found["operators"]) == pytest.approx(1.0)
    assert {o["name"]: o["total_us"] for o in found["operators"]} == {
        o.name: o.total_us for o in plan.explain(requests).operators
    }
    rmsnorm = next(o for o in found["operators"] if o["name"] == "mlp rmsnorm")
    assert rmsnorm["mfu"] is None


@pytest.mark.slow
def test_step_in_words() -> None:
    text = good("step", "--model", "llama-3.1-8b", "--decode", "64x4096")
    document = parsed("step", "--model", "llama-3.1-8b", "--decode", "64x4096")
    assert "llama-3.1-8b on 1 x NVIDIA H100 SXM, bf16 weights, bf16 KV cache, engine vllm" in text
    assert "64 decodes at kv_len 4096" in text
    assert time_words(document["latency_us"]) in text
    assert f"{document['tokens_per_s']:,.0f}" in text
    assert ORIGIN_WORDS[document["origin"]] in text
    assert f" ±{percent(document['relative_error'])}\n" in text
    assert "decode attention" in text
    assert "prefill attention" not in text


@pytest.mark.slow
def test_explain_lists_each_operator() -> None:
    text = good("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--explain")
    step_time = next(line for line in text.splitlines() if line.startswith("step time"))
    alone = good("step", "--model", "llama-3.1-8b", "--decode", "64x4096")
    assert " ±" in step_time
    assert step_time.split() in [line.split() for line in alone.splitlines()]
    for word in ("operator", "share", "FLOPs", "bytes", "MFU", "TB/s", "bound", "origin"):
        assert word in text
    line = next(line for line in text.splitlines() if line.startswith("decode attention"))
    assert "memory" in line
    assert "34.4 GB" in line  # 64 x 4096 tokens of 128 KiB KV cache, and queries and outputs


def test_plan_grows_with_the_step() -> None:
    found = parsed("step", "--model", "llama-3.1-8b", "--decode", "1500x64", "--prefill", "2x8000@0")
    assert found["sequences"] == 1502
    assert found["tokens"] == 17500


def test_gpu_without_tables_warns() -> None:
    code, out, err = run("step", "--model", "llama-3.1-8b", "--gpu", "l4", "--decode", "8x1024")
    assert code == 0
    assert ORIGIN_WORDS["modelled"] in out
    assert err.startswith("fastroof: warning: no measured tables of l4")
    assert "(standard error 22%)" in err
    assert err.count("\n") == 1


def test_gpu_that_runs_another_ones_kernels_warns() -> None:
    code, out, err = run("step", "--model", "llama-3.1-8b", "--gpu", "NVIDIA H100 NVL", "--decode", "8x1024")
    assert code == 0
    assert ORIGIN_WORDS["modelled"] in out
    assert err.startswith("fastroof: warning: what was not measured on h100_nvl comes from kernels of h100, ")
    assert err.endswith("(standard error 15%)\n")
    assert err.count("\n") == 1


def test_step_that_does_not_fit_warns() -> None:
    code, _, err = run("step", "--model", "llama-3.1-8b", "--decode", "512x4096")
    assert code == 0
    assert "this step does not fit into the KV cache of one h100: 2,097,152 of " in err
    _, _, err = run("step", "--model", "gpt-oss-120b", "--decode", "64x4096")
    assert "128 of a sequence: as much as 136,160 of " in err


def test_tree_of_several_gpus_needs_to_know_which(shared: Path) -> None:
    folder = str(shared / "reference" / "infersim_bench_data")
    text = refused("step", "--model", "llama-2-7b", "--decode", "8x4096", "--tables", folder)
    assert "h20, h800" in text


@pytest.mark.slow
def test_tables_print_the_gpu(tmp_path: Path) -> None:
    shutil.copytree(H100, tmp_path / "mine")
    for provenance in (tmp_path / "mine").glob("*/provenance.toml"):
        provenance.write_text(provenance.read_text().replace('gpu = "h100"', 'gpu = "h200"', 1))
    text = (tmp_path / "mine" / "gpu.toml").read_text().replace('name = "h100"', 'name = "h200"')
    (tmp_path / "mine" / "gpu.toml").write_text(text)
    found = parsed(
        "step", "--model", "llama-3.1-8b", "--decode", "8x1024", "--tables", str(tmp_path / "mine")
    )
    assert found["gpu"] == "h200"


@pytest.mark.slow
def test_tables_of_another_gpu_are_refused(tmp_path: Path) -> None:
    shutil.copytree(H100, tmp_path / "h100")
    text = refused(
        "step", "--model", "llama-3.1-8b", "--decode", "8x1024", "--gpu", "a100", "--tables",
        str(tmp_path / "h100"),
    )  # fmt: skip
    assert "h100" in text
    assert "a100" in text


@pytest.mark.slow
def test_tables_path_gives_the_same_step(tmp_path: Path) -> None:
    shutil.copytree(H100, tmp_path / "h100")
    arguments = ("step", "--model", "llama-3.1-8b", "--decode", "8x1024")
    assert parsed(*arguments, "--tables", str(tmp_path / "h100")) == parsed(*arguments)


# -- lookup --------------------------------------------------------------------------------------


def test_lookup_gives_what_tables_give(h100: fastroof.Tables) -> None:
    found = parsed("lookup", "gemm", "--m", "1,64,100", "--n", "6144", "--k", "4096", "--dtype", "fp8")
    truth = h100.lookup("gemm", m=[1, 64, 100], n=6144, k=4096, dtype="fp8")
    assert [row["latency_us"] for row in found["rows"]] == truth.latency_us.tolist()
    assert [row["mfu"] for row in found["rows"]] == truth.mfu.tolist()
    assert [row["origin"] for row in found["rows"]] == [ORIGINS[o] for o in truth.origin]
    assert [row["m"] for row in found["rows"]] == [1, 64, 100]
    assert {row["n"] for row in found["rows"]} == {6144}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["roofline", "linear_mfu", "nearest", "floor"])
def test_lookup_of_each_operator(h100: fastroof.Tables, method: str) -> None:
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    cases: dict[str, dict[str, Any]] = {
        "attention_prefill": {**heads, "q_len": 1000, "kv_len": 1500},
        "attention_decode": {**heads, "batch_size": 50, "kv_len": 3000},
        "allreduce": {"num_gpus": 4, "message_bytes": 100_000, "mode": "eager"},
    }
    for operator, sizes in cases.items():
        options = [
            part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        found = parsed("lookup", operator, *options, "--method", method)
        assert found["method"] == method
        (row,) = found["rows"]
        assert row["latency_us"] == float(h100.lookup(operator, **sizes, method=method).latency_us)


def test_lookup_of_moe(h100: fastroof.Tables) -> None:
    columns = h100.table("moe").columns
    row = int(np.flatnonzero((columns["dtype"] == "bf16") & (columns["moe_tp"] == 2))[0])
    names = (
        "num_tokens", "hidden", "intermediate", "topk", "num_experts", "moe_tp", "moe_ep", "distribution",
    )  # fmt: skip
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(columns[name][row]))]
    found = parsed("lookup", "moe", *options)
    assert found["rows"][0]["latency_us"] == columns["latency_us"][row]
    assert found["rows"][0]["origin"] == "measured"


def test_lookup_of_communication_has_no_mfu() -> None:
    assert (
        parsed("lookup", "allreduce", "--num-gpus", "4", "--message-bytes", "65536")["rows"][0]["mfu"] is None
    )


@pytest.mark.parametrize(
    ("m", "message"),
    [("1e3", "--m needs a whole number"), ("0", "m must be at least 1"), ("-4", "m must be at least 1"),
     ("1,,2", "--m needs"), ("1,2,3,4", "do not broadcast"), ("999999999999999999", "m must be at most")],
)  # fmt: skip
def test_wrong_sizes_are_refused_by_name(m: str, message: str) -> None:
    assert message in refused("lookup", "gemm", "--m", m, "--n", "4096,8192", "--k", "4096")


def test_sizes_are_ascii_digits() -> None:
    with pytest.raises(LookupInputError, match="--m needs a whole number"):
        parse_sizes("--m", "٣")


@pytest.mark.slow
def test_images_of_a_prompt_are_tokens_and_an_encoder() -> None:
    args = ("step", "--model", "qwen3-vl-8b", "--prefill", "2x100@0")
    found = parsed(*args, "--image", "1024x768", "--image", "640x640", "--explain")
    # 64 x 48 patches and 40 x 40, four of which are a token
    assert (found["images"], found["image_tokens"]) == ([[1024, 768], [640, 640]], 768 + 400)
    assert found["requests"] == [{"count": 2, "new_tokens": 1268, "context_len": 0}]
    of_text = parsed("step", "--model", "qwen3-vl-8b", "--prefill", "2x1268@0")
    plan = compile_plan("qwen3-vl-8b", "h100", load_tables("h100"), engine="kernels")
    encoder_us = plan.encode([(1024, 768), (640, 640)] * 2).latency_us
    assert found["latency_us"] == of_text["latency_us"] + encoder_us
    assert found["components_us"]["vision_encoder"] == encoder_us
    assert sum(one["total_us"] for one in found["operators"]) == pytest.approx(found["latency_us"])
    text = good(*args, "--image", "1024x768")
    assert "in each prompt 768 tokens of images of 1024 x 768" in text
    assert "vision encoder" in text
    explained = good("step", "--help-all")
    assert all(key in explained for key in (*found, *found["components_us"]))
    assert "--image 640 is not WIDTHxHEIGHT" in refused(*args, "--image", "640")
    assert "images are part of a prompt" in refused(
        "step", "--model", "qwen3-vl-8b", "--decode", "1x9", "--image", "64x64"
    )


@pytest.mark.slow
def test_images_of_clients_are_tokens_and_an_encoder() -> None:
    args = ("serving", "--model", "qwen3-vl-8b", "--osl", "16", "--clients", "1", "--isl")
    found = parsed(*args, "100", "--image", "640x640", "--image", "640x640")
    assert (found["images"], found["image_tokens"]) == ([[640, 640]] * 2, 800)
    (row,), (of_text,) = found["rows"], parsed(*args, "900")["rows"]
    assert row["isl"] == 100
    plan = compile_plan("qwen3-vl-8b", "h100", load_tables("h100"), engine="kernels")
    encoder_ms = plan.encode([(640, 640)] * 2).latency_us / 1e3
    assert row["ttft_ms"] == pytest.approx(of_text["ttft_ms"] + encoder_ms)
    assert "images of 640 x 640, 640 x 640 a prompt: 800 tokens" in good(
        *args, "100", "--image", "640x640", "--image", "640x640"
    )
    assert "does not apply to --disaggregated" in refused(
        *args, "100", "--image", "640x640", "--disaggregated", "1:1"
    )
    assert "--image big is not" in refused(*args, "100", "--image", "big")


def test_estimates_state_their_errors_and_origin(h100: fastroof.Tables) -> None:
    args = ("serving", "--model", "llama-3.1-8b", "--isl", "100", "--osl", "16", "--clients", "4,8")
    rows = parsed(*args)["rows"]
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine=DEFAULT_ENGINE)
    seen = estimate(plan, isl=100, osl=16, clients=[4, 8], with_error=True)
    for name in ("relative_error", "tpot_relative_error", "ttft_relative_error"):
        assert [row[name] for row in rows] == getattr(seen, name).tolist()
    last = rows[-1]
    mean = fastroof.StepBatch.from_requests([[(1, round(last["kv_len"]) - 1)] * round(last["decodes"])])
    assert last["origin"] == ORIGINS[plan.run(mean).origin[0]]
    tpot, ttft = (max(row[f"{name}_relative_error"] for row in rows) for name in ("tpot", "ttft"))
    assert f"one standard error: TPOT ±{percent(tpot)}, TTFT ±{percent(ttft)}; decodes " in good(*args)
    drafts = (*args, "--num-draft-tokens", "3", "--accepted", "2.2")
    assert "errors unknown; decodes " in good(*drafts)


def test_options_of_other_questions_are_refused_and_workers_named() -> None:
    args = ("serving", "--model", "qwen3-30b-a3b", "--isl", "100", "--osl", "16", "--clients", "4")
    assert "--prefill-tp needs --disaggregated" in refused(*args, "--prefill-tp", "2")
    assert "--kv-bandwidth needs --disaggregated" in refused(*args, "--kv-bandwidth", "50")
    apart = (*args, "--dp", "2", "--ep", "2", "--disaggregated", "2:1")
    assert "must be" in refused(*apart, "--prefill-tp", "0")
    workers = "6 x NVIDIA H100 SXM (2 x tp 1, dp 2, ep 2 that prefill, 1 x tp 1, dp 2, ep 2 that decode)"
    assert workers in good(*apart)


# -- models and gpus -----------------------------------------------------------------------------


def test_models_and_gpus() -> None:
    assert [entry["name"] for entry in parsed("models")] == fastroof.model_names()
    found = {entry["name"]: entry for entry in parsed("gpus")}
    assert sorted(found) == fastroof.gpu_names()
    assert found["h100"]["peak_flops_per_s"]["bf16"] == 989.5e12
    assert found["h100"]["has_tables"] is True
    assert found["b200"]["has_tables"] is True
    assert found["h20"]["has_tables"] is False
    assert "fp8" not in found["a100"]["peak_flops_per_s"]
    text = good("gpus")
    assert "NVIDIA H100 SXM" in text
    assert "989.5" in text
    listed = good("models")
    assert all(name in listed for name in fastroof.model_names())


def test_what_plans_of_models_are_made_of() -> None:
    args = ("models", "--support", "--model", "llama-3.1-70b", "--gpu", "h100", "--engine", "vllm")
    rows = parsed(*args, "--dtype", "auto")
    assert [(row["tp"], row["status"]) for row in rows] == [
        (1, "refused"), (2, "measured"), (4, "measured"), (8, "measured"),
    ]  # fmt: skip
    names = ("model", "gpu", "engine", "dtype", "tp", "pp", "dp", "ep", "moe_tp", "status", "why")
    assert tuple(rows[0]) == names
    assert "no room for KV cache" in good(*args, "--dtype", "bf16", "--full")
    best = good(*args, "--model", "qwen3-8b", "--dtype", "auto").splitlines()
    assert [line.split() for line in best[2:4]] == [
        ["llama-3.1-70b", "h100", "vllm", "measured", "2,", "4,", "8"],
        ["qwen3-8b", "h100", "vllm", "measured", "1,", "2,", "4,", "8"],
    ]


@pytest.mark.slow
def test_names_of_vllm_are_listed_with_reasons() -> None:
    document = parsed("models", "--architectures")
    assert document["vllm"] == "0.33.0"
    assert document["removed"]["BambaForCausalLM"] == "0.23.0"
    by_name = {one["name"]: one for one in document["architectures"]}
    assert by_name["Glm4MoeForCausalLM"]["family"] == "glm4-moe"
    listed = good("models", "--architectures")
    assert f"vLLM 0.33.0 registers {len(by_name)} names: " in listed
    assert "no operator for Mamba-1" in listed
    assert "--architectures goes with" in refused("models", "--architectures", "--support")


@pytest.mark.slow
def test_the_support_of_all_models_is_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    names = fastroof.model_names()[::8]
    monkeypatch.setattr(fastroof, "model_names", lambda: names)
    lines = good("models", "--support", "--gpu", "h100", "--engine", "vllm").splitlines()
    assert lines[0].split() == ["gpu", "engine", "measured", "borrowed", "modelled", "no"]
    gpu, engine, *counts = lines[2].split()
    assert (gpu, engine, sum(map(int, counts))) == ("h100", "vllm", len(names))
    assert len(lines) < 10


def test_choices_of_support_alone_are_refused() -> None:
    for alone in (("--gpu", "h100"), ("--full",)):
        assert "choose what --support shows" in refused("models", *alone)
    assert "--dtype must be one of auto" in refused("models", "--support", "--dtype", "fp4")


def test_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = {entry["name"]: load_engine(entry) for entry in parsed("engines")}
    assert profiles == {name: load_engine(name) for name in engine_names()}
    text = good("engines")
    assert re.search(rf"vllm-0.12 +{load_engine('vllm-0.12').costs.logit_ps:g} +logit, ps", text)
    assert "whole output" in text
    assert re.search(r"sglang +elementwise +everywhere", text)
    gemm = OperatorKernel("gemm", "h100", "fp8", {"tp": 8}, source="own", kernel="cutlass")
    known = EngineProfile("mine", kernels=KernelChoices(operators=(gemm, OperatorKernel("moe"))))
    monkeypatch.setattr("fastroof.engines.load_engine", lambda name: known)
    text = good("engines")
    assert "h100, fp8, tp 8" in text
    assert "everywhere" in text


# -- tables --------------------------------------------------------------------------------------


def test_tables_list() -> None:
    entries = {entry["source"]: entry["operators"] for entry in parsed("tables", "list", "h100")}
    vllm = entries.pop("aiconfigurator-vllm-0.25.0")
    rows = {one["operator"]: one["rows"] for one in vllm}
    assert rows["gemm"] == 111_444
    # attention of 0.24.0 comes first
    (older,) = (entries.pop(name) for name in list(entries) if name == "aiconfigurator-vllm-0.24.0")
    assert [one["operator"] for one in vllm if not one["serves"]] == [one["operator"] for one in older]
    assert all(one["serves"] for one in older)
    # what another engine measured is there to be asked for, and serves nothing by itself
    assert not any(
        one["serves"] for operators in entries.values() for one in operators if one["operator"] in rows
    )
    assert "111,444" in good("tables", "list", "h100")
    text = good("tables", "list")
    assert "386,321" in text  # of all operators of one source
    assert "imported on first use: a100, b300" in text
    assert "kernels of another card, scaled: a100_40gb (a100), a100_pcie (a100), " in text
    assert "datasheet model only: a10, a10g, " in text
    assert good("tables") == text


def test_an_operator_may_have_a_source_of_its_own() -> None:
    other = "aiconfigurator-trtllm-1.3.0rc20"
    step = ("step", "--model", "llama-3.1-70b", "--tp", "4", "--decode", "32x2048")
    usual, mixed = parsed(*step), parsed(*step, "--source", f"allreduce={other}")
    tables = fastroof.load_tables("h100", source={"allreduce": other})
    plan = fastroof.compile_plan("llama-3.1-70b", "h100", tables, tp=4, engine=DEFAULT_ENGINE)
    assert mixed["latency_us"] == plan.decode_us(32, 2048) != usual["latency_us"]
    assert mixed["tables_hash"] == tables.content_hash
    for wrong in ("allreduce=", f"allreduce={other},allreduce={other}", f"=x,{other}"):
        code, _, err = run(*step, "--source", wrong)
        assert code == 2
        assert "is neither a source nor OPERATOR=SOURCE,..." in err


def test_tables_list_marks_the_source_that_serves(tmp_path: Path) -> None:
    root = own_source(tmp_path, "z_second", [10.0, 20.0])
    own_source(tmp_path, "a_first", [30.0, 40.0])
    found = {
        entry["source"]: entry["operators"][0]["serves"] for entry in parsed("tables", "list", str(root))
    }
    assert found == {"a_first": True, "z_second": False}
    assert fastroof.load_tables(root).sources == {"allreduce": "a_first"}


def test_tables_show(h100: fastroof.Tables) -> None:
    found = parsed("tables", "show", "attention_decode")
    assert found["rows"] == h100.table("attention_decode").num_rows
    assert found["keys"]["kv_dtype"] == ["bf16", "fp8"]
    assert found["axes"]["batch_size"][:3] == [1, 2, 4]
    assert found["units"]["latency_us"] == "us"
    assert "kv_len" in good("tables", "show", "attention_decode")
    assert "it has allreduce" in refused("tables", "show", "conv2d")


def own_source(root: Path, name: str, latencies_us: list[float]) -> Path:
    """Write a small all-reduce table of the H100 in fastroof's own format."""
    shutil.copy(H100 / "gpu.toml", root / "gpu.toml")
    (root / name).mkdir()
    (root / name / "provenance.toml").write_text('gpu = "h100"\n')
    rows = [f"bf16,2,graph,{2**20 * (i + 1)},{us}" for i, us in enumerate(latencies_us)]
    text = "\n".join(["dtype,num_gpus,mode,message_bytes,latency_us", *rows, ""])
    (root / name / "allreduce.csv").write_text(text)
    return root


@pytest.mark.slow
def test_diff_shows_what_is_flagged() -> None:
    sets = ("h100", "h100/aiconfigurator-trtllm-1.3.0rc20")
    found = parsed("tables", "diff", *sets, "--operator", "allreduce")
    graph = next(f for f in found["families"] if f["family"] == {"dtype": "bf16", "mode": "graph"})
    assert graph["points"] == 69
    assert 0.6 < graph["p10"] < graph["median"] < 0.8
    text = good("tables", "diff", *sets, "--operator", "allreduce")
    flagged = sum(one["is_flagged"] for one in found["families"])
    assert f"flagged: {flagged} of {len(found['families'])} families" in text
    assert "unknown operator 'gem'" in refused("tables", "diff", *sets, "--operator", "gem")


CHECKED = functools.cache(validate_command._check)


@pytest.fixture
def checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print one judgement in several forms: judging a source takes seconds."""
    monkeypatch.setattr(validate_command, "_check", CHECKED)


@pytest.mark.slow
@pytest.mark.release
def test_validate_passes_the_shipped_tables() -> None:
    found = parsed("tables", "validate", "h100")
    assert found["severity"] != "error"
    assert {report["operator"] for report in found["reports"]} >= {"gemm", "attention_decode", "moe"}
    assert found["refused"] == []
    explained = good("tables", "validate", "--help-all")
    assert all(key in explained for key in found)


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_validate_sums_warnings_up_and_lists_them_on_request() -> None:
    source = ("tables", "validate", "h100", "--source", "aiconfigurator-vllm-0.25.0")
    (_, short, _), (_, every, _) = run(*source), run(*source, "--all")
    counts = re.search(r": 0 errors, (\d+) warnings, (\d+) notes$", every.splitlines()[-1])
    assert counts is not None
    listed = [line for line in every.splitlines() if line.startswith(("warning: ", "note: "))]
    assert len(listed) == int(counts[1]) + int(counts[2])
    summed = [line for line in short.splitlines() if line.startswith(("warning: ", "note: "))]
    assert len(summed) < len(listed) / 3
    jumps = [line for line in listed if line.startswith("warning: ") and ": jump: " in line]
    (jump,) = [line for line in summed if line.startswith("warning: jump: ")]
    assert f" in {len(jumps)} findings, most in h100 aiconfigurator-vllm-0.25.0 " in jump
    assert any(line.split(": jump: ")[1] in jump for line in jumps)
    assert short.splitlines()[-1] == "--all lists every finding"
    assert short.count("not read: ") <= 1


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.usefixtures("checked_once")
def test_validate_names_isolated_spikes_and_what_lookups_answer_instead() -> None:
    source = ("tables", "validate", "h100", "--source", "aiconfigurator-trtllm-1.3.0rc20")
    (report,) = (r for r in parsed(*source)["reports"] if r["operator"] == "mla_decode")
    found = [finding["worst"] for finding in report["findings"] if finding["kind"] == "spike"]
    (one,) = (row for row in found if (row["batch_size"], row["kv_len"]) == (16, 16384))
    assert one["latency_us"] == pytest.approx(1425.0, abs=0.1)
    assert one["served_us"] == pytest.approx(74.5, abs=0.1)
    assert [round(near["latency_us"], 1) for near in one["neighbours"]] == [48.1, 127.3]
    assert 0.075 < one["served_relative_error"] < 0.15
    lines = [line for line in good(*source, "--all").splitlines() if "mla_decode.parquet: spike: " in line]
    assert len(lines) == len(found)
    assert any(f"row {one['row']}, " in line and "; lookups answer 74.51 us ±" in line for line in lines)


def test_validate_fails_on_an_error(tmp_path: Path) -> None:
    root = own_source(tmp_path, "mine", [0.01, 20.0])  # 1 MiB in 10 ns is 100 TB/s
    code, out, err = run("tables", "validate", str(root))
    assert (code, err) == (1, "")
    assert "error: h100 mine allreduce.csv: bandwidth: " in out
    assert out.splitlines()[-1].startswith("1 file, 2 rows: 1 error")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: (folder / "allreduce.csv").write_text("dtype,num_gpus\nbf16,2\n"),
        lambda folder: (folder / "allreduce.parquet").write_bytes(b"PAR1"),
        lambda folder: (folder / "provenance.toml").write_text("gpu = "),
    ],
)
def test_validate_reports_refused_tables(tmp_path: Path, break_it: Callable[[Path], None]) -> None:
    root = own_source(tmp_path, "mine", [10.0, 20.0])
    break_it(root / "mine")
    code, out, err = run("tables", "validate", str(root))
    assert (code, err) == (1, "")
    assert f"error: refused: {root}" in out
    code, out, _ = run("tables", "validate", str(root), "--json")
    assert code == 1
    assert json.loads(out)["severity"] == "error"
    assert len(json.loads(out)["refused"]) == 1


def test_validate_knows_a_card_by_its_own_file(tmp_path: Path) -> None:
    root = own_source(tmp_path, "mine", [10.0, 20.0])
    for path in (root / "gpu.toml", root / "mine/provenance.toml"):
        path.write_text(path.read_text().replace('"h100"', '"my_card"'))
    code, out, err = run("tables", "validate", str(root), "--json")
    assert (code, err) == (0, "")
    assert [report["gpu"] for report in json.loads(out)["reports"]] == ["my_card"]


def test_validate_goes_on_after_a_refused_source(tmp_path: Path) -> None:
    root = own_source(tmp_path, "a_broken", [10.0, -1.0])
    own_source(root, "b_good", [10.0, 20.0])
    code, out, _ = run("tables", "validate", str(root), "--json")
    found = json.loads(out)
    assert code == 1
    assert [entry["source"] for entry in found["refused"]] == ["a_broken"]
    assert [report["source"] for report in found["reports"]] == ["b_good"]


def test_validate_refuses_wrong_arguments(tmp_path: Path) -> None:
    assert "not a folder" in refused("tables", "validate", str(tmp_path / "absent"))
    assert "unknown GPU 'nope'" in refused("tables", "validate", "nope")
    assert "no source 'nope'" in refused("tables", "validate", "h100", "--source", "nope")


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize(
    ("tree", "gpus"), [("infersim_bench_data", {"h20", "h800"}), ("h100_roofline_v2", {"h100"})]
)
def test_validate_reads_every_gpu_of_a_tree(shared: Path, tree: str, gpus: set[str]) -> None:
    code, out, err = run("tables", "validate", str(shared / "reference" / tree), "--json")
    found = json.loads(out)
    assert err == ""
    assert {report["gpu"] for report in found["reports"]} == gpus
    assert code == (1 if found["severity"] == "error" else 0)
    if len(gpus) > 1:
        found = parsed("tables", "validate", str(shared / "reference" / tree), "--gpu", "h20")
        assert {report["gpu"] for report in found["reports"]} == {"h20"}


def test_holdout(h100: fastroof.Tables) -> None:
    arguments = ("tables", "holdout", "--operator", "allreduce", "--method", "roofline")
    truth = h100.holdout(operators=["allreduce"], methods=["roofline"])
    assert parsed(*arguments) == [row._asdict() for row in truth]
    code, out, err = run(*arguments)
    assert code == 0
    assert "holding out: allreduce" in err
    assert f"{truth[0].mape * 100:.1f} %" in out
    assert "unknown" in refused("tables", "holdout", "--operator", "conv2d")


@pytest.mark.slow
@pytest.mark.release
def test_import_aiconfigurator(tmp_path: Path) -> None:
    try:
        installed_root()
    except fastroof.TableError as error:
        pytest.skip(str(error))
    source = ("h100_sxm", "--backend", "vllm")
    arguments = ("tables", "import", "aiconfigurator", *source, "-o", str(tmp_path))
    assert "111,444" in good(*arguments, "--version", "0.25.0")
    read = import_aiconfigurator("h100_sxm", "vllm", "0.25.0")
    assert fastroof.load_tables(tmp_path / "h100").content_hash == read.content_hash
    assert "exists" in refused(*arguments, "--version", "0.25.0")
    good(*arguments, "--version", "0.25.0", "--overwrite")


def test_import_without_the_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastroof.load.aiconfigurator.MODULES", ("no_such_package",))
    text = refused(
        "tables", "import", "aiconfigurator", "h100_sxm", "--backend", "vllm", "--version",
        "0.24.0", "-o", str(tmp_path),
    )  # fmt: skip
    assert "pip install" in text


# -- sweep ---------------------------------------------------------------------------------------

SPEC = """
models = ["llama-3.1-8b", "qwen3-8b"]
tp = [1, 2]
batch_size = [16, 64, 128]
kv_len = [1024, 4096]
"""


def test_sweep_of_a_file(tmp_path: Path) -> None:
    spec, output = tmp_path / "[my].toml", tmp_path / "[out].parquet"
    spec.write_text(SPEC)
    code, out, err = run("sweep", str(spec), "-o", str(output), "--threads", "2")
    assert code == 0, err
    assert f"rows in {output}" in out
    assert "24 steps timed for 4 plans" in out
    assert re.fullmatch(r"sweep: 24 of 24 evaluations, \d+ s", err.splitlines()[-1])
    truth = fastroof.run_sweep(tomllib.loads(SPEC), tmp_path / "again.parquet")
    assert pq.read_table(output).equals(pq.read_table(tmp_path / "again.parquet"))
    for best in truth.best:
        assert any(
            line.split()[:4] == [best.model, str(best.tp), best.dtype, str(best.batch_size)]
            for line in out.splitlines()
        )


def test_sweep_as_json(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text(SPEC)
    found = parsed("sweep", str(spec), "-o", str(tmp_path / "out.parquet"))
    assert found["evaluations"] == 24
    assert len(found["best"]) == 4
    explained = good("sweep", "--help-all")
    assert all(key in explained for key in (*found, *found["best"][0]))


def test_sweep_refuses_a_wrong_file(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text("models = [")
    assert "my.toml" in refused("sweep", str(spec), "-o", str(tmp_path / "out.parquet"))
    text = refused("sweep", "--isl", "100", "-o", str(tmp_path / "out.parquet"))
    assert "sweep spec: models: missing, need" in text
    assert "; osl: missing, need" in text
    assert "absent.toml" in refused("sweep", str(tmp_path / "absent.toml"))
    assert "threads" in refused("sweep", "-o", str(tmp_path / "out.parquet"), "--threads", "0")
    assert list(tmp_path.iterdir()) == [spec]


# -- how commands end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("frobnicate",), "no such command 'frobnicate'"),
        (("step", "--frob"), "no such option: --frob"),
        (("step",), "missing option '--model'"),
        (("step", "--model", "llama-3.1-8b", "--tp", "two"), "invalid value for '--tp'"),
        (("step", "--model", "llama-9", "--decode", "1x16"), "unknown model 'llama-9'"),
        (("step", "--model", "llama-3.1-8b", "--gpu", "h1000", "--decode", "1x16"), "unknown GPU 'h1000'"),
        (("step", "--model", "llama-3.1-8b", "--tp", "3", "--decode", "1x16"), "tp must be one of"),
        (("step", "--model", "llama-3.1-8b", "--dtype", "fp4", "--decode", "1x16"), "dtype must be one of"),
        (("step", "--model", "llama-3.1-8b", "--engine", "x", "--decode", "1x16"), "unknown engine 'x'"),
        (("step", "--model", "llama-3.1-8b", "--source", "x", "--decode", "1x16"), "no source 'x'"),
        (("step", "--model", "a/[bold]b/config.json", "--decode", "1x16"), "a/[bold]b/config.json"),
        (("lookup", "gemm", "--m", "1", "--n", "2", "--k", "3", "--method", "x"), "unknown method 'x'"),
        (("lookup", "gemm", "--gpu", "l40s", "--m", "1", "--n", "2", "--k", "3"), "l40s has no measured"),
    ],
)  # fmt: skip
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.slow
def test_error_in_a_process() -> None:
    done = process("step", "--model", "llama-9", "--decode", "1x16")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fastroof: error: unknown model 'llama-9'")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_warning_in_a_process_where_warnings_are_errors() -> None:
    done = process("step", "--model", "llama-3.1-8b", "--gpu", "a100", "--decode", "4x512", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("fastroof: warning: no measured tables of a100")
    assert json.loads(done.stdout)["origin"] == "modelled"


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, ["alpha beta gamma   1,234,567", "delta                      8"]),
        (22, ["alpha beta   1,234,567", "gamma", "delta                8"]),
        (15, ["name   alpha beta gamma", "count  1,234,567", "", "name   delta", "count  8", ""]),
    ],
)
def test_tables_break_between_words_or_into_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, lines: list[str]
) -> None:
    rows = [("alpha beta gamma", "1,234,567"), ("delta", "8")]
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(("name", "count"), rows, left=("name",))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()][-len(lines) :] == lines


@pytest.mark.slow
def test_broken_pipe_is_quiet() -> None:
    # Unbuffered, Python takes a write that was cut short for a whole one.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    many = ",".join(map(str, range(1, 8000)))
    command = [sys.executable, "-m", "fastroof", "lookup", "gemm", "--m", many, "--n", "4096", "--k", "4096"]
    for more in ([], ["--json"]):
        with subprocess.Popen(
            [*command, *more],
            cwd=CHECKOUT,
            env=buffered,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.readline()
            running.stdout.close()
            assert running.stderr.read() == ""
        assert running.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", ["fastroof", "kernels_bench"])
def test_a_closed_stream_prints_no_traceback(module: str, tmp_path: Path) -> None:
    commands = [["gpus"], ["models", "--json"]] if module == "fastroof" else [["--version"], ["--help"]]
    for command in commands:
        words = shlex.join([sys.executable, "-m", module, *command])
        done = subprocess.run(
            ["sh", "-c", f"{words} >&-"], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr == f"{module.replace('_', '-')}: error: Bad file descriptor\n"
        done = subprocess.run(
            ["sh", "-c", f"{words} <&- 2>&-"], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == 0
        assert done.stdout
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join([sys.executable, '-m', module, 'nonsense'])} >&- 2>&-"],
        cwd=CHECKOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    if module == "fastroof":
        # what a command writes to a file does not become what it prints, nor the other way
        words = "export npz llama-3.1-8b -o out.npz"
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m fastroof {words} >&- 2>&-"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert zipfile.is_zipfile(tmp_path / "out.npz")


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_little() -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(fastroof, "model_names", too_little)
    assert refused("models") == "not enough memory (malloc of size 64 failed)"


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fastroof, "model_names", interrupt)
    code, out, err = run("models")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_system_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "results.parquet")

    monkeypatch.setattr(fastroof, "model_names", full)
    assert refused("models") == "No space left on device: results.parquet"


def test_amounts_in_words() -> None:
    assert tuple(ORIGIN_WORDS) == ORIGINS
    assert [scaled(v, "B") for v in (0, 12, 1536, 2.5e9, 3.4e12, 4.5e15)] == [
        "", "12 B", "1.54 kB", "2.5 GB", "3.4 TB", "4,500 TB",
    ]  # fmt: skip
    assert [time_words(v) for v in (12.345, 18075.8, 2.5e6, 1.9433e10)] == [
        "12.35 us", "18.08 ms", "2.5 s", "19,433 s",
    ]  # fmt: skip


def test_a_step_prints_how_much_windowed_layers_keep() -> None:
    tables = fastroof.load_tables("h100")
    plan = fastroof.compile_plan("gemma-3-12b", "h100", tables, engine=DEFAULT_ENGINE)
    held = 40 * plan.memory.held_tokens(8192)
    words = " ".join(good("step", "--model", "gemma-3-12b", "--decode", "40x8192").split())
    assert "327,680 tokens, of which windowed layers keep the last 1,024 of a sequence" in words
    assert f"as much as {held:,.0f} of {plan.memory.max_kv_tokens:,} whole ones that fit" in words
    whole = good("step", "--model", "llama-3.1-8b", "--decode", "40x8192")
    assert "327,680 of" in whole
    assert "tokens that fit" in whole
