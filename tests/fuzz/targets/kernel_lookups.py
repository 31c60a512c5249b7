"""Lookups of all other operators: latent, sparse and linear attention, experts, exchanges of many GPUs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import fastroof
from fastroof.load.write import write_source
from fastroof.operators.registry import OPERATORS
from tests.fuzz.expressions import (
    NAMES,
    call_text,
    evaluated,
    integer,
    integer_array,
    odd,
    sizes,
    skip_many_points,
)
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite

CHECKOUT = Path(__file__).resolve().parents[3]
MIXER = {"batch_size": 32, "phase": "generation", "part": "convolution", "conv_width": 4, "q_len": 1}
BLOCK = {"num_heads": 8, "dtype": "bf16", "kv_dtype": "fp8", "attn_dtype": "bf16"}
DENSE_BLOCK = {"num_heads": 16, "dtype": "fp8_block", "kv_dtype": "bf16", "attn_dtype": "bf16"}
PROMPTS = {"q_len": 1024, "kv_len": 1024, "batch_size": 8}
DECODES = {"batch_size": 32, "kv_len": 256}
EXPERTS = {"hidden": 7168, "intermediate": 2048, "topk": 8, "num_experts": 256, "num_tokens": 256}

QUERIES: dict[str, tuple[dict[str, Any], ...]] = {
    "encoder_attention": ({"num_q_heads": 12, "num_kv_heads": 12, "head_dim": 64, "kv_len": 12544},),
    "allreduce": (
        {"num_gpus": 2, "message_bytes": 524288, "dtype": "fp16", "mode": "nccl"},
        {"num_gpus": 2, "message_bytes": 524288, "dtype": "bf16", "mode": "eager"},
        {"num_gpus": 4, "message_bytes": 524288},
    ),
    "collective": (
        {"collective": "all_gather", "num_gpus": 8, "message_bytes": 262144},
        {"collective": "alltoall", "num_gpus": 4, "message_bytes": 262144},
        {"collective": "reduce_scatter", "num_gpus": 2, "message_bytes": 262144, "dtype": "int8"},
    ),
    "moe": (
        {**EXPERTS, "moe_ep": 8, "dtype": "fp8_block", "distribution": "power_law_1.2"},
        {**EXPERTS, "moe_tp": 8, "dtype": "fp8_block"},
    ),
    "moe_nongated": ({**EXPERTS, "hidden": 8192, "intermediate": 5120, "topk": 22, "num_experts": 512,
                      "dtype": "fp8", "distribution": "power_law_1.01"},),
    "moe_wide": ({**EXPERTS, "num_slots": 288, "moe_ep": 32, "distribution": "power_law_1.2_eplb",
                  "phase": "any"},),
    "megamoe": ({**EXPERTS, "moe_ep": 8},),
    "mlp": ({"hidden": 7168, "intermediate": 2048, "num_tokens": 512},),
    "expert_dispatch": ({"library": "deepep_normal", "phase": "combine", "hidden": 6144, "topk": 4,
                         "num_experts": 128, "num_gpus": 8, "num_tokens": 128, "sms": 20},),
    "hyper_connections": ({"stage": "pre", "hidden": 4096, "num_tokens": 768},),
    "mla_prefill": ({"num_q_heads": 16, "q_len": 64, "kv_len": 64, "kv_dtype": "fp8", "batch_size": 8},),
    "mla_decode": ({"num_q_heads": 16, **DECODES, "kv_dtype": "fp8"},),
    "mla_module_prefill": ({**DENSE_BLOCK, **PROMPTS, "model": "deepseek-v3"},),
    "mla_module_decode": ({**DENSE_BLOCK, **DECODES, "model": "deepseek-v3"},),
    "mla_bmm": ({"part": "pre", "num_heads": 48, "num_tokens": 192},),
    "dsa_prefill": ({**DENSE_BLOCK, **PROMPTS, "model": "glm-5"},),
    "dsa_decode": ({**DENSE_BLOCK, **DECODES, "model": "glm-5"},),
    "csa_prefill": ({**BLOCK, "q_len": 32, "kv_len": 8224, "batch_size": 8},),
    "csa_decode": ({**BLOCK, "batch_size": 16, "kv_len": 1025},),
    "hca_prefill": ({**BLOCK, "q_len": 32, "kv_len": 8224, "batch_size": 8},),
    "hca_decode": ({**BLOCK, "batch_size": 16, "kv_len": 1025},),
    "msa_prefill": ({**DENSE_BLOCK, **PROMPTS, "model": "minimax-m3"},),
    "msa_decode": ({**DENSE_BLOCK, **DECODES, "model": "minimax-m3"},),
    "sparse_part": ({"part": "topk_v1", "model": "deepseek-v4-flash", "compress_ratio": 4, "num_heads": 64,
                     "q_len": 4096, "kv_len": 69632, "scores": "top_last", "batch_size": 2},),
    "gdn": ({**MIXER, "num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 128, "head_v_dim": 128},),
    "kda": ({**MIXER, "num_k_heads": 48, "num_v_heads": 48, "part": "fused"},),
    "mamba2": ({**MIXER, "num_heads": 16, "head_dim": 64, "state_dim": 64, "num_groups": 4},),
}  # fmt: skip
"""One call or more that is answered, of each operator."""


def _made(words: dict[str, Any], points: list[tuple[int, ...]]) -> dict[str, list[Any]]:
    """A table of one kernel at (batch, new tokens, tokens attended to), some of these sizes."""
    rows = len(points)
    batch, q_len, kv_len = ([point[place] for point in points] for place in range(3))
    axes = {"batch_size": batch, "kv_len": kv_len} | ({"q_len": q_len} if max(q_len) > 1 else {})
    us = [50.0 + b * q * (1.0 + 1e-3 * kv) for b, q, kv in points]
    return {**{name: [word] * rows for name, word in words.items()}, **axes, "latency_us": us}


PROMPT_POINTS = [(b, q, q + prefix) for b in (1, 8) for q in (32, 1024, 4096) for prefix in (0, 8192)]
DECODE_POINTS = [(b, 1, kv) for b in (1, 16, 32, 128) for kv in (65, 256, 1025, 65536)]
V4 = {**BLOCK, "model": "deepseek-v4-flash"}
M3 = {**DENSE_BLOCK, "model": "minimax-m3"}
MADE = {
    "csa_prefill": _made(V4, PROMPT_POINTS), "csa_decode": _made(V4, DECODE_POINTS),
    "hca_prefill": _made(V4, PROMPT_POINTS), "hca_decode": _made(V4, DECODE_POINTS),
    "msa_prefill": _made(M3, PROMPT_POINTS), "msa_decode": _made(M3, DECODE_POINTS),
    "sparse_part": _made({"part": "topk_v1", "model": "deepseek-v4-flash", "scores": "top_last",
                          "compress_ratio": 4, "num_heads": 64}, PROMPT_POINTS),
    "megamoe": {
        "dtype": ["w4a8_mxfp4_mxfp8"] * 8, "hidden": [7168] * 8, "intermediate": [2048] * 8,
        "topk": [8] * 8, "num_experts": [256] * 8, "moe_ep": [8] * 8,
        "phase": ["generation"] * 4 + ["context"] * 4, "distribution": ["balanced"] * 8,
        "num_tokens": [8, 64, 512, 4096] * 2,
        "latency_us": [60.0, 70.0, 150.0, 900.0, 80.0, 90.0, 180.0, 800.0],
    },
}  # fmt: skip
"""Tables that the shipped ones of the H100 do not have: no H100 measured these times."""

METHODS = ("'roofline'", "'roofline'", "'linear_mfu'", "'nearest'", "'floor'", "'x'")
WORDS = (
    "bf16", "fp8", "fp8_block", "nvfp4", "int8", "fp16", "default", "eager", "graph", "nccl", "auto",
    "all_gather", "alltoall", "reduce_scatter", "context", "generation", "any", "pre", "post", "all", "fused",
    "convolution", "dispatch", "combine", "deepep_ht", "deepep_normal", "deepep_ll", "balanced",
    "power_law_1.01", "power_law_1.2", "power_law_1.2_eplb", "deepseek-v3", "deepseek-v3.2",
    "deepseek-v4-flash", "glm-5", "minimax-m3", "none", "top_last", "attention", "topk_v1", "", "x",
)  # fmt: skip


class KernelLookups(Target):
    """Lookups in the shipped tables, or in one that is made where they have none."""

    name = "tables.kernels"
    ci_cases = 1200

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        columns = {
            operator: {key: _column(values) for key, values in table.items()}
            for operator, table in MADE.items()
        }
        self.made = fastroof.load_tables(
            write_source(folder / "made", columns, {"gpu": "h100"}, compression_level=1)
        )
        self.calls = [(operator, wanted) for operator, several in QUERIES.items() for wanted in several]

    def examples(self) -> list[bytes]:
        return [call_text(operator, _words(wanted)) for operator, wanted in self.calls]

    def case(self, random: Random) -> bytes:
        operator, wanted = random.choice(self.calls)
        words = _words(wanted)
        schema = OPERATORS[operator]
        for _ in range(random.choice((1, 1, 2, 3))):
            # another key is mostly no kernel that was measured
            key = random.choice(schema.axis_names if random.random() < 0.75 else schema.arguments)
            what = random.random()
            if isinstance(wanted.get(key, schema.defaults.get(key)), str):
                words[key] = repr(random.choice(WORDS)) if what < 0.9 else odd(random)
                continue
            most = 3 * int(wanted.get(key, 9))
            if what < 0.4:
                words[key] = integer(random, most)
            elif what < 0.7:
                words[key] = integer_array(random, most)
            else:
                words[key] = sizes(random, most) if what < 0.9 else odd(random)
        if random.random() < 0.2:
            words["method"] = random.choice(METHODS)
        if random.random() < 0.2:
            words["with_error"] = "True" if random.random() < 0.9 else odd(random)
        if random.random() < 0.05:
            words[random.choice(("x", "window", "mode", "dtype"))] = random.choice(
                ("1", "'bf16'", odd(random))
            )
        if random.random() < 0.05:
            del words[random.choice(list(words))]
        return call_text(operator, words)

    def check(self, case: bytes) -> None:
        given, options = evaluated(case.decode(), NAMES)
        if len(given) != 1 or not isinstance(given[0], str):
            raise SkippedError
        skip_many_points(options)
        tables = self.made if given[0] in MADE else shipped()
        found = tables.lookup(*given, **options)
        mfus = found.mfu[~np.isnan(found.mfu)]  # links have none
        all_finite([found.latency_us, mfus, found.relative_error])
        wanted = {key: value for key, value in options.items() if key not in ("method", "with_error")}
        given_sizes = {key: np.asarray(value) for key, value in wanted.items() if not isinstance(value, str)}
        shape = np.broadcast_shapes(*(value.shape for value in given_sizes.values()))
        if found.latency_us.shape != shape or (found.latency_us <= 0.0).any() or (found.origin > 4).any():
            raise Wrong(f"{found!r:.100} of shape {shape}")
        if (mfus <= 0.0).any() or (found.relative_error is not None and (found.relative_error < 0.0).any()):
            raise Wrong(f"{found!r:.200}")
        if not shape or not found.latency_us.size:
            return
        # a point alone is what it is among others
        wide = {key: np.broadcast_to(value, shape).reshape(-1) for key, value in given_sizes.items()}
        for place in (0, -1):
            one = tables.lookup(
                *given, **{**options, **{key: int(value[place]) for key, value in wide.items()}}
            )
            for name in ("latency_us", "mfu", "origin", "relative_error"):
                among = getattr(found, name)
                if among is not None and among.reshape(-1)[place].tobytes() != getattr(one, name).tobytes():
                    raise Wrong(f"{name} of point {place} is {among.reshape(-1)[place]}, alone {one!r:.200}")


@cache
def shipped() -> fastroof.Tables:
    """Return the H100's tables that ship, and none that were imported: cases are the same everywhere."""
    return fastroof.load_tables(CHECKOUT / "bench_data" / "h100")


def _column(values: list[Any]) -> Any:
    return np.array(values, object if isinstance(values[0], str) else None)


def _words(options: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in options.items()}


TARGETS = [KernelLookups]
