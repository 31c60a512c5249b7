"""Files are replaced whole, or what was there stays."""

from __future__ import annotations

import os

import pytest

from fastroof.whole_files import replace_file


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.txt"
    for content in (b"one", b"two"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_was_there_stays_where_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("kept")

    def fails(*names):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        replace_file(path, b"new")
    assert path.read_text() == "kept"
    assert os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "a.txt", b"")
