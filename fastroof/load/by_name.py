"""Tables by the name of a GPU: where they lie, and bringing in what a package measured on it, once.

What ships lies in bench_data, what the user has in :func:`fastroof.config.paths.user_tables_root`. Where
aiconfigurator-core is installed, its tables of a GPU are converted into the user's folder when they are
first asked for; a note in the GPU's folder says of which package and for which fastroof.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from fastroof._version import __version__
from fastroof.atomic_files import is_unfinished, put_in_place, unfinished_path, write_whole
from fastroof.config.paths import TABLES_FOLDER, bench_data_root, user_tables_root
from fastroof.documents import read_json
from fastroof.errors import TableError
from fastroof.file_access import is_file, matches, read_bytes

if TYPE_CHECKING:
    from fastroof.load.own import Source
    from fastroof.load.package_import import Progress

IMPORT: Final = "FASTROOF_TABLES_IMPORT"
"""Environment variable: "never" converts nothing unless it is asked for."""

IMPORT_FORMAT: Final = 1
"""Raised where the same files of the package become other rows: what was imported before is made again."""

PROVENANCE: Final = "provenance.toml"
NOTE: Final = ".imported.json"


class _Wanted(NamedTuple):
    """What a GPU's import is made of, and the note that says it was made."""

    gpu: str
    system: str
    data: Path
    key: str


def table_folders(gpu: str) -> tuple[Path, ...]:
    """Folders that hold sources of a GPU: the one that ships, then the user's."""
    folders = [bench_data_root() / gpu]
    # without a home there is no such folder, and what ships still serves
    with contextlib.suppress(TableError):
        folders.append(user_tables_root() / gpu)
    return tuple(folder for folder in folders if matches(folder, f"*/{PROVENANCE}"))


def can_import(gpu: str) -> bool:
    """Whether aiconfigurator-core has tables of a GPU, be it installed or not."""
    from fastroof.load.aiconfigurator import SYSTEMS

    return gpu in SYSTEMS.values()


def how_to_get(gpu: str) -> str:
    """Say how tables of a GPU are had where there are none yet; empty where nobody measured it."""
    from fastroof.load.aiconfigurator import INSTALL

    if not can_import(gpu):
        return ""
    if _installed() is None:
        return f"{INSTALL} brings them"
    return f"fastroof tables import aiconfigurator {gpu} converts them"


def what_would_bring_more(gpu: str) -> str:
    """Say how tables beyond those that ship are had; empty where they are there, or nobody has any."""
    return how_to_get(gpu) if _installed() is None else ""


def missing_tables(gpu: str) -> str:
    """Say in one line that there are no tables of a GPU, and what to do."""
    if can_import(gpu):
        return f"{gpu} has no measured tables yet: {how_to_get(gpu)}"
    return (
        f"{gpu} has no measured tables, and no public package has any: give a folder of them, or compile "
        "plans with tables=None for the datasheet model"
    )


def source_kind(source: Source) -> Literal["shipped", "imported", "own"]:
    """Whether a source came with fastroof, was imported from another program's files, or is one's own."""
    if source.folder.resolve().is_relative_to(bench_data_root()):
        return "shipped"
    return "imported" if {"package", "imported"} & source.provenance.keys() else "own"


def ensure_imported(
    gpu: str,
    *,
    progress: Progress | None = None,
    always: bool = False,
    root: Path | None = None,
    package: Path | None = None,
) -> Path | None:
    """Convert what aiconfigurator-core measured on a GPU into the user's folder, unless that was done."""
    setting = os.environ.get(IMPORT, "") or "auto"
    if setting not in ("auto", "never"):
        raise TableError(f"{IMPORT} is {setting!r}; it may be auto or never")
    wanted = None if setting == "never" and not always else _wanted(gpu, package)
    if wanted is None:
        return None
    root = user_tables_root() if root is None else Path(root)
    if not always and _is_made(root, wanted):
        return root / gpu
    with _writing(root), _only_process(root, gpu, progress) as is_alone:
        # another process may have made them while this one waited
        if always or not _is_made(root, wanted):
            _convert(root, wanted, progress, is_alone)
    return root / gpu


def _wanted(gpu: str, package: Path | None) -> _Wanted | None:
    from fastroof.load.aiconfigurator import SYSTEMS, data_folder
    from fastroof.load.package_import import PCIE_LINKED
    from fastroof.load.package_rows import PACKAGE_FILES, package_version

    system = {name: system for system, name in SYSTEMS.items()}.get(gpu)
    package = _installed() if package is None else package
    if system is None or package is None:
        return None
    digest = hashlib.sha256()
    for operator, file in PACKAGE_FILES:
        digest.update(f"{operator} {file.folder}/{file.file} {file.backend}\n".encode())
    if gpu in PCIE_LINKED:
        digest.update(b"links of every version\n")
    for path in matches(bench_data_root() / gpu, f"*/{PROVENANCE}"):
        digest.update(read_bytes(path))
    key = (
        f"aiconfigurator-core {package_version(package)}, fastroof {__version__}, format {IMPORT_FORMAT}, "
        f"{digest.hexdigest()[:16]}"
    )
    return _Wanted(gpu, system, data_folder(package), key)


def _installed() -> Path | None:
    from fastroof.load.aiconfigurator import installed_root

    try:
        return installed_root()
    except TableError:
        return None


# -- the note ------------------------------------------------------------------------------------


def _read_note(root: Path, gpu: str) -> dict[str, Any]:
    try:
        note = read_json(root / gpu / NOTE, TableError)
    except TableError:
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("sources"), list) else {}


def _is_made(root: Path, wanted: _Wanted) -> bool:
    note = _read_note(root, wanted.gpu)
    places = (root / wanted.gpu / str(name) / PROVENANCE for name in note.get("sources", ()))
    return note.get("made_from") == wanted.key and all(is_file(place) for place in places)


# -- one process at a time -----------------------------------------------------------------------


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise TableError(
            f"imported tables cannot be written below {root} ({error.strerror or error}); "
            f"set {TABLES_FOLDER} to another folder"
        ) from None


@contextlib.contextmanager
def _only_process(root: Path, gpu: str, progress: Progress | None) -> Iterator[bool]:
    """Keep other processes from converting the same GPU; say whether that could be done."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(root / f".{gpu}.lock", "wb", opener=_open_lock) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(None, f"fastroof: another process converts the tables of {gpu}, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def _open_lock(path: str, _: int) -> int:
    """Open a lock without following a link and without emptying what is there."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _say(progress: Progress | None, words: str) -> None:
    if progress is None and sys.stderr.isatty():
        print(words, file=sys.stderr, flush=True)


# -- converting ----------------------------------------------------------------------------------


def _convert(root: Path, wanted: _Wanted, progress: Progress | None, is_alone: bool) -> None:
    from fastroof.load.package_import import import_system
    from fastroof.load.write import check_replaceable

    folder = root / wanted.gpu
    if is_alone:
        _remove_unfinished(root, wanted.gpu)
    _say(progress, f"fastroof: converting the tables of {wanted.gpu} from {wanted.key.split(',')[0]}, once")
    began = time.monotonic()
    unfinished = unfinished_path(folder)
    try:
        unfinished.mkdir()
        names = import_system(
            wanted.data,
            wanted.system,
            wanted.gpu,
            unfinished,
            made_from=wanted.key,
            shipped=bench_data_root() / wanted.gpu,
            progress=progress,
        )
        before = set(_read_note(root, wanted.gpu).get("sources", ()))
        own = set()
        for place in _places(folder):
            if _is_replaceable(place, before):
                # refused before anything of it is touched
                check_replaceable(place)
            else:
                own.add(place.name)
        put = [name for name in names if name not in own]
        note = json.dumps({"made_from": wanted.key, "sources": put}, indent=1)
        if own:
            _put_beside(unfinished, folder, put)
            write_whole(folder / NOTE, note)
        else:
            (unfinished / NOTE).write_text(note)
            put_in_place(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _say(progress, f"fastroof: {len(put)} sources in {folder}, {time.monotonic() - began:.1f} s")


def _places(folder: Path) -> list[Path]:
    """What lies in a GPU's folder, but for what an import leaves there of itself."""
    there = sorted(folder.iterdir()) if folder.exists() else []
    return [path for path in there if path.name != NOTE and not is_unfinished(path)]


def _is_replaceable(place: Path, before: Collection[str]) -> bool:
    """Whether it is a source that was imported by name, be it one whose provenance was lost."""
    if place.is_symlink() or not place.is_dir():
        return False
    is_source = (place / PROVENANCE).is_file()
    return _is_imported(place / PROVENANCE) if is_source else place.name in before


def _put_beside(unfinished: Path, folder: Path, names: Sequence[str]) -> None:
    """Move sources to their places beside the user's own, and remove others that were imported."""
    # until the new note is there, who asks finds that something is missing
    (folder / NOTE).unlink(missing_ok=True)
    for name in names:
        put_in_place(unfinished / name, folder / name)
    for path in folder.glob(f"*/{PROVENANCE}"):
        if path.parent.name not in names and _is_imported(path):
            shutil.rmtree(path.parent)


def _is_imported(provenance: Path) -> bool:
    try:
        return re.search(r"^imported = ", provenance.read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _remove_unfinished(root: Path, gpu: str) -> None:
    """Remove what a killed process left half made."""
    for path in (*root.glob(f".{gpu}.*"), *(root / gpu).glob(".*")):
        if is_unfinished(path):
            shutil.rmtree(path, ignore_errors=True)
