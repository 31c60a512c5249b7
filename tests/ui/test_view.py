"""Questions of the page: whatever a document holds, it is a view or an error of the product."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from fastroof.errors import BatchError, FastroofError
from fastroof.ui.answers import step_answer
from fastroof.ui.plans import PlanStore, named_start
from fastroof.ui.view import SIZES, View
from tests.fuzz.mutators import VALUES

WHOLE = View(
    model="llama-3.1-8b",
    tp=1,
    kind="mixed",
    kv_len=900,
    chunk=64,
    max_num_batched_tokens=4096,
    lora="16:4",
    isl=800,
    osl=64,
    turns=3,
    growth=100,
    kv_tiers="host:2GB:50GB/s",
    fleet="--replicas 2",
).document()


def test_a_view_is_its_document() -> None:
    assert View.of(WHOLE).document() == WHOLE
    assert View.of({}) == View()
    assert json.loads(json.dumps(WHOLE)) == WHOLE


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "a view must be an object"),
        ({"card": "x"}, "unknown key 'card' of a view; valid: model"),
        ({"model": 8}, "fastroof models"),
        ({"batch": 0}, "batch must be a whole number from 1 to 4,096, got 0"),
        ({"batch": True}, "batch must be"),
        ({"isl": None}, "isl must be"),
        ({"tpot_ms": "fast"}, "tpot_ms must be a number of ms"),
        ({"tpot_ms": 0}, "tpot_ms must be"),
        ({"percentile": 99.0}, "percentile must be one of 50, 90, 95, 99"),
        ({"percentile": "99"}, "percentile must be"),
        ({"kind": ["decode"]}, "kind must be one of decode, prefill, mixed"),
        ({"allow_modelled": 1}, "allow_modelled must be True or False"),
        ({"lora": 16}, "lora must be a text such as 16:4"),
        ({"spread": -0.1}, "spread must be a number from 0 to 2"),
        ({"rate": 0}, "rate must be requests/s above 0 up to 1e\\+06, or null for clients"),
        ({"clients": 0}, "clients must be a whole number from 1"),
        ({"think_s": None}, "think_s must be seconds from 0"),
        ({"prefix_cache": None}, "prefix_cache must be True or False"),
        ({"kv_tiers": 3}, "kv_tiers must be a text of at most 256 characters, or null for none, got 3"),
        ({"fleet": "-" * 257}, "fleet must be a text of at most 256 characters"),
    ],
)
def test_a_wrong_view_is_refused(wrong: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        View.of(wrong)


@pytest.mark.parametrize("name", WHOLE)
def test_no_value_is_taken_for_another(name: str) -> None:
    for value in VALUES:
        try:
            kept = getattr(View.of({name: copy.deepcopy(value)}), name)
        except FastroofError:
            continue
        assert (kept, type(kept)) == (value, type(value))


@pytest.mark.slow
def test_the_ends_of_every_size_are_answered_or_refused() -> None:
    store = PlanStore()
    refused = set()
    for name, ends in SIZES.items():
        for size in ends:
            for kind in ("decode", "mixed", "prefill"):
                try:
                    answer = step_answer(store, View.of({**WHOLE, "kind": kind, name: size}))
                except FastroofError:
                    refused.add(name)
                    continue
                assert answer["step"]["latency_us"] > 0
    assert refused <= {"tp", "pp", "dp", "ep"}


def test_a_custom_start_joins_what_is_listed(tmp_path) -> None:
    from importlib import resources

    config = json.loads((resources.files("fastroof.models") / "presets/llama-3.1-8b.json").read_text())
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 16}))
    start = named_start(str(folder / "config.json"), "h100")
    assert (start.view.model, start.models) == ("mine", {"mine": str(folder / "config.json")})
    store = PlanStore(start.models, start.gpus)
    answer = step_answer(store, start.view)
    assert f"--model {folder / 'config.json'}" in answer["commands"]["step"]
    whole = step_answer(store, View(model="llama-3.1-8b", tp=1))
    assert 0.4 < answer["step"]["latency_us"] / whole["step"]["latency_us"] < 0.7

    card = tmp_path / "card" / "gpu.toml"
    card.parent.mkdir()
    from fastroof.config.paths import bench_data_root

    text = (bench_data_root() / "h100" / "gpu.toml").read_text().replace('name = "h100"', 'name = "mine"')
    card.write_text(text.replace('aliases = ["', 'aliases = ["own-'))
    start = named_start(None, str(card))
    assert start.view.gpu == "mine"
    answer = step_answer(PlanStore(start.models, start.gpus), View(model="llama-3.1-8b", gpu="mine", tp=1))
    assert answer["step"]["origin"] == "modelled"
    with pytest.raises(FastroofError):
        named_start("no-such-model")
