"""AMD's GPUs with stand-ins: calls bind to aiter's signatures, inputs rotate beyond the Infinity Cache."""

import math
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")

from fastroof.config.gpu import load_gpu  # noqa: E402
from kernels_bench.commands.providers import _measured  # noqa: E402
from kernels_bench.grid.estimate import estimate_all  # noqa: E402
from kernels_bench.protocol import Availability, Point  # noqa: E402
from kernels_bench.providers import all_providers, device  # noqa: E402
from kernels_bench.providers.aiter_provider import AiterProvider  # noqa: E402
from kernels_bench.providers.device import Device, cuda_availability, cuda_device, named_device  # noqa: E402
from kernels_bench.providers.random_inputs import spread_scales  # noqa: E402
from kernels_bench.providers.torch_provider import TorchProvider  # noqa: E402
from kernels_bench.run.check import check_result  # noqa: E402

MI300X, MI355X = (Device("cpu", 20_000, (9, 4), gfx=gfx) for gfx in ("gfx942", "gfx950"))
HEADS = {"kv_dtype": "bf16", "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 64, "window": 0}
SEEN: set = set()
attend = torch.nn.functional.scaled_dot_product_attention


class Aiter:
    """Functions of amd-aiter 0.1.7.post2, by its signatures, in plain torch."""

    __version__ = "0.1.7.post2"

    def gemm_a8w8_CK(self, XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, splitK=None):
        assert x_scale.shape == (len(XQ), 1)
        assert w_scale.shape == (len(WQ), 1)
        assert bias is None
        SEEN.add(XQ.dtype)
        return ((XQ.float() * x_scale) @ (WQ.float() * w_scale).t()).to(dtype)

    def gemm_a8w8_blockscale(self, XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, isBpreshuffled=False):
        SEEN.add(XQ.dtype)
        x = XQ.float() * spread_scales(x_scale, 1, *XQ.shape)
        return (x @ (WQ.float() * spread_scales(w_scale, 128, *WQ.shape)).t()).to(dtype)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0,
        softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), bias=None,
        alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False,
        how_v3_bf16_cvt=1, block_table=None, out=None,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        for start, end in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False):
            parts = (x[start:end].transpose(0, 1)[None].float() for x in (q, k, v))
            result = attend(*parts, is_causal=causal, enable_gqa=True, scale=softmax_scale)
            out[start:end] = result[0].transpose(0, 1)

    def paged_attention_v1(
        self, out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens,
        context_lens, max_context_len, alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap,
        k_scale, v_scale, fp8_out_scale=None, partition_size=256, mtp=1, sliding_window=0,
    ):  # fmt: skip
        sequences, heads, width = query.shape
        parts = sequences * heads * math.ceil(max_context_len / partition_size)
        assert workspace_buffer.numel() == parts * width * 2 + 2 * parts * 4
        assert (kv_cache_dtype, kv_cache_layout, logits_soft_cap, mtp) == ("auto", "NHD", 0.0, 1)
        assert cu_query_lens.tolist() == list(range(sequences))
        for s, length in enumerate(context_lens.tolist()):
            pages = block_tables[s].long()
            keys, values = (
                x[pages].flatten(0, 1)[:length].transpose(0, 1)[None].float()
                for x in (key_cache, value_cache)
            )
            out[s] = attend(query[s][None, :, None].float(), keys, values, enable_gqa=True, scale=scale)[
                0, :, 0
            ]


def aiter(device):
    provider = AiterProvider(device)
    provider._aiter = Aiter()
    return provider


POINTS = [
    Point("gemm", {"dtype": "fp8", "m": 17, "n": 48, "k": 64}),
    Point("gemm", {"dtype": "fp8_block", "m": 9, "n": 256, "k": 384}),
    Point("attention_prefill", {**HEADS, "batch_size": 3, "q_len": 40, "kv_len": 40}),
    Point("attention_decode", {**HEADS, "batch_size": 3, "kv_len": 300}),
]


@pytest.mark.parametrize("card", [MI300X, MI355X], ids=lambda card: card.gfx)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.key[:30])
def test_every_call_binds_and_gives_the_reference(point, card):
    provider = aiter(card)
    SEEN.clear()
    assert provider.refuses(point) is None
    prepared = provider.prepare(point, 3, 10**9)
    assert check_result(point, prepared).passed
    assert prepared.kernel == provider.kernel(point)
    assert prepared.kernel.startswith("aiter ")
    fp8 = torch.float8_e4m3fnuz if card is MI300X else torch.float8_e4m3fn
    assert {fp8} >= SEEN


def test_refusals():
    provider = aiter(MI300X)
    decode = {**HEADS, "batch_size": 1, "kv_len": 9}
    refused = {
        "torch's": ("gemm", {"dtype": "bf16", "m": 1, "n": 16, "k": 16}),
        "apart": ("attention_prefill", {**decode, "q_len": 4}),
        "heads of 64": ("attention_decode", {**decode, "head_dim": 32}),
        "fp8 KV": ("attention_decode", {**decode, "kv_dtype": "fp8"}),
        "window": ("attention_decode", {**decode, "window": 8}),
    }
    for words, (operator, values) in refused.items():
        assert words in provider.refuses(Point(operator, values))
    torch_provider = TorchProvider(MI300X)
    assert "prefix" in torch_provider.refuses(Point("attention_prefill", {**decode, "q_len": 4}))
    small = {"kind": "fp8_quantise", "m": 1, "width": 256, "io_bytes": 1}
    assert "NVIDIA" in torch_provider.refuses(Point("elementwise", small))


def test_inputs_of_amds_cards_rotate_beyond_the_infinity_cache():
    for name in ("mi300x", "mi325x", "mi355x"):
        card = named_device(load_gpu(name))
        assert card.rotated_bytes == 5 * 256 * 2**20
        assert not card.is_hopper
    gemm = Point("gemm", {"dtype": "bf16", "m": 64, "n": 4096, "k": 4096})
    assert estimate_all([gemm], load_gpu("mi300x"))[0].device_bytes > 5 * 256 * 2**20


def test_what_an_mi300x_would_measure_is_listed():
    named = named_device(load_gpu("mi300x"))
    answers = {provider.name: provider.availability() for provider in all_providers(named)}
    assert answers["vllm"].reason == answers["flashinfer"].reason == "its kernels are for NVIDIA's GPUs"
    assert "pip install amd-aiter" in answers["aiter"].reason
    assert answers["torch"].works
    usable = [(aiter(named), Availability(True)), (TorchProvider(named), Availability(True))]
    points = [*POINTS, Point("gemm", {"dtype": "bf16", "m": 1, "n": 16, "k": 16})]
    assert [row["kernel"] for row in _measured(points, usable)] == [
        "aiter gemm_a8w8_CK, scales of rows",
        "aiter gemm_a8w8_blockscale",
        "aiter flash_attn_varlen_func",
        "aiter paged_attention_v1, page 16",
        "F.linear (aten::mm, hipBLASLt)",
    ]
    (row,) = _measured(POINTS[3:], usable[1:])
    assert row["kernel"] == "SDPA flash, decode, contiguous KV"


@pytest.fixture
def rocm(monkeypatch):
    """A torch of ROCm, and the properties of its card."""
    card = SimpleNamespace(major=9, minor=4, L2_cache_size=4 * 2**20, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    return card


def test_the_card_here_is_known_by_its_architecture(rocm, monkeypatch):
    assert cuda_device() == Device("cuda", 256 * 2**20, (9, 4), gfx="gfx942")
    assert dict(cuda_availability(has_amd=True).versions)["rocm"] == "7.2"
    assert not cuda_availability().works
    monkeypatch.setitem(sys.modules, "aiter", Aiter())
    assert AiterProvider().availability().versions["aiter"] == "0.1.7.post2"
    rocm.gcnArchName = "gfx90a"
    assert cuda_availability(has_amd=True).reason == (
        "AMD's gfx90a is not measured: its caches are unknown; gfx942, gfx950 are"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "see amd-smi list" in cuda_availability(has_amd=True).reason


def test_aiter_is_not_for_nvidias_cards(monkeypatch):
    monkeypatch.setattr(device, "cuda_device", lambda: Device("cuda", 1, (9, 0)))
    named = named_device(load_gpu("h100"))
    assert AiterProvider(named).availability().reason == "aiter is for AMD's GPUs"
