"""What an unfinished sweep has done, kept beside its output so that it can be continued."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.sweep.identity import IDENTITY_KEYS, differences
from fastroof.sweep.kind import SweepKind
from fastroof.sweep.parts import MANIFEST, PartsFolder, parts_folder
from fastroof.sweep.unit_rows import joined_rows, outcomes_from_json, outcomes_to_json, rows_by_unit
from fastroof.sweep.units import UnitResult, WorkUnit
from fastroof.unfinished import remove_unfinished

__all__ = ["Checkpoint", "parts_folder"]

PART_EVERY_S: Final = 2.0
"""How much work a kill may lose; a sweep that is shorter leaves nothing on the disk but its results."""
ROWS_A_PART: Final = 2**17
"""Rows are written earlier where there are this many, so that they do not pile up."""

OUTCOMES: Final = b"fastroof.outcomes"

Results = Generator[UnitResult, None, None]


class Checkpoint:
    """The finished units of a sweep, in a folder beside its output."""

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
        self._made_for = json.dumps(self.identity, sort_keys=True).encode()
        self._stored: dict[int, str] = {}
        self._loaded: tuple[str, dict[int, UnitResult]] = ("", {})
        self._pending: list[tuple[WorkUnit, UnitResult]] = []
        self._pending_rows = 0
        self._written_at = time.monotonic()
        self._has_rows = False
        self._is_complete = False
        self._continues = False
        self._opened: PartsFolder | None = None

    def __enter__(self) -> Self:
        try:
            if os.path.lexists(self.folder):
                self._take_folder()
            # what this sweep has done replaces other results, as it would have without an interruption
            if self.resume and not self._continues:
                self._check_output()
        except OSError as error:
            self._close()
            raise self._failed(error) from None
        except SweepError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # a sweep of which nothing comes has nothing to continue
            if kind is None or (self._is_complete and not self._has_rows):
                if self._opened is not None:
                    self._opened.remove_folder()
            else:
                # the first error is the one to tell of
                with contextlib.suppress(SweepError):
                    self._write_pending()
        finally:
            self._close()

    def results(
        self, units: Sequence[WorkUnit], evaluate: Callable[[Sequence[WorkUnit]], Results]
    ) -> Results:
        """Yield one result per unit in order: stored ones, and the others as they are evaluated."""
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
            with PartsFolder(self.folder) as folder:
                there = _manifest(folder)
                is_unfinished = folder.has_something()
            if not is_unfinished:
                # stopped before anything was done: nobody has to say that it may go
                self._open(create=False).clear()
                return
            differing = [] if there is None else self._differences(there)
            whose = f"another sweep ({_listed(differing)})" if differing else "this sweep"
            ways = "" if differing else "--resume continues it, "
            raise SweepError(f"{self.folder} holds an unfinished run of {whose}: {ways}--restart removes it")
        folder = self._open(create=False)
        there = None if self.restart else _manifest(folder)
        if there is None:
            # to begin anew, or killed before the manifest was there: nothing is known of what else is
            folder.clear()
        elif differing := self._differences(there):
            raise SweepError(
                f"{self.folder} holds an unfinished run of another sweep ({_listed(differing)}): run that "
                "one, or --restart removes it"
            )
        else:
            self._continues = True
        # what a killed run was writing
        folder.remove_unfinished()
        remove_unfinished(self.output.parent, self.output.name)
        for name in folder.parts():
            for number in self._read(folder, name)[1]:
                self._stored[number] = name

    def _differences(self, there: Mapping[str, str]) -> list[str]:
        differing = differences(there, self.identity)
        old, new = there.get("fastroof.shard") or "none", self.identity["fastroof.shard"] or "none"
        return differing if old == new else [*differing, f"shard: {old} there, {new} here"]

    def _load(self, number: int) -> UnitResult | None:
        """Result of a unit that is there; parts are read one at a time."""
        name = self._stored.get(number)
        if name is None or self._opened is None:
            return None
        if self._loaded[0] != name:
            table, outcomes = self._read(self._opened, name)
            if number not in outcomes:
                raise SweepError(
                    f"{self.folder / name} changed while it was read: run again with --resume, and what it "
                    "held is evaluated again"
                )
            rows = rows_by_unit(table, outcomes)
            self._loaded = (
                name,
                {
                    unit: result._replace(rows=own)
                    for (unit, result), own in zip(outcomes.items(), rows, strict=True)
                },
            )
        return self._loaded[1][number]

    def _read(self, folder: PartsFolder, name: str) -> tuple[pa.Table, dict[int, UnitResult]]:
        """Rows of a part and what else is known of its units."""
        try:
            table = pa.ipc.open_file(folder.read_sealed(name, self._made_for)).read_all()
            bare = table.replace_schema_metadata(None)
            nothing = pa.RecordBatch.from_pylist([], schema=bare.schema)
            return bare, outcomes_from_json(table.schema.metadata[OUTCOMES], nothing)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            folder.remove(name)
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
            folder = self._opened or self._open(create=True)
            if _manifest(folder) is None:
                folder.write(MANIFEST, json.dumps(self.identity, indent=1).encode())
            folder.write_sealed(f"{units[0].number:09d}.arrow", self._made_for, _arrow_bytes(table))
        except OSError as error:
            raise self._failed(error) from None
        self._pending.clear()
        self._pending_rows = 0

    def _open(self, *, create: bool) -> PartsFolder:
        """Open the folder for this process alone, once it is known to hold nothing else."""
        folder = PartsFolder(self.folder, create=create)
        try:
            folder.check_names()
            folder.lock(f"another sweep writes {self.output}")
        except (SweepError, OSError):
            folder.close()
            raise
        self._opened = folder
        return folder

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _failed(self, error: OSError) -> SweepError:
        reason = error.strerror or str(error)
        return SweepError(
            f"{self.folder}, which keeps what is done, cannot be written ({reason}): make room or allow it, "
            "then continue with --resume"
        )


def _manifest(folder: PartsFolder) -> dict[str, str] | None:
    try:
        manifest = parse_json(folder.read(MANIFEST), MANIFEST, SweepError)
    except (FileNotFoundError, SweepError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _arrow_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _listed(differing: Sequence[str]) -> str:
    most = 3
    more = f"; {len(differing) - most} more" if len(differing) > most else ""
    return "; ".join(differing[:most]) + more
