"""What kernels draw: fits that find known draws, and errors of runs without their own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.accuracy import energy
from fastroof.config import load_gpu
from fastroof.errors import TableError
from fastroof.operators.power import GAP, Draw

B200 = load_gpu("b200")


def rows_of(draw: Draw, count: int = 400, noise: float = 0.0) -> energy.PowerRows:
    rng = np.random.default_rng(3)
    terms = np.c_[np.ones(count), rng.uniform(0, 1, (count, 3)) * [1.0, 0.5, 0.5]]
    share = np.minimum(terms @ np.array(draw), 1.0)
    watts = (B200.idle_w + (B200.tdp_w - B200.idle_w) * share) * np.exp(rng.normal(0, noise, count))
    kernel = np.arange(count) // 4
    return energy.PowerRows("gemm", terms, watts, kernel, np.full(count, 1.0 / count))


@pytest.mark.parametrize("draw", [Draw(0.1, 0.2, 0.3, 0.4), Draw(0.25, 0.0, 0.6, 0.0), Draw(0.5, 0, 0, 0)])
def test_a_fit_finds_the_draw_that_made_the_rows(draw: Draw) -> None:
    rows = rows_of(draw)
    assert energy.fitted([rows], B200) == pytest.approx(draw, abs=0.001)
    assert energy.error(draw, rows, B200) == pytest.approx(0.0, abs=1e-12)
    noisy = rows_of(draw, 4000, 0.1)
    found = energy.fitted([noisy], B200)
    assert found == pytest.approx(draw, abs=0.03)
    assert 0.05 < energy.error(found, noisy, B200) < 0.1


def run(model: str, watts: float, predicted: float, without: float) -> energy.JudgedRun:
    return energy.JudgedRun("h100", model, watts, 1.0, 10.0, predicted, 1.1, 9.0, without)


def test_every_second_model_chooses_the_gap_and_the_others_judge() -> None:
    # a gap of twice the shipped share would be right for all but d
    runs = [run(name, 400, 350, 300) for name in "abc"] + [run("d", 500, 350, 300)]
    choosing, judging = energy.halves(runs)
    assert ({one.model for one in choosing}, {one.model for one in judging}) == ({"a", "c"}, {"b", "d"})
    assert energy.fitted_gap(choosing) == pytest.approx(2.0 * GAP)
    b, d, whole = energy.run_errors(judging)
    assert (b.model, d.model, whole.model, whole.runs) == ("b", "d", "all", 2)
    assert (b.watts, d.watts) == pytest.approx((1 / 8, 0.3))
    assert whole.watts == pytest.approx((b.watts + d.watts) / 2)
    assert d.watts_rms == pytest.approx(abs(np.log(0.7)))
    assert (b.joules, b.itl_bias) == pytest.approx((0.1, np.log(0.9)))
    assert energy.run_errors([]) == []


@pytest.mark.slow
def test_a_run_is_predicted_by_its_plan(tmp_path: Path) -> None:
    one: dict[str, Any] = {
        "gpu_model": "H100", "num_gpus": 1, "avg_batch_size": 16.0, "avg_output_len": 300.0,
        "avg_power_watts": 500.0, "energy_per_token_joules": 0.3, "median_itl_ms": 8.0,
        "parallelization": {"data_parallel": 1, "expert_parallel": 1, "tensor_parallel": 1},
    }  # fmt: skip
    document = {"task": "gpqa", "model_id": "meta-llama/Llama-3.1-8B-Instruct", "configurations": [one]}
    (tmp_path / "llama.json").write_text(json.dumps(document))
    (tmp_path / "other.json").write_text(json.dumps({**document, "task": "text-to-image"}))
    (tmp_path / "unknown.json").write_text(json.dumps({**document, "model_id": "nobody/unknown-9b"}))
    (seen,) = energy.seen_runs(tmp_path)
    assert (seen.gpu, seen.model, seen.watts) == ("h100", "Llama-3.1-8B", 500.0)
    gpu = load_gpu("h100")
    assert gpu.idle_w < seen.watts_without_gap < seen.predicted_watts < gpu.tdp_w
    (tmp_path / "llama.json").unlink()
    with pytest.raises(TableError, match="no runs of lm-arena-chat or gpqa"):
        energy.seen_runs(tmp_path)


def test_rows_of_a_package(tmp_path: Path) -> None:
    folder = tmp_path / "systems/data/b200_sxm/gemm/trtllm/1.0.0"
    folder.mkdir(parents=True)
    columns: dict[str, Any] = {
        "kernel_source": ["a"] * 4, "gemm_dtype": ["bfloat16"] * 4, "m": [1, 64, 4096, 8192],
        "n": [4096] * 4, "k": [4096] * 4, "latency": [0.01, 0.012, 0.1, 0.2],
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "gemm_perf.parquet")
    with pytest.raises(TableError, match="no tables with a power column"):
        energy.power_rows(tmp_path)
    # 0 W is not a measurement
    columns |= {"power": [300.0, 0.0, 900.0, 950.0], "power_limit": [1000.0, 0.0, 1000.0, 1000.0]}
    pq.write_table(pa.table(columns), folder / "gemm_perf.parquet")
    (rows,) = energy.power_rows(tmp_path)
    assert rows.watts.tolist() == [300.0, 900.0, 950.0]
    assert rows.terms[:, 1] == pytest.approx([0.0, 0.9, 0.95])
    flops_per_s = 2 * 4096 * 4096 * 4096 / 100e-6
    assert rows.terms[1, 2] == pytest.approx(flops_per_s / 2250e12)
