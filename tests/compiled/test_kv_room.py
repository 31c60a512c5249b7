"""KV memory that a sequence holds: all of its tokens, or of windowed layers those within the window."""

from __future__ import annotations

import pytest

from fastroof.compiled.serving_options import held_tokens

pytestmark = pytest.mark.loops


@pytest.mark.parametrize(
    ("tokens", "held"),
    # of half of the bytes 4,096 tokens are kept; a state takes as much as 7 tokens
    [(1.0, 8.0), (4096.0, 4103.0), (4098.0, 4104.0), (5096.0, 4603.0)],
)
def test_layers_with_a_window_keep_no_more_than_that(tokens: float, held: float) -> None:
    assert held_tokens(tokens, 4096, 0.5, 7.0) == held
