"""soundness.py: which kernels and rows a provenance calls wrong, how far off, and malformed entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastroof.errors import TableError
from fastroof.load.sources import list_sources
from fastroof.load.unsound import families_error, unsound_families
from fastroof.load.write import toml_text

FLAT: dict[str, Any] = {
    "keys": {"dtype": ["fp8_block"]},
    "test": "launched",
    "reason": "never below 55 us",
    "excess_us": 50.0,
    "rows": 7,
}
FALLS: dict[str, Any] = {
    "keys": {"dtype": ["bf16"], "m": [1, 4], "n": [2048, 8192]},
    "test": "falls",
    "reason": "9.0 ms at m = 4, 5.0 at 8",
    "ratio": 1.8,
    "serves": True,
}


def provenance_with(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"gpu": "h100", "operators": {"gemm": {"unsound": list(entries)}}}


def unsound(provenance, operator, key):
    """Reason why rows of a kernel do not serve; None if they do."""
    found = (one for one in unsound_families(provenance, operator) if not one.serves and one.holds_key(key))
    return next((one.reason for one in found), None)


def test_a_kernel_of_an_unserved_family_has_a_reason() -> None:
    provenance = provenance_with(FALLS, FLAT)
    assert unsound(provenance, "gemm", {"dtype": "fp8_block"}) == "never below 55 us"
    assert unsound(provenance, "gemm", {"dtype": "bf16"}) is None  # some of its rows are wrong, it is served
    assert unsound(provenance, "gemm", {"dtype": "fp8"}) is None
    assert unsound(provenance, "moe", {"dtype": "fp8_block"}) is None


def test_a_kernel_is_identified_by_its_sizes_too() -> None:
    family = {
        "keys": {"dtype": ["fp8"], "moe_tp": [2, 4]},
        "test": "versions",
        "reason": "6 times",
        "ratio": 6.0,
    }
    provenance = {"operators": {"moe": {"unsound": [family]}}}
    wanted = [unsound(provenance, "moe", {"dtype": "fp8", "moe_tp": tp}) for tp in (1, 2, 3, 4, 8)]
    assert wanted == [None, "6 times", "6 times", "6 times", None]


def test_the_error_is_that_of_the_worst_family_that_a_point_is_in() -> None:
    twice = FALLS | {"keys": {"m": [4, 8]}, "ratio": 0.5}
    sizes = {name: np.array(values) for name, values in (("m", [1.0, 4.0, 8.0, 9.0]), ("n", [4096.0] * 4))}
    families = unsound_families(provenance_with(FALLS, twice), "gemm")
    error = families_error(families, sizes, np.full(4, 100.0))
    # 1.8 times too slow: off by 0.8 / 1.8 of itself; half of what it should be: by as much again
    np.testing.assert_allclose(error, [0.8 / 1.8, 1.0, 1.0, 0.0])


def test_a_launch_counts_less_the_longer_a_kernel_takes() -> None:
    latency_us = np.array([40.0, 100.0, 5000.0])
    (family,) = unsound_families(provenance_with(FLAT), "gemm")
    assert family.holds_key({"dtype": "fp8_block"})
    assert not family.holds_key({"dtype": "bf16"})
    np.testing.assert_allclose(families_error([family], {"m": np.ones(3)}, latency_us), [1.0, 0.5, 0.01])


def test_rows_of_families() -> None:
    columns = {
        "dtype": np.array(["bf16", "bf16", "fp8_block", "bf16", "fp8"], object),
        "m": np.array([4, 5, 4096, 1, 1]),
        "n": np.array([2048, 2048, 64, 8193, 2048]),
        "latency_us": np.ones(5),
    }
    flat, falls = unsound_families(provenance_with(FLAT, FALLS), "gemm")
    assert (flat.holds(columns) | falls.holds(columns)).tolist() == [True, False, True, False, False]


def test_an_entry_survives_writing_and_reading(tmp_path: Path) -> None:
    families = unsound_families(provenance_with(FLAT, FALLS), "gemm")
    (tmp_path / "provenance.toml").write_text(toml_text(provenance_with(*(f.as_dict() for f in families))))
    (source,) = list_sources(tmp_path)
    assert unsound_families(source.provenance, "gemm") == families


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"keys": {"dtype": "fp8"}}, "dtype must be a list of names, got 'fp8'"),
        ({"keys": {"dtype": []}}, "must be a list of names"),
        ({"keys": {"m": [4, 1]}}, "must be \\[minimum, maximum\\]"),
        ({"keys": {"m": [1]}}, "must be \\[minimum, maximum\\]"),
        ({"keys": {"m": [1, True]}}, "must be \\[minimum, maximum\\]"),
        ({"keys": {"tokens": [1, 4]}}, "gemm has no column 'tokens'; use one of dtype, m, n, k"),
        ({"keys": ["dtype"]}, "keys must be a table, got"),
        ({"reason": ""}, "reason must be text, got ''"),
        ({"test": 3}, "test must be text, got 3"),
        ({"excess_us": None}, "needs ratio or excess_us"),
        ({"excess_us": 0}, "excess_us must be a number above 0, got 0"),
        ({"ratio": float("nan")}, "ratio must be a number above 0, got nan"),
        ({"serves": 1}, "serves must be true or false, got 1"),
        ({"rows": -1}, "rows must be an integer of at least 0"),
        ({"kyes": {}}, "unknown key 'kyes'; did you mean keys"),
    ],
)
def test_a_malformed_entry_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message) as error:
        unsound(provenance_with(FALLS, FLAT | entry), "gemm", {"dtype": "bf16"})
    assert "operators.gemm.unsound, entry 2" in str(error.value)


@pytest.mark.parametrize("entries", [7, ["flat"]])
def test_invalid_lists_of_tables_are_refused_when_a_source_is_read(tmp_path: Path, entries: Any) -> None:
    (tmp_path / "provenance.toml").write_text(
        toml_text({"gpu": "h100", "operators": {"gemm": {"unsound": entries}}})
    )
    with pytest.raises(TableError, match=r"provenance.toml: operators.gemm.unsound"):
        list_sources(tmp_path)
