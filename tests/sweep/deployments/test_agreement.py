"""A row of a deployment sweep equals an estimate of the same question, whatever the engine."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastroof import SpeculativeDecoding, StepPlan, Tables, compile_plan, serving
from fastroof.cli import app
from fastroof.engines import EngineProfile, KvMemory, Scheduling, load_engine
from fastroof.errors import BatchError, PlanRangeError
from fastroof.evidence.profile_file import write_profile
from fastroof.plan.speculation import speculated
from fastroof.serving import estimate_disaggregated
from fastroof.sweep import best_deployments, load_spec, run_sweep

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "request_latency_ms", "wait_ms")
SEEDS = range(3)
EXACT = (*TIMES, "decode_step_ms", "mixed_step_ms", "mixed_share")
"""What both work out in one order; the others are the same products in another."""
KEYS = ("mode", "replicas", "prefill_workers", "decode_workers", "isl", "osl", "clients",
        "max_num_batched_tokens")  # fmt: skip

MADE = {
    "whole-mean": EngineProfile("whole-mean", scheduling=Scheduling(chunked_prefill=False)),
    "cut-full": replace(load_engine("vllm"), name="cut-full", memory=KvMemory("full")),
    "few": EngineProfile("few", scheduling=Scheduling(max_num_batched_tokens=3000, max_num_seqs=20)),
}
PACKAGED = ("kernels", "vllm", "trtllm", "sglang")


def engine_of(name: str) -> EngineProfile:
    return MADE.get(name) or load_engine(name)


def some_spec(seed: int, engine: str, folder: Path, model: str) -> dict[str, Any]:
    """Lengths, clients, budgets and layouts of all sizes, some of them too large for anything."""
    random = np.random.default_rng(seed)

    def several(least: float, most: float, count: int) -> list[int]:
        return sorted({round(least * (most / least) ** random.random()) for _ in range(count)})

    path = engine if engine in PACKAGED else str(write_profile(MADE[engine], folder / f"{engine}.toml"))
    return {
        "models": model,
        "engine": path,
        "tp": [int(random.choice([1, 2, 4, 8]))],
        "mode": ["aggregated", "disaggregated"],
        "dtype": [str(random.choice(["bf16", "fp8"]))],
        "kv_dtype": [str(random.choice(["bf16", "fp8"]))],
        "isl": [*several(1, 20_000, 4), 100_000],
        "osl": several(2, 4000, 3),
        "clients": several(1, 3000, 3),
        "max_num_batched_tokens": several(300, 16_384, 2),
        "replicas": [1, 3],
        "prefill_workers": several(1, 4, 2),
        "decode_workers": several(1, 4, 2),
        "max_num_seqs": int(random.choice([7, 100, 1024])),
        "keep": "all",
    }


def plan_of(
    row: dict[str, Any], engine: EngineProfile, tables: Tables, max_num_seqs: int, model: str
) -> StepPlan:
    """Compile the plan of a row's deployment: its steps leave as much memory as in the sweep."""
    budget = row["max_num_batched_tokens"]
    return compile_plan(
        model, "h100", tables, tp=row["tp"], dtype=row["dtype"], kv_dtype=row["kv_dtype"],
        engine=engine, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs + budget + 8,
    )  # fmt: skip


def estimated(plan: StepPlan, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Estimate the answer of a row by its columns."""
    lengths = (row["isl"], row["osl"])
    options["max_num_batched_tokens"] = row["max_num_batched_tokens"]
    if row["mode"] == "disaggregated":
        workers = (row["prefill_workers"], row["decode_workers"])
        seen = estimate_disaggregated(plan, plan, *lengths, row["clients"], *workers, **options)
        answer = {name: getattr(seen, name) for name in (*TIMES, "tokens_per_s_per_gpu")}
        return answer | {"kv_share": seen.kv_load, "decode_step_ms": seen.decode_step_us / 1e3}
    clients = row["clients"] / row["replicas"]
    one = estimate(plan, *lengths, max(clients, 1.0), **options)
    busy = min(clients, 1.0)
    memory = plan.memory_of(
        max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=options["max_num_seqs"]
    )
    held = memory.held_tokens(row["isl"] + plan.profile.memory.osl_reserved * row["osl"])
    return {name: getattr(one, name) for name in TIMES} | {
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu * busy,
        "effective_concurrency": one.effective_concurrency * busy * row["replicas"],
        "kv_share": one.effective_concurrency * held / memory.max_kv_tokens,
        "decode_step_ms": one.decode_step_us / 1e3,
        "mixed_step_ms": one.mixed_step_us / 1e3,
        "mixed_share": one.mixed_share,
    }


def refused_for(plan: StepPlan, options: dict[str, Any], max_num_seqs: int) -> str:
    """Why there is no estimate of what a sweep left out."""
    if options["isl"] + options["osl"] > plan.model.max_position:
        return "context"
    with pytest.raises((BatchError, PlanRangeError)) as refused:
        estimated(plan, options, max_num_seqs=max_num_seqs)
    return "whole_prompt" if "chunked_prefill=True" in str(refused.value) else "memory"


ENGINES_AND_MODELS = (
    *((engine, "llama-3.1-8b") for engine in (*PACKAGED, *MADE)),
    ("cut-full", "mistral-7b-v0.1"),
    ("cut-full", "qwen3.5-27b"),
)


@pytest.mark.parametrize(
    ("engine", "model", "seed"),
    [
        # each engine with one draw, and each draw with three engines; the others before a release
        pytest.param(*who, seed, marks=[pytest.mark.release] if (seed - i) % len(SEEDS) else [])
        for seed in SEEDS
        for i, who in enumerate(ENGINES_AND_MODELS)
    ],
)
def test_a_row_is_the_estimate_of_its_question(
    tmp_path: Path, h100: Tables, engine: str, model: str, seed: int
) -> None:
    given = some_spec(seed, engine, tmp_path, model)
    summary = run_sweep(given, tmp_path / "r.parquet")
    profile, spec = engine_of(engine), load_spec(given)
    fixed = {"tp": spec.tp[0], "dtype": spec.dtype[0], "kv_dtype": spec.kv_dtype[0]}
    found = pq.read_table(tmp_path / "r.parquet").to_pylist()
    rows = {tuple(row[key] for key in KEYS): row for row in found}
    left_out: Counter[str] = Counter()
    layouts = [("aggregated", count, 0, 0) for count in spec.replicas]
    workers = itertools.product(spec.prefill_workers, spec.decode_workers)
    layouts += [("disaggregated", 0, *pair) for pair in workers]
    for budget in spec.max_num_batched_tokens:
        plan = plan_of(
            {**fixed, "max_num_batched_tokens": budget}, profile, h100, spec.max_num_seqs[0], model
        )
        for layout, *sizes in itertools.product(layouts, spec.isl, spec.osl, spec.clients):
            options = dict(zip(KEYS, (*layout, *sizes, budget), strict=True)) | fixed
            row = rows.pop((*layout, *sizes, budget), None)
            if row is None:
                left_out[refused_for(plan, options, spec.max_num_seqs[0])] += 1
                continue
            room = plan.memory_of(max_num_batched_tokens=budget, max_num_seqs=spec.max_num_seqs[0])
            assert row["max_kv_tokens"] == room.max_kv_tokens
            for name, value in estimated(plan, options, max_num_seqs=spec.max_num_seqs[0]).items():
                expected = value if name in EXACT else pytest.approx(value, rel=1e-12)
                assert row[name] == expected, (name, options)
    assert found
    assert not rows
    assert summary.infeasible == dict(left_out)
    assert not (left_out["whole_prompt"] and profile.scheduling.chunked_prefill)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", pytest.param("trtllm", marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "question",
    [
        {"num_draft_tokens": 3, "accepted": 2.2},
        {"num_draft_tokens": 2, "accepted": [0.75, 0.5], "draft": "mtp"},
        {
            "num_draft_tokens": 4,
            "accepted": 3.0,
            "draft": "llama-3.1-8b",
            "draft_tp": 2,
            "draft_dtype": "fp8",
        },
    ],
)
def test_a_row_speculates_as_its_estimate(
    tmp_path: Path, h100: Tables, engine: str, question: dict[str, Any]
) -> None:
    sizes = {"isl": [200, 3000], "osl": [2, 400], "clients": [1, 24, 900], "max_num_batched_tokens": 8192}
    spec = {"models": "llama-3.1-70b", "tp": 4, "engine": engine, "max_num_seqs": 300, "keep": "all", **sizes}
    spec["speculation"] = question
    whole = {"prefill_workers": 2, "decode_workers": 2, "mode": "disaggregated"}
    for more in ({"prefix_hit": [0.0, 0.6], "replicas": 2}, whole):
        run_sweep({**spec, **more}, tmp_path / "r.parquet")
        rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
        assert len(rows) == 12 * len(more.get("prefix_hit", [0]))
        plan = compile_plan(
            "llama-3.1-70b", "h100", h100, tp=4, engine=engine, max_num_batched_tokens=8200, max_num_seqs=8500
        )
        draft = question.get("draft")
        if draft == "llama-3.1-8b":
            draft = compile_plan(
                draft,
                "h100",
                h100,
                tp=2,
                dtype="fp8",
                engine=engine,
                max_num_batched_tokens=8200,
                max_num_seqs=8500,
            )
        accepted = question["accepted"]
        speculation = SpeculativeDecoding(
            question["num_draft_tokens"], tuple(accepted) if isinstance(accepted, list) else accepted, draft
        )
        # memory is that of steps of the budget
        room = speculated(plan, speculation).memory(max_num_batched_tokens=8192, max_num_seqs=300)
        for row in rows:
            options = {"max_num_seqs": 300, "speculation": speculation}
            if row["mode"] == "aggregated":
                options |= {"prefix_hit": row["prefix_hit"]}
            if row["mode"] == "aggregated" or row["kv_share"] < 0.9:
                for name, value in estimated(plan, row, **options).items():
                    if name != "kv_share":
                        assert row[name] == pytest.approx(value, rel=1e-12), (name, row)
            assert row["max_kv_tokens"] == room.max_kv_tokens
            assert row["num_draft_tokens"] == question["num_draft_tokens"]
            assert row["accepted"] == speculation.acceptance_length
            assert row["draft"] == question.get("draft", "none")
            assert (row["origin"], row["relative_error"]) == ("modelled", None)
            if (row["clients"], row["osl"]) == (1.0, 400):
                # weights of the model and of its draft
                assert row["bound"] == "memory"


@pytest.mark.slow
@settings(max_examples=12)
@given(
    sizes=st.tuples(st.integers(10, 6000), st.integers(2, 900)),
    drafts=st.integers(1, 6),
    share=st.floats(0.0, 1.0),
    draft=st.sampled_from(["none", "mtp"]),
    hit=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_the_best_is_as_good_as_its_estimate(
    h100: Tables, sizes: tuple[int, int], drafts: int, share: float, draft: str, hit: float
) -> None:
    accepted = 1.0 + share * drafts
    options = {"num_draft_tokens": drafts, "accepted": accepted, "draft": draft}
    spec = {"models": "llama-3.1-8b", "tp": [1, 2], "isl": sizes[0], "osl": sizes[1], "max_num_seqs": 256}
    spec |= {"clients": [1, 16, 200], "speculation": options, "prefix_hit": hit, "engine": "vllm"}
    row = best_deployments(spec, runners_up=0, percentile=None).answers[0].choices[0].row
    plan = plan_of(row, load_engine("vllm"), h100, 256, row["model"])
    speculation = SpeculativeDecoding(drafts, accepted, None if draft == "none" else draft)
    seen = estimated(plan, row, max_num_seqs=256, speculation=speculation, prefix_hit=row["prefix_hit"])
    for name in (*TIMES, "tokens_per_s_per_gpu"):
        assert row[name] == pytest.approx(seen[name], rel=1e-9), name


def test_an_engine_that_cuts_no_prompts_is_estimated_as_validation_judges_it(
    h100: Tables, tmp_path: Path
) -> None:
    """A sweep had 379 and 159 ms here, of cut prompts; whole ones take 1,930 and 128.7."""
    engine = "trtllm-1.0"
    spec = {"models": "llama-3.1-8b", "tp": 1, "isl": 5000, "osl": 50, "clients": 64, "engine": engine}
    spec["front_end"] = 0
    run_sweep(spec, tmp_path / "r.parquet")
    (row,) = pq.read_table(tmp_path / "r.parquet").to_pylist()
    plan = compile_plan("llama-3.1-8b", "h100", h100, engine=engine, front_end=0)
    for options in ({}, {"chunked_prefill": False, "kv_reservation": "full", "max_num_batched_tokens": 8192}):
        seen = estimate(plan, 5000, 50, 64, **options)
        assert (seen.ttft_ms, seen.tpot_ms) == (row["ttft_ms"], row["tpot_ms"])
    assert (round(row["ttft_ms"]), round(row["tpot_ms"], 1)) == (1930, 128.7)
    cut = estimate(plan, 5000, 50, 64, chunked_prefill=True)
    assert cut.ttft_ms < 0.5 * row["ttft_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trtllm", "few", "vllm"])
def test_a_sweep_without_budgets_takes_the_engines_own(tmp_path: Path, h100: Tables, engine: str) -> None:
    path = engine if engine in PACKAGED else str(write_profile(MADE[engine], tmp_path / "few.toml"))
    spec = {"models": "llama-3.1-8b", "tp": 2, "isl": 2000, "osl": 100, "clients": [8, 64], "keep": "all"}
    run_sweep({**spec, "engine": path}, tmp_path / "r.parquet")
    own = engine_of(engine).scheduling
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, tp=2, engine=path, max_num_batched_tokens=own.max_num_batched_tokens
    )
    for row in pq.read_table(tmp_path / "r.parquet").to_pylist():
        assert row["max_num_batched_tokens"] == own.max_num_batched_tokens
        seen = estimate(plan, 2000, 100, row["clients"])
        assert (seen.ttft_ms, seen.tpot_ms) == (row["ttft_ms"], row["tpot_ms"])
    with pytest.raises(ValueError, match=r"max_num_batched_tokens.*is needed: the engines' defaults differ"):
        load_spec({**spec, "engine": ["vllm", str(write_profile(MADE["few"], tmp_path / "few.toml"))]})


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"engine": "vllm", "prefix_hit": 0.5}, "--engine vllm --prefix-hit 0.5"),
        ({"engine": "sglang"}, "--engine sglang"),
        ({"models": "qwen3-30b-a3b", "dp": 2, "ep": 2}, "--model qwen3-30b-a3b --dp 2 --ep 2"),
        ({"mode": "disaggregated"}, "--disaggregated 1:1"),
        (
            {"speculation": {"num_draft_tokens": 2, "accepted": 1.5}},
            "--num-draft-tokens 2 --accepted 1.5",
        ),
    ],
)
def test_serving_sweeps_and_best_state_one_origin(
    tmp_path: Path, options: dict[str, Any], arguments: str
) -> None:
    sizes: dict[str, Any] = {"isl": [100, 9000], "osl": [2, 200], "clients": [1, 8, 300]}
    spec = {"models": "llama-3.1-8b", "tp": 1, **sizes, **options}
    run_sweep({**spec, "keep": "all"}, tmp_path / "r.parquet")
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    question = ["serving", "--model", "llama-3.1-8b", "--requests-per-client", "steady", *arguments.split()]
    for name, values in sizes.items():
        question += [f"--{name}", ",".join(map(str, values))]
    printed = CliRunner().invoke(app, [*question, "--json"], catch_exceptions=False)
    found, stated = (
        {tuple(row[name] for name in sizes): row["origin"] for row in each}
        for each in (rows, json.loads(printed.stdout)["rows"])
    )
    assert found == stated
    assert len(found) == 12
    for answer in best_deployments(spec, percentile=None).answers:
        assert answer.choices[0].row in rows
