"""vLLM's own layers on a stand-in H100: vLLM builds and chooses, plain torch computes what the kernels would.

Run in a process of its own, since vLLM keeps the platform that it found first. Prints a JSON list of the
kernel, the error against float64 and its bound, of each point.
"""

import importlib
import json
import sys
import types

import torch

from kernels_bench.bundle.stand_ins import install
from kernels_bench.protocol import Point
from kernels_bench.providers.device import Device
from kernels_bench.providers.random_inputs import spread_scales
from kernels_bench.run.check import check_result
from tests.kernels_bench.providers.in_place import InPlaceOps

LIBRARIES = (
    "vllm_flash_attn._vllm_fa3_C", "vllm_flash_attn._vllm_fa2_C", "_C_stable_libtorch", "_C", "_moe_C",
    "_moe_C_stable_libtorch", "_flashmla_C",
)  # fmt: skip
E4M3_MAX = 448.0


def quantise_rows(out, x, scale, upper=None):
    scale.copy_((x.float().abs().amax(dim=-1, keepdim=True) / E4M3_MAX).view(scale.shape))
    out.copy_((x.float() / scale.view(-1, 1)).to(out.dtype))


def quantise(out, x, scale, group_shape=None):
    out.copy_((x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(out.dtype))


def quantise_groups(x, q, scales, size, eps, low, high, *flags):
    parts = x.float().unflatten(-1, (-1, size))
    scale = parts.abs().amax(-1).clamp_min(eps) / high
    scales.copy_(scale)
    q.copy_((parts / scale[..., None]).flatten(-2).to(q.dtype))


def scaled_mm(out, a, b, a_scale, b_scale, bias=None):
    if b_scale.ndim == 2 and b_scale.shape[0] > 1:
        b_scale = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: b.shape[0], : b.shape[1]]
        a_scale = a_scale.repeat_interleave(128, 1)[:, : a.shape[1]]
    out.copy_((a.float() * a_scale) @ (b.float() * b_scale))


def silu_and_mul(out, x):
    InPlaceOps().silu_and_mul(out, x)


def add_norm(x, residual, weight, eps):
    InPlaceOps().rmsnorm_residual(x, residual, weight)


def always(capability):
    return True


OPS = {
    "cutlass_scaled_mm_supports_fp8(int cap) -> bool": always,
    "cutlass_scaled_mm_supports_block_fp8(int cap) -> bool": always,
    "cutlass_group_gemm_supported(int cap) -> bool": always,
    "dynamic_per_token_scaled_fp8_quant(Tensor(a!) o, Tensor x, Tensor(b!) s, Tensor? u) -> ()": (
        quantise_rows
    ),
    "static_scaled_fp8_quant(Tensor(a!) o, Tensor x, Tensor s, int[]? group_shape=None) -> ()": quantise,
    "cutlass_scaled_mm(Tensor(a!) o, Tensor a, Tensor b, Tensor s, Tensor t, Tensor? bias) -> ()": scaled_mm,
    "silu_and_mul(Tensor(a!) o, Tensor x) -> ()": silu_and_mul,
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps) -> ()": add_norm,
    "per_token_group_fp8_quant(Tensor x, Tensor(a!) q, Tensor(b!) s, int n, float eps, float low, "
    "float high, bool ue8m0, bool transposed, bool aligned) -> ()": quantise_groups,
}


def become_h100():
    """Register the ops that vLLM's libraries would, and make an H100 its platform."""
    install()
    torch.accelerator.empty_cache = lambda: None
    for name in LIBRARIES:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in OPS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    platforms = importlib.import_module("vllm.platforms")
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability

    class H100(importlib.import_module("vllm.platforms.cuda").CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return capability(9, 0)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, ids):
            return True

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

        @classmethod
        def check_and_update_config(cls, config):
            return None

    platforms._current_platform = H100()
    return library


def experts(self, *, output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map, a1q_scale, **rest):
    """Compute what the experts' kernels do, with inputs as vLLM's layer hands them over."""
    is_flashinfer = "FlashInfer" in type(self).__name__
    x, gate_up, down = hidden_states.float(), w1.float(), w2.float()
    if w1.element_size() == 1 and self.w1_scale.ndim == 3:
        gate_up = gate_up * spread_scales(self.w1_scale, 128, *w1.shape[1:])
        down = down * spread_scales(self.w2_scale, 128, *w2.shape[1:])
        if hidden_states.element_size() == 1:
            x = x * a1q_scale.repeat_interleave(128, 1)
    elif w1.element_size() == 1:
        gate_up, down = gate_up * self.w1_scale.view(-1, 1, 1), down * self.w2_scale.view(-1, 1, 1)
        x = x * self.a1_scale.flatten()[0]
    output.zero_()
    for token, slot in torch.ones(topk_ids.shape).nonzero().tolist():
        expert = int(topk_ids[token, slot])
        if is_flashinfer:  # it has no map: the first experts are here
            expert = expert if expert < len(w1) else -1
        elif expert_map is not None:
            expert = int(expert_map[expert])
        if expert >= 0:
            halves = (gate_up[expert] @ x[token]).chunk(2)
            gate, up = halves[::-1] if is_flashinfer else halves
            middle = torch.nn.functional.silu(gate) * up
            output[token] += (topk_weights[token, slot] * (down[expert] @ middle)).to(output.dtype)


def main():
    library = become_h100()
    assert library
    from kernels_bench.providers.vllm_provider import VllmProvider

    base = "vllm.model_executor.layers.fused_moe.experts"
    for module, name in (("triton_moe", "TritonExperts"), ("flashinfer_cutlass_moe", "FlashInferExperts")):
        getattr(importlib.import_module(f"{base}.{module}"), name).apply = experts
    provider, found = VllmProvider(Device("cpu", 400_000, (9, 0))), []
    for operator, values in json.load(sys.stdin):
        point = Point(operator, values)
        if "kv_dtype" in values:
            found.append([provider._other_attention(point), *provider._attention.popitem()[1]])
            continue
        prepared = provider.prepare(point, 2, 10**9)
        check = check_result(point, prepared)
        found.append([prepared.kernel, check.error, check.bound])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
