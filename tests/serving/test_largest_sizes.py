"""The largest batches and contexts of `fastroof fit --tpot`, against every size, and what limits them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import BatchError
from fastroof.engines import EngineProfile, StepCosts
from fastroof.serving import Fit, LargestSize
from tests.command_line import run as command
from tests.reference.handmade import attention_rows, gemm_rows, handmade_tables
from tests.reference.shards import changed

PROFILE = EngineProfile("made up", costs=StepCosts(step_us=200.0, sequence_us=9.0, prefill_us=70.0))
# jagged on purpose: 16 rows are faster than 8, kv 512 than 256
GRID = {
    (b, x): 9.0 + b * x / 4096 + x / 700 - 6.0 * (x == 512) for b in (1, 8, 64) for x in (64, 256, 512, 4096)
}
QUESTIONS = [
    ("llama-3.1-8b", "h100", 10.0, {}),
    ("llama-3.1-8b", "h100", math.inf, {"pp": 2, "max_num_seqs": 64, "engine": "vllm-0.10.0"}),
    ("llama-3.1-70b", "h100", math.inf, {"tp": 4, "engine": "sglang", "kv_dtype": "fp8"}),
    ("gpt-oss-120b", "h100", 12.0, {"engine": "trtllm-1.1", "allow_modelled": True}),
    ("deepseek-v3", "h200", 25.0, {"tp": 8, "engine": "sglang", "allow_modelled": True}),
    ("gemma-3-12b", "h100", 20.0, {"max_model_len": 5000, "allow_modelled": True}),
    ("qwen3.5-27b", "h100", 30.0, {"tp": 2, "max_num_seqs": 32, "allow_modelled": True}),
]


def check(one: LargestSize, found: Fit, plan: Any) -> None:
    """Hold one answer to every size: memory as fit counts it, and times of the plan."""
    limit_us = found.tpot_ms * 1e3  # type: ignore[operator]
    most = min(found.max_num_seqs, plan.max_num_batched_tokens)
    if one.given == "kv_len":
        every = np.arange(1, most + 1)
        fits = every * found.pp <= found.memory.max_sequences(one.kv_len)
        times, answer = plan.decode_us(every, one.kv_len), one.batch_size
    else:
        every = np.arange(1, found.max_model_len + 1)
        fits = one.batch_size * found.pp <= found.memory.max_sequences(every)
        times, answer = plan.decode_us(one.batch_size, every), one.kv_len
    within = fits & (times <= limit_us)
    assert answer == every[within].max(initial=0)
    if answer == len(every):
        assert one.limited_by == (
            "max_model_len"
            if one.given == "batch_size"
            else "max_num_seqs"
            if most == found.max_num_seqs
            else "max_num_batched_tokens"
        )
    else:
        # every[answer] is one more
        assert one.limited_by == ("tpot" if fits[answer] else "memory")
    if answer:
        assert one.step_ms == times[answer - 1] / 1e3
        assert one.kv_share is not None
        assert 0.0 < one.kv_share <= 1.0
    else:
        assert one.step_ms is one.tokens_per_s_per_gpu is one.kv_share is None


@pytest.mark.parametrize(
    ("model", "gpu", "tpot_ms", "options"),
    [QUESTIONS[0], *(pytest.param(*question, marks=pytest.mark.slow) for question in QUESTIONS[1:])],
)
def test_answers_are_the_largest_within_memory_and_time(
    model: str, gpu: str, tpot_ms: float, options: dict[str, Any]
) -> None:
    found = fastroof.fit(model, gpu, tpot_ms=tpot_ms, **options)
    limits = ("max_num_seqs", "max_model_len")
    plan = fastroof.compile_plan(
        model, gpu, **{name: value for name, value in options.items() if name not in limits}
    )
    few = [1, 8, found.max_num_seqs]
    few_sizes = fastroof.fit(model, gpu, tpot_ms=tpot_ms, kv_len=[1, 777], batch_size=few, **options)
    assert [one.given for one in few_sizes.largest] == ["kv_len"] * 2 + ["batch_size"] * 3
    assert [one.given for one in found.largest][-2:] == ["kv_len", "batch_size"]
    assert found.largest[-2].kv_len == found.max_model_len
    assert found.largest[-1] == few_sizes.largest[-1]
    for one in (*found.largest, *few_sizes.largest):
        check(one, found, plan)
    assert dataclasses.replace(found, tpot_ms=None, largest=()) == fastroof.fit(model, gpu, **options)


@pytest.fixture(scope="module")
def jagged() -> Any:
    tables = handmade_tables(
        gemm=gemm_rows({(1, 64, 64): 3.0, (8, 64, 64): 5.0, (16, 64, 64): 4.0, (64, 256, 512): 6.0}),
        attention_decode=attention_rows(GRID),
        attention_prefill=attention_rows(GRID, is_decode=False),
        elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
    )
    model = changed(fastroof.load_model("llama-3.1-8b"), num_layers=2, max_position=100_000)
    return model, tables


def test_a_larger_step_may_be_faster(jagged: Any) -> None:
    model, tables = jagged
    plan = fastroof.compile_plan(model, "h100", tables, engine=PROFILE)
    sizes: dict[str, Any] = {"kv_len": [1, 64, 300, 512, 9000], "batch_size": [1, 8, 9, 64, 900]}
    slower_below = 0
    for batch, kv_len in ((8, 70), (30, 512), (150, 99_000)):
        time_ms = plan.decode_us(batch, kv_len) / 1e3
        for limit_ms in (time_ms, float(np.nextafter(time_ms, 0))):
            found = fastroof.fit(model, "h100", tables=tables, engine=PROFILE, tpot_ms=limit_ms, **sizes)
            for one in found.largest:
                check(one, found, plan)
                if one.given == "batch_size" and one.kv_len:
                    slower_below += plan.decode_us(one.batch_size, np.arange(1, one.kv_len)).max(
                        initial=0.0
                    ) > (limit_ms * 1e3)
    assert slower_below


def test_tokens_limit_steps_where_decodes_count_against_them() -> None:
    options: dict[str, Any] = {"engine": "trtllm-1.1", "max_num_batched_tokens": 48, "max_num_seqs": 64}
    found = fastroof.fit("llama-3.1-8b", "h100", tpot_ms=math.inf, kv_len=100, **options)
    assert [(one.batch_size, one.limited_by) for one in found.largest] == [(48, "max_num_batched_tokens")]
    with pytest.raises(BatchError, match=r"from 1 to 48 \(max_num_batched_tokens\), got 49"):
        fastroof.fit("llama-3.1-8b", "h100", tpot_ms=math.inf, batch_size=49, **options)


def test_ranks_and_stages_have_the_rate_of_one_gpu() -> None:
    """A dense model's ranks are copies; two stages have two batches in flight, on twice the GPUs."""
    layouts: tuple[dict[str, Any], ...] = ({}, {"dp": 4}, {"pp": 2})
    one, ranks, stages = (
        fastroof.fit("llama-3.1-8b", "h100", tpot_ms=15.0, kv_len=2048, max_num_seqs=64, **layout).largest[0]
        for layout in layouts
    )
    assert one.batch_size == ranks.batch_size == stages.batch_size == 64
    assert one.tokens_per_s_per_gpu == pytest.approx(64 / one.step_ms * 1e3)  # type: ignore[operator]
    assert ranks.tokens_per_s_per_gpu == pytest.approx(one.tokens_per_s_per_gpu, rel=0.01)
    assert stages.tokens_per_s_per_gpu == pytest.approx(one.tokens_per_s_per_gpu, rel=0.15)


def test_an_engine_that_does_not_start_has_no_sizes() -> None:
    found = fastroof.fit("llama-3.1-70b", "h100", tp=2, tpot_ms=30)
    assert (found.starts, found.tpot_ms, found.largest) == (False, 30.0, ())
    assert found.document()["largest"] == []
    shorter = fastroof.fit("llama-3.1-70b", "h100", tp=2, tpot_ms=30, **found.changes[0].settings)
    assert max(one.batch_size for one in shorter.largest if one.given == "kv_len") > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpot_ms": 0}, "tpot_ms must be a number above 0, got 0"),
        ({"tpot_ms": math.nan}, "tpot_ms must be a number above 0, got nan"),
        ({"tpot_ms": "fast"}, "tpot_ms must be a number above 0, got 'fast'"),
        ({"tpot_ms": [1.0, 2.0]}, r"tpot_ms must be a number above 0, got \[1.0, 2.0\]"),
        ({"kv_len": 5}, "kv_len and batch_size need tpot_ms"),
        ({"tpot_ms": 5, "kv_len": [5, 0]}, r"kv_len must be from 1 to 131,072 \(max_model_len\), got 0"),
        ({"tpot_ms": 5, "kv_len": 11, "max_model_len": 10}, r"from 1 to 10 \(max_model_len\), got 11"),
        ({"tpot_ms": 5, "kv_len": 5.0}, "kv_len must hold integers"),
        ({"tpot_ms": 5, "batch_size": 1025}, r"batch_size must be from 1 to 1,024 \(max_num_seqs\)"),
        ({"tpot_ms": 5, "num_draft_tokens": 3}, "tpot_ms does not go with num_draft_tokens"),
    ],
)
def test_wrong_times_and_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        fastroof.fit("llama-3.1-8b", "h100", **options)


def test_the_command_prints_the_same_sizes() -> None:
    args = ("fit", "--model", "llama-3.1-8b", "--tpot", "10", "--kv-len", "1024,131072", "--batch-size", "3")
    code, out, err = command(*args, "--json")
    assert (code, err) == (0, "")
    found = fastroof.fit("llama-3.1-8b", "h100", tpot_ms=10, kv_len=[1024, 131_072], batch_size=3)
    document = json.loads(out)
    assert [LargestSize(**one) for one in document["largest"]] == list(found.largest)
    explained = command("fit", "--help-all")[1]
    for key in ("tpot_ms", "largest", *document["largest"][0]):
        assert key in explained
    lines = command(*args)[1].splitlines()
    printed = lines[lines.index("decode steps within 10 ms:") + 3 :]
    assert printed[0].split()[:4] == ["largest", "batch", f"{found.largest[0].batch_size:,}", "1,024"]
    assert printed[1].split() == ["largest", "batch", "none", "131,072", "--tpot"]
    assert printed[2].split()[:4] == ["longest", "context", "3", f"{found.largest[2].kv_len:,}"]


def test_options_of_times_need_one() -> None:
    for option, value in (("--kv-len", "5"), ("--batch-size", "5"), ("--tables", "datasheet")):
        code, out, err = command("fit", "--model", "llama-3.1-8b", option, value)
        assert (code, out) == (2, "")
        assert f"{option} needs --tpot MS" in err
