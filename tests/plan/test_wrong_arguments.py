"""Every argument of what compiles plans and of a plan's methods: an answer or a FastroofError."""

import inspect

import numpy as np
import pytest

import fastroof
from fastroof.errors import PlanError, SweepError
from fastroof.models import Layout
from fastroof.sweep import best_batches, decode_times_us

TABLES = fastroof.load_tables("h100")
OPTIONS = {"model": "llama-3.1-8b", "max_num_batched_tokens": 64, "max_num_seqs": 16}
PLAN = fastroof.compile_plan(gpu="h100", tables=TABLES, **{"engine": "kernels", **OPTIONS})


def wrong():
    """Values that few arguments take; made anew, since one is an iterator."""
    return [
        None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**5000, "8", b"8", [], [1], [[1]], {}, {"a": 1},
        {1: 2}, object(), np.int8(4), np.array([1, 2]), np.ma.array([1, 2], mask=[0, 1]), (), 2**40, 1e308,
        int, iter([1]), [None], ["x"], "\0", "x" * 10**5, [10**5000],
    ]  # fmt: skip


def compiled(name):
    return lambda value: fastroof.compile_plan(
        **{"gpu": "h100", "tables": TABLES, **OPTIONS, name: value}
    ).decode_us(2, 100)


def compiled_together(name):
    return lambda value: [
        plan.decode_us(2, 100)
        for plan in fastroof.compile_plans([OPTIONS, {**OPTIONS, name: value}], "h100", TABLES)
    ]


def of_call(function, given, name):
    return lambda value: function(**{**given, name: value})


BATCH = fastroof.StepBatch([1], [5], [0, 1])
DECODES = {"batch_size": 1, "kv_len": 9}
METHODS = {
    "decode_us": {**DECODES, "out": None, "threads": 1},
    "prefill_us": {"new_tokens": 4, "context_len": 0, "batch_size": 1, "out": None, "threads": 1},
    "verify_us": {**DECODES, "tokens": 2, "out": None, "threads": 1},
    "decode_error": DECODES,
    "step_us": {"batch": BATCH, "threads": 1, "images": None},
    "run": {"batch": BATCH, "threads": 1, "with_error": False},
    "step_error": {"batch": BATCH},
    "pipeline_us": {"batch": BATCH},
    "cycle_us": {"batch": BATCH},
    "stage_times_us": {"batch": BATCH},
    "explain": {"requests": [(1, 5)], "with_error": False, "images": ()},
    "explain_verification": {**DECODES, "tokens": 2},
    "memory_of": {"max_num_batched_tokens": None, "max_num_seqs": None},
}
SWEEPS = {"plans": PLAN, "batch_size": [1, 2], "kv_len": [100], "threads": 1}
NAMES = list(inspect.signature(fastroof.compile_plan).parameters)

ENTRIES = {
    **{f"compile_plan({name})": compiled(name) for name in NAMES},
    **{f"compile_plans({name})": compiled_together(name) for name in NAMES if name not in ("gpu", "tables")},
    "compile_plans of": lambda value: list(fastroof.compile_plans(value, "h100", TABLES)),
    "compile_plans of one": lambda value: list(fastroof.compile_plans([value], "h100", TABLES)),
    "compile_plans gpu": lambda value: list(fastroof.compile_plans([OPTIONS], value, TABLES)),
    "compile_plans tables": lambda value: list(fastroof.compile_plans([OPTIONS], "h100", value)),
    **{f"best_batches({name})": of_call(best_batches, SWEEPS, name) for name in (*SWEEPS, "tpot_ms")},
    **{f"decode_times_us({name})": of_call(decode_times_us, SWEEPS, name) for name in (*SWEEPS, "out")},
    **{
        f"{method}({name})": of_call(getattr(PLAN, method), given, name)
        for method, given in METHODS.items()
        for name in given
    },
    **{f"Layout({name})": of_call(Layout, {}, name) for name in ("tp", "pp", "dp", "ep", "moe_tp", "cp")},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_wrong_argument_is_refused_or_harmless(entry):
    refused = 0
    for value in wrong():
        try:
            ENTRIES[entry](value)
        except fastroof.FastroofError:
            refused += 1
    assert refused > 10


def test_messages_name_the_plan_and_valid_values():
    for requests, message in (
        (5, "requests must be an iterable of mappings, got 5"),
        (OPTIONS, "got one dict"),
        ([OPTIONS, 5], "plan 1 must be a mapping of arguments, got 5"),
        ([{**OPTIONS, "dtype": ["bf16"]}], "dtype must be one of auto, "),
        ([{**OPTIONS, 1: 2}], "plan 0 does not know 1"),
    ):
        with pytest.raises(PlanError) as caught:
            fastroof.compile_plans(requests, "h100", TABLES)
        assert message in str(caught.value)
    with pytest.raises(SweepError, match="tpot_ms must be above 0, got 'fast'"):
        best_batches(PLAN, [1], [100], tpot_ms="fast")
    with pytest.raises(PlanError, match="curves must be a CurveSource"):
        fastroof.compile_plan("llama-3.1-8b", "h100", TABLES, curves=5, engine="kernels")
