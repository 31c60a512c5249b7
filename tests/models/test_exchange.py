"""What GPUs send each other for experts, by the layout and the rules of engines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastroof.models import LayerKind, Layout
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import ExchangeRules, Execution
from fastroof.models.experts import RoutedExperts
from fastroof.models.mlp import GatedMlp
from fastroof.operators.calls import AllReduce, Collective, Dispatch, Parallel

HIDDEN = 4096
ROW = HIDDEN * 2
EXPERTS = RoutedExperts(128, 8, 1536)
ATTENTION = GroupedQueryAttention(64, 8, 128)
PLAIN = ExchangeRules()
VLLM = ExchangeRules(token_shares="with_ep", alltoall_needs_dp=True, libraries=("ll", "ht"))
SGLANG = ExchangeRules(
    token_shares="always", attention_sum="reduce_scatter", libraries=("ll", "normal"), alltoall="never"
)
TRTLLM = ExchangeRules(
    alltoall="over_topk", alltoall_needs_dp=True, libraries=("nvlink_two_sided", "nvlink_two_sided"),
    comm_dtypes=("nvfp4",), gathered_bytes=(("nvfp4", 0.5625),),
)  # fmt: skip


def sent(layout: Layout, rules: ExchangeRules = PLAIN, mlp: Any = EXPERTS, **execution: Any) -> list[Any]:
    """Calls of a layer that go over links."""
    calls = LayerKind(ATTENTION, mlp).calls(HIDDEN, layout, Execution(exchange=rules, **execution))
    return [call for call in calls if isinstance(call, AllReduce | Collective | Dispatch | Parallel)]


def shape(call: Any) -> tuple[Any, ...]:
    kind = getattr(call, "collective", "all_reduce")
    return (kind, call.num_gpus, call.stride, call.row_bytes, call.rows)


def test_one_gpu_sends_nothing():
    for rules in (ExchangeRules(), VLLM, SGLANG, TRTLLM):
        assert sent(Layout(), rules) == []


@pytest.mark.parametrize("rules", [ExchangeRules(), VLLM, SGLANG, TRTLLM])
@pytest.mark.parametrize("ep", [1, 4])
def test_attention_by_tp_alone_is_two_all_reduces(rules, ep):
    calls = [shape(call) for call in sent(Layout(4, ep=ep), rules)]
    assert calls == [("all_reduce", 4, 1, ROW, "tokens")] * 2


@pytest.mark.parametrize("rules", [ExchangeRules(), VLLM, SGLANG])
def test_attention_by_dp_alone_gathers_and_scatters_the_tokens_of_all(rules):
    calls = [shape(call) for call in sent(Layout(1, dp=8, ep=8), rules)]
    assert calls == [("all_gather", 8, 1, ROW, "tokens"), ("reduce_scatter", 8, 1, ROW, "expert_tokens")]


def test_what_is_quantised_before_is_gathered_so():
    layout = Layout(1, dp=4, ep=4)
    gathered = [sent(layout, TRTLLM, dtype=dtype)[0].row_bytes for dtype in ("bf16", "nvfp4")]
    assert gathered[1] / gathered[0] == 9 / 32


def test_vllm_gathers_over_ranks_and_reduces_over_tp():
    """Without expert parallelism its collectives are those of both."""
    calls = [shape(call) for call in sent(Layout(2, dp=4), VLLM)]
    assert calls == [
        ("all_reduce", 2, 1, ROW, "tokens"),
        ("all_gather", 4, 2, ROW, "tokens"),
        ("reduce_scatter", 4, 2, ROW, "expert_tokens"),
        ("all_reduce", 2, 1, ROW, "tokens"),
    ]


@pytest.mark.parametrize("dp", [2, 4])
def test_vllm_splits_a_ranks_tokens_over_its_gpus_with_expert_parallelism(dp):
    calls = [shape(call) for call in sent(Layout(2, dp=dp, ep=2 * dp), VLLM)]
    assert calls == [
        ("all_reduce", 2, 1, ROW, "tokens"),
        ("all_gather", 2 * dp, 1, ROW / 2, "tokens"),
        ("reduce_scatter", 2 * dp, 1, ROW, "expert_tokens"),
        ("all_gather", 2, 1, ROW / 2, "tokens"),
    ]


def test_sglang_scatters_the_sums_of_attention():
    for ep in (1, 2, 8):
        calls = [shape(call) for call in sent(Layout(2, dp=4, ep=ep), SGLANG)]
        assert calls == [
            ("reduce_scatter", 2, 1, ROW, "tokens"),
            ("all_gather", 8, 1, ROW / 2, "tokens"),
            ("reduce_scatter", 8, 1, ROW, "expert_tokens"),
            ("all_gather", 2, 1, ROW / 2, "tokens"),
        ]
    # a dense layer among them keeps its all-reduces
    dense = [shape(call) for call in sent(Layout(2, dp=4, ep=8), SGLANG, GatedMlp(8192))]
    assert dense == [("all_reduce", 2, 1, ROW, "tokens")] * 2


@pytest.mark.parametrize("gpus", [2, 8])
def test_all_to_all_has_a_kernel_for_decodes_and_one_for_prefill(gpus):
    calls = sent(Layout(1, dp=gpus, ep=gpus), VLLM._replace(alltoall="always"))
    assert [(c.phase, c.library, c.steps) for c in calls] == [
        ("dispatch", "ll", "decode_only"),
        ("dispatch", "ht", "with_prefill"),
        ("combine", "ll", "decode_only"),
        ("combine", "ht", "with_prefill"),
    ]
    assert {(c.hidden, c.topk, c.num_experts, c.num_gpus, c.shared_by) for c in calls} == {
        (HIDDEN, 8, 128, gpus, 1)
    }


def test_all_to_all_with_tp_sends_shares_and_gathers_them():
    calls = sent(Layout(2, dp=4, ep=8), SGLANG._replace(alltoall="always"))
    assert shape(calls[0]) == ("reduce_scatter", 2, 1, ROW, "tokens")
    assert {call.shared_by for call in calls[1:-1]} == {2}
    assert shape(calls[-1]) == ("all_gather", 2, 1, ROW / 2, "tokens")


def test_all_to_all_where_groups_outnumber_a_tokens_experts():
    few, many = sent(Layout(1, dp=8, ep=8), TRTLLM), sent(Layout(1, dp=16, ep=16), TRTLLM, dtype="nvfp4")
    assert {type(call) for call in few} == {Collective}
    assert [(c.phase, c.steps, c.comm_dtype) for c in many] == [
        ("prepare", "all", "nvfp4"),
        ("dispatch", "all", "nvfp4"),
        ("combine", "all", "nvfp4"),
    ]
    # sharing experts' weights rules it out, and so does a single rank
    assert {type(call) for call in sent(Layout(1, dp=32, ep=16), TRTLLM)} == {Collective}
    assert {type(call) for call in sent(Layout(16, ep=16), TRTLLM)} == {AllReduce}


def test_shared_experts_up_to_a_number_of_tokens_overlap_in_all_steps():
    mlp = RoutedExperts(128, 8, 1536, shared_intermediate=1536)
    how = Execution(exchange=VLLM, shared_beside=True, shared_most_tokens=256)
    calls = LayerKind(ATTENTION, mlp).calls(HIDDEN, Layout(2), how)
    both = [call for call in calls if isinstance(call, Parallel)]
    assert [one.most_tokens for one in both] == [256, 256]
    assert [{call.steps for path in one.paths for call in path} for one in both] == [
        {"decode_only"}, {"with_prefill"},
    ]  # fmt: skip
    # the dense MLP of Gemma 4 is not a shared expert
    dense = dataclasses.replace(mlp, apart=True)
    calls = LayerKind(ATTENTION, dense).calls(HIDDEN, Layout(2), how)
    assert not [call for call in calls if isinstance(call, Parallel)]


def test_overlapped_shared_experts_depend_on_the_kind_of_steps():
    """Decodes take the longest of both paths, with their own kernels; prefill takes one after the other."""
    mlp = RoutedExperts(128, 8, 1536, shared_intermediate=1536)
    for rules, libraries in ((VLLM._replace(alltoall="always"), ("ll", "ht")), (VLLM, ())):
        how = Execution(exchange=rules, shared_beside=True)
        calls = LayerKind(ATTENTION, mlp).calls(HIDDEN, Layout(1, dp=8, ep=8), how)
        (parallel,) = (call for call in calls if isinstance(call, Parallel))
        routed, shared = parallel.paths
        assert {call.steps for path in parallel.paths for call in path} == {"decode_only"}
        assert len(shared) == 3
        assert "experts" in [call.role for call in routed]
        assert tuple(c.library for c in routed if isinstance(c, Dispatch)) == libraries[:1]
        after = [call for call in calls if getattr(call, "steps", "") == "with_prefill"]
        assert len([call for call in after if call.role.startswith("shared")]) == 3
        assert tuple(dict.fromkeys(c.library for c in after if isinstance(c, Dispatch))) == libraries[1:]
