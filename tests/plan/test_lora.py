"""LoRA adapters: their weights, their calls next to layers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastroof
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled import steps
from fastroof.engines.lora import LoraRules
from fastroof.errors import FastroofError, PlanError
from fastroof.models import Layout, load_model
from fastroof.models.lora import MODULES, Adapters, Lora
from fastroof.models.spec import step_calls
from fastroof.operators.calls import AdapterGemm, Call, Parallel
from fastroof.operators.lora import LORA
from fastroof.operators.row_operator import CurveOptions
from fastroof.plan import StepPlan
from fastroof.plan.curves import DatasheetCurves, row_values

MODEL = "llama-3.1-8b"
SIZES = {"hidden": 4096, "qkv": 6144, "o": 4096, "mlp": 14336, "layers": 32, "vocab": 128256}


@pytest.fixture(scope="module")
def h100() -> fastroof.Tables:
    return fastroof.load_tables("h100")


def plan_of(tables: fastroof.Tables, lora: object = None, model: str = MODEL, **options: object) -> StepPlan:
    return fastroof.compile_plan(
        model, "h100", tables, lora=lora, max_num_batched_tokens=256, max_num_seqs=64, **options
    )


def by_datasheet(model: str, lora: object) -> StepPlan:
    curves = DatasheetCurves(fastroof.load_gpu("h200"), warns=False)
    options = {"allow_modelled": True, "curves": curves, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return fastroof.compile_plan(model, "h200", "datasheet", lora=lora, **options)  # type: ignore[arg-type]


def adapter_calls(plan: StepPlan) -> list[AdapterGemm]:
    return [curve.operator for curve in plan.row_curves if isinstance(curve.operator, AdapterGemm)]


def naive_bytes(rank: int, tp: int, whole_head: bool) -> int:
    """One adapter of Llama 3.1 8B on one GPU: A whole and B split of columns, the reverse of rows."""
    hidden, mlp = SIZES["hidden"], SIZES["mlp"] // tp
    qkv, o = 3 * rank * hidden + rank * SIZES["qkv"] // tp, rank * SIZES["o"] // tp + rank * hidden
    gate_up, down = 2 * rank * hidden + rank * 2 * mlp, rank * mlp + rank * hidden
    head = SIZES["vocab"] if whole_head else load_model(MODEL).padded_vocab(tp) // tp
    ends = rank * (SIZES["vocab"] + hidden) + rank * (hidden + head)
    return 2 * (SIZES["layers"] * (qkv + o + gate_up + down) + ends)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_bytes_of_adapters_as_engines_allocate_them(h100: fastroof.Tables, engine: str, tp: int) -> None:
    memory = plan_of(h100, "16:3", tp=tp, engine=engine).memory
    assert memory.adapter_bytes == 3 * naive_bytes(16, tp, engine == "vllm")
    plain = plan_of(h100, tp=tp, engine=engine).memory
    assert memory.weight_bytes == plain.weight_bytes
    assert memory.explain()["adapters"] == memory.adapter_bytes
    assert "adapters" not in plain.explain()
    assert sum(memory.explain().values()) == pytest.approx(sum(plain.explain().values()), rel=1e-4)
    assert memory.max_kv_tokens < plain.max_kv_tokens


def test_no_adapters_are_a_plan_as_before(h100: fastroof.Tables) -> None:
    plain, none, some = (plan_of(h100, lora) for lora in (None, None, "16:2"))
    assert plain.arena.tobytes() == none.arena.tobytes()
    assert not adapter_calls(plain)
    assert plain.memory.adapter_bytes == 0
    assert "lora" not in plain.describe()
    assert "LoRA" not in repr(plain)
    # what adapters add is exactly their own calls
    for at, kinds in ((steps.TOKENS_AT, "tokens"), (steps.LOGITS_AT, "sequences")):
        added = np.zeros(65)
        for curve in some.row_curves:
            call = curve.operator
            if call.rows == kinds and "lora" in call.name:
                added += call.times * row_values(curve, 64)[0]
        before, after = (plan.arena[int(plan.arena[at]) :][:65] for plan in (plain, some))
        np.testing.assert_allclose(after, before + added, rtol=1e-12)


def test_a_step_shows_that_they_are_modelled(h100: fastroof.Tables) -> None:
    plan = plan_of(h100, "16:4")
    explanation = plan.explain([(1, 999)] * 8)
    parts = [part for part in explanation.operators if "shrink" in part.name or "expand" in part.name]
    assert {part.origin for part in parts} == {ORIGIN_MODELLED}
    assert explanation.origin == ORIGIN_MODELLED
    assert all("modelled, ±100%" in part.source for part in parts)
    assert plan.is_beyond_evidence
    assert "modelled" in plan.kernels
    assert plan.made_from["fastroof.lora"] == "16:4"
    assert "LoRA 16:4" in repr(plan)
    assert {part.name for part in parts if part.calls == 32} == {
        f"{layer} lora {part}" for layer in ("qkv", "o", "gate_up", "down") for part in ("shrink", "expand")
    }
    batch = fastroof.StepBatch.from_requests([[(1, 999)] * 8])
    errors = [p.run(batch, with_error=True).relative_error for p in (plan, plan_of(h100))]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[0][0] > errors[1][0]
    assert by_datasheet(MODEL, 16).decode_us(8, 100) > by_datasheet(MODEL, None).decode_us(8, 100)


@settings(max_examples=60, deadline=None)
@given(
    part=st.sampled_from(["shrink", "expand", "lookup"]),
    width=st.integers(64, 40_000),
    rank=st.integers(1, 256),
    slices=st.integers(1, 5),
    adapters=st.integers(1, 64),
    experts=st.sampled_from([1, 1, 8, 128]),
    more=st.sampled_from(["rank", "adapters", "width"]),
)
def test_more_is_never_faster(
    part: str, width: int, rank: int, slices: int, adapters: int, experts: int, more: str
) -> None:
    def call(rank: int, adapters: int, width: int) -> AdapterGemm:
        sizes = {"shrink": (width, rank * slices), "expand": (rank, width), "lookup": (width, rank)}[part]
        return AdapterGemm(
            "lora", "a", 1, part, *sizes, slices, adapters, experts, 2.0 if experts > 1 else 1.0
        )  # type: ignore[arg-type]

    gpu = fastroof.load_gpu("h100")
    small = {"rank": rank, "adapters": adapters, "width": width}
    large = small | {more: small[more] * 2}
    tables = fastroof.load_tables("h100")
    curves = [LORA.datasheet_nodes(call(**sizes), gpu) for sizes in (small, large)]
    if more == "adapters":  # measured GEMMs of two widths or ranks may differ by noise
        curves += [LORA.row_nodes(call(**sizes), tables, CurveOptions(), 1) for sizes in (small, large)]
    rows = np.unique(np.r_[1.0, np.geomspace(1, 1e6, 40).round()])
    for less, other in zip(curves[::2], curves[1::2], strict=True):
        times = [np.interp(rows, one.axis, one.value) for one in (less, other)]
        assert (times[0] > 0).all()
        assert (np.diff(times[0]) >= 0).all()
        assert (times[1] >= times[0] - 1e-9).all()
        work = [LORA.row_work(call(**sizes), rows) for sizes in (small, large)]
        assert all((b >= a).all() for a, b in zip(*work, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    picks=st.floats(0.1, 9.0),
    experts=st.integers(1, 200),
    adapters=st.integers(1, 30),
    rows=st.integers(1, 9999),
)
def test_matrices_that_rows_use(picks: float, experts: int, adapters: int, rows: int) -> None:
    """At most all, and as many as balls in boxes: the mean number of boxes that are not empty."""
    call = AdapterGemm("lora", "a", 1, "shrink", 8, 8, 1, adapters, experts, picks)
    used = float(LORA._matrices(call, np.array([float(rows)]))[0])
    boxes = min(rows, adapters) * experts
    expected = boxes * (1.0 - (1.0 - 1.0 / boxes) ** (rows * picks)) if experts > 1 else min(rows, adapters)
    assert used == pytest.approx(expected)
    assert used <= boxes


def test_a_call_is_its_dense_gemm_and_the_bytes_beyond_it(h100: fastroof.Tables) -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]

    def naive_us(call: AdapterGemm, shapes: list[tuple[int, int]], row_bytes: int, m: int) -> float:
        # never faster than with fewer rows
        fewer = [size for size in sizes if size <= m]
        dense = max(
            float(h100.lookup("gemm", m=size, n=n, k=k).latency_us) for n, k in shapes for size in fewer
        )
        others = (min(m, call.adapters) - 1) * call.inputs * call.outputs * 2
        return dense + (others + m * max(row_bytes, 0)) / h100.gpu.hbm_bytes_per_s * 1e6

    shrink = AdapterGemm("lora", "a", 1, "shrink", 4096, 48, 3, 8)
    expand = AdapterGemm("lora", "a", 1, "expand", 16, 6144, 3, 8)
    for call, shapes, row_bytes in (
        (shrink, [(3 * rank, 4096) for rank in (1, 8, 16)], 4096 * 2 + 48 * 4 - 2 * (4096 + 48)),
        (expand, [(6144, rank) for rank in (1, 8, 16)], 48 * 4 + 2 * 2 * 6144 - 2 * (16 + 6144)),
    ):
        nodes = LORA.row_nodes(call, h100, CurveOptions(), 64)
        for m in sizes:
            expected = naive_us(call, shapes, row_bytes, m)
            assert np.interp(m, nodes.axis, nodes.value) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("smaller", ["8:4", "16:2", "16:4:attention", "16:4:mlp", "16:4:linear"])
def test_fewer_adapters_take_less(h100: fastroof.Tables, smaller: str) -> None:
    for engine in ("vllm", "sglang"):
        plain, less, more = (plan_of(h100, lora, engine=engine) for lora in (None, smaller, "16:4"))
        for m in (1, 16, 64):
            assert plain.decode_us(m, 500) < less.decode_us(m, 500) <= more.decode_us(m, 500)
        assert 0 < less.memory.adapter_bytes < more.memory.adapter_bytes


def test_modules_add_up(h100: fastroof.Tables) -> None:
    parts = [
        plan_of(h100, f"16:2:{name}").memory.adapter_bytes
        for name in ("attention", "mlp", "embed_tokens", "lm_head")
    ]
    assert sum(parts) == plan_of(h100, "16:2").memory.adapter_bytes
    assert sum(parts[:2]) == plan_of(h100, "16:2:linear").memory.adapter_bytes


def flat(calls: tuple[Call, ...]) -> list[Call]:
    return [one for call in calls for one in (sum(call.paths, ()) if isinstance(call, Parallel) else (call,))]


@pytest.mark.parametrize(
    "model",
    [
        "qwen3-30b-a3b",
        "deepseek-v3",
        "qwen3.5-35b-a3b",
        "nemotron-3-nano-30b-a3b",
        "gpt-oss-20b",
        "falcon-h1-7b",
    ],
)
def test_calls_hold_the_weights_of_every_linear_layer(model: str) -> None:
    """Whatever a layer's calls are, each linear layer has A of its inputs and B of its outputs."""
    spec, layout = load_model(model), Layout()
    execution = by_datasheet(model, "8:1:linear").execution
    assert execution.adapters is not None
    for kind in spec.kinds:
        made = [c for c in flat(kind.calls(spec.hidden, layout, execution)) if isinstance(c, AdapterGemm)]
        held = [call for call in made if call.steps != "decode_only"]
        assert {call.part for call in held} <= {"shrink", "expand"}
        assert len(held) % 2 == 0
        for shrink, expand in zip(held[::2], held[1::2], strict=True):
            assert shrink.outputs == shrink.slices * expand.inputs == 8 * shrink.slices
        weights = kind.linear_weights(spec.hidden, layout)
        # n x k of a layer, from its pair
        products = [b.outputs * a.inputs * a.experts for a, b in zip(held[::2], held[1::2], strict=True)]
        for role in set(weights) - {"experts"}:
            assert weights[role] in products, role
        if "experts" in weights:
            assert weights["experts"] == sum(
                p for p, a in zip(products, held[::2], strict=True) if a.experts > 1
            )


def test_stages_hold_their_own_adapters(h100: fastroof.Tables) -> None:
    whole = plan_of(h100, "16:2")
    staged = plan_of(h100, "16:2", pp=2)
    assert sum(stage.memory.adapter_bytes for stage in staged.stages) == whole.memory.adapter_bytes
    heads = [[c.role for c in adapter_calls(stage) if c.role != "lora"] for stage in staged.stages]
    assert set(heads[0]) == {"embedding"}
    assert set(heads[1]) == {"lm_head"}


def test_an_engine_has_its_own_buffers(h100: fastroof.Tables) -> None:
    assert plan_of(h100, "20").describe()["lora"] == "32:1"
    assert plan_of(h100, "20", engine="sglang").describe()["lora"] == "20:8"
    assert plan_of(h100, Lora(20, active=3), engine="sglang").describe()["lora"] == "20:3/8"
    # at least those of a step
    assert plan_of(h100, Lora(20, active=3)).describe()["lora"] == "32:3"
    fills = [c.operator for c in plan_of(h100, 16).row_curves if "buffer" in c.operator.name]
    assert len(fills) == 5
    assert not any("buffer" in c.operator.name for c in plan_of(h100, 16, engine="sglang").row_curves)
    # with adapters SGLang launches prompts kernel by kernel
    plain, some = (plan_of(h100, lora, engine="sglang-0.5.10") for lora in (None, 16))
    assert plain.arena[steps.PREFILL_FLOOR_US] == 0.0 < some.arena[steps.PREFILL_FLOOR_US]
    # which models have adapters of their embedding
    qwen = plan_of(h100, 16, "qwen2.5-7b")
    assert {c.role for c in adapter_calls(qwen)} == {"lora"}
    assert Adapters.of(Lora(8), LoraRules(gates=False), "Any").roles.isdisjoint({"router", "embedding"})
    assert "lm_head" in Adapters.of(Lora(8, targets=("lm_head",)), LoraRules(), "Any").roles


def test_active_adapters_change_time_only(h100: fastroof.Tables) -> None:
    few, all_ = (plan_of(h100, lora) for lora in ("64:1/32", "64:32"))
    assert few.memory.adapter_bytes == all_.memory.adapter_bytes
    assert few.decode_us(64, 500) < all_.decode_us(64, 500)
    assert few.decode_us(1, 500) == all_.decode_us(1, 500)


def test_the_text_of_an_option_comes_back() -> None:
    for text in ("16:1", "16:4", "16:2/4", "64:8:attention", "8:1/2:q_proj+down_proj"):
        assert Lora.of(text).words == text
        assert Lora.of(Lora.of(text)) == Lora.of(text)
    assert Lora.of(16) == Lora(16) == Lora.of("16")
    assert Lora.of(np.int64(8)).rank == 8


def test_a_folder_of_peft_is_read(tmp_path: Path, h100: fastroof.Tables) -> None:
    config = {
        "peft_type": "LORA",
        "r": 8,
        "rank_pattern": {"layers.1.q_proj": 32},
        "target_modules": ["q_proj", "mlp.down_proj"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    read = Lora.of(f"{tmp_path}:4")
    assert read == Lora(32, 4, ("q_proj", "down_proj"))
    assert Lora.of(str(tmp_path / "adapter_config.json")).max_loras is None
    assert plan_of(h100, str(tmp_path)).describe()["lora"] == "32:1:q_proj+down_proj"
    config["target_modules"] = "all-linear"  # type: ignore[assignment]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert Lora.of(str(tmp_path)).targets == ("linear",)
    for wrong in ({"r": 0}, {"r": "8"}, {"r": None}, {"target_modules": ".*proj"}, {"target_modules": []},
                  {"target_modules": ["nothing"]}, {"rank_pattern": [1]}, {"rank_pattern": {"a": 1e9}},
                  {"peft_type": "IA3"}):  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(PlanError) as error:
            Lora.of(str(tmp_path))
        assert "\n" not in str(error.value)
    (tmp_path / "adapter_config.json").write_text("[" * 2000)
    with pytest.raises(FastroofError):
        Lora.of(str(tmp_path))


HOSTILE = (
    *("", "x", "0", "-1", "1e3", "513", "9" * 9, "9" * 40, "\0", "a\0b:4", "/nowhere"),
    *("16:", "16:0", "16:5/4", "16:4:", "16:2000", "16:4:nothing", "16:4:q_proj,v_proj", "16:4:q_proj+"),
    *(0, -5, 1.5, True, math.nan, b"16", [16], {"rank": 16}, object()),
)


@pytest.mark.parametrize("wrong", HOSTILE)
def test_hostile_values_are_refused_in_one_line(wrong: object) -> None:
    with pytest.raises(FastroofError) as error:
        fastroof.compile_plan(MODEL, "h100", lora=wrong)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert "lora" in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"targets": "all"},
        {"targets": ()},
        {"targets": (1,)},
        {"max_loras": 2, "active": 3},
        {"active": 0},
    ],
)
def test_hostile_arguments_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="lora"):
        Lora(16, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("glm-5", {"tp": 8, "engine": "sglang"}, "one block with .*use modules mlp"),
        ("kimi-k2.5", {"tp": 8}, "vllm starts it without adapters only"),
        (
            "qwen3-235b-a22b",
            {"dp": 8, "ep": 8, "exchange": "alltoall", "engine": "sglang"},
            "exchange='gather'",
        ),
        ("llama-3.1-8b", {"lora": 512, "engine": {"name": "a", "lora": {"ranks": [8, 16]}}}, "up to rank 16"),
    ],
)
def test_what_no_engine_runs_is_refused(model: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fastroof.compile_plan(model, "h200", **{"lora": 16, **options})  # type: ignore[arg-type]


def test_rules_of_a_profile_are_checked() -> None:
    for wrong in (
        {"ranks": [0]},
        {"ranks": "8"},
        {"max_loras": 0},
        {"fills": 1},
        {"embeddings": "any"},
        {"other": 1},
    ):
        with pytest.raises(PlanError):
            fastroof.compile_plan(MODEL, "h100", engine={"name": "a", "lora": wrong})
    assert set(MODULES["linear"]) < set(MODULES["all"])


def test_calls_of_a_step_have_known_roles() -> None:
    spec = load_model(MODEL)
    made = step_calls(spec, Layout(), by_datasheet(MODEL, 16).execution)
    roles = {
        call.role for call in (*made.before, *made.layers[0], *made.after) if isinstance(call, AdapterGemm)
    }
    assert roles == {"embedding", "lora", "lm_head"}
