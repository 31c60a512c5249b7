"""What tables answer: lookups of every operator, by every method, with errors; hold-out; measuring grids."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Final

import numpy as np

from tests.frozen import product
from tests.frozen.answers import Answers

METHODS: Final = ("roofline", "linear_mfu", "nearest", "floor")
Sizes = dict[str, Any]


def _gemms() -> list[tuple[str, Sizes]]:
    m = np.array([1, 3, 64, 100, 1000, 4096, 200_000])
    shapes = (
        (6144, 4096),
        (4096, 14_336),
        (128, 32),
        (5000, 3000),
        (152_064, 8192),
        (1, 1),
        (300_000, 40_000),
    )
    dtypes = ("bf16", "fp8", "fp8_block")
    n_each, k_each = np.array(shapes).T
    return [
        *(
            (f"{dtype}, n {n}, k {k}", {"m": m, "n": n, "k": k, "dtype": dtype})
            for dtype, (n, k) in itertools.product(dtypes, shapes)
        ),
        *((f"{dtype}, many shapes", {"m": 77, "n": n_each, "k": k_each, "dtype": dtype}) for dtype in dtypes),
    ]


# measured and not: the last three are borrowed from others
HEADS: Final = (
    (32, 8, 128),
    (8, 1, 128),
    (64, 8, 64),
    (40, 40, 128),
    (16, 2, 256),
    (22, 2, 128),
    (28, 4, 128),
    (7, 7, 128),
)


def _decodes() -> list[tuple[str, Sizes]]:
    batches, lengths = np.meshgrid([1, 3, 64, 200, 3000], [1, 100, 4096, 20_000, 1_000_000], indexing="ij")
    q_heads, kv_heads, head_dim = np.array([HEADS[i] for i in (0, 3, 1, 0, 5)]).T
    mixed = {
        "num_q_heads": q_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "batch_size": 9,
        "kv_len": np.array([100, 200, 300, 400, 500]),
    }
    return [("many heads", mixed)] + [
        (f"{kv}, heads {nh}-{nkv}-{dim}",
         {"num_q_heads": nh, "num_kv_heads": nkv, "head_dim": dim, "kv_dtype": kv,
          "batch_size": batches.ravel(), "kv_len": lengths.ravel()})
        for kv, (nh, nkv, dim) in itertools.product(("bf16", "fp8"), HEADS)
    ]  # fmt: skip


def _prefills() -> list[tuple[str, Sizes]]:
    queries = np.array([1, 16, 100, 2048, 8192, 8192, 500, 1, 100_000])
    lengths = np.array([1, 16, 100, 2048, 8192, 20_000, 4096, 300, 100_000])
    batches = np.array([1, 7, 1, 1, 1, 2, 3, 64, 1])
    return [
        (f"{kv}, heads {nh}-{nkv}-{dim}",
         {"num_q_heads": nh, "num_kv_heads": nkv, "head_dim": dim, "kv_dtype": kv,
          "q_len": queries, "kv_len": lengths, "batch_size": batches})
        for kv, (nh, nkv, dim) in itertools.product(("bf16", "fp8"), HEADS)
    ]  # fmt: skip


def _allreduces() -> list[tuple[str, Sizes]]:
    sizes = np.array([1, 256, 1000, 65_536, 1_000_000, 2**28, 2**33])
    return [
        (
            f"{dtype}, {gpus} GPUs, {mode}",
            {"num_gpus": gpus, "message_bytes": sizes, "dtype": dtype, "mode": mode},
        )
        for dtype, gpus, mode in itertools.product(("bf16", "fp16"), (2, 4, 8), ("graph", "eager", "nccl"))
    ]


# hidden, intermediate, topk, num_experts, moe_tp, moe_ep
EXPERTS: Final = (
    (2048, 768, 8, 128, 1, 1), (2048, 768, 8, 128, 2, 4), (4096, 14_336, 2, 8, 4, 1),
    (7168, 2048, 8, 256, 1, 8), (1000, 768, 8, 128, 1, 1),
)  # fmt: skip


def _moes() -> list[tuple[str, Sizes]]:
    tokens = np.array([1, 5, 64, 100, 1000, 16_384, 1_000_000])
    names = ("hidden", "intermediate", "topk", "num_experts", "moe_tp", "moe_ep")
    return [
        (f"{dtype}, {distribution}, {'-'.join(map(str, experts))}",
         {**dict(zip(names, experts, strict=True)), "num_tokens": tokens, "dtype": dtype,
          "distribution": distribution})
        for dtype, distribution, experts in itertools.product(
            ("bf16", "fp8", "fp8_block"), ("balanced", "power_law_1.01"), EXPERTS
        )
    ]  # fmt: skip


QUERIES: Final = {
    "gemm": _gemms,
    "attention_decode": _decodes,
    "attention_prefill": _prefills,
    "allreduce": _allreduces,
    "moe": _moes,
}


def lookups(operator: str) -> Answers:
    """Look one operator up by every method, at measured points, between them and outside."""
    # work of experts goes through powers of their distribution
    answers = Answers(is_exact=operator != "moe")
    tables = product.h100_tables()
    for (named, sizes), method in itertools.product(QUERIES[operator](), METHODS):
        case = f"{operator}, {named}, {method}"
        try:
            found = tables.lookup(operator, method=method, **sizes)
        except product.FastroofError as error:
            answers.text(case, "error", type(error).__name__)
            continue
        for quantity in ("latency_us", "mfu", "origin"):
            answers.numbers(case, quantity, _arguments(sizes), getattr(found, quantity))
    return answers


def lookup_errors() -> Answers:
    """Standard errors of lookups: they go through NumPy's logarithms and square roots."""
    answers = Answers(is_exact=False)
    tables = product.h100_tables()
    for operator, wanted in QUERIES.items():
        for named, sizes in wanted()[::3]:
            try:
                found = tables.lookup(operator, with_error=True, **sizes)
            except product.FastroofError:
                continue
            answers.numbers(f"{operator}, {named}", "relative_error", _arguments(sizes), found.relative_error)
    return answers


def _arguments(sizes: Sizes) -> list[str]:
    """The sizes that differ from point to point, in words."""
    columns = {name: value for name, value in sizes.items() if isinstance(value, np.ndarray)}
    points = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [
        " ".join(f"{name} {value}" for name, value in zip(columns, point, strict=True)) for point in points
    ]


def holdout() -> Answers:
    """Errors of every method on thinned tables: percentiles, of NumPy."""
    answers = Answers(is_exact=False)
    for row in product.h100_tables().holdout():
        fields = row._asdict()
        words = [str(value) for value in fields.values() if isinstance(value, str)]
        numbers = {name: value for name, value in fields.items() if not isinstance(value, str)}
        answers.record(", ".join(words), numbers)
    return answers


def grids() -> Answers:
    """The points that packaged measuring grids hold, by group."""
    answers = Answers()
    for name in product.grid_names():
        for group in product.load_grid(name).groups:
            case = f"{name}, {group.name}"
            keys = "\n".join(point.key for point in group.candidates)
            answers.text(
                case, "points", hashlib.sha256(keys.encode()).hexdigest()[:16], len(group.candidates)
            )
            answers.number(case, "beyond limits", group.num_beyond_limits)
    return answers
