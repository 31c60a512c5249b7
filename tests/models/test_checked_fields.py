"""Models made by hand: a plan's answer or a FastroofError, whatever stands in a field."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.errors import ModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Checkpoint
from fastroof.models.mlp import GatedMlp

TABLES = fastroof.load_tables("h100")

WRONG = [
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**5000, "8", b"8", [], [1], {}, object(),
    np.int8(4), np.array([1, 2]), (), 2**40, 1e308,
]  # fmt: skip


def places(part: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the fields of a model are, at any depth."""
    if dataclasses.is_dataclass(part):
        named = [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part) if field.init]
    else:
        named = list(enumerate(part)) if isinstance(part, tuple) else []
    for name, inner in named:
        yield (*above, name)
        yield from places(inner, (*above, name))


def changed(part: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same model, with another value in one place."""
    if not place:
        return value
    name, *rest = place
    if isinstance(part, tuple):
        return tuple(changed(one, rest, value) if i == name else one for i, one in enumerate(part))
    return dataclasses.replace(part, **{name: changed(getattr(part, name), tuple(rest), value)})


def answer(model: Any) -> None:
    plan = fastroof.compile_plan(
        model,
        "h100",
        TABLES,
        allow_modelled=True,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        engine="kernels",
    )
    assert 0 < plan.decode_us(2, 100) < 1e12
    assert 0 < plan.prefill_us(4) < 1e12
    assert plan.memory.weight_bytes > 0
    assert repr(plan)
    assert plan.explain([(1, 5)]).operators


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "qwen3-next-80b-a3b",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("gemma-3-12b", "deepseek-v3", "nemotron-h-56b")
        ),
    ],
)
def test_a_wrong_field_is_refused_or_harmless(name):
    model = fastroof.load_model(name)
    answer(model)
    refused = 0
    for place in sorted(set(places(model)), key=str):
        for value in WRONG:
            try:
                answer(changed(model, place, value))
            except fastroof.FastroofError:
                refused += 1
    assert refused > 500


def test_the_message_names_the_part_and_the_field():
    with pytest.raises(ModelError, match="GatedMlp: bias must be True or False, got 1"):
        GatedMlp(intermediate=64, bias=1)
    with pytest.raises(ModelError, match=r"Attention: head_dim must be a whole number .* got True"):
        GroupedQueryAttention(num_q_heads=8, num_kv_heads=8, head_dim=True)
    with pytest.raises(ModelError, match="Checkpoint: dtype must be text, got None"):
        Checkpoint(dtype=None)
    with pytest.raises(ModelError, match=r"a format must be one of bf16, .* got 'fp7'"):
        Checkpoint(dtype="fp7")


def test_numbers_of_numpy_are_kept_as_python_s():
    mlp = GatedMlp(intermediate=np.int16(14336))
    assert type(mlp.intermediate) is int
    assert mlp == GatedMlp(intermediate=14336)
