"""What an unfinished sweep has done, kept beside its output so that it can be continued."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from fastroof.errors import SweepError
from fastroof.sweep.identity import IDENTITY_KEYS, differences
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.unit_rows import joined_rows, outcomes_from_json, outcomes_to_json, rows_by_unit
from fastroof.sweep.units import UnitResult, WorkUnit
from fastroof.whole_files import remove_unfinished, whole_file, write_whole

__all__ = ["Checkpoint", "parts_folder"]

PART_EVERY_S: Final = 2.0
"""How much work a kill may lose; a sweep that is shorter leaves nothing on the disk but its results."""
ROWS_A_PART: Final = 2**17
"""Rows are written earlier where there are this many, so that they do not pile up."""

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"
OUTCOMES: Final = b"fastroof.outcomes"

Results = Generator[UnitResult, None, None]


def parts_folder(output: str | Path) -> Path:
    """Where the finished part of a sweep is kept until the output is complete."""
    output = Path(output)
    return output.parent / f".{output.name}.parts"


class Checkpoint:
    """The finished units of a sweep, in a folder beside its output.

    A context manager: the folder is removed when the block ends, and completed when it raises. Every part
    is written to a temporary name and renamed, so that a kill at any moment leaves whole parts.

    Parameters
    ----------
    sweep : SweepKind
        What is swept.
    output : Path
        The results file.
    identity : mapping of str to str
        The results' metadata: version, kind, spec and hashes; and the shard, where it is one.
    resume : bool
        Take what is there, if anything is.
    restart : bool
        Remove what is there.

    Raises
    ------
    SweepError
        If something is there and neither ``resume`` nor ``restart`` is set, if it is of another sweep, or
        another process is at work on it; if the folder cannot be written.
    """

    def __init__(
        self,
        sweep: SweepKind,
        output: Path,
        identity: Mapping[str, str],
        *,
        resume: bool = False,
        restart: bool = False,
    ) -> None:
        self.sweep = sweep
        self.output = output
        self.folder = parts_folder(output)
        self.identity = {key: identity.get(key, "") for key in (*IDENTITY_KEYS, "fastroof.shard")}
        self.resume = resume
        self.restart = restart
        self._stored: dict[int, Path] = {}
        self._loaded: tuple[Path | None, dict[int, UnitResult]] = (None, {})
        self._pending: list[tuple[WorkUnit, UnitResult]] = []
        self._pending_rows = 0
        self._written_at = time.monotonic()
        self._has_rows = False
        self._is_complete = False
        self._lock: Any = None

    def __enter__(self) -> Self:
        if self.resume:
            self._check_output()
        if os.path.isdir(self.folder):
            try:
                self._take_folder()
            except OSError as error:
                self._unlock()
                raise self._failed(error) from None
            except SweepError:
                self._unlock()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # a sweep of which nothing comes has nothing to continue
            if kind is None or (self._is_complete and not self._has_rows):
                if self._lock is not None:
                    shutil.rmtree(self.folder, ignore_errors=True)
            else:
                # the first error is the one to tell of
                with contextlib.suppress(SweepError):
                    self._write_pending()
        finally:
            self._unlock()

    def results(
        self, units: Sequence[WorkUnit], evaluate: Callable[[Sequence[WorkUnit]], Results]
    ) -> Results:
        """Yield a result a unit in their order: those that are there, and the others as they are evaluated.

        Parameters
        ----------
        units : sequence of WorkUnit
            All of the sweep's, or of its shard.
        evaluate : callable
            Takes the units that are missing, and yields their results in order.
        """
        missing = [unit for unit in units if unit.number not in self._stored]
        fresh = evaluate(missing)
        try:
            for unit in units:
                result = self._load(unit.number)
                if result is None:
                    result = next(fresh)
                    self._pending.append((unit, result))
                    self._pending_rows += result.rows.num_rows
                    is_due = time.monotonic() - self._written_at >= PART_EVERY_S
                    if is_due or self._pending_rows >= ROWS_A_PART:
                        self._write_pending()
                self._has_rows |= result.rows.num_rows > 0
                self._is_complete = unit is units[-1]
                yield result
        finally:
            fresh.close()

    def _check_output(self) -> None:
        """Refuse to continue into the results of another sweep."""
        if self.output.suffix != ".parquet" or not self.output.is_file():
            return
        try:
            metadata = pq.read_schema(self.output).metadata or {}
        except (OSError, pa.ArrowException):
            return
        there = {key.decode(): value.decode(errors="replace") for key, value in metadata.items()}
        here = {**self.identity}
        if "fastroof.inputs_hash" not in there:
            here.pop("fastroof.inputs_hash")
        if "fastroof.spec" in there and (differing := differences(there, here)):
            raise SweepError(
                f"{self.output} holds results of another sweep ({_listed(differing)}): name another output, "
                "or leave --resume out to replace it"
            )

    def _take_folder(self) -> None:
        """Find out what is in the folder, and whether it may be used."""
        if not (self.resume or self.restart):
            there = self._manifest()
            differing = [] if there is None else self._differences(there)
            whose = f"another sweep ({_listed(differing)})" if differing else "this sweep"
            ways = "" if differing else "--resume continues it, "
            raise SweepError(f"{self.folder} holds an unfinished run of {whose}: {ways}--restart removes it")
        self._take_lock()
        if self.restart:
            self._remove_contents()
            return
        there = self._manifest()
        if there is None:
            # killed before the manifest was there: nothing is known of what else is
            self._remove_contents()
            return
        if differing := self._differences(there):
            raise SweepError(
                f"{self.folder} holds an unfinished run of another sweep ({_listed(differing)}): run that "
                "one, or --restart removes it"
            )
        self._remove_leftovers()
        for path in sorted(self.folder.glob("*.arrow")):
            for number in self._read(path)[1]:
                self._stored[number] = path

    def _differences(self, there: Mapping[str, str]) -> list[str]:
        differing = differences(there, self.identity)
        old, new = there.get("fastroof.shard") or "none", self.identity["fastroof.shard"] or "none"
        return differing if old == new else [*differing, f"shard: {old} there, {new} here"]

    def _manifest(self) -> dict[str, str] | None:
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return manifest if isinstance(manifest, dict) else None

    def _load(self, number: int) -> UnitResult | None:
        """Result of a unit that is there; parts are read one at a time."""
        path = self._stored.get(number)
        if path is None:
            return None
        if self._loaded[0] != path:
            table, outcomes = self._read(path)
            rows = rows_by_unit(table, outcomes)
            self._loaded = (
                path,
                {
                    unit: result._replace(rows=own)
                    for (unit, result), own in zip(outcomes.items(), rows, strict=True)
                },
            )
        return self._loaded[1][number]

    def _read(self, path: Path) -> tuple[pa.Table, dict[int, UnitResult]]:
        """Rows of a part and what else is known of its units.

        Nothing of a part that is torn, or that another version wrote: its units are evaluated again.
        """
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
            bare = table.replace_schema_metadata(None)
            nothing = pa.RecordBatch.from_pylist([], schema=bare.schema)
            return bare, outcomes_from_json(table.schema.metadata[OUTCOMES], nothing)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            path.unlink()
            return pa.table({}), {}

    def _write_pending(self) -> None:
        """Write what was done since the last part."""
        self._written_at = time.monotonic()
        if not self._pending:
            return
        units, results = zip(*self._pending, strict=True)
        table = joined_rows(self.sweep, units, results)
        table = table.replace_schema_metadata({OUTCOMES: outcomes_to_json(units, results)})
        try:
            self._open_folder()
            with whole_file(self.folder / f"{units[0].number:09d}.arrow", is_durable=True) as unfinished:
                _write_table(unfinished, table)
        except OSError as error:
            raise self._failed(error) from None
        self._pending.clear()
        self._pending_rows = 0

    def _open_folder(self) -> None:
        if self._lock is None:
            self.folder.mkdir(exist_ok=True)
            self._take_lock()
        if not (self.folder / MANIFEST).exists():
            write_whole(self.folder / MANIFEST, json.dumps(self.identity, indent=1), is_durable=True)

    def _take_lock(self) -> None:
        """Keep other processes out; a process that is killed lets go."""
        lock = (self.folder / LOCK).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise SweepError(f"{self.folder} is in use: another sweep writes {self.output}") from None
        self._lock = lock

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _remove_contents(self) -> None:
        for path in self.folder.iterdir():
            if path.name != LOCK:
                path.unlink()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove files that a killed run was writing."""
        remove_unfinished(self.output.parent, self.output.name)
        remove_unfinished(self.folder)

    def _failed(self, error: OSError) -> SweepError:
        reason = error.strerror or str(error)
        return SweepError(
            f"{self.folder}, which keeps what is done, cannot be written ({reason}): make room or allow it, "
            "then continue with --resume"
        )


def _write_table(path: Path, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)


def _listed(differing: Sequence[str]) -> str:
    most = 3
    more = f"; {len(differing) - most} more" if len(differing) > most else ""
    return "; ".join(differing[:most]) + more
