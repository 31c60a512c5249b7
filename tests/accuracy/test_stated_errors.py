"""Errors that profiles state hold on groups that they were not made of."""

import numpy as np
import pytest

from benchmarks.accuracy.stated_errors import UnseenError, coverages, stated_error
from fastroof.errors import TableError


def drawn(seed: int, *, groups: int = 60, spread: float = 0.08, noise: float = 0.04) -> list[UnseenError]:
    """Runs whose groups have a bias of their own."""
    rng = np.random.default_rng(seed)
    return [
        UnseenError("vllm" if i % 2 else "trtllm", (f"model-{i}", "h100"), bias + error)
        for i, bias in enumerate(rng.normal(0.0, spread, groups))
        for error in rng.normal(0.0, noise, int(rng.integers(3, 40)))
    ]


def test_an_error_holds_80_percent_of_what_it_is_made_of() -> None:
    sizes = np.random.default_rng(1).normal(0.0, 0.1, 20_000)
    assert stated_error(sizes) == pytest.approx(0.1, rel=0.02)
    assert (np.abs(sizes) <= 1.2816 * stated_error(sizes)).mean() == pytest.approx(0.8, abs=1e-3)


def test_groups_that_an_interval_has_not_seen_are_held_too() -> None:
    held = [coverages(drawn(seed))[-1].held for seed in range(20)]
    assert np.mean(held) == pytest.approx(0.8, abs=0.03)


def test_each_profile_has_its_own_error() -> None:
    wide = [run._replace(profile="wide", ln_error=5.0 * run.ln_error) for run in drawn(3)]
    narrow = [run._replace(group=(*run.group, "narrow"), profile="narrow") for run in drawn(4)]
    of_narrow, of_wide, together = coverages([*wide, *narrow])
    assert (of_narrow.profile, of_wide.profile, together.profile) == ("narrow", "wide", "")
    assert of_wide.error > 3.0 * of_narrow.error
    assert together.runs == of_wide.runs + of_narrow.runs
    assert 0.6 < of_narrow.held < 0.95
    assert 0.6 < of_wide.held < 0.95


def test_a_group_does_not_make_its_own_interval() -> None:
    # one group is far off: an interval of its own would hold it
    runs = [UnseenError("vllm", (f"m{i}",), 0.01) for i in range(9) for _ in range(5)]
    far = [UnseenError("vllm", ("far",), 1.0) for _ in range(5)]
    *_, together = coverages([*runs, *far])
    assert together.held == pytest.approx(45 / 50)


def test_a_profile_of_few_groups_takes_all_profiles_errors() -> None:
    runs = [UnseenError("vllm", (f"m{i}",), 0.1) for i in range(9)]
    few = [UnseenError("sglang", ("a",), 0.05), UnseenError("sglang", ("b",), 0.05)]
    of_sglang = next(one for one in coverages([*runs, *few]) if one.profile == "sglang")
    assert of_sglang.held == 1.0


def test_what_says_nothing_is_refused() -> None:
    with pytest.raises(TableError, match="got 0 runs"):
        stated_error([])
    with pytest.raises(TableError, match="finite"):
        stated_error([0.1, float("nan")])
    with pytest.raises(TableError, match="got 1 groups"):
        coverages([UnseenError("vllm", ("m",), 0.1)])
