"""What plans answer: every preset split every way, methods, datasheets, options, errors, explanations."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from tests.frozen import product
from tests.frozen.answers import Answers

RUNTIMES: Final = ("kernels", "vllm", "trtllm")
DTYPES: Final = ("bf16", "fp8", "fp8_block")
KV_DTYPES: Final = ("bf16", "fp8")
TP_SIZES: Final = (1, 2, 4, 8)

# Measured are powers of two up to about 1024 requests of 256 K tokens: on them, between, and far outside.
DECODES: Final = (
    (1, 1), (1, 4096), (1, 1_000_000), (2, 77), (7, 300), (32, 2048), (64, 4096), (100, 5000), (255, 131_072),
    (512, 12_345), (1024, 1024),
)  # fmt: skip
# new tokens, context, sequences
PREFILLS: Final = (
    (1, 0, 1), (100, 0, 1), (2048, 0, 1), (8192, 0, 1), (333, 0, 5), (512, 7000, 1), (2, 131_072, 64),
    (16, 16, 512),
)  # fmt: skip
RAGGED: Final = (
    ("empty", ()),
    ("two chunks beside 64 decodes", ((512, 0), (500, 1500), *((1, 97 * i) for i in range(1, 65)))),
    ("one decode far out", ((1, 500_000),)),
    ("prompts of many lengths", tuple((17 * i + 1, 0) for i in range(20))),
)
MANY_BATCHES: Final = np.array(
    [*range(1, 34), 48, 63, 64, 65, 96, 127, 128, 200, 256, 300, 511, 512, 777, 1024]
)
MANY_LENGTHS: Final = np.unique(np.geomspace(1, 2_000_000, 61).round().astype(np.int64))
MANY_CHUNKS: Final = np.array([1, 2, 15, 16, 17, 64, 100, 127, 128, 500, 1024])


def _many_steps() -> product.StepBatch:
    # Python's own generator: its numbers are the same in every release
    draw = random.Random(14)
    steps = []
    for _ in range(60):
        decodes = [(1, round(2 ** draw.uniform(0, 18))) for _ in range(draw.randrange(60))]
        chunks = [(draw.randrange(1, 700), draw.choice([0, 0, 50, 9000])) for _ in range(draw.randrange(5))]
        step = [*decodes, *chunks]
        draw.shuffle(step)
        steps.append(step)
    return product.StepBatch.from_requests(steps)


NAMED_STEPS: Final = product.StepBatch.from_requests([step for _, step in RAGGED])
MANY_STEPS: Final = _many_steps()


def plan_case(model: str, gpu: str = "h100", **options: Any) -> str:
    """How a plan's answers are addressed: ``llama-3.1-8b, tp=2, dtype=fp8``."""
    where = () if gpu == "h100" else (f"on {gpu}",)
    return ", ".join([model, *where, *(f"{name}={value}" for name, value in options.items())])


def compiled(
    answers: Answers, tables: product.Tables | None, model: str, gpu: str, **options: Any
) -> Iterator[Any]:
    """Compile a plan, and yield it with its case; or keep why there is none."""
    case = plan_case(model, gpu, **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the datasheet model warns of itself
            plan = product.compile_plan(model, gpu, tables, **{"runtime": "kernels", **options})
    except product.FastroofError as error:
        answers.text(case, "no plan", type(error).__name__)
        return
    yield case, plan


NOT_PER_TOKEN: Final = ("window", "window_kv_bytes_per_token", "state_bytes_per_sequence")
"""What memory has of layers that dense models have none of."""


def times(answers: Answers, case: str, plan: product.StepPlan) -> None:
    """Record a plan's times of steps of every kind, and its memory."""
    decodes = [d for d in DECODES if d[0] <= plan.max_num_seqs]
    batches, lengths = np.array(decodes).T
    named = [f"batch {b}, kv {kv}" for b, kv in decodes]
    answers.numbers(case, "decode_us", named, plan.decode_us(batches, lengths))
    many = MANY_BATCHES[plan.max_num_seqs >= MANY_BATCHES]
    answers.many(case, "decode_us, many", plan.decode_us(many[:, None], MANY_LENGTHS))
    prefills = [
        p for p in PREFILLS if p[0] * p[2] <= plan.max_num_batched_tokens and p[2] <= plan.max_num_seqs
    ]
    new, context, sequences = np.array(prefills).T
    named = [f"{q} after {c}, {n} of them" for q, c, n in prefills]
    answers.numbers(case, "prefill_us", named, plan.prefill_us(new, context, sequences))
    grid = (MANY_CHUNKS[:, None, None], np.array([0, 1, 100, 4096, 200_000])[:, None], np.array([1, 2, 8]))
    answers.many(
        case, "prefill_us, many", plan.prefill_us(*grid) if plan.max_num_batched_tokens >= 8192 else []
    )
    ran = plan.run(NAMED_STEPS)
    for name, values in {
        "latency_us": ran.latency_us,
        **ran.components._asdict(),
        "origin": ran.origin,
    }.items():
        answers.numbers(case, f"run, {name}", [step for step, _ in RAGGED], values)
    ran = plan.run(MANY_STEPS)
    answers.many(case, "run, many", [ran.latency_us, *ran.components, ran.origin])
    answers.number(case, "scalar", plan.scalar(13, 1300))
    answers.number(case, "step_scalar", plan.step_scalar([300, 1, 1], [0, 50, 9000]))
    fields = product.memory_fields(plan)
    answers.record(case, fields, without=(*NOT_PER_TOKEN, "context_bytes", "adapter_bytes"))


def preset_plans(model: str) -> Answers:
    """Every split, dtype, KV dtype and runtime of one preset on H100."""
    answers = Answers()
    tables = product.h100_tables()
    for tp, dtype, kv_dtype, runtime in itertools.product(TP_SIZES, DTYPES, KV_DTYPES, RUNTIMES):
        options = {"tp": tp, "dtype": dtype, "kv_dtype": kv_dtype, "runtime": runtime}
        for case, plan in compiled(answers, tables, model, "h100", **options):
            times(answers, case, plan)
    return answers


KINDS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("mixtral-8x7b", "h100", {"tp": 2, "runtime": "vllm"}),
    ("gpt-oss-20b", "h100", {"tp": 1, "runtime": "vllm"}),
    ("qwen3-30b-a3b", "h100", {"tp": 1, "dp": 2, "ep": 2, "runtime": "sglang"}),
    ("qwen3-235b-a22b", "h200", {"tp": 8, "ep": 8, "runtime": "trtllm"}),
    ("deepseek-v3", "h200", {"tp": 8, "runtime": "sglang"}),
    ("deepseek-v3", "h200", {"tp": 8, "runtime": "trtllm"}),
    ("deepseek-v3", "h100", {"tp": 1, "dp": 32, "ep": 32, "exchange": "alltoall", "runtime": "sglang"}),
    ("kimi-k2.5", "h200", {"tp": 8, "runtime": "vllm"}),
    ("deepseek-v3.2", "h200", {"tp": 8, "runtime": "vllm"}),
    ("glm-5.2", "h200", {"tp": 8, "runtime": "sglang"}),
    ("minimax-m3", "h200", {"tp": 8, "runtime": "vllm", "allow_modelled": True}),
    ("deepseek-v4-flash", "h200", {"tp": 4, "runtime": "vllm", "allow_modelled": True}),
    ("qwen3.5-35b-a3b", "h100", {"tp": 1, "runtime": "vllm"}),
    ("qwen3-next-80b-a3b", "h200", {"tp": 4, "runtime": "sglang"}),
    ("kimi-k3", "h200", {"tp": 8, "runtime": "sglang", "allow_modelled": True}),
    ("nemotron-3-nano-30b-a3b", "h100", {"tp": 1, "runtime": "trtllm"}),
)
"""Experts, windows, latent, sparse and linear attention, as engines run them."""


def kinds_plans() -> Answers:
    """Models of several kinds of layers, experts and attention, whose kernels are fitted too."""
    answers = Answers(is_exact=False)
    tables = {gpu: product.load_tables(gpu) for gpu in {gpu for _, gpu, _ in KINDS}}
    for model, gpu, options in KINDS:
        for case, plan in compiled(answers, tables[gpu], model, gpu, **options):
            times(answers, case, plan)
            answers.record(case, {name: getattr(plan.memory, name) for name in NOT_PER_TOKEN})
    return answers


DATASHEET_GPUS: Final = ("a100", "b200", "gb200", "h100", "h20", "h200", "h800", "l40s")


def datasheet_plans() -> Answers:
    """The datasheet model on GPUs of several kinds."""
    answers = Answers()
    for gpu, model in itertools.product(DATASHEET_GPUS, ("llama-3.1-8b", "qwen3-32b")):
        for tp, dtype, runtime in ((1, "bf16", "kernels"), (2, "fp8", "vllm"), (8, "fp8_block", "trtllm")):
            options = {"tp": tp, "dtype": dtype, "runtime": runtime}
            for case, plan in compiled(answers, None, model, gpu, **options):
                times(answers, case, plan)
    return answers


OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"method": "linear_mfu"},
    {"method": "nearest"},
    {"method": "floor"},
    {"method": "nearest", "tp": 4, "dtype": "fp8", "runtime": "trtllm"},
    {"runtime": "infersim"},
    {"runtime": "infersim", "tp": 2, "dtype": "fp8"},
    {"gemm_smoothing": "median3"},
    {"gemm_smoothing": "none", "runtime": "vllm"},
    {"max_num_batched_tokens": 4096, "max_num_seqs": 128},
    {"max_num_batched_tokens": 20_000, "max_num_seqs": 2000, "runtime": "vllm"},
)
# Unmeasured heads, so that attention is borrowed; an odd vocabulary and biases.
MADE_UP: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 3000,
    "num_hidden_layers": 11,
    "num_attention_heads": 22,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 7000,
    "vocab_size": 50_001,
    "max_position_embeddings": 10_000,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def options() -> Answers:
    """Methods of lookup, runtimes, limits and sources; a model of no preset; plans compiled together."""
    answers = Answers()
    tables = product.h100_tables()
    for model, given in itertools.product(("llama-3.1-8b", "qwen2.5-7b"), OPTIONS):
        for case, plan in compiled(answers, tables, model, "h100", **given):
            times(answers, case, plan)
    source = {"allreduce": "aiconfigurator-trtllm-1.3.0rc20"}
    plan = product.compile_plan(
        "llama-3.1-70b", "h100", product.load_tables("h100", source=source), tp=8, engine="kernels"
    )
    times(answers, "llama-3.1-70b, tp=8, all-reduces of trtllm", plan)
    for tp, dtype in ((1, "bf16"), (2, "fp8")):
        plan = product.compile_plan(MADE_UP, "h100", tables, tp=tp, dtype=dtype, engine="vllm")
        times(answers, f"no preset, tp={tp}, dtype={dtype}", plan)
    requests = [{"model": m, "tp": tp} for m in ("qwen3-8b", "llama-2-13b") for tp in (1, 2)]
    for request, plan in zip(requests, product.compile_together(requests, "h100", tables), strict=True):
        times(answers, f"together: {plan_case(**request)}", plan)
    return answers


H100_PLANS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama-3.1-8b", {}),
    ("llama-3.1-8b", {"tp": 2, "dtype": "fp8", "kv_dtype": "fp8", "runtime": "vllm"}),
    ("llama-3.1-70b", {"tp": 8, "dtype": "fp8_block", "runtime": "trtllm"}),
    ("qwen3-32b", {"tp": 4, "dtype": "fp8", "runtime": "vllm"}),
    ("qwen2.5-7b", {"runtime": "trtllm"}),
    ("mistral-nemo", {"tp": 2, "kv_dtype": "fp8"}),
    ("yi-34b", {"tp": 8, "dtype": "fp8_block", "kv_dtype": "fp8", "runtime": "vllm"}),
)
"""A few plans that differ in everything, for what is too slow to ask of all."""


def errors() -> Answers:
    """Standard errors of steps: they go through NumPy's logarithms and square roots."""
    answers = Answers(is_exact=False)
    tables = product.h100_tables()
    for model, given in H100_PLANS:
        for case, plan in compiled(answers, tables, model, "h100", **given):
            batches, lengths = np.array(DECODES).T
            named = [f"batch {b}, kv {kv}" for b, kv in DECODES]
            answers.numbers(case, "decode_error", named, plan.decode_error(batches, lengths))
            answers.numbers(case, "step_error", [step for step, _ in RAGGED], plan.step_error(NAMED_STEPS))
            answers.numbers(case, "step_error, many", range(len(MANY_STEPS)), plan.step_error(MANY_STEPS))
    for case, plan in compiled(answers, None, "llama-3.1-8b", "a100", runtime="vllm"):
        answers.numbers(case, "step_error", [step for step, _ in RAGGED], plan.step_error(NAMED_STEPS))
        answers.number(case, "decode_error", plan.decode_error(64, 4096))
    return answers


_NOT_RECORDED = ("name", "role", "dtype")


def explanations() -> Answers:
    answers = Answers()
    tables = product.h100_tables()
    for model, given in H100_PLANS:
        for case, plan in compiled(answers, tables, model, "h100", **given):
            for step, requests in RAGGED:
                explained = plan.explain(requests)
                answers.number(f"{case}: {step}", "total_us", explained.total_us)
                answers.number(f"{case}: {step}", "origin", explained.origin)
                answers.text(f"{case}: {step}", "operators", ", ".join(o.name for o in explained.operators))
                for operator in explained.operators:
                    answers.record(f"{case}: {step}: {operator.name}", operator, without=_NOT_RECORDED)
    for case, plan in compiled(answers, None, "qwen3-32b", "h20", tp=2):
        for operator in plan.explain(RAGGED[1][1]).operators:
            answers.record(f"{case}: {operator.name}", operator, without=_NOT_RECORDED)
    return answers


POWERED: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    plan_case(model, gpu, **options): (model, gpu, options)
    for model, gpu, options in (
        *(kind for kind in KINDS if kind[0] != "kimi-k3"),
        ("llama-3.1-8b", "h100", {"runtime": "vllm", "lora": "16:4"}),
        ("llama-3.1-8b", "h100", {"runtime": "vllm-0.12.0", "pp": 2, "tp": 2, "dtype": "fp8"}),
        ("llama-3.1-70b", "h200", {"runtime": "trtllm", "tp": 4, "kv_dtype": "fp8"}),
        ("qwen2.5-vl-7b", "h100", {"runtime": "vllm"}),
        ("qwen3-32b", "h100", {"runtime": "sglang", "tp": 2, "cp": 2}),
    )
}
"""Plans of every kind of layers, and with adapters, stages, images and shared prompts."""

IMAGES: Final = ((1024, 768), (640, 480))


def energy(case: str) -> Answers:
    """A plan's energy and its steps by operator, with errors, of images and with draft tokens to verify."""
    answers = Answers(is_exact=False)
    model, gpu, options = POWERED[case]
    for _, plan in compiled(answers, product.tables_of(gpu), model, gpu, **options):
        drawn = plan.energy(MANY_STEPS, with_error=True)
        named = plan.energy(NAMED_STEPS)
        for name in ("joules", "joules_per_token", "watts"):
            answers.numbers(f"{case}: energy", name, [step for step, _ in RAGGED], getattr(named, name))
            answers.many(f"{case}: energy", f"{name}, many", np.nan_to_num(getattr(drawn, name), nan=-1.0))
        answers.many(f"{case}: energy", "relative_error, many", drawn.relative_error)
        _explained(answers, f"{case}: a mixed step", partial(plan.explain, RAGGED[1][1], with_error=True))
        _explained(answers, f"{case}: drafts", partial(plan.explain_verification, 16, 3000, 4))
        _explained(answers, f"{case}: images", partial(plan.explain, [(4000, 0), (1, 900)], images=IMAGES))
    return answers


def _explained(answers: Answers, case: str, explain: Callable[[], Any]) -> None:
    """Keep a step by operator, or why there is none."""
    try:
        explained = explain()
    except product.FastroofError as error:
        answers.text(case, "error", type(error).__name__)
        return
    columns = explained.columns()
    operators = [f"{place} {name}" for place, name in enumerate(columns["name"])]
    for name in ("calls", "total_us", "flops", "moved_bytes", "origin"):
        answers.numbers(case, f"{name}, by operator", operators, columns[name])
    for name in ("bound", "dtype"):
        answers.text(case, name, ", ".join(map(str, columns[name])))
    answers.number(case, "total_us", explained.total_us)
    if explained.relative_error is not None:
        answers.number(case, "relative_error", explained.relative_error)
