"""Arguments of ``recommend`` and its like: what to run is within the limits that were given, or refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import fastroof
from fastroof.sweep import best_deployments, recommend_for_spec
from fastroof.sweep.recommendations.traffic import load_shared_spec
from tests.fuzz.expressions import NAMES, odd
from tests.fuzz.mutators import mutated_tree
from tests.fuzz.target import SkippedError, Target, Wrong
from tests.fuzz.targets.simulations import FLAGS, Calls

LIMITS = ("ttft_ms", "tpot_ms", "itl_ms", "request_latency_ms")
MOST_GPUS = 16
MOST_SEQS = 64
MOST_REQUESTS = 100
MOST_CANDIDATES = 3000


def checked(found: fastroof.sweep.Recommendation, limits: dict[str, Any]) -> None:
    """Raise Wrong for what runs beyond a limit, or not at all."""
    for answer, deployment in zip(found.answers.answers, found.deployments, strict=True):
        if (deployment is None) != (not answer.choices):
            raise Wrong(f"{len(answer.choices)} choices run as {deployment}")
        for choice in answer.choices:
            if not 0.0 <= choice.objective < math.inf or choice.row["total_gpus"] < 1:
                raise Wrong(f"a deployment of {choice.objective} on {choice.row['total_gpus']} GPUs")
            if any(margin.left < 0.0 for margin in choice.margins):
                raise Wrong(f"{choice.margins} are beyond the limits")
            for name, most in limits.items() if answer.limits_on == "mean" else ():
                # a single token has no time per token
                if most is not None and choice.row[name] is not None and choice.row[name] > most:
                    raise Wrong(f"{name} is {choice.row[name]}, and was to be at most {most}")
    if found.to_arrow().num_rows != sum(len(answer.choices) for answer in found.answers.answers):
        raise Wrong("rows are missing")


class Recommendations(Calls):
    name = "recommend"
    limit_s = 30.0
    ci_cases = 30
    is_one_line = False  # a line for each problem
    known: ClassVar[dict[str, tuple[str, ...]]] = {
        "gpu": ("'h100'", "'H100-SXM'", "['h100']", "Path('h100')", "['h100', 'x']", "[]"),
        "total_gpus": ("1", "2", "8", "0", "2**16 + 1"), "isl": (), "osl": (),
        "ttft_ms": (), "tpot_ms": (), "itl_ms": (), "request_latency_ms": (),
        "dtype": ("'bf16'", "'fp8'", "['bf16', 'fp8']", "'auto'", "'x'"), "kv_dtype": ("'bf16'", "'fp8'"),
        "engine": ("'vllm'", "['vllm', 'trtllm']", "'kernels'", "None"),
        "max_num_batched_tokens": ("2048", "[2048, 8192]", "64", "None"),
        "max_num_seqs": ("8", "16", "[8, 16]", "None"),
        "mode": ("'aggregated'", "['disaggregated']", "'x'", "None"), "most_gpus_each": ("1", "8", "0"),
        "prefix_hit": ("0.5", "0", "1.0", "1.5"), "gpu_hour_price": ("2.5", "{'h100': 2}", "{}", "0", "None"),
        "objective": ("'cost'", "'goodput'", "'tokens_per_s_per_user'", "'x'", "None"),
        "tables": ("'datasheet'", "'/nowhere'", "None"), "allow_modelled": FLAGS,
        "runners_up": ("0", "1", "9"), "percentile": ("99", "50.0", "None", "0", "100"),
        "requests": ("20", "2", "1"), "seed": ("0", "1"), "threads": ("1", "2", "0"),
        "progress": ("None", "'x'"),
    }  # fmt: skip
    always: ClassVar[dict[str, str]] = {
        "total_gpus": "2", "isl": "1000", "osl": "100", "max_num_seqs": "16",
        "max_num_batched_tokens": "2048", "requests": "20",
    }  # fmt: skip

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.names = {**NAMES, "Path": Path}

    def examples(self) -> list[bytes]:
        words = ", ".join(f"{name}={value}" for name, value in self.always.items())
        return [f"f('llama-3.1-8b', {words}, tpot_ms=30)".encode()]

    def first(self, random: Random) -> list[str]:
        what = random.random()
        if what < 0.9:
            return [
                random.choice(("'llama-3.1-8b'", "'llama-3.1-8b'", "['llama-3.1-8b']", "Path('qwen2.5-7b')"))
            ]
        return [odd(random) if what < 0.97 else random.choice(("'qwen3-30b-a3b'", "'x'", "[]", "['x']"))]

    def check(self, case: bytes) -> None:
        given, options = self.call(case)
        if not {"total_gpus", "isl", "osl"} <= options.keys():
            raise SkippedError
        for name, most in (
            ("total_gpus", MOST_GPUS),
            ("max_num_seqs", MOST_SEQS),
            ("requests", MOST_REQUESTS),
        ):
            value = options.get(name)
            if value is None or (isinstance(value, int) and most < value < 2**16):
                raise SkippedError  # fine, and takes long
        found = fastroof.recommend(*given, **options)
        checked(found, {name: options.get(name) for name in LIMITS})
        output = self.folder / "out"
        try:
            found.save(output)
        finally:
            shutil.rmtree(output, ignore_errors=True)


SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b"], "gpus": ["h100"], "dtype": ["bf16"], "engine": ["vllm"], "tp": [1, 2],
    "total_gpus": [2], "isl": 1000, "osl": 100, "clients": [1, 8, 32], "max_num_seqs": 64,
    "max_num_batched_tokens": [2048], "constraints": {"tpot_ms": 30.0, "ttft_ms": 5000.0},
    "gpu_hour_price": 2.5, "objective": "cost", "per": ["model", "isl"],
}  # fmt: skip
DISAGGREGATED = {**SPEC, "mode": ["disaggregated"], "total_gpus": [4], "objective": "tokens_per_s_per_gpu"}


class BestDeployments(Target):
    """Specs of ``best_deployments`` and ``recommend_for_spec``, with what else they take. A case is JSON."""

    name = "best"
    suffix = ".json"
    limit_s = 30.0
    ci_cases = 25
    is_one_line = False  # a line for each problem
    options: ClassVar[dict[str, tuple[Any, ...]]] = {
        "runners_up": (0, 1, 5, -1, 1.5, "1", None, True), "percentile": (None, 99, 50, 0, 101, "x", 1e308),
        "requests": (20, 2, 1, 0, None, "x"), "seed": (0, 1, -1, None, 2**70, "x"),
        "threads": (1, 2, 0, None),
    }  # fmt: skip

    def examples(self) -> list[bytes]:
        return [json.dumps([spec, {}]).encode() for spec in (SPEC, DISAGGREGATED)]

    def case(self, random: Random) -> bytes:
        spec = random.choice((SPEC, SPEC, DISAGGREGATED))
        if random.random() < 0.85:
            spec = mutated_tree(spec, random, (SPEC, DISAGGREGATED))
        options = {"requests": 20}
        for _ in range(random.choice((0, 0, 1, 2))):
            name = random.choice(list(self.options))
            options[name] = random.choice(self.options[name])
        return json.dumps([spec, options]).encode(errors="surrogatepass")

    def check(self, case: bytes) -> None:
        spec, options = json.loads(case)
        if not isinstance(spec, dict):
            raise SkippedError
        loaded = fastroof.sweep.load_spec(spec)
        if isinstance(loaded, fastroof.sweep.DeploymentSpec) and loaded.num_candidates > MOST_CANDIDATES:
            raise SkippedError
        answers = best_deployments(loaded, **options)
        found = recommend_for_spec(spec, **options)
        limits = found.specs[0].constraints.model_dump()
        checked(found, {name: limits[name] for name in LIMITS})
        for ours, theirs in zip(answers.answers, found.answers.answers, strict=True):
            if [choice.row for choice in ours.choices] != [choice.row for choice in theirs.choices]:
                raise Wrong("another deployment is recommended than is best")


SHARED: dict[str, Any] = {
    "gpu": "h100", "total_gpus": 3, "osl": 100, "max_num_seqs": 16, "max_num_batched_tokens": 2048,
    "allow_modelled": False, "gpu_hour_price": 2.5,
    "traffic": [
        {"model": "llama-3.1-8b", "isl": 1000, "requests_per_s": 4.0, "tpot_ms": 30.0, "dtype": ["bf16"]},
        {"model": "qwen3-8b", "isl": 100, "requests_per_s": 20, "ttft_ms": 5000.0, "prefix_hit": 0.5},
    ],
}  # fmt: skip


class SharedBudgets(Target):
    """Specs of ``recommend_shared``: GPUs and the traffic of each model. A case is JSON."""

    name = "shared"
    suffix = ".json"
    limit_s = 60.0
    ci_cases = 15
    is_one_line = False

    def examples(self) -> list[bytes]:
        return [json.dumps(SHARED).encode()]

    def case(self, random: Random) -> bytes:
        return json.dumps(mutated_tree(SHARED, random, (SHARED,))).encode(errors="surrogatepass")

    def check(self, case: bytes) -> None:
        spec = json.loads(case)
        if not isinstance(spec, dict):
            raise SkippedError
        loaded = load_shared_spec(spec)
        if loaded.total_gpus > MOST_GPUS or len(loaded.traffic) > 3:
            raise SkippedError  # fine, and takes long
        for each in loaded.traffic:
            seqs = each.options.get("max_num_seqs")
            if (
                seqs is None
                or not isinstance(seqs, int)
                or seqs > MOST_SEQS
                or each.requests_per_s > MOST_REQUESTS
            ):
                raise SkippedError
        found = fastroof.recommend_shared(spec)
        if not 0 <= found.gpus_left <= loaded.total_gpus:
            raise Wrong(f"{found.gpus_left} of {loaded.total_gpus} GPUs are left")
        if found.scale != min(share.ratio for share in found.shares):
            raise Wrong(f"{found.scale} is not the smallest ratio")
        for share in found.shares:
            if share.gpus and share.recommendation is not None:
                checked(share.recommendation, {name: share.traffic.options.get(name) for name in LIMITS})


TARGETS = [Recommendations, BestDeployments, SharedBudgets]
