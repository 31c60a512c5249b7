"""Answers to the page: plans' own numbers, to the bit, and those of the commands shown with them."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.backends.serve.answers import for_json
from fastroof.cli import app
from fastroof.columns import ORIGINS
from fastroof.engines.launch import vllm
from fastroof.errors import (
    BatchError,
    FastroofError,
    GpuError,
    ModelError,
    SimulationError,
)
from fastroof.models.layout import copies_words
from fastroof.serving import estimate
from fastroof.sweep.best import best_deployments
from fastroof.ui.answers import (
    SERVING,
    capacity_answer,
    layouts_answer,
    splits_of,
    start_answer,
    step_answer,
)
from fastroof.ui.deployment import deployment_answer, deployment_question_of
from fastroof.ui.plans import PlanStore
from fastroof.ui.simulation import simulation_answer
from fastroof.ui.view import View

VIEWS = {
    "decode": View(),
    "mixed": View(kind="mixed", batch=20, chunk=700, isl=900),
    "prefill": View(model="llama-3.1-8b", tp=1, kind="prefill", isl=3000),
    "prefill_beyond_the_budget": View(model="llama-3.1-8b", kind="prefill", isl=20_000),
    "fp8": View(model="llama-3.1-70b", tp=4, dtype="fp8", kv_dtype="fp8", batch=48, kv_len=2048),
    "kernels": View(model="llama-3.1-8b", tp=1, engine="kernels", isl=512, osl=64, batch=7),
    "trtllm": View(model="llama-3.1-8b", tp=2, engine="trtllm-1.1", batch=1200, isl=128, osl=32),
    "pipeline": View(model="llama-3.1-8b", tp=1, pp=2, batch=8),
    "experts": View(model="qwen3-30b-a3b", tp=2, dp=2, ep=4, batch=16),
    "budget": View(
        model="llama-3.1-8b", tp=1, max_num_batched_tokens=2048, batch=16, spread=0.5, percentile=90
    ),
    "lora": View(model="llama-3.1-8b", tp=1, lora="16:2/4:attention+mlp", batch=24, isl=800, osl=100),
}


@pytest.fixture(scope="module")
def store() -> PlanStore:
    return PlanStore()


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest) -> View:
    return VIEWS[request.param]


def printed(command: str) -> Any:
    """The JSON of a command."""
    words = shlex.split(command)
    assert words.pop(0) == "fastroof"
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(for_json(value), allow_nan=False))


# -- the step ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_is_what_plans_explain(store: PlanStore, h100: fastroof.Tables, view: View) -> None:
    answer = step_answer(store, view)["step"]
    plan = fastroof.compile_plan(view.model, "h100", h100, **view.plan_options, **view.step_sizes)
    requests = [(new, context) for count, new, context in view.requests for _ in range(count)]
    explained = plan.explain(requests, with_error=True)
    assert (answer["latency_us"], answer["relative_error"]) == (explained.total_us, explained.relative_error)
    assert answer["origin"] == ORIGINS[explained.origin]
    assert len(answer["operators"]) == len(explained.operators)
    for shown, part in zip(answer["operators"], explained.operators, strict=True):
        assert as_json({name: shown[name] for name in part._fields}) == as_json(
            {**part._asdict(), "origin": ORIGINS[part.origin]}
        )
        if shown["flops_per_s"]:
            assert shown["flops_per_s"] == pytest.approx(part.flops / part.total_us * 1e6)
            assert shown["flops_per_byte"] == part.flops / part.moved_bytes
    assert sum(answer["groups_us"].values()) == pytest.approx(explained.total_us, rel=1e-9)


@pytest.mark.slow
def test_a_step_is_what_its_command_prints(store: PlanStore, view: View) -> None:
    answer = as_json(step_answer(store, view))
    output = printed(answer["commands"]["step"])
    step = answer["step"]
    for name in ("latency_us", "relative_error", "origin", "tokens", "tokens_per_s_per_gpu"):
        assert output[name] == step[name], name
    for one, other in zip(output["operators"], step["operators"], strict=True):
        assert {name: value for name, value in one.items() if name not in ("share", "bytes_per_s")} == {
            name: other[name] for name in one if name not in ("share", "bytes_per_s")
        }
        assert one["bytes_per_s"] == other["bytes_per_s"]
    assert output["energy"] == step["energy"]
    assert output.get("lora") == answer["plan"]["lora"] == view.lora
    assert output["memory_bytes"] == answer["plan"]["memory_bytes"]
    assert output["max_kv_tokens"] == answer["plan"]["max_kv_tokens"]
    assert output["tables_hash"] == answer["plan"]["tables_hash"]


def test_the_curve_is_the_steps_own(store: PlanStore, h100: fastroof.Tables, view: View) -> None:
    curve = step_answer(store, view)["curve"]
    step = step_answer(store, view)["step"]
    assert curve["at"] in curve["x"]
    assert curve["x"] == sorted(set(curve["x"]))
    # the point of interest is the step shown next to the curve
    here = curve["x"].index(curve["at"])
    assert curve["latency_us"][here] == step["latency_us"]
    assert curve["relative_error"][here] == pytest.approx(step["relative_error"], rel=1e-12)
    assert curve["origin"][here] == step["origin"]
    plan = fastroof.compile_plan(view.model, "h100", h100, **view.plan_options, **view.step_sizes)
    if view.kind == "decode":
        assert curve["latency_us"] == plan.decode_us(np.array(curve["x"]), view.decode_kv_len).tolist()
    elif view.kind == "prefill":
        assert curve["latency_us"] == plan.prefill_us(np.array(curve["x"])).tolist()
    total = np.sum(list(curve["parts_us"].values()), axis=0)
    assert np.allclose(total, curve["latency_us"], rtol=1e-12)


def test_a_curve_ends_soon_after_the_memory(store: PlanStore) -> None:
    curve = step_answer(store, View())["curve"]
    assert 1.0 < curve["x"][-1] / curve["fits"] <= 1.5
    # unless more was asked for
    assert step_answer(store, View(batch=1000))["curve"]["x"][-1] >= 1000


# -- clients ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_see_what_estimates_return(store: PlanStore, h100: fastroof.Tables, view: View) -> None:
    answer = step_answer(store, view)["serving"]
    plan = fastroof.compile_plan(
        view.model, "h100", h100, **view.plan_options, **view.serving_sizes(answer["clients"])
    )
    assert answer["clients"] == view.batch * view.dp * view.pp
    seen = estimate(
        plan, view.isl, view.osl, answer["clients"], view.budget, max_num_seqs=1024, with_error=True,
        with_energy=True,
    )  # fmt: skip
    assert as_json(answer) == as_json(
        {"clients": answer["clients"], **{name: getattr(seen, name) for name in SERVING}}
    )
    [row] = printed(step_answer(store, view)["commands"]["serving"])["rows"]
    for name in SERVING:
        if not name.endswith("error"):
            assert row[name] == answer[name], name


def test_what_does_not_fit_is_named_and_the_step_shown(store: PlanStore) -> None:
    answer = step_answer(store, View(model="llama-3.1-70b", tp=1))
    assert "no room" in "".join(answer["notes"]) or "leave no room" in "".join(answer["notes"])
    assert "KV cache" in answer["serving"]["problem"]
    assert answer["step"]["latency_us"] > 0
    assert answer["step"]["kv_share"] is None
    full = step_answer(store, View(batch=2000))
    assert "do not fit the KV cache" in full["notes"][0]
    assert full["step"]["kv_share"] > 1
    long = step_answer(store, View(kv_len=100_000, batch=1))
    assert "longer than the context of qwen3-32b-fp8, 40,960" in long["notes"][0]


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "view", [View(), View(model="qwen3-30b-a3b", tp=2, ep=2, gpus=4)], ids=["dense", "moe"]
)
def test_layouts_are_estimates(store: PlanStore, h100: fastroof.Tables, view: View) -> None:
    answer = layouts_answer(store, view)
    assert sum(each["is_shown"] for each in answer["layouts"]) == 1
    assert answer["limits"] == {"ttft_ms": 1000.0, "tpot_ms": 30.0}
    points = []
    for each in answer["layouts"]:
        plan = fastroof.compile_plan(
            view.model, "h100", h100, **{**view.plan_options, **each["split"]}, **view.serving_sizes(1)
        )
        assert each["gpus"] == plan.layout.world_size <= view.gpus
        if "problem" in each:
            with pytest.raises(FastroofError):
                estimate(plan, view.isl, view.osl, 1, view.budget, max_num_seqs=1024)
            continue
        sizes = {"max_num_seqs": 1024, "requests_per_client": "steady"}
        seen = estimate(plan, view.isl, view.osl, each["clients"], with_error=True, **sizes)
        for name in ("ttft_ms", "tpot_ms", "tokens_per_s_per_gpu", "tpot_relative_error"):
            assert each[name] == getattr(seen, name).tolist(), name
        within = (seen.ttft_ms <= 1000.0) & (seen.tpot_ms <= 30.0)
        assert each["within"] == within.tolist()
        points += zip(
            each["tpot_ms"], each["tokens_per_s_per_gpu"], each["on_front"], each["within"], strict=True
        )
    for tpot, rate, is_front, _ in points:
        beaten = any(t <= tpot and r >= rate and (t < tpot or r > rate) for t, r, _, _ in points)
        assert is_front == (not beaten) or not is_front  # of equal points one is kept
    best = answer["best"]
    chosen = answer["layouts"][best["layout"]]
    assert chosen["tokens_per_s_per_gpu"][best["point"]] == max(r for _, r, _, within in points if within)
    [row] = printed(best["command"])["rows"]
    assert row["tokens_per_s_per_gpu"] == chosen["tokens_per_s_per_gpu"][best["point"]]
    assert best["margins"]["tpot_ms"] == 1.0 - row["tpot_ms"] / 30.0


@pytest.mark.slow
def test_the_best_layout_is_that_of_best(store: PlanStore) -> None:
    view = View(model="llama-3.1-8b", tp=1, ttft_ms=500.0, tpot_ms=12.0)
    answer = layouts_answer(store, view)
    chosen = answer["layouts"][answer["best"]["layout"]]
    spec = {
        "models": [view.model], "gpus": ["h100"], "tp": [1, 2, 4, 8], "dtype": ["auto"], "kv_dtype": ["auto"],
        "engine": ["vllm"], "isl": view.isl, "osl": view.osl, "clients": chosen["clients"],
        "constraints": {"ttft_ms": 500.0, "tpot_ms": 12.0},
    }  # fmt: skip
    first = best_deployments(spec, percentile=None).answers[0].choices[0].row
    point = answer["best"]["point"]
    assert (first["tp"], first["clients"]) == (chosen["split"]["tp"], chosen["clients"][point])
    assert first["tokens_per_s_per_gpu"] == pytest.approx(chosen["tokens_per_s_per_gpu"][point], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(
            View(model="llama-3.1-8b", gpus=2, ttft_ms=500.0, tpot_ms=12.0, isl=1000, osl=100),
            marks=pytest.mark.release,
        ),
        View(
            model="qwen3-8b", gpus=1, tpot_ms=15.0, isl=1000, osl=100, dtype="fp8", percentile=90, lora="16:4"
        ),
        View(model="qwen3-8b", gpus=1, ttft_ms=1.0, isl=1000, osl=100, max_num_batched_tokens=512),
    ],
    ids=["default", "percentile", "none"],
)
def test_what_to_run_is_what_its_command_and_python_give(store: PlanStore, view: View) -> None:
    answer = as_json(deployment_answer(store, view))
    (output,) = printed(answer["command"])["answers"]
    found = fastroof.recommend(
        view.model, view.gpu, **deployment_question_of(store, view), percentile=float(view.percentile)
    )
    (meant,) = found.answers.answers
    assert answer["limits_on"] == output["limits_on"] == meant.limits_on == f"p{view.percentile}"
    assert len(answer["choices"]) == len(output["choices"]) == len(meant.choices)
    for mine, theirs, choice in zip(answer["choices"], output["choices"], meant.choices, strict=True):
        assert theirs["row"] == as_json(choice.row)
        assert mine["layout"] == copies_words(choice.row)
        for name in ("clients", "requests_per_s", "tokens_per_s_per_gpu", "max_num_seqs"):
            assert mine[name] == choice.row[name]
        assert mine["margins"] == theirs["margins"]
    servers = found.deployments[0].commands if found.deployments[0] is not None else {}
    releases = {"router": vllm.ROUTER}
    assert answer["servers"] == {
        role: f"# {releases.get(role, f'vLLM {vllm.RELEASES[0]}')}\n{command.shell()}"
        for role, command in servers.items()
    }
    assert (answer["nearest"] is None) == bool(meant.choices)


def test_without_limits_those_of_best_apply_and_are_named(store: PlanStore) -> None:
    view = View(ttft_ms=None, tpot_ms=None, gpus=1, tp=1, isl=1000, osl=100, model="llama-3.1-8b")
    answer = layouts_answer(store, view)
    alone_ms = min(each["ttft_ms"][0] for each in answer["layouts"])
    assert answer["limits"] == {"ttft_ms": math.ceil(1000.0 + alone_ms), "tpot_ms": 50.0}
    assert set(answer["best"]["margins"]) == {"ttft_ms", "tpot_ms"}
    found = fastroof.recommend(view.model, view.gpu, **deployment_question_of(store, view), percentile=None)
    # of the steps that are compared, a whole prompt is the fastest
    assert found.answers.answers[0].default_limits == answer["limits"]
    assert deployment_answer(store, view)["default_limits"] == answer["default_limits"]
    one = layouts_answer(store, replace(view, ttft_ms=900.0))
    assert one["limits"] == {"ttft_ms": 900.0, "tpot_ms": 50.0}
    assert layouts_answer(store, View(tpot_ms=0.5))["best"] is None


def test_layouts_are_powers_of_two_up_to_the_gpus(store: PlanStore) -> None:
    dense = list(splits_of(store, View(pp=2, gpus=4)))
    assert [(s["tp"], s["pp"], s["dp"], s["ep"]) for s in dense] == [
        (1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1),
    ]  # fmt: skip
    moe = list(splits_of(store, View(model="qwen3-30b-a3b", gpus=2)))
    assert [(s["tp"], s["dp"], s["ep"]) for s in moe] == [
        (1, 1, 1),
        (1, 2, 1),
        (1, 2, 2),
        (2, 1, 1),
        (2, 1, 2),
    ]


# -- starts ----------------------------------------------------------------------------------------


def test_a_start_is_what_its_command_prints(store: PlanStore, view: View) -> None:
    answer = as_json(start_answer(store, view))
    output = printed(answer["asked"])
    changed = {"changes"}  # shown as options
    assert {key: value for key, value in output.items() if key not in changed} == {
        key: answer[key] for key in output if key not in changed
    }
    assert len(answer["changes"]) == len(output["changes"])
    plan = store.plan(
        view, {"max_num_batched_tokens": view.budget, "max_num_seqs": output["max_num_seqs"]}
    ).plan
    assert output["memory"]["blocks"] == plan.memory.blocks


# -- capacities ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "budget", "kernels", "lora"])
def test_a_capacity_is_what_its_command_finds(store: PlanStore, name: str) -> None:
    answer = as_json(capacity_answer(store, VIEWS[name]))
    output = printed(answer["command"])
    assert {key: value for key, value in output.items() if key in answer} == {
        key: answer[key] for key in output if key in answer
    }
    assert output["requests_per_s"] > 0
    assert output["requests"] > output["counted"] >= 20_000


def test_a_capacity_needs_limits_and_ends(store: PlanStore) -> None:
    with pytest.raises(SimulationError, match="set one on TTFT or TPOT"):
        capacity_answer(store, View(ttft_ms=None, tpot_ms=None))
    with pytest.raises(SimulationError, match="use shorter outputs"):
        capacity_answer(store, View(osl=2**16))


# -- simulated traffic --------------------------------------------------------------------------------


POOLED = "--prefill-replicas 1 --decode-replicas 1"
SESSIONS = {"rate": 2.0, "turns": 3, "growth": 200, "think_s": 1.5, "spread": 0.3}
TRAFFIC: dict[str, dict[str, Any]] = {
    "plain": {"rate": 12.5, "percentile": 90, "front_end": 3.5},
    "clients": {"rate": None, "clients": 16, "think_s": 0.5, "spread": 0.4, "tpot_ms": None},
    "sessions": SESSIONS,
    "nothing_cached": {**SESSIONS, "prefix_cache": False},
    "tiers": {**SESSIONS, "kv_tiers": "host:2GB:50GB/s:by_layer,disk:50GB:6GB/s:80us"},
    "pools": {
        "rate": 5.0,
        "fleet": "--prefill-replicas 1 --decode-replicas 2 --prefill-tp 2 --back-pressure",
    },
    "autoscaling": {
        "rate": 60.0,
        "fleet": "--autoscale concurrency:8 --max-replicas 4 --startup 2 --scale-interval 1 "
        "--scale-down-delay 3 --router least_outstanding",
    },
    "stages": {"rate": 9.0, "pp": 2},
    "replicas": {"rate": 9.0, "fleet": "--replicas 2 --router least_kv", "max_num_batched_tokens": 512},
    "no_limits": {"rate": 1e6, "ttft_ms": None, "tpot_ms": None, "lora": "16:4"},
    "rare_limits": {"rate": 0.05, "ttft_ms": 1e6, "num_requests": 20},
}


def traffic(**given: Any) -> View:
    return View(**{"model": "llama-3.1-8b", "tp": 1, "isl": 900, "osl": 60, "num_requests": 300, **given})


OFTEN = ("plain", "sessions", "tiers", "pools", "autoscaling")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in TRAFFIC]
)
def test_simulated_traffic_is_what_its_command_prints(store: PlanStore, name: str) -> None:
    view = traffic(**TRAFFIC[name])
    answer = as_json(simulation_answer(store, view))
    output = printed(answer["command"])
    assert {key: answer.get(key) for key in output} == output
    assert output["finished"] == view.num_requests
    assert ("energy" in output) == (name != "stages")
    assert ("goodput" in output) == (name != "no_limits")
    assert ("sessions" in output) == ("turns" in TRAFFIC[name])
    assert ("prefix_cache" in output) == (name in ("sessions", "tiers"))
    for kind, key in (("tiers", "kv_tiers"), ("pools", "pools"), ("autoscaling", "autoscaling")):
        assert (key in output) == (name == kind)
    figures, series = dict(answer["figures"]), answer["series"]
    assert figures["requests finished"] == "300 of 300" or name == "rare_limits"
    assert ("J a token" in figures) == ("energy" in output)
    assert ("serving" in series) == (name == "autoscaling")
    assert len({len(values) for values in series.values()}) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": None}, "set requests/s or clients"),
        ({"rate": 2.0, "clients": 4}, "a closed loop has clients and no rate"),
        ({"think_s": 1.0}, "think_s goes with clients, or several turns or calls"),
        ({"turns": 3, "rate": None, "clients": 4}, "sessions come at a rate"),
        ({"growth": 5}, "growth_tokens, system_tokens and tool_s go with several turns"),
        ({"kv_tiers": "host:2GB:50GB/s"}, "set several turns, and the prefix cache on"),
        ({"turns": 2, "prefix_cache": False, "kv_tiers": "lmcache-cpu"}, "and the prefix cache on"),
        ({"turns": 2, "kv_tiers": "/etc/passwd"}, "unknown KV tier '/etc/passwd'"),
        ({"fleet": "--autoscale kv:0.7"}, "--autoscale kv:0.7 needs --max-replicas"),
        (
            {"fleet": f"{POOLED} --autoscale kv:1 --max-replicas 33 --startup 1"},
            "66 replicas, the page's maximum is 64",
        ),
        ({"fleet": "--router prefix_aware"}, "needs a simulated prefix cache"),
        ({"fleet": "--replicas 65"}, "65 replicas, the page's maximum is 64"),
        ({"osl": 60_000}, "use shorter outputs or the command line"),
        # a page names no files
        ({"fleet": "--trace mine.csv"}, "no such option: --trace, in '--trace mine.csv'; valid: --replicas"),
        ({"fleet": "--report /tmp/page.html"}, "no such option: --report"),
        ({"fleet": "--requests all.csv"}, "no such option: --requests"),
        ({"fleet": "--hourly file:day.txt"}, "no such option: --hourly"),
        ({"fleet": "mine.csv"}, "unexpected argument 'mine.csv'"),
        ({"fleet": "--help"}, "no such option: --help"),
        ({"fleet": "--replicas '"}, "no closing quotation"),
        ({"fleet": "--replicas many"}, "argument --replicas: invalid count value: 'many'"),
    ],
)
def test_traffic_that_cannot_be_is_one_line(store: PlanStore, given: dict[str, Any], words: str) -> None:
    with pytest.raises(FastroofError, match=words) as error:
        simulation_answer(store, traffic(**given))
    assert "\n" not in str(error.value)


# -- what is asked ---------------------------------------------------------------------------------


def test_a_page_reads_no_files(store: PlanStore) -> None:
    with pytest.raises(ModelError, match="fastroof ui --model PATH"):
        step_answer(store, View(model=__file__))
    with pytest.raises(GpuError, match="fastroof ui --gpu PATH"):
        step_answer(store, View(gpu="bench_data/h100/gpu.toml"))
    with pytest.raises(BatchError, match="engine must be one of"):
        View(engine="fastroof/engines/profiles/vllm.toml")


def test_errors_of_plans_are_the_products(store: PlanStore) -> None:
    for _ in range(2):  # kept ones too
        with pytest.raises(FastroofError, match="tp must be one of 1, 2, 4, 8"):
            step_answer(store, View(tp=3))
        with pytest.raises(FastroofError, match="int8"):
            step_answer(store, View(dtype="int8"))


def test_a_gpu_without_tables_is_timed_by_its_datasheet(store: PlanStore) -> None:
    answer = step_answer(store, View(model="llama-3.1-8b", gpu="l4", tp=1, batch=4, isl=256))
    assert answer["step"]["origin"] == "modelled"
    assert answer["step"]["relative_error"] is answer["curve"]["relative_error"] is None
    assert "datasheet" in answer["notes"][0]


def test_without_known_power_only_energy_is_missing(store: PlanStore) -> None:
    answer = as_json(step_answer(store, View(model="llama-3.1-8b", gpu="a10", tp=1, batch=4, isl=256)))
    assert answer["step"]["energy"] is answer["serving"]["joules_per_token"] is None
    assert answer["serving"]["tpot_ms"] > answer["step"]["latency_us"] / 1000 > 0
    assert not [command for command in answer["commands"].values() if "energy" in command]
    [row] = printed(answer["commands"]["serving"])["rows"]
    assert row["tpot_ms"] == answer["serving"]["tpot_ms"]


def test_adapters_are_not_files(store: PlanStore, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}'
    )
    for given in (str(tmp_path), f"{tmp_path}:4", "x", "16:"):
        with pytest.raises(FastroofError, match=r"lora must be a rank such as 16, .* or empty, got") as error:
            View(lora=given)
        assert "\n" not in str(error.value)


def test_plans_are_kept_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastroof.ui import plans

    monkeypatch.setattr(plans, "PLANS_BYTES", 3 * 2**20)
    store = PlanStore()
    first = store.plan(View(model="llama-3.1-8b", tp=1), View().step_sizes)
    for tp in (2, 4, 8, 2):
        kept = store.plan(View(model="llama-3.1-8b", tp=tp), View().step_sizes)
        assert kept is store.plan(View(model="llama-3.1-8b", tp=tp), View().step_sizes)
        assert len(store) <= 4
    assert store.plan(View(model="llama-3.1-8b", tp=1), View().step_sizes) is not first
