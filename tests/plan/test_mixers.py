"""Latent, sparse and linear attention in plans: blocks against the lookups that they are made of."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.compiled import steps
from fastroof.compiled.grids import grid_latency_us
from fastroof.errors import FastroofError, GpuError, MissingTableError
from fastroof.models import ModelSpec
from fastroof.models.layers import LayerGroup, LayerKind
from fastroof.models.mlp import GatedMlp
from fastroof.operators.calls import MixerCall, MixerKernel
from fastroof.operators.ragged import OCTAVE, kernel_donor
from fastroof.operators.registry import OPERATORS
from fastroof.plan.attention import MixerErrors, step_attention
from fastroof.tables.kernel_order import KernelOrder
from fastroof.uncertainty.leave_one_out import EdgeVariances, LocalErrors
from tests.reference.handmade import handmade_tables

MLA = MixerKernel("mla_decode", ("bf16", 16, 512, 64))
MLA_PROMPT = MixerKernel("mla_prefill", ("bf16", "bf16", 16, 128, 64))
DSA = MixerKernel("dsa_decode", ("fp8_block", "bf16", "bf16", "glm-5", 8))
DSA_PROMPT = MixerKernel("dsa_prefill", ("fp8_block", "bf16", "bf16", "glm-5", 8))
GDN = MixerKernel("gdn", ("generation", "all", 4, 4, 128, 16, 128))
GDN_PROMPT = MixerKernel("gdn", ("context", "all", 4, 4, 128, 16, 128))


@dataclass(frozen=True)
class Mixing:
    """An attention of some mixers alone."""

    mixers: tuple[MixerCall, ...]
    window = None

    def obstacles(self, layout: Any) -> list[str]:
        return []

    def calls(self, hidden: int, layout: Any, execution: Any) -> tuple[MixerCall, ...]:
        return self.mixers

    def kv_bytes_per_token(self, layout: Any, kv_dtype: str) -> float:
        return 1152.0

    def state_bytes(self, layout: Any) -> float:
        return 0.0

    def linear_weights(self, hidden: int, layout: Any) -> dict[str, int]:
        return {}

    def other_weights(self, hidden: int, layout: Any) -> int:
        return 0

    def activation_width(self, hidden: int, layout: Any) -> int:
        return hidden


def model(*mixers: MixerCall, layers: int = 3) -> ModelSpec:
    kind = LayerKind(Mixing(mixers), GatedMlp(4096))  # type: ignore[arg-type]
    return ModelSpec("mixing", "Mixing", 2048, 32000, False, 131072, None, (LayerGroup(kind, layers),))


@pytest.fixture(scope="module")
def h100() -> Any:
    return fastroof.load_tables("h100")


def step_us(plan: Any, *requests: tuple[int, int]) -> float:
    return float(plan.step_us(fastroof.StepBatch.from_requests([requests]))[0])


def in_block(block: Any, batch: Any, length: Any) -> Any:
    out, origin = np.empty(len(batch)), np.empty(len(batch), np.uint8)
    grid_latency_us(block, np.asarray(batch, np.float64), np.asarray(length, np.float64), out, origin)
    return out, origin


@pytest.mark.parametrize(("kernel", "is_decode", "window"), [
    (MLA, True, 0), (MLA_PROMPT, False, 0), (DSA, True, 2048), (DSA_PROMPT, False, 2048), (GDN, True, 0),
    (GDN_PROMPT, False, 0),
])  # fmt: skip
def test_a_block_is_the_lookups_of_its_table(h100: Any, kernel: Any, is_decode: bool, window: int) -> None:
    operator = OPERATORS[kernel.operator]
    phases = (kernel, None) if is_decode else (None, kernel)
    phase = step_attention(MixerCall(1, *phases, "bf16", window=window), is_decode)
    block = phase.block(h100, "roofline")
    rows = h100.rows(operator, phase.donors(h100)[0])
    length = "kv_len" if is_decode and "kv_len" in rows else "q_len"
    plain = rows["kv_len"] == rows["q_len"] if not is_decode and "kv_len" in rows else rows[length] > 0
    batch, x = rows["batch_size"][plain], rows[length][plain]
    rng = np.random.default_rng(1)
    between = (np.exp(rng.uniform(0, np.log(top.max()), 300)).round() for top in (batch, x))
    for b, a in ((batch, x), between):
        sizes = {"batch_size": b, **operator.step_sizes(is_decode, b, np.asarray(a), 0)}
        names = dict(zip((c.name for c in operator.keys), kernel.key, strict=True))
        found = h100.lookup(
            kernel.operator, **names, **{k: np.asarray(v).astype(int) for k, v in sizes.items()}
        )
        got, origin = in_block(block, b, a)
        # next to where attention caps, a node of the plan alone
        assert np.quantile(np.abs(got / found.latency_us - 1.0), 0.97) < 1e-9
        assert np.abs(got / found.latency_us - 1.0).max() < 0.03
        if b is batch:
            assert got == pytest.approx(found.latency_us, rel=1e-12)
            assert set(origin) == {0}


def test_a_step_is_the_sum_of_its_layers(h100: Any) -> None:
    plan = fastroof.compile_plan(model(MixerCall(1, MLA, MLA_PROMPT, "bf16")), "h100", h100, engine="kernels")
    without = fastroof.compile_plan(model(MixerCall(1, None, None, "bf16")), "h100", h100, engine="kernels")
    names = {"kv_dtype": "bf16", "num_q_heads": 16}
    one = float(h100.lookup("mla_decode", **names, batch_size=16, kv_len=1024).latency_us)
    assert plan.decode_us(16, 1024) - without.decode_us(16, 1024) == pytest.approx(3 * one, rel=1e-9)
    one = float(h100.lookup("mla_prefill", **names, batch_size=2, q_len=512, kv_len=512).latency_us)
    both = [(512, 0)] * 2
    assert step_us(plan, *both) - step_us(without, *both) == pytest.approx(3 * one, rel=1e-9)
    explained = plan.explain([(1, 1023)] * 16)
    assert sum(part.total_us for part in explained.operators) == pytest.approx(explained.total_us, rel=1e-9)
    (attention,) = (part for part in explained.operators if part.role == "decode_attention")
    assert attention.total_us == pytest.approx(plan.decode_us(16, 1024) - without.decode_us(16, 1024))
    assert 0.0 < attention.mfu < 1.0
    assert 0.0 < plan.explain([(1, 1023)] * 16, with_error=True).relative_error < 0.5


def test_several_mixers_add_up(h100: Any) -> None:
    both = model(MixerCall(1, MLA, MLA_PROMPT, "bf16"), MixerCall(2, GDN, GDN_PROMPT, "bf16"))
    alone = [model(MixerCall(1, MLA, MLA_PROMPT, "bf16")), model(MixerCall(2, GDN, GDN_PROMPT, "bf16"))]
    nothing = model(MixerCall(1, None, None, "bf16"))
    both_us, *one_us, none_us = (
        fastroof.compile_plan(m, "h100", h100, engine="kernels").decode_us(np.array([1, 16, 100]), 3000)
        for m in (both, *alone, nothing)
    )
    assert both_us == pytest.approx(one_us[0] + one_us[1] - none_us, rel=1e-9)


def test_prefixes_cost_their_pairs(h100: Any) -> None:
    plan = fastroof.compile_plan(
        model(MixerCall(1, DSA, DSA_PROMPT, "bf16", window=2048)), "h100", h100, engine="kernels"
    )
    assert plan.arena[steps.WINDOW] == 2048
    price = plan.attention[0].prefix_us
    assert min(price) > 0.0
    # within the window a pair costs both prices, beyond it that of the scores
    for new, context in ((4, 512), (4, 60_000)):
        more = step_us(plan, (new, context)) - step_us(plan, (new, 0))
        within = sum(min(context + i, 2048) - min(i, 2048) for i in range(1, new + 1))
        expected = price.pair * new * context + price.token * context
        expected += price.window_pair * within + price.window_token * min(context, 2047)
        assert more == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kernel", [MLA, DSA])
def test_a_roofline_of_queries_is_that_of_decodes(h100: Any, kernel: Any) -> None:
    """What a sequence adds is a query, its pairs and the tokens that it reads."""
    phase = step_attention(MixerCall(1, kernel, None, "bf16"), True)
    bound = phase.query_bound(h100.gpu)
    batch, length = np.array([1.0, 6.0]), np.full(2, 100.0)
    work = phase.work_at(h100.gpu, batch, length)
    one_us, six_us = 1e6 * (work.flops / work.peak + work.moved_bytes / h100.gpu.hbm_bytes_per_s)
    a_sequence = bound.query + 100 * (bound.pair + bound.kv)
    assert six_us - one_us == pytest.approx(5 * a_sequence, rel=1e-9)


def test_one_size_caps(h100: Any) -> None:
    calls = [MixerCall(1, DSA, DSA_PROMPT, "bf16", window=window) for window in (2048, 1024)]
    with pytest.raises(FastroofError, match="capped at 1024 and 2048 tokens"):
        fastroof.compile_plan(model(*calls), "h100", h100, engine="kernels")


def test_other_heads_and_formats_are_borrowed(h100: Any) -> None:
    odd = MLA._replace(key=("bf16", 24, 512, 64))
    plan = fastroof.compile_plan(model(MixerCall(1, odd, MLA_PROMPT, "bf16")), "h100", h100, engine="kernels")
    (attention,) = (p for p in plan.explain([(1, 1023)] * 16).operators if p.role == "decode_attention")
    assert attention.origin == 3
    near = [
        float(h100.lookup("mla_decode", num_q_heads=n, batch_size=16, kv_len=1024).latency_us)
        for n in (16, 32)
    ]
    assert near[0] * 0.9 < attention.total_us / 3 < near[1] * 1.1


@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_borrowing_over_an_octave_errs_as_claimed(h100: Any, engine: str) -> None:
    operator: Any = OPERATORS["mla_module_decode"]
    tables = h100.in_order(KernelOrder((engine,)))
    inside = []
    for key in tables.groups(operator.name):
        half = (*key[:-1], key[-1] // 2)
        if half not in tables.groups(operator.name):
            continue
        rows = tables.rows(operator, key)
        sizes = {name: rows[name].astype(float) for name in operator.axis_names}
        at = [sizes[name] for name in operator.axis_names]
        donor_us, own_us = np.empty(len(at[0])), rows["latency_us"]
        tables.packed(operator, half).latency(at, donor_us, np.empty(len(at[0]), np.uint8))
        launch_us = tables.packed(operator, half).launch_us
        own, theirs = (launch_us + operator.work_us(k, tables.gpu)(*at) for k in (key, half))
        inside.append(np.abs(np.log(donor_us * own / theirs / own_us)) <= 1.2816 * OCTAVE)
    assert 0.75 < np.concatenate(inside).mean() < 0.97


@pytest.mark.parametrize(
    ("model_name", "heads", "donor_dtype", "donor_engine"),
    [("glm-5", 8, "bf16", "sglang"), ("deepseek-v3.2", 16, "fp8_block", "vllm")],
)
def test_a_donor_takes_no_longer_than_rows_found_too_slow(
    model_name: str, heads: int, donor_dtype: str, donor_engine: str
) -> None:
    """SGLang's prompts in fp8_block were launched by the host; its bf16 ones of one model are sound."""
    tables = fastroof.load_tables("h200").in_order(KernelOrder(("sglang",)))
    operator: Any = OPERATORS["dsa_prefill"]
    key = ("fp8_block", "bf16", "bf16", model_name, heads)
    one = kernel_donor(tables, operator, key)
    (table,) = (table for table in tables.candidates("dsa_prefill") if table.engine == "sglang")
    assert not tables.is_sound(table, key)
    assert (one.key, one.is_borrowed) == ((donor_dtype, *key[1:]), True)
    assert (tables.serving("dsa_prefill", one.key).engine, one.bounded_by) == (donor_engine, table.source)
    own = {name: values[table.groups()[key]] for name, values in table.columns.items()}
    sizes = {name: own[name].astype(float) for name in operator.axis_names}
    us, origin = operator.step_latency(tables, key, sizes)
    assert (us <= own["latency_us"] * (1.0 + 1e-12)).all()
    # the bound holds some, and is not what most get
    held = us > own["latency_us"] * (1.0 - 1e-12)
    assert 0.0 < held.mean() < 0.5
    assert us.min() > 0.0
    assert set(origin) == {3}


def test_kernels_without_a_donor_are_refused_or_modelled(h100: Any) -> None:
    unknown = GDN._replace(key=("generation", "all", 4, 4, 96, 16, 128))
    spec = model(MixerCall(1, unknown, GDN_PROMPT, "bf16"))
    with pytest.raises(MissingTableError, match="allow_modelled=True"):
        fastroof.compile_plan(spec, "h100", h100, engine="kernels")
    plan = fastroof.compile_plan(spec, "h100", h100, allow_modelled=True, engine="kernels")
    (attention,) = (p for p in plan.explain([(1, 99)] * 4).operators if p.role == "decode_attention")
    assert (attention.origin, attention.source) == (4, "datasheet")
    with pytest.warns(UserWarning, match="no measured tables"):
        of_datasheet = fastroof.compile_plan(spec, "h100", None, engine="kernels")
    assert of_datasheet.decode_us(4, 100) > 0.0
    # what is modelled errs as the datasheet model does, however good the rest is
    (attention,) = (p for p in plan.explain([(1, 99)] * 100).operators if p.role == "decode_attention")
    share = attention.total_us / plan.decode_us(100, 100)
    assert 0.3 < share < 0.6
    assert share < plan.decode_error(100, 100) / of_datasheet.decode_error(100, 100) < share + 0.2


def test_plans_of_mixers_are_values(h100: Any) -> None:
    plan = fastroof.compile_plan(model(MixerCall(1, MLA, MLA_PROMPT, "bf16")), "h100", h100, engine="kernels")
    _ = plan.explain([(1, 99)], with_error=True)
    again = pickle.loads(pickle.dumps(plan))
    assert again.decode_us(7, 700) == plan.decode_us(7, 700)
    with pytest.raises(FastroofError, match="no grouped-head attention"):
        _ = plan.heads
    assert plan.verify_us(64, 1000, 4) > 1.1 * plan.verify_us(64, 1000, 1)
    # four sequences' own: measured GEMMs of 4 rows take up to a seventh longer than those of 16
    parts = [plan.explain_verification(4, 1000, tokens).operators for tokens in (1, 4)]
    one, four = (next(p for p in found if p.role == "decode_attention") for found in parts)
    assert four.total_us > one.total_us
    with pytest.raises(FastroofError, match="grouped-head attention only"):
        fastroof.compile_plan(plan.model, "h100", h100, method="floor", engine="kernels")
    deeper = replace(plan.model, layers=(LayerGroup(plan.model.kinds[0], 6),))
    assert fastroof.compile_plan(deeper, "h100", h100, engine="kernels").decode_us(7, 700) > plan.decode_us(
        7, 700
    )


def test_a_gpu_without_the_indexers_format_has_no_time() -> None:
    """An A100 has no fp8: neither a time nor NaN."""
    with (
        pytest.warns(UserWarning, match="datasheet"),
        pytest.raises(GpuError, match="no peak for a format that dsa"),
    ):
        fastroof.compile_plan("glm-5.2", "a100", None, tp=8, engine="kernels")


@pytest.mark.parametrize("kernel", [MLA_PROMPT, GDN_PROMPT], ids=lambda kernel: kernel.operator)
def test_work_of_unequal_chunks_is_that_of_each(kernel: MixerKernel) -> None:
    """FLOPs are a sum over requests: a long chunk after nothing and a short one after many tokens."""
    attention = step_attention(MixerCall(1, None, kernel, "bf16"), False)
    new, kv_len = np.array([3000.0, 100.0]), np.array([3000.0, 20_100.0])
    gpu = fastroof.load_gpu("h100")
    each = [float(attention.work(gpu, new[i : i + 1], kv_len[i : i + 1]).flops) for i in range(2)]
    assert float(attention.work(gpu, new, kv_len).flops) == pytest.approx(sum(each))


def test_work_of_decodes_is_that_of_each() -> None:
    attention = step_attention(MixerCall(1, MLA, None, "bf16"), True)
    new, kv_len = np.ones(3), np.array([100.0, 1000.0, 30_000.0])
    gpu = fastroof.load_gpu("h100")
    each = [float(attention.work(gpu, new[i : i + 1], kv_len[i : i + 1]).flops) for i in range(3)]
    assert float(attention.work(gpu, new, kv_len).flops) == pytest.approx(sum(each))


def test_a_layer_of_several_kernels_is_as_sure_as_the_least_sure_of_them() -> None:
    """One is known well and one badly, at a node of both."""
    attention = step_attention(MixerCall(1, GDN, None, "bf16"), True)
    axes = tuple(np.array([float(c[0]) + 1.0]) for c in attention.at(np.array([8.0]), np.array([1024.0])))
    sides = tuple(EdgeVariances(np.zeros(1), np.zeros(1)) for _ in axes)
    one = np.ones((1,) * len(axes))
    errors = tuple(LocalErrors(axes, v * one, (0.0 * one,) * len(axes), sides, None) for v in (0.01, 0.09))
    found = MixerErrors(attention, errors, 0.02)(np.array([8.0]), np.array([1024.0]))
    assert found.tolist() == pytest.approx([0.11])


def test_a_layer_one_of_whose_kernels_is_borrowed_has_that_error() -> None:
    """The convolution was measured for these heads, the recurrence for twice as many."""
    heads, more = (4, 16, 128, 32, 128), (4, 32, 128, 64, 128)
    tables = handmade_tables(
        gdn=[
            *(("context", "convolution", *heads, 1, q, 5.0) for q in (64, 1024)),
            *(("context", "recurrence", *more, 1, q, 30.0) for q in (64, 1024)),
        ]
    )
    kernel = MixerKernel("gdn", ("context", "all", *heads))
    kernels = [
        kernel_donor(tables, OPERATORS["gdn"], ("context", part, *heads))
        for part in ("convolution", "recurrence")
    ]
    assert [one.is_borrowed for one in kernels] == [False, True]
    assert kernels[0].error == 0.0 < kernels[1].error
    variance = step_attention(MixerCall(1, None, kernel, "bf16"), False).variance(tables)
    assert isinstance(variance, MixerErrors)
    assert variance.borrowed == pytest.approx(kernels[1].error ** 2)
