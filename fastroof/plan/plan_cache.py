"""A plan as it is kept for a later process: its arenas, and what is said of it beside times.

It times the same steps to the same bits. What a plan is made of (curves, attention of each kind, errors)
stays behind, so that none of what makes plans is imported to ask one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.compiled.steps import ARENA_FORMAT, ARENA_MAGIC, ARENA_SIZE, HEADER_SIZE, MAGIC
from fastroof.compiled.steps import FORMAT as FORMAT_AT
from fastroof.compiled.trusted_files import cache_roots, opened, read_trusted, write_trusted
from fastroof.config.paths import bench_data_root, user_tables_root
from fastroof.documents import parse_json
from fastroof.errors import FastroofError, PlanError
from fastroof.file_access import FilesRead, recorded
from fastroof.plan.memory import PlanMemory
from fastroof.run.evaluate import round_us, run_batch

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan
    from fastroof.run.batch import StepBatch, StepTimes


_SIZES: Final = struct.Struct("<QQ")
"""Bytes of the words, and floats of all arenas: arenas follow, each as long as the words say."""

LAYOUT_SIZES: Final = ("tp", "pp", "cp", "dp", "ep", "moe_tp")


@dataclass(frozen=True, eq=False)
class KeptPlan:
    """What was kept of a :class:`fastroof.StepPlan`."""

    model: str
    gpu: str
    gpu_title: str
    dtype: str
    kv_dtype: str
    routing: str | None
    runtime: str
    method: str
    tables_hash: str
    kernels: str
    version: str
    checkpoint_method: str
    checkpoint_dtype: str
    layout: Mapping[str, int]
    layout_words: str
    world_size: int
    max_position: int
    batches_in_flight: float
    max_tokens: int
    max_seqs: int
    memory: PlanMemory
    made_from: Mapping[str, str]
    arena: Floats = field(repr=False)
    stage_arenas: tuple[Floats, ...] = field(default=(), repr=False)

    def run(self, batch: StepBatch) -> StepTimes:
        """Time ragged steps, as :meth:`fastroof.StepPlan.run`."""
        return run_batch(self, batch, 1)

    def cycle_us(self, batch: StepBatch) -> float:
        """Time of a round of micro-batches, us, as :meth:`fastroof.StepPlan.cycle_us`."""
        alike: dict[int, Floats] = {}
        arenas = self.stage_arenas or (self.arena,)
        for arena in arenas:
            if id(arena) not in alike:
                alike[id(arena)] = replace(self, arena=arena).run(batch).latency_us
        return round_us(np.stack([alike[id(arena)] for arena in arenas], axis=1))


def kept_of(plan: StepPlan) -> KeptPlan:
    """Return what is kept of a plan."""
    return KeptPlan(
        model=plan.model.name,
        gpu=plan.gpu.name,
        gpu_title=plan.gpu.title,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        routing=plan.execution.routing if plan.model.has_experts else None,
        runtime=plan.runtime,
        method=plan.method,
        tables_hash=plan.tables_hash,
        kernels=plan.kernels,
        version=plan.version,
        checkpoint_method=plan.model.checkpoint.method,
        checkpoint_dtype=plan.model.checkpoint.dtype,
        layout={name: getattr(plan.layout, name) for name in LAYOUT_SIZES},
        layout_words=str(plan.layout),
        world_size=plan.layout.world_size,
        max_position=plan.model.max_position,
        batches_in_flight=plan.batches_in_flight,
        max_tokens=plan.max_tokens,
        max_seqs=plan.max_seqs,
        memory=plan.memory,
        made_from=plan.made_from,
        arena=plan.arena,
        stage_arenas=tuple(stage.arena for stage in plan.stage_plans),
    )


_ARRAYS: Final = ("arena", "stage_arenas")


def kept_bytes(kept: KeptPlan) -> bytes:
    """Return what is kept of a plan as bytes, which :func:`read_kept_plan` reads."""
    arenas = {id(arena): arena for arena in (kept.arena, *kept.stage_arenas)}
    places = {key: place for place, key in enumerate(arenas)}
    words: dict[str, Any] = {f.name: getattr(kept, f.name) for f in fields(kept) if f.name not in _ARRAYS}
    words["memory"] = kept.memory._asdict()
    words["floats"] = [len(arena) for arena in arenas.values()]
    words["stages"] = [places[id(arena)] for arena in kept.stage_arenas]
    text = json.dumps(words).encode()
    # what follows is read in place: in whole words of 8 bytes
    text += b" " * (-len(text) % 8)
    return b"".join(
        (
            _SIZES.pack(len(text), sum(words["floats"])),
            text,
            *(arena.astype("<f8", copy=False).tobytes() for arena in arenas.values()),
        )
    )


def read_kept_plan(data: bytes) -> KeptPlan:
    """Return the plan that :func:`kept_bytes` wrote."""
    try:
        text, floats = _SIZES.unpack_from(data)
        if _SIZES.size + text + 8 * floats != len(data):
            raise ValueError("another size")
        words = parse_json(data[_SIZES.size : _SIZES.size + text], "a kept plan")
        body = np.frombuffer(data, "<f8", floats, _SIZES.size + text).astype(np.float64)
        lengths, stages = words.pop("floats"), words.pop("stages")
        if sum(lengths) != floats:
            raise ValueError("arenas of other lengths")
        arenas = np.split(body, np.cumsum(lengths)[:-1])
        for arena in arenas:
            _check_arena(arena)
            arena.flags.writeable = False
        words["memory"] = PlanMemory(**words["memory"])
        return KeptPlan(**words, arena=arenas[0], stage_arenas=tuple(arenas[i] for i in stages))
    except (FastroofError, struct.error, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"this is no kept plan: {error}") from None


def _check_arena(arena: Floats) -> None:
    """Refuse what is no arena of this version; a digest vouches for the rest."""
    if len(arena) < HEADER_SIZE or (arena[MAGIC], arena[FORMAT_AT]) != (ARENA_MAGIC, ARENA_FORMAT):
        raise ValueError("no arena of this version")
    if arena[ARENA_SIZE] != len(arena):
        raise ValueError("an arena of another size")


FOLDER: Final = "plans"
"""Folder of the cache."""

MOST_BYTES: Final = 32 * 2**20
"""Bytes of all plans of a folder: the ones used last stay."""

_SIZE: Final = struct.Struct("<Q")
"""Bytes of the record of files, which comes first."""

_KEY_BYTES: Final = hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[0-9a-f]{32}\.plan(\.[0-9a-f]+)?")


def kept_plan(identity: str | None, make: Callable[[], StepPlan]) -> KeptPlan:
    """Return the plan that was kept, or make it and keep it."""
    # SELF

    found = None if identity is None else find_plan(identity)
    if found is not None:
        with suppress(ValueError):
            files, data = _without_files(found)
            if FilesRead.holds(files):
                return read_kept_plan(data)
    with _warnings_met() as met, recorded() as read:
        kept = kept_of(make())
    if identity is not None and not met and read.is_repeatable:
        keep_plan(identity, _with_files(read, kept_bytes(kept)))
    return kept


def _with_files(read: FilesRead, plan: bytes) -> bytes:
    """A plan behind the record of what was read for it, in whole words of 8 bytes."""
    text = json.dumps(read.entries).encode()
    text += b" " * (-len(text) % 8)
    return _SIZE.pack(len(text)) + text + plan


def _without_files(found: bytes) -> tuple[Any, bytes]:
    try:
        (size,) = _SIZE.unpack_from(found)
        text, plan = found[_SIZE.size : _SIZE.size + size], found[_SIZE.size + size :]
        return parse_json(text, "the files of a cached plan"), plan
    except (FastroofError, struct.error) as error:
        raise ValueError(f"not a cached plan: {error}") from None


@contextmanager
def _warnings_met() -> Iterator[list[str]]:
    """Note warnings, which are shown as they were before."""
    shown = warnings.showwarning
    met: list[str] = []

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        met.append(str(message))
        shown(message, *rest, **more)

    warnings.showwarning = show
    try:
        yield met
    finally:
        warnings.showwarning = shown


def _key(identity: str) -> tuple[bytes, str]:
    """A digest of what a plan is made from, and the name of its file."""
    digest = hashlib.sha256(identity.encode())
    return digest.digest(), f"{digest.hexdigest()[:32]}.plan"


def find_plan(identity: str) -> bytes | None:
    """Return what was kept of a plan, or None."""
    key, name = _key(identity)
    for root in cache_roots():
        with suppress(OSError, ValueError), opened(root / FOLDER) as at:
            data = read_trusted(at, name)
            if data[:_KEY_BYTES] == key:
                with suppress(OSError):
                    os.utime(name, dir_fd=at)  # in use: see _make_room
                return data[_KEY_BYTES:]
    return None


def keep_plan(identity: str, plan: bytes) -> bool:
    """Keep a plan in the first folder of the cache that takes it."""
    key, name = _key(identity)
    if len(plan) > MOST_BYTES // 4:
        return False
    for root in cache_roots():
        with suppress(OSError):
            write_trusted(root / FOLDER, name, key + plan)
            with suppress(OSError):
                _make_room(root / FOLDER)
            return True
    return False


def _make_room(folder: Path) -> None:
    """Remove plans that were not used for longest, until the rest is not too large; nothing else."""
    with opened(folder) as at:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        listed = os.open(".", flags, dir_fd=at)
        try:
            found = []
            for name in filter(_NAME.fullmatch, os.listdir(listed)):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=listed, follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, name))
            total = sum(size for _, size, _ in found)
            for _, size, name in sorted(found):
                if total <= MOST_BYTES:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=listed)
                total -= size
        finally:
            os.close(listed)


KEEP_PLANS: Final = "FASTROOF_KEEP_PLANS"
"""Environment variable: "never" keeps no plans, and takes none that were kept."""

FORMAT: Final = 2
"""Raised where what is kept of a plan becomes something else."""

MOST_FILES: Final = 10_000
"""Files of the package; with more, nothing is cached."""

SETTLED_NS: Final = 2 * 10**9
"""Code that changed more recently may not be the code that this process has imported."""

_PACKAGE: Final = "aiconfigurator_core"
_IMPORTS: Final = "FASTROOF_TABLES_IMPORT"


class _UncertainError(Exception):
    """The code of this process cannot be told cheaply."""


def plan_identity(
    model: str, gpu: str, tables: str | None, source: str | None, options: Mapping[str, Any]
) -> str | None:
    """Return what a plan answers, by what code, and where files are looked for."""
    setting = os.environ.get(KEEP_PLANS, "") or "auto"
    if setting not in ("auto", "never"):
        raise PlanError(f"{KEEP_PLANS} is {setting!r}; it may be auto or never")
    if setting == "never":
        return None
    try:
        parts = {
            "format": FORMAT,
            "version": __version__,
            "code": _code(Path(__file__).parents[1]),
            "machine": [sys.version, np.__version__, platform.machine(), _processor()],
            "tables": [str(bench_data_root()), _user_tables(), os.environ.get(_IMPORTS), *_package()],
            "asked": [model, gpu, tables, source, dict(options)],
        }
        return json.dumps(parts, sort_keys=True)
    except (_UncertainError, OSError, ValueError, TypeError, FastroofError):
        return None


def _user_tables() -> str | None:
    try:
        return str(user_tables_root())
    except FastroofError:
        return None


def _code(package: Path) -> str:
    """Digest of the status of every file of the package, apart from the tables that a wheel has in it."""
    files = sorted(_files(package, skips=("__pycache__", "bench_data")))
    if max(max(times) for _, _, times in files) + SETTLED_NS > time.time_ns():
        raise _UncertainError
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(place: Path, skips: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Every file of a folder, in any order: its path, size and inode, and when it changed."""
    unread = [place]
    count = 0
    while unread:
        with os.scandir(unread.pop()) as scanned:
            entries = [*scanned]
        for entry in entries:
            count += 1
            if count > MOST_FILES:
                raise _UncertainError
            if entry.name in skips:
                continue
            if entry.is_dir():
                unread.append(Path(entry.path))
                continue
            status = entry.stat()
            yield entry.path, (status.st_size, status.st_ino), (status.st_mtime_ns, status.st_ctime_ns)


def _package() -> list[Any]:
    """The installed package whose tables are converted when a GPU is first asked for."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return []
    place = Path(spec.submodule_search_locations[0])
    return [str(place), *sorted(path.name for path in place.parent.glob(f"{_PACKAGE}-*.dist-info"))]


def _processor() -> list[str]:
    """What a processor is and can: machines may share a home, and sums may differ in their last bits."""
    told = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        # of the first processor alone: the file is long where there are many
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            words = file.read(8192).decode("ascii", "replace").partition("\n\n")[0]
    except OSError:
        return [platform.node()]
    return [line for line in words.splitlines() if line.startswith(told)]
