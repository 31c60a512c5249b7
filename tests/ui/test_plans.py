"""A plan of the page is the plan that a command compiles now, whatever it was asked for before."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.config.paths import bench_data_root
from fastroof.errors import FastroofError
from fastroof.plan.options import OPTIONS
from fastroof.ui import plans
from fastroof.ui.plans import PlanStore
from fastroof.ui.view import View

VIEW = View(model="qwen3-30b-a3b", tp=2)
SIZES = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
OTHERS: dict[str, Any] = {
    "tp": 1,
    "pp": 2,
    "dp": 2,
    "ep": 2,
    "dtype": "fp8",
    "kv_dtype": "fp8",
    "engine": "trtllm-1.0",
    "allow_modelled": True,
    "front_end": 20.0,
    "lora": "16:4",
}
SOURCE = "aiconfigurator-vllm-0.25.0"


def test_every_option_of_a_plan_in_a_view_reaches_it() -> None:
    shared = {field.name for field in fields(View)} & ({*OPTIONS, "engine"} - {"max_num_batched_tokens"})
    assert VIEW.plan_options.keys() == shared == OTHERS.keys()
    for name, other in OTHERS.items():
        assert VIEW.plan_options[name] != other
        assert replace(VIEW, **{name: other}).plan_options[name] == other


@pytest.fixture(scope="module")
def store() -> PlanStore:
    """One that has compiled the view itself."""
    store = PlanStore()
    store.plan(VIEW, SIZES)
    return store


def fresh(view: View, **options: Any) -> fastroof.StepPlan:
    tables = fastroof.load_tables("h100")
    return fastroof.compile_plan(view.model, "h100", tables, **{**view.plan_options, **SIZES, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_plans_differ_by_every_option(store: PlanStore, name: str) -> None:
    view = replace(VIEW, **{name: OTHERS[name]})
    plan, expected = store.plan(view, SIZES).plan, fresh(view)
    assert plan.arena.tobytes() == expected.arena.tobytes()
    assert plan.memory == expected.memory
    assert (plan.layout, plan.dtype, plan.kv_dtype, plan.engine) == (
        expected.layout, expected.dtype, expected.kv_dtype, expected.engine,
    )  # fmt: skip
    if name != "allow_modelled":
        assert plan is not store.plan(VIEW, SIZES).plan


@pytest.mark.parametrize("name", SIZES)
def test_plans_differ_by_their_sizes(store: PlanStore, name: str) -> None:
    sizes = {**SIZES, name: 512}
    assert getattr(store.plan(VIEW, sizes).plan, name) == 512
    assert getattr(store.plan(VIEW, SIZES).plan, name) == SIZES[name]


def test_plans_differ_by_their_split(store: PlanStore) -> None:
    split = {"tp": 4, "pp": 1, "dp": 1, "ep": 4}
    plan = store.plan(VIEW, SIZES, split).plan
    assert plan.arena.tobytes() == fresh(VIEW, **split).arena.tobytes()


# -- files ---------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CHECK_EVERY_S", 0.0)


def own_config(folder: Path) -> Path:
    preset = resources.files("fastroof.models") / "presets" / "llama-3.1-8b.json"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(preset.read_text("utf-8"))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_model_that_has_changed_is_read_again(tmp_path: Path) -> None:
    config = own_config(tmp_path / "mine")
    store, view = PlanStore({"mine": str(config)}), View(model="mine", tp=1)
    first = store.plan(view, SIZES).plan
    assert store.plan(view, SIZES).plan is first
    assert store.model("mine").num_layers == 32
    values = json.loads(config.read_text("utf-8"))
    config.write_text(json.dumps({**values, "num_hidden_layers": 16}))
    assert store.plan(view, SIZES).plan.model.num_layers == 16
    assert store.model("mine").num_layers == 16
    config.with_name("hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert store.plan(view, SIZES).plan.dtype == "fp8"


@pytest.mark.usefixtures("at_once")
def test_what_was_an_error_may_be_none_now(tmp_path: Path) -> None:
    config = own_config(tmp_path / "mine")
    text = config.read_text("utf-8")
    store, view = PlanStore({"mine": str(config)}), View(model="mine", tp=1)
    config.write_text("{")
    for _ in range(2):
        with pytest.raises(FastroofError):
            store.plan(view, SIZES)
    config.write_text(text)
    assert store.plan(view, SIZES).plan.model.num_layers == 32


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("gpu", ["h100", str(bench_data_root() / "h100")], ids=["name", "path"])
def test_tables_that_appear_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path))
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "never")
    store, view = PlanStore(gpus={"card": gpu}), View(model="llama-3.1-8b", gpu="card", tp=1)
    assert "gemm from mine" not in store.plan(view, SIZES).plan.kernels
    own = tmp_path / "h100" / "mine"
    own.mkdir(parents=True)
    shutil.copy(bench_data_root() / "h100" / SOURCE / "gemm.parquet", own)
    (own / "provenance.toml").write_text('gpu = "h100"\nrank = 1\nframework = "vllm"\n')
    assert "gemm from mine" in store.plan(view, SIZES).plan.kernels


def test_files_are_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fastroof.ui.plans.time.monotonic", lambda: clock[0])
    config = own_config(tmp_path / "mine")
    store, view = PlanStore({"mine": str(config)}), View(model="mine", tp=1)
    first = store.plan(view, SIZES).plan
    config.write_text(config.read_text("utf-8").replace("32", "16"))
    clock[0] = 0.9
    assert store.plan(view, SIZES).plan is first
    clock[0] = 1.0
    assert store.plan(view, SIZES).plan is not first
