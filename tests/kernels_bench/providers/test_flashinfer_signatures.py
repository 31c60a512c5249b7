"""Calls into flashinfer: bound to the signatures of the installed one, and computed by a stand-in.

The stand-in reads nothing but what a wrapper is given (offsets, pages, last pages), so that a wrong page
table or a wrong order of arguments gives a wrong result. Where flashinfer can be imported, each call is
also bound to the real method's signature.
"""

import importlib
import importlib.util
import inspect
import os
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")
import torch.nn.functional as functional  # noqa: E402

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers import flashinfer_calls  # noqa: E402
from kernels_bench.providers.attention import Heads  # noqa: E402
from kernels_bench.providers.device import Device  # noqa: E402
from kernels_bench.providers.flashinfer_calls import FlashinferModules, plan_decode, plan_paged_prefill  # noqa: E402
from kernels_bench.providers.flashinfer_provider import FlashinferProvider  # noqa: E402
from kernels_bench.providers.paging import PagedBatch  # noqa: E402
from kernels_bench.providers.random_inputs import spread_scales  # noqa: E402
from kernels_bench.providers.torch_attention import causal_attention  # noqa: E402
from kernels_bench.run.check import check_result, error_bound, relative_error  # noqa: E402

HOST = Device("cpu", 20_000, (9, 0))
HEADS = {"kv_dtype": "bf16", "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "window": 0}


@pytest.fixture(scope="module")
def real():
    """The installed flashinfer, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        package = importlib.import_module("flashinfer")
        for part in ("mla", "gemm", "fused_moe"):
            importlib.import_module(f"flashinfer.{part}")
    except Exception as error:  # whatever it raises here, its signatures cannot be read
        if os.environ.get("CI"):
            raise  # where it was installed for these tests, skipping them would prove nothing
        print(f"flashinfer is not here: {type(error).__name__}: {error}")
        return None
    return package


def attend(q, k, v, out, q_offsets, sequences, window_left):
    """Causal attention of ragged queries over a list of (K, V), back to ``window_left`` tokens before."""
    for s, (keys, values) in enumerate(sequences):
        rows = slice(int(q_offsets[s]), int(q_offsets[s + 1]))
        q_s, k_s, v_s = (x.transpose(0, 1)[None].to(out.dtype) for x in (q[rows], keys, values))
        if window_left < 0:
            out[rows] = causal_attention(q_s, k_s, v_s)[0].transpose(0, 1)
            continue
        before = torch.arange(len(keys) - len(q[rows]), len(keys))[:, None] - torch.arange(len(keys))
        seen = (before >= 0) & (before <= window_left)
        result = functional.scaled_dot_product_attention(q_s, k_s, v_s, attn_mask=seen, enable_gqa=True)
        out[rows] = result[0].transpose(0, 1)


class Wrapper:
    """What flashinfer's wrappers have in common: nothing runs before it is planned."""

    def __init__(self, workspace, *arguments, **options):
        self.bind("__init__", workspace, *arguments, **options)
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        self.options = options
        self.planned = None

    def bind(self, method, *arguments, **options):
        found = getattr(self, "real_class", None)
        if found is not None:
            inspect.signature(inspect.unwrap(getattr(found, method))).bind(self, *arguments, **options)
            # since 0.7 decode's plan hands any keyword on, to where they have names
            if method == "plan" and hasattr(found, "_plan_impl"):
                inspect.signature(inspect.unwrap(found._plan_impl)).bind(self, *arguments, **options)

    def plan(self, *arguments, **options):
        self.bind("plan", *arguments, **options)
        for index in (x for x in arguments if torch.is_tensor(x)):
            assert index.dtype == torch.int32
        self.planned = arguments, options
        if "sm_scale" in options:
            assert options["sm_scale"] == pytest.approx(arguments[-1 if self.width_last else -2] ** -0.5)


class Ragged(Wrapper):
    width_last = True

    def run(self, q, k, v, **options):
        self.bind("run", q, k, v, **options)
        (q_offsets, kv_offsets, nh, nkv, dh), planned = self.planned
        assert (q.shape[1:], k.shape[1:]) == ((nh, dh), (nkv, dh))
        assert planned["causal"]
        assert (planned["q_data_type"], planned["kv_data_type"]) == (q.dtype, k.dtype)
        bounds = list(zip(kv_offsets[:-1].tolist(), kv_offsets[1:].tolist(), strict=True))
        sequences = [(k[a:b], v[a:b]) for a, b in bounds]
        attend(q, k, v, options["out"], q_offsets, sequences, planned["window_left"])


def paged(k, v, page_offsets, pages, last, page_size):
    for s in range(len(last)):
        mine = pages[int(page_offsets[s]) : int(page_offsets[s + 1])].long()
        kv_len = (len(mine) - 1) * page_size + int(last[s])
        yield tuple(x.float()[mine].flatten(0, 1)[:kv_len] for x in (k, v))


class Decode(Wrapper):
    width_last = False

    def run(self, q, kv, **options):
        self.bind("run", q, kv, **options)
        (page_offsets, pages, last, nh, nkv, dh, page_size), planned = self.planned
        assert kv[0].shape[1:] == (page_size, nkv, dh)
        assert kv[0].stride() == kv[1].stride()
        assert (planned["q_data_type"], planned["kv_data_type"]) == (q.dtype, kv[0].dtype)
        assert nh // nkv in flashinfer_calls.CUDA_CORE_GROUPS or self.options["use_tensor_cores"]
        offsets = torch.arange(len(last) + 1)
        sequences = paged(*kv, page_offsets, pages, last, page_size)
        attend(q, *kv, options["out"], offsets, sequences, planned["window_left"])


class PagedPrefill(Wrapper):
    width_last = False

    def run(self, q, kv, **options):
        self.bind("run", q, kv, **options)
        (q_offsets, page_offsets, pages, last, _, _, _, page_size), planned = self.planned
        assert planned["causal"]
        sequences = paged(*kv, page_offsets, pages, last, page_size)
        attend(q, *kv, options["out"], q_offsets, sequences, planned["window_left"])


class Mla(Wrapper):
    width_last = False

    def run(self, q_nope, q_pe, latent, rope, **options):
        self.bind("run", q_nope, q_pe, latent, rope, **options)
        (q_offsets, page_offsets, pages, kv_lens, heads, width, rope_dim, page, causal, scale, *_), _ = (
            self.planned
        )
        assert not causal
        assert q_offsets.tolist() == list(range(len(kv_lens) + 1))
        assert (q_nope.shape[1:], q_pe.shape[1:]) == ((heads, width), (heads, rope_dim))
        for s in range(len(kv_lens)):
            mine = pages[int(page_offsets[s]) : int(page_offsets[s + 1])].long()
            c, r = (x[mine].flatten(0, 1)[: int(kv_lens[s])].float() for x in (latent, rope))
            assert latent.shape[1] == page
            weights = torch.softmax(scale * (q_nope[s].float() @ c.T + q_pe[s].float() @ r.T), dim=-1)
            options["out"][s] = weights @ c


@pytest.fixture(scope="module")
def stand_in(real):
    """A flashinfer that computes with torch."""

    def wrapper(base, owner, name):
        return type(name, (base,), {"real_class": getattr(owner, name) if owner else None})

    def op(name, compute, part=None):
        def call(*arguments, **options):
            if real is not None:
                owner = real if part is None else getattr(real, part)
                inspect.signature(inspect.unwrap(getattr(owner, name))).bind(*arguments, **options)
            compute(*arguments, **options)

        return call

    def block_gemm(a, b, a_scale, b_scale, scale_major_mode, scale_granularity_mnk, out, backend):
        assert (scale_major_mode, scale_granularity_mnk, backend) == ("K", (1, 128, 128), "cutlass")
        (m, k), n = a.shape, b.shape[0]
        assert (a_scale.shape, b_scale.shape) == ((m, k // 128), (n // 128, k // 128))
        assert a_scale.is_contiguous()
        assert b_scale.is_contiguous()
        a_all, b_all = a_scale.repeat_interleave(128, 1), b_scale.repeat_interleave(128, 1)
        out.copy_((a.float() * a_all) @ (b.float() * b_all.repeat_interleave(128, 0)).T)

    def fused_moe(
        x, experts, shares, fc1, fc2, dtype, scales, tp_size, tp_rank, ep_size, ep_rank, output,
        use_deepseek_fp8_block_scale,
    ):  # fmt: skip
        assert (experts.dtype, shares.dtype, output.dtype) == (torch.int32, torch.float32, dtype)
        assert (tp_rank, ep_rank) == (0, 0)
        assert len(scales) == (2 if use_deepseek_fp8_block_scale else 0)
        fc1, fc2 = fc1.float(), fc2.float()
        if scales:
            fc1, fc2 = (
                w * spread_scales(s, 128, *w.shape[1:]) for w, s in zip((fc1, fc2), scales, strict=True)
            )
        output.zero_()
        for slot in range(experts.shape[1]):
            for token in range(len(x)):
                expert = int(experts[token, slot])
                if expert < len(fc1):  # of rank 0, the first
                    up, gate = (fc1[expert] @ x[token].float()).chunk(2)
                    middle = functional.silu(gate) * up
                    output[token] += shares[token, slot] * (fc2[expert] @ middle)

    mla = real.mla if real is not None else None
    return types.SimpleNamespace(
        __version__="stand-in",
        BatchPrefillWithRaggedKVCacheWrapper=wrapper(Ragged, real, "BatchPrefillWithRaggedKVCacheWrapper"),
        BatchPrefillWithPagedKVCacheWrapper=wrapper(
            PagedPrefill, real, "BatchPrefillWithPagedKVCacheWrapper"
        ),
        BatchDecodeWithPagedKVCacheWrapper=wrapper(Decode, real, "BatchDecodeWithPagedKVCacheWrapper"),
        mla=types.SimpleNamespace(
            BatchMLAPagedAttentionWrapper=wrapper(Mla, mla, "BatchMLAPagedAttentionWrapper")
        ),
        gemm=types.SimpleNamespace(gemm_fp8_nt_groupwise=op("gemm_fp8_nt_groupwise", block_gemm, "gemm")),
        fused_moe=types.SimpleNamespace(cutlass_fused_moe=op("cutlass_fused_moe", fused_moe, "fused_moe")),
    )


class Named(FlashinferModules):
    def prefill(self, backend, kv_dtype, head_dim, windowed=False):
        return f"prefill {backend} {kv_dtype}{' window' * windowed}"

    def decode(self, kv_dtype, head_dim, windowed=False):
        return f"decode {kv_dtype}{' window' * windowed}"

    def mla(self, backend, latent, rope_dim):
        return f"mla {backend}"


def provider(stand_in, *missing):
    return FlashinferProvider(HOST, stand_in, Named(lambda name: name not in missing))


LAYER = {
    "dtype": "bf16", "hidden": 256, "intermediate": 256, "topk": 2, "num_experts": 8, "moe_tp": 2,
    "moe_ep": 1, "distribution": "power_law_1.2",
}  # fmt: skip

POINTS = [
    Point("attention_prefill", {**HEADS, "batch_size": 2, "q_len": 9, "kv_len": 30}),
    Point("attention_prefill", {**HEADS, "batch_size": 3, "q_len": 17, "kv_len": 17}),
    Point("attention_decode", {**HEADS, "batch_size": 3, "kv_len": 40}),
    Point("attention_decode", {**HEADS, "num_q_heads": 14, "batch_size": 3, "kv_len": 40}),
    Point("attention_decode", {**HEADS, "kv_dtype": "fp8", "batch_size": 3, "kv_len": 48}),
    Point("attention_decode", {**HEADS, "window": 17, "batch_size": 3, "kv_len": 70}),
    Point("attention_decode", {**HEADS, "window": 17, "batch_size": 3, "kv_len": 9}),
    Point("attention_decode", {**HEADS, "window": 16, "num_q_heads": 14, "batch_size": 3, "kv_len": 48}),
    Point("attention_decode", {**HEADS, "window": 20, "kv_dtype": "fp8", "batch_size": 2, "kv_len": 80}),
    Point("attention_prefill", {**HEADS, "window": 8, "batch_size": 2, "q_len": 9, "kv_len": 90}),
    Point("attention_prefill", {**HEADS, "window": 8, "batch_size": 3, "q_len": 37, "kv_len": 37}),
    Point(
        "mla_decode",
        {
            "kv_dtype": "bf16",
            "num_q_heads": 4,
            "kv_lora_rank": 64,
            "rope_dim": 16,
            "batch_size": 3,
            "kv_len": 130,
        },
    ),
    Point("moe", {**LAYER, "num_tokens": 9}),
    Point("moe", {**LAYER, "num_tokens": 9, "moe_ep": 2}),
    Point("moe", {**LAYER, "num_tokens": 9, "dtype": "fp8_block"}),
]


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch):
    monkeypatch.setattr(flashinfer_calls, "WORKSPACE_BYTES", 1024)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.key[:50])
def test_calls_bind_and_give_the_reference(stand_in, point):
    chosen = provider(stand_in)
    assert chosen.refuses(point) is None
    prepared = chosen.prepare(point, 2, 10**9)
    assert check_result(point, prepared).passed
    if prepared.num_sets > 1:
        prepared.run(1)
        assert relative_error(prepared.result(1), prepared.reference(1)) < 1e-2
    assert "flashinfer" in prepared.kernel


@pytest.mark.parametrize("window", [1, 16, 31])
def test_a_window_leaves_the_pages_before_it_unread(stand_in, window):
    point = Point("attention_decode", {**HEADS, "window": window, "batch_size": 4, "kv_len": 4000})
    prepared = provider(stand_in).prepare(point, 1, 10**9)
    assert f"window {window}" in prepared.kernel
    set_bytes = prepared.rotated_bytes / prepared.num_sets
    held_tokens = 4 * (window // 16 + 2) * 16 + 16  # whole pages, and the one that stands for the others
    assert set_bytes <= (held_tokens * 2 * 2 + 4 * 2 * 8) * 32 * 2
    assert check_result(point, prepared).passed


def test_a_window_of_another_length_fails_the_check(stand_in):
    values = {**HEADS, "window": 12, "batch_size": 2, "q_len": 9, "kv_len": 90}
    point = Point("attention_prefill", values)
    for window, passes in ((11, False), (12, True), (13, False)):
        prepared = provider(stand_in).prepare(
            Point("attention_prefill", {**values, "window": window}), 1, 10**9
        )
        wanted = provider(stand_in).prepare(point, 1, 10**9)
        prepared.run(0)
        error = relative_error(prepared.result(0), wanted.reference(0))
        assert (error < error_bound(point)) == passes


def test_block_scaled_gemms_are_for_blackwell(stand_in):
    point = Point("gemm", {"dtype": "fp8_block", "m": 20, "n": 384, "k": 256})
    built = Named(lambda name: name == "gemm_sm100")
    blackwell = FlashinferProvider(Device("cpu", 20_000, (10, 0)), stand_in, built)
    assert blackwell.refuses(point) is None
    prepared = blackwell.prepare(point, 2, 10**9)
    assert check_result(point, prepared).passed
    assert "not built" in FlashinferProvider(Device("cpu", 0, (12, 0)), stand_in, built).refuses(point)
    assert "this GPU has 9.0" in FlashinferProvider(HOST, stand_in, built).refuses(point)
    for odd in ({"m": 17}, {"n": 192}, {"dtype": "fp8"}):
        assert blackwell.refuses(Point("gemm", {**point.values, **odd}))


def test_experts_are_for_hopper_and_blackwell(stand_in):
    def refuses(capability, **changes):
        chosen = FlashinferProvider(
            Device("cpu", 0, capability), stand_in, Named(lambda name: name == "fused_moe_90")
        )
        return chosen.refuses(Point("moe", {**LAYER, "num_tokens": 9, **changes})) or ""

    assert refuses((9, 0)) == ""
    assert "no fp8 experts" in refuses((9, 0), dtype="fp8")
    assert "no fp8_block experts" in refuses((10, 0), dtype="fp8_block")
    assert "fused_moe_100 is not built" in refuses((10, 0))
    assert "this GPU has 8.0" in refuses((8, 0))


def test_cuda_cores_where_the_prefill_library_is_missing(stand_in):
    chosen = provider(stand_in, "prefill fa2 bf16")
    assert "CUDA cores" in chosen.prepare(POINTS[2], 0, 10**9).kernel
    assert "not built" in chosen.refuses(POINTS[3])  # seven query heads a KV head need tensor cores
    assert "tensor cores" in provider(stand_in).prepare(POINTS[2], 0, 10**9).kernel


def test_paged_plans_take_the_pages_of_a_step(stand_in):
    batch = PagedBatch.make(np.array([1, 5]), np.array([21, 5]), 3)
    heads = Heads(4, 2, 32)
    k, v = (torch.randn(batch.num_pages, batch.page_size, 2, 32) for _ in range(2))
    q, out = torch.randn(6, 4, 32), torch.full((6, 4, 32), float("nan"))
    plan_paged_prefill(stand_in, batch, heads, torch.float32, HOST)(q, k, v, out)
    one = PagedBatch.make(np.array([1]), np.array([21]), None)
    pages = torch.as_tensor(batch.pages_of(0).astype("int64"))
    first = torch.full((1, 4, 32), float("nan"))
    decode = plan_decode(stand_in, one, heads, torch.float32, torch.float32, HOST, tensor_cores=False)
    decode(q[:1], k[pages], v[pages], first)
    assert torch.allclose(out[:1], first, atol=1e-6)
    assert torch.isfinite(out).all()


class TestInstalled:
    """Only where flashinfer is installed."""

    @pytest.fixture(autouse=True)
    def _needs_flashinfer(self, real):
        if real is None:
            pytest.skip("flashinfer is not installed")

    def test_module_names_are_those_its_generators_give(self):
        modules = FlashinferModules(lambda name: False)
        assert modules.prefill("fa3", "bf16", 128).endswith("f16qk_False_sm90")
        assert "dtype_q_bf16_dtype_kv_e4m3" in modules.prefill("fa2", "fp8", 128)
        assert "dtype_kv_e4m3" in modules.decode("fp8", 128)
        for windowed in (False, True):
            found = f"use_swa_{windowed}_"
            assert found in modules.prefill("fa2", "bf16", 128, windowed)
            assert found in modules.decode("bf16", 128, windowed)
        latent = modules.mla("fa3", 512, 64)  # since 0.7 the name has the layout of the plan that it reads
        assert "head_dim_ckv_512_head_dim_kpe_64_profiler_False" in latent
        assert latent.endswith("_sm90")

    def test_libraries_are_looked_for_where_flashinfer_does(self, real, tmp_path, monkeypatch):
        from flashinfer.jit import env

        monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", tmp_path)
        modules = flashinfer_calls.flashinfer_modules()
        name = modules.decode("bf16", 128)
        assert not modules.is_built(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").write_bytes(b"")
        assert modules.is_built(name)
        if hasattr(env, "get_aot_path"):  # a package of prebuilt libraries, as flashinfer-jit-cache
            other = tmp_path / "cache.so"
            other.write_bytes(b"")
            monkeypatch.setattr(env, "get_aot_path", lambda name: other)
            assert modules.is_built("anything")
            monkeypatch.undo()
        assert not modules.is_built("anything")
        monkeypatch.setenv("KERNELS_BENCH_COMPILE", "1")
        assert modules.is_built("anything")

    def test_a_wrong_call_does_not_bind(self, stand_in):
        workspace = torch.zeros(8, dtype=torch.uint8)
        with pytest.raises(TypeError):
            stand_in.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", tensor_cores=True)
