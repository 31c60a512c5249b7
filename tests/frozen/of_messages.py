"""What the server replies to messages, over HTTP and on a pipe alike."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from tests.frozen import product
from tests.frozen.answers import Answers

ANY: Final = "any"
SERVED: Final = ("small", "wide", "staged", "fp8", "experts", ANY)
"""Plans, and messages to one of them or none."""


@cache
def plans() -> dict[str, product.StepPlan]:
    """Plans that are served: dense, of several stages, and of experts."""
    tables = product.h100_tables()

    def compiled(model: str, **given: Any) -> product.StepPlan:
        return product.compile_plan(model, "h100", tables, **given)

    return {
        "small": compiled("llama-3.1-8b", engine="vllm"),
        "wide": compiled("llama-3.1-8b", engine="sglang", tp=4),
        "staged": compiled("llama-3.1-8b", engine="vllm", pp=2, tp=2, dtype="fp8"),
        "fp8": compiled("llama-3.1-8b", engine="trtllm-1.0", dtype="fp8", kv_dtype="fp8"),
        "experts": compiled("qwen3-30b-a3b", engine="sglang", tp=2, ep=2),
    }


TRACE: Final = {
    "arrival_s": [0.1 * i for i in range(30)],
    "input_tokens": [200 + 150 * (i % 7) for i in range(30)],
    "output_tokens": [1 + 23 * (i % 5) for i in range(30)],
    "cached_tokens": [100 * (i % 2) for i in range(30)],
}
CHAT: Final = {"requests": 60, "isl": "lognormal:900:0.7", "osl": "uniform:1:150"}

OF_EVERY_PLAN: Final[dict[str, dict[str, Any]]] = {
    "a decode step": {"batch_size": 64, "kv_len": 4096},
    "decode steps": {"batch_size": [1, 7, 64, 256], "kv_len": [1, 300, 5000, 12_345]},
    "decode steps of one batch": {
        "batch_size": 32,
        "kv_len": [100 * i for i in range(1, 40)],
        "errors": True,
    },
    "decode steps in stages": {"batch_size": [1, 64], "kv_len": 2000, "stages": True, "errors": True},
    "steps": {"requests": [[[2048, 0], [1, 4095]], [[1, 100]], [[500, 1500], [16, 0], [1, 9], [1, 9]]]},
    "steps with errors": {"requests": [[[2048, 0], [1, 4095]], [[1, 100]]], "errors": True, "stages": True},
    "steps in arrays": {"new_tokens": [700, 1, 1, 8], "context_len": [0, 50, 9000, 8], "offsets": [0, 3, 4]},
    "steps in arrays with errors": {
        "new_tokens": [700, 1, 1],
        "context_len": [0, 50, 9000],
        "offsets": [0, 1, 3],
        "errors": True,
        "v": 1,
    },
    "a chunk": {"new_tokens": 2048},
    "chunks": {"new_tokens": [16, 512, 4096], "context_len": [0, 7000, 100], "batch_size": [4, 2, 1]},
    "chunks in stages": {"new_tokens": [16, 512], "context_len": 333, "stages": True, "errors": True},
    "verified drafts": {"batch_size": [1, 16, 64], "kv_len": 3000, "tokens": [2, 4, 8]},
    "verified drafts in stages": {"batch_size": 8, "kv_len": [100, 9000], "tokens": 4, "stages": True},
    "an explanation": {"explain": [[512, 0], [500, 1500], [1, 97], [1, 4000]]},
    "an explanation with errors": {"explain": [[1, 4095]] * 32, "errors": True},
    "an explanation of drafts": {"explain": {"batch_size": 8, "kv_len": 4096, "tokens": 4}},
    "memory": {"memory": True},
    "memory of smaller steps": {"memory": True, "max_num_batched_tokens": 2048, "max_num_seqs": 100},
    "micro-batches": {"pipeline": [[[512, 0], [1, 999]], [[1, 999]], [[1, 2000], [1, 50]]]},
    "transfers": {"kv_transfer": {"prompts": [1, 16, 1000, 100_000]}},
    "transfers over a link": {"kv_transfer": {"prompts": [100, 5000], "bytes_per_s": 25e9, "latency_us": 40}},
    "a trace": {"simulate": {"trace": TRACE, "requests": True}},
    "a workload": {"simulate": {"workload": {"rate": 20, **CHAT}, "options": {"timeout_s": 4}}},
    "a closed loop": {"simulate": {"workload": {"clients": 8, "think_s": 0.2, **CHAT}}},
    "sessions": {
        "simulate": {"workload": {"rate": 4, "turns": 3, "think_s": 1, "growth_tokens": 99, **CHAT}}
    },
    "replicas": {
        "simulate": {
            "workload": {"rate": 40, "burstiness": 2, **CHAT},
            "options": {"replicas": 3, "router": "least_outstanding", "seed": 3, "time_scale": 1.1},
        }
    },
    "few blocks": {
        "simulate": {
            "workload": {"ramp": [2, 60], **CHAT},
            "options": {"num_gpu_blocks": 9000, "max_num_seqs": 20, "on_too_long": "reject"},
        }
    },
}
OF_ONE_PLAN: Final[dict[str, dict[str, Any]]] = {
    "transfers to fewer GPUs": {
        "plan": "wide",
        "kv_transfer": {"prompts": [1000, 9], "decode_plan": "small"},
    },
    "a plan by its number": {"plan": 3, "batch_size": 3, "kv_len": 3},
    "what is served": {"describe": True},
    # messages that are refused
    "no plan": {"batch_size": 1, "kv_len": 1},
    "an unknown plan": {"plan": "huge", "batch_size": 1, "kv_len": 1},
    "a plan that is no name": {"plan": 1.5, "batch_size": 1, "kv_len": 1},
    "no form": {"plan": "small", "colour": 1},
    "an unknown member": {"plan": "small", "batch_size": 1, "kv_len": 1, "colour": 1},
    "another version": {"plan": "small", "v": 2, "batch_size": 1, "kv_len": 1},
    "an id that is none": {"id": [1], "describe": True},
    "a batch of 0": {"plan": "small", "batch_size": 0, "kv_len": 1},
    "a length that is no integer": {"plan": "small", "batch_size": 1, "kv_len": 1.5},
    "lists of lists": {"plan": "small", "batch_size": [[1]], "kv_len": 1},
    "lists that differ": {"plan": "small", "batch_size": [1, 2], "kv_len": [1, 2, 3]},
    "a request of one number": {"plan": "small", "requests": [[[1]]]},
    "offsets that fall": {"plan": "small", "new_tokens": [1, 1], "context_len": [0, 0], "offsets": [0, 2, 1]},
    "more tokens than the plan's": {"plan": "small", "new_tokens": 9000},
    "a flag that is none": {"plan": "small", "batch_size": 1, "kv_len": 1, "errors": "yes"},
    "memory that is false": {"plan": "small", "memory": False},
    "errors of drafts": {
        "plan": "small",
        "explain": {"batch_size": 1, "kv_len": 9, "tokens": 2},
        "errors": True,
    },
    "transfers between models": {"plan": "small", "kv_transfer": {"prompts": [1], "decode_plan": "experts"}},
    "a prompt of no tokens": {"plan": "small", "kv_transfer": {"prompts": [0]}},
    "a link without bandwidth": {"plan": "small", "kv_transfer": {"prompts": [1], "bytes_per_s": 0}},
    "a trace and a workload": {"plan": "small", "simulate": {"trace": TRACE, "workload": {}}},
    "a workload from a file": {"plan": "small", "simulate": {"workload": {"isl": "file:a.csv"}}},
    "an unknown option": {"plan": "small", "simulate": {"trace": TRACE, "options": {"colour": 1}}},
    "too many requests": {"plan": "small", "simulate": {"workload": {"rate": 1, "requests": 10**9}}},
    "a workload without a rate": {"plan": "small", "simulate": {"workload": {}}},
    "too many replicas": {"plan": "small", "simulate": {"trace": TRACE, "options": {"replicas": 10**6}}},
}
LEFT_OUT: Final = ("message", "fastroof", "version", "limits", "warnings", "basis", "source")
"""Words, and limits of the server."""


def messages(plan: str) -> Answers:
    """Replies to every form of message to a plan, or to others and wrong ones.

    What simulations sum up need only be close.
    """
    answers = Answers()
    wanted = OF_ONE_PLAN
    if plan != ANY:
        wanted = {name: {"id": name, "plan": plan, **message} for name, message in OF_EVERY_PLAN.items()}
    for name, reply in zip(wanted, product.answered(plans(), list(wanted.values())), strict=True):
        answers.is_exact = plan != "experts" and "simulate" not in wanted[name]
        answers.document(f"{plan}: {name}", reply, without=LEFT_OUT)
    return answers
