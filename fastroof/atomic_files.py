"""Atomic writes of files and folders.

Contents are written under a hidden name in the same folder and renamed when they are complete. Readers never
see a partial file, and a failed write leaves the previous contents unchanged.

The next write to the same path removes the leftovers of a killed process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from fastroof import host
from fastroof.errors import FastroofError
from fastroof.interrupts import BeforeTheEnd


@contextlib.contextmanager
def held_unfinished(place: Path, *, is_folder: bool) -> Iterator[Path]:
    """Create an empty hidden file or folder next to a path, and hold its lock."""
    while True:
        unfinished = unfinished_path(place)
        try:
            if is_folder:
                unfinished.mkdir()
                held = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
            else:
                held = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if not place.parent.is_dir():
                raise
            continue  # another process took it for a leftover before it was locked
        try:
            _lock(held, is_waiting=True)
            if _is_same_file(unfinished, held):
                with BeforeTheEnd(partial(_remove, unfinished)):
                    yield unfinished
                return
        finally:
            # nothing was written through this descriptor: an error on close says nothing about the file
            with contextlib.suppress(OSError):
                os.close(held)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _is_same_file(path: Path, held: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(held))
    except FileNotFoundError:
        return False


def _lock(held: int, *, is_waiting: bool = False) -> bool:
    """Lock an open file or folder; return False if another process holds it or locks are unsupported."""
    try:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


def remove_left(place: Path) -> None:
    """Remove this user's leftovers of killed processes for a file or folder."""
    with contextlib.suppress(OSError):
        pattern = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{32}}")
        for name in filter(pattern.fullmatch, os.listdir(place.parent)):
            with contextlib.suppress(OSError):
                _remove_if_left(place.parent / name)


def _remove_if_left(path: Path) -> None:
    # do not follow links, do not block on pipes
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        if not _lock(held) or status.st_uid != os.geteuid() or not _is_same_file(path, held):
            return
        if stat.S_ISREG(status.st_mode):
            path.unlink()
        elif stat.S_ISDIR(status.st_mode) and _only_we_rename_in(path.parent):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)


def _only_we_rename_in(folder: Path) -> bool:
    """Return whether only this user can have created leftovers in a folder."""
    status = folder.stat()
    return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(status.st_mode & stat.S_ISVTX)


def unfinished_path(path: Path) -> Path:
    """Return a new hidden name on the same file system, so that renaming moves no bytes."""
    return path.parent / f".{path.name}.{os.urandom(16).hex()}"


def is_unfinished(path: Path) -> bool:
    """Return whether a name is that of an unfinished write, running or killed."""
    return re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name) is not None


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of killed processes in a folder."""
    for path in filter(is_unfinished, folder.iterdir()):
        # another process may remove it first; other users' files stay
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()


@contextlib.contextmanager
def whole_file(path: str | Path, *, is_durable: bool = False) -> Iterator[Path]:
    """Yield a hidden path to write a file to, which is renamed to ``path`` when the block ends."""
    if _is_device(path):
        yield Path(path)
        return
    place = Path(os.path.realpath(path))
    remove_left(place)
    with held_unfinished(place, is_folder=False) as unfinished:
        try:
            yield unfinished
            if is_durable:
                _flush_to_disk(unfinished)
            os.replace(unfinished, place)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()


def write_whole(path: str | Path, content: str | bytes, *, is_durable: bool = False) -> None:
    """Write bytes, or text as UTF-8 with unchanged line ends, atomically; see :func:`whole_file`."""
    with whole_file(path, is_durable=is_durable) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a hidden folder to write files to, which replaces ``folder`` when the block ends."""
    # a link to a folder stays one
    folder = Path(os.path.realpath(folder))
    made = [above for above in folder.parents if not above.exists()]
    is_whole = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_left(folder)
        with held_unfinished(folder, is_folder=True) as unfinished:
            try:
                yield unfinished
                put_in_place(unfinished, folder)
                is_whole = True
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    finally:
        for empty in () if is_whole else made:
            with contextlib.suppress(OSError):
                empty.rmdir()


def write_files(folder: str | Path, contents: Mapping[str, bytes], links: Mapping[str, str]) -> None:
    """Write files into a folder, all of them or none; other files there stay."""
    folder = Path(os.path.realpath(folder))
    if not folder.exists():
        with whole_folder(folder) as unfinished:
            _fill(unfinished, contents, links)
        return
    remove_left(folder / "files")
    with held_unfinished(folder / "files", is_folder=True) as aside:
        _write_via(folder, aside, contents, links)


def _write_via(folder: Path, aside: Path, contents: Mapping[str, bytes], links: Mapping[str, str]) -> None:
    """Write files into a folder through a temporary one inside it, and roll back on failure."""
    made: list[Path] = []
    put: list[tuple[Path, Path | None]] = []
    try:
        _fill(aside / "new", contents, links)
        for name in (*contents, *links):
            place = folder / name
            made += _make_folders(place.parent)
            put.append((place, _hard_linked(place, aside / f"old{len(put)}")))
            os.replace(aside / "new" / name, place)
    except BaseException:
        for place, old in reversed(put):
            with contextlib.suppress(OSError):
                if old is None:
                    place.unlink()
                else:
                    os.replace(old, place)
        for empty in reversed(made):
            with contextlib.suppress(OSError):
                empty.rmdir()
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(folder: Path, contents: Mapping[str, bytes], links: Mapping[str, str]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, to in links.items():
        (folder / name).symlink_to(to)


def _make_folders(folder: Path) -> list[Path]:
    """Create missing folders, and return those that were missing."""
    missing = [above for above in (*reversed(folder.parents), folder) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _hard_linked(place: Path, aside: Path) -> Path | None:
    """Keep the old file under a second name until it is replaced; None if it does not exist."""
    if not os.path.lexists(place):
        return None
    try:
        os.link(place, aside, follow_symlinks=False)
    except OSError:
        # a folder, which the copy refuses too, or a file system without hard links
        if os.path.isdir(place) and not os.path.islink(place):
            raise
        shutil.copy2(place, aside, follow_symlinks=False)
    return aside


def put_in_place(finished: Path, folder: Path) -> None:
    """Move a finished folder to a path, and remove the folder that it replaces."""
    if not folder.exists():
        finished.rename(folder)
        return
    # exchange where supported, so that the path exists at every moment
    if host.exchange_folders(finished, folder):
        shutil.rmtree(finished, ignore_errors=True)
        return
    old = unfinished_path(folder)
    folder.rename(old)
    try:
        finished.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def write_errors(what: str, error: type[FastroofError] = FastroofError) -> Iterator[None]:
    """Turn an OSError of the block into a one-line error that ``what`` cannot be written."""
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(f"{what} cannot be written ({reason}); nothing is left of it") from None


def check_file_place(path: Path, what: str, error: type[FastroofError] = FastroofError) -> None:
    """Reject a path that cannot be written, before the work for its contents starts."""
    # os.path returns False where Path.is_dir raises: on names that are too long
    if os.path.isdir(path):
        raise error(f"{what} is a folder, need a file's name")
    if not os.path.isdir(path.parent):
        raise error(f"{what}: folder {path.parent} does not exist; create it or give another path")
    if not _is_device(path):
        with write_errors(what, error):
            probe = unfinished_path(path)
            try:
                probe.touch()
            finally:
                probe.unlink(missing_ok=True)


def write_output(
    path: str | Path, content: str | bytes, what: str = "", error: type[FastroofError] = FastroofError
) -> Path:
    """Write a requested file as :func:`write_whole` does, or explain why its path is invalid."""
    path = Path(path)
    named = f"{what} {path}".lstrip()
    check_file_place(path, named, error)
    with write_errors(named, error):
        write_whole(path, content)
    return path


def _is_device(path: str | Path) -> bool:
    """Return whether a path is a pipe or a device, which is written to and not replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _flush_to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
