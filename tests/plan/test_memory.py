"""What a plan holds in one GPU's memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import typeof

from fastroof import compile_plan, load_model
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled import serving
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import longest_held
from fastroof.errors import BatchError, PlanError
from fastroof.memory.gpu_memory import MemoryUse, plan_memory
from fastroof.memory.plan_memory import PlanMemory
from fastroof.models import LayerGroup, LayerKind, Layout
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Execution
from fastroof.models.mlp import GatedMlp
from fastroof.models.spec import stages_of
from fastroof.serving import estimate, estimate_disaggregated
from fastroof.sweep import best_batches
from fastroof.units import GIB


def memory(h100, model="llama-3.1-8b", **options):
    return compile_plan(
        model, "h100", h100, **{"engine": "kernels", "max_num_batched_tokens": 64, **options}
    ).memory


def test_llama_8b_worked_out_by_hand(h100):
    found = memory(h100)
    layer = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    assert found.weight_bytes == 2 * (32 * layer + 2 * 128256 * 4096 + 4096)
    assert found.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)  # 8.03 B parameters
    assert found.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert found.reserve_bytes == pytest.approx(8 * GIB, abs=1)
    left = 72 * GIB - found.weight_bytes - found.activation_bytes
    assert found.max_kv_tokens == pytest.approx(left / found.kv_bytes_per_token, abs=1)


def test_memory_made_by_hand_keeps_every_token_unless_it_has_a_window():
    by_hand = PlanMemory.of_sequence(3000, parts=30_000_000)
    assert by_hand.kv_bytes([1, 1000]).tolist() == [3000, 3_000_000]
    assert by_hand.max_sequences([1, 1000]).tolist() == [10_000, 10]
    with pytest.raises(BatchError, match=r"kv_len must be from 1 to 268,435,456, got 0"):
        by_hand.max_sequences(0)
    assert by_hand.kv_bytes(0) == 0


def test_what_splits_and_what_does_not(h100):
    whole, split = memory(h100), memory(h100, tp=8)
    assert split.kv_bytes_per_token * 8 == whole.kv_bytes_per_token
    norms = 2 * (32 * 2 * 4096 + 4096)
    padding = 2 * 2 * 4096 * (load_model("llama-3.1-8b").padded_vocab(8) - 128256)
    assert (split.weight_bytes - norms) * 8 == whole.weight_bytes - norms + padding
    # fewer KV heads than GPUs: they are replicated
    four, eight = (memory(h100, "qwen2.5-7b", tp=tp).kv_bytes_per_token for tp in (1, 4))
    assert four == 4 * eight


def test_fp8_halves_linear_weights_and_kv(h100):
    wide, narrow = memory(h100), memory(h100, dtype="fp8", kv_dtype="fp8")
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token
    linear = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    assert wide.weight_bytes - narrow.weight_bytes == linear
    assert narrow.max_kv_tokens > 2 * wide.max_kv_tokens


def test_a_model_that_does_not_fit_has_no_room(h100):
    assert memory(h100, "llama-3.1-70b").max_kv_tokens == 0
    assert memory(h100, "llama-3.1-70b", tp=4).max_kv_tokens > 0


def test_activations_grow_with_the_largest_step(h100):
    small, large = (memory(h100, max_num_batched_tokens=n) for n in (64, 8192))
    assert large.activation_bytes == 128 * small.activation_bytes
    assert large.max_kv_tokens < small.max_kv_tokens


def test_tied_embeddings_are_held_once(h100):
    model = load_model("llama-3.1-8b")
    tied = dataclasses.replace(model, tie_embeddings=True)
    both = [memory(h100, m).weight_bytes for m in (model, tied)]
    assert both[0] - both[1] == 2 * 128256 * 4096


def alternating(heads: tuple[int, int, int], window: int, windowed: int, full: int):
    kinds = ((window, windowed, "windowed"), (None, full, "full"))
    layers = tuple(
        LayerGroup(LayerKind(GroupedQueryAttention(*heads, window=size), GatedMlp(2880), name), count)
        for size, count, name in kinds
        if count
    )
    return replace(load_model("llama-3.1-8b"), layers=layers, name="alternating")


@given(kv_len=st.integers(1, 200_000))
def test_windowed_layers_keep_no_more_than_their_window(h100, kv_len):
    for windowed, full in ((12, 12), (24, 0), (30, 5)):
        model = alternating((64, 8, 64), 128, windowed, full)
        found = compile_plan(
            model, "h100", h100, max_num_batched_tokens=64, max_num_seqs=8, engine="kernels"
        ).memory
        a_token = 2 * 8 * 64 * 2
        assert found.kv_bytes_per_token == (windowed + full) * a_token
        expected = a_token * (full * kv_len + windowed * min(kv_len, 128))
        assert found.kv_bytes(kv_len) == expected
        room = found.max_kv_tokens * found.kv_bytes_per_token
        fit = found.max_sequences(kv_len)
        assert fit * expected <= room < (fit + 1) * expected
        assert found.held_tokens(kv_len) == pytest.approx(expected / found.kv_bytes_per_token)
        # conservative: as many tokens, whatever their sequences
        assert fit * kv_len >= found.max_kv_tokens - kv_len
        longest = longest_held(found.kv_room, 100)
        if longest < MAX_KV_LEN:
            assert found.max_sequences(longest) >= 100 > found.max_sequences(longest + 1)


def test_sequences_of_a_model_without_windows_fit_by_their_tokens(h100):
    found = memory(h100, "llama-3.1-8b")
    assert found.kv_room == (found.max_kv_tokens, 1, 0, 0, 0, 1, 1, MAX_KV_LEN)
    assert found.state_bytes_per_sequence == 0
    assert found.state_tokens == 0.0
    assert found.max_sequences(1000) == found.max_kv_tokens // 1000
    assert found.max_sequences([10, 5000]).tolist() == [found.max_kv_tokens // n for n in (10, 5000)]
    assert found.kv_bytes(7) == 7 * found.kv_bytes_per_token
    assert found.held_tokens(12345.5) == 12345.5
    assert longest_held(found.kv_room, 7) == found.max_kv_tokens // 7


@pytest.mark.slow
def test_what_fits_by_length_is_what_serving_and_sweeps_take(h100):
    model = replace(alternating((64, 8, 64), 128, 12, 12), max_position=131072)
    plan = compile_plan(model, "h100", h100, max_num_batched_tokens=4096, max_num_seqs=4096, engine="vllm")
    fit = plan.memory.max_sequences(16384)
    assert fit > 1.9 * (plan.memory.max_kv_tokens // 16384)
    longest = min(plan.memory.largest_length(fit), plan.model.max_position)
    assert longest >= 16384
    assert plan.memory.max_sequences(longest) == fit > plan.memory.max_sequences(longest + 1)
    best = best_batches(plan, range(1, 4097), [100, 16384])
    assert best.over_memory[0].tolist() == [0, 4096 - fit]
    # clients beyond those that fit run no more at once
    # a given number of tokens has no blocks
    held = plan.memory.held_tokens(16000 + 0.5 * 768) - plan.memory.open_tokens
    got = estimate(plan, 16000, 768, 4000, max_num_batched_tokens=4000, max_num_seqs=math.inf)
    full = estimate(
        plan, 16000, 768, 4000, max_num_batched_tokens=4000, max_num_seqs=math.inf, max_kv_tokens=1e5
    )
    assert full.effective_concurrency == pytest.approx(min(1e5 / held, 4000))
    assert got.effective_concurrency > full.effective_concurrency
    one = estimate_disaggregated(plan, plan, 16000, 200, 1, max_num_batched_tokens=4000)
    dense = compile_plan(
        replace(model.with_full_attention()),
        "h100",
        h100,
        max_num_batched_tokens=4096,
        max_num_seqs=4096,
        engine="vllm",
    )
    other = estimate_disaggregated(dense, dense, 16000, 200, 1, max_num_batched_tokens=4000)
    assert one.transfer_ms == pytest.approx(other.transfer_ms * (16000 + 128) / 32000)


@dataclasses.dataclass(frozen=True)
class Stateful(GroupedQueryAttention):
    """Keeps a state of a sequence too, half of it on each of two GPUs; ``holds_tokens`` False: that alone."""

    state: int = 3_000_000
    holds_tokens: bool = True

    def state_bytes(self, layout):
        return self.state / layout.tp

    def kv_bytes_per_token(self, layout, kv_dtype):
        return super().kv_bytes_per_token(layout, kv_dtype) if self.holds_tokens else 0.0


def stateful(full: int, linear: int, state: int = 3_000_000):
    """Layers with KV cache, and layers with a state alone."""
    attention = Stateful(64, 8, 64, state=state, holds_tokens=False)
    layers = (
        LayerGroup(LayerKind(attention, GatedMlp(2880), "linear"), max(linear, 1)),
        LayerGroup(LayerKind(GroupedQueryAttention(64, 8, 64), GatedMlp(2880), "full"), max(full, 1)),
    )
    kept = tuple(group for group, count in zip(layers, (linear, full), strict=True) if count)
    return replace(load_model("llama-3.1-8b"), layers=kept, name="stateful", max_position=131072)


@given(kv_len=st.integers(1, 200_000))
def test_a_state_is_bytes_a_sequence(h100, kv_len):
    found = memory(h100, stateful(6, 18), max_num_seqs=8)
    assert found.kv_bytes_per_token == 6 * 2 * 8 * 64 * 2
    assert found.state_bytes_per_sequence == 18 * 3_000_000
    expected = found.kv_bytes_per_token * kv_len + found.state_bytes_per_sequence
    assert found.kv_bytes(kv_len) == expected
    room = found.max_kv_tokens * found.kv_bytes_per_token
    fit = found.max_sequences(kv_len)
    assert fit * expected <= room < (fit + 1) * expected
    assert found.held_tokens(kv_len) == pytest.approx(expected / found.kv_bytes_per_token)
    assert found.tokens_beside_states(100) == (room - 100 * 54_000_000) // found.kv_bytes_per_token
    longest = longest_held(found.kv_room, 100)
    assert found.max_sequences(longest) >= 100 > found.max_sequences(longest + 1)
    # more sequences than there is room for states of: none of any length
    assert longest_held(found.kv_room, 10**5) == found.tokens_beside_states(10**5) == 0


def test_states_take_room_in_serving_and_sweeps_alike(h100):
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 4096, "engine": "vllm"}
    plan, stateless = (
        compile_plan(stateful(6, 18, n), "h100", h100, **{"engine": "kernels", **options})
        for n in (3_000_000, 0)
    )
    fit = plan.memory.max_sequences(2048)
    assert fit < 0.5 * stateless.memory.max_sequences(2048)
    longest = min(plan.memory.largest_length(fit), plan.model.max_position)
    assert plan.memory.max_sequences(longest) == fit > plan.memory.max_sequences(longest + 1)
    over = best_batches(plan, range(1, 4097), [100, 2048]).over_memory[0].tolist()
    assert over == [4096 - plan.memory.max_sequences(length) for length in (100, 2048)]
    got = estimate(plan, 2048, 8192, 4000, max_num_batched_tokens=4096, max_num_seqs=math.inf)
    held = plan.memory.held_tokens(2048 + 4096)
    assert got.effective_concurrency == pytest.approx(plan.memory.max_kv_tokens / held)
    assert plan.memory.max_sequences(2048 + 4096) == pytest.approx(got.effective_concurrency, rel=0.05)
    # a cached prefix takes room as a computed one does
    cached = estimate(
        plan, 2048, 8192, 4000, max_num_batched_tokens=4096, max_num_seqs=math.inf, prefix_hit=0.5
    )
    assert cached.effective_concurrency == pytest.approx(got.effective_concurrency)


def test_a_state_is_sent_from_worker_to_worker_once_a_prompt(h100):
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 256, "engine": "vllm"}
    sent = []
    for layers in ((6, 18, 3_000_000), (6, 18, 0), (0, 24, 3_000_000)):
        plan = compile_plan(stateful(*layers), "h100", h100, **{"engine": "kernels", **options})
        times = [
            estimate_disaggregated(plan, plan, isl, 200, 1, max_num_batched_tokens=4096, link_bytes_per_s=1e9)
            for isl in (1000, 3000)
        ]
        sent.append([found.transfer_ms for found in times])
    a_token_ms = 6 * 2 * 8 * 64 * 2 / 1e9 * 1e3
    assert sent[1] == pytest.approx([1000 * a_token_ms, 3000 * a_token_ms])
    assert sent[0] == pytest.approx([54 + 1000 * a_token_ms, 54 + 3000 * a_token_ms])
    assert sent[2] == pytest.approx([72, 72])


def test_a_model_of_states_alone_holds_sequences_of_any_length(h100):
    plan = compile_plan(
        stateful(0, 24), "h100", h100, max_num_batched_tokens=4096, max_num_seqs=4096, engine="vllm"
    )
    found = plan.memory
    assert found.kv_bytes_per_token == 0
    fit = found.max_kv_tokens // 72_000_000  # of bytes
    assert found.max_sequences([1, 100_000]).tolist() == [fit, fit]
    assert longest_held(found.kv_room, fit) == MAX_KV_LEN
    assert longest_held(found.kv_room, fit + 1) == 0
    got = estimate(plan, 512, 4096, 4000, max_num_batched_tokens=4096, max_num_seqs=math.inf)
    assert got.effective_concurrency == pytest.approx(found.max_kv_tokens / 72_000_000)


def test_estimates_of_a_model_of_states_alone_compile_no_loop_of_their_own(h100, monkeypatch):
    types = set()
    estimates = serving.serving_estimates

    def noted(*given):
        types.add(tuple(map(typeof, given)))
        return estimates(*given)

    monkeypatch.setattr(serving, "serving_estimates", noted)
    for model in ("llama-3.1-8b", stateful(0, 24)):
        plan = compile_plan(
            model, "h100", h100, max_num_batched_tokens=4096, max_num_seqs=4096, engine="vllm"
        )
        for max_num_seqs in (60, math.inf):
            estimate(plan, 512, 4096, 40, max_num_batched_tokens=4096, max_num_seqs=max_num_seqs)
    assert len(types) == 1


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_a_model_of_states_alone_runs_in_every_engine(h100, engine):
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 4096, "engine": engine, "allow_modelled": True}
    memory = compile_plan(stateful(0, 24), "h100", h100, **options).memory
    fit = memory.max_sequences(1)
    assert fit == memory.max_sequences(10**6) > 10
    states = memory.state_slots // 3 if engine == "sglang" else memory.parts // memory.state_parts
    assert fit == states == memory.most_running(states)


def in_eight_stages(h100, model):
    """Return the plan, and the memory of each stage."""
    plan = compile_plan(
        model, "h100", h100, pp=8, max_num_batched_tokens=64, max_num_seqs=8, engine="kernels"
    )
    stages = [
        plan_memory(one.model(model), plan.layout, plan.gpu, plan.execution, MemoryUse(64), stage=one.number)
        for one in stages_of(model, 8)
    ]
    return plan, stages


def test_no_stage_holds_fewer_than_the_plan(h100):
    plan, stages = in_eight_stages(h100, stateful(6, 18))
    # some stages have two linear layers and a full one, others three linear ones and no token's bytes
    assert {part.kv_bytes_per_token for part in stages} == {0, 2 * 8 * 64 * 2}
    assert plan.memory.kv_bytes_per_token == 2 * 8 * 64 * 2
    for kv_len in (1, 1000, 100_000):
        fewest = min(part.max_sequences(kv_len) for part in stages)
        # the fullest stage's tokens and another's state: nearly all of a room each, at worst
        assert 0.5 * fewest <= plan.memory.max_sequences(kv_len) <= fewest
        if kv_len != 1000:
            assert plan.memory.max_sequences(kv_len) > 0.98 * fewest
    alike = stateful(8, 16)
    ends = [memory(h100, alike, pp=pp).state_bytes_per_sequence for pp in (1, 8)]
    assert ends[0] == 16 * 3_000_000
    assert ends[1] == pytest.approx(2 * 3_000_000, rel=0.05)


@pytest.mark.parametrize("vocab", [128_256, 3_000_000])
def test_states_of_a_stage_with_less_room_count_against_that_room(h100, vocab):
    # one stage alone keeps tokens; the first and the last have embeddings, which leave their states less room
    plan, stages = in_eight_stages(h100, replace(stateful(1, 23), vocab=vocab))
    rooms = [part.max_kv_tokens * part.token_bytes for part in stages]
    assert (min(rooms) < 0.8 * max(rooms)) == (vocab == 3_000_000)
    fewest = min(part.max_sequences(1) for part in stages)
    assert 0.98 * fewest < plan.memory.max_sequences(1) <= fewest


def test_every_stream_of_hyper_connections_takes_a_residual_in_and_out(h100):
    model = load_model("deepseek-v4-flash")
    kinds = [replace(group, kind=replace(group.kind, connections=None)) for group in model.layers]
    without = replace(model, layers=tuple(kinds))
    assert (model.residual_rows, without.residual_rows) == (4, 1)
    held = [
        plan_memory(one, Layout(8), h100.gpu, Execution(), MemoryUse(1000)).activation_bytes
        for one in (model, without)
    ]
    assert held[0] - held[1] == 3 * 1000 * 2 * model.hidden * 2


# formats of the cache that no table has


def stored_bytes(kv_dtype: str, heads: int, head_dim: int) -> int:
    """Bytes of a token in a layer: nvfp4_kv_cache_full_dim and TritonAttentionBackend of vLLM 0.33.0."""
    side = head_dim // 2 + head_dim // 16 if kv_dtype == "nvfp4" else head_dim + 4
    return 2 * heads * side


@pytest.mark.parametrize("kv_dtype", ["nvfp4", "int8_per_token_head"])
@pytest.mark.parametrize(("model", "heads", "head_dim"), [("qwen3-32b", 8, 128), ("gpt-oss-20b", 8, 64)])
def test_a_token_takes_the_bytes_of_the_engine(kv_dtype, model, heads, head_dim):
    plan = compile_plan(model, "b200", kv_dtype=kv_dtype)
    layers = load_model(model).num_layers
    assert plan.memory.kv_bytes_per_token == layers * stored_bytes(kv_dtype, heads, head_dim)


@pytest.mark.parametrize(
    ("kv_dtype", "least", "most"), [("nvfp4", 0.5, 1.0), ("int8_per_token_head", 1.0, 1.04)]
)
def test_times_are_those_of_fp8_at_equal_latency_over_bound(kv_dtype, least, most):
    """Decodes that read much cache take the share of its bytes, others their launch; all are modelled."""
    plans = [compile_plan("qwen3-32b", "b200", kv_dtype=name, engine="kernels") for name in (kv_dtype, "fp8")]
    for batch, kv_len in ((1, 128), (8, 1024), (64, 4096), (256, 8192)):
        steps = [plan.explain([(1, kv_len - 1)] * batch).operators for plan in plans]
        ours, fp8 = (next(one for one in step if one.name == "decode attention") for step in steps)
        assert least <= ours.total_us / fp8.total_us <= most
        assert (ours.origin, fp8.origin < ORIGIN_MODELLED) == (ORIGIN_MODELLED, True)


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "kv_dtype", "message"),
    [
        ("deepseek-v3", "b200", "vllm", "nvfp4", "keys and values of heads, and deepseek-v3 caches 128 MLA"),
        ("qwen3-32b", "b200", "sglang", "nvfp4", "sglang .* has no known nvfp4 KV cache on b200"),
        ("qwen3-32b", "b200", "vllm-0.12", "int8_per_token_head", "vllm-0.12 .* has no known int8"),
        ("gpt-oss-20b", "h100", "vllm", "nvfp4", "head_dim of 128, 256, 512, and gpt-oss-20b has 64"),
    ],
)
def test_what_has_no_kernel_is_refused(model, gpu, engine, kv_dtype, message):
    with pytest.raises(PlanError, match=f"{message}.*: use kv_dtype bf16 or fp8$"):
        compile_plan(model, gpu, engine=engine, kv_dtype=kv_dtype)
