"""Captured numbers of tokens in a profile: read, checked, written, of which versions."""

from __future__ import annotations

import dataclasses

import pytest

from fastroof.engines import PrefillGraphs, load_engine
from fastroof.errors import PlanError
from fastroof.serving.evidence.profile_file import profile_text

SIZES = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
)
"""What SGLang 0.5.14 captures, as its cuda_graph_config.py lists them."""


def test_sglang_pads_to_the_next_captured_number_from_0_5_10_on():
    (graphs,) = load_engine("sglang-0.5.14").kernels.prefill_graphs
    for tokens in range(1, 8193):
        assert graphs.padded(tokens) == min(size for size in SIZES if size >= tokens)
    assert graphs.padded(8193) == 8193
    for version in ("0.5.10", "0.5.10.post1", "0.5.23"):
        assert [one.versions for one in load_engine(f"sglang-{version}").kernels.prefill_graphs] == [""]


@pytest.mark.parametrize("engine", ["sglang", "sglang-0.5.9", "sglang-0.5.6.post2"])
def test_before_and_of_an_unknown_version_nothing_is_known_to_be_captured(engine):
    assert not [one for one in load_engine(engine).kernels.prefill_graphs if not one.versions]


def test_a_file_has_captured_numbers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[[kernels.prefill_graphs]]\nversions = '>=2'\nmultiples = [[32, 4], [256, 16]]\nreason = 'r'\n"
        "[[kernels.prefill_graphs]]\nmultiples = [[64, 64]]\n",
        "utf-8",
    )
    profile = load_engine(path)
    ranged, plain = PrefillGraphs(((32, 4), (256, 16)), ">=2", "r"), PrefillGraphs(((64, 64),))
    assert profile.kernels.prefill_graphs == (ranged, plain)
    assert load_engine(dataclasses.asdict(profile)) == profile
    assert profile.at("1.0").kernels.prefill_graphs == (plain,)
    assert profile.at("2.0").kernels.prefill_graphs == (dataclasses.replace(ranged, versions=""), plain)
    again = tmp_path / "again.toml"
    again.write_text(profile_text(profile), "utf-8")
    assert dataclasses.replace(load_engine(again), name="mine") == profile
    hash(profile)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"multiples": []}, "must be pairs"),
        ({"multiples": 4}, "must be pairs"),
        ({"multiples": [[4]]}, "must be pairs"),
        ({"multiples": [[32, 4], [32, 16]]}, "must rise"),
        ({"multiples": [[33, 4]]}, "must rise, each a multiple"),
        ({"multiples": [[0, 4]]}, "a number of tokens in multiples"),
        ({"multiples": [[4, 0]]}, "a multiple of tokens"),
        ({"multiples": [[4.0, 4]]}, "a number of tokens in multiples"),
        ({"multiples": [[4, 4]], "versions": "2"}, "versions must be bounds"),
        ({"multiples": [[4, 4]], "versions": 2}, "versions of prefill_graphs must be text"),
        ({"multiples": [[4, 4]], "reason": 2}, "reason of prefill_graphs must be text"),
        ({"multiples": [[4, 4]], "sizes": 2}, "unknown sizes"),
        ({"versions": ">=2"}, "needs multiples"),
        (5, "needs multiples"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(keys, words):
    with pytest.raises(PlanError, match=words):
        load_engine({"name": "mine", "kernels": {"prefill_graphs": [keys]}})
    with pytest.raises(PlanError, match="prefill_graphs must be a list"):
        load_engine({"name": "mine", "kernels": {"prefill_graphs": 5}})
