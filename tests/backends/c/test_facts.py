"""Facts of plan files in C are those of Python: memory, transfers, stages, verification."""

from __future__ import annotations

import ctypes
import json

import numpy as np
import pytest

import fastroof
from fastroof.backends.plan_facts import plan_facts
from fastroof.compiled import plan_files
from fastroof.compiled.c_api import CODE_ABSENT, CODE_UNLIKE
from fastroof.compiled.steps import CODE_SIZES
from fastroof.simulation.pools import Link, takes_us, whole_kv_bytes
from tests.compiled.test_plan_files import older

I64, F64, PLAN, ARRAY = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p
PLANS = {
    "dense": ("llama-3.1-8b", {}),
    "experts": ("qwen3-30b-a3b", {"dp": 4, "ep": 4, "engine": "vllm"}),
    "latent": ("deepseek-v3", {"tp": 8, "dtype": "fp8", "max_num_batched_tokens": 2048}),
    "windowed": ("gemma-3-12b", {"max_num_batched_tokens": 2048}),
    "linear": ("qwen3-next-80b-a3b", {"tp": 4, "max_num_batched_tokens": 2048}),
    "stages": ("llama-3.1-70b", {"tp": 2, "pp": 4, "max_num_batched_tokens": 2048}),
}
FUNCTIONS = {
    "fastroof_open": (ctypes.c_char_p, ARRAY),
    "fastroof_open_bytes": (ARRAY, I64, ARRAY),
    "fastroof_close": (PLAN,),
    "fastroof_memory": (PLAN, ARRAY),
    "fastroof_layout": (PLAN, ARRAY),
    "fastroof_kv_bytes": (PLAN, I64, ARRAY, ARRAY),
    "fastroof_kv_transfer_us": (PLAN, PLAN, I64, F64, F64, ARRAY),
    "fastroof_num_stages": (PLAN,),
    "fastroof_stage": (PLAN, I64),
    "fastroof_pipeline_us": (PLAN, ARRAY, ARRAY, I64, ARRAY, I64, ARRAY, ARRAY),
    "fastroof_verify_us": (PLAN, I64, I64, I64, ARRAY),
    "fastroof_step_us": (PLAN, ARRAY, ARRAY, I64, ARRAY),
    "fastroof_decode_us": (PLAN, I64, I64, ARRAY),
    "fastroof_describe": (PLAN,),
}


@pytest.fixture(scope="module")
def plans(h100):
    return {
        name: fastroof.compile_plan(model, "h100", h100, **{"engine": "kernels", **given})
        for name, (model, given) in PLANS.items()
    }


@pytest.fixture(scope="module")
def library(loaded):
    for name, takes in FUNCTIONS.items():
        getattr(loaded, name).argtypes = takes
    loaded.fastroof_num_stages.restype = I64
    loaded.fastroof_stage.restype = PLAN
    loaded.fastroof_describe.restype = ctypes.c_char_p
    return loaded


def opened(library, path):
    plan = PLAN()
    assert library.fastroof_open(str(path).encode(), ctypes.byref(plan)) == 0
    return plan.value


@pytest.fixture(params=PLANS)
def both(request, plans, exported, library):
    there = opened(library, exported.plans[request.param])
    yield plans[request.param], there
    library.fastroof_close(there)


def returned(function, *sizes, count=1, kind=np.float64):
    """What a function writes into ``count`` numbers after its sizes; its code where it is not 0."""
    out = np.zeros(count, kind)
    code = function(*sizes, *(out[i:].ctypes.data for i in range(count)))
    return code or out.tolist()


def memory_of(library, there):
    out = np.zeros(12, np.int64)
    assert library.fastroof_memory(there, out.ctypes.data) == 0
    return out.tolist()


def memory_words(plan):
    memory, whole = plan.memory, whole_kv_bytes(plan)
    return [
        memory.weight_bytes,
        memory.kv_bytes_per_token,
        memory.activation_bytes,
        memory.reserve_bytes,
        memory.context_bytes,
        memory.max_kv_tokens,
        memory.window,
        memory.window_kv_bytes_per_token,
        memory.state_bytes_per_sequence,
        whole.kv_bytes_per_token,
        whole.window_kv_bytes_per_token,
        whole.state_bytes_per_sequence,
    ]


def test_memory_and_kv_cache_are_the_plans(both, library):
    plan, there = both
    assert memory_of(library, there) == memory_words(plan)
    for kv_len in (0, 1, 1023, 1024, 1025, 99_999, 2**28):
        bytes_of = returned(library.fastroof_kv_bytes, there, kv_len, count=2, kind=np.int64)
        assert bytes_of == [plan.memory.kv_bytes(kv_len), whole_kv_bytes(plan).kv_bytes(kv_len)]
    for kv_len in (-1, 2**28 + 1):
        assert returned(library.fastroof_kv_bytes, there, kv_len, count=2, kind=np.int64) == CODE_SIZES
    layout = np.zeros(6, np.int64)
    assert library.fastroof_layout(there, layout.ctypes.data) == 0
    assert layout.tolist() == [getattr(plan.layout, n) for n in ("tp", "pp", "dp", "ep", "moe_tp", "cp")]


def test_a_description_has_memory_layout_and_stages(both, library):
    plan, there = both
    facts = json.loads(library.fastroof_describe(there))
    assert {key: facts[key] for key in ("memory", "layout", "stages")} == plan_facts(plan)


def test_a_transfer_takes_as_long_as_in_a_simulation(both, plans, library, exported):
    plan, there = both
    transfer = library.fastroof_kv_transfer_us
    for kv_len in (0, 1, 777, 50_000):
        for rate, latency_us in ((0.0, 0.0), (50e9, 12.5), (12.5e9, 3.0)):
            us = takes_us(plan, plan, [kv_len], Link(rate or None, latency_us))[0]
            assert returned(transfer, there, there, kv_len, rate, latency_us) == [us]
    for sizes in ((-1, 0.0, 0.0), (5, -1.0, 0.0), (5, np.nan, 0.0), (5, 1.0, -1.0), (5, 1.0, np.inf)):
        assert returned(transfer, there, there, *sizes) == CODE_SIZES
    other = "latent" if plan is plans["dense"] else "dense"
    unlike = opened(library, exported.plans[other])
    assert returned(transfer, there, unlike, 5, 0.0, 0.0) == CODE_UNLIKE
    library.fastroof_close(unlike)


def batch_of(random, plan, steps):
    """Decode steps and chunks, as arrays."""
    requests = []
    for _ in range(steps):
        decodes = [(1, int(context)) for context in random.integers(1, 6000, random.integers(0, 20))]
        chunks = [(int(new), int(random.integers(0, 900))) for new in random.integers(1, 300, 2)]
        requests.append(decodes + chunks[: random.integers(0, 3)])
    batch = fastroof.StepBatch.from_requests(requests)
    return batch, [np.array(a, np.int64) for a in (batch.new_tokens, batch.context_len, batch.offsets)]


def test_stages_are_plans_and_micro_batches_follow_each_other(both, library):
    plan, there = both
    random = np.random.default_rng(5)
    assert library.fastroof_num_stages(there) == len(plan.stages)
    for number, stage in enumerate(plan.stages):
        own = library.fastroof_stage(there, number)
        assert memory_of(library, own) == memory_words(stage)
        assert json.loads(library.fastroof_describe(own))["memory"] == stage.memory.facts()
        assert library.fastroof_num_stages(own) == 1
        assert library.fastroof_stage(own, 0) == own
        for batch_size, kv_len in ((1, 1), (64, 4000), (256, 99)):
            us = stage.decode_us(batch_size, kv_len)
            assert returned(library.fastroof_decode_us, own, batch_size, kv_len) == [us]
            us = stage.verify_us(2, kv_len + 5, 4)
            assert returned(library.fastroof_verify_us, own, 2, kv_len + 5, 4) == [us]
    for number in (-1, len(plan.stages), 2**40):
        assert library.fastroof_stage(there, number) is None
    for steps in (0, 1, 3, 40):
        batch, (new, context, offsets) = batch_of(random, plan, steps)
        words = (new.ctypes.data, context.ctypes.data, len(new), offsets.ctypes.data, steps)
        us = returned(library.fastroof_pipeline_us, there, *words, count=2)
        assert us == [plan.pipeline_us(batch), plan.cycle_us(batch)]
    new[0] = 0
    assert returned(library.fastroof_pipeline_us, there, *words, count=2) == CODE_SIZES


def test_verification_has_the_bits_of_python(both, library):
    plan, there = both
    random = np.random.default_rng(6)
    for _ in range(300):
        tokens = int(random.integers(1, 9))
        batch_size = int(
            random.integers(1, 1 + min(plan.max_num_seqs, plan.max_num_batched_tokens // tokens))
        )
        kv_len = tokens + int(2 ** random.uniform(0, 18))
        us = plan.verify_us(batch_size, kv_len, tokens)
        assert returned(library.fastroof_verify_us, there, batch_size, kv_len, tokens) == [us]
    for sizes in ((0, 5, 1), (1, 3, 4), (1, 2**29, 2), (plan.max_num_seqs + 1, 9, 1), (1024, 9000, 2**40)):
        assert returned(library.fastroof_verify_us, there, *sizes) == CODE_SIZES


def test_a_file_of_version_1_times_steps_and_has_nothing_else(plans, exported, library):
    plan = plans["stages"]
    content = np.frombuffer(older(exported.plans["stages"].read_bytes()), np.uint8).copy()
    there = PLAN()
    assert library.fastroof_open_bytes(content.ctypes.data, len(content), ctypes.byref(there)) == 0
    assert returned(library.fastroof_decode_us, there, 8, 1000) == [plan.decode_us(8, 1000)]
    assert returned(library.fastroof_verify_us, there, 1, 9, 2) == CODE_ABSENT
    assert returned(library.fastroof_memory, there) == CODE_ABSENT
    assert returned(library.fastroof_layout, there) == CODE_ABSENT
    assert returned(library.fastroof_kv_bytes, there, 5, count=2, kind=np.int64) == CODE_ABSENT
    assert returned(library.fastroof_kv_transfer_us, there, there, 5, 0.0, 0.0) == CODE_ABSENT
    assert library.fastroof_num_stages(there) == 1
    assert library.fastroof_stage(there, 0) == there.value
    wrong = content.copy()
    wrong[8 * plan_files.FACTS_AT] = 9
    assert library.fastroof_open_bytes(wrong.ctypes.data, len(wrong), ctypes.byref(there)) != 0
