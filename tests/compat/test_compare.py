"""The methods side by side: each column is its method's own answer, and reasons add up."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.cli.compare import EPILOG
from fastroof.compat import infersim, roofline_v2
from fastroof.compat.compare import compare, compare_case
from fastroof.compat.compare_infersim import constants_of
from fastroof.compat.compare_steps import (
    CAUSES,
    COMPONENTS,
    METHODS,
    REPORTED_FROM,
    Comparison,
    MethodTime,
    Step,
    differences,
    requests_of,
)
from fastroof.errors import BatchError, MissingTableError, ModelError, PlanError
from tests.command_line import run

DECODE = [(1, 1024), (32, 4096), (24, 3000)]
PREFILL = [2048, 3000, 100]
CASES = [("llama-2-7b", 1), ("llama-3.1-8b", 1), ("llama-3.1-70b", 4), ("qwen3-32b", 2), ("qwen2.5-7b", 4)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def compared(request: pytest.FixtureRequest, h100: fastroof.Tables) -> Comparison:
    model, tp = request.param
    return compare(model, "h100", decode=DECODE, prefill=PREFILL, tp=tp, tables=h100)


def case_of(found: Comparison, tables: fastroof.Tables) -> Any:
    steps = tuple(step.step for step in found.steps)
    model = fastroof.load_model(found.model)
    return compare_case(model, tables.gpu, tables, steps, tp=found.tp)


@pytest.mark.slow
def test_components_add_up(compared: Comparison) -> None:
    for step in compared.steps:
        assert tuple(time.method for time in step.times) == METHODS
        for time in step.times:
            assert time.why_not == ""
            assert tuple(time.components_us) == COMPONENTS
            assert math.fsum(time.components_us.values()) == pytest.approx(time.total_us, rel=1e-12)
            assert all(us >= 0.0 for us in time.components_us.values())


@pytest.mark.slow
def test_columns_are_the_methods_own(compared: Comparison, h100: fastroof.Tables) -> None:
    case = case_of(compared, h100)
    for found in compared.steps:
        step = found.step
        batch = fastroof.StepBatch.from_requests([requests_of(step)])
        assert found.time("fastroof").total_us == case.plan.run(batch).latency_us[0]
        assert found.time("datasheet").total_us == case.datasheet.run(batch).latency_us[0]
        requests = (
            ([], [step.tokens - 1] * step.batch_size) if step.phase == "decode" else ([(0, step.tokens)], [])
        )
        us = roofline_v2.step_us(case.roofline_v2, case.model_config, case.hardware, compared.tp, [requests])
        assert found.time("roofline_v2").total_us == us[0]
        row = infersim.evaluate(
            case.infersim,
            case.hf_config,
            {
                "device": "H100", "world_size": compared.tp, "tp_size": compared.tp, "num_nodes": 1,
                "max_prefill_tokens": step.tokens, "decode_bs": step.batch_size, "target_tgs": 1.0,
                "target_tpot": 1.0, "isl": step.tokens, "osl": 0, "fp8_gemm": 0, "fp8_kv": 0,
                "deepep": 0, "tbo": 0,
            },
        ).to_pylist()[0]  # fmt: skip
        ms = row["tpot_ms" if step.phase == "decode" else "ttft_ms"]
        assert found.time("infersim").total_us == pytest.approx(ms * 1e3, rel=1e-15)


@pytest.mark.slow
def test_every_difference_above_a_tenth_has_its_size_and_cause(compared: Comparison) -> None:
    for found in compared.steps:
        own = found.time("fastroof")
        reported = {(d.method, d.component): d for d in found.differences}
        assert len(reported) == len(found.differences)
        for time in found.times[1:]:
            for component in COMPONENTS:
                apart_us = time.components_us[component] - own.components_us[component]
                is_reported = abs(apart_us) > REPORTED_FROM * own.components_us[component]
                assert ((time.method, component) in reported) == is_reported
                if is_reported:
                    difference = reported[time.method, component]
                    assert (difference.us, difference.cause) == (apart_us, CAUSES[time.method][component])


def test_a_component_without_a_known_cause_is_unexplained() -> None:
    own = MethodTime("fastroof", dict.fromkeys(COMPONENTS, 100.0), 800.0)
    other = MethodTime(
        "roofline_v2", dict.fromkeys(COMPONENTS, 100.0) | {"experts": 150.0, "memory": 109.0}, 859.0
    )
    (found,) = differences(own, other)
    assert (found.component, found.us, found.cause) == ("experts", 50.0, "unexplained")


@pytest.mark.slow
def test_methods_that_cannot_represent_a_model_have_a_reason(h100: fastroof.Tables, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4100,
        "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
        "hidden_act": "silu",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = compare(path, "h100", decode=[(8, 1024)], tables=h100).steps[0]
    time = found.time("roofline_v2")
    assert "hidden_size must be a multiple" in time.why_not
    assert math.isnan(time.total_us)
    assert found.time("infersim").why_not == ""
    assert not [d for d in found.differences if d.method == "roofline_v2"]


@pytest.mark.slow
def test_trees_by_path_are_used(h100: fastroof.Tables, shared: Path) -> None:
    root = next(iter(sorted(shared.glob("reference/h100_roofline_v2/bench_data"))), None)
    if root is None:
        pytest.skip("no roofline V2 tree in the shared material")
    found, shipped = (
        compare("llama-2-7b", "h100", decode=[(32, 4096)], tables=h100, roofline_v2_root=given)
        for given in (root, None)
    )
    tables = roofline_v2.load(root)
    config = compare_case(fastroof.load_model("llama-2-7b"), h100.gpu, h100, (Step("decode", 32, 4096),))
    us = roofline_v2.step_us(tables, config.model_config, config.hardware, 1, [([], [4095] * 32)])
    assert found.steps[0].time("roofline_v2").total_us == us[0]
    assert found.trees["roofline_v2"] == str(root)
    assert found.steps[0].time("roofline_v2").total_us != shipped.steps[0].time("roofline_v2").total_us
    assert shipped.trees["roofline_v2"] != str(root)


def test_infersim_constants_keep_its_own_and_derate_others() -> None:
    assert constants_of(fastroof.load_gpu("h800")) == infersim.GPUS["h800"]
    h100 = constants_of(fastroof.load_gpu("h100"))
    assert (h100.memory_gb_per_s, h100.nvlink_gb_per_s) == (pytest.approx(2680.0), pytest.approx(360.0))
    assert (h100.fp16_tflops, h100.default_mfu) == (989.5, infersim.GPUS["h800"].default_mfu)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, BatchError),
        ({"decode": [(0, 5)]}, BatchError),
        ({"decode": [5]}, BatchError),
        ({"decode": [(1, 1)]}, BatchError),
        ({"prefill": [0]}, BatchError),
        ({"prefill": [2.5]}, BatchError),
        ({"prefill": [16], "tp": 3}, PlanError),
        ({"prefill": [16], "infersim_root": Path(__file__).parents[1] / "golden_sample"}, ValueError),
        ({"prefill": [16], "roofline_v2_root": Path(__file__).parents[1] / "nowhere"}, MissingTableError),
    ],
)
def test_bad_input_is_refused(arguments: Any, error: type[Exception], h100: fastroof.Tables) -> None:
    with pytest.raises(error):
        compare("llama-2-7b", "h100", tables=h100, **arguments)


# -- the command ---------------------------------------------------------------------------------


run = partial(run, "compare")


@pytest.mark.slow
def test_windows_are_refused_with_the_way_out(h100: fastroof.Tables) -> None:
    model = fastroof.load_model("mistral-7b-v0.1")
    with pytest.raises(ModelError, match=r"window of 4096 tokens.*with_full_attention\(\)"):
        compare(model, "h100", tables=h100, decode=[(8, 4096)])
    assert compare(model.with_full_attention(), "h100", tables=h100, decode=[(8, 4096)]).steps


@pytest.mark.slow
def test_the_command_prints_the_numbers_of_the_library(h100: fastroof.Tables) -> None:
    args = ("--model", "llama-2-7b", "--decode", "1x1024,32x4096", "--prefill", "2048")
    code, out, err = run(*args, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    found = compare("llama-2-7b", "h100", decode=[(1, 1024), (32, 4096)], prefill=[2048], tables=h100)
    for written, step in zip(document["steps"], found.steps, strict=True):
        for time in step.times:
            assert written["methods"][time.method]["total_us"] == time.total_us
            assert written["methods"][time.method]["components_us"] == time.components_us
    code, text, err = run(*args)
    assert (code, err) == (0, "")
    for word in ("roofline V2", "InferSim", "datasheet", "perLayerOverhead 100", "LM head", "total"):
        assert word in text
    assert f"{found.steps[1].time('infersim').total_us / 1e3:,.3f}" in text


@pytest.mark.slow
def test_every_json_key_is_in_the_help() -> None:
    _, out, _ = run("--model", "llama-3.1-70b", "--decode", "8x1000", "--tp", "4", "--json")

    def keys(value: Any, inside: str = "") -> set[str]:
        if isinstance(value, dict):
            own = set() if inside == "constants" else set(value)
            return own.union(
                *(keys(v, "constants" if k == "constants" or inside else "") for k, v in value.items())
            )
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    missing = {key for key in keys(json.loads(out)) if key not in EPILOG}
    assert missing == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "llama-2-7b"),
        ("--model", "llama-2-7b", "--decode", "32*4096"),
        ("--model", "llama-2-7b", "--decode", "1x1"),
        ("--model", "llama-2-7b", "--prefill", "2048@0"),
        ("--model", "llama-2-7b", "--prefill", "0"),
        ("--model", "no-such-model", "--prefill", "16"),
        ("--model", "llama-2-7b", "--prefill", "16", "--tp", "3"),
        ("--model", "llama-2-7b", "--prefill", "16", "--gpu", "a100"),
        ("--model", "llama-2-7b", "--prefill", "16", "--infersim-tree", "no-such-folder"),
        ("--model", "llama-2-7b", "--prefill", "16", "--roofline-v2-tree", "no-such-folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fastroof: error: ")
    assert err.count("\n") == 1


def test_the_trees_hold_the_measured_rows(h100: fastroof.Tables) -> None:
    case = compare_case(fastroof.load_model("llama-3.1-8b"), h100.gpu, h100, (Step("decode", 32, 4096),))
    us = float(h100.lookup("gemm", m=64, n=4096, k=4096).latency_us)
    peak = h100.gpu.peak("bf16")
    mfu = 2.0 * 64 * 4096 * 4096 / (us * peak) * 1e6
    assert roofline_v2.gemm_mfu(case.roofline_v2, 64, 4096, 4096) == pytest.approx(mfu, rel=1e-12)
    assert infersim.gemm_mfu(case.infersim, "h100", 64, 4096, 4096) == round(mfu, 3)
    decode = float(
        h100.lookup(
            "attention_decode", num_q_heads=32, num_kv_heads=8, head_dim=128, batch_size=32, kv_len=4096
        ).latency_us
    )
    mfu = 4.0 * 32 * 128 * 4096 * 32 / (decode * peak) * 1e6
    assert roofline_v2.decode_mfu(case.roofline_v2, "32-8-128", 32, 4096, 1) == pytest.approx(mfu, rel=1e-12)
    assert np.isclose(
        infersim.attn_decode_mfu(
            case.infersim, "h100", num_heads=32, num_kv_heads=8, head_dim=128, batch_size=32, kv_len=4096
        ),
        round(mfu, 3),
    )
