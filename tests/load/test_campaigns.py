"""Sources of one GPU against each other: whose kernels are the same, and what is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastroof.load import MeasuredTable
from fastroof.load.compare import campaign_family, compare_sources, same_kernels

SIZES = [(m, n, k) for m in 2 ** np.arange(14) for n in (64, 512, 4096) for k in (64, 512, 4096, 8192)]


def table(
    factor: Any = 1.0, dtype: str = "fp8", kernel: str = "deepgemm", engine: str = "vllm", seed: int = 0
) -> MeasuredTable:
    """GEMMs of one family, times a factor and 5 % of noise."""
    m, n, k = np.array(SIZES).T
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.05, len(m)))
    columns: dict[str, Any] = {
        "dtype": np.full(len(m), dtype, object),
        "m": m,
        "n": n,
        "k": k,
        "latency_us": (2.0 + (m * k + n * k) / 1e6 + m * n * k / 1e8) * factor * noise,
        "kernel": np.full(len(m), kernel, object),
    }
    return MeasuredTable("gemm", columns, f"{engine}-{seed}", provenance={"framework": engine})


def kinds(*tables: MeasuredTable) -> dict[tuple[str, str], float]:
    return {(f.kernels, f.length): f.scale for f in compare_sources("gemm", "h100", tables)}


def test_kernels_of_one_library_are_recognised_by_name() -> None:
    sglang = table(1.3, kernel="sglang_deepgemm_gemm_nt_f8f8bf16", engine="sglang", seed=1)
    found = kinds(table(kernel="DeepGemmFp8BlockScaledMMKernel"), sglang)
    assert set(found) == {
        (kernels, length) for kernels in ("same", "any", "sglang+vllm") for length in ("short", "long")
    }
    # 80 % of ratios 1.3 times noise lie within exp(0.26 +- about 0.06)
    assert all(0.2 < scale < 0.3 for scale in found.values())
    other = table(1.3, kernel="cutlass_gemm", engine="sglang", seed=1)
    assert {kernels for kernels, _ in kinds(table(kernel="deepgemm"), other)} == {"any", "sglang+vllm"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("vllm FA3 paged, page 16", "vllm_flash_attn_fa3"),
        ("vllm fused_experts (Triton), fp8; router not inside", "vllm_fp8moe_triton_tritonexperts"),
        ("vllm cutlass_scaled_mm, scales per tensor", "CutlassFP8ScaledMMLinearKernel"),
        ("flashinfer paged decode, CUDA cores, page 16", "flashinfer"),
    ],
)
def test_kernels_bench_names_kernels_of_known_libraries(ours: str, theirs: str) -> None:
    assert {kernels for kernels, _ in kinds(table(kernel=ours), table(kernel=theirs, seed=1))} == {
        "same",
        "any",
    }


def test_bf16_gemms_are_torchs_whatever_they_are_called() -> None:
    a = table(dtype="bf16", kernel="torch.nn.functional.linear")
    b = table(dtype="bf16", kernel="torch_flow", engine="trtllm", seed=2)
    ((family, points),) = same_kernels(a, b)
    assert family == "bf16"
    assert len(points["same"].a_us) == len(points["any"].a_us) == len(SIZES)


def test_points_of_two_kernels_are_paired_with_their_own_alone() -> None:
    a = table(kernel="deepgemm")
    half = np.arange(len(SIZES)) < 20
    b = table(kernel="deepgemm", engine="sglang", seed=3)
    b.columns["kernel"][~half] = "triton_mm"
    ((_, points),) = same_kernels(a, b)
    assert (len(points["same"].a_us), len(points["any"].a_us)) == (20, len(SIZES))


def test_a_copy_does_not_count_as_a_second_campaign() -> None:
    a = table()
    copy = MeasuredTable("gemm", dict(a.columns), "copy", provenance={"framework": "sglang"})
    assert kinds(a, copy) == {}


def test_unsound_families_are_not_compared() -> None:
    launched = table(1.0, engine="sglang", seed=4)
    launched.columns["latency_us"][:] = np.maximum(launched.columns["latency_us"], 80.0)
    assert kinds(table(), launched) == {}
    assert kinds(table(), table(1.0, engine="sglang", seed=4)) != {}


@pytest.mark.parametrize(
    ("operator", "words", "family"),
    [
        ("allreduce", {"dtype": "bf16", "mode": "graph", "num_gpus": 8}, "bf16 graph"),
        ("attention_decode", {"kv_dtype": "fp8"}, "fp8"),
        ("moe", {"dtype": "fp8_block", "distribution": "power_law_1.2"}, "fp8_block"),
    ],
)
def test_families_are_dtypes_and_modes(operator: str, words: dict[str, str], family: str) -> None:
    assert campaign_family(operator, words) == family
