"""Plans of DeepSeek-V4 and V4.1: naive steps of all kernels, what lookups keep, prefixes, memory, formats."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Tables, compile_plan, load_model
from fastroof.columns import ORIGIN_MODELLED
from fastroof.errors import FastroofError, MissingTableError, PlanError, UnsupportedModelError
from fastroof.models import LayerGroup, Layout
from fastroof.models.named import preset_config
from fastroof.operators.registry import OPERATORS
from fastroof.units import GIB
from tests.reference import compressed
from tests.reference.handmade import handmade_tables

KEY = ("fp8_block", "fp8", "bf16", "deepseek-v4-flash", 64)
# flat scores: 80 us more of a decode, 40 of a prompt, where there are more than 2048 tokens
DECODES = [
    (1, 128, 60.0),
    (1, 2048, 70.0),
    (1, 4096, 151.0),
    (8, 128, 65.0),
    (8, 2048, 80.0),
    (8, 4096, 170.0),
]
PROMPTS = [
    (1, 128, 128, 90.0), (1, 256, 256, 120.0), (1, 256, 1280, 150.0), (1, 256, 4352, 224.0),
    (2, 256, 256, 170.0),
]  # fmt: skip
TOPK = ("deepseek-v4-flash", "flat", 4, 64)
PEAKED = ("deepseek-v4-flash", "top_last", 4, 64)
LAYERS = {0: 2, 4: 3, 128: 4}
LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 16}


def blocks(**more: Any) -> Tables:
    heavy = [(b, kv, us / 2) for b, kv, us in DECODES if kv < 4096] + [(1, 4096, 40.0), (8, 4096, 50.0)]
    return handmade_tables(
        csa_decode=[(*KEY, *row) for row in DECODES],
        hca_decode=[(*KEY, *row) for row in heavy],
        csa_prefill=[(*KEY, *row) for row in PROMPTS],
        hca_prefill=[(*KEY, b, q, kv, us / 2) for b, q, kv, us in PROMPTS if kv != 1280],
        sparse_part=[
            *(("topk_v2", *TOPK, b, 1, 4096, 82.0) for b in (1, 8)),
            *(("topk_v2", *PEAKED, b, 1, 4096, 2.0 + b / 8) for b in (1, 8)),
            ("topk_v1", *TOPK, 1, 256, 4352, 45.0),
            ("topk_v1", *PEAKED, 1, 256, 4352, 5.0),
        ],
        **more,
    )


def joined(whole: Tables, made: Tables, sources: dict[str, str] | None = None) -> Tables:
    """Tables of an engine with rows by hand, each of the source that is named."""
    names = sources or {}
    by_hand = {
        name: replace(table, source=names.get(name, table.source))
        for name, table in made.measured.tables.items()
    }
    return Tables(replace(whole.measured, tables={**whole.measured.tables, **by_hand}), whole.gpu)


@pytest.fixture(scope="module")
def tables(h100: Tables) -> Tables:
    return joined(h100, blocks())


def flash(layers: dict[int, int]) -> Any:
    model = fastroof.load_model("deepseek-v4-flash-fp8")
    groups = {group.kind.attention.ratio: group.kind for group in model.layers}
    return replace(model, layers=tuple(LayerGroup(groups[r], count) for r, count in layers.items()))


@pytest.fixture(scope="module")
def plan(tables: Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan(flash(LAYERS), "h100", tables, **{"engine": "kernels", **LIMITS})


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [
    (1, 1, 128), (8, 1, 2048), (1, 1, 4096), (8, 1, 4096), (1, 128, 128), (1, 256, 256), (2, 256, 256),
])  # fmt: skip
def test_a_step_is_every_kernel_of_every_layer(
    plan: Any, tables: Tables, batch: int, q_len: int, kv_len: int
) -> None:
    requests = [(q_len, kv_len - q_len)] * batch
    found = float(plan.step_us(fastroof.StepBatch.from_requests([requests]))[0])
    assert found == pytest.approx(compressed.step_us(tables, batch, q_len, kv_len, LAYERS), rel=1e-9)
    assert sum(part.total_us for part in plan.explain(requests).operators) == pytest.approx(found, rel=1e-9)


def test_lookups_keep_what_was_measured_and_steps_take_a_models_scores(tables: Tables) -> None:
    """As on an H100: 164 us with flat scores are 86 with a model's, and 84 where all are picked."""
    names = dict(zip(("dtype", "kv_dtype", "attn_dtype", "model", "num_heads"), KEY, strict=True))
    raw = tables.lookup("csa_decode", **names, batch_size=[1, 8], kv_len=4096)
    assert raw.latency_us.tolist() == [151.0, 170.0]
    csa = fastroof.compile_plan(flash({4: 1}), "h100", tables, **{"engine": "kernels", **LIMITS})
    hca = fastroof.compile_plan(flash({128: 1}), "h100", tables, **{"engine": "kernels", **LIMITS})
    more = csa.decode_us(np.array([1, 8]), 4096) - hca.decode_us(np.array([1, 8]), 4096)
    assert more.tolist() == pytest.approx([151.0 - 82.0 + 2.125 - 40.0, 170.0 - 82.0 + 3.0 - 50.0])
    # longer contexts go on from the corrected block
    assert csa.decode_us(8, 16384) - csa.decode_us(8, 4096) < 40.0


def test_rows_of_a_source_without_a_top_k_stay_as_they_are(h100: Tables) -> None:
    other = joined(h100, blocks(), {"sparse_part": "another engine"})
    csa = fastroof.compile_plan(flash({4: 1}), "h100", other, **{"engine": "kernels", **LIMITS})
    hca = fastroof.compile_plan(flash({128: 1}), "h100", other, **{"engine": "kernels", **LIMITS})
    assert csa.decode_us(1, 4096) - hca.decode_us(1, 4096) == pytest.approx(151.0 - 40.0)
    without = joined(h100, handmade_tables(csa_decode=[(*KEY, *row) for row in DECODES]))
    with pytest.raises(MissingTableError, match="csa_prefill"):
        fastroof.compile_plan(flash({4: 1}), "h100", without, **{"engine": "kernels", **LIMITS})


def test_a_window_alone_is_borrowed_and_marked(tables: Tables) -> None:
    alone = fastroof.compile_plan(flash({0: 1}), "h100", tables, **{"engine": "kernels", **LIMITS})
    heavy = fastroof.compile_plan(flash({128: 1}), "h100", tables, **{"engine": "kernels", **LIMITS})
    one = fastroof.StepBatch.from_requests([[(1, 2047)] * 8])
    assert alone.run(one).origin[0] == 3 > heavy.run(one).origin[0]
    assert alone.decode_us(8, 2048) < heavy.decode_us(8, 2048)
    # nothing grows beyond the window, and a prefix costs nothing
    requests = [(256, 0)], [(256, 4096)]
    fresh, after = alone.step_us(fastroof.StepBatch.from_requests(requests))
    assert after == fresh
    (name,) = {part.name for part in alone.explain([(1, 2047)]).operators if part.role == "decode_attention"}
    assert name == "decode attention"
    assert alone.attention[0].sources == heavy.attention[0].sources


def test_prefixes_cost_what_measured_prompts_with_one_pay(tables: Tables) -> None:
    """HCA's rows: 256 tokens after 4096 take 112 us, without 60."""
    heavy = fastroof.compile_plan(flash({128: 1}), "h100", tables, **{"engine": "kernels", **LIMITS})
    steps = fastroof.StepBatch.from_requests([[(256, 0)], [(256, 4096)], [(256, 8192)]])
    fresh, after, further = heavy.step_us(steps)
    assert after - fresh == pytest.approx(52.0, rel=1e-6)
    assert further - fresh == pytest.approx(104.0, rel=1e-6)
    # of CSA 40 of the 104 us are the top-k of flat scores; its picks are paid within their window alone
    csa = fastroof.compile_plan(flash({4: 1}), "h100", tables, **{"engine": "kernels", **LIMITS})
    steps = fastroof.StepBatch.from_requests([[(256, 0)], [(256, 1024)], [(256, 4096)], [(256, 8192)]])
    fresh, near, after, further = csa.step_us(steps)
    assert near - fresh == pytest.approx(30.0, rel=1e-6)
    assert after - fresh == pytest.approx(64.0, rel=1e-6)
    assert further - after < near - fresh


def test_cost_of_selected_entries_caps_and_the_indexers_goes_on(plan: Any) -> None:
    assert plan.arena[fastroof.compiled.steps.WINDOW] == 2048
    times = plan.decode_us(8, np.array([128, 2048, 4096, 65536, 1_000_000]))
    assert (np.diff(times) > 0.0).all()
    mixed = fastroof.StepBatch.from_requests([[(1, 2047)] * 4 + [(1, 65535)] * 4])
    between = float(plan.step_us(mixed)[0])
    assert plan.decode_us(8, 2048) < between < plan.decode_us(8, 65536)


def test_gpus_can_share_a_prompt(tables: Tables) -> None:
    """What a sequence keeps are its last tokens: nothing goes from one part of a prompt to the next."""
    options = {"engine": "sglang", **LIMITS}
    alone = fastroof.compile_plan(flash(LAYERS), "h100", tables, **{"engine": "kernels", **options})
    shared = fastroof.compile_plan(
        flash(LAYERS), "h100", tables, cp=2, moe_tp=2, **{"engine": "kernels", **options}
    )
    assert shared.prefill_us(512) < alone.prefill_us(512)


def test_every_gpu_keeps_the_cache_whole(plan: Any) -> None:
    model = fastroof.load_model("deepseek-v4-flash")
    assert [model.kv_bytes_per_token(Layout(tp), "fp8") for tp in (1, 2, 8)] == [5018] * 3
    with pytest.raises(PlanError, match="8 groups of 64 query heads do not divide by 16"):
        model.check_layout(Layout(16))
    assert plan.memory.window == 128
    # two layers keep their window alone: an entry of 584 bytes a token
    assert plan.memory.window_kv_bytes_per_token == 2 * 584
    assert plan.memory.state_bytes_per_sequence == 3 * (74752 + 81920) + 4 * (74752 + 524288)
    assert plan.kv_dtype == "fp8"


def test_experts_compute_in_the_checkpoints_format_and_blocks_in_theirs(tables: Tables) -> None:
    with pytest.raises(MissingTableError, match="bf16"):
        fastroof.compile_plan(
            "deepseek-v4-flash-fp8", "h100", tables, dtype="int8", **{"engine": "kernels", **LIMITS}
        )
    for name, stored in (("flash", "mxfp4"), ("flash-fp8", "fp8_block"), ("flash-nvfp4", "nvfp4")):
        model = fastroof.load_model(f"deepseek-v4-{name}")
        formats = {dict(kind.formats)["experts"] for kind in model.kinds}
        others = {dtype for kind in model.kinds for role, dtype in kind.formats if role != "experts"}
        assert (formats, others) == ({stored}, {"fp8_block"})


# DeepSeek-V4.1

V41 = "deepseek-ai/DeepSeek-V4.1-Flash"


@pytest.fixture(scope="module")
def shared_plan():
    return compile_plan(V41, "b200", tp=4, allow_modelled=True, engine="kernels")


def test_weights_are_those_that_an_engine_states():
    """SGLang 0.5.23 (dsv41_flash_common.py): 94 GiB of n-grams and 143 of the rest on each of two GPUs.

    The rest has three layers of a draft of 128 experts each, 3.4 GiB, and an encoder of images.
    """
    plan = compile_plan(V41, "b200", tp=2, allow_modelled=True)
    ngrams = (384_006_168 + 384_016_682) // 2 * 264 / GIB
    assert ngrams == pytest.approx(94.4, abs=0.1)
    assert plan.memory.weight_bytes / GIB - ngrams == pytest.approx(143 - 3.4, abs=0.6)


def layers_us(a_plan, step, name):
    return {one.name: (one.total_us / one.calls, one.origin) for one in a_plan.explain(step).operators}[name]


def test_prompts_pass_the_last_layers_with_their_window(shared_plan):
    long, short = ([(tokens, 0)] for tokens in (8192, 128))
    for name in ("experts", "prefill attention"):
        all_of_it, of_window = (
            layers_us(shared_plan, step, f"{name} (reuse-1)")[0] for step in (long, short)
        )
        assert all_of_it == pytest.approx(of_window, rel=0.1)
        assert layers_us(shared_plan, long, f"{name} (reuse-2)")[0] > 3 * all_of_it
    # decodes pass all layers whole
    decodes = [(1, 4095)] * 512
    alike = [layers_us(shared_plan, decodes, f"experts ({role})")[0] for role in ("reuse-1", "reuse-2")]
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    ("role", "operator", "weights", "scored", "attended"),
    [
        ("swa", "hca", 0, 0, 128),
        ("full-2", "csa", 2 * 5120 * 512 + 1280 * 4096 + 5120 * 32 + 512 * 128, 16384, 128 + 512),
        ("reuse-2", "hca", 0, 0, 128 + 512),
        ("full-1", "csa", 5120 * 512 + 1280 * 4096 + 5120 * 32 + 512 * 128, 32768, 128 + 512),
        ("reindex-1", "csa", 1280 * 4096 + 5120 * 32, 16384, 128 + 512),
        ("reuse-1", "hca", 0, 0, 128 + 512),
    ],
)
def test_a_block_does_the_work_of_its_layer(shared_plan, role, operator, weights, scored, attended):
    """Of decodes at 32768 tokens on one of four GPUs, by the modules of vLLM 0.33.0's deepseek_v41."""
    us, origin = layers_us(shared_plan, [(1, 32767)] * 8, f"decode attention ({role})")
    assert (origin, us > 0.0) == (ORIGIN_MODELLED, True)
    columns = {
        "dtype": "fp8_block", "kv_dtype": "fp8", "attn_dtype": "bf16", "model": f"deepseek-v4.1-flash-{role}",
        "num_heads": 16.0, "batch_size": 8.0, "kv_len": 32768.0,
    }  # fmt: skip
    projections = 5120 * (1280 + 512) + 1280 * 16 * 512 + 16 * 512 * 1024 + 2 * 1024 * 5120
    work = OPERATORS[f"{operator}_decode"].flops({name: np.array([one]) for name, one in columns.items()})
    per_query = 2 * (projections + weights) + 2 * 32 * 128 * scored + 4 * 16 * 512 * attended
    assert work.tolist() == [8 * per_query]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "allow_modelled"),
        ({"tp": 1, "dp": 4, "allow_modelled": True}, "with tp and ep alone"),
        ({"tp": 4, "kv_dtype": "nvfp4", "allow_modelled": True}, "is for keys and values of heads"),
    ],
)
def test_unmodelled_parts_of_v41_are_refused(options, message):
    with pytest.raises(FastroofError, match=message):
        compile_plan(V41, "b200", **options)


def test_other_sizes_of_v41_are_refused():
    config = deepcopy(preset_config("deepseek-v4.1-flash"))
    config["text_config"]["q_lora_rank"] = 1536
    with pytest.raises(UnsupportedModelError, match=r"q_lora_rank 1536: .*sizes are modelled"):
        load_model(config)
