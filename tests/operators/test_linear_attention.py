"""Layers with a state: their kernels are parts that add up, not alternatives of which one is picked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastroof import Tables, load_gpu
from fastroof.errors import LookupInputError, MissingTableError, TableError
from fastroof.load.aiconfigurator import import_aiconfigurator
from fastroof.load.package_rows import select
from fastroof.operators.linear_attention import GDN, KDA, MAMBA2, part_of
from tests.operators.package_columns import converted, lists
from tests.reference.handmade import handmade_tables

H100 = load_gpu("h100")
HEADS = (4, 16, 128, 32, 128)
SHAPE = {"num_k_heads": 16, "num_v_heads": 32}


def rows(phase: str, part: str, points: dict[tuple[int, int], float]) -> list[tuple[object, ...]]:
    return [(phase, part, *HEADS, batch, q_len, us) for (batch, q_len), us in points.items()]


CONVOLUTION = {(1, 64): 5.0, (1, 1024): 20.0, (4, 64): 8.0}
RECURRENCE = {(1, 64): 15.0, (1, 1024): 100.0, (4, 64): 40.0}
LAYER = rows("context", "convolution", CONVOLUTION) + rows("context", "recurrence", RECURRENCE)


def test_a_layer_takes_the_sum_of_its_parts():
    tables = handmade_tables(gdn=LAYER)
    at = {"batch_size": [1, 1, 4, 1], "q_len": [64, 1024, 64, 500], "phase": "context", **SHAPE}
    whole, *parts = (tables.lookup("gdn", part=p, **at) for p in ("all", "convolution", "recurrence"))
    assert whole.latency_us[:3].tolist() == [20.0, 120.0, 48.0]
    assert whole.origin.tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(whole.latency_us, parts[0].latency_us + parts[1].latency_us, rtol=1e-12)
    work = sum(p.mfu * p.latency_us for p in parts)
    np.testing.assert_allclose(whole.mfu, work / whole.latency_us, rtol=1e-12)
    assert tables.lookup("gdn", **at).latency_us.tolist() == whole.latency_us.tolist()
    errors = [
        tables.lookup("gdn", part=p, with_error=True, **at) for p in ("all", "convolution", "recurrence")
    ]
    apart = np.hypot(*(e.relative_error * e.latency_us for e in errors[1:]))
    np.testing.assert_allclose(errors[0].relative_error * errors[0].latency_us, apart, rtol=1e-12)


def test_every_method_adds_the_parts():
    tables = handmade_tables(gdn=LAYER)
    at = {"batch_size": 1, "q_len": [64, 300, 1024], "phase": "context", **SHAPE}
    for method in ("linear_mfu", "nearest", "floor"):
        whole, *parts = (
            tables.lookup("gdn", part=p, method=method, **at) for p in ("all", "convolution", "recurrence")
        )
        np.testing.assert_allclose(whole.latency_us, parts[0].latency_us + parts[1].latency_us, rtol=1e-12)
        assert whole.latency_us[[0, 2]].tolist() == [20.0, 120.0]


@pytest.mark.parametrize(("there", "missing"), [("convolution", "recurrence"), ("recurrence", "convolution")])
def test_a_layer_with_a_part_that_was_not_measured_has_no_time(there: str, missing: str):
    tables = handmade_tables(gdn=rows("context", there, CONVOLUTION))
    at = {"batch_size": 1, "q_len": 64, "phase": "context", **SHAPE}
    with pytest.raises(
        MissingTableError, match=f"h100 has only the {there} of gdn in phase context, no {missing}"
    ):
        tables.lookup("gdn", **at)
    assert float(tables.lookup("gdn", part=there, **at).latency_us) == 5.0
    with pytest.raises(MissingTableError, match="no gdn row of h100 has phase=generation"):
        tables.lookup("gdn", batch_size=1, **SHAPE)


def test_one_kernel_for_both_parts_stands_for_their_sum():
    points = {(1, 1): 7.0, (64, 1): 42.0}
    pair = rows("generation", "convolution", {(1, 1): 3.0, (64, 1): 5.0})
    pair += rows("generation", "recurrence", {(1, 1): 4.0, (64, 1): 39.0})
    tables = handmade_tables(kda=rows("generation", "fused", points) + pair)
    assert tables.lookup("kda", batch_size=[1, 64], **SHAPE).latency_us.tolist() == [7.0, 42.0]
    assert handmade_tables(kda=pair).lookup("kda", batch_size=[1, 64], **SHAPE).latency_us.tolist() == [
        7.0,
        44.0,
    ]


def test_refuses_phases_and_parts_that_there_are_not():
    tables = handmade_tables(gdn=LAYER)
    with pytest.raises(LookupInputError, match="unknown phase 'prefill': use context, generation or verify"):
        tables.lookup("gdn", batch_size=1, phase="prefill", **SHAPE)
    with pytest.raises(
        LookupInputError, match="unknown part 'conv': use all, convolution, recurrence or fused"
    ):
        tables.lookup("gdn", batch_size=1, part="conv", **SHAPE)


def test_work_of_the_parts():
    columns = handmade_tables(gdn=LAYER).table("gdn").columns
    tokens = columns["batch_size"] * columns["q_len"]
    is_recurrence = columns["part"] == "recurrence"
    channels, state = (2 * 16 + 32) * 128, 32 * 128 * 128
    flops = GDN.flops(columns)
    assert flops[~is_recurrence].tolist() == (2.0 * tokens * 4 * channels)[~is_recurrence].tolist()
    assert flops[is_recurrence].tolist() == (7.0 * tokens * state)[is_recurrence].tolist()
    moved = GDN.moved_bytes(columns)
    batch = columns["batch_size"]
    streamed = 2 * 2 * channels * tokens + 3 * 2 * channels * batch
    assert moved[~is_recurrence].tolist() == streamed[~is_recurrence].tolist()
    written = 2 * state * batch + tokens * (2 * (channels + 32 * 128) + 4 * 32)
    assert moved[is_recurrence].tolist() == written[is_recurrence].tolist()


def test_decodes_read_and_write_their_state_and_drafts_write_it_each():
    def moved(phase: str, q_len: int) -> float:
        columns = handmade_tables(kda=rows(phase, "recurrence", {(8, q_len): 1.0})).table("kda").columns
        return float(KDA.moved_bytes(columns)[0])

    state = 4 * 32 * 128 * 128
    one, four = moved("generation", 1), moved("verify", 4)
    assert one - 8 * 2 * state == pytest.approx((four - 8 * 5 * state) / 4)


# -- rows of the package ---------------------------------------------------------------------------


def test_parts_of_a_point_are_all_kept_without_d_model_as_key():
    found = converted(
        GDN,
        "gdn_perf",
        kernel_source=["causal_conv1d_update", "fused_recurrent_gated_delta_rule_packed_decode"] * 2,
        phase="generation",
        seq_len=1,
        batch_size=16,
        framework="vLLM",
        version="0.24.0",
        latency=[0.003, 0.009, 0.004, 0.008],
    )
    assert lists(found, "part", "latency_us", "q_len") == [
        ["convolution", "recurrence"] * 2,
        [3.0, 9.0, 4.0, 8.0],
        [1] * 4,
    ]
    kept, left_out = select("gdn", found, H100)
    assert len(kept["part"]) == 4
    assert left_out == {}


@pytest.mark.parametrize(
    ("framework", "version", "is_narrow"),
    [
        ("TRTLLM", "1.3.0rc20", True),
        ("SGLang", "0.5.10", True),
        ("SGLang", "0.5.14", False),
        ("vLLM", "0.24.0", False),
    ],
)
def test_a_convolution_over_the_keys_alone_is_left_out(framework: str, version: str, is_narrow: bool):
    found = converted(
        GDN,
        "gdn_perf",
        kernel_source=["causal_conv1d_fn", "chunk_gated_delta_rule"],
        framework=framework,
        version=version,
    )
    assert lists(found, "part") == [["recurrence"] if is_narrow else ["convolution", "recurrence"]]


def test_kernels_of_kimi_delta_attention():
    kernels = {
        "causal_conv1d_fn_qkv3": "convolution",
        "flashkda_fwd": "recurrence",
        "chunk_kda": "recurrence",
        "fused_recurrent_kda_packed_decode": "recurrence",
        "fused_sigmoid_gating_delta_rule_update": "recurrence",
        "fused_kda_decode": "fused",
        "kda_fused_decode": "fused",
    }
    assert {kernel: part_of(kernel) for kernel in kernels} == kernels
    found = converted(KDA, "kda_perf", kernel_source=list(kernels), phase="verify", seq_len=4)
    assert lists(found, "part", "q_len") == [list(kernels.values()), [4] * 7]


def test_mamba_rows():
    found = converted(
        MAMBA2,
        "mamba2_perf",
        kernel_source="causal_conv1d_fn",
        phase="context",
        nheads=128,
        n_groups=8,
        d_state=256,
    )
    assert lists(found, "part", "num_heads", "num_groups", "state_dim") == [
        ["convolution"],
        [128],
        [8],
        [256],
    ]
    assert MAMBA2.channels({n: v[0] for n, v in found.columns.items()}) == 128 * 2 + 2 * 8 * 256


@pytest.mark.slow
def test_layers_of_the_package_add_up(tmp_path: Path):
    try:
        files = ["gdn_perf", "kda_perf", "mamba2_perf"]
        vllm = import_aiconfigurator("h100_sxm", "vllm", "0.24.0", files=files)
        trtllm = import_aiconfigurator("h100_sxm", "trtllm", "1.3.0rc20", files=files)
    except TableError as error:
        pytest.skip(str(error))
    tables = Tables(vllm, H100)
    decode = {"batch_size": 64, "num_k_heads": 12, "num_v_heads": 12}
    fused = tables.lookup("kda", part="fused", **decode)
    pair = [float(tables.lookup("kda", part=p, **decode).latency_us) for p in ("convolution", "recurrence")]
    assert float(tables.lookup("kda", **decode).latency_us) == float(fused.latency_us)
    assert sum(pair) == pytest.approx(float(fused.latency_us), rel=0.1)
    prefill = {"batch_size": 1, "q_len": 8192, "num_k_heads": 16, "num_v_heads": 32, "phase": "context"}
    parts = [float(tables.lookup("gdn", part=p, **prefill).latency_us) for p in ("convolution", "recurrence")]
    assert float(tables.lookup("gdn", **prefill).latency_us) == sum(parts)
    other = Tables(trtllm, H100)
    with pytest.raises(
        MissingTableError, match="has only the recurrence of gdn in phase context, no convolution"
    ):
        other.lookup("gdn", **prefill)
    with pytest.raises(MissingTableError, match=r"has only the convolution of .* no recurrence"):
        other.lookup("mamba2", batch_size=1, num_heads=64, head_dim=64, state_dim=128, num_groups=8)
