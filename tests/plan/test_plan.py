"""Compiling plans: what is refused, what a plan holds, and that it travels."""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest

from fastroof import StepBatch, compile_plan, compile_plans, load_gpu, load_tables
from fastroof.columns import ORIGINS
from fastroof.compiled import steps
from fastroof.compiled.grids import cells_of
from fastroof.engines import EngineProfile, KernelChoices, StepCosts, load_engine
from fastroof.errors import (
    BatchError,
    FastroofError,
    GpuError,
    MissingTableError,
    ModelError,
    PlanError,
    UnsupportedModelError,
)
from tests.reference.handmade import attention_rows, gemm_rows, handmade_tables


@pytest.fixture(scope="module")
def plan(h100):
    return compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=512, max_num_seqs=64, engine="kernels"
    )


BATCH = StepBatch.from_requests([[(300, 0), (1, 4095), (17, 100)], [], [(1, 9)] * 8])

REFUSED = {
    "tp of no node": ({"tp": 3}, "tp must be one of 1, 2, 4, 8, 16, 32, 64, got 3"),
    "tp 0": ({"tp": 0}, "tp must be"),
    "tp True": ({"tp": True}, "tp must be"),
    "tp 2.0": ({"tp": 2.0}, "tp must be"),
    "tp that does not divide": ({"model": "qwen2.5-7b", "tp": 8}, "28 query heads .*tp=1, 2, 4"),
    "dtype": ({"dtype": "fp4"}, "dtype must be one of auto, bf16, fp8, fp8_block, .*mxfp4, got 'fp4'"),
    "dtype None": ({"dtype": None}, "dtype must be"),
    "kv_dtype": ({"kv_dtype": "fp8_block"}, "kv_dtype must be one of auto, bf16, fp8, .*, got 'fp8_block'"),
    "engine": ({"engine": "vlm"}, "unknown engine 'vlm'; did you mean vllm"),
    "method": ({"method": "cubic"}, "method must be one of roofline, .*floor, got 'cubic'"),
    "tokens 0": ({"max_num_batched_tokens": 0}, "tokens must be a whole number from 1 to .*, got 0"),
    "max_num_batched_tokens float": ({"max_num_batched_tokens": 8192.0}, "max_num_batched_tokens must be"),
    "max_num_batched_tokens huge": ({"max_num_batched_tokens": 2**40}, "max_num_batched_tokens must be"),
    "max_num_batched_tokens True": ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be"),
    "seqs negative": ({"max_num_seqs": -1}, "max_num_seqs must be a whole number from 1 to .*, got -1"),
    "max_num_seqs text": ({"max_num_seqs": "64"}, "max_num_seqs must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_argument_is_named(h100, case):
    options, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        compile_plan(
            **{"engine": "kernels", "model": "llama-3.1-8b", "gpu": "h100", "tables": h100, **options}
        )


def test_a_method_is_checked_without_tables_too():
    with pytest.raises(PlanError, match="method"):
        compile_plan("llama-3.1-8b", "h100", None, method="cubic", engine="kernels")


def test_invalid_tables_are_refused():
    with pytest.raises(FastroofError, match="load_tables"):
        compile_plan("llama-3.1-8b", "h100", 8, engine="kernels")


def test_tables_of_another_gpu_are_refused_by_name(h100):
    with pytest.raises(PlanError, match="measured on h100, the plan is for h20"):
        compile_plan("llama-3.1-8b", "h20", h100, engine="kernels")
    with pytest.raises(PlanError, match="measured on h100, the plan is for h20"):
        compile_plans([{"model": "llama-3.1-8b"}], "h20", h100)


def test_unknown_models_and_gpus_are_refused(h100):
    with pytest.raises(ModelError, match="llama-9"):
        compile_plan("llama-9", "h100", h100, engine="kernels")
    with pytest.raises(GpuError, match="h1000"):
        compile_plan("llama-3.1-8b", "h1000", h100, engine="kernels")


def test_architectures_without_a_plan_are_refused(h100):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' is not supported .`fastroof models"):
        compile_plan(config, "h100", h100, engine="kernels")


def _few_tables():
    points = {(1, 64): 10.0, (8, 64): 20.0}
    return {
        "gemm": gemm_rows({(16, 128, 512): 6.0}),
        "attention_decode": attention_rows(points),
        "attention_prefill": attention_rows(points, is_decode=False),
        "elementwise": [("copy", 1, 2**28, 2**30, 400.0)],
    }


@pytest.mark.parametrize("missing", ["gemm", "attention_decode", "attention_prefill"])
def test_a_missing_operator_is_named(missing):
    rest = {name: rows for name, rows in _few_tables().items() if name != missing}
    with pytest.raises(MissingTableError, match=missing):
        compile_plan(
            "llama-3.1-8b", "h100", handmade_tables(**rest), max_num_batched_tokens=64, engine="kernels"
        )


def test_tables_without_allreduce_serve_one_gpu():
    tables = handmade_tables(**_few_tables())
    with pytest.raises(MissingTableError, match="allreduce"):
        compile_plan("llama-3.1-8b", "h100", tables, tp=2, max_num_batched_tokens=64, engine="kernels")
    plan = compile_plan("llama-3.1-8b", "h100", tables, max_num_batched_tokens=64, engine="kernels")
    assert plan.explain([(1, 63)]).origin < 4


def test_norms_without_a_streaming_table_are_modelled_and_marked():
    rows = _few_tables()
    del rows["elementwise"]
    explained = compile_plan(
        "llama-3.1-8b", "h100", handmade_tables(**rows), max_num_batched_tokens=64, engine="kernels"
    ).explain([(1, 63)])
    assert explained.origin == 4
    assert {o.origin for o in explained.operators if "rmsnorm" in o.name} == {4}


@pytest.mark.loops
def test_the_arena_is_what_the_loops_read_and_cannot_be_written(plan):
    arena = plan.arena
    assert (arena.dtype, arena.ndim, arena.flags.c_contiguous) == (np.float64, 1, True)
    assert len(arena) == arena[steps.ARENA_SIZE]
    assert np.isfinite(arena).all()
    with pytest.raises(ValueError, match="read-only"):
        arena[0] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_num_batched_tokens = 9


@pytest.mark.slow
@pytest.mark.loops
def test_plans_and_tables_pickle(plan, h100):
    twin = pickle.loads(pickle.dumps(plan))
    np.testing.assert_array_equal(twin.arena, plan.arena)
    assert repr(twin) == repr(plan)
    assert twin.tables_hash == plan.tables_hash
    times, others = twin.run(BATCH), plan.run(BATCH)
    for one, other in ((times.latency_us, others.latency_us), (times.origin, others.origin)):
        np.testing.assert_array_equal(one, other)
    assert [o[:5] for o in twin.explain([(9, 9)]).operators] == [
        o[:5] for o in plan.explain([(9, 9)]).operators
    ]
    tables = pickle.loads(pickle.dumps(h100))
    assert tables.content_hash == h100.content_hash
    query = {"m": [1, 77], "n": 6144, "k": 4096}
    one, other = (of.lookup("gemm", **query, with_error=True).columns() for of in (tables, h100))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.loops
def test_a_plan_has_what_is_alike_once(plan, h100):
    """Blocks of one kind of layers are the arena's, and sums of decodes are all steps' where calls are."""
    travels = pickle.dumps(plan)
    for slot in (steps.DECODE_AT, steps.PREFILL_AT):
        block = plan.arena[int(plan.arena[slot]) :]
        assert travels.count(block[cells_of(block)].tobytes()) == 1
    assert plan.arena[steps.DECODE_TOKENS_AT] == plan.arena[steps.TOKENS_AT]
    overlapping = EngineProfile("shares beside", kernels=KernelChoices(shared_experts="beside"))
    apart = compile_plan(
        "qwen3-next-80b-a3b", "h100", h100, max_num_batched_tokens=64, max_num_seqs=8, engine=overlapping
    )
    assert apart.arena[steps.DECODE_TOKENS_AT] != apart.arena[steps.TOKENS_AT]


def test_scalars_pickle_as_their_plan_does(plan):
    decode, step = pickle.loads(pickle.dumps((plan.scalar, plan.step_scalar)))
    assert decode(64, 4096) == plan.decode_us(64, 4096)
    assert step([400, 1], [0, 99]) == plan.step_scalar([400, 1], [0, 99])
    with pytest.raises(BatchError, match="batch_size must be at least 1, got 0"):
        decode(0, 4096)


def test_a_forked_child_has_the_same_answers(plan):
    expected = struct.pack("d", plan.scalar(64, 4096))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, struct.pack("d", plan.scalar(64, 4096)))
        os._exit(0)
    os.close(write)
    assert os.read(read, 8) == expected
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pickled_plan_cannot_be_written_either(plan):
    assert not pickle.loads(pickle.dumps(plan)).arena.flags.writeable


def test_a_plan_has_its_description_and_provenance(plan, h100):
    text = repr(plan)
    for part in ("llama-3.1-8b", "1 x h100", "bf16", "kernels", "512 tokens"):
        assert part in text
    assert plan.tables_hash == h100.content_hash == load_tables("h100").content_hash
    assert len(plan.tables_hash) == 64
    fewer = {op: t for op, t in h100.measured.tables.items() if op != "moe"}
    other = dataclasses.replace(h100, measured=dataclasses.replace(h100.measured, tables=fewer))
    assert other.content_hash != h100.content_hash
    assert len(ORIGINS) == 5


def test_compile_plans_equals_compiling_each(h100):
    requests = [
        {"model": "llama-3.1-8b", "max_num_batched_tokens": 256},
        {"model": "llama-3.1-8b", "max_num_batched_tokens": 300, "tp": 2},
        {"model": "llama-3.1-8b", "max_num_batched_tokens": 300, "tp": 2, "dtype": "fp8"},
        {"model": "qwen2.5-7b", "max_num_batched_tokens": 256, "kv_dtype": "fp8", "method": "floor"},
        {"model": "qwen2.5-7b", "max_num_batched_tokens": 500, "kv_dtype": "fp8", "method": "floor"},
        {"model": "qwen2.5-7b", "max_num_batched_tokens": 64, "method": "linear_mfu"},
    ]
    for plan, request in zip(compile_plans(requests, load_gpu("h100"), h100), requests, strict=True):
        alone = compile_plan(gpu="h100", tables=h100, **request)
        np.testing.assert_array_equal(plan.arena, alone.arena)
        assert repr(plan) == repr(alone)


def test_compile_plans_refuses_what_it_cannot_read(h100):
    with pytest.raises(PlanError, match="tp"):
        compile_plans([{"model": "llama-3.1-8b", "tp": 5}], "h100", h100)


def test_compile_plans_names_an_unknown_argument(h100):
    with pytest.raises(FastroofError, match="colour"):
        compile_plans([{"model": "llama-3.1-8b", "colour": 5}], "h100", h100)


# Scaling


def test_more_gpus_do_less_each_but_talk(h100):
    plans = {tp: compile_plan("llama-3.1-8b", "h100", h100, tp=tp, engine="kernels") for tp in (1, 2, 4, 8)}
    large = {tp: plan.prefill_us(8192) for tp, plan in plans.items()}
    assert large[1] > large[2] > large[4] > large[8] > large[1] / 8
    names = {tp: [o.name for o in plan.explain([(1, 99)]).operators] for tp, plan in plans.items()}
    assert not any("all-reduce" in name for name in names[1])
    assert all(sum("all-reduce" in name for name in names[tp]) == 2 for tp in (2, 4, 8))


def test_fp8_kv_makes_long_decodes_cheaper(h100):
    wide, narrow = (
        compile_plan("llama-3.1-8b", "h100", h100, kv_dtype=kv, engine="kernels") for kv in ("bf16", "fp8")
    )
    assert narrow.decode_us(32, 65536) < 0.75 * wide.decode_us(32, 65536)


@pytest.mark.loops
def test_work_grows_with_tokens_within_the_explanation(plan):
    def work(step):
        operators = plan.explain(step).operators
        return sum(o.flops for o in operators), sum(o.moved_bytes for o in operators)

    base = [(100, 50), (1, 4000)]
    for more in ([(101, 50), (1, 4000)], [(100, 51), (1, 4000)], [(100, 50), (1, 4001)], [*base, (1, 1)]):
        assert work(more)[0] > work(base)[0]
        assert work(more)[1] > work(base)[1]


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_errors_of_decodes_do_not_depend_on_how_an_engine_counts_its_costs(h100, batch):
    """Costs per sequence or per step make the same step of the same kernels."""
    vllm = load_engine("vllm")
    errors, steps_us = [], []
    for costs in (StepCosts(sequence_us=20.0), StepCosts(step_us=20.0 * batch)):
        plan = compile_plan("llama-3.1-8b", "h100", h100, engine=replace(vllm, evidence={}, costs=costs))
        errors.append(plan.decode_error(batch, 2000))
        steps_us.append(plan.decode_us(batch, 2000))
    assert steps_us[0] == pytest.approx(steps_us[1], rel=1e-12)
    assert errors[0] == pytest.approx(errors[1], rel=1e-12)
