"""What load generators wrote is read as runs, or refused with the reason, whatever a file holds."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from fastroof.errors import TableError
from fastroof.evidence.load_generators import GENERATORS, read_runs
from fastroof.evidence.load_generators.runs import GeneratorRun, with_concurrency
from fastroof.traces.trace_files import load_trace

RECORDED = Path(__file__).parent / "recorded_runs"

# keys of vllm/benchmarks/serve.py, 009e6d4a1cd6ba3fb2a9fc00f4ec06f5297232a1, without --save-detailed
VLLM_KEYS = [
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    "rtfx", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms",
    "p99_itl_ms",
]  # fmt: skip
# keys of the first python/sglang/bench_serving.py, 50a613687fe1ffc6f1bb630c684a24c428a54a74
FIRST_SGLANG_KEYS = [
    "backend", "dataset_name", "request_rate", "total_input_tokens", "total_output_tokens",
    "total_output_tokens_retokenized", "mean_e2e_latency_ms", "median_e2e_latency_ms", "median_ttft_ms",
    "median_itl_ms", "output_throughput", "sharegpt_output_len", "random_input_len", "random_output_len",
    "random_range_ratio", "duration", "completed",
]  # fmt: skip


def vllm(**changed: Any) -> dict[str, Any]:
    """Result of 16 clients, 10 requests each, of 1,024 tokens in and 101 out."""
    result: dict[str, Any] = dict.fromkeys(VLLM_KEYS, 1.0)
    result |= {
        "date": "20260801-120000",
        "endpoint_type": "vllm",
        "backend": "vllm",
        "label": "vllm",
        "model_id": "meta-llama/Llama-3.1-8B-Instruct",
        "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
        "num_prompts": 160,
        "request_rate": "inf",
        "max_concurrency": 16,
        "duration": 11.0,
        "completed": 160,
        "failed": 0,
        "total_input_tokens": 160 * 1024,
        "total_output_tokens": 160 * 101,
        "request_goodput": None,
        "mean_ttft_ms": 100.0,
        "mean_tpot_ms": 10.0,
    }
    return result | changed


def inferencex(result: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """What InferenceX makes of a result of 2 GPUs, by the rules of its utils/process_result.py."""
    output, total = (
        result["total_output_tokens"],
        result["total_output_tokens"] + result["total_input_tokens"],
    )
    made = {
        "hw": "h200-x", "conc": result["max_concurrency"], "image": "vllm/vllm-openai:v0.19.0",
        "model": result["model_id"], "framework": "vllm", "precision": "fp8",
        "spec_decoding": "none", "disagg": False, "isl": 1024, "osl": 101, "is_multinode": False,
        "tp": 2, "ep": 1, "dp_attention": "false",
        "tput_per_gpu": total / result["duration"] / 2,
        "output_tput_per_gpu": output / result["duration"] / 2,
        "input_tput_per_gpu": (total - output) / result["duration"] / 2,
    }  # fmt: skip
    for key, value in result.items():
        if key.endswith("ms"):
            made[key.replace("_ms", "")] = float(value) / 1000.0
        if "tpot" in key:
            made[key.replace("_ms", "").replace("tpot", "intvty")] = 1000.0 / float(value)
    return made | changed


def written(folder: Path, document: Any, name: str = "run.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_recorded_files_of_each_generator() -> None:
    runs = {run.name: run for run in read_runs([RECORDED]).runs}
    assert {run.generator for run in runs.values()} == {*GENERATORS} - {"a benchmark's printed table"}
    closed = runs["aiperf_0.13.0_concurrency.json"]
    assert (closed.isl, closed.osl, closed.concurrency, closed.requests_per_client) == (24, 14, 3, 4)
    assert closed.tpot_ms == 3.6745293269230763
    assert closed.length_spread == 0.0
    for release in ("0.3.1", "0.8.1"):
        for number, streams in ((1, 2), (2, 4)):
            run = runs[f"guidellm_{release}.json {number}"]
            assert (run.concurrency, run.osl, run.model) == (streams, 12.0, "fake")
            # of the server's 4 ms a token, not the mean over all tokens, which has the first in it
            assert 4.0 < run.tpot_ms < 5.0
    open_loop = runs["sglang_rate.jsonl"]
    assert 12.5 < open_loop.concurrency < 13.5
    assert "Poisson" in open_loop.concurrency_from
    assert "are inconsistent" in runs["inference_perf_stage_3_lifecycle_metrics.json"].refused
    assert "all were sent together" in runs["vllm_2025-05-30.json"].refused


def test_a_closed_loop_of_vllm(tmp_path: Path) -> None:
    (run,) = read_runs([written(tmp_path, vllm())]).runs
    assert not run.refused
    assert (run.isl, run.osl, run.concurrency, run.requests_per_client) == (1024, 101, 16, 10)
    assert (run.ttft_ms, run.tpot_ms) == (100, 10)
    assert math.isnan(run.length_spread)


def test_details_replace_a_missing_mean(tmp_path: Path) -> None:
    result = vllm(output_lens=[3, 1, 5], itls=[[0.01, 0.03], [], [0.02] * 4], input_lens=[900, 1000, 1100])
    del result["mean_tpot_ms"]
    result |= {"completed": 160, "mean_ttft_ms": 100.0, "total_output_tokens": 160 * 51, "duration": 11.0}
    (run,) = read_runs([written(tmp_path, result)]).runs
    assert run.tpot_ms == pytest.approx(20.0)
    assert run.length_spread == pytest.approx(0.2)


def test_results_that_were_appended(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(vllm(max_concurrency=c, num_prompts=160)) for c in (16, 16))
    runs = read_runs([written(tmp_path, lines)]).runs
    assert [run.name for run in runs] == ["run.json 1", "run.json 2"]
    with pytest.raises(TableError, match=r"line 2 is not JSON: .* was the run cut off"):
        read_runs([written(tmp_path, lines[:-20])])


def test_medians_alone_are_not_read_as_means(tmp_path: Path) -> None:
    line: dict[str, Any] = dict.fromkeys(FIRST_SGLANG_KEYS, 1.0)
    line |= {"backend": "sglang", "dataset_name": "random", "completed": 100, "total_input_tokens": 1e5}
    (run,) = read_runs([written(tmp_path, line, "a.jsonl")]).runs
    assert "needs the mean" in run.refused


def genai_perf(**changed: Any) -> dict[str, Any]:
    def statistics(mean: float, unit: str = "ms") -> dict[str, Any]:
        return {"unit": unit, "avg": mean, "p50": mean, "min": mean, "max": mean, "std": 0.0}

    return {
        "request_throughput": {"unit": "requests/sec", "avg": 160 / 11.0},
        "request_count": {"unit": "count", "avg": 160},
        "request_latency": statistics(1100.0),
        "time_to_first_token": statistics(100.0),
        "inter_token_latency": statistics(10.0),
        "input_sequence_length": statistics(1024.0, "tokens"),
        "output_sequence_length": statistics(101.0, "tokens"),
        "input_config": {"model_names": ["m"], "perf_analyzer": {"stimulus": {"concurrency": 16}}},
    } | changed


def test_genai_perf(tmp_path: Path) -> None:
    (run,) = read_runs([written(tmp_path, genai_perf())]).runs
    assert (run.generator, run.model, run.concurrency, run.tpot_ms) == ("genai-perf", "m", 16, 10)
    slower = genai_perf(inter_token_latency={"unit": "us", "avg": 1e4})
    assert read_runs([written(tmp_path, slower)]).runs[0].tpot_ms == 10
    with pytest.raises(TableError, match="is in 'parsec'"):
        read_runs([written(tmp_path, genai_perf(inter_token_latency={"unit": "parsec", "avg": 1}))])


def test_inference_perf_with_clients(tmp_path: Path) -> None:
    stage = json.loads((RECORDED / "inference_perf_stage_3_lifecycle_metrics.json").read_text())
    latency = stage["successes"]["latency"]
    # as it is since its issue 564: tokens are counted once
    latency["time_per_output_token"]["mean"] = 0.0359
    (run,) = read_runs([written(tmp_path, stage)]).runs
    assert not run.refused
    assert "evenly spaced" in run.concurrency_from
    stage["load_summary"]["concurrency"] = 96
    (run,) = read_runs([written(tmp_path, stage)]).runs
    assert (run.concurrency, run.concurrency_from) == (96, "clients of a closed loop")
    del stage["load_summary"]["requested_rate"]
    assert "stage_N" in read_runs([written(tmp_path, stage)]).runs[0].refused


def test_inferencex_has_the_same_run_in_seconds(tmp_path: Path) -> None:
    result = vllm(mean_e2el_ms=1100.0)
    (plain,) = read_runs([written(tmp_path, result)]).runs
    (run,) = read_runs([written(tmp_path, inferencex(result))]).runs
    assert (run.generator, run.model, run.refused) == ("InferenceX", plain.model, "")
    for name in ("isl", "osl", "concurrency", "requests_per_client", "ttft_ms", "tpot_ms"):
        assert getattr(run, name) == pytest.approx(getattr(plain, name), rel=1e-12), name
    for changed, reason in (
        ({"disagg": True}, "separate engines"),
        ({"is_multinode": True}, "separate engines"),
        ({"mean_e2el": None}, "no mean_e2el"),
        ({"mean_e2el": 1100.0}, "they make 1.1e+05 tokens of an output of up to 101"),
        ({"conc": 64}, "were busy"),
        ({"conc": 4}, "cannot have"),
    ):
        (run,) = read_runs([written(tmp_path, inferencex(result, **changed))]).runs
        assert reason in run.refused, changed


def test_a_file_shows_that_its_run_used_drafts(tmp_path: Path) -> None:
    result = vllm(mean_e2el_ms=1100.0)
    for document, accepted, words in (
        (result, math.nan, ""),
        (inferencex(result), math.nan, ""),
        (inferencex(result, spec_decoding="mtp"), math.nan, "spec_decoding is mtp"),
        (vllm(spec_decode_acceptance_length=2.5), 2.5, "2.5 tokens a step"),
        (vllm(spec_decode_acceptance_length=1.0), 1.0, "1 tokens a step"),
    ):
        (run,) = read_runs([written(tmp_path, document)]).runs
        assert (run.refused, run.drafts) == ("", words)
        assert run.accepted == pytest.approx(accepted, nan_ok=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"max_concurrency": None}, "all were sent together"),
        ({"num_prompts": 20, "completed": 20}, "20 requests for 16 clients"),
        ({"failed": 20}, "20 of 180 requests failed"),
        ({"completed": 0, "failed": 160}, "no request was answered"),
        ({"mean_tpot_ms": 0.0}, "above 0 ms"),
        ({"mean_tpot_ms": None, "median_tpot_ms": 5.0}, "needs the mean"),
        ({"mean_tpot_ms": math.nan}, "needs the mean"),
        ({"mean_tpot_ms": math.inf}, "above 0 ms"),
        ({"ramp_up_strategy": "linear"}, "ramped up"),
        ({"mean_e2el_ms": 2200.0}, "are inconsistent"),
        ({"duration": 30.0}, "were busy"),
        ({"duration": 5.0}, "are inconsistent"),
        ({"total_output_tokens": 160}, "above 1 out"),
        ({"request_rate": 100.0, "max_concurrency": None}, "pile up"),
        ({"request_rate": 100.0, "duration": 1.5, "max_concurrency": None}, "less than the time of two"),
    ],
)
def test_unsteady_runs_have_a_reason(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    (run,) = read_runs([written(tmp_path, vllm(**changed))]).runs
    assert reason in run.refused


PRINTED = """\
Maximum request concurrency: 16
============ Serving Benchmark Result ============
Successful requests:                     160
Benchmark duration (s):                  11.00
Total input tokens:                      163840
Total generated tokens:                  16160
Mean TTFT (ms):                          100.00
{times}
==================================================
"""


def test_printed_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of vLLM, and of SGLang without TPOT, have the figures of the file that they save."""
    (saved,) = read_runs([written(tmp_path, vllm())]).runs
    tables = [
        PRINTED.format(times="Mean TPOT (ms): 10.00"),
        PRINTED.format(times="Mean E2E Latency (ms): 1,100"),
    ]
    runs = read_runs([written(tmp_path, "a log\n" + "".join(tables), "log.txt")]).runs
    assert [run.name for run in runs] == ["log.txt 1", "log.txt 2"]
    for run in runs:
        for name in ("isl", "osl", "concurrency", "requests_per_client", "ttft_ms", "tpot_ms", "running"):
            assert getattr(run, name) == pytest.approx(getattr(saved, name)), name
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(tables[0].partition("\n")[2].encode())))
    (alone,) = read_runs(["-"]).runs
    assert "put the line 'Maximum request concurrency: N' above it" in alone.refused
    broken = tables[0].replace("11.00", "soon")
    with pytest.raises(TableError, match="duration must be a number, got 'soon'"):
        read_runs([written(tmp_path, broken, "log.txt")])
    monkeypatch.setattr("fastroof.evidence.load_generators.documents.MOST_PRINTED", 100)
    with pytest.raises(TableError, match="cut the tables out of it"):
        read_runs([tmp_path / "log.txt"])


def test_csv_yaml_and_single_requests(tmp_path: Path) -> None:
    """What other outputs of guidellm and aiperf have of the same run is that of its JSON."""
    (by_csv,), (by_yaml,) = (
        read_runs([RECORDED / f"guidellm_0.8.1.{kind}"]).runs for kind in ("csv", "yaml")
    )
    assert dataclasses.replace(by_csv, file="", name="", path="") == dataclasses.replace(
        by_yaml, file="", name="", path=""
    )
    assert (by_csv.requests, by_csv.concurrency, by_csv.model) == (54, 4, "Qwen/Qwen3-8B")
    (run,) = read_runs([RECORDED / "aiperf_0.13.0_concurrency.csv"]).runs
    (saved,) = read_runs([RECORDED / "aiperf_0.13.0_concurrency.json"]).runs
    for name in ("isl", "osl", "ttft_ms", "tpot_ms", "concurrency", "requests_per_client", "running"):
        assert getattr(run, name) == pytest.approx(getattr(saved, name), rel=0.02), name
    with pytest.raises(TableError, match="neither of guidellm nor of aiperf"):
        read_runs([written(tmp_path, "a,b\n1,2\n", "x.csv")])


def aiperf_request(start_s: float, latency_ms: float, **changed: Any) -> str:
    """A line of aiperf's profile_export.jsonl (MetricRecordInfo of 0.13.0), without what is not read."""
    start_ns = int((1e9 + start_s) * 1e9)
    metadata = {"request_start_ns": start_ns, "request_end_ns": start_ns + int(latency_ms * 1e6),
                "benchmark_phase": "profiling", "was_cancelled": False} | changed  # fmt: skip
    values = {"request_latency": latency_ms, "time_to_first_token": 100.0, "inter_token_latency": 10.0}
    metrics = {name: {"value": value, "unit": "ms"} for name, value in values.items()}
    lengths = {"input_sequence_length": 1024, "output_sequence_length": 101}
    metrics |= {name: {"value": value, "unit": "tokens"} for name, value in lengths.items()}
    return json.dumps({"metadata": metadata, "metrics": metrics, "error": None})


def test_single_requests_of_aiperf_are_a_run_and_a_trace(tmp_path: Path) -> None:
    warm = aiperf_request(-9.0, 500.0, benchmark_phase="warmup")
    lost = aiperf_request(3.0, 500.0, was_cancelled=True)
    closed = [aiperf_request(1.1 * i + 0.1 * client, 1100.0) for i in range(10) for client in range(4)]
    path = written(tmp_path, "\n".join([warm, *closed, lost]), "profile_export.jsonl")
    (run,) = read_runs([path]).runs
    assert (run.concurrency, run.requests_per_client, run.failed, run.ttft_ms) == (4, 10, 1, 100)
    assert run.concurrency_from == "clients of a closed loop"
    # next to its JSON it is the same run once more
    written(tmp_path, vllm())
    assert len(read_runs([tmp_path]).runs) == 1
    trace = load_trace(path)
    assert (len(trace), trace.input_tokens[0], trace.output_tokens[0]) == (40, 1024, 101)
    assert trace.arrival_s[4] == pytest.approx(1.1, abs=1e-3)
    generator, at = random.Random(2), 0.0
    for even in (True, False):
        lines = []
        for _ in range(200):
            at += 0.25 if even else generator.expovariate(4.0)
            lines.append(aiperf_request(at, 1100.0))
        (run,) = read_runs([written(tmp_path, "\n".join(lines), "rate.jsonl")]).runs
        assert (run.arrivals, run.refused) == ("constant" if even else "poisson", "")
        assert run.running == pytest.approx(4.4, rel=0.1)


def test_other_files_are_refused_with_valid_formats(tmp_path: Path) -> None:
    for content, words in (
        ("", "empty"),
        ("[1]", "found a list"),
        ("{", "; was the run cut off?"),
        ('{"a": 1}', "no result of a benchmark"),
        (json.dumps({"benchmarks": []}), "without benchmarks"),
        ("[" * 100_000, "more than 64 nested lists"),
        (json.dumps(vllm(mean_tpot_ms="fast")), "must be a number, got 'fast'"),
        (json.dumps(vllm(mean_tpot_ms=10**400)), "must be a number"),
        (json.dumps(vllm(completed=[1])), "must be a number"),
        (json.dumps(vllm(itls=3, output_lens=[1], mean_tpot_ms=None)), "itls must be a list"),
    ):
        with pytest.raises(TableError, match=r"run\.json") as error:
            read_runs([written(tmp_path, content)])
        assert words in str(error.value)
    with pytest.raises(TableError, match="does not exist"):
        read_runs([tmp_path / "none"])
    with pytest.raises(TableError, match="does not exist"):
        read_runs(["a\0b"])


def test_other_files_of_a_folder_are_named(tmp_path: Path) -> None:
    written(tmp_path, vllm())
    written(tmp_path, {"other": 1}, "config.json")
    written(tmp_path, {"model": "x"}, "engine_args.json")
    found = read_runs([tmp_path, tmp_path / "run.json"])
    assert len(found.runs) == 1
    assert [Path(path).name for path in found.others] == ["config.json"]


def _simulated_ms(arrivals: list[float], tokens: int, requests: int) -> tuple[float, float]:
    """TPOT and latency of an engine whose step takes 5 ms and 0.5 ms a request; prompts take none."""
    now, sent = 0.0, 0
    tpots: list[float] = []
    latencies: list[float] = []
    running: list[list[float]] = []
    while len(tpots) < requests:
        if not running:
            now = max(now, arrivals[sent])
        while arrivals[sent] <= now:
            running.append([now, tokens, arrivals[sent]])
            sent += 1
        now += 5.0 + 0.5 * len(running)
        for one in running:
            one[1] -= 1
        for began, left, came in running:
            if left <= 0:
                tpots.append((now - began) / tokens)
                latencies.append(now - came)
        running = [one for one in running if one[1] > 0]
    skip = requests // 10
    return sum(tpots[skip:]) / len(tpots[skip:]), sum(latencies[skip:]) / len(latencies[skip:])


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0, 10.0])
def test_littles_law_names_the_clients_of_the_same_tpot(rate_per_s: float) -> None:
    """At random arrivals a request meets as many as one of L + 1 clients, not as one of L."""
    tokens, requests = 100, 4000
    generator = random.Random(3)
    arrivals, at = [], 0.0
    for _ in range(requests + 2000):
        at += generator.expovariate(rate_per_s) * 1e3
        arrivals.append(at)
    tpot_ms, latency_ms = _simulated_ms(arrivals, tokens, requests)
    run = with_concurrency(
        GeneratorRun(
            "f",
            "f",
            "vllm",
            requests=requests,
            isl=100,
            osl=tokens + 1,
            ttft_ms=latency_ms - tpot_ms * tokens,
            tpot_ms=tpot_ms,
            latency_ms=latency_ms,
            rate_per_s=rate_per_s,
            arrivals="poisson",
            duration_s=requests / rate_per_s + latency_ms / 1e3,
        )
    )
    # the closed loop's step is linear in its clients
    closed_ms = 5.0 + 0.5 * run.concurrency
    assert closed_ms == pytest.approx(tpot_ms, rel=0.02)
    assert abs(5.0 + 0.5 * (run.concurrency - 1.0) - tpot_ms) > abs(closed_ms - tpot_ms)
