"""fp8 with a scale a block: against loops over blocks, and how far a GEMM of such numbers is off."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers.device import CPU_DEVICE  # noqa: E402
from kernels_bench.providers.random_inputs import SCALE_BLOCK, quantise_blocks, spread_scales  # noqa: E402
from kernels_bench.providers.torch_gemm import prepare_gemm  # noqa: E402
from kernels_bench.run.check import check_result  # noqa: E402

SHAPES = [(128, 256), (256, 128), (130, 200), (1, 128), (5, 640)]


def dequantised(numbers, scale, block_rows):
    return numbers.double() * spread_scales(scale, block_rows, *numbers.shape[-2:]).double()


@pytest.mark.parametrize("block_rows", [1, SCALE_BLOCK])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_block_has_the_scale_of_its_largest(shape, block_rows):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values[0, :3] *= 100
    numbers, scale = quantise_blocks(values, block_rows)
    assert numbers.shape == shape
    assert (numbers.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    rows, columns = shape
    assert scale.shape == (-(-rows // block_rows), -(-columns // SCALE_BLOCK))
    for i, j in np.ndindex(*scale.shape):
        block = values[i * block_rows : (i + 1) * block_rows, j * SCALE_BLOCK : (j + 1) * SCALE_BLOCK]
        assert float(scale[i, j]) == pytest.approx(float(block.abs().max()) / 448)
    # e4m3 rounds by 2**-4 at most; the quotient is rounded to bf16 before, and its scale too
    error = (dequantised(numbers, scale, block_rows) - values.double()).abs()
    assert (error <= values.double().abs() * 2**-3.8 + 2e-3 * scale.max()).all()


def test_several_matrices_at_once_are_each_by_itself():
    values = torch.randn(3, 256, 384).to(torch.bfloat16)
    numbers, scale = quantise_blocks(values, SCALE_BLOCK)
    for i in range(3):
        one, its_scale = quantise_blocks(values[i], SCALE_BLOCK)
        assert (numbers[i].view(torch.uint8) == one.view(torch.uint8)).all()
        assert (scale[i] == its_scale).all()


def test_zeros_stay_zeros():
    numbers, scale = quantise_blocks(torch.zeros(128, 128, dtype=torch.bfloat16), SCALE_BLOCK)
    assert not numbers.float().any()
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


POINT = Point("gemm", {"dtype": "fp8_block", "m": 33, "n": 256, "k": 384})


def block_gemm(out, x, weight, x_scale, weight_scale):
    """As a kernel: products of a block in float32, scaled as they are added up."""
    total = torch.zeros(out.shape)
    for j in range(x_scale.shape[1]):
        part = slice(j * SCALE_BLOCK, (j + 1) * SCALE_BLOCK)
        by_column = weight_scale[:, j].repeat_interleave(SCALE_BLOCK)
        total += x_scale[:, j : j + 1] * (x[:, part].float() @ weight[:, part].float().T) * by_column
    out.copy_(total)


def test_a_block_scaled_gemm_matches_its_reference():
    prepared = prepare_gemm(POINT, CPU_DEVICE, 0, 10**9, "blocks", block_gemm)
    check = check_result(POINT, prepared)
    assert check.passed
    assert check.error < 4e-3, "only the result is rounded: the reference takes the quantised inputs"


@pytest.mark.parametrize("wrong", ["rows", "columns", "weight", "none"])
def test_scales_in_a_wrong_place_fail_the_check(wrong):
    def gemm(out, x, weight, x_scale, weight_scale):
        if wrong == "rows":
            x_scale = x_scale.roll(1, dims=0)
        elif wrong == "columns":
            x_scale = x_scale.roll(1, dims=1)
        elif wrong == "weight":
            weight_scale = weight_scale.roll(1, dims=1)
        else:
            x_scale = torch.ones_like(x_scale)
        block_gemm(out, x, weight, x_scale, weight_scale)

    prepared = prepare_gemm(POINT, CPU_DEVICE, 0, 10**9, "wrong", gemm)
    assert not check_result(POINT, prepared).passed
