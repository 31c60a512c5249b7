"""Plans cached on disk for later processes: their arenas, and the facts that commands print of them.

A cached plan times the same steps to the same bits. Curves, attention by kind and errors are not cached, so
that reading one imports nothing that compiles plans.
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
from typing import Any, Final, TypeVar

import numpy as np

from fastroof import host
from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.compiled.steps import ARENA_FORMAT, ARENA_MAGIC, ARENA_SIZE, HEADER_SIZE, MAGIC
from fastroof.compiled.steps import FORMAT as FORMAT_AT
from fastroof.compiled.trusted_files import cache_roots, opened, read_trusted, write_trusted
from fastroof.config.paths import bench_data_root, is_never, user_tables_root
from fastroof.documents import parse_json
from fastroof.errors import FastroofError, PlanError
from fastroof.file_access import FilesRead, recorded
from fastroof.memory.plan_memory import PlanMemory, WindowGroups
from fastroof.run.batch import StepBatch, StepTimes
from fastroof.run.evaluate import round_us, run_batch

T = TypeVar("T")

_SIZES: Final = struct.Struct("<QQ")
"""Bytes of the JSON text, and the number of floats of all arenas, which follow it."""

_LAYOUT_SIZES: Final = ("tp", "pp", "cp", "dp", "ep", "moe_tp")


def _fact(read: Callable[[Any], Any] | None = None) -> Any:
    """A field copied from a StepPlan: by a function of it, by default its attribute of the same name."""
    return field(metadata={"of": read})


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """What is cached of a :class:`fastroof.StepPlan`; each fact says how it is taken from the plan."""

    arena: Floats = field(repr=False)
    stage_arenas: tuple[Floats, ...] = field(repr=False)
    model: str = _fact(lambda plan: plan.model.name)
    gpu: str = _fact(lambda plan: plan.gpu.name)
    gpu_title: str = _fact(lambda plan: plan.gpu.title)
    dtype: str = _fact()
    kv_dtype: str = _fact()
    routing: str | None = _fact(lambda plan: plan.execution.routing if plan.model.has_experts else None)
    engine: str = _fact()
    engine_title: str = _fact(lambda plan: plan.profile.title)
    engine_facts: Mapping[str, str | None] = _fact(lambda plan: plan.profile.facts)
    method: str = _fact()
    tables_hash: str = _fact()
    kernels: str = _fact()
    version: str = _fact()
    checkpoint_method: str = _fact(lambda plan: plan.model.checkpoint.method)
    checkpoint_dtype: str = _fact(lambda plan: plan.model.checkpoint.dtype)
    layout: Mapping[str, int] = _fact(lambda plan: {n: getattr(plan.layout, n) for n in _LAYOUT_SIZES})
    layout_text: str = _fact(lambda plan: str(plan.layout))
    world_size: int = _fact(lambda plan: plan.layout.world_size)
    max_position: int = _fact(lambda plan: plan.model.max_position)
    batches_in_flight: float = _fact()
    max_num_batched_tokens: int = _fact()
    max_num_seqs: int = _fact()
    memory: PlanMemory = _fact()  # noqa: RUF009 -- a field, not a value
    made_from: Mapping[str, str] = _fact()
    lora: str | None = _fact(lambda plan: plan.lora_facts.get("lora"))

    @classmethod
    def of(cls, plan: Any) -> CachedPlan:
        """Return what is cached of a StepPlan."""
        facts = {name: read(plan) if read else getattr(plan, name) for name, read in _FACTS.items()}
        return cls(**facts, arena=plan.arena, stage_arenas=tuple(stage.arena for stage in plan.stage_plans))

    def run(self, batch: StepBatch) -> StepTimes:
        """Time ragged steps, as :meth:`fastroof.StepPlan.run`."""
        return run_batch(self, batch, 1)

    def cycle_us(self, batch: StepBatch) -> float:
        """Time one round of micro-batches, us, as :meth:`fastroof.StepPlan.cycle_us`."""
        arenas = self.stage_arenas or (self.arena,)
        different = {id(arena): arena for arena in arenas}
        times = {key: replace(self, arena=arena).run(batch).latency_us for key, arena in different.items()}
        return round_us(np.stack([times[id(arena)] for arena in arenas], axis=1))

    def to_bytes(self) -> bytes:
        """Return bytes that :meth:`from_bytes` reads: JSON, then each different arena."""
        arenas = {id(arena): arena for arena in (self.arena, *self.stage_arenas)}
        places = {key: place for place, key in enumerate(arenas)}
        facts: dict[str, Any] = {name: getattr(self, name) for name in _FACTS}
        facts["memory"] = self.memory._asdict()
        facts["floats"] = [len(arena) for arena in arenas.values()]
        facts["stages"] = [places[id(arena)] for arena in self.stage_arenas]
        text = _padded(json.dumps(facts))
        head = _SIZES.pack(len(text), sum(facts["floats"]))
        return b"".join((head, text, *(a.astype("<f8", copy=False).tobytes() for a in arenas.values())))

    @classmethod
    def from_bytes(cls, data: bytes) -> CachedPlan:
        """Return the plan that :meth:`to_bytes` wrote, or raise ValueError."""
        try:
            text, floats = _SIZES.unpack_from(data)
            if _SIZES.size + text + 8 * floats != len(data):
                raise ValueError("wrong size")
            facts = parse_json(data[_SIZES.size : _SIZES.size + text], "a cached plan")
            body = np.frombuffer(data, "<f8", floats, _SIZES.size + text).astype(np.float64)
            lengths, stages = facts.pop("floats"), facts.pop("stages")
            if sum(lengths) != floats:
                raise ValueError("wrong lengths of arenas")
            arenas = np.split(body, np.cumsum(lengths)[:-1])
            for arena in arenas:
                _check_arena(arena)
                arena.flags.writeable = False
            # JSON holds the windows' tuples as lists
            windows = tuple(WindowGroups(*one) for one in facts["memory"].pop("windows"))
            facts["memory"] = PlanMemory(**facts["memory"], windows=windows)
            return cls(**facts, arena=arenas[0], stage_arenas=tuple(arenas[i] for i in stages))
        except (FastroofError, struct.error, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"not a cached plan: {error}") from None


_FACTS: Final = {one.name: one.metadata["of"] for one in fields(CachedPlan) if "of" in one.metadata}


def _padded(text: str) -> bytes:
    """Encode a text in whole words of 8 bytes: what follows it is read in place."""
    data = text.encode()
    return data + b" " * (-len(data) % 8)


def _check_arena(arena: Floats) -> None:
    """Refuse arenas of other versions; a digest covers the rest."""
    if len(arena) < HEADER_SIZE or (arena[MAGIC], arena[FORMAT_AT]) != (ARENA_MAGIC, ARENA_FORMAT):
        raise ValueError("arena of another version")
    if arena[ARENA_SIZE] != len(arena):
        raise ValueError("arena of another size")


FOLDER: Final = "plans"
"""Subfolder of the cache."""

MAX_BYTES: Final = 32 * 2**20
"""Bytes of all plans of a folder; the least recently used are removed."""

_SIZE: Final = struct.Struct("<Q")
"""Bytes of the record of files read, which comes first."""

_KEY_BYTES: Final = hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[0-9a-f]{32}\.plan(\.[0-9a-f]+)?")


def cached_plan(identity: str | None, make: Callable[[], Any]) -> tuple[CachedPlan, str | None]:
    """Return the cached plan of an identity, or make and cache it; and the identity of its errors."""
    plan, stored = _cached(
        identity, lambda: CachedPlan.of(make()), CachedPlan.to_bytes, CachedPlan.from_bytes
    )
    # of the record of files too: what they say of errors may be all that changes
    return plan, f"{identity} {hashlib.sha256(stored).hexdigest()}" if stored else None


def cached_error(identity: str | None, requests: Any, make: Callable[[], float]) -> float:
    """Return the cached standard error of a step of a plan with that identity, or make it and cache it."""
    key = identity and f"{identity} error of {requests}"
    return _cached(key, make, lambda error: repr(error).encode(), float)[0]


def _cached(
    key: str | None, make: Callable[[], T], to_bytes: Callable[[T], bytes], from_bytes: Callable[[bytes], T]
) -> tuple[T, bytes | None]:
    """Return a cached value, or make it and cache it; and what is stored of it."""
    found = None if key is None else find_plan(key)
    if found is not None:
        with suppress(ValueError):
            files, data = _split(found)
            if FilesRead.holds(files):
                return from_bytes(data), found
    with _recorded_warnings() as messages, recorded() as files_read:
        made = make()
    if key is None or messages or not files_read.is_repeatable:
        return made, None
    stored = _joined(files_read, to_bytes(made))
    return made, stored if store_plan(key, stored) else None


def _joined(files_read: FilesRead, plan: bytes) -> bytes:
    """The record of files read for a plan, then the plan."""
    text = _padded(json.dumps(files_read.entries))
    return _SIZE.pack(len(text)) + text + plan


def _split(data: bytes) -> tuple[Any, bytes]:
    try:
        (size,) = _SIZE.unpack_from(data)
        text, plan = data[_SIZE.size : _SIZE.size + size], data[_SIZE.size + size :]
        return parse_json(text, "the files of a cached plan"), plan
    except (FastroofError, struct.error) as error:
        raise ValueError(f"not a cached plan: {error}") from None


@contextmanager
def _recorded_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings, which are still shown."""
    show_warning = warnings.showwarning
    messages: list[str] = []

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        messages.append(str(message))
        show_warning(message, *rest, **more)

    warnings.showwarning = show
    try:
        yield messages
    finally:
        warnings.showwarning = show_warning


def _key(identity: str) -> tuple[bytes, str]:
    """Digest of an identity, and the name of its file."""
    digest = hashlib.sha256(identity.encode())
    return digest.digest(), f"{digest.hexdigest()[:32]}.plan"


def find_plan(identity: str) -> bytes | None:
    """Return the cached bytes of a plan, or None."""
    key, name = _key(identity)
    for root in cache_roots():
        with suppress(OSError, ValueError), opened(root / FOLDER) as at:
            data = read_trusted(at, name)
            if data[:_KEY_BYTES] == key:
                with suppress(OSError):
                    os.utime(name, dir_fd=at)  # recently used: see _make_room
                return data[_KEY_BYTES:]
    return None


def store_plan(identity: str, plan: bytes) -> bool:
    """Write a plan to the first cache folder that takes it; return whether one did."""
    key, name = _key(identity)
    if len(plan) > MAX_BYTES // 4:
        return False
    for root in cache_roots():
        with suppress(OSError):
            write_trusted(root / FOLDER, name, key + plan)
            with suppress(OSError):
                _make_room(root / FOLDER)
            return True
    return False


def _make_room(folder: Path) -> None:
    """Remove the least recently used plans, and nothing else, until the rest fits."""
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
                if total <= MAX_BYTES:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=listed)
                total -= size
        finally:
            os.close(listed)


KEEP_PLANS: Final = "FASTROOF_KEEP_PLANS"
"""Environment variable: "never" neither stores nor reads cached plans."""

FORMAT: Final = 3
"""Increased whenever the cached bytes change."""

MAX_FILES: Final = 10_000
"""Files of the package beyond which nothing is cached."""

SETTLED_NS: Final = 2 * 10**9
"""Code that changed more recently may differ from what this process imported."""

_PACKAGES: Final = {"aisimulate_core": "aisimulate", "aiconfigurator_core": "aiconfigurator_core"}
"""Modules whose tables are imported, the preferred one first, and the names of their metadata."""
_IMPORTS: Final = "FASTROOF_TABLES_IMPORT"
_DOWNLOADS: Final = ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
"""Variables that say where Hugging Face's client keeps its files."""


class _UncertainError(Exception):
    """The code of this process cannot be identified cheaply."""


def plan_identity(
    model: str, gpu: str, tables: str | None, source: str | None, options: Mapping[str, Any]
) -> str | None:
    """Return what a plan is compiled from, by which code, and where files are searched; None if uncertain."""
    if is_never(KEEP_PLANS, PlanError):
        return None
    try:
        parts = {
            "format": FORMAT,
            "version": __version__,
            "code": _code(Path(__file__).parents[1]),
            "machine": [sys.version, np.__version__, platform.machine(), _processor()],
            "tables": [str(bench_data_root()), _user_tables(), os.environ.get(_IMPORTS), *_package()],
            "downloads": [os.environ.get(name) for name in _DOWNLOADS],
            "arguments": [model, gpu, tables, source, dict(options)],
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
    """Digest of the status of every file of the package, except the tables in a wheel."""
    files = sorted(_files(package, skips=("__pycache__", "bench_data")))
    if max(max(times) for _, _, times in files) + SETTLED_NS > time.time_ns():
        raise _UncertainError
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(place: Path, skips: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Every file of a folder, in any order: path, (size, inode) and times of change."""
    folders = [place]
    count = 0
    while folders:
        with os.scandir(folders.pop()) as scanned:
            entries = [*scanned]
        for entry in entries:
            count += 1
            if count > MAX_FILES:
                raise _UncertainError
            if entry.name in skips:
                continue
            if entry.is_dir():
                folders.append(Path(entry.path))
                continue
            status = entry.stat()
            yield entry.path, (status.st_size, status.st_ino), (status.st_mtime_ns, status.st_ctime_ns)


def _package() -> list[Any]:
    """The installed package whose tables are converted on first use."""
    for module, metadata in _PACKAGES.items():
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            place = Path(spec.submodule_search_locations[0])
            return [str(place), *sorted(path.name for path in place.parent.glob(f"{metadata}-*.dist-info"))]
    return []


def _processor() -> list[str]:
    """Model and features of the processor: machines may share a home, and sums may differ in the last bit."""
    facts = host.cpu_facts()
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return [facts[key] for key in keys if key in facts] or [platform.node()]
