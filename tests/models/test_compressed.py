"""DeepSeek-V4's layers: weights, caches and states as published, formats, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fastroof
from fastroof.errors import ModelError, UnsupportedModelError
from fastroof.models import Layout, load_model
from fastroof.models.execution import Execution
from fastroof.models.named import preset_config
from fastroof.models.spec import step_calls
from fastroof.operators.calls import Elementwise, HyperConnection, MixerCall, SendReceive

FLASH = load_model("deepseek-v4-flash")
PRO = load_model("deepseek-v4-pro")
MILLION = 2**20


def kinds(model: fastroof.ModelSpec) -> dict[int, Any]:
    return {group.kind.attention.ratio: group.kind for group in model.layers}


def flash(**fields: Any) -> dict[str, Any]:
    return preset_config("deepseek-v4-flash") | fields


def test_layers_are_those_of_the_file_without_the_one_that_predicts_further_tokens():
    assert {g.kind.attention.ratio: g.count for g in FLASH.layers} == {0: 2, 4: 21, 128: 20}
    assert {g.kind.attention.ratio: g.count for g in PRO.layers} == {4: 30, 128: 31}
    assert FLASH.num_layers == 43
    assert load_model(flash(compress_ratios=[4, 128] * 21 + [4])).num_layers == 43
    with pytest.raises(ModelError, match="compress_ratios has 3 layers, num_hidden_layers is 43"):
        load_model(flash(compress_ratios=[4, 128, 0]))


def test_stored_elements_are_those_of_the_published_checkpoints_index():
    """862 B of Pro: two fp4 weights are one element, 32 of them share a scale, and one further layer.

    The layer that predicts a further token is one with the window alone, and a projection of both inputs.
    """
    kind = kinds(PRO)[128]
    further = replace(kind, attention=replace(kind.attention, ratio=0, window=128))
    experts = PRO.hidden * 3 * kind.mlp.intermediate * kind.mlp.num_experts
    layers = PRO.num_layers + 1
    whole = PRO.num_parameters + further.num_parameters(PRO.hidden) + 2 * PRO.hidden**2
    stored = whole - layers * experts * (1 - 1 / 2 - 1 / 32)
    assert stored / 1e9 == pytest.approx(862, abs=1)


def test_a_million_tokens_of_pro_take_vllms_own_figure():
    """9.62 GiB a sequence in bf16, entries, indexer and windows: vLLM's own figure for 61 layers."""
    entries = MILLION * PRO.sum_layers(lambda kind: kind.kv_bytes_per_token(Layout(), "bf16"))
    windows = 61 * 128 * 1024
    assert (entries + windows) / 2**30 == pytest.approx(9.62, abs=0.006)


def test_an_fp8_entry_is_584_bytes_and_an_indexers_key_132():
    """448 in fp8, 64 rotated ones in bf16, 7 scales padded to 8: the layout of vLLM's and FlashMLA's."""
    csa, hca, window = (kinds(FLASH)[ratio].attention for ratio in (4, 128, 0))
    assert csa.entry_bytes("fp8") == 584
    assert csa.kv_bytes_per_token(Layout(), "fp8") == (584 + 132) / 4
    assert hca.kv_bytes_per_token(Layout(8), "fp8") == 584 / 128
    assert window.kv_bytes_per_token(Layout(), "fp8") == 584
    assert (window.window, csa.window) == (128, None)


def test_a_sequence_keeps_its_window_and_open_entries():
    """Compressors keep 8 tokens of two entries (CSA) or 128 of one, a key and a score of each, in float32."""
    csa, hca, window = (kinds(FLASH)[ratio].attention for ratio in (4, 128, 0))
    assert csa.state_bytes(Layout()) == 128 * 584 + 8 * 2 * 2 * (512 + 128) * 4
    assert hca.state_bytes(Layout()) == 128 * 584 + 128 * 2 * 512 * 4
    assert window.state_bytes(Layout()) == 0.0


def test_tensor_parallelism_shares_heads_and_leaves_what_comes_before_them():
    csa = kinds(FLASH)[4].attention
    one, eight = (csa.linear_weights(4096, Layout(tp)) for tp in (1, 8))
    assert one["q_down"] == eight["q_down"] == 4096 * (1024 + 512)
    assert one["index"] == eight["index"] == 1024 * 64 * 128
    assert one["q_up"] == 8 * eight["q_up"] == 1024 * 64 * 512
    assert one["o"] == 8 * eight["o"] == 64 * 512 * 1024 + 8 * 1024 * 4096
    assert csa.obstacles(Layout(16)) == ["8 groups of 64 query heads do not divide by 16"]
    assert csa.obstacles(Layout(8)) == []
    # queries and their outputs, the widest that a kernel reads and writes
    assert csa.activation_width(4096, Layout(8)) == 64 * 512 // 8 * 2


@pytest.mark.parametrize(("ratio", "operator", "model", "window"), [
    (4, "csa", "deepseek-v4-flash", 2048), (128, "hca", "deepseek-v4-flash", 0),
    (0, "hca", "deepseek-v4-flash-window", 0),
])  # fmt: skip
def test_a_layer_is_a_block_between_streams_that_are_mixed(
    ratio: int, operator: str, model: str, window: int
) -> None:
    execution = Execution("fp8_block", "fp8")
    calls = kinds(FLASH)[ratio].calls(4096, Layout(4), execution)
    pre, norm, block = calls[:3]
    assert isinstance(pre, HyperConnection)
    assert (pre.stage, pre.streams, pre.sinkhorn_iterations, pre.sites) == ("pre", 4, 20, 2)
    assert isinstance(calls[-1], HyperConnection)
    assert calls[-1].stage == "post"
    assert sum(isinstance(call, HyperConnection) for call in calls) == 2
    assert isinstance(norm, Elementwise)
    assert isinstance(block, MixerCall)
    key = ("fp8_block", "fp8", "bf16", model, 16)
    assert (tuple(block.decode), tuple(block.prefill)) == (
        (f"{operator}_decode", key), (f"{operator}_prefill", key),
    )  # fmt: skip
    assert block.window == window
    # neither norm adds a residual: the streams are added to after both
    norms = [c.row_bytes for c in calls if isinstance(c, Elementwise) and c.role.endswith("_norm")]
    assert norms == [2 * 2 * 4096] * 2
    assert [c.role for c in calls if not isinstance(c, MixerCall)].count("router") == 1


def test_all_streams_go_from_stage_to_stage_and_out_of_the_embedding():
    calls = step_calls(FLASH, Layout(pp=2), Execution("fp8_block", "fp8"))
    (embedding,) = calls.before
    assert isinstance(embedding, Elementwise)
    assert embedding.row_bytes == 5 * 2 * 4096
    (sent,) = (call for call in calls.after if isinstance(call, SendReceive))
    assert sent.row_bytes == 4 * 2 * 4096


def test_mixing_weights_are_counted():
    """24 of a projection of all four streams, their biases, and three scales, before each sublayer."""
    kind = kinds(FLASH)[4]
    assert kind.connections is not None
    assert kind.connections.weights(4096) == 2 * (24 * 4 * 4096 + 24 + 3)
    plain = replace(kind, connections=None)
    assert kind.num_parameters(4096) - plain.num_parameters(4096) == 2 * (24 * 4 * 4096 + 27)


def test_unmeasured_widths_are_refused():
    with pytest.raises(ModelError, match="topk 256"):
        load_model(flash(index_topk=256))
    with pytest.raises(ModelError, match="compress_ratio of 8 has no operator: 0, 4, 128"):
        load_model(flash(compress_ratios=[8] * 43))


def test_experts_in_a_format_of_their_own():
    """With quantization_config: fp4 is MXFP4, fp8 and nothing its own format, and another is refused."""
    for message, stored in (("fp4", "mxfp4"), ("fp8", "fp8_block"), (None, "fp8_block")):
        model = load_model(flash(expert_dtype=message))
        assert {dict(kind.formats)["experts"] for kind in model.kinds} == {stored}
        assert {dict(kind.formats)["shared_down"] for kind in model.kinds} == {"fp8_block"}
    with pytest.raises(UnsupportedModelError, match="expert_dtype 'fp6'"):
        load_model(flash(expert_dtype="fp6"))
    # without any quantisation nothing is
    assert load_model(flash(quantization_config=None)).checkpoint.dtype == "bf16"
    # engines have no other cache
    assert load_model(flash(quantization_config=None)).checkpoint.kv_dtype == "fp8"
