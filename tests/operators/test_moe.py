"""Experts with a gate and without one: work, lookups, and what of the package's rows is whose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.errors import LookupInputError, MissingTableError, TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.load.rows import read_columns
from fastroof.models import load_model, model_names
from fastroof.models.experts import RoutedExperts
from fastroof.operators.calls import Experts
from fastroof.operators.external_rows import ExternalRows
from fastroof.operators.moe import MOE, MOE_NONGATED
from fastroof.operators.moe_rows import is_nongated
from fastroof.operators.moe_work import DENSE_ROWS, moe_bytes, moe_touched_experts, tokens_to_reach_all
from fastroof.operators.registry import OPERATORS
from fastroof.operators.row_operator import CurveOptions
from tests.reference.handmade import handmade_tables

SHAPE = {"hidden": 2688, "intermediate": 1856, "topk": 6, "num_experts": 128}
ROWS = [("bf16", 2688, 1856, 6, 128, 1, 1, "balanced", tokens, us) for tokens, us in ((1, 40.0), (64, 900.0))]


def raw(**given: list) -> dict[str, np.ndarray]:
    """The package's columns; what is not given is the same in every row."""
    same = {
        "moe_dtype": "nvfp4", "num_tokens": 4, "hidden_size": 2048, "inter_size": 768, "topk": 8,
        "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced",
        "kernel_source": "moe_torch_flow_cutlass", "version": "1.3.0rc20", "latency": 0.5,
    }  # fmt: skip
    rows = max((len(values) for values in given.values()), default=1)
    columns = {name: given.get(name, [value] * rows) for name, value in same.items()}
    return {n: np.array(v, object if isinstance(v[0], str) else None) for n, v in columns.items()}


def kept(rows: ExternalRows) -> np.ndarray:
    keep = np.ones(len(rows.columns["latency_us"]), bool)
    for reason, mask in rows.left_out.items():
        if not reason.startswith("dtype "):
            keep &= ~mask
    return keep


def convert(operator: object, columns: dict[str, np.ndarray]) -> ExternalRows:
    (file,) = operator.package_files  # type: ignore[attr-defined]
    return file.convert(columns)


def test_experts_without_a_gate_are_two_gemms_not_three():
    tables = handmade_tables(moe=ROWS, moe_nongated=ROWS)
    gated, nongated = (tables.lookup(name, num_tokens=[1, 64], **SHAPE) for name in ("moe", "moe_nongated"))
    assert gated.latency_us.tolist() == nongated.latency_us.tolist() == [40.0, 900.0]
    np.testing.assert_allclose(nongated.mfu, gated.mfu * 2 / 3, rtol=1e-12)
    flops = 2 * 2 * 64 * 6 * 2688 * 1856
    assert nongated.mfu[1] == pytest.approx(flops / (900e-6 * tables.gpu.peak("bf16")), rel=1e-12)
    columns = tables.table("moe").columns
    work, other = (operator.work(columns, tables.gpu) for operator in (MOE, MOE_NONGATED))
    tokens = 2 * 2 * 2688 * columns["num_tokens"]
    np.testing.assert_allclose(other.moved_bytes - tokens, (work.moved_bytes - tokens) * 2 / 3, rtol=1e-12)


def test_many_tokens_read_every_expert_of_a_gpu():
    """Experts over four groups of two GPUs: a quarter of them on each, half as wide."""
    call = Experts("experts", "experts", 1, 2048, 768, 8, 128, 2, 4, "fp8", "balanced")
    rows = np.array([1e6])
    for operator, gemms in ((MOE, 3), (MOE_NONGATED, 2)):
        weights, tokens = 128 / 4 * gemms * 2048 * 768 / 2, 2 * 2 * 2048 * 1e6
        cost = operator.row_cost(call)
        assert (cost.fixed_bytes, cost.bytes_per_row * 1e6) == (weights, tokens)
        flops, moved = operator.row_work(call, rows)
        assert moved.tolist() == [weights + tokens]
        assert flops.tolist() == [cost.flops_per_row * 1e6] == [2 * gemms * 1e6 * 8 * 2048 * 768 / 8]


def test_experts_in_fp4_have_an_mfu_of_the_cards_fp4_peak():
    row = ("nvfp4", 7168, 2048, 8, 256, 1, 8, "balanced", 1024, 100.0)
    tables = handmade_tables("gb200", moe=[row])
    sizes = dict(
        zip(("hidden", "intermediate", "topk", "num_experts", "moe_tp", "moe_ep"), row[1:7], strict=True)
    )
    answer = tables.lookup("moe", num_tokens=1024, dtype="nvfp4", **sizes)
    flops = 6 * 1024 * 8 * 7168 * 2048 / 8
    assert float(answer.mfu) == pytest.approx(flops / (100e-6 * tables.gpu.peak("nvfp4")), rel=1e-12)


@pytest.mark.parametrize("name", ["moe", "moe_nongated", "moe_wide", "megamoe", "expert_dispatch"])
def test_a_token_of_more_experts_than_there_are_is_refused(h100, name):
    known = OPERATORS[name]
    sizes = {column.name: 64 for column in (*known.keys, *known.axes) if column.kind == "int"}
    words = {column.name: "x" for column in known.keys if column.kind == "text"}
    sizes |= {"topk": 9, "num_experts": 8}
    with pytest.raises(LookupInputError, match="topk must be at most num_experts \\(8\\), got 9"):
        h100.lookup(name, **{**words, "dtype": "bf16"} if "dtype" in words else words, **sizes)


def test_shapes_of_one_kind_are_refused_for_the_other():
    tables = handmade_tables(moe_nongated=ROWS)
    with pytest.raises(MissingTableError):
        tables.lookup("moe", num_tokens=1, **SHAPE)


def test_the_public_lookup_of_experts_has_its_arguments_and_defaults():
    assert MOE.arguments == (
        "hidden", "intermediate", "topk", "num_experts", "num_tokens",
        "dtype", "moe_tp", "moe_ep", "distribution",
    )  # fmt: skip
    assert dict(MOE.defaults) == {"moe_tp": 1, "moe_ep": 1, "distribution": "balanced", "dtype": "bf16"}
    assert MOE_NONGATED.arguments == MOE.arguments


def test_the_kernel_that_the_engine_runs_stays_not_the_fastest():
    """Up to 128 tokens the min-latency kernel, faster or not; beyond them the other one."""
    columns = raw(
        num_tokens=[128, 128, 160, 160, 64, 1],
        kernel_source=["moe_torch_flow_cutlass", "moe_torch_flow_min_latency"] * 2
        + ["moe_torch_flow_cutlass", "moe_torch_flow_min_latency"],
        latency=[0.1, 0.2, 0.2, 0.1, 0.3, 0.4],
    )
    rows = convert(MOE, columns)
    assert kept(rows).tolist() == [False, True, True, False, True, True]
    counts = {reason: int(mask.sum()) for reason, mask in rows.left_out.items() if "min-latency" in reason}
    assert counts == {
        "up to 128 tokens, where the engine runs its min-latency kernel instead": 1,
        "min-latency kernel, which the engine does not run beyond 128 tokens": 1,
    }


def test_points_that_differ_in_one_key_are_not_alternatives():
    columns = raw(
        kernel_source=["moe_torch_flow_cutlass", "moe_torch_flow_min_latency"] * 2,
        moe_ep_size=[2, 1, 4, 4],
    )
    assert kept(convert(MOE, columns)).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("kernel", "version", "hidden", "intermediate", "expected"),
    [
        ("moe_torch_flow_nongated", "1.3.0rc20", 2048, 768, True),
        ("moe_torch_flow_cutlass", "1.3.0rc20", 2688, 1856, False),
        ("vllm_unquantizedfusedmoe_triton_tritonexperts", "0.24.0", 2688, 1856, True),
        ("vllm_unquantizedfusedmoe_triton_tritonexperts", "0.24.0", 2688, 1857, False),
        ("vllm_fused_moe", "0.22.0", 2688, 1856, False),
        ("sglang_flashinfer_cutlass_moe", "0.5.14", 8192, 5120, True),
        ("sglang_fused_moe_triton", "0.5.14", 2048, 5120, True),
        ("sglang_fused_moe_triton", "0.5.14", 1024, 2688, False),
        ("sglang_fused_moe_triton", "0.5.10", 2688, 1856, False),
        ("vllm_xpu_moe", "0.26.0", 2688, 1856, False),
    ],
)
def test_whether_experts_have_a_gate_is_known_by_kernel_version_and_shape(
    kernel: str, version: str, hidden: int, intermediate: int, expected: bool
):
    columns = raw(kernel_source=[kernel], version=[version], hidden_size=[hidden], inter_size=[intermediate])
    assert is_nongated(columns).tolist() == [expected]
    owner, other = (MOE_NONGATED, MOE) if expected else (MOE, MOE_NONGATED)
    assert kept(convert(owner, columns)).all()
    assert not kept(convert(other, columns)).any()


def test_another_activation_than_the_models_is_named():
    columns = {"moe": {"kernel": np.array(["triton", "marlin_situ_as_silu"], object)}}
    assert MOE.package_notes(columns, load_gpu("h100")) == {
        "activation": "1 rows were measured with SiLU instead of the model's own activation, as their "
        "kernels' names say: marlin_situ_as_silu"
    }
    assert MOE.package_notes({"moe": {"kernel": np.array(["triton"], object)}}, load_gpu("h100")) == {}


def files_of_the_package() -> Iterator[tuple[str, Path]]:
    try:
        data = installed_root() / "systems" / "data"
    except TableError:
        return
    for system in ("h100_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server", "b60"):
        for path in sorted(data.glob(f"{system}/moe/*/*/moe_perf.parquet")):
            yield SYSTEMS[system], path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu_name", "path"),
    [pytest.param(*place, id="-".join(place[1].parts[-5:-1])) for place in files_of_the_package()],
)
def test_memory_bandwidth_shows_which_package_shapes_have_no_gate(gpu_name: str, path: Path):
    """With three GEMMs an expert the weights of those without a gate come faster than the memory is."""
    (file,) = MOE.package_files
    columns = read_columns(path, file.columns, file.optional)
    gpu = load_gpu(gpu_name)
    part = (columns["moe_dtype"] == "bfloat16") & (columns["distribution"] == "balanced")
    columns = {name: values[part] for name, values in columns.items()}
    rows = convert(MOE, columns)
    c = rows.columns
    touched = moe_touched_experts(c["num_tokens"], c["topk"], c["num_experts"], c["moe_ep"])
    all_gemms = moe_bytes(
        c["num_tokens"], c["hidden"], c["intermediate"], c["topk"], c["num_experts"], c["moe_tp"], c["moe_ep"]
    )
    share = all_gemms / (c["latency_us"] * 1e-6) / gpu.hbm_bytes_per_s
    large = (all_gemms > 8 * max(gpu.l2_bytes, 50e6)) & (touched >= 0.9 * c["num_experts"] / c["moe_ep"])
    large &= ~rows.left_out["ep beyond 8 of a GPU that was measured with other GPUs' slots"]
    nongated = is_nongated(columns)
    assert (share[large & ~nongated] < 1.0).all()
    # FlashInfer's CUTLASS kernels of Hopper are too slow to show it: a third of the bandwidth
    slow = np.char.find(columns["kernel_source"].astype(str), "flashinfer_cutlass") >= 0
    shapes = {
        (h, i)
        for h, i in zip(c["hidden"][nongated & ~slow], c["intermediate"][nongated & ~slow], strict=True)
    }
    for hidden, intermediate in shapes:
        of = large & (c["hidden"] == hidden) & (c["intermediate"] == intermediate)
        assert share[of].max(initial=9.0 if not of.any() else 0.0) > 1.0


def test_the_experts_of_every_model_have_a_node_at_every_number_of_tokens():
    for name in model_names():
        for kind in load_model(name).kinds:
            if isinstance(kind.mlp, RoutedExperts):
                assert tokens_to_reach_all(kind.mlp.topk, kind.mlp.num_experts) < DENSE_ROWS


@pytest.mark.parametrize("num_experts", [100_000, 10**6, 2**28])
def test_a_million_experts_have_few_nodes_and_the_same_latencies(num_experts: int):
    measured = ((1, 40.0), (64, 900.0), (10**6, 1e8))
    shape = ("bf16", 2688, 1856, 6, num_experts, 1, 1, "balanced")
    tables = handmade_tables(moe=[(*shape, tokens, us) for tokens, us in measured])
    call = Experts("experts", "experts", 1, 2688, 1856, 6, num_experts, 1, 1, "bf16", "balanced")
    nodes = MOE.row_nodes(call, tables, CurveOptions(), 8192)
    assert len(nodes.axis) < 80_000
    assert (np.diff(nodes.axis) > 0).all()
    rows = np.unique(np.rint(2.0 ** np.random.default_rng(1).uniform(0.0, 27.9, 2000)).astype(np.int64))
    sizes = SHAPE | {"num_experts": num_experts}
    exact = tables.lookup("moe", num_tokens=rows, **sizes).latency_us
    got = np.interp(rows, nodes.axis, nodes.value)
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    dense = np.arange(1, 5000)
    assert (nodes.value[1:5000] == tables.lookup("moe", num_tokens=dense, **sizes).latency_us).all()
