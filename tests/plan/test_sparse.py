"""Plans of sparse attention: against a naive sum of lookups and physics, and what tables trip over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.engines import EngineProfile, load_engine
from fastroof.engines.kernel_choices import OperatorKernel
from fastroof.models import ModelSpec, load_model
from fastroof.models.named import preset_config
from fastroof.operators.registry import OPERATORS
from fastroof.plan.curves import kernel_order
from fastroof.plan.options import PlanOptions
from tests.reference.kinds import step_us

LIMITS = {"max_num_batched_tokens": 4096, "max_num_seqs": 256}
TOPK = 2048


def short(name: str) -> ModelSpec:
    """A model of eight layers, the first of them dense, that is a published one otherwise."""
    return load_model({**preset_config(name), "num_hidden_layers": 8, "first_k_dense_replace": 1})


def profile(engine: str) -> EngineProfile:
    """Its kernels alone, tokens not padded to graphs; the naive step knows vLLM's streaming kernels."""
    own = load_engine(engine).kernels_alone().started_with({"no_graphs"})
    streaming = (OperatorKernel("elementwise", engine="vllm"),)
    return replace(own, kernels=replace(own.kernels, operators=own.kernels.operators + streaming))


def compiled(h100: Any, model: ModelSpec, engine: str = "sglang", **given: Any) -> Any:
    given = {"tp": 8, **LIMITS, **given}
    return fastroof.compile_plan(model, "h100", h100, engine=profile(engine), **given)


def one_step_us(plan: Any, requests: list[tuple[int, int]]) -> float:
    return float(plan.step_us(fastroof.StepBatch.from_requests([requests]))[0])


def attention_us(plan: Any, requests: list[tuple[int, int]], role: str, kind: str = "") -> float:
    parts = plan.explain(requests).operators
    return sum(part.total_us for part in parts if part.role == role and kind in part.name)


@pytest.mark.parametrize(
    ("name", "engine", "requests"),
    [
        ("glm-5-fp8", "sglang", [(1, 4095)]),
        ("glm-5-fp8", "sglang", [(1, 2047)] * 16),
        ("glm-5", "sglang", [(2048, 0)]),
        ("glm-5", "sglang", [(1, 1023)] * 64 + [(1024, 0)] * 2),
        ("glm-5-fp8", "vllm", [(2048, 0)]),
        ("glm-5.2-fp8", "sglang", [(1, 8191)] * 4),
        ("glm-5.2-fp8", "vllm", [(512, 0)] * 4),
        ("deepseek-v3.2", "sglang", [(1, 4095)] * 8),
        ("deepseek-v3.2", "trtllm-1.1", [(1, 4095)] * 16),
        ("deepseek-v3.2", "trtllm-1.1", [(1024, 0)]),
        ("glm-5", "trtllm-1.1", [(1, 65535)]),
    ],
)
def test_a_step_is_the_sum_of_its_lookups(
    h100: Any, name: str, engine: str, requests: list[tuple[int, int]]
) -> None:
    model = short(name)
    plan = compiled(h100, model, engine)
    options = PlanOptions(engine=profile(engine), tp=8).checked().for_model(model, h100.gpu)
    tables = h100.in_order(kernel_order(h100.gpu, options))
    assert one_step_us(plan, requests) == pytest.approx(step_us(plan, tables, requests), rel=1e-9)
    explained = plan.explain(requests)
    assert sum(part.total_us for part in explained.operators) == pytest.approx(explained.total_us, rel=1e-9)


@pytest.mark.parametrize(("name", "module", "heads", "kind"), [
    ("glm-5.2-fp8", "glm-5-shared-index", 8, "moe shared index"),
    ("deepseek-v3.2", "deepseek-v3.2", 16, "moe"),
])  # fmt: skip
def test_prompts_that_the_host_launched_are_another_engines_and_no_longer_than_their_own(
    h100: Any, name: str, module: str, heads: int, kind: str
) -> None:
    """SGLang's rows are flagged, so vLLM's serve; where SGLang's took less, they are the bound."""
    plan = compiled(h100, short(name))
    (count,) = (group.count for group in plan.model.layers if group.kind.name == kind)
    sources = {table.engine: table.source for table in h100.candidates("dsa_prefill")}
    own, other = (fastroof.load_tables("h100", source=sources[engine]) for engine in ("sglang", "vllm"))
    key = {
        "dtype": "fp8_block",
        "kv_dtype": "bf16",
        "attn_dtype": "bf16",
        "model": module,
        "num_heads": heads,
    }
    own_is_less = []
    for batch, q_len in ((1, 512), (1, 1024), (2, 2048)):
        sizes = {"batch_size": batch, "q_len": q_len, "kv_len": q_len}
        own_us, other_us = (
            float(tables.lookup("dsa_prefill", **key, **sizes).latency_us) for tables in (own, other)
        )
        took_us = attention_us(plan, [(q_len, 0)] * batch, "prefill_attention", f"({kind})") / count
        assert took_us == pytest.approx(min(own_us, other_us), rel=1e-9)
        own_is_less.append(own_us < other_us)
    assert own_is_less == [False, False, True]


def test_layers_that_share_an_index_cost_no_more_beyond_what_it_picks(h100: Any) -> None:
    plan = compiled(h100, short("glm-5.2-fp8"))
    counts = {group.kind.name: group.count for group in plan.model.layers}
    assert counts == {"dense": 1, "moe": 3, "moe shared index": 4}

    def a_layer_us(kind: str, kv_len: int) -> float:
        return attention_us(plan, [(1, kv_len - 1)] * 16, "decode_attention", f"({kind})") / counts[kind]

    at_topk, far = ({kind: a_layer_us(kind, kv_len) for kind in counts} for kv_len in (TOPK, 16_384))
    assert far["moe shared index"] == pytest.approx(at_topk["moe shared index"], rel=0.03)
    # the indexer goes on scoring: measured 105 and 122 us
    assert far["moe"] > 1.1 * at_topk["moe"]
    assert at_topk["moe"] > 1.4 * at_topk["moe shared index"]
    assert at_topk["dense"] == pytest.approx(at_topk["moe"], rel=1e-9)


@pytest.mark.parametrize("name", ["glm-5-fp8", "deepseek-v3.2"])
def test_a_prefix_costs_more_the_longer_it_is_and_less_beyond_what_is_picked(h100: Any, name: str) -> None:
    plan = compiled(h100, short(name))
    prefixes = [0, 100, 1000, TOPK, 2 * TOPK, 30_000, 100_000]
    taken = np.array([one_step_us(plan, [(256, prefix)]) for prefix in prefixes])
    assert (np.diff(taken) > 0.0).all()
    a_token = np.diff(taken) / np.diff(prefixes)
    # within the window a pair costs scores and attention, beyond it scores alone
    assert a_token[-1] < 0.8 * a_token[1]
    assert a_token[-1] == pytest.approx(a_token[-2], rel=1e-6)


def test_decodes_are_slower_the_more_and_the_longer_they_are(h100: Any) -> None:
    plan = compiled(h100, short("glm-5-fp8"))
    batch, kv_len = np.array([1, 4, 16, 64, 256])[:, None], np.array([512, 2048, 8192, 32_768, 131_072])
    taken = plan.decode_us(batch, kv_len)
    # measured kernels are jagged: a twentieth
    assert (taken[1:] > 0.95 * taken[:-1]).all()
    assert (taken[:, 1:] > 0.95 * taken[:, :-1]).all()


@pytest.mark.parametrize("operator", ["dsa_decode", "dsa_prefill"])
def test_holes_of_a_ragged_table_do_not_make_cheap_calls(h100: Any, operator: str) -> None:
    # on the union grid of all sizes, filled holes were 8 us of calls of 70
    tables = fastroof.load_tables("h100", source="aiconfigurator-sglang-0.5.14")
    own: Any = OPERATORS[operator]
    key = ("fp8_block", "bf16", "bf16", "glm-5", 8)
    rows = tables.rows(own, key)
    sizes = {name: np.unique(rows[name]) for name in ("batch_size", "kv_len")}
    batch, kv_len = (a.ravel() for a in np.meshgrid(*sizes.values()))
    at = {"batch_size": batch, "kv_len": kv_len}
    if operator == "dsa_prefill":
        at |= {"q_len": np.minimum(kv_len, 512)}
    names = dict(zip((column.name for column in own.keys), key, strict=True))
    found = tables.lookup(operator, **names, **at).latency_us
    assert found.min() > 0.9 * rows["latency_us"].min()


def test_memory_keeps_vectors_and_index_keys_whole_on_every_gpu(h100: Any) -> None:
    model = load_model("glm-5.2-fp8")
    for tp in (4, 8):
        plan = compiled(h100, model, tp=tp, kv_dtype="fp8")
        assert plan.memory.kv_bytes_per_token == 78 * 656 + 21 * 132


def test_mxfp8_runs_on_kernels_of_fp8_block_and_block_sparse_attention_needs_its_tables(h100: Any) -> None:
    model = load_model("minimax-m3-nvfp4")
    with pytest.warns(UserWarning, match="no measured tables"):
        plan = fastroof.compile_plan(model, "b200", None, tp=8, **{"engine": "kernels", **LIMITS})
    assert dict(plan.execution.kernels)["mxfp8"] == "fp8_block"
    # and beyond 2,048 tokens decodes cost their scores alone
    step = np.diff(plan.decode_us(64, np.array([1024, 1536, 2048, 20_480, 38_912])))
    assert step[0] / 512 == pytest.approx(step[1] / 512, rel=0.05)
    assert step[3] / 18_432 < 0.75 * step[0] / 512


@pytest.mark.parametrize(("name", "module", "heads"), [
    ("glm-5-fp8", "glm-5", 8), ("glm-5.2-fp8", "glm-5-shared-index", 8),
    ("deepseek-v3.2", "deepseek-v3.2", 16),
])  # fmt: skip
def test_sizes_one_token_beyond_round_ones_keep_the_fast_decode_lines(
    h100: Any, name: str, module: str, heads: int
) -> None:
    plan = compiled(h100, short(name))
    assert plan.decode_lines is not None
    kind = "moe shared index" if "shared" in module else "moe"
    (count,) = (group.count for group in plan.model.layers if group.kind.name == kind)
    own: Any = OPERATORS["dsa_decode"]
    tables = fastroof.load_tables("h100", source="aiconfigurator-sglang-0.5.14")
    packed = tables.packed(own, ("fp8_block", "bf16", "bf16", module, heads))
    points = zip(*packed.points(), packed.latency_us, strict=True)
    some = [point for point in points if point[0] in (1, 16, 64)]
    errors = []
    for batch, kv_len, measured_us in some:
        requests = [(1, int(kv_len) - 1)] * int(batch)
        got = attention_us(plan, requests, "decode_attention", f"({kind})") / count
        errors.append(abs(got / measured_us - 1.0))
    assert len(errors) > 40
    # gated against collapse alone
    assert np.median(errors) < 1e-3
    assert np.quantile(errors, 0.95) < 0.02
