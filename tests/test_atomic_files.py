"""Files and folders are replaced whole, or what was there stays."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fastroof.atomic_files import (
    check_file_place,
    remove_unfinished,
    whole_file,
    whole_folder,
    write_files,
    write_output,
    write_whole,
)
from fastroof.errors import BackendError


def fails(*_):
    raise OSError(28, "No space left on device")


def half(path):
    path.write_text("half")
    raise RuntimeError


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_is_replaced(tmp_path, is_durable):
    path = tmp_path / "a.txt"
    for content in (b"one", "tw\u00f6\r\n"):
        write_whole(path, content, is_durable=is_durable)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_was_there_stays_where_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("kept")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"new")
        with pytest.raises(BackendError, match=r"a\.txt cannot be written \(No space left on device\)"):
            write_output(path, b"new", error=BackendError)
    with pytest.raises(RuntimeError), whole_file(path) as unfinished:
        half(unfinished)
    assert path.read_text() == "kept"
    assert os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "a.txt", b"")


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    write_whole(tmp_path / "link", "through it")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "through it"
    read, write = os.pipe()
    write_whole(f"/dev/fd/{write}", "on it")
    check_file_place(Path(f"/dev/fd/{write}"), "it")
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"on it"


def test_a_place_where_no_file_can_be_is_refused(tmp_path):
    for path, words in (
        (tmp_path, "is a folder, need a file's name"),
        (tmp_path / "nowhere" / "a.txt", "folder .*nowhere does not exist"),
        (tmp_path / ("x" * 250), "cannot be written"),
    ):
        with pytest.raises(BackendError, match=f"^page .*{words}"):
            check_file_place(path, f"page {path}", BackendError)
        with pytest.raises(BackendError, match=words):
            write_output(path, "", "page", BackendError)
    assert os.listdir(tmp_path) == []


def test_a_folder_is_replaced_or_stays(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "er" / "a"
    with pytest.raises(RuntimeError), whole_folder(folder) as unfinished:
        half(unfinished / "a.txt")
    assert os.listdir(tmp_path) == []
    for content in ("one", "two"):
        with whole_folder(folder) as unfinished:
            write_whole(unfinished / content, content)
        assert os.listdir(folder) == [content]
    rename = Path.rename

    def only_away(self, target):
        return fails() if target == folder and "two" not in os.listdir(self) else rename(self, target)

    # a disk that cannot exchange two names at once
    monkeypatch.setattr("fastroof.host.exchange_folders", lambda *_: False)
    monkeypatch.setattr(Path, "rename", only_away)
    with pytest.raises(OSError, match="No space left"), whole_folder(folder) as unfinished:
        write_whole(unfinished / "three", "three")
    assert os.listdir(folder) == ["two"]
    assert os.listdir(folder.parent) == ["a"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    unfinished = whole_file(tmp_path / "a.txt").__enter__()
    other = whole_file(tmp_path / "b.txt").__enter__()
    for path in (unfinished, other, tmp_path / "a.txt", tmp_path / ".a.txt.parts"):
        path.touch()
    remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".a.txt.parts", "a.txt"]


def test_files_go_into_a_folder_together_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "a"
    first = {"one": b"1", "sub/two": b"2"}
    write_files(folder, first, {"link": "one"})
    (folder / "mine").write_text("the user's")
    before = content(folder)
    assert before == {"one": b"1", "sub/two": b"2", "link": "one", "mine": b"the user's"}
    second = {"one": b"I", "sub/two": b"II", "new/three": b"III"}
    replace = os.replace
    for last in range(4):
        calls = []

        def some(old, new, calls=calls, last=last):
            calls.append(new)
            return fails() if len(calls) == last + 1 else replace(old, new)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", some)
            with pytest.raises(OSError, match="No space left"):
                write_files(folder, second, {"link": "sub/two"})
        assert content(folder) == before
        assert sorted(os.listdir(folder)) == ["link", "mine", "one", "sub"]
    (folder / "new").mkdir()
    (folder / "new" / "three").mkdir()
    with pytest.raises(OSError, match=r"directory|not permitted"):
        write_files(folder, second, {})
    (folder / "new" / "three").rmdir()
    write_files(folder, second, {"link": "sub/two"})
    assert content(folder) == {**second, "link": "sub/two", "mine": b"the user's"}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", fails)
        with pytest.raises(OSError, match="No space left"):
            write_files(tmp_path / "b" / "c", first, {"link": "one"})
    assert os.listdir(tmp_path) == ["deep"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with whole_folder(tmp_path / "link") as unfinished:
        write_whole(unfinished / "one", "1")
    assert (tmp_path / "link").is_symlink()
    write_files(tmp_path / "link", {"two": b"2"}, {})
    assert content(tmp_path / "there") == {"one": b"1", "two": b"2"}
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


def test_removing_leftovers_touches_plain_files_alone(tmp_path):
    (tmp_path / "precious").write_text("")
    for digit, make in (
        ("1", Path.mkdir),
        ("2", lambda path: path.symlink_to(tmp_path / "precious")),
        ("3", Path.touch),
    ):
        make(tmp_path / f".a.txt.{digit * 32}")
    remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f".a.txt.{'1' * 32}", f".a.txt.{'2' * 32}", "precious"]


def test_a_folder_in_the_place_of_another_is_there_at_every_moment(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    with whole_folder(folder) as unfinished:
        write_whole(unfinished / "one", "1")
    # exchanged: nothing is renamed away
    monkeypatch.setattr(Path, "rename", fails)
    with whole_folder(folder) as unfinished:
        write_whole(unfinished / "two", "2")
    assert content(folder) == {"two": b"2"}
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("write", [whole_file, whole_folder])
def test_what_a_killed_process_left_goes_with_the_next_of_its_place_and_what_is_written_stays(
    tmp_path, write
):
    tmp_path.chmod(0o755)
    place = tmp_path / "a"
    for digit, make in (("1", Path.mkdir), ("2", Path.touch)):
        make(tmp_path / f".a.{digit * 32}")
    (tmp_path / f".a.{'1' * 32}" / "half").write_text("")
    others = [tmp_path / f".b.{'1' * 32}", tmp_path / ".a.parts", tmp_path / f".a.{'3' * 32}"]
    for path in others[:2]:
        path.touch()
    others[2].symlink_to(others[0])
    with write(place) as unfinished, write(place) as other:
        assert unfinished.exists()
        assert other.exists()
        assert sorted(tmp_path.iterdir()) == sorted([unfinished, other, *others])
    assert sorted(tmp_path.iterdir()) == sorted([place, *others])


def test_in_a_shared_folder_nothing_is_removed_as_a_leftover(tmp_path):
    named = tmp_path / f".a.{'1' * 32}"
    named.mkdir()
    for mode, stays in ((0o777, True), (0o775, True), (0o1777, False)):
        tmp_path.chmod(mode)
        with whole_folder(tmp_path / "a"):
            pass
        assert named.exists() == stays


def test_who_loses_what_it_began_before_it_was_locked_begins_again(tmp_path, monkeypatch):
    begun = []
    flock = fcntl.flock

    def taken(held, how):
        begun.append(next(tmp_path.glob(".a.*")))
        if len(begun) == 1:
            begun[0].unlink()
        flock(held, how)

    monkeypatch.setattr(fcntl, "flock", taken)
    write_whole(tmp_path / "a", "whole")
    assert len(set(begun)) == 2
    assert content(tmp_path) == {"a": b"whole"}


def test_the_end_of_a_lock_hides_no_error(tmp_path, monkeypatch):
    close = os.close

    def ended(held):
        close(held)
        fails()

    monkeypatch.setattr(os, "close", ended)
    with pytest.raises(RuntimeError), whole_file(tmp_path / "a") as unfinished:
        half(unfinished)
    write_whole(tmp_path / "a", "whole")
    assert content(tmp_path) == {"a": b"whole"}


def test_looking_whether_there_is_a_place_leaves_nothing(tmp_path, monkeypatch):
    touch = Path.touch

    def failing(path):
        touch(path)
        fails()

    monkeypatch.setattr(Path, "touch", failing)
    with pytest.raises(BackendError, match="No space left"):
        check_file_place(tmp_path / "a", "page", BackendError)
    assert os.listdir(tmp_path) == []


def content(folder):
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir()
    }
