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
from importlib import metadata, resources
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.aiconfigurator_estimates import (
    AICONFIGURATOR,
    SDK,
    aiconfigurator_version,
    with_aiconfigurator_estimates,
)
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.rows import read_rows, shipped_rows, shipped_steps, write_rows
from benchmarks.accuracy.silicon_sample import (
    SAMPLE_GPUS,
    convert_silicon_sample,
    main,
    read_silicon_sample,
)
from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.engines import engine_of_version
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.rows import LeftOut, ServingRow
from fastroof.evidence.steps.measured_steps import MeasuredStep, read_steps
from fastroof.load.aiconfigurator import installed_root
from tests.reference.sample_cells import sample_file

CHECKOUT = Path(__file__).resolve().parents[2]
BY_DATASET = {
    "sglang-0.5.1.post1-qwen3-32b-bf16": 78,
    "sglang-0.5.6.post2-qwen3-32b-fp8-disaggregated": 4,
    "sglang-0.5.8.post1-qwen3-32b-bf16": 6,
    "trtllm-0.8.1.post3-deepseek-v3-fp8_block-disaggregated": 8,
    "trtllm-1.0.0rc3-llama-3.1-8b-bf16": 177,
    "trtllm-1.0.0rc3-qwen3-235b-a22b-fp8_block": 126,
    "trtllm-1.0.0rc3-qwen3-32b-fp8": 176,
    "trtllm-1.3.0rc1-gpt-oss-120b-mxfp4": 5,
    "vllm-0.11.2-gpt-oss-120b-mxfp4": 6,
    "vllm-0.12.0-qwen3-235b-a22b-fp8_block-disaggregated": 2,
    "vllm-0.12.0-qwen3-32b-bf16": 90,
    "vllm-0.12.0-qwen3-32b-fp8-disaggregated": 1,
    "vllm-0.18.0-gpt-oss-120b-mxfp4": 43,
    "vllm-0.18.0-minimax-m2.5-fp8_block": 30,
    "vllm-gpt-oss-120b-mxfp4": 5,
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


def serving(gpu: str) -> Path:
    return CHECKOUT / "bench_data" / gpu / "serving"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- what ships ----------------------------------------------------------------------------------


def test_shipped_rows(rows: tuple[ServingRow, ...]) -> None:
    assert Counter(row.dataset for row in rows) == BY_DATASET
    assert len({row.row for row in rows}) == len(rows)
    assert Counter(row.dataset for row in rows if row.left_out) == {"vllm-synchronous": 6}
    assert shipped_rows("h20") == ()
    for row in rows:
        assert row.gpu == "h100"
        assert min(row.ttft_ms, row.tpot_ms) > 0.0
        assert row.is_single == (row.dataset == "vllm-synchronous") == math.isnan(row.requests_per_client)
        assert (row.length_factor == 0.9) == (row.bench == "inferencemax")
        assert (row.frontend == "dynamo") == (row.bench == "dynamo")


@pytest.mark.parametrize("gpu", SAMPLE_GPUS)
def test_the_other_estimator_answers_what_it_can(gpu: str) -> None:
    rows = shipped_rows(gpu)
    refused = tomllib.loads((serving(gpu) / "silicon_sample.toml").read_text("utf-8"))["predictions_refused"]
    unanswered = [row for row in rows if math.isnan(row.aic_tpot_ms)]
    assert len(unanswered) == sum(refused.values())
    assert all(math.isnan(row.aic_ttft_ms) for row in unanswered)
    assert {"/" in reason for reason in refused} <= {False}
    # of runs of one engine it lacks the experts of gpt-oss in some layouts, and with an fp8 cache prompts'
    # attention with heads as wide as Qwen3.5's on Hopper
    lacks = {row.model for row in unanswered if not row.is_disaggregated}
    assert lacks <= {"gpt-oss-120b", *(["qwen3.5-397b-a17b"] if gpu == "h200" else [])}


@pytest.mark.parametrize("gpu", SAMPLE_GPUS)
def test_provenance_names_the_source_of_rows(gpu: str) -> None:
    ways, rows = dict[str, str](), shipped_rows(gpu)
    for path in sorted(serving(gpu).glob("*.toml")):
        facts = tomllib.loads(path.read_text("utf-8"))
        assert facts["licence"] == "Apache-2.0"
        assert facts["url"].startswith("https://github.com/")
        assert facts["rows"] == len(read_rows(path.with_suffix(".csv")))
        ways |= facts["kv_dtype_from"]
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


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SAMPLE_GPUS)
def test_the_sample_is_the_packages(gpu: str) -> None:
    installed_sample()
    sample, left_out, _ = read_silicon_sample(gpu)
    shipped = read_rows(serving(gpu) / "silicon_sample.csv")
    bare = [plain(replace(row, aic_ttft_ms=math.nan, aic_tpot_ms=math.nan)) for row in shipped]
    assert bare == [plain(row) for row in sample]
    assert set(left_out) <= set(measured_on(gpu).left_out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu",
    [pytest.param(gpu, marks=[] if gpu == "h100" else [pytest.mark.release]) for gpu in SAMPLE_GPUS],
)
def test_shipped_predictions_are_the_packages(gpu: str) -> None:
    installed_sample()
    few = [row for row in shipped_rows(gpu)[::60] if not row.is_disaggregated]
    assert list(map(plain, with_aiconfigurator_estimates(few)[0])) == list(map(plain, few))


# -- files of rows -------------------------------------------------------------------------------


def test_rows_come_back_as_written(rows: tuple[ServingRow, ...], tmp_path: Path) -> None:
    assert list(map(plain, read_rows(write_rows(tmp_path / "all.csv", rows)))) == list(map(plain, rows))


def test_few_columns_are_enough(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, MINIMAL + ",remarks", ONE + ",fast"))
    assert (row.isl, row.mean_osl, row.prefix_tokens, row.left_out) == (1024.0, 128.0, 0.0, "")
    assert math.isnan(row.ttft_ms)
    assert row.schedule["max_num_batched_tokens"] == 8192


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
        ((MINIMAL + ",clock", ONE + ",server"), "clock 'server' is unknown; known are client, engine"),
        ((MINIMAL, '"' + ONE), "cannot be read as serving rows"),
    ],
)
def test_wrong_rows_are_refused(lines: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(TableError) as refusal:
        read_rows(written(tmp_path, *lines))
    assert words in str(refusal.value)


COUNTS = (
    "tp", "pp", "dp", "ep", "decode_workers", "prefill_workers", "prefill_tp", "prefill_dp", "prefill_ep",
    "max_num_batched_tokens", "max_num_seqs",
)  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTS, "isl", "osl", "concurrency", "requests_per_client"])
def test_counts_below_one_are_refused(name: str, tmp_path: Path) -> None:
    values = dict(zip(MINIMAL.split(","), ONE.split(","), strict=True))
    for text in ("0", "-1", "1" if name in COUNTS else "1.5"):
        given = values | {name: text}
        path = written(tmp_path, ",".join(given), ",".join(given.values()))
        if float(text) >= 1.0:
            assert getattr(read_rows(path)[0], name) == float(text)
            continue
        with pytest.raises(TableError, match=f"column {name}: found {text}, need a number of at least 1"):
            read_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.csv: cannot be read"):
        read_rows(tmp_path / "none.csv")


# -- the sample of another package ---------------------------------------------------------------


def test_a_sample_without_the_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="has no rows of b200"):
        read_silicon_sample("b200", sample_file(tmp_path, {}))
    with pytest.raises(TableError, match="cannot be read as the sample"):
        read_silicon_sample("h100", tmp_path / "none.csv")


# -- another estimator ---------------------------------------------------------------------------


class Recorder:
    """A stand-in for the other package, which records its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def get_model(self, folder: str, model_config: Any, engine: str) -> Any:
        assert (Path(folder) / "config.json").is_file()
        self.calls.append({"folder": Path(folder).name, "engine": engine, **model_config})
        return None

    def run_agg(self, model: Any, database: Any, runtime: dict[str, int], ctx_tokens: int) -> Any:
        if runtime["isl"] > 5000:
            raise ValueError("no data at /root/tables\nof such prompts")
        if runtime["osl"] > 5000 and self.calls[-1]["fmha_quant_mode"] is None:
            raise ValueError("its own choice was not measured")
        self.calls[-1] |= runtime | {"ctx_tokens": ctx_tokens, "database": database}
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
        package = types.ModuleType("aiconfigurator_core")
        package.__spec__ = ModuleSpec("aiconfigurator_core", None)
        monkeypatch.setitem(sys.modules, "aiconfigurator_core", package)
        monkeypatch.setitem(sys.modules, SDK, types.ModuleType(SDK))
        for name, members in modules.items():
            module = types.ModuleType(f"{SDK}.{name}")
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, f"{SDK}.{name}", module)
        monkeypatch.setattr(metadata, "version", lambda name: "0.12.0")


def test_the_peer_gets_the_configuration_of_the_row(
    rows: tuple[ServingRow, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    recorder.install(monkeypatch)
    fp8 = next(row for row in rows if row.dataset == "trtllm-1.0.0rc3-qwen3-32b-fp8" and row.tp == 4)
    single = next(row for row in rows if row.prefix_tokens)
    long = replace(fp8, isl=8192.0, aic_tpot_ms=7.0)
    (one, two, three, four), refused = with_aiconfigurator_estimates(
        [fp8, single, long, replace(fp8, osl=8192.0)]
    )
    assert (one.aic_ttft_ms, one.aic_tpot_ms) == (12.3457, 3.0)
    assert one == replace(fp8, aic_ttft_ms=12.3457, aic_tpot_ms=3.0)
    assert two.aic_tpot_ms == 3.0
    assert math.isnan(three.aic_tpot_ms)
    assert refused == {"ValueError: no data": 1}
    assert recorder.calls[0] == {
        "folder": "qwen3-32b", "engine": "trtllm", "tp": 4, "gemm_quant_mode": "fp8",
        "kvcache_quant_mode": "fp8", "fmha_quant_mode": None,
        "moe_quant_mode": None, "isl": int(fp8.isl), "osl": int(fp8.osl), "batch_size": int(fp8.concurrency),
        "prefix": 0, "ctx_tokens": int(fp8.isl), "database": "h100_sxm trtllm",
    }  # fmt: skip
    assert (recorder.calls[1]["isl"], recorder.calls[1]["prefix"]) == (354, 284)
    # what it refuses it is asked for in its other ways, until it answers
    ways = [(one["gemm_quant_mode"], one["fmha_quant_mode"]) for one in recorder.calls]
    assert ways[2:] == [
        ("fp8", None), ("fp8", "bfloat16"), (None, None), (None, "bfloat16"),
        ("fp8", None), ("fp8", "bfloat16"),
    ]  # fmt: skip
    assert four.aic_tpot_ms == 3.0


def test_the_peer_gets_a_custom_config(
    rows: tuple[ServingRow, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    recorder.install(monkeypatch)
    config = tmp_path / "own" / "config.json"
    config.parent.mkdir()
    config.write_bytes((resources.files("fastroof.models") / "presets" / "qwen3-8b.json").read_bytes())
    wanted = [replace(rows[0], model=str(path)) for path in (config, config.parent)]
    assert with_aiconfigurator_estimates(wanted)[1] == {}
    assert [one["folder"] for one in recorder.calls] == ["own", "own"]


def test_a_sample_is_converted_with_its_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    recorder.install(monkeypatch)
    root = tmp_path / "package"
    (root / "systems").mkdir(parents=True)
    sample_file(tmp_path, {}, {"mode": "disagg"}).rename(root / "systems" / "silicon_sample.csv")
    monkeypatch.setattr("benchmarks.accuracy.silicon_sample.installed_root", lambda: root)
    path = convert_silicon_sample("h100", tmp_path)
    assert path == tmp_path / "h100" / "serving" / "silicon_sample.csv"
    first = path.read_bytes()
    found = measured_on("h100", tmp_path)
    assert [row.aic_tpot_ms for row in found.rows] == [3.0]
    assert found.left_out == (LeftOut("silicon_sample", "disaggregated without worker counts", 1),)
    # again: what is known is not asked for, unless another version answers
    main(tmp_path, ["h100"])
    assert capsys.readouterr().out == f"{path}\n"
    assert (path.read_bytes(), len(recorder.calls)) == (first, 1)
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.0")
    convert_silicon_sample("h100", tmp_path)
    assert len(recorder.calls) == 2


def test_without_the_peer_its_shipped_answers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(FastroofError, match=r"is not installed.*pip install aiconfigurator-core==0\.12\.0"):
        aiconfigurator_version()
    assert AICONFIGURATOR == "aiconfigurator-core"


# -- whole steps ---------------------------------------------------------------------------------

STEP = {
    "model": "llama-3.1-8b", "gpu": "h100", "tp": 1, "dtype": "bf16", "kv_dtype": "bf16", "phase": "mixed",
    "new_tokens": "1x3;512", "context_len": "1023x3;0", "num_requests": 4, "num_tokens": 515,
    "latency_us": 14250.5, "p25_us": 14240.0, "p75_us": 14260.0, "min_us": 14200.0, "num_replays": 20,
    "provider": "flashinfer",
}  # fmt: skip


def append_step(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in MEASURED_STEP_COLUMNS], lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


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


@pytest.mark.parametrize("level", ["", ", no torch.compile", ", eager"])
def test_steps_of_an_engine_name_it_with_its_profile(tmp_path: Path, level: str) -> None:
    path = tmp_path / "steps.csv"
    append_step(path, {**STEP, "provider": f"vllm 0.10.1 engine{level}"})
    append_step(path, {**STEP, "dtype": "fp8", "provider": f"vllm 0.26.0 engine{level}"})
    old, new = read_steps(path)
    assert old.dataset == "engine steps"
    assert (old.timed, old.engine, old.engine_version, old.plan_dtype) == ("engine", "vllm", "0.10.1", "auto")
    assert old.profile == engine_of_version("vllm", "0.10.1")
    assert (new.engine_version, new.plan_dtype) == ("0.26.0", "fp8")
    assert new.profile == engine_of_version("vllm", "0.26.0") != old.profile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"new_tokens": "1x3;0"}, "each at least 1"),
        ({"new_tokens": "1x4;512"}, "must have equal length"),
        ({"new_tokens": "one"}, "'one' of 'one' is not a run"),
        ({"new_tokens": "1x9999999"}, "is not a run"),
        ({"phase": "idle"}, "phase must be one of decode, prefill"),
        ({"tp": "two"}, "line 2: invalid literal"),
        ({"tp": "0"}, "must be above 0"),
        ({"latency_us": "inf"}, "latency_us is inf, need 0.001 to 1e+09 us"),
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


def test_other_files_are_not_read_as_steps(tmp_path: Path) -> None:
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
        "benchmarks.accuracy.measured.read_silicon_sample", lambda gpu: read_silicon_sample(gpu, sample)
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
