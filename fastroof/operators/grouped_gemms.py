"""InferSim's grouped GEMMs as rows of routed experts: the projections of one layer, timed apart."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.arrays import Array
from fastroof.columns import Column
from fastroof.errors import TableError
from fastroof.operators.foreign_rows import Heads, Raw, TreeFile, size_columns

__all__ = ["GROUPED_GEMM_FILES"]

_LAYER: Final = ("num_experts", "num_gpus", "num_local_experts", "topk", "hidden_size", "intermediate_size")


def _tree_rows(read: Raw, tokens: str) -> dict[str, Array]:
    """Rows by the tokens of all GPUs that share the experts; both projections are one latency."""
    experts, num_gpus, local = (read[name] for name in _LAYER[:3])
    moe_tp = num_gpus * local // experts
    wrong = (experts % local != 0) | (moe_tp * experts != num_gpus * local)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TableError(
            f"row {row + 1}: {experts[row]} experts do not spread evenly over {num_gpus[row]} GPUs of "
            f"{local[row]}"
        )
    moe_ep = experts // local
    rows = len(experts)
    return {
        "dtype": np.array(["fp8"] * rows, object),
        "hidden": read["hidden_size"],
        "intermediate": read["intermediate_size"] * moe_tp,
        "topk": read["topk"],
        "num_experts": experts,
        "moe_tp": moe_tp,
        "moe_ep": moe_ep,
        "distribution": np.array(["balanced"] * rows, object),
        "num_tokens": read[tokens] * moe_ep,
        "latency_us": read["up_proj_us"] + read["down_proj_us"],
    }


def _decode(read: Raw, _: Heads) -> dict[str, Array]:
    return _tree_rows(read, "batch_size_per_gpu")


def _prefill(read: Raw, _: Heads) -> dict[str, Array]:
    return _tree_rows(read, "seq_len_per_gpu")


_TIMES: Final = ("up_proj_us", "up_mfu", "down_proj_us", "down_mfu")
_TIMED: Final = tuple(
    Column(name, "float", "us" if name.endswith("us") else "", "of one projection", 0) for name in _TIMES
)


def _file(phase: str, tokens: str) -> TreeFile:
    return TreeFile(
        "grouped_gemm",
        phase,
        (*size_columns(*_LAYER, tokens), *_TIMED[::2]),
        _TIMED[1::2],
        (*_LAYER, tokens, "tokens_per_expert", *_TIMES),
        _decode if phase == "decode" else _prefill,
        computes_in_any_dtype=True,
        named_by_heads=False,
        draws_tokens=True,
    )


GROUPED_GEMM_FILES: Final = (_file("decode", "batch_size_per_gpu"), _file("prefill", "seq_len_per_gpu"))
"""Masked kernels of few tokens a GPU, contiguous ones of many: together one curve a layer."""
