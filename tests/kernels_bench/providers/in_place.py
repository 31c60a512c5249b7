"""Plain torch that writes where vLLM's ops write."""

from kernels_bench.providers.small_ops import SmallOps


def copy(outputs, results):
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


class InPlaceOps(SmallOps):
    def rmsnorm_residual(self, x, residual, weight):
        copy((x, residual), super().rmsnorm_residual(x, residual, weight))

    def rope(self, positions, q, k, head_dim, cos_sin):
        copy((q, k), super().rope(positions, q, k, head_dim, cos_sin))

    def silu_and_mul(self, out, x):
        copy((out,), super().silu_and_mul(out, x))

    def fp8_quantise(self, out, x, scale):
        copy((out,), super().fp8_quantise(out, x, scale))
