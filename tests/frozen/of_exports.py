"""What other programs are given: settings, profiles, plan files, Arrow schemas; and what is refused."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.frozen import product
from tests.frozen.answers import Answers
from tests.frozen.of_plans import H100_PLANS, NAMED_STEPS, compiled


def dynamo() -> Answers:
    answers = Answers()
    tables = product.h100_tables()
    for model, given in H100_PLANS[:4]:
        for case, plan in compiled(answers, tables, model, "h100", **given):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "profile.npz"
                product.write_dynamo_profile(plan, path, points=4)
                with np.load(path) as arrays:
                    held = {name: arrays[name] for name in arrays.files if arrays[name].dtype.kind in "iuf"}
                    answers.text(case, "arrays", ", ".join(sorted(arrays.files)))
            for name, values in held.items():
                answers.many(case, name, values)
                spread = np.linspace(0, values.size - 1, 5).astype(int)
                answers.numbers(case, name, spread, values.ravel()[spread])
    return answers


def llm_d() -> Answers:
    """Settings for llm-d-inference-sim: they go through LAPACK."""
    answers = Answers(is_exact=False)
    tables = product.h100_tables()
    for model, given in (H100_PLANS[1], H100_PLANS[2]):
        for case, plan in compiled(answers, tables, model, "h100", **given):
            fit = product.fit_llm_d(plan, clients=[1, 8, 64], isl=[256, 2048], osl=[128])
            named = f"{case}, per-token"
            answers.record(named, vars(fit.latencies))
            answers.record(named, fit, without=("latencies",))
            text = product.llm_d_yaml(plan, fit)
            settings = [line.split(":")[0].strip() for line in text.splitlines() if not line.startswith("#")]
            answers.text(named, "keys", ", ".join(settings))
    return answers


def _files(answers: Answers, case: str, folder: Path) -> None:
    """Keep the hash of every table in a folder, and its rows."""
    for path in sorted(folder.rglob("*.csv")):
        content, name = path.read_bytes(), path.relative_to(folder).as_posix()
        lines = content.decode().splitlines()
        answers.text(case, name, hashlib.sha256(content).hexdigest()[:16], f"{len(lines)} lines")
        answers.text(case, name, lines[-1], "last line")


def llmservingsim() -> Answers:
    answers = Answers()
    tables = product.h100_tables()
    limits = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    for given in ({"runtime": "vllm"}, {"runtime": "trtllm", "dtype": "fp8", "kv_dtype": "fp8"}):
        plans = [
            product.compile_plan(
                "llama-3.1-8b", "h100", tables, tp=tp, **{"runtime": "kernels", **given, **limits}
            )
            for tp in (1, 2)
        ]
        case = f"llama-3.1-8b, {', '.join(given.values())}"
        with tempfile.TemporaryDirectory() as folder:
            product.export_llmservingsim(plans, folder)
            _files(answers, case, Path(folder))
    return answers


def results() -> Answers:
    """Arrow tables of steps, plan files' descriptions and those of plans."""
    answers = Answers()
    tables = product.h100_tables()
    for model, given in H100_PLANS:
        for case, plan in compiled(answers, tables, model, "h100", **given):
            described = {name: value for name, value in plan.describe().items() if name != "version"}
            answers.text(case, "describe", json.dumps(described))
            # a plan file's description follows its arena; its other facts have tests of their own
            octets = product.plan_bytes(plan, "name")
            arena_floats, text_bytes = struct.unpack_from("<QQ", octets, 24)
            facts = json.loads(octets[64 + 8 * arena_floats :][: text_bytes - 1])
            left_out = ("version", "ids", "front_end", "layout", "memory", "stages")
            answers.text(case, "plan file", json.dumps({k: v for k, v in facts.items() if k not in left_out}))
            table = product.step_table(plan, NAMED_STEPS, plan.run(NAMED_STEPS))
            facts = {k.decode(): v.decode() for k, v in table.schema.metadata.items() if b"version" not in k}
            answers.text(case, "metadata", json.dumps(facts))
            for column in table.column_names:
                answers.text(
                    case,
                    f"column {column}",
                    f"{table.schema.field(column).metadata} {table[column].to_pylist()}",
                )
    return answers


def _questions() -> dict[str, Callable[[], Any]]:
    """Questions that are wrong, each in one way."""
    tables = product.h100_tables()
    plan = product.compile_plan("llama-3.1-8b", "h100", tables, engine="kernels")
    batch = product.StepBatch

    def compile_with(model: Any = "llama-3.1-8b", gpu: Any = "h100", **given: Any) -> Callable[[], Any]:
        return lambda: product.compile_plan(model, gpu, tables, **{"runtime": "kernels", **given})

    def look_up(operator: str, **sizes: Any) -> Callable[[], Any]:
        return lambda: tables.lookup(operator, **sizes)

    def sweep(**spec: Any) -> Callable[[], Any]:
        return lambda: product.run_sweep(spec, "nowhere/rows.parquet")

    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return {
        "a model that is not there": compile_with("llama-9"),
        "a GPU that is not there": compile_with(gpu="h1"),
        "tables of another GPU": compile_with(gpu="a100"),
        "tp of 3": compile_with(tp=3),
        "tp that does not divide the heads": compile_with("qwen2.5-7b", tp=8),
        "a dtype that is not there": compile_with(dtype="fp4"),
        "a kv_dtype that is not there": compile_with(kv_dtype="int8"),
        "a runtime that is not there": compile_with(runtime="sgl"),
        "a method that is not there": compile_with(method="cubic"),
        "no tokens": compile_with(max_num_batched_tokens=0),
        "another architecture": compile_with({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}),
        "tables that are not there": lambda: product.load_tables("nowhere"),
        "a source that is not there": lambda: product.load_tables("h100", source="nowhere"),
        "a GPU's facts": lambda: product.load_gpu("nowhere"),
        "a model's facts": lambda: product.load_model({"hidden_size": 1}),
        "a batch of 0": lambda: plan.decode_us(0, 1),
        "a batch that is too large": lambda: plan.decode_us(5000, 1),
        "a length that is no integer": lambda: plan.decode_us(1, 1.5),
        "shapes that do not broadcast": lambda: plan.decode_us([1, 2], [1, 2, 3]),
        "more tokens than the plan's": lambda: plan.prefill_us(9000),
        "a negative context": lambda: plan.prefill_us(10, -1),
        "a request of no tokens": lambda: plan.run(batch.from_requests([[(0, 5)]])),
        "a request of one number": lambda: batch.from_requests([[(1,)]]),
        "no batch": lambda: plan.run([(1, 2)]),
        "no threads": lambda: plan.decode_us([1], [1], threads=0),
        "scalar beyond the plan": lambda: plan.scalar(5000, 1),
        "an error by another method": lambda: product.compile_plan(
            "llama-3.1-8b", "h100", tables, method="floor", engine="kernels"
        ).decode_error(1, 1),
        "an operator that is not there": look_up("softmax", m=1),
        "a lookup that lacks a size": look_up("gemm", m=1, n=1),
        "a lookup that has a size too many": look_up("gemm", m=1, n=1, k=1, batch_size=1),
        "a size of 0": look_up("gemm", m=0, n=1, k=1),
        "a GEMM dtype without a table": look_up("gemm", m=1, n=1, k=1, dtype="fp4"),
        "heads that do not divide": look_up(
            "attention_decode", **{**heads, "num_kv_heads": 5}, batch_size=1, kv_len=1
        ),
        "a prefix of less than nothing": look_up("attention_prefill", **heads, q_len=10, kv_len=5),
        "an all-reduce of one GPU": look_up("allreduce", num_gpus=1, message_bytes=8),
        "experts that nobody measured": look_up(
            "moe", num_tokens=1, hidden=1, intermediate=1, topk=1, num_experts=1
        ),
        "clients below 1": lambda: product.estimate(plan, 10, 10, 0),
        "a request beyond the KV cache": lambda: product.estimate(plan, 1e7, 10, 1),
        "a reservation that is not there": lambda: product.estimate(plan, 10, 10, 1, kv_reservation="half"),
        "workers of two models": lambda: product.estimate_disaggregated(
            plan, product.compile_plan("qwen3-8b", "h100", tables, engine="kernels"), 10, 10, 1
        ),
        "a sweep of nothing": sweep(),
        "a sweep's key that is not there": sweep(
            models=["llama-3.1-8b"], batch_size=[1], kv_len=[1], colour=1
        ),
        "a sweep of no model that is there": sweep(models=["llama-9"], batch_size=[1], kv_len=[1]),
        "a sweep to nowhere": sweep(models=["llama-3.1-8b"], batch_size=[1], kv_len=[1]),
        "deployments without a load": sweep(models=["llama-3.1-8b"], isl=[10], osl=[10]),
    }  # fmt: skip


def refusals() -> Answers:
    """The type of the error that each of many wrong questions is answered with."""
    answers = Answers()
    for question, call in _questions().items():
        answers.refusal(question, call)
    return answers
