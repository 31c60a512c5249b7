"""Plans that share tables: keys of cached answers hold everything that these depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastroof import Tables, compile_plan, load_tables
from fastroof.engines import EngineProfile, load_engine

PLAIN = load_engine("kernels")


def choosing(**choices: Any) -> EngineProfile:
    return replace(PLAIN, kernels=replace(PLAIN.kernels, **choices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"engine": PLAIN}, {"engine": choosing(cold_decode=("h100",))}),
        ({"engine": PLAIN}, {"engine": choosing(gemm_smoothing="median3")}),
        ({"model": "qwen3-32b-fp8"}, {"model": "qwen3-32b-fp8-static"}),
        ({}, {"method": "nearest"}),
        ({"method": "nearest"}, {"method": "nearest", "max_num_batched_tokens": 700}),
        ({}, {"dtype": "fp8"}),
    ],
    ids=["cold decodes", "smoothing", "scales", "method", "limits", "dtype"],
)
def test_a_plan_is_the_same_whatever_was_compiled_before(one: dict[str, Any], other: dict[str, Any]) -> None:
    def compiled(tables: Tables, options: dict[str, Any]) -> bytes:
        question = {
            "model": "llama-3.1-8b",
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "allow_modelled": True,
            **options,
        }
        return compile_plan(
            question.pop("model"), "h100", tables, **{"engine": "kernels", **question}
        ).arena.tobytes()

    alone = [compiled(load_tables("h100"), options) for options in (one, other)]
    assert alone[0] != alone[1]
    for order in ((one, other), (other, one)):
        tables = load_tables("h100")
        found = {id(options): compiled(tables, options) for options in order}
        assert [found[id(one)], found[id(other)]] == alone
