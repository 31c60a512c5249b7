"""Plans of DeepSeek-V4.1-Flash: modelled blocks, prompts that pass the last layers with a window, weights."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from fastroof import compile_plan, load_model
from fastroof.columns import ORIGIN_MODELLED
from fastroof.errors import FastroofError, UnsupportedModelError
from fastroof.models.named import preset_config
from fastroof.operators.registry import OPERATORS
from fastroof.units import GIB

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"


@pytest.fixture(scope="module")
def plan():
    return compile_plan(MODEL, "b200", tp=4, allow_modelled=True, engine="kernels")


def test_weights_are_those_that_an_engine_states():
    """SGLang 0.5.23 (dsv41_flash_common.py): 94 GiB of n-grams and 143 of the rest on each of two GPUs.

    The rest has three layers of a draft of 128 experts each, 3.4 GiB, and an encoder of images.
    """
    plan = compile_plan(MODEL, "b200", tp=2, allow_modelled=True)
    ngrams = (384_006_168 + 384_016_682) // 2 * 264 / GIB
    assert ngrams == pytest.approx(94.4, abs=0.1)
    assert plan.memory.weight_bytes / GIB - ngrams == pytest.approx(143 - 3.4, abs=0.6)


def layers_us(plan, step, name):
    return {one.name: (one.total_us / one.calls, one.origin) for one in plan.explain(step).operators}[name]


def test_prompts_pass_the_last_layers_with_their_window(plan):
    long, short = ([(tokens, 0)] for tokens in (8192, 128))
    for name in ("experts", "prefill attention"):
        all_of_it, of_window = (layers_us(plan, step, f"{name} (reuse-1)")[0] for step in (long, short))
        assert all_of_it == pytest.approx(of_window, rel=0.1)
        assert layers_us(plan, long, f"{name} (reuse-2)")[0] > 3 * all_of_it
    # decodes pass all layers whole
    decodes = [(1, 4095)] * 512
    alike = [layers_us(plan, decodes, f"experts ({role})")[0] for role in ("reuse-1", "reuse-2")]
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
def test_a_block_does_the_work_of_its_layer(plan, role, operator, weights, scored, attended):
    """Of decodes at 32768 tokens on one of four GPUs, by the modules of vLLM 0.33.0's deepseek_v41."""
    us, origin = layers_us(plan, [(1, 32767)] * 8, f"decode attention ({role})")
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
def test_what_is_not_modelled_is_refused(options, message):
    with pytest.raises(FastroofError, match=message):
        compile_plan(MODEL, "b200", **options)


def test_other_sizes_are_refused():
    config = deepcopy(preset_config("deepseek-v4.1-flash"))
    config["text_config"]["q_lora_rank"] = 1536
    with pytest.raises(UnsupportedModelError, match=r"q_lora_rank 1536: .*sizes are modelled"):
        load_model(config)
