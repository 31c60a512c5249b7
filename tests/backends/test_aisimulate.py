"""Tables of AISimulate: read back, and by the program's own native reader where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fastroof import StepBatch, compile_plan
from fastroof.backends.aisimulate import write_fpm
from fastroof.cli import app
from fastroof.documents import parse_yaml
from fastroof.errors import BackendError, FastroofError
from fastroof.evidence.steps.pass_tables import read_pass_table
from tests.examples import aisimulate as example

SMALL: dict[str, Any] = {"max_batch_size": 9, "max_context": 4096, "max_isl": 2048}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-8b", {"tp": 2, "dtype": "fp8", "kv_dtype": "fp8"}),
        ("qwen3-30b-a3b", {"ep": 2, "dp": 2}),
        ("gpt-oss-120b", {"engine": "sglang"}),
    ],
)
def test_a_table_is_read_back_as_steps(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = compile_plan(model, "h100", **options)
    path = tmp_path / "a.parquet"
    count = write_fpm(plan, path, **SMALL)
    steps = read_pass_table(path)
    assert len(steps) == count > 1000
    for step in steps[::97]:
        batch = StepBatch.from_requests([step.requests])
        assert step.latency_us == pytest.approx(plan.step_us(batch)[0], rel=1e-12)
        assert (step.layout, step.dtype, step.kv_dtype) == (plan.layout, plan.dtype, plan.kv_dtype)
        assert (step.left_out, step.engine) == ("", plan.profile.engine)


def test_rows_added_to_decodes_are_left_out(tmp_path: Path) -> None:
    plan = compile_plan("llama-3.1-8b", "h100")
    path = tmp_path / "a.parquet"
    means_us = []
    for running in (None, (32, 1088)):
        write_fpm(plan, path, **SMALL, beside=running)
        steps = read_pass_table(path)
        left_out = [step.latency_us for step in steps if "32 decodes of 1088" in step.left_out]
        assert bool(left_out) == (running is not None)
        means_us.append(np.mean(left_out or [s.latency_us for s in steps if sum(s.new_tokens) > 9]))
    assert 0.0 < means_us[1] < means_us[0]


@pytest.mark.filterwarnings("ignore:no measured tables")
@pytest.mark.parametrize(
    ("model", "gpu", "options", "words"),
    [
        ("llama-3.1-8b", "h100", {"engine": "kernels"}, "engine kernels"),
        ("llama-3.1-8b", "h100", {"dtype": "int8_wo"}, "format int8_wo"),
        ("llama-3.1-8b", "mi300x", {"engine": "vllm"}, "no package has tables of mi300x"),
    ],
)
def test_what_the_table_cannot_hold_is_refused(
    model: str, gpu: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(FastroofError, match=words):
        write_fpm(compile_plan(model, gpu, **options), tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_table_record_and_engine(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    words = ["export", "fpm", "llama-3.1-8b", "-o", str(path), "--max-batch-size", "4"]
    load = ["--isl", "512", "--osl", "64", "--rate", "5"]
    done = CliRunner().invoke(app, [*words, "--max-context", "2048", *load])
    assert (done.exit_code, "run aisimulate predict -c" in done.stdout) == (0, True)
    [document] = parse_yaml(path.with_suffix(".yaml").read_text(), "a.yaml", BackendError)
    timing = document["engine"]["workers"]["aggregated"]["timing"]
    assert timing["fpm_parquet_path"] == str(path)
    assert json.loads(path.with_suffix(".metadata.json").read_text())["fastroof_plan"]["gpu"] == "h100"
    done = CliRunner().invoke(app, ["export", "fpm", "llama-3.1-8b", "-o", "a.npz"], prog_name="fastroof")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def test_aisimulate_s_own_reader_answers_as_the_plan(tmp_path: Path) -> None:
    """Needs aisimulate 0.13.0.dev202610270000000085: random steps, most of them between rows."""
    reader = pytest.importorskip("aisimulate_core").RustForwardPassPerfModel
    plan = compile_plan("llama-3.1-8b", "h100")
    name = "meta-llama/Meta-Llama-3.1-8B"
    write_fpm(plan, tmp_path / "a.parquet", model=name, max_context=8192, max_batch_size=64)
    config = {
        "model": name, "system": "h100_sxm", "backend": "vllm", "backend_version": "0.24.0",
        "worker_type": "aggregated", "estimation_mode": "fpm_interpolation",
        "estimator_config": {"fpm_interpolation": {"fpm_parquet_path": str(tmp_path / "a.parquet")}},
    }  # fmt: skip
    model = reader.best_available(json.dumps(config))
    rng, errors = np.random.default_rng(3), []
    for _ in range(300):
        batch = int(np.exp(rng.uniform(0.0, np.log(64))))
        new, cached = int(rng.integers(batch, 8192)), batch * int(rng.integers(17, 4000))
        shares = [[(total + i) // batch for i in range(batch)] for total in (new, cached)]
        prompts = StepBatch(*shares, [0, batch])
        decodes = StepBatch([1] * batch, shares[1], [0, batch])
        answers = (
            model.predict_prefill_latency_total(batch, new, cached),
            model.predict_decode_latency_total(batch, cached),
        )
        exact_us = [plan.step_us(of)[0] for of in (prompts, decodes)]
        errors.append(np.multiply(answers, 1e3) / exact_us - 1)
    prompts_off, decodes_off = np.abs(errors).mean(axis=0)
    print(f"prompts {prompts_off:.3%}, decodes {decodes_off:.4%} off")
    assert prompts_off < 0.003
    assert decodes_off < 0.0003


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    out = capsys.readouterr().out
    assert "clients  TTFT ms" in out
    assert "\n     64  " in out or "pip install aisimulate" in out
