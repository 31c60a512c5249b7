"""Names that a list of modules means, against a naive reading of the list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.models.quantisation.scheme import ModulePatterns, layer_module_names

PARTS = ("layers", "0", "1", "10", "mlp", "self_attn", "experts", "q_proj", "gate", "gate_proj", "lm_head")
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join)


def naively_named(pattern: str, name: str) -> bool:
    """Whether a literal pattern stands between dots of a name."""
    return f".{pattern}." in f".{name}."


@settings(max_examples=400, deadline=None)
@given(st.lists(NAMES, max_size=4), st.lists(NAMES, min_size=1, max_size=3), st.integers(0, 11))
def test_literal_names_stand_between_dots_anywhere(patterns: list[str], names: list[str], layer: int) -> None:
    listed = ModulePatterns([f"model.{pattern}" for pattern in patterns], "config.json")
    for wanted in (names, list(layer_module_names(layer, names)), names):
        expected = any(naively_named(pattern, name) for pattern in patterns for name in wanted)
        assert listed.name_any(wanted) == expected
