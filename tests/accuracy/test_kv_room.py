"""KV cache sizes that engines logged, compared with their profiles."""

from __future__ import annotations

import statistics
import tomllib
from collections import defaultdict

import pytest

from benchmarks.accuracy import kv_room
from benchmarks.accuracy.kv_room import (
    NOT_OF_A_RULE,
    RoomError,
    errors_text,
    judged_errors,
    kv_room_rows,
    main,
    memory_of_row,
    room_errors,
    rule_of_row,
    table_lines,
)
from fastroof import fit
from fastroof.config.paths import bench_data_root
from fastroof.engines import KvMemory, load_engine
from fastroof.errors import FastroofError
from fastroof.memory.room_errors import MOST, errors_path, recorded_errors, room_errors_of
from fastroof.units import GIB


@pytest.fixture(scope="module")
def errors() -> list[RoomError]:
    return room_errors()


def provenance() -> dict:
    return tomllib.loads((bench_data_root() / "kv_room.toml").read_text("utf-8"))


def test_rows_name_their_source_and_assumptions():
    rows = kv_room_rows()
    assert provenance()["rows"] == len(rows) == len({row.id for row in rows})
    assert set(provenance()["outliers"]) <= {row.id for row in rows}
    assert {row.engine for row in rows} == {"vllm", "sglang", "trtllm"}
    for row in rows:
        assert row.source
        assert row.half in ("fit", "judge", "none")
        assert any(one is not None for one in (row.kv_gib, row.kv_tokens, row.blocks, row.max_concurrency))
        assert row.half != "none" or row.assumed


def test_tokens_and_gib_of_a_log_are_of_the_same_bytes_a_token():
    """A log that prints both holds the model's KV bytes a token: our count, within what rounding hides."""
    compared = 0
    for row in kv_room_rows():
        if row.half == "none" or row.kv_gib is None or row.kv_tokens is None or row.kv_gib < 1:
            continue
        memory = memory_of_row(row)
        if memory.groups > 1:
            continue  # prints requests of the longest context
        a_token = memory.kv_bytes_per_token
        if row.id == "vllm-08":  # the engine before V1 pads 576 elements of latent attention to 640
            a_token = a_token * 640 / 576
        assert row.kv_gib * GIB / row.kv_tokens == pytest.approx(a_token, rel=0.015), row.id
        compared += 1
    assert compared > 20


def test_profiles_are_nearer_than_the_datasheet_on_rows_that_nothing_was_fitted_to(errors):
    """The table that fastroof/engines/README.md prints; medians, so that no outlier carries them."""
    groups = defaultdict(list)
    for error in errors:
        row = error.row
        if row.half == "judge":
            plain = memory_of_row(row, KvMemory())
            datasheet = abs(plain.kv_cache_bytes / GIB - row.room_gib(error.memory))
            groups[row.engine].append((abs(error.off_gib), datasheet))
    for engine, pairs in groups.items():
        rule, datasheet = (statistics.median(each) for each in zip(*pairs, strict=True))
        assert rule < datasheet, engine
        assert rule < 2.0, engine


def test_what_is_far_off_is_named(errors):
    far = {error.row.id for error in errors if abs(error.off_gib) > 0.05 * error.row.gpu_gib}
    assert far == set(provenance()["outliers"])


def test_rows_that_constants_are_from_come_back(errors):
    fitted = [error for error in errors if error.row.half == "fit"]
    assert len(fitted) >= 11
    for error in fitted:
        assert abs(error.off_gib) < 0.35, error.row.id


def test_a_row_has_the_rule_of_its_version():
    rules = {row.id: rule_of_row(row) for row in kv_room_rows()}
    assert [rules[name].sample_bytes for name in ("p4", "q5", "m3")] == [38.6, 14.0, 14.0]
    assert rules["m3"].graphs is None
    assert rules["m4"].graphs is not None
    assert rules["s7"].other_share == 0.85
    assert rules["sglang-08"].other_share == rules["s1"].other_share == 1.0


def test_a_table_is_printed(capsys, errors, monkeypatch, tmp_path):
    monkeypatch.setattr(kv_room, "errors_path", lambda: tmp_path / "errors.csv")
    main()
    lines = capsys.readouterr().out.splitlines()
    judged = [row for row in kv_room_rows() if row.half != "none"]
    assert len(lines) == 4 + len(judged) + len(table_lines(errors))
    assert (tmp_path / "errors.csv").read_text("utf-8") == errors_text(judged_errors(errors))
    groups = ("vllm <0.17 ", "vllm >=0.17,<0.21", "vllm >=0.21", "sglang", "trtllm")
    assert all(any(line.startswith(group) for line in lines) for group in groups)


@pytest.mark.parametrize("text", ["id,what\n1,2\n", "id,gpu_gib\n1,many\n", ""])
def test_an_invalid_file_is_refused(tmp_path, text):
    path = tmp_path / "rooms.csv"
    path.write_text(text, "utf-8")
    if text:
        with pytest.raises(FastroofError, match="cannot read the rooms"):
            kv_room_rows(path)
    else:
        assert kv_room_rows(path) == ()
    with pytest.raises(FastroofError, match="cannot read the rooms"):
        kv_room_rows(tmp_path / "none.csv")


def test_the_recorded_errors_are_those_of_the_rules(errors):
    """After a change of a rule or a row: python -m benchmarks.accuracy kv-room."""
    assert errors_path().read_text("utf-8") == errors_text(judged_errors(errors))
    for recorded in recorded_errors():
        title = f"{recorded.engine} {recorded.versions}".rstrip()
        sizes = [
            abs(one.off_gib)
            for one in errors
            if one.row.group == title and one.row.half == "judge" and recorded.kind in ("", one.kind)
            if one.row.id != NOT_OF_A_RULE
        ]
        assert recorded.starts == len(sizes)
        within = sum(size <= recorded.most_gib + 0.005 for size in sizes)
        assert within >= MOST * len(sizes) > within - 1
        assert recorded.median_gib <= recorded.most_gib


@pytest.mark.parametrize(
    ("engine", "group"),
    [
        ("vllm", "vllm >=0.21"), ("vllm-0.33.0", "vllm >=0.21"), ("vllm-0.18.1", "vllm >=0.17,<0.21"),
        ("vllm-0.12", "vllm <0.17"), ("sglang", "sglang"), ("sglang-0.5.9", "sglang"),
        ("trtllm-1.0", "trtllm"), ("kernels", None), ("vllm-nightly", None), ("mine.toml", None),
        (KvMemory(), None),
    ],
)  # fmt: skip
def test_errors_are_of_the_engine_and_its_version(engine, group):
    found = room_errors_of(engine)
    assert (found and f"{found.engine} {found.versions}".rstrip()) == group


def test_fit_names_the_error_of_its_room():
    known = fit("llama-3.1-8b", "h100", engine="vllm-0.18.0")
    assert known.room_errors == room_errors_of("vllm-0.18.0", "others")
    assert dict(known.facts())["its error"].endswith("over 6 logged starts of vllm >=0.17,<0.21")
    assert known.document()["room_errors"]["starts"] == 6
    for other in ("kernels", load_engine("vllm")):
        unknown = fit("llama-3.1-8b", "h100", engine=other)
        assert dict(unknown.facts())["its error"] == "not judged"
        assert unknown.document()["room_errors"] is None
