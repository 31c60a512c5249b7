"""Providers without a GPU: order of choice, reasons, rotation, page tables."""

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.config.gpu import load_gpu
from fastroof.errors import MeasureError
from kernels_bench.commands.providers import _measured
from kernels_bench.operators.registry import MEASURED
from kernels_bench.protocol import Availability, Point
from kernels_bench.providers import all_providers, vllm_ops
from kernels_bench.providers.device import Device, named_device
from kernels_bench.providers.flashinfer_calls import FlashinferModules
from kernels_bench.providers.flashinfer_provider import FlashinferProvider
from kernels_bench.providers.paging import PagedBatch, ragged_offsets
from kernels_bench.providers.rotating import MAX_SETS, RotatingCalls, count_sets, sample
from kernels_bench.providers.small_ops import VLLM_KERNELS
from kernels_bench.providers.torch_provider import TorchProvider
from kernels_bench.providers.vllm_provider import VllmProvider

HOPPER = Device("cuda", 50 * 2**20, (9, 0))
AMPERE = Device("cuda", 40 * 2**20, (8, 0))
HEADS = {"kv_dtype": "bf16", "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 0}


def decode(**changes):
    return Point("attention_decode", {**HEADS, "batch_size": 4, "kv_len": 100, **changes})


SEVEN_TO_ONE = decode(num_q_heads=28, num_kv_heads=4, kv_dtype="fp8")


def gemm(dtype, n=4096, k=4096):
    return Point("gemm", {"dtype": dtype, "m": 64, "n": n, "k": k})


class NamedModules(FlashinferModules):
    """Names of libraries without flashinfer at hand."""

    def prefill(self, backend, kv_dtype, head_dim, windowed=False):
        return f"prefill_{backend}_{kv_dtype}_{head_dim}{'_window' * windowed}"

    def decode(self, kv_dtype, head_dim, windowed=False):
        return f"decode_{kv_dtype}_{head_dim}{'_window' * windowed}"

    def mla(self, backend, latent, rope_dim):
        return f"mla_{backend}_{latent}_{rope_dim}"


def providers(*, fa3="", ops="", linear=None, built=()):
    """All providers on a Hopper card with the libraries that are named."""
    vllm = VllmProvider(HOPPER)
    vllm._reasons, vllm._no_linear = {"fa3": fa3, "ops": ops}, linear
    vllm._small_ops = SimpleNamespace(kernels=VLLM_KERNELS)
    modules = NamedModules(lambda name: name in built)
    return [vllm, FlashinferProvider(HOPPER, flashinfer=object(), modules=modules), TorchProvider(HOPPER)]


def chosen(point, **libraries):
    return next((p.name for p in providers(**libraries) if p.refuses(point) is None), None)


@pytest.mark.slow
def test_nothing_heavy_is_imported_with_the_providers():
    code = (
        "import sys, kernels_bench.providers as p\n"
        "import kernels_bench.commands.steps\n"
        "p.all_providers()\n"
        "bad = {'torch', 'triton', 'flashinfer', 'vllm', 'numba', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_every_launch_is_of_an_operator_that_is_measured():
    for provider in providers():
        assert set(provider.launches) <= set(MEASURED)
        reason = provider.refuses(Point("collective", {}))
        assert reason == f"{provider.name} {provider.lacks} collective"


def test_order_of_all_providers_is_that_of_their_names():
    assert [p.name for p in all_providers()] == ["vllm", "flashinfer", "aiter", "torch"]


def test_availability_has_a_reason_and_never_raises():
    for provider in all_providers():
        answer = provider.availability()
        assert answer.works or answer.reason


@pytest.mark.parametrize(
    ("point", "libraries", "name"),
    [
        (decode(), {}, "vllm"),
        (decode(), {"fa3": "no library", "built": ("prefill_fa2_bf16_128",)}, "flashinfer"),
        (decode(), {"fa3": "no library"}, "torch"),
        (decode(kv_dtype="fp8"), {}, "vllm"),
        (decode(kv_dtype="fp8"), {"fa3": "no library"}, None),
        (decode(kv_dtype="fp8"), {"fa3": "no library", "built": ("decode_fp8_128",)}, "flashinfer"),
        (SEVEN_TO_ONE, {"fa3": "no library", "built": ("decode_fp8_128",)}, None),
        (SEVEN_TO_ONE, {"fa3": "no library", "built": ("prefill_fa2_fp8_128",)}, "flashinfer"),
        (decode(window=4096), {}, "vllm"),
        (decode(window=4096), {"fa3": "no library", "built": ("prefill_fa2_bf16_128",)}, None),
        (decode(window=4096), {"fa3": "no library", "built": ("prefill_fa2_bf16_128_window",)}, "flashinfer"),
        (
            decode(window=4096, kv_dtype="fp8"),
            {"fa3": "no library", "built": ("decode_fp8_128_window",)},
            "flashinfer",
        ),
        (gemm("bf16"), {}, "torch"),
        (gemm("fp8"), {}, "vllm"),
        (gemm("fp8"), {"linear": "no vllm"}, "torch"),
        (gemm("fp8", n=4100), {}, None),
        (gemm("fp8_block"), {}, "vllm"),
        (gemm("fp8_block"), {"linear": "no vllm"}, None),
        (gemm("fp8_block", n=4160), {}, None),
        (Point("elementwise", {"kind": "copy", "m": 1, "width": 64, "io_bytes": 256}), {}, "torch"),
        (Point("elementwise", {"kind": "kv_write", "m": 1, "width": 256, "io_bytes": 1}), {}, "vllm"),
        (Point("elementwise", {"kind": "kv_write", "m": 1, "width": 200, "io_bytes": 1}), {}, None),
    ],
)  # fmt: skip
def test_first_provider_that_does_not_refuse(point, libraries, name, monkeypatch):
    from kernels_bench.providers import torch_provider

    monkeypatch.setattr(torch_provider, "find_spec", lambda name: name)
    assert chosen(point, **libraries) == name


def test_a_linear_layer_that_fails_is_refused_with_the_reason(monkeypatch):
    from kernels_bench.providers import vllm_provider

    assert "vllm itself" in VllmProvider(HOPPER).refuses(gemm("fp8_block"))

    def broken(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(vllm_provider, "vllm_version", lambda: "0.26.0")
    monkeypatch.setattr(vllm_provider, "prepare_vllm_linear", broken)
    assert VllmProvider(HOPPER).refuses(gemm("fp8")).endswith("not run here: RuntimeError: no kernel image")


def test_attention_that_vllm_would_not_run_with_fa3_is_refused(monkeypatch):
    from kernels_bench.providers import vllm_provider

    monkeypatch.setattr(vllm_provider, "vllm_version", lambda: "0.26.0")
    monkeypatch.setattr(vllm_provider, "chosen_attention", lambda *_: ("FlashInferBackend", 0))
    vllm, *_ = providers()
    assert vllm.refuses(decode()) == "vLLM chooses FlashInferBackend here, which is not measured"
    monkeypatch.setattr(vllm_provider, "chosen_attention", lambda *_: ("FlashAttentionBackend", 3))
    vllm, *_ = providers()
    assert vllm.refuses(decode()) is None
    assert vllm.kernel(decode(window=8)) == "vllm FlashAttentionBackend FA3 paged, page 16, window 8"


def test_mla_needs_its_library():
    point = Point(
        "mla_decode",
        {"kv_dtype": "bf16", "num_q_heads": 16, "kv_lora_rank": 512, "rope_dim": 64}
        | {"batch_size": 1, "kv_len": 9},
    )
    assert chosen(point) == "vllm"
    assert chosen(point, fa3="no library") is None
    assert chosen(point, fa3="no library", built=("mla_fa3_512_64",)) == "flashinfer"


def test_elementwise_without_triton_or_vllm_names_what_is_missing(monkeypatch):
    from kernels_bench.providers import torch_provider

    monkeypatch.setattr(torch_provider, "find_spec", lambda name: None)
    point = Point("elementwise", {"kind": "silu_and_mul", "m": 1, "width": 64, "io_bytes": 1})
    assert "triton" in providers()[2].refuses(point)


def test_fp8_needs_ada_or_later():
    assert "8.9" in TorchProvider(AMPERE).refuses(gemm("fp8"))


def test_fa3_prefill_only_where_it_runs():
    modules = NamedModules(lambda name: True)
    assert modules.prefill_backend(HOPPER, "bf16", 128) == "fa3"
    assert modules.prefill_backend(AMPERE, "bf16", 128) == "fa2"
    only_fa2 = NamedModules(lambda name: "fa2" in name)
    assert only_fa2.prefill_backend(HOPPER, "bf16", 128) == "fa2"
    assert NamedModules(lambda name: False).prefill_backend(HOPPER, "bf16", 128) is None


def test_heads_that_cannot_be_are_refused_by_all():
    point = decode(num_q_heads=30, num_kv_heads=8)
    assert all("divide" in p.refuses(point) for p in providers(built=("prefill_fa2_bf16_128",)))


class TestLibraries:
    def test_found_below_the_named_folder(self, tmp_path, monkeypatch):
        file = tmp_path / "vllm" / "vllm_flash_attn" / vllm_ops.LIBRARY_FILES["fa3"]
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
        monkeypatch.setenv(vllm_ops.LIBRARIES_VARIABLE, str(tmp_path))
        assert vllm_ops.find_library("fa3") == file
        assert vllm_ops.find_library("ops") is None

    def test_missing_and_broken_providers_are_reported(self, tmp_path, monkeypatch):
        pytest.importorskip("torch", reason="libraries are loaded with torch")
        if os.environ.get(vllm_ops.LIBRARIES_VARIABLE):
            pytest.skip("the libraries are here")
        (tmp_path / vllm_ops.LIBRARY_FILES["ops"]).write_bytes(b"no library")
        monkeypatch.setenv(vllm_ops.LIBRARIES_VARIABLE, str(tmp_path))
        monkeypatch.setattr(vllm_ops, "_missing_ops", lambda torch, name: ["_C::any"])
        reasons = vllm_ops.load_libraries()
        assert vllm_ops.LIBRARIES_VARIABLE in reasons["fa3"]
        # dlopen's words: torch's own report only that the file could not be loaded
        assert re.search(r"does not load: .*(file too short|invalid ELF header)", reasons["ops"])

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (OSError("Could not load this library: x.so"), "Could not load this library: x.so"),
            (RuntimeError(""), "RuntimeError"),
        ],
    )
    @pytest.mark.parametrize("cause", [None, "libcudart.so.13: cannot open shared object file\nmore"])
    def test_why_a_library_does_not_load_is_shown(self, tmp_path, monkeypatch, error, words, cause):
        def load_library(path):
            raise error from (cause and OSError(cause))

        empty = SimpleNamespace()
        ops = {"load_library": load_library} | dict.fromkeys(("_vllm_fa3_C", "_C", "_C_cache_ops"), empty)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(ops=SimpleNamespace(**ops)))
        for file in vllm_ops.LIBRARY_FILES.values():
            (tmp_path / file).write_bytes(b"")
        monkeypatch.setenv(vllm_ops.LIBRARIES_VARIABLE, str(tmp_path))
        shown = cause.splitlines()[0] if cause else words
        for name, reason in vllm_ops.load_libraries().items():
            assert reason == f"{tmp_path / vllm_ops.LIBRARY_FILES[name]} does not load: {shown}"

    def test_ops_are_registered_once_where_vllm_can_be_imported(self, tmp_path, monkeypatch):
        """`import vllm` loads the libraries that lie in it, whatever the variable names."""
        registered = SimpleNamespace(
            **{space: SimpleNamespace() for space in ("_vllm_fa3_C", "_C", "_C_cache_ops")}
        )
        loaded = set()

        def load_library(path):
            if path in loaded:
                return  # as dlopen of one and the same file
            loaded.add(path)
            is_fa3 = names[os.path.basename(path)] == "fa3"
            for op in vllm_ops.SCHEMAS:
                space, name = op.split("::")
                if (space == "_vllm_fa3_C") != is_fa3:
                    continue
                assert not hasattr(getattr(registered, space), name), f"{path} registers {op} again"
                setattr(getattr(registered, space), name, object())

        names = {file: name for name, file in vllm_ops.LIBRARY_FILES.items()}
        registered.load_library = load_library
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(ops=registered))
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        package = tmp_path / "site" / "vllm"
        for folder in (package, tmp_path / "named"):
            folder.mkdir(parents=True)
            for file in names:
                (folder / file).write_bytes(b"")
        (package / "__init__.py").write_text(
            "import pathlib, torch\n"
            "for file in pathlib.Path(__file__).parent.glob('*.so'):\n    torch.ops.load_library(str(file))\n"
        )
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setenv(vllm_ops.LIBRARIES_VARIABLE, str(tmp_path / "named"))
        assert vllm_ops.load_libraries() == {"fa3": "", "ops": ""}
        importlib.import_module("vllm")
        # what monkeypatch deletes it puts back
        del sys.modules["vllm"]
        assert loaded == {str(package / file) for file in names}
        # one that vllm lacks is still taken from the folder
        (package / vllm_ops.LIBRARY_FILES["fa3"]).unlink()
        assert vllm_ops.find_library("fa3") == tmp_path / "named" / vllm_ops.LIBRARY_FILES["fa3"]


class TestRotation:
    def test_sets_exceed_what_is_rotated_over(self):
        assert Device("cuda", 50 * 10**6).rotated_bytes == 250 * 10**6
        assert Device("cuda", 50 * 10**6, rotation=0.0).rotated_bytes == 0
        assert count_sets(10**6, 0, 10**12) == 1, "hot"
        for set_bytes in (10**6, 3 * 10**6, 10**8, 10**9):
            assert count_sets(set_bytes, 250 * 10**6, 10**12) * set_bytes > 250 * 10**6

    def test_tiny_sets_are_capped_and_large_ones_fit(self):
        assert count_sets(100, 50 * 10**6, 10**12) == MAX_SETS
        assert count_sets(40 * 10**6, 50 * 10**6, 90 * 10**6) == 2
        assert count_sets(0, 50 * 10**6, 10**12) == MAX_SETS

    def test_one_set_too_large(self):
        with pytest.raises(MemoryError, match="1,000 B, of 999 B"):
            count_sets(1000, 0, 999)

    @given(st.integers(1, 500), st.integers(2, 40), st.integers(0, 9))
    def test_sample_holds_both_ends(self, size, count, seed):
        chosen = sample(size, count, seed)
        assert len(chosen) == min(size, count)
        assert chosen[0] == 0
        assert chosen[-1] == size - 1
        assert (np.diff(chosen) > 0).all()

    def test_closed_calls_launch_nothing(self):
        calls = RotatingCalls("k", 1, 0, lambda i: None, lambda i: None, lambda i: None)
        calls.run(0)
        calls.close()
        with pytest.raises(RuntimeError, match="closed"):
            calls.run(0)


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=9)


class TestPaging:
    @given(LENGTHS, st.sampled_from([None, 0, 7]), st.sampled_from([1, 16]))
    def test_every_token_has_a_place_of_its_own(self, lengths, seed, page_size):
        new, context = np.array(lengths).T
        batch = PagedBatch.make(new, new + context, seed, page_size)
        assert sorted(batch.pages.tolist()) == list(range(batch.num_pages))
        taken = set()
        for s, (n, c) in enumerate(lengths):
            table, pages = batch.block_table[s], batch.pages_of(s)
            assert table[: len(pages)].tolist() == pages.tolist()
            assert (len(pages) - 1) * page_size + batch.last_page_lens[s] == n + c
            for position in range(n + c):
                slot = pages[position // page_size] * page_size + position % page_size
                assert slot not in taken
                taken.add(slot)
        assert batch.num_tokens == batch.token_offsets[-1] == new.sum()

    @given(LENGTHS, st.sampled_from([None, 7]), st.sampled_from([1, 16]), st.integers(1, 50))
    def test_pages_that_no_window_reaches_are_one(self, lengths, seed, page_size, window):
        new, context = np.array(lengths).T
        batch = PagedBatch.make(new, new + context, seed, page_size, window)
        taken, unread = [], set()
        for s, (n, c) in enumerate(lengths):
            seen = {p for q in range(c, c + n) for p in range(max(0, q - window + 1), q + 1)}
            pages_seen = {p // page_size for p in seen}
            assert len(batch.pages_of(s)) == -(-(n + c) // page_size)
            for place, page in enumerate(batch.pages_of(s).tolist()):
                taken += [page] if place in pages_seen else []
                unread |= {page} if place not in pages_seen else set()
        assert len(taken) == len(set(taken))
        assert not unread & set(taken)
        assert len(unread) <= 1
        assert sorted({*taken, *unread}) == list(range(batch.num_pages))

    def test_pages_in_a_row_without_a_seed(self):
        batch = PagedBatch.make(np.array([1, 1]), np.array([17, 33]), None)
        assert batch.pages.tolist() == [0, 1, 2, 3, 4]
        assert batch.block_table.tolist() == [[0, 1, 0], [2, 3, 4]]

    @pytest.mark.parametrize(("new", "kv"), [([0], [3]), ([4], [3]), ([], []), ([1, 1], [3])])
    def test_impossible_batches(self, new, kv):
        with pytest.raises(MeasureError):
            PagedBatch.make(np.array(new, np.int64), np.array(kv, np.int64), 0)

    def test_offsets_are_int32(self):
        assert ragged_offsets(np.array([5])).dtype == np.int32


def test_what_a_named_gpu_would_measure_is_listed():
    pytest.importorskip("torch", reason="torch names its own kernels")
    named = named_device(load_gpu("h100"))
    vllm, flashinfer, torch = providers(built=("prefill_fa2_bf16_64_window",))
    vllm._device = torch._device = flashinfer._device = named
    usable = [(vllm, Availability(True, versions={"vllm": "0.26.0"})), (torch, Availability(True))]
    points = [gemm("bf16"), gemm("bf16"), gemm("fp8_block"), gemm("fp8", n=4100), decode(kv_dtype="fp8")]
    rows = _measured(points, usable)
    assert [(row["points"], row.get("library")) for row in rows] == [
        (2, "torch"), (1, "vllm 0.26.0"), (1, None), (1, "vllm 0.26.0"),
    ]  # fmt: skip
    assert rows[1]["kernel"] == "vllm's layer, whose class the GPU decides"
    assert rows[2]["refused"].startswith(
        "vllm: fp8 needs n and k in multiples of 16, not 4100 and 4096; torch:"
    )
    assert rows[3]["kernel"] == "vllm FA3 paged, page 16, fp8 queries, quantising them not inside"
    windowed = decode(window=128, num_q_heads=64, head_dim=64)
    (row,) = _measured([windowed], [(flashinfer, Availability(True))])
    assert row["kernel"] == "flashinfer paged decode, tensor cores, page 16, window 128"


def test_cards_that_no_provider_measures_are_refused():
    capabilities = {name: named_device(load_gpu(name)).capability for name in ("a100", "a10", "l40s", "b300")}
    assert capabilities == {"a100": (8, 0), "a10": (8, 6), "l40s": (8, 9), "b300": (10, 3)}
    with pytest.raises(MeasureError, match="they are for GPUs of NVIDIA and AMD"):
        named_device(load_gpu("b60"))


@pytest.mark.parametrize("grid", ["first_run", "second_run"])
def test_a_bundle_without_flashinfer_takes_all_but_odd_widths_in_fp8(grid, monkeypatch):
    from kernels_bench.grid.grid import load_grid
    from kernels_bench.providers import torch_provider, vllm_provider

    monkeypatch.setattr(torch_provider, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_provider, "vllm_version", lambda: "0.26.0")
    monkeypatch.setattr(vllm_provider, "chosen_attention", lambda *_: ("FlashAttentionBackend", 3))
    vllm, _, torch = providers()
    refused = {
        vllm.refuses(point).partition(" not ")[0]
        for point in load_grid(grid).points()
        if vllm.refuses(point) and torch.refuses(point)
    }
    # a quarter of an expert of Qwen3-30B-A3B, the router of Mixtral
    assert refused <= {"blocks of 128 do", "fp8 needs n and k in multiples of 16,"}
