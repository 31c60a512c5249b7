"""InferSim's method: reading its trees, what lookups refuse, and what estimates keep to."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.compat import infersim
from fastroof.compat.infersim.estimate import RESULT_COLUMNS
from fastroof.compat.infersim.model import read_model
from fastroof.errors import (
    BatchError,
    FastroofError,
    GpuError,
    LookupInputError,
    MissingTableError,
    ModelError,
    TableError,
)
from tests.reference import infersim as reference

SAMPLE = Path(__file__).resolve().parents[2] / "golden_sample" / "infersim" / "bench_data"
DENSE = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
}  # fmt: skip
MOE = {**DENSE, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
HYBRID = {
    **MOE, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
SCENARIO = {
    "device": "H20", "world_size": 1, "tp_size": 1, "num_nodes": 1, "max_prefill_tokens": 4096,
    "decode_bs": 32, "target_tgs": 2560.0, "target_tpot": 50.0, "isl": 4096, "osl": 1024, "fp8_gemm": 0,
    "fp8_kv": 0, "deepep": 0, "tbo": 0,
}  # fmt: skip
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@pytest.fixture(scope="module")
def tables():
    return infersim.load(SAMPLE)


# the tree


def test_the_first_line_is_dropped_header_or_not():
    """InferSim loses the first row of a file without header, and so does this."""
    path = "mha/decode/h20/64-2-128.csv"
    text = (SAMPLE / path).read_text()
    assert text.startswith("bf16,bf16,1,1024,25.4893,0.009")
    heads = {"num_heads": 64, "num_kv_heads": 2, "head_dim": 128, "batch_size": 1, "kv_len": 1024}
    as_it_is, mended = (infersim.read_files({path: t}) for t in (text, f"a header\n{text}"))
    assert infersim.attn_decode_mfu(mended, "H20", **heads) == 0.009
    assert infersim.attn_decode_mfu(as_it_is, "H20", **heads) == 0.141  # the row of batch 16


def test_mfu_is_rounded_as_python_rounds():
    lines = ["m,k,n,latency_us,mfu", "1,8,8,9,0.0005", "2,8,8,9,0.0015", "3,8,8,9,0.1235", "4,8,8,9,2.6755"]
    tables = infersim.read_files({"gemm/h20/data.csv": "\r\n".join(lines)})
    expected = [round(0.0005, 3), round(0.0015, 3), round(0.1235, 3), round(2.6755, 3)]
    assert infersim.gemm_mfu(tables, "h20", [1, 2, 3, 4], 8, 8).tolist() == expected


def test_files_that_infersim_never_opens_are_left_alone():
    bad = "this,is\nnot,read"
    good = {"gemm/h20/data.csv": "header\n1,8,8,9,0.5\n"}
    paths = (
        "gemm/h20/other.csv", "gemm/h20/data.txt", "gemm/tpu/data.csv", "gemm/H20/data.csv",
        "dsa/decode/h20/1.csv", "mha/decode/h20/32-8.csv", "mha/decode/h20/32-08-128.csv",
        "mha/decode/h20/a-b-c.csv", "notes.csv",
    )  # fmt: skip
    tables = infersim.read_files(good | dict.fromkeys(paths, bad))
    assert tables.files == {"gemm/h20/data.csv"}


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("gemm/h20/data.csv", "1,8,x,9,0.5", "line 3"),
        ("gemm/h20/data.csv", "1,8,8,9", "line 3"),
        ("gemm/h20/data.csv", "1,8,8,9,nan", "not finite"),
        ("gemm/h20/data.csv", f"1,8,{2**31},9,0.5", "size"),
        ("gemm/h20/data.csv", "0,8,8,9,0.5", "size"),
        ("gdn/decode/h20/4-1-1-1-1.csv", "1", "latencies"),
        ("gdn/decode/h20/4-1-1-1-1.csv", "1,1,1,1,1,1,1,1", "latencies"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(path, line, message):
    with pytest.raises(TableError, match=message) as error:
        infersim.read_files({path: f"header\n\n{line}"}, root="here")
    assert f"here/{path}" in str(error.value)


def test_no_tree(tmp_path):
    with pytest.raises(TableError, match="no folder"):
        infersim.load(tmp_path / "nothing")
    with pytest.raises(TableError, match="has no file that InferSim reads"):
        infersim.load(tmp_path)
    (tmp_path / "gemm" / "h20").mkdir(parents=True)
    (tmp_path / "gemm" / "h20" / "data.csv").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TableError, match="cannot read"):
        infersim.load(tmp_path)


def test_tables_pickle(tables):
    again = pickle.loads(pickle.dumps(tables))
    assert infersim.gemm_mfu(again, "h20", 64, 2048, 2048) == infersim.gemm_mfu(tables, "h20", 64, 2048, 2048)


def test_another_device_by_its_constants():
    gpu = replace(infersim.GPUS["h800"], default_mfu=0.77)
    files = {"gemm/h100/data.csv": "header\n16,8,8,9,0.5\n"}
    with pytest.raises(TableError, match="h20, h800, h200, gb200; add others with gpus="):
        infersim.read_files(files)
    tables = infersim.read_files(files, {"H100": gpu})
    assert infersim.gemm_mfu(tables, "H100", [16, 15], 8, 8).tolist() == [0.5, 0.77]


# lookups


def test_arrays_broadcast_and_equal_their_singles(tables):
    batch, kv_len = np.array([[1], [7], [300]]), np.array([100, 5000, 40_000], np.int32)
    found = infersim.attn_decode_mfu(tables, "H20", **HEADS, batch_size=batch, kv_len=kv_len)
    assert found.shape == (3, 3)
    assert len(set(found.ravel().tolist())) > 3
    for i in range(3):
        for j in range(3):
            single = infersim.attn_decode_mfu(
                tables, "h20", **HEADS, batch_size=int(batch[i, 0]), kv_len=int(kv_len[j])
            )
            assert isinstance(single, float)
            assert single == found[i, j]
    devices = np.array(["H20", "h800"])
    per_device = infersim.gemm_mfu(tables, devices, 64, 7168, 1536)
    assert per_device.tolist() == [infersim.gemm_mfu(tables, d, 64, 7168, 1536) for d in devices]
    assert infersim.gemm_mfu(tables, "h20", np.zeros(0, int), 8, 8).shape == (0,)


def test_a_measured_gemm_comes_back_rounded(tables):
    rows = [line.split(",") for line in (SAMPLE / "gemm/h800/data.csv").read_text().splitlines()[1:]]
    m, k, n = (np.array([int(row[c]) for row in rows]) for c in range(3))
    found = infersim.gemm_mfu(tables, "h800", m, k, n)
    last = {(row[0], row[1], row[2]): round(float(row[4]), 3) for row in rows}
    assert found.tolist() == [last[row[0], row[1], row[2]] for row in rows]


@pytest.mark.parametrize(
    ("lookup", "default"),
    [
        (lambda t: infersim.gemm_mfu(t, "h20", 15, 512, 4096), 0.6),
        (lambda t: infersim.gemm_mfu(t, "h20", 16, 99_999, 1), 0.6),
        (lambda t: infersim.gemm_mfu(t, "gb200", 16, 9, 1), 0.5),
        (
            lambda t: infersim.attn_prefill_mfu(
                t, "h20", num_heads=16, num_kv_heads=2, head_dim=256, seq_len=1000
            ),
            0.6,
        ),
        (
            lambda t: infersim.attn_prefill_mfu(t, "h200", **HEADS, seq_len=9),
            0.9,
        ),
        (
            lambda t: infersim.attn_decode_mfu(
                t, "h800", num_heads=64, kv_lora_rank=512, qk_rope_head_dim=64, batch_size=1, kv_len=1,
            ),
            0.35,
        ),
        (
            lambda t: infersim.grouped_gemm_mfu(
                t, "h800", "prefill", num_experts=256, topk=8, hidden=7168, intermediate=2048, num_gpus=3,
                tokens_per_gpu=4096,
            )[1],
            0.35,
        ),
        (
            lambda t: infersim.grouped_gemm_mfu(
                t, "h800", "prefill", num_experts=256, topk=8, hidden=7168, intermediate=2048,
                tokens_per_gpu=1023,
            )[0],
            0.35,
        ),
    ],
)  # fmt: skip
def test_the_default_answers_where_a_row_is_missing(tables, lookup, default):
    assert lookup(tables) == default


def test_no_default_for_a_gated_delta_net(tables):
    layer = {
        "conv_kernel": 4,
        "num_key_heads": 1,
        "key_head_dim": 2,
        "num_value_heads": 3,
        "value_head_dim": 5,
    }
    with pytest.raises(MissingTableError, match=r"no file .*gdn/prefill/h20/4-1-2-3-5.csv$"):
        infersim.gdn_latency_us(tables, "h20", "prefill", **layer, tokens=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: infersim.gemm_mfu(t, "h20", 0, 8, 8), LookupInputError, "m must hold integers of 1"),
        (lambda t: infersim.gemm_mfu(t, "h20", 1.5, 8, 8), LookupInputError, "m must hold integers"),
        (lambda t: infersim.gemm_mfu(t, "h20", 1, 2**31, 8), LookupInputError, "k must hold"),
        (lambda t: infersim.gemm_mfu(t, "h20", 1, 8, True), LookupInputError, "n must hold"),
        (
            lambda t: infersim.gemm_mfu(t, "h20", [[1], [1, 2]], 8, 8),
            LookupInputError,
            "m must be a scalar or",
        ),
        (
            lambda t: infersim.gemm_mfu(t, "h20", [1, 2], [1, 2, 3], 8),
            LookupInputError,
            "do not broadcast: m",
        ),
        (lambda t: infersim.gemm_mfu(t, "tpu", 1, 8, 8), GpuError, "h20, .*got 'tpu'"),
        (lambda t: infersim.gemm_mfu(t, 3, 1, 8, 8), GpuError, "got '3'"),
        (lambda t: infersim.gemm_mfu(t, ["h20", None], 1, 8, 8), GpuError, "got 'None'"),
        (
            lambda t: infersim.gemm_mfu(t, ["h20", "h20"], [1, 2, 3], 8, 8),
            LookupInputError,
            "device .2,., m .3,",
        ),
        (
            lambda t: infersim.attn_prefill_mfu(t, "h20", num_heads=1, seq_len=1),
            LookupInputError,
            "num_kv_heads and head_dim .* or qk_nope_head_dim and qk_rope_head_dim .* got neither",
        ),
        (
            lambda t: infersim.attn_decode_mfu(t, "h20", **HEADS, kv_lora_rank=1, batch_size=1, kv_len=1),
            LookupInputError,
            "got num_kv_heads, head_dim, kv_lora_rank",
        ),
        (
            lambda t: infersim.attn_decode_mfu(t, "h20", **HEADS, batch_size=1, kv_len=1, fp8_kv=2),
            LookupInputError,
            "fp8_kv must be True or False",
        ),
        (
            lambda t: infersim.grouped_gemm_mfu(
                t, "h20", "both", num_experts=1, topk=1, hidden=1, intermediate=1, tokens_per_gpu=1
            ),
            LookupInputError,
            "phase must be prefill or decode, got 'both'",
        ),
        (
            lambda t: infersim.grouped_gemm_mfu(
                t,
                "h20",
                "decode",
                num_experts=1,
                topk=1,
                hidden=1,
                intermediate=1,
                tokens_per_gpu=1,
                tp_size=2,
            ),
            LookupInputError,
            "tp_size must be at most num_gpus, got 2 of 1",
        ),
    ],
)
def test_wrong_arguments(tables, call, error, message):
    with pytest.raises(error, match=message) as raised:
        call(tables)
    assert isinstance(raised.value, FastroofError)


# estimates


def _one(tables, config=DENSE, **changes):
    (row,) = infersim.evaluate(tables, config, {**SCENARIO, **changes}).to_pylist()
    return row


@pytest.mark.parametrize(("config", "device"), [(DENSE, "H800"), (MOE, "H20"), (HYBRID, "H20")])
def test_steps_are_the_sum_of_their_parts(tables, config, device):
    row = _one(tables, config, device=device, max_prefill_tokens=4096, isl=4096)
    model = read_model(config)
    for prefix, total, overhead_ms in (("p", "ttft_ms", 30), ("d", "tpot_ms", 2 if model.gdn else 5)):
        assert row[f"{prefix}_error"] is None
        step_s = model.full_layers * (row[f"{prefix}_attn_core_max_s"] + row[f"{prefix}_attn_others_s"])
        if model.gdn:
            step_s += model.gdn.num_layers * (row[f"{prefix}_lin_core_max_s"] + row[f"{prefix}_lin_others_s"])
        rest = ("moe_s", "comm1_s", "comm2_s", "tp_comm_s")
        step_s += model.num_layers * sum(row[f"{prefix}_{part}"] for part in rest)
        assert row[total] == pytest.approx(step_s * 1000 + overhead_ms, rel=1e-12)
    assert row["decode_tgs"] == pytest.approx(32 / row["tpot_ms"] * 1000, rel=1e-12)


def test_a_batch_equals_its_rows(tables):
    columns = {
        "device": ["H20", "H800", "H20", "H800"],
        "tp_size": [1, 2, 4, 1],
        "world_size": [8, 8, 4, 1],
        "decode_bs": [None, 7, 64, 0],
        "isl": [128, 4096, 777, 30_000],
        "tbo": [True, False, True, False],
        "id": ["a", "b", "c", "d"],
    }
    batch = infersim.evaluate(tables, MOE, {**SCENARIO, **columns})
    assert batch.column_names[0] == "id"
    rows = [_one(tables, MOE, **{name: column[i] for name, column in columns.items()}) for i in range(4)]
    assert batch.to_pylist() == rows
    assert batch["target_bs"].to_pylist() == [128, 7, 64, 128]
    as_table = infersim.evaluate(
        tables, MOE, pa.table({**{k: [v] * 4 for k, v in SCENARIO.items()}, **columns})
    )
    assert as_table.equals(batch)


LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_routed_experts": 256,
    "num_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
}  # fmt: skip


@given(
    config=st.sampled_from([DENSE, MOE, HYBRID, LATENT, {**MOE, "num_shared_experts": 2, "head_dim": None}]),
    scenario=st.fixed_dictionaries(
        {
            "device": st.sampled_from(["H20", "H800"]),
            "world_size": st.sampled_from([1, 2, 3, 8, 16, 256]),
            "tp_size": st.sampled_from([1, 2, 3, 8, 64]),
            "num_nodes": st.integers(1, 4),
            "max_prefill_tokens": st.integers(1, 2**17),
            "decode_bs": st.none() | st.integers(1, 5000),
            "target_tgs": st.floats(1, 1e4),
            "target_tpot": st.floats(1, 500),
            "isl": st.integers(1, 2**20),
            "osl": st.integers(0, 2**17),
            "sm_ratio": st.floats(0.1, 1),
            **dict.fromkeys(("fp8_gemm", "fp8_kv", "deepep", "tbo"), st.integers(0, 1)),
        }
    ),
)
def test_any_scenario_is_as_the_reference_has_it(tables, config, scenario):
    expected = reference.evaluate(reference.Tree(SAMPLE), config, scenario)
    row = _one(tables, config, **scenario)
    for column in RESULT_COLUMNS:
        if not column.name.endswith("fallbacks"):
            assert row[column.name] == expected.get(column.name), column.name


def test_columns_have_units(tables):
    schema = infersim.evaluate(tables, DENSE, SCENARIO).schema
    for column in RESULT_COLUMNS:
        assert schema.field(column.name).metadata[b"unit"].decode() == column.unit
        assert column.name.endswith(("_s", "_ms", "_us")) == (column.unit in ("s", "ms", "us"))


def test_a_scenario_that_infersim_gives_up_does_not_end_the_batch(tables):
    """FP8 KV has no rows for 64-2-128; the other phase and the other rows are answered."""
    config = {**DENSE, "num_attention_heads": 64, "num_key_value_heads": 2}
    result = infersim.evaluate(tables, config, {**SCENARIO, "fp8_kv": [0, 1, 0]}).to_pylist()
    assert [row["d_error"] for row in result] == [None, "ValueError: min() arg is an empty sequence", None]
    assert [row["tpot_ms"] is None for row in result] == [False, True, False]
    assert all(row["ttft_ms"] > 30 for row in result)
    assert {**result[0]} == {**result[2]}
    assert all(
        value is None
        for name, value in result[1].items()
        if name.startswith("d_") and name[2:] not in ("error", "fallbacks")
    )


@pytest.mark.parametrize(
    ("files", "config", "kept", "lost"),
    [
        (
            {"gemm/h20/data.csv": "header\n1,12288,12288,9,0.0001\n"},
            DENSE,
            "p_attn_core_s",
            "p_attn_others_s",
        ),
        (
            {"gemm/h20/data.csv": "header\n1,4096,30000,9,0.0001\n"},
            {**DENSE, "head_dim": 200},
            "p_attn_core_s",
            "p_attn_others_s",
        ),
        (
            {"grouped_gemm/prefill/h20/data.csv": "header\n128,1,128,8,4096,768,1,9,9,0.0001,9,0.0004\n"},
            MOE,
            "p_attn_others_s",
            "p_moe_mfu",
        ),
        ({"mha/prefill/h20/32-8-128.csv": "header\nbf16,1,9,0.0004\n"}, DENSE, "flops_moe_g", "p_attn_mfu"),
        (
            {
                "gdn/prefill/h20/4-16-128-32-128.csv": "header\n1,1\n",
                "gemm/h20/data.csv": "header\n1,4096,8192,9,0.0001\n",
            },
            {**HYBRID, "num_attention_heads": 128, "num_key_value_heads": 128},
            "p_lin_core_us",
            "p_lin_others_s",
        ),
        (
            {"gemm/h20/data.csv": "header\n1,4096,1536,9,0.0001\n"},
            {**MOE, "num_shared_experts": 1},
            "p_moe_load_s",
            "p_shared_up_s",
        ),
    ],
)
def test_an_mfu_of_zero_stops_a_phase_where_infersim_divides_by_it(files, config, kept, lost):
    row = _one(infersim.read_files(files), config)
    assert row["p_error"] == "ZeroDivisionError: float division by zero"
    assert row[kept] is not None
    assert row[lost] is None
    assert row["p_comm1_s"] is None
    assert row["ttft_ms"] is None


def test_fewer_gpus_than_tensor_parallel_ranks(tables):
    row = _one(tables, world_size=1, tp_size=2)
    assert row["p_error"] == row["d_error"] == "ZeroDivisionError: world_size // tp_size is 0"
    assert row["p_attn_others_s"] > 0
    assert row["p_moe_s"] is None


def test_fallbacks_name_what_no_row_answered(tables):
    row = _one(tables, device="GB200")
    assert row["p_fallbacks"] == row["d_fallbacks"] == "attention, projections, MLP"
    assert row["warnings"].count("not exist") == 2
    measured = _one(tables, device="H20", isl=4096)
    assert measured["d_fallbacks"] == ""
    assert measured["p_fallbacks"] == "attention"


def test_experts_of_another_name_are_a_dense_model():
    model = read_model(
        {**DENSE, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    )
    assert (model.moe, model.num_experts, model.intermediate, model.topk) == (False, 1, 12288, 1)
    nested = read_model({"model_type": "qwen3_5_moe", "text_config": HYBRID})
    assert (nested.full_layers, nested.gdn.num_layers) == (9, 27)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_attention_heads is missing"),
        ({**DENSE, "hidden_size": -1}, "hidden_size"),
        ({**MOE, "num_experts_per_tok": None}, "num_experts_per_tok"),
        ({**DENSE, "kv_lora_rank": 512}, "q_lora_rank is missing"),
        ({**MOE, "full_attention_interval": 4}, "linear_conv_kernel_dim is missing"),
        ({**MOE, "num_shared_experts": "two"}, "num_shared_experts"),
        ("qwen3", "must be the dict"),
        ({"model_type": "qwen3_5", "text_config": None}, "text_config"),
    ],
)
def test_wrong_configs(tables, config, message):
    with pytest.raises(ModelError, match=message):
        infersim.evaluate(tables, config, SCENARIO)


@pytest.mark.parametrize(
    ("scenarios", "message"),
    [
        (3, "mapping of columns"),
        ({"device": "H20", "tp": 1}, "unknown tp; missing world_size, tp_size"),
        ({**SCENARIO, "isl": [1, 2], "osl": [1, 2, 3]}, "one length, got"),
        ({**SCENARIO, "isl": [1, 0]}, "isl must be integers of 1 to .* got 0 in row 1"),
        ({**SCENARIO, "isl": [1, None]}, "isl must have no null, got one in row 1"),
        ({**SCENARIO, "isl": [1.5]}, "isl must be integers"),
        ({**SCENARIO, "isl": "4096"}, "isl must hold numbers"),
        ({**SCENARIO, "isl": [1, "4096"]}, "isl must be a column of one type"),
        ({**SCENARIO, "osl": -1}, "osl must be integers of 0"),
        ({**SCENARIO, "tbo": 2}, "tbo must be integers of 0 to 1"),
        ({**SCENARIO, "decode_bs": -3}, "decode_bs must be"),
        ({**SCENARIO, "sm_ratio": 0.0}, "sm_ratio must be finite and above 0"),
        ({**SCENARIO, "target_tpot": float("inf")}, "target_tpot must be finite"),
        ({**SCENARIO, "device": 7}, "device must hold text"),
        ({**SCENARIO, "decode_bs": ["eight"]}, "decode_bs must hold numbers"),
    ],
)
def test_wrong_scenarios(tables, scenarios, message):
    with pytest.raises(BatchError, match=message):
        infersim.evaluate(tables, DENSE, scenarios)


def test_columns_of_any_make(tables):
    """Chunked, dictionary and NumPy columns equal lists."""
    chunked = pa.chunked_array([[16], [64]])
    columns = {
        "decode_bs": chunked,
        "device": pa.array(["H20", "H800"]).dictionary_encode(),
        "isl": np.int32(512),
    }
    listed = {"decode_bs": np.array([16.0, 64.0]), "device": ["H20", "H800"], "isl": 512}
    found, expected = (infersim.evaluate(tables, MOE, {**SCENARIO, **c}) for c in (columns, listed))
    assert found["tpot_ms"].equals(expected["tpot_ms"])
    assert found["device"].to_pylist() == ["H20", "H800"]


def test_no_scenarios(tables):
    empty = infersim.evaluate(tables, HYBRID, {name: [] for name in SCENARIO})
    assert empty.num_rows == 0
    assert empty.schema.types == infersim.evaluate(tables, HYBRID, SCENARIO).schema.types
