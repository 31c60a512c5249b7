"""MoE steps by fastroof and by aiconfigurator-core, part by part.

    python -m benchmarks.accuracy expert-steps

Both read the same measured tables, so that only the method differs: the parts of a step, and interpolation.
If another version of an engine ships, fastroof reads that of aiconfigurator-core. Needs aiconfigurator-core.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final, NamedTuple

from benchmarks.accuracy.aiconfigurator_estimates import (
    SDK,
    aiconfigurator_version,
    quiet,
    write_published_config,
)
from fastroof.columns import ORIGIN_BORROWED
from fastroof.engines import load_engine
from fastroof.errors import PlanRangeError
from fastroof.load.aiconfigurator import SYSTEMS, import_aiconfigurator
from fastroof.load.family_checks import flag_unsound
from fastroof.models import Layout
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.curves import component_of
from fastroof.tables import Tables, load_tables
from fastroof.units import US_PER_MS

PARTS: Final = ("linear", "experts", "attention", "communication", "elementwise", "lm_head")
SHOWN_FROM: Final = 0.1
"""Difference from which a part is listed, as a share of the step."""

_PART_OF: Final = (
    ("lm_head", r"logits"),
    ("communication", r"dispatch|combine|_ar$|p2p|all_?reduce"),
    ("experts", r"router|moe(?!_norm)|shared"),
    ("attention", r"attention$|_block$|recurrence|conv1d|_scan$|fused_decode|_ssm$"),
    ("linear", r"gemm"),
    ("elementwise", r""),
)
"""Parts by the first pattern that is in the name of one of its operators."""

_MODULE: Final = re.compile(r"attention$|_block$")
_PROJECTION: Final = re.compile(r"(?:qkv|proj)_gemm$")
_OVERLAP: Final = "overlap"
_NO_FP8_ATTENTION: Final = 'missing for ContextKey { fmha_quant: "fp8"'
_MLP_ROLES: Final = ("gate_up", "down", "gate_up_quantise", "down_quantise")


class StepCase(NamedTuple):
    """A model, its format and layout on an engine and GPU."""

    model: str
    gpu: str
    engine: str
    layout: Layout
    kv_dtype: str = "bf16"
    sends: bool = False


CASES: Final = (
    StepCase("mistralai/Mixtral-8x7B-v0.1", "h100", "vllm", Layout(2)),
    StepCase("mistralai/Mixtral-8x22B-v0.1", "h200", "sglang", Layout(8)),
    StepCase("Qwen/Qwen3-30B-A3B", "h100", "vllm", Layout(2)),
    StepCase("Qwen/Qwen3-235B-A22B-FP8", "h100", "trtllm-1.1", Layout(8, ep=8), "fp8"),
    StepCase("Qwen/Qwen3-235B-A22B-FP8", "h200", "sglang", Layout(4), "fp8"),
    StepCase("nvidia/Qwen3-235B-A22B-NVFP4", "b200", "trtllm-1.1", Layout(4, ep=4), "fp8"),
    StepCase("Qwen/Qwen3-Coder-480B-A35B-Instruct", "h200", "vllm", Layout(8)),
    StepCase("openai/gpt-oss-120b", "h200", "vllm", Layout(4)),
    StepCase("openai/gpt-oss-120b", "b200", "trtllm-1.1", Layout(2, ep=2), "fp8"),
    StepCase("openai/gpt-oss-20b", "h100", "sglang", Layout(1)),
    StepCase("MiniMaxAI/MiniMax-M2.5", "h200", "vllm", Layout(4)),
    StepCase("meta-llama/Llama-4-Scout-17B-16E-Instruct", "h100", "vllm", Layout(8)),
    StepCase("Qwen/Qwen3.5-27B", "h200", "sglang", Layout(2)),
    StepCase("nvidia/Qwen3.5-397B-A17B-NVFP4", "b200", "vllm", Layout(4), "fp8"),
    StepCase("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "h200", "vllm", Layout(1)),
    StepCase("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", "b200", "trtllm-1.1", Layout(8), "fp8"),
    StepCase("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "b200", "vllm", Layout(8)),
    StepCase("deepseek-ai/DeepSeek-V3.2", "h200", "sglang", Layout(8)),
    StepCase("zai-org/GLM-5.2-FP8", "h200", "sglang", Layout(8)),
    StepCase("deepseek-ai/DeepSeek-V3.2", "h200", "vllm", Layout(8)),
)

WIDE_CASES: Final = (
    StepCase("deepseek-ai/DeepSeek-V3", "h100", "sglang", Layout(1, dp=16, ep=16), "fp8", True),
    StepCase("deepseek-ai/DeepSeek-V3", "h100", "sglang", Layout(1, dp=32, ep=32), "fp8", True),
    StepCase("deepseek-ai/DeepSeek-V3", "h200", "sglang", Layout(1, dp=32, ep=32), "fp8", True),
)
"""Over several nodes; its tables of wide attention have an fp8 cache only."""

WIDE_CONFIG: Final[Mapping[str, object]] = {
    "moe_comm_backend": {"context": "deepep_ht", "generation": "deepep_ll"},
    "num_gpus_per_node": 8,
    "attention_backend": "fa3",
}
"""Its arguments for large expert parallelism with SGLang on Hopper."""

STEPS: Final[Mapping[str, Sequence[tuple[int, int]]]] = {
    "64 decodes at 2,048": [(1, 2047)] * 64,
    "a prompt of 2,048": [(2048, 0)],
}


class SteppedCase(NamedTuple):
    """One step, timed by both."""

    case: StepCase
    step: str
    own_ms: dict[str, float]
    their_ms: dict[str, float]
    why_not: str = ""
    donors: Mapping[str, str] = MappingProxyType({})

    @property
    def apart(self) -> float:
        """Signed difference of fastroof's step, as a share of the other's."""
        return sum(self.own_ms.values()) / sum(self.their_ms.values()) - 1.0

    def parts_apart(self) -> list[str]:
        """Parts that differ by more than a tenth of the step."""
        least = SHOWN_FROM * sum(self.their_ms.values())
        return [part for part in PARTS if abs(self.own_ms[part] - self.their_ms[part]) > least]


def stepped_cases(cases: Sequence[StepCase] = CASES) -> Iterator[SteppedCase]:
    """Time the steps of cases by both."""
    aiconfigurator_version()
    for case in cases:
        with TemporaryDirectory() as above:
            folder = Path(above) / case.model.split("/")[-1]
            folder.mkdir()
            write_published_config(case.model, folder)
            for step, requests in STEPS.items():
                try:
                    with quiet():
                        plan = _plan(case, str(folder))
                        named = _their_times(case, plan.kv_dtype, str(folder), requests)
                        whole = Joined.of(named)
                        if case.sends:
                            # its wide-attention module has all but the first projections
                            whole = whole._replace(mixing=True)
                        own_ms, donors = _own_parts(plan, requests, whole)
                        their_ms = _their_parts(named, whole)
                except Exception as error:
                    # any exception is the answer
                    words = str(error).replace(f"{above}/", "")
                    yield SteppedCase(case, step, {}, {}, f"{type(error).__name__}: {words:.160}")
                    continue
                yield SteppedCase(case, step, own_ms, their_ms, donors=donors)


def _plan(case: StepCase, folder: str) -> StepPlan:
    """Compile the plan of a case, kernels only."""
    layout, profile = case.layout, load_engine(case.engine)
    plan = compile_plan(
        folder, case.gpu, same_tables(case.gpu, profile.engine), tp=layout.tp, pp=layout.pp, dp=layout.dp,
        ep=layout.ep, moe_tp=layout.moe_tp, kv_dtype=case.kv_dtype, engine=profile.kernels_alone(),
        exchange="alltoall" if case.sends else None,
        routing="power_law_1.01" if case.sends else "power_law_1.2",
    )  # fmt: skip
    if not plan.memory.max_kv_tokens:
        raise PlanRangeError(f"{plan!r}: its weights leave no room for KV cache")
    return plan


@cache
def same_tables(gpu: str, engine: str) -> Tables:
    """Return a GPU's tables with aiconfigurator-core's version of an engine in place of another version."""
    tables = load_tables(gpu)
    own = tables.measured
    system, version = _their_version(gpu, engine)
    # an import may have other versions too, after the one that serves
    gemm = next((table for table in own.candidates("gemm") if table.engine == engine), None)
    if gemm is None or gemm.provenance["framework_version"] == version:
        return tables
    root = Path(import_module(SDK).__path__[0]).parent
    theirs = import_aiconfigurator(system, engine, version, root).tables
    donors = {
        name: [table for table in own.candidates(name) if table.engine != engine] for name in own.tables
    }
    # unsound families are of the method: donors serve them, as they would if the version shipped
    provenance = flag_unsound(next(iter(theirs.values())).provenance, theirs, donors)
    candidates = {name: [replace(table, provenance=provenance)] for name, table in theirs.items()}
    for name, found in donors.items():
        candidates[name] = [*candidates.get(name, ()), *found]
    served = {name: found for name, found in candidates.items() if found}
    first = {name: found[0] for name, found in served.items()}
    others = {name: tuple(found[1:]) for name, found in served.items()}
    return Tables(replace(own, tables=first, others=others), tables.gpu)


def _their_version(gpu: str, engine: str) -> tuple[str, str]:
    """Return aiconfigurator-core's name of a GPU, and its current version of an engine."""
    system = {name: system for system, name in SYSTEMS.items()}[gpu]
    slots = import_module(f"{SDK}.perf_database").get_version_slots(system, engine)
    return system, slots["current"]


class Joined(NamedTuple):
    """Parts that aiconfigurator-core has as one: only their sums are compared."""

    mixing: bool
    mlp: bool

    @staticmethod
    def of(named: Mapping[str, float]) -> Joined:
        """Return the parts by the names of its operators."""
        is_module = any(_MODULE.search(name) for name in named)
        has_projections = any(_PROJECTION.search(name) for name in named)
        return Joined(is_module and not has_projections, any(_OVERLAP in name for name in named))

    def part(self, part: str, role: str = "") -> str:
        """Return the joined part of a part."""
        if self.mlp and (part == "communication" or role in _MLP_ROLES):
            return "experts"
        return "attention" if self.mixing and part == "linear" and role not in _MLP_ROLES else part


def _own_parts(
    plan: StepPlan, requests: Sequence[tuple[int, int]], whole: Joined
) -> tuple[dict[str, float], dict[str, str]]:
    """Return fastroof's parts, ms, and the origin of those that are mostly not measured."""
    part_of: dict[str, str] = {curve.operator.role: component_of(curve.operator) for curve in plan.row_curves}
    from_sources: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    for operator in plan.explain(requests).operators:
        part = whole.part(part_of.get(operator.role, "attention"), operator.role)
        source = operator.source if operator.origin >= ORIGIN_BORROWED else ""
        times = from_sources[part]
        times[source] = times.get(source, 0.0) + operator.total_us / US_PER_MS
    most = {
        part: max(found, key=lambda name: found[name], default="") for part, found in from_sources.items()
    }
    parts = {part: sum(found.values(), 0.0) for part, found in from_sources.items()}
    return parts, {part: source for part, source in most.items() if source}


def _their_parts(named: Mapping[str, float], whole: Joined) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    for name, time_ms in named.items():
        parts[whole.part(next(part for part, pattern in _PART_OF if re.search(pattern, name)))] += time_ms
    return parts


def _their_times(
    case: StepCase, kv_dtype: str, folder: str, requests: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Return aiconfigurator-core's operators of a step, ms."""
    try:
        return _times_of(case, kv_dtype, folder, requests, None)
    except Exception as error:
        if _NO_FP8_ATTENTION not in str(error):
            raise
        return _times_of(case, kv_dtype, folder, requests, "bfloat16")


def _times_of(
    case: StepCase,
    kv_dtype: str,
    folder: str,
    requests: Sequence[tuple[int, int]],
    attention_dtype: str | None,
) -> dict[str, float]:
    new, context = requests[0]
    is_decode = new == 1
    layout, engine = case.layout, load_engine(case.engine).engine
    system, version = _their_version(case.gpu, engine)
    database = import_module(f"{SDK}.perf_database").get_database(system, engine, version)
    model_config = import_module(f"{SDK}.config_builders").build_model_config(
        layout.tp, layout.pp, layout.dp, layout.moe_tp, layout.ep,
        kvcache_quant_mode={"bf16": "bfloat16"}.get(kv_dtype, kv_dtype), fmha_quant_mode=attention_dtype,
    )  # fmt: skip
    if case.sends:
        fp8_block = import_module(f"{SDK}.common").FMHAQuantMode["fp8_block"]
        for name, value in {**WIDE_CONFIG, "system": system, "fmha_quant_mode": fp8_block}.items():
            setattr(model_config, name, value)
    model = import_module(f"{SDK}.models").get_model(folder, model_config, engine)
    lengths = {
        "isl": context if is_decode else new,
        "osl": 2 if is_decode else 1,
        "batch_size": len(requests),
        "beam_width": 1,
    }
    summary = (
        import_module(f"{SDK}.backends.factory")
        .get_backend(engine)
        .run_static(
            model,
            database,
            import_module(f"{SDK}.config").RuntimeConfig(**lengths),
            mode="static_gen" if is_decode else "static_ctx",
        )
    )
    named = summary.get_generation_latency_dict() if is_decode else summary.get_context_latency_dict()
    return {name: float(time_ms) for name, time_ms in named.items()}


def main() -> None:
    """Compare MoE steps with aiconfigurator-core, part by part, as Markdown."""
    rows = []
    for stepped in stepped_cases((*CASES, *WIDE_CASES)):
        case = stepped.case
        what = (case.model, case.gpu, case.engine, str(case.layout), stepped.step)
        if stepped.why_not:
            rows.append((*what, "", "", "", stepped.why_not))
            continue
        apart = [
            f"{part} {stepped.own_ms[part]:.2f}, {stepped.their_ms[part]:.2f}"
            for part in stepped.parts_apart()
        ]
        totals = (sum(stepped.own_ms.values()), sum(stepped.their_ms.values()))
        times = (f"{totals[0]:.2f}", f"{totals[1]:.2f}", f"{stepped.apart:+.1%}")
        rows.append((*what, *times, "; ".join(apart)))
    columns = (
        "model", "gpu", "engine", "layout", "step", "fastroof ms", "aiconfigurator ms", "apart",
        "parts apart by more than a tenth",
    )  # fmt: skip
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |")
    print(f"\naiconfigurator-core {aiconfigurator_version()}; kernels alone.")
