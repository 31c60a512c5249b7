"""A journal loses nothing that was appended and holds nothing twice, wherever it is cut."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from kernels_bench.journal import Journal, done_keys, find_journals, read_journal


def row(key: str, **values: object) -> dict[str, object]:
    return {"type": "row", "key": key, "latency_us": 1.5, **values}


def write(path: Path, *keys: str) -> None:
    with Journal(path) as journal:
        for key in keys:
            journal.append(row(key))


def keys(path: Path) -> list[str]:
    return [r["key"] for r in read_journal(path)]


def test_reads_back_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal-a.jsonl"
    write(path, "a", "b")
    assert keys(path) == ["a", "b"]
    assert find_journals(tmp_path / "new") == [path]


def test_floats_come_back_to_the_last_bit(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append(row("a", latency_us=0.1 + 0.2, min_us=5e-324))
    (read,) = read_journal(tmp_path / "j")
    assert (read["latency_us"], read["min_us"]) == (0.1 + 0.2, 5e-324)


def test_unknown_clock_is_valid_json_and_reads_as_nan(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append(row("a", sm_clock_mhz=math.nan, power_w=math.inf))
    json.loads((tmp_path / "j").read_text(), parse_constant=pytest.fail)
    (read,) = read_journal(tmp_path / "j")
    assert math.isnan(read["sm_clock_mhz"])
    assert math.isnan(read["power_w"])


@pytest.mark.slow
@given(st.lists(st.text(min_size=1), min_size=1, max_size=6, unique=True), st.data())
def test_any_truncation_resumes_right(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "j"
    write(path, *names)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    assert keys(path) == names[:kept]
    with Journal(path) as journal:
        for name in names:
            if name not in done_keys(journal.records):
                journal.append(row(name))
    assert keys(path) == names
    assert path.read_bytes() == whole


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, "a", "b")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\0\0\0\n" + second)
    with pytest.raises(MeasureError, match="line 2: not a record of a run"):
        read_journal(path)
    with pytest.raises(MeasureError, match="line 2"):
        Journal(path)
    assert path.read_bytes() == first + b"\0\0\0\n" + second


@pytest.mark.parametrize("line", ["[1]", '{"type": "other"}', "3", "{}"])
def test_other_json_is_not_a_record(tmp_path: Path, line: str) -> None:
    (tmp_path / "j").write_text(line + "\n")
    with pytest.raises(MeasureError, match="not a record of a run"):
        read_journal(tmp_path / "j")


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j"), pytest.raises(MeasureError, match="being written by another run"):
        Journal(tmp_path / "j")
    write(tmp_path / "j", "a")


class FullDisk:
    """Stands in for os.write: takes some bytes, then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.write

    def __call__(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        done = self.write(file, data[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("room", [0, 1, 20])
def test_full_disk_is_an_error_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "j"
    write(path, "a")
    before = path.read_bytes()
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", FullDisk(room))
        with pytest.raises(MeasureError, match=r"No space left on device.*every earlier row is safe"):
            journal.append(row("b"))
        assert path.read_bytes() == before
        monkeypatch.undo()
        journal.append(row("c"))
    assert keys(path) == ["a", "c"]


def test_an_interrupted_append_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after the write: the line is in the file, the journal does not know it."""
    path = tmp_path / "j"
    write_bytes = os.write

    def interrupted(file: int, data: bytes) -> int:
        write_bytes(file, data)
        raise KeyboardInterrupt

    with Journal(path) as journal:
        journal.append(row("a"))
        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append(row("a-long-name-of-a-row"))
        monkeypatch.undo()
        journal.append(row("b"))
    assert keys(path) == ["a", "b"]


def test_the_disk_is_checked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [0.0], []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(now[0]))
    with Journal(tmp_path / "j", lambda: now[0]) as journal:
        for tick in range(31):
            now[0] = tick / 10
            journal.append(row(str(tick)))
            assert len(read_journal(tmp_path / "j")) == tick + 1, "a row waits in a buffer"
        assert synced == [1.0, 2.0, 3.0]
    assert len(synced) == 4


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasureError, match="cannot be opened for writing"):
        Journal(tmp_path / "file" / "j")
    with pytest.raises(MeasureError, match="cannot be read"):
        read_journal(tmp_path / "none")


def test_an_error_is_tried_once_more_and_the_rest_never() -> None:
    skips = [
        ("oom", "a"),
        ("unsupported", "b"),
        ("reference", "c"),
        ("error", "d"),
        ("error", "e"),
        ("error", "e"),
    ]
    records = [{"type": "skip", "kind": kind, "key": key} for kind, key in skips]
    assert done_keys([*records, row("f")]) == {"a", "b", "c", "e", "f"}
