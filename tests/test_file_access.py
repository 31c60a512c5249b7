"""What was read is on record, and the record holds as long as reading again would find the same."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastroof import file_access, load_model
from fastroof.documents import parse_json
from fastroof.file_access import (
    FilesRead,
    exists,
    file_sha256,
    is_file,
    is_folder,
    matches,
    names_in,
    read_bytes,
    recorded,
    resolved,
)

LARGE = bytes(file_access.LARGE_BYTES)


def rewrite(path: Path) -> None:
    """Change a byte, and give the file the size and modification time from before."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def replace(path: Path) -> None:
    """Put another file in its place, of the same size and modification time."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    rewrite(other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files changed long ago."""
    monkeypatch.setattr(file_access, "SETTLED_NS", -(10**18))


@pytest.mark.parametrize("read", [read_bytes, file_sha256])
@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("change", [rewrite, replace])
@pytest.mark.parametrize("is_settled", [False, True])
def test_changed_content_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[Path], Any],
    content: bytes,
    change: Callable[[Path], None],
    is_settled: bool,
) -> None:
    if is_settled:
        monkeypatch.setattr(file_access, "SETTLED_NS", -(10**18))
    path = tmp_path / "file"
    path.write_bytes(content)
    with recorded() as record:
        read(path)
    ((_, _, stamp),) = record.entries
    assert (stamp is not None) == (is_settled and content == LARGE)
    assert FilesRead.holds(record.entries)
    time.sleep(0.05 if is_settled else 0.0)  # longer than a tick of the file system's clock
    change(path)
    assert not FilesRead.holds(record.entries)


def test_a_preset_that_is_loaded_again_is_in_every_record() -> None:
    with recorded() as first:
        load_model("llama-3.1-8b")
    with recorded() as second:
        assert load_model("llama-3.1-8b", name="mine").name == "mine"
    assert first.entries
    assert [entry[0] for entry in first.entries] == [entry[0] for entry in second.entries]


def test_the_same_content_with_another_status_holds(tmp_path: Path, settled: None) -> None:
    path = tmp_path / "file"
    path.write_bytes(LARGE)
    with recorded() as record:
        read_bytes(path)
    path.unlink()
    path.write_bytes(LARGE)
    assert FilesRead.holds(record.entries)


def test_a_file_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    """Its next change may come within one tick of the clock, with every time as before."""
    path = tmp_path / "file"
    path.write_bytes(LARGE)
    with recorded() as record:
        read_bytes(path)
    ((_, _, stamp),) = record.entries
    assert stamp is None


def test_a_file_that_was_just_written_with_an_old_date_is_read_again(tmp_path: Path) -> None:
    """As tar and rsync write: it changed now, whatever its modification time."""
    path = tmp_path / "file"
    path.write_bytes(LARGE)
    os.utime(path, ns=(10**18, 10**18))
    assert path.stat().st_mtime_ns < time.time_ns() - file_access.SETTLED_NS
    with recorded() as record:
        read_bytes(path)
    ((_, _, stamp),) = record.entries
    assert stamp is None


QUESTIONS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "a file": (is_file, lambda path: path.write_text("")),
    "a folder": (is_folder, lambda path: path.mkdir()),
    "anything": (exists, lambda path: path.mkdir()),
    "content": (file_sha256, lambda path: path.write_text("")),
    "a link": (resolved, lambda path: path.symlink_to("/")),
    "a match": (lambda path: matches(path.parent, "pl*"), lambda path: path.write_text("")),
    "a name": (lambda path: names_in(path.parent), lambda path: path.write_text("")),
}


@pytest.mark.parametrize(("call", "make"), QUESTIONS.values(), ids=QUESTIONS)
def test_what_was_not_there_and_now_is(
    tmp_path: Path, call: Callable[[Path], Any], make: Callable[[Path], Any]
) -> None:
    place = tmp_path / "place"
    with recorded() as record:
        call(place)
    assert FilesRead.holds(record.entries)
    make(place)
    assert not FilesRead.holds(record.entries)


@pytest.mark.parametrize("name", ["a b", "\n", "Schlüssel", os.fsdecode(b"\xff"), '"', "\\"], ids=ascii)
def test_a_record_is_json_whatever_files_are_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(name, errors="replace")
    with recorded() as record:
        read_bytes(tmp_path / name)
        names_in(tmp_path)
        matches(tmp_path, "*")
        resolved(tmp_path / name)
    entries = parse_json(json.dumps(record.entries).encode(), "entries")
    assert entries == record.entries
    assert FilesRead.holds(entries)
    (tmp_path / name).unlink()
    assert not FilesRead.holds(entries)


def test_what_cannot_be_listed_or_read(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with recorded() as record:
        with pytest.raises(FileNotFoundError):
            names_in(place)
        with pytest.raises(FileNotFoundError):
            read_bytes(place)
    assert FilesRead.holds(record.entries)
    place.mkdir()
    assert not FilesRead.holds(record.entries)


def test_relative_paths_are_looked_up_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "same"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name.replace("same", "one"))
    monkeypatch.chdir(tmp_path / "one")
    with recorded() as record:
        assert read_bytes("file") == b"one"
    monkeypatch.chdir(tmp_path / "two")
    assert not FilesRead.holds(record.entries)
    monkeypatch.chdir(tmp_path / "same")
    assert FilesRead.holds(record.entries)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("content")
    with recorded() as record:
        read_bytes(place)
    place.unlink()
    os.mkfifo(place)
    assert not FilesRead.holds(record.entries)


def test_a_pipe_cannot_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"once"))
    writer.start()
    with recorded() as record:
        assert read_bytes(pipe) == b"once"
    writer.join()
    assert not record.is_repeatable


def test_another_answer_to_the_same_question_is_not_repeatable(tmp_path: Path) -> None:
    with recorded() as record:
        is_file(tmp_path / "file")
        is_file(tmp_path / "file")
        assert record.is_repeatable
        (tmp_path / "file").write_text("")
        is_file(tmp_path / "file")
    assert not record.is_repeatable


def test_records_within_each_other_and_threads(tmp_path: Path) -> None:
    with recorded() as outer:
        with recorded() as inner:
            thread = threading.Thread(target=is_file, args=(tmp_path / "one",))
            thread.start()
            thread.join()
        is_file(tmp_path / "two")
    is_file(tmp_path / "three")
    assert [Path(question[1]).name for question, _, _ in inner.entries] == ["one"]
    assert [Path(question[1]).name for question, _, _ in outer.entries] == ["one", "two"]


@pytest.mark.parametrize(
    "entries",
    [
        None,
        7,
        [7],
        [["is_file"]],
        [[[], True, None]],
        [[["content"], "", None]],
        [[["is_file", 0], True, None]],
        [[["content", 0], "", None]],
        [[["no question", "x"], True, None]],
        [[["matches", "x"], [], None]],
        [[["matches", ".", "/x"], [], None]],
        [[["is_file", "x"], True, None, 1]],
        {"a": 1},
    ],
    ids=repr,
)
def test_other_records_are_refused(entries: Any) -> None:
    with pytest.raises(ValueError, match=r"not |unpack|attern"):
        FilesRead.holds(entries)
