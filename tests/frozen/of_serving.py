"""What serving estimates answer: closed loops, workers apart, measured rows predicted."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np

from tests.frozen import product
from tests.frozen.answers import Answers
from tests.frozen.of_plans import compiled

PLANS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama-3.1-8b", {"runtime": "vllm"}),
    ("llama-3.1-8b", {"runtime": "kernels", "tp": 2, "kv_dtype": "fp8"}),
    ("llama-3.1-70b", {"runtime": "trtllm", "tp": 4, "dtype": "fp8"}),
    ("qwen3-32b", {"runtime": "vllm", "tp": 2, "dtype": "fp8_block"}),
)
# isl, osl, clients: alone, chunked, waiting for KV cache, and with an output of one token
LOADS: Final = (
    (1024, 128, 1), (1024, 128, 64), (5000, 50, 64), (300, 3000, 16), (12_000, 400, 8), (20_000, 2000, 300),
    (100, 1, 10), (2000.5, 333.25, 7.5),
)  # fmt: skip
NAMED: Final = [f"isl {isl}, osl {osl}, clients {clients}" for isl, osl, clients in LOADS]


def _kept(answers: Answers, case: str, named: list[str], found: Any) -> None:
    for name, values in found.columns().items():
        if values is not None:
            answers.numbers(case, name, named, values)


def estimates() -> Answers:
    """Closed loops, with every option of the engine's scheduler spelled out."""
    answers = Answers()
    tables = product.h100_tables()
    isl, osl, clients = (np.array(axis) for axis in zip(*LOADS, strict=True))
    schedules: tuple[dict[str, Any], ...] = (
        {"max_num_batched_tokens": 8192, "chunked_prefill": True, "kv_reservation": "mean"},
        {"max_num_batched_tokens": 2048, "chunked_prefill": True, "kv_reservation": "full",
         "max_num_seqs": 48},
        {"max_num_batched_tokens": 8192, "chunked_prefill": True, "kv_reservation": "mean",
         "requests_per_client": 5, "max_kv_tokens": 100_000},
    )  # fmt: skip
    for (model, given), schedule in itertools.product(PLANS, schedules):
        for case, plan in compiled(answers, tables, model, "h100", **given):
            named = f"{case}: {', '.join(f'{name} {value}' for name, value in schedule.items())}"
            _kept(answers, named, NAMED, product.estimate(plan, isl, osl, clients, **schedule))
    # whole prompts: those that are longer than a step are refused
    few = (isl < 8192) & (isl == isl.round())
    for model, given in PLANS:
        for case, plan in compiled(answers, tables, model, "h100", **given):
            found = product.estimate(
                plan, isl[few], osl[few], clients[few], 8192, chunked_prefill=False, kv_reservation="full"
            )
            _kept(
                answers,
                f"{case}: whole prompts",
                [n for n, there in zip(NAMED, few, strict=True) if there],
                found,
            )
    return answers


def estimates_by_default() -> Answers:
    """Closed loops by the defaults of every runtime."""
    answers = Answers()
    tables = product.h100_tables()
    isl, osl, clients = (np.array(axis) for axis in zip(*LOADS, strict=True))
    for model, given in PLANS:
        for case, plan in compiled(answers, tables, model, "h100", **given):
            # an engine that cuts no prompts is not asked for those that are longer than a step
            fits = (isl <= 8192) | plan.profile.scheduling.chunked_prefill
            named = [name for name, there in zip(NAMED, fits, strict=True) if there]
            _kept(answers, case, named, product.estimate(plan, isl[fits], osl[fits], clients[fits]))
    return answers


def disaggregated() -> Answers:
    """Workers that prefill and workers that decode."""
    answers = Answers()
    tables = product.h100_tables()
    loads = [load for load in LOADS if load[1] > 1 and load[0] < 8192]
    named = [f"isl {isl}, osl {osl}, clients {clients}" for isl, osl, clients in loads]
    isl, osl, clients = (np.array(axis) for axis in zip(*loads, strict=True))
    for runtime, (tp, decode_tp) in itertools.product(("kernels", "vllm", "trtllm"), ((1, 1), (1, 2))):
        prefill, decode = (
            product.compile_plan("qwen3-14b", "h100", tables, tp=size, dtype="fp8", engine=runtime)
            for size in (tp, decode_tp)
        )
        case = f"qwen3-14b, dtype=fp8, runtime={runtime}, tp={tp} to tp={decode_tp}"
        _kept(answers, case, named, product.estimate_disaggregated(prefill, decode, isl, osl, clients))
        found = product.estimate_disaggregated(
            prefill, decode, isl, osl, clients, 3, 2, 4096,
            link_bytes_per_s=50e9, chunked_prefill=True, kv_reservation="full", max_num_seqs=100,
        )  # fmt: skip
        _kept(answers, f"{case}: 3 to 2 over a slow link", named, found)
    return answers


def measured_rows() -> Answers:
    """Every measured row that ships, predicted by its engine's profile; benches' delays are least squares."""
    answers = Answers(is_exact=False)
    report = product.run_validation(None, product.h100_tables())
    seen: dict[tuple[str, ...], int] = {}
    for row in report.rows:
        key = (row.dataset, row.row, row.quantity)
        seen[key] = seen.get(key, 0) + 1
        case = f"{row.dataset}, {row.row}, occurrence {seen[key]}"
        answers.number(case, f"predicted {row.quantity}, ms", row.predicted_ms)
    return answers
