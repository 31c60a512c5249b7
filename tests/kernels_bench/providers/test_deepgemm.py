"""DeepGEMM's call with a stand-in, which checks what it is given as flashinfer's port of it does."""

import types

import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers.deepgemm_provider import DeepgemmProvider, tma_aligned  # noqa: E402
from kernels_bench.providers.device import Device  # noqa: E402
from kernels_bench.run.check import check_result  # noqa: E402
from kernels_bench.run.request import BY_NAME_ONLY, known_providers  # noqa: E402

HOST = Device("cpu", 20_000, (9, 0))


def check_layout(scale, rows, k):
    """As ``check_sf_layout`` in flashinfer 0.7.2.post1's deep_gemm.py, which imports only with CUDA."""
    assert scale.dtype == torch.float32
    assert scale.shape == (rows, k // 128)
    assert scale.stride() == (1, -(-rows // 4) * 4)


def fp8_gemm_nt(left, right, out, *, disable_ue8m0_cast):
    assert disable_ue8m0_cast
    (x, x_scale), (weight, weight_scale) = left, right
    check_layout(x_scale, *x.shape)
    assert weight_scale.is_contiguous()
    assert weight_scale.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
    a = x.float() * x_scale.repeat_interleave(128, 1)
    b = weight.float() * weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    out.copy_(a @ b.T)


@pytest.mark.parametrize("m", [1, 17, 64])
def test_its_call_gives_the_reference(m):
    provider = DeepgemmProvider(HOST, types.SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    point = Point("gemm", {"dtype": "fp8_block", "m": m, "n": 256, "k": 384})
    assert provider.refuses(point) is None
    prepared = provider.prepare(point, 0, 10**9)
    assert check_result(point, prepared).passed
    assert "deep_gemm" in prepared.kernel


def test_aligned_scales_are_the_same_numbers():
    scale = torch.randn(6, 5)
    assert (tma_aligned(scale) == scale).all()
    check_layout(tma_aligned(scale), 6, 640)


def test_it_runs_only_by_name_and_for_blocks():
    provider = DeepgemmProvider(HOST)
    for odd in ({"dtype": "fp8"}, {"n": 192}, {"k": 64}):
        values = {"dtype": "fp8_block", "m": 8, "n": 256, "k": 256, **odd}
        assert provider.refuses(Point("gemm", values))
    assert "does not measure moe" in provider.refuses(Point("moe", {}))
    names = [provider.name for provider in known_providers()]
    assert names[-2:] == list(BY_NAME_ONLY) == ["deepgemm", "cpu"]
    assert provider.availability().works or provider.availability().reason
