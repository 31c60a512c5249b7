"""Published throughput and open-loop runs: their files, how they are predicted, how near that is."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import tomllib
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import fastroof
from benchmarks.accuracy.independent import (
    PredictedRate,
    concurrency_of,
    judge,
    predict_open_loop,
    predict_throughput,
    profile_of_served,
)
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.published_rows import (
    OPEN_LOOP_COLUMNS,
    QUANTITIES,
    STATISTICS,
    THROUGHPUT_COLUMNS,
    OpenLoopRun,
    ThroughputRow,
    read_open_loop,
    read_throughput,
    shipped_bench_runs,
    shipped_open_loop,
    shipped_throughput,
)
from benchmarks.accuracy.validation import run_validation
from fastroof import serving
from fastroof.config.paths import bench_data_root
from fastroof.engines import engine_names, load_engine
from fastroof.errors import TableError
from fastroof.evidence.prediction_errors import PredictedTime
from fastroof.evidence.rows import ServedModel
from fastroof.plan import StepPlan
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.requests import RequestTimes
from tests.command_line import good

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

PUBLISHED = "trtllm-0.17-published"
NEWER = "trtllm-1.1-published"
RATES = "vllm-0.15-inference-perf"
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "mistral-7b")
GPUS = ("a100", "b200", "gb200", "h100", "h200", "l40s", "rtx_pro_6000")


def judged(dataset: str, tables: fastroof.Tables) -> list[PredictedTime]:
    report = run_validation([dataset], tables)
    assert not report.left_out
    return list(report.rows)


def mape(rows: list[PredictedTime]) -> float:
    return float(np.mean([abs(row.error) for row in rows]))


@pytest.fixture(scope="module")
def published(h100: fastroof.Tables) -> list[PredictedTime]:
    return judged(PUBLISHED, h100)


@pytest.fixture(scope="module")
def rates(h100: fastroof.Tables) -> list[PredictedTime]:
    return judged(RATES, h100)


# ---- how near it comes: gates against collapse, some way above what is reached


@pytest.mark.slow
def test_published_throughput_of_dense_models_is_near(published: list[PredictedTime]) -> None:
    # one H100 has no room for the fp8 weights of a 70B and more than a few requests by today's memory
    dense = [row for row in published if row.model in DENSE and (row.model, row.tp) != ("llama-3.1-70b", 1)]
    assert len(dense) == 45
    assert mape(dense) <= 0.07
    experts = [row for row in published if row.model not in DENSE]
    assert len(experts) == 45
    assert mape(experts) <= 0.20


@pytest.mark.slow
def test_published_throughput_of_other_gpus() -> None:
    h200, b200 = fastroof.load_tables("h200"), fastroof.load_tables("b200")
    dense = [row for row in judged(PUBLISHED, h200) if row.model in DENSE]
    assert len(dense) == 63
    assert mape(dense) <= 0.07
    assert mape([row for row in judged(NEWER, b200) if row.model in DENSE]) <= 0.10


@pytest.mark.slow
def test_runs_at_given_rates_are_near(rates: list[PredictedTime]) -> None:
    of_tpot = [row for row in rates if row.quantity == "tpot"]
    assert [row.quantity for row in rates].count("ttft") == len(of_tpot) == 10
    assert mape(of_tpot) <= 0.04
    assert mape([row for row in of_tpot if "llama-2-7b" in row.model or "code" in row.model]) <= 0.04
    assert mape([row for row in rates if row.quantity == "e2e"]) <= 0.05


@pytest.mark.slow
def test_synchronous_runs_stay_within_the_target(h100: fastroof.Tables) -> None:
    decodes = [row for row in run_validation(["vllm-synchronous"], h100).rows if row.quantity == "decode"]
    assert mape(decodes) <= 0.04


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
def test_a_log_of_single_requests_is_near() -> None:
    from fastroof.load.aiconfigurator import import_aiconfigurator

    measured = import_aiconfigurator("rtx_pro_6000_server", "vllm", "0.24.0")
    tables = fastroof.Tables(measured, fastroof.load_gpu("rtx_pro_6000"))
    runs = [run for run in shipped_open_loop("rtx_pro_6000") if run.model == "llama-3.1-8b"]
    assert [run.engine_version for run in runs] == ["0.19.0", "0.28.0"]
    for run in runs:
        plain, own = (
            {row.quantity: row.error for row in judge([run], tables, lambda _, p=profile: p, Counter())}
            for profile in (load_engine("kernels"), profile_of_served(run))
        )
        assert len(plain) == len(own) == len(QUANTITIES) * len(STATISTICS)
        # decode attention beside prefill takes longer than alone there, which kernels alone do not know
        for quantity, collapse in (("tpot", 0.14), ("tpot p99", 0.14), ("e2e", 0.20)):
            assert -collapse <= plain[quantity] <= 0.05
            assert abs(own[quantity]) <= collapse * 0.75
        assert own["tpot"] > plain["tpot"]


# ---- how they are predicted


def test_throughput_is_that_of_as_many_requests_as_have_room(h100: fastroof.Tables) -> None:
    row = next(row for row in shipped_throughput("h100") if row.row == "llama-3.1-8b tp1 1000/1000")
    plan = plan_of(row, h100)
    # whole blocks of 32 tokens
    room = plan.memory.parts // 63
    assert 300 < room < 2048
    assert concurrency_of(row, plan) == room
    assert concurrency_of(replace(row, max_concurrency=100), plan) == 100
    assert concurrency_of(replace(row, requests=64), plan) == 64
    seen = estimate(plan, 1000, 1000, room, chunked_prefill=False, max_num_seqs=2048)
    assert predict_throughput(row, plan) == pytest.approx(float(seen.tokens_per_s_per_gpu), rel=1e-12)
    with pytest.raises(TableError, match="no request fits next to the weights"):
        predict_throughput(replace(row, isl=10**7), plan)


def test_throughput_is_of_all_gpus(h100: fastroof.Tables) -> None:
    row = next(row for row in shipped_throughput("h100") if row.row == "llama-3.1-70b tp2 1000/1000")
    plan = plan_of(row, h100)
    seen = estimate(plan, 1000, 1000, concurrency_of(row, plan), chunked_prefill=False, max_num_seqs=2048)
    assert predict_throughput(row, plan) == pytest.approx(2 * float(seen.tokens_per_s_per_gpu), rel=1e-12)


def test_prompts_that_no_step_holds_are_cut(h100: fastroof.Tables) -> None:
    row = next(row for row in shipped_throughput("h100") if row.row == "llama-3.1-8b tp1 20000/2000")
    plan = plan_of(row, h100)
    seen = estimate(plan, 20000, 2000, concurrency_of(row, plan), chunked_prefill=True, max_num_seqs=2048)
    assert predict_throughput(row, plan) == pytest.approx(float(seen.tokens_per_s_per_gpu), rel=1e-12)


def plan_of(row: ServedModel, tables: fastroof.Tables) -> StepPlan:
    return fastroof.compile_plan(
        row.model,
        tables.gpu,
        tables,
        tp=row.tp,
        dtype=row.plan_dtype,
        kv_dtype=row.kv_dtype,
        engine=profile_of_served(row),
        max_num_batched_tokens=16384,
        max_num_seqs=2048,
    )


def test_a_rate_is_off_by_its_throughput() -> None:
    what = ("d", "r", "throughput", "trtllm", "0.17.0", "m", "fp8", "fp8", "p", 1, 1.0, 1.0, 1.0, False)
    # 100 tokens a second measured, 80 predicted
    rate = PredictedRate(*what, 10.0, 12.5, 8.0)
    assert rate.error == pytest.approx(-0.2)
    assert rate.aic_error == pytest.approx(0.25)


def test_versions_without_a_profile_are_predicted_by_kernels_alone() -> None:
    row = shipped_throughput("h100")[0]
    assert (row.engine, row.engine_version) == ("trtllm", "0.17.0")
    profile = profile_of_served(row)
    assert profile == load_engine("trtllm-1.0").at("0.17.0").kernels_alone()
    assert profile.memory.decoder_bytes > 0 == load_engine("trtllm-1.0").memory.decoder_bytes
    assert profile_of_served(replace(row, engine_version="1.0.0")) == load_engine("trtllm-1.0").at("1.0.0")


@pytest.mark.slow
def test_stages_are_replayed_in_part_and_weighted_by_their_requests(h100: fastroof.Tables) -> None:
    run = next(run for run in shipped_open_loop("h100") if run.row.endswith("codellama-34b-tp2-codegen"))
    assert run.rates() == [(5.0, 600.0), (10.0, 600.0)]
    loads = run.loads()
    assert [(weight, from_s, len(trace)) for weight, from_s, trace in loads] == [
        (3000.0, 20.0, 200),
        (6000.0, 20.0, 400),
    ]
    second = loads[0][2]
    sizes = (second.input_tokens, second.output_tokens, second.cached_tokens)
    assert (second.arrival_s[1], *(size[1] for size in sizes)) == (0.2, 566, 247, 560)
    plan = plan_of(run, h100)
    means = []
    for _, from_s, trace in loads:
        times = RequestTimes.of(trace, run_engine(plan, trace, run.settings(plan)))
        means.append(times.tpot_ms[trace.arrival_s >= from_s].mean())
    predicted = predict_open_loop(run, plan)
    assert set(predicted) == {(quantity, "mean") for quantity in QUANTITIES}
    assert predicted["tpot", "mean"] == pytest.approx((means[0] + 2 * means[1]) / 3, rel=1e-12)
    percentiles = replace(run, measured_ms={("tpot", "p90"): 1.0})
    with pytest.raises(TableError, match="percentiles over several stages"):
        predict_open_loop(percentiles, plan)


def test_a_run_is_simulated_as_its_engine_was_started(h100: fastroof.Tables) -> None:
    run = shipped_open_loop("rtx_pro_6000")[1]
    assert (run.model, run.layout.dp) == ("qwen3-30b-a3b", 2)
    plan = plan_of(shipped_open_loop("h100")[0], h100)
    settings = run.settings(plan)
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (2048, 128)
    assert settings.async_scheduling
    assert not replace(run, engine_version="0.12.0").settings(plan).async_scheduling
    assert (
        settings.num_gpu_blocks
        == plan.memory_of(max_num_batched_tokens=2048, max_num_seqs=128).max_kv_tokens // 16
    )
    # the engine never gives its first block away
    assert replace(run, kv_blocks=500).settings(plan).num_gpu_blocks == 499


def test_a_run_whose_requests_never_have_room_is_refused(h100: fastroof.Tables) -> None:
    run = shipped_open_loop("h100")[0]
    with pytest.raises(TableError, match=r"9 blocks never have room for its longest"):
        predict_open_loop(replace(run, kv_blocks=10), plan_of(run, h100))


def test_a_run_that_chose_a_figure_does_not_judge_it(h100: fastroof.Tables) -> None:
    run = replace(shipped_open_loop("h100")[0], chose="operators")
    kernels, vllm = load_engine("kernels"), load_engine("vllm")
    assert vllm.kernels.operators
    assert not kernels.kernels.operators
    for profile in (kernels, vllm):
        rows = list(judge([run], h100, lambda _, profile=profile: profile, Counter()))
        assert {row.fitted for row in rows} == {profile is vllm}
    (row, *_) = judge([replace(run, chose="")], h100, lambda _: vllm, Counter())
    assert not row.fitted


# ---- their files


@pytest.mark.parametrize("gpu", [*GPUS, "rtx_4090"])
def test_every_file_names_its_source(gpu: str) -> None:
    folder = bench_data_root() / gpu / "serving"
    files = [*folder.glob("throughput/*.csv"), *folder.glob("open_loop/*.csv")]
    assert files
    for path in files:
        facts = tomllib.loads(path.with_suffix(".toml").read_text())
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert (facts["gpu"], facts["rows"]) == (gpu, len(rows))
        assert facts["licence"] in ("Apache-2.0", "MIT")
        assert len(facts["commit"]) == 40
        assert facts["url"].startswith("https://github.com/")
        chose = {row["chose"] for row in rows if row.get("chose")}
        assert facts["fitted_to"] == "nothing" or all(name in facts["fitted_to"] for name in chose)
        assert facts["fitted_to"].startswith("nothing but") == bool(chose)
        assert {row["gpu"] for row in rows} == {gpu}
        kind = THROUGHPUT_COLUMNS if path.parent.name == "throughput" else OPEN_LOOP_COLUMNS
        assert set(rows[0]) == {column.name for column in kind}


def test_no_profile_was_fitted_to_them() -> None:
    names = {row.dataset for gpu in GPUS for row in measured_on(gpu).independent}
    names -= {run.dataset for gpu in GPUS for run in shipped_bench_runs(gpu)}
    assert {PUBLISHED, NEWER, RATES, "vllm-0.19-sharegpt", "vllm-0.28-sharegpt"} == names
    for engine in engine_names():
        assert not names & set(load_engine(engine).evidence.get("datasets", ()))


def test_the_published_rows_are_those_of_the_source(shared: Path) -> None:
    rows = {(r.model, r.tp, r.isl, r.osl): r for r in shipped_throughput("h100") if r.dataset == PUBLISHED}
    with (shared / "ground_truth/trtllm_perf_overview_h100.csv").open(newline="") as file:
        given = list(csv.DictReader(file))
    assert len(given) == 26
    for cell in given:
        row = rows[cell["model"], int(cell["tp"]), int(cell["isl"]), int(cell["osl"])]
        assert (row.dtype, row.output_tokens_per_s) == (cell["dtype"], float(cell["output_tokens_per_s"]))


@pytest.mark.parametrize("run", shipped_open_loop("rtx_pro_6000")[:2], ids=lambda run: run.model)
def test_statistics_are_those_of_the_single_requests(run: OpenLoopRun) -> None:
    table = pq.read_table(run.requests).to_pydict()
    arrival, first, last, tokens = (
        np.array(table[name]) for name in ("arrival_s", "first_token_s", "last_token_s", "output_tokens")
    )
    assert len(tokens) == 300
    seen = {"ttft": first - arrival, "tpot": (last - first) / (tokens - 1), "e2e": last - arrival}
    for quantity, seconds in seen.items():
        milliseconds = seconds * 1e3
        assert run.measured_ms[quantity, "mean"] == pytest.approx(milliseconds.mean(), rel=1e-5)
        for statistic in STATISTICS[1:]:
            percentile = np.percentile(milliseconds, int(statistic[1:]))
            assert run.measured_ms[quantity, statistic] == pytest.approx(percentile, rel=1e-5)


def test_a_log_is_that_of_the_source(shared: Path) -> None:
    for run in shipped_open_loop("rtx_pro_6000")[:2]:
        path = shared / f"ground_truth/vllm_0.19_rtx_pro_6000/{run.model}_requests.csv"
        with path.open(newline="") as file:
            given = [
                (
                    float(r["queued_s"]),
                    int(r["input_tokens"]),
                    int(r["output_tokens"]),
                    int(r["cached_tokens"]),
                )
                for r in csv.DictReader(file)
            ]
        trace = run.loads()[0][2]
        columns = (trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.cached_tokens)
        assert sorted(given) == sorted(zip(*(column.tolist() for column in columns), strict=True))


def written(tmp_path: Path, source: Path, **cells: str) -> Path:
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if cells.get(name) != "no column"])
        writer.writeheader()
        row = {name: cells.get(name, value) for name, value in rows[0].items()}
        writer.writerow({name: value for name, value in row.items() if value != "no column"})
    return path


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"isl": "many"}, "line 2, column isl: found 'many', need a number"),
        ({"isl": "0"}, "column isl: found 0, need a number of at least 1"),
        ({"output_tokens_per_s": "-1"}, "column output_tokens_per_s: found -1, need a number above 0"),
        ({"output_tokens_per_s": "nan"}, "found nan, need a number above 0"),
        ({"engine": "other"}, "line 2: engine 'other' is unknown; known are"),
        ({"model": ""}, "column model: empty; need fastroof's preset"),
        ({"isl": "no column", "osl": "no column"}, "published throughput need column isl, osl; the file has"),
    ],
)
def test_a_wrong_throughput_file_is_refused(tmp_path: Path, cells: dict[str, str], words: str) -> None:
    source = bench_data_root() / "h100/serving/throughput/trtllm_0.17.csv"
    with pytest.raises(TableError, match=words):
        read_throughput(written(tmp_path, source, **cells))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"stages": ""}, "either requests or stages"),
        ({"requests": "some.parquet"}, "either requests or stages"),
        ({"stages": "8x600x2"}, "stages are written as 8x600 20x600, got '8x600x2'"),
        ({"stages": "8x0"}, "stages are written as"),
        ({"cached_tokens": "750"}, "needs isl and osl, and cached_tokens below isl"),
        ({"osl": ""}, "needs isl and osl"),
        ({"cached_tokens": "-1"}, "column cached_tokens: found -1, need a number of at least 0"),
    ],
)
def test_a_wrong_file_of_runs_is_refused(tmp_path: Path, cells: dict[str, str], words: str) -> None:
    source = bench_data_root() / "h100/serving/open_loop/vllm_inference_perf.csv"
    with pytest.raises(TableError, match=words):
        read_open_loop(written(tmp_path, source, **cells))


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(TableError, match="need column dataset"):
        read_throughput(tmp_path / "empty.csv")
    with pytest.raises(TableError, match="cannot be read as open-loop runs"):
        read_open_loop(tmp_path / "none.csv")
    source = bench_data_root() / "rtx_pro_6000/serving/open_loop/vllm_0.19.csv"
    (lost,) = read_open_loop(written(tmp_path, source))
    assert lost.requests == str(tmp_path / "sharegpt_llama-3.1-8b.parquet")
    with pytest.raises(TableError, match="cannot be read as requests"):
        lost.loads()


# ---- by name


def test_what_cannot_be_judged_is_counted(h100: fastroof.Tables) -> None:
    row = shipped_throughput("h100")[0]
    run = shipped_open_loop("h100")[0]
    given = (replace(row, gpu="h200"), replace(row, left_out="for a reason"), replace(run, max_num_seqs=0))
    report = run_validation(Measured((), independent=given), h100)
    assert not report.rows
    assert [(entry.source, entry.reason) for entry in report.left_out] == [
        (PUBLISHED, "measured on h200, the tables are of h100"),
        (PUBLISHED, "for a reason"),
        (RATES, "max_num_seqs must be a whole number from 1 to 65,536, got 0"),
    ]


def test_data_sets_are_picked_by_name() -> None:
    measured = measured_on("h100")
    assert measured.datasets[-5:] == (PUBLISHED, NEWER, RATES, "gpustack", "sglang-cookbook")
    picked = measured.pick([PUBLISHED])
    assert (picked.rows, picked.steps, picked.datasets) == ((), (), (PUBLISHED,))
    assert len(picked.independent) == 97
    assert all(isinstance(row, ThroughputRow) for row in picked.independent)


@pytest.mark.slow
def test_the_command_judges_them_by_name() -> None:
    def command(*arguments: str) -> str:
        return good("validate", "--gpu", "h100", *arguments)

    out = command("--dataset", PUBLISHED, "--dataset", RATES)
    assert "127 predictions" in out
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:2] == ["throughput", PUBLISHED] for line in lines)
    assert any(line[:2] == ["e2e", RATES] for line in lines)
    groups = json.loads(command("--dataset", PUBLISHED, "--by", "model", "--json"))["groups"]
    assert {group["quantity"] for group in groups} == {"throughput"}
    assert {group["by"]["model"] for group in groups} >= {"llama-3.1-8b", "mixtral-8x22b"}
    assert not any(group["fitted"] or not math.isfinite(group["mape"]) for group in groups)
