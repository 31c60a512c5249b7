"""Mixtures of experts by every method: InferSim's own answers."""

from __future__ import annotations

import csv
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.compat import infersim
from fastroof.compat.compare import compare, compare_case
from fastroof.compat.compare_infersim import hf_config
from fastroof.compat.compare_steps import COMPONENTS, Case, Comparison, Step, requests_of
from fastroof.errors import ModelError
from fastroof.models import ModelSpec
from fastroof.models.experts import RoutedExperts
from fastroof.models.layers import LayerGroup
from fastroof.models.mlp import GatedMlp

DECODE = [(1, 4096), (32, 4096), (256, 4096), (24, 3000)]
PREFILL = [2048, 3000]


SMALL, LARGE = (fastroof.load_model(name) for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"))


def small(**further: Any) -> ModelSpec:
    """Qwen3-30B-A3B with experts of another kind."""
    kind = SMALL.only_kind
    group = LayerGroup(replace(kind, mlp=RoutedExperts(128, 8, 768, **further)), SMALL.num_layers)
    return replace(SMALL, name=f"a3b {further}", layers=(group,))


FEW: list[tuple[ModelSpec, dict[str, Any]]] = [
    (SMALL, {}),
    (SMALL, {"dp": 8, "ep": 8, "dtype": "fp8_block"}),
    (LARGE, {"dp": 8, "ep": 8}),
    (small(shared_intermediate=1536), {}),
]
FURTHER: list[tuple[ModelSpec, dict[str, Any]]] = [
    (SMALL, {"dp": 8, "ep": 8}),
    (SMALL, {"tp": 2, "dp": 4, "ep": 4, "routing": "balanced"}),
    (LARGE, {}),
    (LARGE, {"tp": 4}),
    (fastroof.load_model("qwen3-30b-a3b-fp8"), {}),
    (small(shared_intermediate=1536, shared_gate=True), {}),
]
CASES = [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].name} {case[1]}")
def compared(request: pytest.FixtureRequest, h100: fastroof.Tables) -> tuple[Comparison, Case]:
    model, options = request.param
    found = compare(model, "h100", decode=DECODE, prefill=PREFILL, tables=h100, **options)
    steps = tuple(step.step for step in found.steps)
    return found, compare_case(model, h100.gpu, h100, steps, **options)


@pytest.mark.slow
def test_columns_are_the_methods_own(compared: tuple[Comparison, Case]) -> None:
    found, case = compared
    world = case.layout.tp * case.layout.dp
    for step in found.steps:
        batch = fastroof.StepBatch.from_requests([requests_of(step.step)])
        assert step.time("fastroof").total_us == case.plan.run(batch).latency_us[0]
        assert step.time("datasheet").total_us == case.datasheet.run(batch).latency_us[0]
        row = infersim.evaluate(
            case.infersim,
            hf_config(case.plan.model),
            {
                "device": "H100", "world_size": world, "tp_size": case.layout.tp, "num_nodes": 1,
                "max_prefill_tokens": step.step.tokens, "decode_bs": step.step.batch_size,
                "target_tgs": 1.0, "target_tpot": 1.0, "isl": step.step.tokens, "osl": 0,
                "fp8_gemm": int(case.dtype != "bf16"), "fp8_kv": 0, "deepep": 0, "tbo": 0,
            },
        ).to_pylist()[0]  # fmt: skip
        its = step.time("infersim")
        if its.why_not:
            assert row[f"{step.step.phase[0]}_error"] in its.why_not
            continue
        ms = row["tpot_ms" if step.step.phase == "decode" else "ttft_ms"]
        assert its.total_us == pytest.approx(ms * 1e3, rel=1e-15)


@pytest.mark.slow
def test_components_add_up(compared: tuple[Comparison, Case]) -> None:
    for step in compared[0].steps:
        for time in step.times:
            if time.method == "roofline_v2":
                assert "roofline V2 has no experts" in time.why_not
            if time.why_not:
                assert math.isnan(time.total_us)
                continue
            assert tuple(time.components_us) == COMPONENTS
            assert math.fsum(time.components_us.values()) == pytest.approx(time.total_us, rel=1e-12)
            assert all(us >= 0.0 for us in time.components_us.values())
            assert time.components_us["experts"] > 0.0


@pytest.mark.slow
def test_layouts_that_infersim_cannot_have_are_refused(h100: fastroof.Tables) -> None:
    for layout, words in (
        ({"tp": 4, "ep": 4}, "ep 1 with moe_tp 4, not ep 4 with moe_tp 1"),
        ({"dp": 4, "ep": 2}, "ep 4 with moe_tp 1, not ep 2 with moe_tp 2"),
    ):
        time = compare(SMALL, "h100", decode=[(32, 4096)], tables=h100, **layout).steps[0].time("infersim")
        assert words in time.why_not
        assert math.isnan(time.total_us)


@pytest.mark.slow
def test_formats_that_infersim_lacks_are_refused(h100: fastroof.Tables) -> None:
    found = compare(SMALL, "h100", decode=[(32, 4096)], tables=h100, dtype="int8_wo", allow_modelled=True)
    assert "its GEMMs are all bf16 or all fp8" in found.steps[0].time("infersim").why_not
    assert found.steps[0].time("fastroof").total_us > 0.0


@pytest.mark.slow
def test_formats_are_the_checkpoints(h100: fastroof.Tables) -> None:
    found = compare("qwen3-30b-a3b-fp8", "h100", decode=[(32, 4096)], tables=h100)
    wanted = compare(SMALL, "h100", decode=[(32, 4096)], tables=h100, dtype="fp8_block")
    assert found.dtype == wanted.dtype == "fp8_block"
    for own, other in zip(found.steps[0].times, wanted.steps[0].times, strict=True):
        assert own == other or own.why_not == other.why_not != ""


@pytest.mark.slow
def test_ranks_of_a_dense_model_share_nothing(h100: fastroof.Tables) -> None:
    alone, ranks = (
        compare("llama-3.1-8b", "h100", decode=[(32, 4096)], tables=h100, dp=dp).steps[0] for dp in (1, 2)
    )
    assert [time.total_us for time in alone.times] == [time.total_us for time in ranks.times]


@pytest.mark.slow
def test_fp8_of_a_dense_model_reads_its_own_rows(h100: fastroof.Tables) -> None:
    found = compare("llama-3.1-8b", "h100", decode=[(32, 4096)], tables=h100, dtype="fp8")
    step = found.steps[0]
    assert found.dtype == "fp8"
    assert "not fp8" in step.time("roofline_v2").why_not
    bf16 = compare("llama-3.1-8b", "h100", decode=[(32, 4096)], tables=h100).steps[0]
    for method in ("fastroof", "infersim"):
        linear_us = (s.time(method).components_us["linear"] for s in (step, bf16))
        assert next(linear_us) < 0.8 * next(linear_us)
    assert not [d for d in step.differences if d.cause == "unexplained"]


def test_infersim_reads_shared_experts_without_a_gate_alone() -> None:
    for gate in (False, True):
        model = small(shared_intermediate=4 * 768, shared_gate=gate)
        assert ("num_shared_experts" in hf_config(model)) != gate


@pytest.mark.slow
def test_the_tree_holds_the_measured_experts(h100: fastroof.Tables) -> None:
    case = compare_case(SMALL, h100.gpu, h100, (Step("decode", 32, 4096),), dp=8, ep=8)
    layer = {"hidden": 2048, "intermediate": 768, "topk": 8, "num_experts": 128}
    us = float(h100.lookup("moe", num_tokens=512, moe_ep=8, distribution="balanced", **layer).latency_us)
    mfu = 6.0 * 512 * 8 * 2048 * 768 / 8 / (us * 1e-6 * h100.gpu.peak("bf16"))
    for phase in ("decode", "prefill"):
        up, down = infersim.grouped_gemm_mfu(
            case.infersim, "h100", phase, num_gpus=8, tokens_per_gpu=64, **layer
        )
        assert up == down == round(mfu, 3)


def other_models() -> list[tuple[ModelSpec, str]]:
    kind = SMALL.only_kind
    dense = LayerGroup(replace(kind, mlp=GatedMlp(6144)), 1)
    windowed = replace(kind, attention=replace(kind.attention, window=1024))
    return [
        (replace(SMALL, layers=(dense, LayerGroup(kind, 47))), "several kinds"),
        (replace(SMALL, layers=(LayerGroup(windowed, 48),)), "a window of 1024 tokens"),
    ]


@pytest.mark.parametrize(("model", "words"), other_models(), ids=["kinds", "window"])
def test_models_that_no_other_method_has_are_refused(
    model: ModelSpec, words: str, h100: fastroof.Tables
) -> None:
    with pytest.raises(ModelError, match=words):
        compare(model, "h100", decode=[(1, 4096)], tables=h100)


def test_experts_without_a_gate_have_no_infersim(h100: fastroof.Tables) -> None:
    model = small(is_gated=False)
    step = compare(model, "h100", decode=[(1, 4096)], tables=h100, allow_modelled=True).steps[0]
    assert "three projections" in step.time("infersim").why_not


# -- its own tables, by both methods -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"dp": 8, "ep": 8}], ids=str)
@pytest.mark.parametrize("model", [SMALL, LARGE], ids=lambda model: model.name)
def test_infersims_own_tables_by_both_methods(model: ModelSpec, layout: dict[str, int], shared: Path) -> None:
    root = shared / "reference" / "infersim_bench_data"
    tables = own_tables(root, "h20")
    found = compare(
        model,
        "h20",
        decode=[(1, 4096), (32, 4096), (256, 4096)],
        prefill=[2048],
        dtype="fp8",
        routing="balanced",
        allow_modelled=True,
        tables=tables,
        infersim_root=root,
        **layout,
    )
    # of the experts the router alone
    modelled = f"experts, {'communication, ' if layout else ''}lm_head, elementwise"
    assert found.trees["fastroof"] == f"measured tables of h20; modelled, in part or whole: {modelled}"
    assert not [d for step in found.steps for d in step.differences if d.cause == "unexplained"]


def recorded() -> list[dict[str, str]]:
    """InferSim's own answers for these two models, on one node, by the exchange that a plan has."""
    path = Path(__file__).resolve().parents[3] / "shared/golden/infersim/e2e.csv"
    if not path.is_file():
        return []
    wanted = {"num_nodes": "1", "deepep": "0", "tbo": "0", "fp8_kv": "0"}
    rows = csv.DictReader(path.read_text("utf-8").splitlines())
    return [
        row
        for row in rows
        if row["model"].lower() in (SMALL.name, LARGE.name)
        and row["tp_size"] in ("1", "2", "4")
        and row.items() >= wanted.items()
    ]


@functools.cache
def own_tables(root: Path, gpu: str) -> fastroof.Tables:
    return fastroof.load_tables(root, gpu=gpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        # a fifth of them, the others before a release: they take the same ways
        pytest.param(row, id=row["id"], marks=[pytest.mark.release] if number % 5 else [])
        for number, row in enumerate(recorded())
    ],
)
def test_its_column_is_what_infersim_answered(row: dict[str, str], shared: Path) -> None:
    root = shared / "reference" / "infersim_bench_data"
    gpu, tp = row["device"].lower(), int(row["tp_size"])
    ranks = int(row["world_size"]) // tp
    step = compare(
        row["model"],
        gpu,
        decode=[(int(row["target_bs"]), int(row["avg_context_len"]))],
        tp=tp,
        dp=ranks,
        ep=ranks,
        dtype="fp8" if row["fp8_gemm"] == "1" else "bf16",
        routing="balanced",
        allow_modelled=True,
        tables=own_tables(root, gpu),
        infersim_root=root,
    ).steps[0]
    its = step.time("infersim")
    if row["d_error"]:
        assert row["d_error"] in its.why_not
    else:
        assert its.total_us == float(row["tpot_ms"]) * 1e3
    assert not [d for d in step.differences if d.method == "infersim" and d.cause == "unexplained"]


# -- the command -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_the_numbers_of_the_library(h100: fastroof.Tables) -> None:
    args = ("compare", "--model", "qwen3-30b-a3b", "--dp", "8", "--ep", "8", "--decode", "32x4096")
    done = CliRunner().invoke(app, [*args, "--json"], prog_name="fastroof")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert [document[name] for name in ("tp", "dp", "ep", "moe_tp", "dtype")] == [1, 8, 8, 1, "bf16"]
    step = compare(SMALL, "h100", decode=[(32, 4096)], dp=8, ep=8, tables=h100).steps[0]
    for time in step.times:
        written = document["steps"][0]["methods"][time.method]
        assert written["why_not"] == (time.why_not or None)
        if not time.why_not:
            assert (written["total_us"], written["components_us"]) == (time.total_us, time.components_us)
    text = CliRunner().invoke(app, args, prog_name="fastroof").stdout
    assert "qwen3-30b-a3b on 8 x h100 (tp 1, dp 8, ep 8), bf16" in text
    assert "roofline V2 has no answer: roofline V2 has no experts" in text
    assert f"{step.time('infersim').components_us['experts'] / 1e3:,.3f}" in text
