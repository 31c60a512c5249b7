"""Each test of a family finds what it is for and nothing else, and flags are written and found again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.config.gpu import load_gpu
from fastroof.errors import TableError
from fastroof.judging.validate import validate
from fastroof.load import MeasuredTable, MeasuredTables, load_measured
from fastroof.load.families import _beyond_larger
from fastroof.load.family_checks import find_unsound, flag_source, flag_unsound, siblings_of
from fastroof.load.unsound import UnsoundFamily, families_error, unsound_families
from fastroof.load.write import write_source

SIZES = [
    (m, n, k)
    for m in (1, 4, 16, 64, 256, 1024, 4096)
    for n in (64, 512, 2048, 8192)
    for k in (64, 512, 2048, 8192)
]


def gemms(dtype: str, us: Any = None) -> dict[str, Any]:
    """A family of GEMMs that takes 2 us and the time of its bytes and FLOPs, or ``us(m, n, k)``."""
    m, n, k = np.array(SIZES).T
    latency_us = 2.0 + (m * k + n * k) / 1e6 + m * n * k / 4e8
    if us is not None:
        latency_us = us(m, n, k, latency_us)
    words = np.full(len(m), dtype, object)
    return {"dtype": words, "m": m, "n": n, "k": k, "latency_us": np.asarray(latency_us, np.float64)}


def table(*parts: dict[str, Any], source: str = "own", engine: str = "") -> MeasuredTable:
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return MeasuredTable("gemm", columns, source, provenance={"gpu": "h100", "framework": engine})


def found(own: MeasuredTable, *siblings: MeasuredTable) -> list[tuple[str, str, bool]]:
    return [(f.keys["dtype"][0], f.test, f.serves) for f in find_unsound(own, siblings)]


def launched(m: Any, n: Any, k: Any, us: Any) -> Any:
    return np.maximum(us, 50.0)


def test_sound_families_are_left_alone() -> None:
    own = table(gemms("bf16"), gemms("fp8", lambda m, n, k, us: 0.7 * us))
    assert found(own) == []
    assert found(own, table(gemms("bf16", lambda m, n, k, us: 1.4 * us), source="other")) == []


def test_a_floor_far_above_the_other_families_is_the_host() -> None:
    own = table(gemms("bf16"), gemms("fp8_block", launched))
    (family,) = find_unsound(own)
    assert (family.keys, family.test, family.serves) == ({"dtype": ("fp8_block",)}, "launched", False)
    assert family.excess_us == pytest.approx(48.0, abs=0.1)
    assert "never below 50 us, where other families of the table start at 2" in family.reason
    # alone it has nothing to be seen by, but another source's rows of the same family
    assert found(table(gemms("fp8_block", launched))) == []
    near = table(gemms("fp8_block"), source="other")
    assert found(table(gemms("fp8_block", launched)), near) == [("fp8_block", "launched", False)]


def test_a_floor_of_a_few_times_another_is_what_quantising_costs() -> None:
    assert found(table(gemms("bf16"), gemms("fp8", lambda m, n, k, us: 0.6 * us + 10.0))) == []


def test_narrower_weights_that_are_never_faster_are_not_chosen() -> None:
    slow = gemms("fp8", lambda m, n, k, us: 1.6 * us)
    assert found(table(gemms("bf16"), slow)) == [("fp8", "narrower_slower", False)]
    # slower when small and faster when large is a kernel
    mixed = gemms("fp8", lambda m, n, k, us: np.where(m <= 256, 1.9, 0.6) * us)
    assert "narrower_slower" not in [test for _, test, _ in found(table(gemms("bf16"), mixed))]


def test_two_versions_of_one_engine() -> None:
    slow = table(gemms("bf16", lambda m, n, k, us: 2.1 * us), source="0.24", engine="vllm")
    older = table(gemms("bf16"), source="0.19", engine="vllm")
    assert found(slow, older) == [("bf16", "another_version", False)]
    assert found(older, slow) == []
    other = table(gemms("bf16"), source="0.5", engine="sglang")
    assert found(slow, other) == []


@pytest.mark.parametrize(
    ("others", "is_found"), [((1.0, 1.2), True), ((1.0, 2.0), False), ((1.0, 1.6), False)]
)
def test_a_source_is_alone_where_the_others_agree(others: tuple[float, float], is_found: bool) -> None:
    own = table(gemms("bf16", lambda m, n, k, us: 3.2 * us), engine="vllm")
    siblings = [
        table(gemms("bf16", lambda m, n, k, us, f=f: f * us), source=f"s{f}", engine="e") for f in others
    ]
    assert found(own, *siblings) == ([("bf16", "alone", False)] if is_found else [])


def test_rows_that_grow_when_the_work_falls_are_flagged_by_size() -> None:
    def falls(m: Any, n: Any, k: Any, us: Any) -> Any:
        return np.where((m == 4) | (m == 16), 2.5 * us.max(), us)

    (family,) = find_unsound(table(gemms("bf16", lambda m, n, k, us: np.where(m <= 1, 3.0 * us, us))))
    assert (family.keys, family.serves) == ({"dtype": ("bf16",), "m": (1, 1)}, True)
    # small calls of 3 x 2 us beside 2 us are off by nearly two thirds of themselves
    assert family.ratio is not None
    assert 2.0 < family.ratio < 3.0
    (family,) = find_unsound(table(gemms("bf16", falls)))
    assert family.keys["m"] == (4, 16)


def test_one_bad_row_does_not_condemn_a_family() -> None:
    def one(m: Any, n: Any, k: Any, us: Any) -> Any:
        return np.where((m == 4) & (n == 512) & (k == 512), 90.0, us)

    assert found(table(gemms("bf16", one))) == []


def allreduce(latency_us: list[float], mode: str = "graph") -> MeasuredTable:
    rows = len(latency_us)
    columns: dict[str, Any] = {
        "dtype": np.full(rows, "bf16", object),
        "num_gpus": np.full(rows, 8),
        "mode": np.full(rows, mode, object),
        "message_bytes": 2 ** np.arange(8, 8 + rows),
        "latency_us": np.array(latency_us),
    }
    return MeasuredTable("allreduce", columns, "own")


def test_a_single_line_is_flagged_where_two_sizes_in_a_row_fall() -> None:
    (family,) = find_unsound(allreduce([8.0, 9.0, 26.0, 26.0, 17.0, 20.0]))
    assert family.keys == {
        "dtype": ("bf16",), "num_gpus": (8, 8), "mode": ("graph",), "message_bytes": (1024, 2048),
    }  # fmt: skip
    assert family.ratio == pytest.approx(26.0 / 17.0, rel=1e-3)
    assert not find_unsound(allreduce([8.0, 9.0, 26.0, 16.0, 17.0, 20.0]))
    assert not find_unsound(allreduce([8.0, 9.0, 26.0, 26.0, 17.0, 20.0], mode="eager"))


lines = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.floats(0.5, 500.0)), min_size=1, max_size=40
)


@given(lines)
@settings(max_examples=100)
def test_what_is_beyond_a_larger_size_by_hand(rows: list[tuple[int, int, float]]) -> None:
    k, m, latency_us = (np.array(values) for values in zip(*rows, strict=True))
    columns = {"dtype": np.full(len(k), "bf16", object), "m": m, "n": np.full(len(k), 8), "k": k}
    beyond = _beyond_larger("gemm", {**columns, "latency_us": latency_us}, "m")
    for i in range(len(k)):
        larger = [latency_us[j] for j in range(len(k)) if k[j] == k[i] and m[j] > m[i]]
        expected = max(1.0 - min(larger) / latency_us[i], 0.0) if larger else 0.0
        assert beyond[i] == pytest.approx(expected, abs=1e-9)


def test_flags_are_written_and_what_was_flagged_by_hand_is_kept() -> None:
    own = table(gemms("bf16"), gemms("fp8_block", launched))
    by_hand = UnsoundFamily({"dtype": ("bf16",)}, "serving", "too fast to be true", ratio=0.5)
    provenance = {"gpu": "h100", "operators": {"gemm": {"rows": 3, "unsound": [by_hand.as_dict()]}}}
    flagged = flag_unsound(provenance, {"gemm": own})
    assert flagged["operators"]["gemm"]["rows"] == 3
    reasons = {one.keys["dtype"]: one.reason for one in unsound_families(flagged, "gemm") if not one.serves}
    assert reasons["bf16",] == "too fast to be true"
    assert "never below 50 us" in reasons["fp8_block",]
    # never an error of two per cent
    launches = [one for one in unsound_families(flagged, "gemm") if one.test == "launched"]
    assert families_error(launches, {"m": np.ones(1)}, np.array([50.0]))[0] > 0.9
    assert flag_unsound(flagged, {"gemm": own}) == flagged
    sound = flag_unsound(flagged, {"gemm": table(gemms("bf16"))})
    assert sound["operators"]["gemm"]["unsound"] == [by_hand.as_dict()]


def folder_of(tmp_path: Path, name: str, *parts: dict[str, Any]) -> Path:
    columns = dict(table(*parts).columns)
    return write_source(tmp_path / "h100" / name, {"gemm": columns}, {"gpu": "h100"})


def test_a_source_is_flagged_against_its_siblings_and_validation_then_only_notes_it(tmp_path: Path) -> None:
    folders = [
        folder_of(tmp_path, "one", gemms("fp8_block", launched)),
        folder_of(tmp_path, "other", gemms("fp8_block")),
    ]
    one, other = (load_measured(folder) for folder in folders)
    near = siblings_of(one, (one, other))
    assert [t.source for t in near["gemm"]] == ["other"]
    gpu = load_gpu("h100")
    (before,) = [f for r in validate(one, gpu, near) for f in r.findings if f.kind == "unsound"]
    assert before.severity == "warning"
    assert "not flagged in provenance.toml" in before.message
    text = (folders[0] / "provenance.toml").read_bytes()
    flag_source(one, near, dry_run=True)
    assert (folders[0] / "provenance.toml").read_bytes() == text
    flagged = flag_source(one, near)
    written = tomllib.loads((folders[0] / "provenance.toml").read_text())
    assert written == flagged
    # the hashes of its files stay
    assert written["files"] == tomllib.loads(text.decode())["files"]
    again = load_measured(folders[0])
    (after,) = [f for r in validate(again, gpu, near) for f in r.findings if f.kind == "unsound"]
    assert after.severity == "note"


def test_tables_without_a_source_cannot_be_flagged() -> None:
    made = MeasuredTables("h100", {"gemm": table(gemms("bf16"))}, Path("nowhere"))
    with pytest.raises(TableError, match="is not a single source"):
        flag_source(made, {})
