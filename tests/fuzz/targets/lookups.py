"""Arguments of ``Tables.lookup``, ``compile_plan`` and the loaders' names."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import fastroof
from tests.fuzz.expressions import NAMES, evaluated, integer_array, odd, sizes
from tests.fuzz.made_plans import h100
from tests.fuzz.target import Target, Wrong, all_finite

QUERIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gemm", {"m": 64, "n": 4096, "k": 4096}),
    (
        "attention_prefill",
        {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_len": 100, "kv_len": 400},
    ),
    (
        "attention_decode",
        {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "batch_size": 8, "kv_len": 400},
    ),
    ("allreduce", {"num_gpus": 8, "message_bytes": 65536}),
    ("moe", {"num_tokens": 64, "hidden": 4096, "intermediate": 14336, "topk": 2, "num_experts": 8}),
)
TEXTS = (
    "'bf16'",
    "'fp8'",
    "'eager'",
    "'roofline'",
    "'linear_mfu'",
    "'nearest'",
    "'floor'",
    "'balanced'",
    "'x'",
    "''",
)
OTHER_NAMES = (
    "dtype",
    "kv_dtype",
    "window",
    "mode",
    "method",
    "with_error",
    "batch_size",
    "moe_tp",
    "distribution",
    "x",
)


class Lookups(Target):
    name = "tables.lookup"
    ci_cases = 1500

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.tables = h100()

    def case(self, random: Random) -> bytes:
        operator, wanted = random.choice(QUERIES)
        words = {key: str(value) for key, value in wanted.items()}
        for _ in range(random.choice((1, 1, 2, 3))):
            key = random.choice(list(words))
            what, most = random.random(), 5 * wanted.get(key, 9)
            if what < 0.6:
                words[key] = sizes(random, most)
            else:
                words[key] = odd(random) if what < 0.8 else integer_array(random, most)
        return self._written(operator, words, random)

    def _written(self, operator: str, words: dict[str, str], random: Random) -> bytes:
        if random.random() < 0.3:
            words[random.choice(OTHER_NAMES)] = random.choice((*TEXTS, odd(random)))
        if random.random() < 0.1:
            del words[random.choice(list(words))]
        first = repr(operator) if random.random() < 0.97 else odd(random)
        return f"f({first}, {', '.join(f'{key}={value}' for key, value in words.items())})".encode()

    def check(self, case: bytes) -> None:
        given, options = evaluated(case.decode(), NAMES)
        found = self.tables.lookup(*given, **options)
        all_finite(found.latency_us)
        shape = np.broadcast_shapes(
            *[np.shape(value) for value in options.values() if not isinstance(value, str)]
        )
        if found.latency_us.shape != shape or (found.latency_us <= 0.0).any() or (found.origin > 4).any():
            raise Wrong(f"{found!r:.100} of shape {shape}")


PLAN_OPTIONS = (
    "tp", "pp", "dp", "ep", "moe_tp", "dtype", "kv_dtype", "engine", "method",
    "max_num_batched_tokens", "max_num_seqs", "gemm_smoothing", "routing", "allow_modelled", "exchange",
    "dp_imbalance", "wide_experts", "eplb", "num_slots", "two_batch_overlap", "cp", "memory_fraction",
    "kv_cache_gib", "lora",
    "front_end",
)  # fmt: skip
MODELS = ("'llama-3.1-8b'", "'qwen3-30b-a3b'", "'deepseek-v3'", "'gemma-3-12b'", "'bamba-9b'")
VALUES = (
    "1", "2", "3", "4", "8", "16", "0", "-1", "0.5", "0.9", "1.5", "2.0", "'auto'", "'bf16'", "'fp8'",
    "'fp8_block'", "'nvfp4'", "'vllm'", "'sglang'", "'trtllm'", "'kernels'", "'balanced'", "'power_law_1.2'",
    "True", "False", "None", "64", "'vllm-0.12'", "'vllm-'", "'vllm-x'", "'deepep'", "'linear_mfu'", "10**30",
    "'../x.toml'", "'x.toml'", "'16:4'", "'16:2/4:mlp'",
)  # fmt: skip


class Plans(Target):
    name = "compile_plan"
    limit_s = 20.0
    ci_cases = 60

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.tables = h100()

    def case(self, random: Random) -> bytes:
        words = {"max_num_batched_tokens": "64", "max_num_seqs": "8"}
        for _ in range(random.choice((1, 1, 2, 3, 4))):
            words[random.choice(PLAN_OPTIONS)] = (
                odd(random) if random.random() < 0.3 else random.choice(VALUES)
            )
        model = random.choice(MODELS) if random.random() < 0.95 else odd(random)
        gpu = "'h100'" if random.random() < 0.95 else odd(random)
        return f"f({model}, {gpu}, {', '.join(f'{key}={value}' for key, value in words.items())})".encode()

    def check(self, case: bytes) -> None:
        (model, gpu), options = evaluated(case.decode(), NAMES)
        plan = fastroof.compile_plan(model, gpu, self.tables, **{"engine": "kernels", **options})
        all_finite([plan.decode_us(1, 100), plan.prefill_us(1), plan.arena])
        if plan.decode_us(1, 100) <= 0.0:
            raise Wrong("a step takes no time")


class Names(Target):
    """What the loaders take a name or a path for."""

    name = "names"
    ci_cases = 400
    calls = ("load_gpu({})", "load_model({})", "load_tables({})", "load_tables('h100', source={})",
    "load_trace({})", "load_tables('h100', gpu={})", "load_tables({}, gpu='h100')",
    "compile_plan('llama-3.1-8b', {}, None)", "compile_plan({}, 'h100', None)",
    "compile_plan('llama-3.1-8b', 'h100', {})")  # fmt: skip
    words = ("'h100'", "'h100-pcie'", "'llama-3.1-8b'", "'meta-llama/Llama-3.1-8B'", "'/'", "'.'",
    "'/dev/null'", "'x' * 300", "'a/' * 3000", "'x.toml'", "'x.json'", "'~'", "'h100\\0'", "'h 1_0-0'",
    "'NVIDIA'", "Path('/dev/null')", "Path('.')", "Path('x' * 300)", "{'gemm': 'x'}", "{'x': 'y'}", "{1: 2}",
    "[]", "'example'", "'/proc/self/mem'")  # fmt: skip

    def case(self, random: Random) -> bytes:
        word = random.choice(self.words) if random.random() < 0.6 else odd(random)
        return random.choice(self.calls).format(word).encode()

    def check(self, case: bytes) -> None:
        text = case.decode()
        names = {**NAMES, "Path": Path}
        evaluated(f"f{text[text.index('(') :]}", names)
        eval(
            text,
            {
                **names,
                **{
                    name: getattr(fastroof, name)
                    for name in ("load_gpu", "load_model", "load_tables", "load_trace", "compile_plan")
                },
            },
        )


TARGETS = [Lookups, Plans, Names]
