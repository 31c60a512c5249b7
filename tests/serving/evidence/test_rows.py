"""Serving rows and measured steps: what ships, what is read, what is refused, and where rows come from."""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
import tomllib
import types
from collections import Counter
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fastroof.engines import serving_engines
from fastroof.errors import FastroofError, TableError
from fastroof.load.aiconfigurator import PACKAGE, installed_root
from fastroof.models import load_model
from fastroof.serving.evidence.aiconfigurator_estimates import (
    AICONFIGURATOR,
    SDK,
    aiconfigurator_version,
    with_aiconfigurator_estimates,
)
from fastroof.serving.evidence.measured import Measured, measured_on
from fastroof.serving.evidence.measured_steps import MeasuredStep, read_steps, shipped_steps
from fastroof.serving.evidence.rows import LeftOut, ServingRow, read_rows, shipped_rows, write_rows
from fastroof.serving.evidence.silicon_sample import convert_silicon_sample, read_silicon_sample
from kernels_bench.steps.step_rows import append_step

CHECKOUT = Path(__file__).resolve().parents[3]
SERVING = CHECKOUT / "bench_data" / "h100" / "serving"
BY_DATASET = {
    "sglang-0.5.1.post1-qwen3-32b-bf16": 78,
    "sglang-0.5.8.post1-qwen3-32b-bf16": 6,
    "trtllm-1.0.0rc3-llama-3.1-8b-bf16": 177,
    "trtllm-1.0.0rc3-qwen3-32b-fp8": 176,
    "trtllm-1.2.0rc6.post1-qwen3-32b-fp8": 4,
    "vllm-0.12.0-qwen3-32b-bf16": 90,
    "vllm-0.12.0-qwen3-32b-fp8": 3,
    "vllm-llama-3.1-70b-fp8": 45,
    "vllm-synchronous": 13,
}
MINIMAL = "dataset,gpu,engine,model,dtype,kv_dtype,tp,isl,osl,concurrency,tpot_ms"
ONE = "mine,h100,vllm,llama-3.1-8b,bf16,bf16,1,1024,128,8,9.5"


@pytest.fixture(scope="module")
def rows() -> tuple[ServingRow, ...]:
    return shipped_rows("h100")


def plain(row: ServingRow) -> dict[str, Any]:
    """A row whose nan equal each other."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(row).items()}


def written(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- what ships ----------------------------------------------------------------------------------


def test_shipped_rows(rows: tuple[ServingRow, ...]) -> None:
    assert Counter(row.dataset for row in rows) == BY_DATASET
    assert len({row.row for row in rows}) == len(rows)
    assert Counter(row.dataset for row in rows if row.left_out) == {
        "trtllm-1.2.0rc6.post1-qwen3-32b-fp8": 4,
        "vllm-0.12.0-qwen3-32b-fp8": 3,
        "vllm-synchronous": 6,
    }
    assert shipped_rows("h20") == ()
    for row in rows:
        assert load_model(row.model) == load_model(row.checkpoint)
        assert row.gpu == "h100"
        assert row.engine in serving_engines()
        assert min(row.ttft_ms, row.tpot_ms, row.aic_ttft_ms, row.aic_tpot_ms) > 0.0
        assert row.is_single == (row.dataset == "vllm-synchronous") == math.isnan(row.requests_per_client)
        assert (row.length_factor == 0.9) == (row.dataset == "vllm-llama-3.1-70b-fp8")
        assert (row.kv_dtype == "fp8") == (row.engine == "trtllm" and row.dtype == "fp8")


def test_provenance_says_where_rows_are_from(rows: tuple[ServingRow, ...]) -> None:
    ways = {}
    for path in sorted(SERVING.glob("*.toml")):
        told = tomllib.loads(path.read_text("utf-8"))
        assert told["licence"] == "Apache-2.0"
        assert told["url"].startswith("https://github.com/")
        assert told["rows"] == len(read_rows(path.with_suffix(".csv")))
        ways |= told["kv_dtype_from"]
    assert {row.kv_dtype_from for row in rows} == set(ways)


def test_the_synchronous_runs_are_the_published_ones(rows: tuple[ServingRow, ...], shared: Path) -> None:
    with (shared / "ground_truth" / "vllm_h100_synchronous.csv").open(encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    ours = [row for row in rows if row.dataset == "vllm-synchronous"]
    for row, source in zip(ours, published, strict=True):
        assert (row.row, row.checkpoint, str(row.tp)) == (source["experiment"], source["model"], source["tp"])
        assert row.ttft_ms == float(source["ttft_ms"])
        assert row.tpot_ms == float(source["itl_est_ms"])
        assert row.osl == float(source["output_tokens_est"])
        assert abs(row.isl + row.osl / 2 - float(source["mid_kv_len_est"])) < 1.0
        assert bool(row.left_out) == (source["workload"] == "codesweep")


def installed_sample() -> None:
    try:
        installed_root()
    except TableError as error:
        pytest.skip(str(error))


def test_the_sample_is_the_packages(rows: tuple[ServingRow, ...]) -> None:
    installed_sample()
    sample, left_out = read_silicon_sample("h100")
    bare = [plain(replace(r, aic_ttft_ms=math.nan, aic_tpot_ms=math.nan)) for r in rows if not r.is_single]
    assert bare == [plain(row) for row in sample]
    assert measured_on("h100").left_out == left_out


@pytest.mark.slow
def test_shipped_predictions_are_the_packages(rows: tuple[ServingRow, ...]) -> None:
    installed_sample()
    few = rows[::60]
    answered, refused = with_aiconfigurator_estimates(few)
    assert (list(map(plain, answered)), refused) == (list(map(plain, few)), {})


# -- files of rows -------------------------------------------------------------------------------


def test_rows_come_back_as_written(rows: tuple[ServingRow, ...], tmp_path: Path) -> None:
    assert list(map(plain, read_rows(write_rows(tmp_path / "all.csv", rows)))) == list(map(plain, rows))


def test_few_columns_are_enough(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, MINIMAL + ",remarks", ONE + ",fast"))
    assert (row.isl, row.mean_osl, row.prefix_tokens, row.left_out) == (1024.0, 128.0, 0.0, "")
    assert math.isnan(row.ttft_ms)
    assert row.schedule["max_batched_tokens"] == 8192


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((MINIMAL.replace(",tpot_ms", ""), ONE), "need column tpot_ms; the file has dataset"),
        ((MINIMAL,), "no rows"),
        ((MINIMAL, ONE, ONE.replace("9.5", "")), "line 3, column tpot_ms: empty; need measured mean"),
        (
            (MINIMAL, ONE.replace("9.5", "0")),
            "column tpot_ms: found 0, need a number above 0",
        ),
        ((MINIMAL, ONE.replace("9.5", "fast")), "found 'fast', need a number"),
        ((MINIMAL, ONE.replace("9.5", "nan")), "found nan"),
        ((MINIMAL, ONE.replace("1024", "0.5")), "column isl: found 0.5, need a number of at least 1"),
        ((MINIMAL, ONE.replace("16,1,", "16,1.5,")), "column tp: found '1.5', need a number"),
        (
            (MINIMAL, ONE.replace("vllm", "lmdeploy")),
            "engine 'lmdeploy' is unknown; known are sglang, trtllm, vllm",
        ),
        ((MINIMAL + ",prefix_tokens", ONE + ",1024"), "got prefix_tokens 1024"),
        ((MINIMAL, '"' + ONE), "cannot be read as serving rows"),
    ],
)
def test_wrong_rows_are_refused(lines: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(TableError) as refusal:
        read_rows(written(tmp_path, *lines))
    assert words in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.csv: cannot be read"):
        read_rows(tmp_path / "none.csv")


# -- the sample of another package ---------------------------------------------------------------

CELL = {
    "id": "x_h100_sxm_vllm_agg_1024x128_c16_tp2_1", "silicon_data_source": "source_file=/data/x.csv",
    "backend": "vllm", "backend_version": "0.12.0", "model_path": "Qwen/Qwen3-32B", "system": "h100_sxm",
    "precision": "", "mode": "agg", "isl": "1024", "osl": "128", "gemm_quant_mode": "", "batch_size": "16",
    "tp_size": "2", "pp_size": "1", "attention_dp_size": "1", "silicon_ttft_ms": "90.5",
    "silicon_tpot_ms": "12.25",
}  # fmt: skip
LLAMA_70B = {"model_path": "meta-llama/Llama-3.1-70B"}
HALF = "it took half of what its kernels alone take"
FP8 = {"precision": "fp8", "gemm_quant_mode": "fp8"}


def sample_file(folder: Path, *changes: dict[str, str]) -> Path:
    path = folder / "sample.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(CELL))
        writer.writeheader()
        writer.writerows(CELL | change for change in changes)
    return path


def test_a_sample_row(tmp_path: Path) -> None:
    (row,), left_out = read_silicon_sample("h100", sample_file(tmp_path, {}, {"system": "h200_sxm"}))
    assert left_out == ()
    assert plain(row) == {
        "dataset": "vllm-0.12.0-qwen3-32b-bf16", "row": CELL["id"], "gpu": "h100", "engine": "vllm",
        "engine_version": "0.12.0", "checkpoint": "Qwen/Qwen3-32B", "model": "qwen3-32b", "dtype": "bf16",
        "kv_dtype": "bf16", "kv_dtype_from": "engine default", "tp": 2, "isl": 1024.0, "osl": 128.0,
        "concurrency": 16.0, "length_factor": 1.0, "prefix_tokens": 0.0, "requests_per_client": 10.0,
        "frontend": "dynamo", "ttft_ms": 90.5, "tpot_ms": 12.25, "aic_ttft_ms": None, "aic_tpot_ms": None,
        "left_out": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (FP8 | {"backend": "trtllm"}, {"kv_dtype": "fp8", "kv_dtype_from": "queueing onset"}),
        (
            FP8 | LLAMA_70B | {"silicon_data_source": "source_file=2026-04-06.csv"},
            {"kv_dtype": "bf16", "kv_dtype_from": "queueing onset", "length_factor": 0.9, "frontend": ""},
        ),
        (FP8 | LLAMA_70B | {"backend": "trtllm"}, {"kv_dtype": "fp8", "kv_dtype_from": "modelopt default"}),
        (FP8 | {"gemm_quant_mode": "fp8_block"}, {"dtype": "fp8_block", "kv_dtype": "bf16"}),
        ({"backend_version": ""}, {"dataset": "vllm-qwen3-32b-bf16"}),
        ({"id": "x_agg_4000x1000_c_tp2_1"}, {"left_out": f"its concurrency is not in its name, and {HALF}"}),
        (
            FP8 | {"model_path": "nvidia/Llama-3.1-8B-Instruct-FP8"},
            {"model": "llama-3.1-8b", "left_out": "it took less than half of what its kernels alone take"},
        ),
    ],
)
def test_what_the_sample_leaves_to_be_inferred(
    change: dict[str, str], found: dict[str, Any], tmp_path: Path
) -> None:
    (row,), _ = read_silicon_sample("h100", sample_file(tmp_path, change))
    assert {name: getattr(row, name) for name in found} == found


def test_what_cannot_be_represented_is_counted_by_reason(tmp_path: Path) -> None:
    experts = {"model_path": "openai/gpt-oss-120b"}
    changes = [
        {"mode": "disagg"}, experts, experts, {"model_path": "acme/dense"}, {"precision": "fp4"},
        {"backend": "other"}, {"pp_size": "2"}, {"attention_dp_size": "4"}, {},
    ]  # fmt: skip
    rows, left_out = read_silicon_sample("h100", sample_file(tmp_path, *changes))
    assert len(rows) == 1
    assert {entry.reason: entry.rows for entry in left_out} == {
        "disaggregated: Qwen/Qwen3-32B": 1,
        "mixture of experts: openai/gpt-oss-120b": 2,
        "no preset: acme/dense": 1,
        "dtype fp4: Qwen/Qwen3-32B": 1,
        "engine other: Qwen/Qwen3-32B": 1,
        "pipeline or data parallel: Qwen/Qwen3-32B": 2,
    }


def test_a_sample_without_the_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="has no rows of b200"):
        read_silicon_sample("b200", sample_file(tmp_path, {}))
    with pytest.raises(TableError, match="cannot be read as the sample"):
        read_silicon_sample("h100", tmp_path / "none.csv")


# -- another estimator ---------------------------------------------------------------------------


class Recorder:
    """A stand-in for the other package, which keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def get_model(self, folder: str, model_config: Any, engine: str) -> Any:
        assert (Path(folder) / "config.json").is_file()
        self.asked.append({"folder": Path(folder).name, "engine": engine, **model_config})
        return None

    def run_agg(self, model: Any, database: Any, runtime: dict[str, int], ctx_tokens: int) -> Any:
        if runtime["isl"] > 5000:
            raise ValueError("no data\nof such prompts")
        self.asked[-1] |= runtime | {"ctx_tokens": ctx_tokens, "database": database}
        return types.SimpleNamespace(get_result_dict=lambda: {"ttft": 12.34567, "tpot": 3.0})

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = {
            "perf_database": {
                "get_version_slots": lambda system, engine: {"current": f"{system} {engine}"},
                "get_database": lambda system, engine, version: version,
            },
            "config_builders": {"build_model_config": lambda tp, *rest, **modes: {"tp": tp, **modes}},
            "models": {"get_model": self.get_model},
            "config": {"RuntimeConfig": lambda **lengths: lengths},
            "backends": {},
            "backends.factory": {"get_backend": lambda engine: self},
        }
        monkeypatch.setitem(sys.modules, PACKAGE, types.ModuleType(PACKAGE))
        monkeypatch.setitem(sys.modules, SDK, types.ModuleType(SDK))
        for name, members in modules.items():
            module = types.ModuleType(f"{SDK}.{name}")
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, f"{SDK}.{name}", module)
        monkeypatch.setattr(metadata, "version", lambda name: "0.12.0")


def test_the_peer_is_asked_for_what_the_row_is(
    rows: tuple[ServingRow, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    recorder.install(monkeypatch)
    fp8 = next(row for row in rows if row.dataset == "trtllm-1.0.0rc3-qwen3-32b-fp8" and row.tp == 4)
    single = next(row for row in rows if row.prefix_tokens)
    long = replace(fp8, isl=8192.0, aic_tpot_ms=7.0)
    (one, two, three), refused = with_aiconfigurator_estimates([fp8, single, long])
    assert (one.aic_ttft_ms, one.aic_tpot_ms) == (12.3457, 3.0)
    assert one == replace(fp8, aic_ttft_ms=12.3457, aic_tpot_ms=3.0)
    assert two.aic_tpot_ms == 3.0
    assert math.isnan(three.aic_tpot_ms)
    assert refused == {"ValueError: no data": 1}
    assert recorder.asked[0] == {
        "folder": "qwen3-32b", "engine": "trtllm", "tp": 4, "gemm_quant_mode": "fp8",
        "kvcache_quant_mode": "fp8",
        "moe_quant_mode": None, "isl": int(fp8.isl), "osl": int(fp8.osl), "batch_size": int(fp8.concurrency),
        "prefix": 0, "ctx_tokens": int(fp8.isl), "database": "h100_sxm trtllm",
    }  # fmt: skip
    assert (recorder.asked[1]["isl"], recorder.asked[1]["prefix"]) == (354, 284)


def test_the_peer_is_given_a_config_of_ones_own(
    rows: tuple[ServingRow, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    recorder.install(monkeypatch)
    config = tmp_path / "own" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    asked = [replace(rows[0], model=str(path)) for path in (config, config.parent)]
    assert with_aiconfigurator_estimates(asked)[1] == {}
    assert [one["folder"] for one in recorder.asked] == ["own", "own"]


def test_a_sample_is_converted_with_its_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder().install(monkeypatch)
    root = tmp_path / "package"
    (root / "systems").mkdir(parents=True)
    sample_file(tmp_path, {}, {"mode": "disagg"}).rename(root / "systems" / "silicon_sample.csv")
    monkeypatch.setattr("fastroof.serving.evidence.silicon_sample.installed_root", lambda: root)
    path = convert_silicon_sample("h100", tmp_path)
    assert path == tmp_path / "h100" / "serving" / "silicon_sample.csv"
    found = measured_on("h100", tmp_path)
    assert [row.aic_tpot_ms for row in found.rows] == [3.0]
    assert found.left_out == (LeftOut("silicon_sample", "disaggregated: Qwen/Qwen3-32B", 1),)


def test_without_the_peer_its_shipped_answers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(FastroofError, match=r"is not installed.*pip install .fastroof\[tables\]"):
        aiconfigurator_version()
    assert AICONFIGURATOR == "aiconfigurator-core"


# -- whole steps ---------------------------------------------------------------------------------

STEP = {
    "model": "llama-3.1-8b", "gpu": "h100", "tp": 1, "dtype": "bf16", "kv_dtype": "bf16", "phase": "mixed",
    "new_tokens": "1x3;512", "context_len": "1023x3;0", "num_requests": 4, "num_tokens": 515,
    "latency_us": 14250.5, "p25_us": 14240.0, "p75_us": 14260.0, "min_us": 14200.0, "num_replays": 20,
    "provider": "flashinfer",
}  # fmt: skip


def test_steps_are_read_as_kernels_bench_writes_them(tmp_path: Path) -> None:
    folder = tmp_path / "h100" / "serving" / "run"
    folder.mkdir(parents=True)
    append_step(folder / "steps.csv", STEP)
    with (folder / "steps.csv").open("a") as file:
        file.write("llama-3.1-8b,h100,1,bf16")
    (step,) = shipped_steps("h100", tmp_path)
    assert step == MeasuredStep(
        "llama-3.1-8b", "h100", 1, "bf16", "bf16", "mixed", (1, 1, 1, 512), (1023, 1023, 1023, 0), 14250.5
    )
    assert step.requests == [(1, 1023)] * 3 + [(512, 0)]
    found = measured_on("h100", tmp_path)
    assert (found.datasets, found.steps) == (("steps",), (step,))
    assert found.pick(["steps"]).steps == (step,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"new_tokens": "1x3;0"}, "each at least 1"),
        ({"new_tokens": "1x4;512"}, "as many new_tokens"),
        ({"new_tokens": "one"}, "'one' of 'one' is no run"),
        ({"new_tokens": "1x9999999"}, "is no run"),
        ({"phase": "idle"}, "phase is one of decode, prefill"),
        ({"tp": "two"}, "line 2: invalid literal"),
        ({"tp": "0"}, "must be above 0"),
        ({"latency_us": "inf"}, "must be above 0"),
        ({"dtype": ""}, "column dtype is empty"),
    ],
)
def test_wrong_steps_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(STEP), lineterminator="\n")
        writer.writeheader()
        writer.writerow(STEP | change)
    with pytest.raises(TableError) as refusal:
        read_steps(path)
    assert words in str(refusal.value)


def test_other_files_are_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("m,n\n1,2\n")
    with pytest.raises(TableError, match="need column model, gpu"):
        read_steps(path)
    with pytest.raises(TableError, match="cannot be read"):
        read_steps(tmp_path)


# -- everything of a GPU -------------------------------------------------------------------------


def test_data_sets_are_picked_by_name(rows: tuple[ServingRow, ...]) -> None:
    found = Measured(rows)
    assert found.datasets == tuple(BY_DATASET)
    assert len(found.pick(["vllm-synchronous"]).rows) == 13
    with pytest.raises(TableError, match=r"no data set 'vlm'; there is sglang-.*, vllm-synchronous"):
        found.pick(["vlm"])


def test_a_gpu_without_shipped_rows_has_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert measured_on("h200", tmp_path) == Measured(())
    sample = sample_file(tmp_path, {"system": "h200_sxm"}, {"system": "h200_sxm", "mode": "disagg"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(
        "fastroof.serving.evidence.measured.read_silicon_sample", lambda gpu: read_silicon_sample(gpu, sample)
    )
    found = measured_on("h200", tmp_path)
    assert [row.gpu for row in found.rows] == ["h200"]
    assert sum(entry.rows for entry in found.left_out) == 1
    assert measured_on("b200", tmp_path) == Measured(())


def test_a_wrong_provenance_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "h100" / "serving"
    folder.mkdir(parents=True)
    written(folder, MINIMAL, ONE)
    (folder / "rows.toml").write_text("left_out = 3\n")
    with pytest.raises(TableError, match=r"rows\.toml: cannot be read as the provenance"):
        measured_on("h100", tmp_path)
