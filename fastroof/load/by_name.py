"""Tables by GPU name: their folders, and the one-time import of a package's tables.

Shipped tables are in bench_data, the user's in :func:`fastroof.config.paths.user_tables_root`. If aisimulate
or aiconfigurator-core is installed, its tables of a GPU are imported into the user's folder on first use; a
note in the GPU's folder names the versions of the package and of fastroof. The sources of the pinned version
are listed in advance, so that each table is converted when it is first read; of other versions all tables are
converted at once.

:func:`find_tables` alone decides what a name or a path of tables means: a GPU's name means all its tables, a
path the folder there.
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
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from fastroof._version import __version__
from fastroof.atomic_files import is_unfinished, put_in_place, unfinished_path, write_whole
from fastroof.config.gpu import GPU_FILE, GpuSpec, gpu_file, gpu_named, gpu_names, is_shipped, load_gpu
from fastroof.config.paths import TABLES_FOLDER, bench_data_root, is_never, user_tables_root
from fastroof.documents import parse_json
from fastroof.errors import GpuError, TableError
from fastroof.file_access import exists, is_file, is_folder, matches, read_bytes
from fastroof.load.measured import IMPORTED, Progress
from fastroof.progress import remove_line

if TYPE_CHECKING:
    from fastroof.arrays import Array
    from fastroof.load.sources import Source


IMPORT: Final = "FASTROOF_TABLES_IMPORT"
"""Environment variable: "never" disables automatic imports."""

IMPORT_FORMAT: Final = 4
"""Increased when the package's files convert to different rows, so that older imports are redone."""

PROVENANCE: Final = "provenance.toml"
NOTE: Final = ".imported.json"


class _Import(NamedTuple):
    """Inputs of a GPU's import, and the key that its note records."""

    gpu: str
    system: str
    data: Path
    inputs: str
    key: str


def table_folders(gpu: str) -> tuple[Path, ...]:
    """Folders with sources of a GPU: the shipped one, then the user's."""
    folders = [bench_data_root() / gpu]
    # without a home directory only shipped tables serve
    with contextlib.suppress(TableError):
        folders.append(user_tables_root() / gpu)
    return tuple(folder for folder in folders if matches(folder, f"*/{PROVENANCE}"))


def can_import(gpu: str) -> bool:
    """Whether the package has tables of a GPU, installed or not."""
    from fastroof.load.aiconfigurator import SYSTEMS

    return gpu in SYSTEMS.values()


def how_to_get(gpu: str) -> str:
    """How to get tables of a GPU without any; empty if no package has them."""
    from fastroof.load.aiconfigurator import INSTALL

    if not can_import(gpu):
        return ""
    if _installed() is None:
        return f"run {INSTALL} to get them"
    return f"run fastroof tables import aiconfigurator {gpu} to get them"


def what_would_bring_more(gpu: str) -> str:
    """How to get tables beyond the shipped ones; empty if they are installed or do not exist."""
    return how_to_get(gpu) if _installed() is None else ""


def missing_tables(gpu: str) -> str:
    """One-line error that a GPU has no tables, with a remedy."""
    # a user's own card has a name of no packaged GPU
    name = gpu_named(gpu)
    donor = "" if name is None else name.kernels_of
    if can_import(gpu):
        return f"{gpu} has no measured tables yet: {how_to_get(gpu)}"
    if donor:
        more = "" if table_folders(donor) else f": {how_to_get(donor)}"
        return f"{gpu} has no measured tables, and uses those of {donor}, scaled{more}"
    return (
        f"{gpu} has no measured tables, and no public package has any: pass a folder of tables "
        "(--tables FOLDER), or use the datasheet model (--tables datasheet; tables = 'datasheet' in Python "
        "and in specifications)"
    )


def source_kind(source: Source) -> Literal["shipped", "imported", "own"]:
    """Whether a source was shipped, imported from an external program's files, or is your own."""
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
    """Convert the package's tables of a GPU into the user's folder, unless up to date."""
    is_off = is_never(IMPORT, TableError)
    planned = None if is_off and not always else planned_import(gpu, package)
    if planned is None:
        return None
    root = user_tables_root() if root is None else Path(root)
    if not always and _is_made(root, planned):
        return root / gpu
    with _writing(root), _only_process(root, gpu) as is_alone:
        # another process may have converted them while this one waited
        if always or not _is_made(root, planned):
            _convert(root, planned, progress, is_alone, always)
    return root / gpu


def convert_table(source: Source, operator: str) -> dict[str, Array]:
    """Convert a table of an imported source that is not converted yet, or whose file is damaged."""
    from fastroof.load.package_import import QUICK, import_table
    from fastroof.load.sources import list_sources, read_written
    from fastroof.load.write import write_imported_table

    planned = None if is_never(IMPORT, TableError) else planned_import(source.gpu)
    if planned is None or planned.key != source.provenance[IMPORTED]:
        raise TableError(
            f"{source.files[operator]} is damaged, or not converted yet: {how_to_get(source.gpu)}"
        )
    try:
        with _only_process(source.folder.parents[1], source.gpu):
            # another process may have converted it while this one waited
            with suppress(TableError):
                if source.files[operator].is_file():
                    return read_written(list_sources(source.folder)[0], operator)
            columns = import_table(planned.data, planned.system, source, operator)
            write_imported_table(source.folder, operator, columns, compression_level=QUICK)
            return columns
    except OSError:
        # a folder that cannot be written, as in an image
        return import_table(planned.data, planned.system, source, operator)


def planned_import(gpu: str, package: Path | None = None) -> _Import | None:
    """Plan the import of a GPU from a package (default: the installed one); None if it has no tables."""
    from fastroof.load.aiconfigurator import SYSTEMS, data_folder
    from fastroof.load.package_import import PCIE_LINKED
    from fastroof.load.package_rows import PACKAGE_FILES, package_of, package_version

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
    data = data_folder(package)
    package = data.parents[1]
    name = f"{package_of(package).name} {package_version(package)}"
    made_by = f"format {IMPORT_FORMAT}, {digest.hexdigest()[:16]}"
    key = f"{name}, fastroof {__version__}, {made_by}"
    return _Import(gpu, system, data, f"{name}, {made_by}", key)


def _installed() -> Path | None:
    from fastroof.load.aiconfigurator import installed_root

    try:
        return installed_root()
    except TableError:
        return None


# -- the note ------------------------------------------------------------------------------------


def _read_note(root: Path, gpu: str) -> dict[str, Any]:
    # not through file_access: results depend on the sources that are then read
    try:
        note = parse_json((root / gpu / NOTE).read_bytes(), NOTE, TableError)
    except (OSError, TableError):
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("sources"), list) else {}


def _is_made(root: Path, planned: _Import) -> bool:
    note = _read_note(root, planned.gpu)
    places = (root / planned.gpu / str(name) / PROVENANCE for name in note.get("sources", ()))
    return note.get("made_from") == planned.key and all(place.is_file() for place in places)


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
def _only_process(root: Path, gpu: str) -> Iterator[bool]:
    """Lock out other processes that convert the same GPU; yield whether locking is possible."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(root / f".{gpu}.lock", "wb", opener=_open_lock) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _print_status(None, f"fastroof: waiting for another process that converts the tables of {gpu}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def _open_lock(path: str, _: int) -> int:
    """Open a lock file without following a link and without truncating it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _print_status(progress: Progress | None, text: str) -> None:
    if progress is None and sys.stderr.isatty():
        remove_line()
        print(text, file=sys.stderr, flush=True)


# -- converting ----------------------------------------------------------------------------------


def _convert(root: Path, planned: _Import, progress: Progress | None, is_alone: bool, is_whole: bool) -> None:
    from fastroof.load.package_import import import_system, listed_sources, write_listed
    from fastroof.load.write import check_replaceable

    folder = root / planned.gpu
    if is_alone:
        for path in (*root.glob(f".{planned.gpu}.*"), *folder.glob(".*")):
            if is_unfinished(path):  # of a killed process
                shutil.rmtree(path, ignore_errors=True)
    listed = {} if is_whole else listed_sources(planned.gpu, planned.inputs)
    if not listed:
        package = planned.key.split(",")[0]
        _print_status(progress, f"fastroof: converting the tables of {planned.gpu} from {package}, once")
    began = time.monotonic()
    unfinished = unfinished_path(folder)
    try:
        unfinished.mkdir()
        names = (
            write_listed(unfinished, listed, planned.key)
            if listed
            else import_system(
                planned.data,
                planned.system,
                planned.gpu,
                unfinished,
                made_from=planned.key,
                shipped=bench_data_root() / planned.gpu,
                progress=progress,
            )
        )
        before = set(_read_note(root, planned.gpu).get("sources", ()))
        operators = set()
        for place in _places(folder):
            if _is_replaceable(place, before):
                # check before anything is changed
                check_replaceable(place)
            else:
                operators.add(place.name)
        put = [name for name in names if name not in operators]
        note = json.dumps({"made_from": planned.key, "sources": put}, indent=1)
        if operators:
            _put_next_to_own(unfinished, folder, put)
            write_whole(folder / NOTE, note)
        else:
            (unfinished / NOTE).write_text(note)
            put_in_place(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if not listed:
        _print_status(progress, f"fastroof: {len(put)} sources in {folder}, {time.monotonic() - began:.1f} s")


def _places(folder: Path) -> list[Path]:
    """Entries of a GPU's folder except those of an import itself."""
    entries = sorted(folder.iterdir()) if folder.exists() else []
    return [path for path in entries if path.name != NOTE and not is_unfinished(path)]


def _is_replaceable(place: Path, before: Collection[str]) -> bool:
    """Whether it is an imported source, even if its provenance was lost."""
    if place.is_symlink() or not place.is_dir():
        return False
    is_source = (place / PROVENANCE).is_file()
    return has_imported(place / PROVENANCE) if is_source else place.name in before


def _put_next_to_own(unfinished: Path, folder: Path, names: Sequence[str]) -> None:
    """Move sources next to the user's own, and remove other imported ones."""
    # until the new note exists, readers see an incomplete import
    (folder / NOTE).unlink(missing_ok=True)
    for name in names:
        put_in_place(unfinished / name, folder / name)
    for path in folder.glob(f"*/{PROVENANCE}"):
        if path.parent.name not in names and has_imported(path):
            shutil.rmtree(path.parent)


def has_imported(provenance: Path) -> bool:
    """Whether a provenance.toml is of an imported source, whose tables are converted when they are read."""
    try:
        return re.search(r"^imported = ", provenance.read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (OSError, UnicodeDecodeError):
        return False


PACKAGE_PREFIX: Final = "package:"

NAMED_WORDS: Final = "GPU, GPU/SOURCE, a folder, or package:GPU/BACKEND/VERSION"
"""What tables may be named by, for help texts and errors."""


class FoundTables(NamedTuple):
    """Folders of tables that a name or a path means."""

    folders: tuple[Path, ...]
    """Of one GPU's sources if ``gpu`` is known, else the folder given; empty if nothing was measured."""

    gpu: GpuSpec | None = None
    source: str | None = None


def has_tables(gpu: str) -> bool:
    """Whether a GPU, or the card whose kernels it uses scaled, has shipped or imported tables."""
    return bool(table_folders(gpu) or table_folders(load_gpu(gpu).kernel_name))


def find_tables(name: str | Path, *, progress: Progress | None = None, imports: bool = True) -> FoundTables:
    """Find the tables of a GPU's name, a GPU/SOURCE, or a folder."""
    path = Path(name)
    if isinstance(name, str) and "/" not in name:
        # a folder with the name of a GPU is ./name
        if (spec := gpu_named(name)) is not None:
            return FoundTables(_folders(spec.name, progress, imports), spec)
        if not exists(path):
            try:
                load_gpu(name)
            except GpuError as error:
                raise GpuError(f"{error}; or the path of a folder of tables") from None
    if is_folder(path):
        return FoundTables((path,))
    if path.name == GPU_FILE and is_file(path):
        return FoundTables((path.parent,))
    if isinstance(name, str) and not exists(path):
        gpu, _, source = name.partition("/")
        spec = gpu_named(gpu)
        if spec is not None and source and "/" not in source:
            return FoundTables(_folders(spec.name, progress, imports), spec, source)
    raise TableError(f"{name} is not a folder of measured tables; need {NAMED_WORDS}")


def find_tables_of(gpu: Any, *, progress: Progress | None = None) -> FoundTables:
    """Find the tables of a GPU given as :func:`fastroof.load_gpu` takes it: beside a gpu.toml, or by name."""
    spec = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    file = gpu_file(gpu) if isinstance(gpu, str | Path) and not is_shipped(spec) else None
    if file is not None:
        from fastroof.load.rows import ENDINGS

        sources = matches(file.parent, f"*/{PROVENANCE}")
        has_rows = any(matches(source.parent, f"*{ending}") for source in sources for ending in ENDINGS)
        return FoundTables((file.parent,) if has_rows else ())
    if spec.name not in gpu_names():
        return FoundTables((), spec)
    with suppress(TableError):  # what cannot be imported is missing: the datasheet model stands in
        return FoundTables(_folders(spec.name, progress, True), spec)
    return FoundTables((), spec)


def _folders(gpu: str, progress: Progress | None, imports: bool) -> tuple[Path, ...]:
    """Folders of a GPU's sources, after importing those of an installed package if that was not done."""
    try:
        if imports:
            ensure_imported(gpu, progress=progress)
    except TableError as error:
        if not table_folders(gpu):
            raise
        warnings.warn(f"{gpu} is served by the tables that are there: {error}", stacklevel=6)
    return table_folders(gpu)
