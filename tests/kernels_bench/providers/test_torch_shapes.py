"""torch's calls on the CPU and on meta tensors: shapes, strides, references; Inductor for the CPU."""

import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers import references, torch_gemm  # noqa: E402
from kernels_bench.providers.attention import Heads, contiguous_sets, paged_sets, prepare_attention  # noqa: E402
from kernels_bench.providers.device import CPU_DEVICE, Device, oom_as_memory_error  # noqa: E402
from kernels_bench.providers.elementwise import prepare_small_op  # noqa: E402
from kernels_bench.providers.mla import mla_sets, prepare_mla  # noqa: E402
from kernels_bench.providers.random_inputs import InputMaker  # noqa: E402
from kernels_bench.providers.small_ops import Compiler, InductorSmallOps  # noqa: E402
from kernels_bench.providers.torch_attention import causal_attention  # noqa: E402
from kernels_bench.providers.torch_provider import TorchProvider  # noqa: E402
from kernels_bench.run.check import check_result, error_bound, relative_error  # noqa: E402
from tests.kernels_bench.providers.in_place import InPlaceOps  # noqa: E402

HEADS = {"kv_dtype": "bf16", "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "window": 0}
SMALL_L2 = Device("cpu", 100_000)
MOE = {
    "dtype": "bf16", "hidden": 64, "intermediate": 64, "topk": 2, "num_experts": 8, "moe_tp": 2, "moe_ep": 2,
    "distribution": "balanced",
}  # fmt: skip

POINTS = [
    Point("gemm", {"dtype": "bf16", "m": 70, "n": 600, "k": 48}),
    Point("gemm", {"dtype": "fp8", "m": 17, "n": 48, "k": 64}),
    Point("attention_prefill", {**HEADS, "batch_size": 3, "q_len": 40, "kv_len": 40}),
    Point("attention_prefill", {**HEADS, "batch_size": 2, "q_len": 5, "kv_len": 21}),
    Point("attention_prefill", {**HEADS, "batch_size": 1, "q_len": 1, "kv_len": 1}),
    Point("attention_decode", {**HEADS, "batch_size": 3, "kv_len": 21}),
    Point("moe", {**MOE, "num_tokens": 9}),
    Point("moe", {**MOE, "num_tokens": 1, "distribution": "uniform", "moe_ep": 1}),
    Point("moe", {**MOE, "num_tokens": 70, "distribution": "power_law_1.2"}),
    Point("moe", {**MOE, "num_tokens": 1, "distribution": "power_law_1.01", "moe_ep": 8}),
    *(
        Point("elementwise", {"kind": kind, "m": 33, "width": 512, "io_bytes": 1})
        for kind in ("rmsnorm_residual", "rope", "silu_and_mul", "kv_write", "fp8_quantise", "copy")
    ),
    Point("elementwise", {"kind": "copy", "m": 1, "width": 3_000_001, "io_bytes": 1}),
]


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.key[:60])
def test_every_point_of_the_torch_provider_matches_its_reference(point):
    provider = TorchProvider(CPU_DEVICE)
    assert provider.refuses(point) is None
    prepared = provider.prepare(point, seed=3, max_bytes=10**9)
    assert check_result(point, prepared).passed
    prepared.close()


def test_inputs_rotate_and_differ():
    prepared = TorchProvider(SMALL_L2).prepare(POINTS[1], seed=0, max_bytes=10**9)
    assert prepared.num_sets > 1
    assert prepared.rotated_bytes > 2 * SMALL_L2.l2_bytes
    for index in range(prepared.num_sets):
        prepared.run(index)
        assert relative_error(prepared.result(index), prepared.reference(index)) < 1e-2
    assert relative_error(prepared.result(0), prepared.reference(1)) > 0.5


def test_output_that_is_not_written_is_nan():
    point = Point("attention_decode", {**HEADS, "batch_size": 3, "kv_len": 21})
    sets = contiguous_sets(point, CPU_DEVICE, 0, 10**9)
    prepared = prepare_attention(sets, "nothing", lambda index: None, 0)
    prepared.run(0)
    assert np.isnan(prepared.result(0)).all()
    assert not check_result(point, prepared).passed


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_wrong_scale_or_columns_fail_the_check(dtype):
    point = Point("gemm", {"dtype": dtype, "m": 64, "n": 64, "k": 64})
    _, right = torch_gemm.torch_gemm(dtype)

    def twice(out, *rest):
        right(out, *rest)
        out *= 1.2

    def shifted(out, *rest):
        right(out, *rest)
        out.copy_(out.roll(1, dims=1))

    for wrong in (twice, shifted):
        prepared = torch_gemm.prepare_gemm(point, CPU_DEVICE, 0, 10**9, "wrong", wrong)
        assert not check_result(point, prepared).passed


def test_in_place_kernels_are_checked_by_inputs_from_before():
    point = Point("elementwise", {"kind": "rmsnorm_residual", "m": 8, "width": 64, "io_bytes": 1})
    prepared = prepare_small_op(point, InPlaceOps(), SMALL_L2, 0, 10**9)
    before = prepared.reference(1)
    prepared.run(0)
    assert (prepared.reference(1) == before).all()
    assert relative_error(prepared.result(0), prepared.reference(0)) < 1e-2
    prepared.run(0)  # once more changes the residual again: the check is of the first launch
    assert relative_error(prepared.result(0), prepared.reference(0)) > 0.1


def test_too_large_a_point_is_a_memory_error():
    with pytest.raises(MemoryError):
        TorchProvider(CPU_DEVICE).prepare(POINTS[0], seed=0, max_bytes=1000)
    with pytest.raises(MemoryError, match="no room"), oom_as_memory_error():
        raise torch.cuda.OutOfMemoryError("no room. Tried to allocate")


class TestReferences:
    """Each against loops over single elements."""

    def test_attention(self):
        random = np.random.default_rng(0)
        q, k, v = random.normal(size=(2, 8)), random.normal(size=(5, 8)), random.normal(size=(5, 8))
        positions = [1, 4]
        want = []
        for row, position in zip(q, positions, strict=True):
            weights = [np.exp(0.3 * sum(row[d] * k[t][d] for d in range(8))) for t in range(position + 1)]
            want.append(sum(w * v[t] for t, w in enumerate(weights)) / sum(weights))
        got = references.attention_rows(*(torch.tensor(x) for x in (q, k, v)), torch.tensor(positions), 0.3)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)

    def test_attention_within_a_window(self):
        random = np.random.default_rng(0)
        q, k, v = (torch.tensor(random.normal(size=(n, 8))) for n in (2, 9, 9))
        for position, window in ((8, 3), (8, 1), (2, 5)):
            seen = slice(max(0, position - window + 1), position + 1)
            got = references.attention_rows(q[:1], k, v, torch.tensor([position]), 0.3, window)
            want = references.attention_rows(
                q[:1], k[seen], v[seen], torch.tensor([position - seen.start]), 0.3
            )
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-12)

    def test_rope_turns_pairs_by_an_angle(self):
        make = InputMaker(CPU_DEVICE, 0)
        from kernels_bench.providers.elementwise import rope_table

        table = rope_table(make, 10, 4, 100.0, "fp32")
        x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        got = references.rope(x, table[7:8])[0, 0].numpy()
        for i, theta in enumerate((7.0, 7.0 / 10.0)):
            turned = (x[0, 0, i] + 1j * x[0, 0, i + 2]).item() * np.exp(1j * theta)
            np.testing.assert_allclose([got[i], got[i + 2]], [turned.real, turned.imag], rtol=1e-6)

    def test_norm_and_silu(self):
        x, r, w = (torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([1.0, 2.0]))
        normed, total = references.add_rmsnorm(x, r, w, 0.0)
        np.testing.assert_allclose(normed.numpy(), [[3 / 12.5**0.5, 8 / 12.5**0.5]])
        assert total.tolist() == [[3.0, 4.0]]
        got = references.silu_and_mul(torch.tensor([[2.0, 5.0]]))
        np.testing.assert_allclose(got.numpy(), [[2 / (1 + np.exp(-2)) * 5]])

    def test_linear(self):
        got = references.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        assert got.tolist() == [[11.0]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sizes", [{"q_len": 5}, {}], ids=["prefill", "decode"])
def test_paged_kv_is_the_sequences_own(packed, sizes):
    """A paged attention written down with the block table alone matches what is checked of it."""
    operator = "attention_prefill" if sizes else "attention_decode"
    point = Point(operator, {**HEADS, "batch_size": 4, "kv_len": 37, **sizes})
    sets = paged_sets(point, SMALL_L2, 1, 10**9, packed=packed)
    batch = sets.batch
    assert sets.num_sets > 1
    assert sets.k.stride(-1) == 1

    def launch(index):
        for s in range(batch.num_sequences):
            rows = slice(batch.token_offsets[s], batch.token_offsets[s + 1])
            table = torch.as_tensor(batch.block_table[s].astype(np.int64))
            kv_len = int(batch.kv_lens[s])
            k, v = (x[index][table].flatten(0, 1)[:kv_len].transpose(0, 1)[None] for x in (sets.k, sets.v))
            q = sets.q[index, rows].transpose(0, 1)[None]
            sets.out[index, rows] = causal_attention(q, k, v)[0].transpose(0, 1)

    prepared = prepare_attention(sets, "by hand", launch, 0)
    for index in (0, sets.num_sets - 1):
        prepared.run(index)
        assert relative_error(prepared.result(index), prepared.reference(index)) < error_bound(point)


def test_fp8_kv_is_read_back_as_it_is_stored():
    point = Point("attention_decode", {**HEADS, "kv_dtype": "fp8", "batch_size": 2, "kv_len": 20})
    sets = paged_sets(point, CPU_DEVICE, 1, 10**9, packed=False)
    assert sets.k.dtype == torch.float8_e4m3fn
    k, _ = sets.sequence_kv(0, 1, 1)
    page = sets.batch.pages_of(1)[1]
    assert (k[17].float() == sets.k[0, int(page), 1, 1].float()).all()


def test_causal_mask_is_aligned_to_the_lower_right():
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 7, 8), torch.randn(1, 1, 7, 8)
    got = causal_attention(q, k, v)
    want = references.attention_rows(q[0, 1], k[0, 0], v[0, 0], torch.tensor([4, 5, 6]), 8**-0.5)
    assert torch.allclose(got[0, 1].double(), want, atol=1e-5)


def test_mla_reads_the_latent_twice():
    """Values are the latent part of the keys: checked with a decode written from the definition."""
    values = {"kv_dtype": "bf16", "num_q_heads": 5, "kv_lora_rank": 32, "rope_dim": 8}
    point = Point("mla_decode", {**values, "batch_size": 3, "kv_len": 130})
    sets = mla_sets(point, CPU_DEVICE, 0, 10**9, dtype="fp32")

    def attend(q_nope, q_pe, latent, rope, out):
        for s in range(sets.batch.num_sequences):
            pages = torch.as_tensor(sets.batch.pages_of(s).astype(np.int64))
            c, r = (x[pages].flatten(0, 1)[: sets.batch.kv_lens[s]] for x in (latent, rope))
            weights = torch.softmax((q_nope[s] @ c.T + q_pe[s] @ r.T) / 40**0.5, dim=-1)
            out[s] = weights @ c

    prepared = prepare_mla(sets, "by hand", attend, 40, 0)
    prepared.run(0)
    assert relative_error(prepared.result(0), prepared.reference(0)) < 1e-5


class TestMoe:
    @pytest.mark.parametrize(
        "changes", [{"dtype": "nvfp4"}, {"distribution": "zipf"}, {"moe_ep": 3}, {"topk": 9}, {"hidden": 60}]
    )
    def test_refused(self, changes):
        point = Point("moe", {**MOE, "num_tokens": 4, **changes})
        assert TorchProvider(CPU_DEVICE).refuses(point)


class TestMeta:
    """Shapes and dtypes of torch's calls at real sizes, on tensors without memory."""

    def test_gemm_shapes(self):
        x = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
        w = torch.empty(57344, 8192, dtype=torch.bfloat16, device="meta")
        out = torch.empty(4096, 57344, dtype=torch.bfloat16, device="meta")
        torch_gemm.torch_gemm("bf16")[1](out, x, w, None, None)
        assert torch.nn.functional.linear(x, w).shape == out.shape

    def test_scaled_mm_takes_our_layouts_and_scales(self, monkeypatch):
        """The meta kernel has no ``out`` and checks everything else that the CUDA one does."""
        without_out = torch._scaled_mm

        def scaled_mm(*arguments, out, **options):
            result = without_out(*arguments, **options)
            assert (result.shape, result.dtype) == (out.shape, out.dtype)

        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        m, n, k = 17, 57344, 8192
        x = torch.empty(m, k, dtype=torch.float8_e4m3fn, device="meta")
        w = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta")
        out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
        x_scale, w_scale = (torch.empty(1, device="meta") for _ in range(2))
        torch_gemm.torch_gemm("fp8")[1](out, x, w, x_scale, w_scale)

    def test_attention_sets_of_a_long_context_have_the_layout_kernels_read(self):
        values = {**HEADS, "num_q_heads": 64, "num_kv_heads": 8, "head_dim": 128}
        point = Point("attention_decode", {**values, "batch_size": 16, "kv_len": 131072})
        sets = paged_sets(point, Device("meta"), 0, 10**12, packed=True)
        assert sets.k.shape == (1, 131072, 16, 8, 128)
        assert sets.k.stride() == (131072 * 16 * 8 * 256, 16 * 8 * 256, 8 * 256, 256, 1)
        assert sets.v.storage_offset() - sets.k.storage_offset() == 128
        assert Heads.of(point).group_size == 8

    def test_grouped_gemm_shapes(self):
        x = torch.empty(64, 2048, dtype=torch.bfloat16, device="meta")
        w = torch.empty(128, 1536, 2048, dtype=torch.bfloat16, device="meta")
        offs = torch.empty(128, dtype=torch.int32, device="meta")
        assert torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=offs).shape == (64, 1536)


def test_quantised_inputs_use_the_whole_range():
    make = InputMaker(CPU_DEVICE, 0)
    x, scale = make.quantised(64, 256)
    assert x.float().abs().max() >= 400
    assert (x.float() * scale).std() == pytest.approx(1.0, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++")
def test_small_kernels_by_inductor_on_the_cpu():
    torch._dynamo.reset()
    ops, stats = InductorSmallOps(Compiler()), torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for kind in ("rmsnorm_residual", "rope", "silu_and_mul", "fp8_quantise"):
        for m, width in ((3, 768), (1, 768), (19, 256)):
            point = Point("elementwise", {"kind": kind, "m": m, "width": width, "io_bytes": 1})
            prepared = prepare_small_op(point, ops, SMALL_L2, 1, 10**9)
            assert check_result(point, prepared).passed
            assert prepared.kernel == f"{kind}, inductor of torch {torch.__version__}"
    assert stats["unique_graphs"] - before == 8, "one a width"
