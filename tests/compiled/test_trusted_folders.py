"""A folder of code is opened only if this user and root alone could write to it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fastroof.compiled import code_cache
from fastroof.compiled import trusted_files as trusted_folders
from fastroof.compiled.trusted_files import open_trusted

pytestmark = pytest.mark.loops

OTHER_USER = 65_534
DAY_S = 86_400.0


@pytest.fixture(autouse=True)
def _no_own_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "namesake" not in request.node.name:
        monkeypatch.setattr(trusted_folders, "_own_group", lambda: None)


def is_opened(path: Path, **options: bool) -> bool:
    try:
        folder = open_trusted(path, **options)
    except OSError:
        return False
    os.close(folder)
    return True


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder of ours within folders of ours."""
    folder = tmp_path / "above" / "cache" / "loops"
    folder.mkdir(parents=True)
    return folder


def test_folders_of_ours_are_opened_and_made(chain: Path) -> None:
    assert is_opened(chain)
    assert not is_opened(chain / "new" / "er")
    umask = os.umask(0)
    try:
        assert is_opened(chain / "new" / "er", create=True)
    finally:
        os.umask(umask)
    assert is_opened(chain / "new" / "er")
    assert (chain / "new").stat().st_mode & 0o777 == 0o755
    (chain / "file").write_text("")
    assert not is_opened(chain / "file", create=True)


def test_a_relative_path_is_of_the_working_directory(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(chain)
    folder = open_trusted(Path("../../cache"))
    assert os.path.samestat(os.fstat(folder), chain.parent.stat())
    os.close(folder)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_no_folder_above_may_be_writable_by_others(chain: Path, depth: int, mode: int) -> None:
    folder = [chain, *chain.parents][depth]
    folder.chmod(mode)
    assert not is_opened(chain)
    assert not is_opened(chain / "new", create=True)
    assert not (chain / "new").exists()
    # where names are their owners' alone, as in /tmp, others cannot swap ours
    folder.chmod(mode | 0o1000)
    assert is_opened(chain) == (depth > 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("depth", [0, 1])
def test_no_folder_above_may_be_another_users(chain: Path, depth: int) -> None:
    os.chown([chain, *chain.parents][depth], OTHER_USER, OTHER_USER)
    assert not is_opened(chain)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders of root's that all may write to")
def test_a_user_may_pass_through_roots_folders(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.parent.chmod(0o1777)
    os.chown(chain, OTHER_USER, OTHER_USER)
    monkeypatch.setattr(trusted_folders.os, "geteuid", lambda: OTHER_USER)
    assert is_opened(chain)
    chain.parent.chmod(0o777)
    assert not is_opened(chain)


def test_a_users_own_group_may_write(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.parent.chmod(0o775)
    assert not is_opened(chain)
    group = chain.parent.stat().st_gid
    monkeypatch.setattr(trusted_folders, "_own_group", lambda: group)
    assert is_opened(chain)
    chain.parent.chmod(0o777)
    assert not is_opened(chain)


def test_the_own_group_is_the_users_namesake_without_members(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(name: str, members: list[str]) -> int | None:
        monkeypatch.setattr(
            trusted_folders.pwd,
            "getpwuid",
            lambda _: trusted_folders.pwd.struct_passwd(("ann", "x", 7, 8, "", "", "")),
        )
        monkeypatch.setattr(
            trusted_folders.grp,
            "getgrgid",
            lambda gid: trusted_folders.grp.struct_group((name, "x", gid, members)),
        )
        return trusted_folders._own_group()

    assert known("ann", []) == known("ann", ["ann"]) == 8
    assert known("ann", ["bob"]) is None
    assert known("users", []) is None

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(trusted_folders.pwd, "getpwuid", unknown)
    assert trusted_folders._own_group() is None


def test_links_that_other_users_may_have_made_are_not_followed(chain: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for target in (elsewhere, Path("../../elsewhere")):
        chain.rmdir()
        chain.symlink_to(target)
        folder = open_trusted(chain)
        assert os.path.samestat(os.fstat(folder), elsewhere.stat())
        os.close(folder)
        # a folder of ours, swapped for a link by who may write above it
        chain.parent.chmod(0o777)
        assert not is_opened(chain)
        chain.parent.chmod(0o1777)
        assert is_opened(chain)
        if os.geteuid() == 0:
            os.chown(chain, OTHER_USER, OTHER_USER, follow_symlinks=False)
            assert not is_opened(chain)
        chain.parent.chmod(0o755)
        chain.unlink()
        chain.mkdir()
    elsewhere.rmdir()
    elsewhere.symlink_to(elsewhere)
    assert not is_opened(elsewhere)


def test_cleaning_removes_what_is_old_and_ours_and_follows_no_link(tmp_path: Path) -> None:
    root, precious = tmp_path / "cache", tmp_path / "precious"
    root.mkdir()
    precious.mkdir()
    (precious / "kept.loop").write_text("")
    old, fresh, other = (root / f"loops-{digit * 16}" for digit in "0ab")
    for folder in (old, fresh, other):
        folder.mkdir()
        (folder / "x.loop").write_text("")
        (folder / "x.loop.0123456789abcdef").write_text("")
    (other / "notes").write_text("the user's")
    (root / f"loops-{'c' * 16}").symlink_to(precious)
    (root / "loops-of-mine").mkdir()
    long_ago = time.time() - 40 * DAY_S
    for folder in (old, other, precious, root / "loops-of-mine"):
        os.utime(folder, (long_ago, long_ago))
    os.utime(root / f"loops-{'c' * 16}", (long_ago, long_ago), follow_symlinks=False)
    opened = open_trusted(root)
    code_cache._remove_unused(opened)
    os.close(opened)
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [fresh.name, other.name, f"loops-{'c' * 16}", "loops-of-mine"]
    )
    assert os.listdir(other) == ["notes"]
    assert len(os.listdir(fresh)) == 2
    assert os.listdir(precious) == ["kept.loop"]
