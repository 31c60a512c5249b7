"""Rooms for KV cache that engines logged, and what profiles say of them."""

from __future__ import annotations

import statistics
import tomllib
import warnings
from collections import defaultdict

import pytest

from benchmarks.accuracy.kv_room import kv_room_rows, main, memory_of_row
from fastroof.config.paths import bench_data_root
from fastroof.engines import KvMemory
from fastroof.engines.values import holds_for
from fastroof.errors import FastroofError
from fastroof.units import GIB


@pytest.fixture(scope="module")
def rooms():
    """Each row, and by how much of its GPU the rule and the datasheet's rule are off."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in kv_room_rows():
            parts = [memory_of_row(row, rule) for rule in (None, KvMemory())]
            off = [
                (memory.max_kv_tokens * memory.token_bytes / GIB - row.room_gib(memory)) / row.gpu_gib
                for memory in parts
            ]
            found.append((row, *off))
    return found


def test_rows_say_where_they_are_from_and_what_was_assumed():
    rows = kv_room_rows()
    provenance = tomllib.loads((bench_data_root() / "kv_room.toml").read_text("utf-8"))
    assert provenance["rows"] == len(rows) == len({row.id for row in rows})
    assert set(provenance["outliers"]) <= {row.id for row in rows}
    assert {row.engine for row in rows} == {"vllm", "sglang", "trtllm"}
    for row in rows:
        assert row.source
        assert row.half in ("fit", "judge")
        assert row.kv_gib is not None or row.kv_tokens is not None


def test_tokens_and_gib_of_a_log_are_of_the_same_bytes_a_token():
    """A log that prints both holds the model's KV bytes a token: our count, within what rounding hides."""
    for row in kv_room_rows():
        if row.kv_gib is None or row.kv_tokens is None or row.kv_gib < 1:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a_token = memory_of_row(row).kv_bytes_per_token
        if row.id == "vllm-08":  # the engine before V1 pads 576 elements of latent attention to 640
            a_token = a_token * 640 / 576
        assert row.kv_gib * GIB / row.kv_tokens == pytest.approx(a_token, rel=0.015), row.id


def test_profiles_are_nearer_than_the_datasheet_on_rows_that_nothing_was_fitted_to(rooms):
    """The table that fastroof/engines/README.md states; medians, so that no outlier carries them."""
    errors = defaultdict(list)
    for row, rule, datasheet in rooms:
        if row.half == "judge":
            errors[row.engine].append((abs(rule), abs(datasheet)))
    for engine, pairs in errors.items():
        rule, datasheet = (statistics.median(each) for each in zip(*pairs, strict=True))
        assert rule < datasheet, engine
        assert rule < 0.03, engine


def test_what_is_far_off_is_named(rooms):
    named = tomllib.loads((bench_data_root() / "kv_room.toml").read_text("utf-8"))["outliers"]
    assert {row.id for row, rule, _ in rooms if abs(rule) > 0.05} == set(named)


def test_rows_that_constants_are_from_come_back(rooms):
    """Of versions that a profile is of: a later vLLM samples with less."""
    for row, rule, _ in rooms:
        is_later = row.engine == "vllm" and not holds_for("<0.14", row.version)
        if row.half == "fit" and not is_later:
            assert abs(rule) < 0.013, row.id


def test_a_table_is_printed(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(kv_room_rows())


@pytest.mark.parametrize("text", ["id,what\n1,2\n", "id,gpu_gib\n1,many\n", ""])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "rooms.csv"
    path.write_text(text, "utf-8")
    if text:
        with pytest.raises(FastroofError, match="cannot read the rooms"):
            kv_room_rows(path)
    else:
        assert kv_room_rows(path) == ()
    with pytest.raises(FastroofError, match="cannot read the rooms"):
        kv_room_rows(tmp_path / "none.csv")
