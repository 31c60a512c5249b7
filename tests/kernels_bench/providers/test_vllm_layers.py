"""vLLM's small layers, compiled: Inductor on the CPU, with stand-ins for vLLM's classes.

They compute what vLLM 0.26.0 and 0.33.0 have in ``forward_native``. ``test_experts.py`` runs vLLM's own.
"""

import contextlib
import shutil
import sys
import types
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers import vllm_provider  # noqa: E402
from kernels_bench.providers.device import Device  # noqa: E402
from kernels_bench.providers.vllm_layers import LAYERS  # noqa: E402
from kernels_bench.providers.vllm_provider import VllmProvider  # noqa: E402
from kernels_bench.run.check import check_result  # noqa: E402

HOST = Device("cpu", 20_000, (9, 0))
KINDS = {
    "rmsnorm_residual": "RMSNorm",
    "rope": "RotaryEmbedding",
    "silu_and_mul": "SiluAndMul",
    "fp8_quantise": "QuantFP8",
}


class Layer(torch.nn.Module):
    enabled = staticmethod(lambda: False)


class RMSNorm(Layer):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward_native(self, x, residual):
        total = x.float() + residual.float()
        normed = total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.data, total.to(x.dtype)


class RotaryEmbedding(Layer):
    def __init__(self, head_size, rotary_dim, positions, base, is_neox, dtype):
        super().__init__()
        assert (head_size, is_neox, base) == (rotary_dim, True, 10000.0)
        self.head_size = head_size
        self.register_buffer("cos_sin_cache", torch.zeros(positions, rotary_dim, dtype=dtype))

    def forward_native(self, positions, query, key):
        cos, sin = self.cos_sin_cache.index_select(0, positions)[:, None].chunk(2, dim=-1)
        turned = []
        for x in (query, key):
            first, second = x.view(len(positions), -1, self.head_size).chunk(2, dim=-1)
            halves = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            turned.append(halves.reshape(x.shape))
        return tuple(turned)


class SiluAndMul(Layer):
    def forward_native(self, x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class QuantFP8(Layer):
    def __init__(self, static, group_shape):
        super().__init__()
        assert static
        self.group_shape = group_shape

    def forward_native(self, x, scale):
        return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's modules as far as a small layer goes; what it returns are the settings that vLLM would make."""
    compilation = SimpleNamespace(
        backend="inductor",
        mode=SimpleNamespace(name="VLLM_COMPILE"),
        inductor_compile_config={"enable_auto_functionalized_v2": False},
    )
    made = {
        "vllm.config": {
            "VllmConfig": lambda quant_config: SimpleNamespace(
                compilation_config=compilation,
                parallel_config=SimpleNamespace(),
                kernel_config=SimpleNamespace(
                    ir_op_priority=SimpleNamespace(set_priority=contextlib.nullcontext)
                ),
            ),
            "set_current_vllm_config": contextlib.nullcontext,
        },
        "vllm.ir": {"enable_torch_wrap": contextlib.nullcontext},
        "vllm.distributed.parallel_state": {"model_parallel_is_initialized": lambda: True},
        f"{LAYERS}.layernorm": {"RMSNorm": RMSNorm},
        f"{LAYERS}.rotary_embedding": {"RotaryEmbedding": RotaryEmbedding},
        f"{LAYERS}.activation": {"SiluAndMul": SiluAndMul},
        f"{LAYERS}.quantization.input_quant_fp8": {"QuantFP8": QuantFP8},
        f"{LAYERS}.quantization.utils.quant_utils": {"GroupShape": SimpleNamespace(PER_TENSOR="tensor")},
    }
    for name, parts in made.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(parts)
    monkeypatch.setattr(vllm_provider, "vllm_version", lambda: "0.33.0")
    return compilation


def small(kind, m=9, width=512):
    return Point("elementwise", {"kind": kind, "m": m, "width": width, "io_bytes": 1})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_compiled_once_a_width_and_gives_the_reference(kind, vllm):
    torch._dynamo.reset()
    provider, stats = VllmProvider(HOST), torch._dynamo.utils.counters["stats"]
    assert provider.refuses(small(kind)) is None
    before = stats["unique_graphs"]
    for width in (512, 768):
        for m in (9, 1, 40):
            prepared = provider.prepare(small(kind, m, width), 2, 10**9)
            assert prepared.num_sets > 1 or m == 40
            assert prepared.kernel == f"vllm {KINDS[kind]}, inductor of torch {torch.__version__}"
            assert provider.kernel(small(kind)) == prepared.kernel
            assert check_result(small(kind, m, width), prepared).passed
    assert stats["unique_graphs"] - before == 2
    # beyond the steps that vLLM compiles for, another
    provider.prepare(small(kind, 8193, 512), 2, 10**9).run(0)
    assert stats["unique_graphs"] - before == 3


def test_where_vllm_compiles_nothing_custom_ops_run(vllm):
    vllm.mode.name = "NONE"
    provider = VllmProvider(HOST)
    provider._reasons = {"ops": "no library"}
    assert provider.kernel(small("rope")) == "vllm rotary_embedding"
    assert provider.refuses(small("rope")) == "no library"


def test_what_inductor_cannot_compile_is_refused_and_kv_is_written_by_the_op(vllm, monkeypatch):
    def broken(*_, **options):
        assert options["options"]["enable_auto_functionalized_v2"] is False
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch, "compile", broken)
    provider = VllmProvider(HOST)
    provider._reasons = {"ops": ""}
    assert provider.refuses(small("silu_and_mul")).endswith("do not run here: RuntimeError: no g++")
    assert provider.refuses(small("kv_write")) is None
    assert provider.kernel(small("kv_write")) == "vllm reshape_and_cache_flash"
    monkeypatch.setattr(RMSNorm, "enabled", staticmethod(lambda: True))
    assert "keep RMSNorm a custom op" in provider.refuses(small("rmsnorm_residual"))


def test_a_named_card_lists_what_vllm_compiles_by_default(vllm, monkeypatch):
    named = VllmProvider(Device("cuda", 1, (9, 0), is_here=False))
    named._reasons = {"ops": "no library"}
    assert named.refuses(small("silu_and_mul")) is None
    assert named.kernel(small("silu_and_mul")).startswith("vllm SiluAndMul, inductor of torch")
    assert named.refuses(small("kv_write")) == "no library"
    monkeypatch.setattr(vllm_provider, "vllm_version", lambda: "")
    assert named.refuses(small("silu_and_mul")) == "no library"
