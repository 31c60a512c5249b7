"""Run one operation with one fault in a forked process, and inspect its files afterwards."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastroof.errors import FastroofError
from tests.faults.operations import NEW, OLD, Operation
from tests.faults.shim import How, Shim
from tests.faults.trees import Tree, contents, is_hidden_half, restore

__all__ = ["WRITING", "Bench", "Ended", "Fault", "Verdict"]


@dataclass(frozen=True)
class Fault:
    """The n-th call of some kinds, what it answers, and how it goes on."""

    kinds: tuple[str, ...]
    number: int
    error: int
    how: How
    least_bytes: int = 0
    largest_bytes: int = 0
    """The most bytes that the system lets a file hold; 0 is no limit."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal; its output; and the faults that it met."""

    code: int
    output: str
    counts: Mapping[str, int] = field(default_factory=dict)
    met: int = 0
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a fault led to: ``old``, ``new`` or ``mixed``, and what is wrong with that, if anything is."""

    outcome: str
    ended: Ended
    wrong: str = ""


class Bench:
    """An operation with its folders: what it starts from, old and none, and what it leads to.

    Parameters
    ----------
    operation : Operation
        Is run three times without faults: the old version, the new one over it and where there is nothing.
    inputs : Path
        What operations read.
    work : Path
        An empty folder.
    shim : Shim
        The faults.
    """

    def __init__(self, operation: Operation, inputs: Path, work: Path, shim: Shim) -> None:
        self.operation = operation
        self.inputs = inputs
        self.shim = shim
        self.folder = work / "here"
        self.starts: dict[str, Path] = {}
        self.started: dict[str, Tree] = {}
        self.trees: dict[str, tuple[Tree, Tree]] = {}
        (work / "none").mkdir()
        (work / "warm").mkdir()
        self._warm(work / "warm")
        restore(work / "none", self.folder)
        self._done(OLD)
        shutil.copytree(self.folder, work / "old", symlinks=True)
        starts = ("old",) if operation.needs_old else ("old", "none") if operation.replaces else ("none",)
        for name in starts:
            restore(work / name, self.folder)
            old = contents(self.folder)
            if operation.interrupted:
                # all calls count: a little after the middle of them
                counts = self.run(Fault(WRITING, 0, 0, How.ONCE), again=False).counts
                restore(work / name, self.folder)
                middle = sum(counts[kind] for kind in WRITING) * 2 // 3
                killed = self.run(Fault(WRITING, middle, 0, How.KILL), again=False)
                assert killed.code == -signal.SIGKILL
                shutil.copytree(self.folder, work / f"{name}-killed", symlinks=True)
                self.starts[name] = work / f"{name}-killed"
            else:
                self.starts[name] = work / name
            self.started[name] = contents(self.folder) if operation.interrupted else old
            self._done(NEW, again=operation.interrupted)
            self.trees[name] = (old, contents(self.folder))
        assert all(old != new for old, new in self.trees.values()), f"{operation.name} changes nothing"

    def _warm(self, folder: Path) -> None:
        """Run it here, so that what it imports and compiles is there in every process that is forked."""
        found, errors, nowhere = os.dup(1), os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            with contextlib.suppress(SystemExit):
                self.operation.run(folder, self.inputs, OLD, False)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(found, 1)
            os.dup2(errors, 2)
            # those of the parent may be files, which can be sought in
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            for file in (found, errors, nowhere):
                os.close(file)

    def _done(self, version: int, again: bool = False) -> None:
        ended = self.run(None, version, again)
        assert ended.code == 0, f"{self.operation.name} without a fault: {ended}"

    def run(
        self,
        fault: Fault | None,
        version: int = NEW,
        again: bool | None = None,
        *,
        kill_after_s: float | None = None,
    ) -> Ended:
        """Run the operation on what is there, in a process of its own, and kill it if it takes too long."""
        again = self.operation.interrupted if again is None else again
        with tempfile.TemporaryDirectory() as apart:
            sys.stdout.flush()
            sys.stderr.flush()
            # what is here is not copied for being looked at by the child's collector
            gc.freeze()
            reads, writes = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reads)
                self._run_and_exit(Path(apart), writes, fault, version, again)
            os.close(writes)
            if kill_after_s is not None:
                time.sleep(kill_after_s)
                os.kill(child, signal.SIGKILL)
            with open(reads, errors="replace") as errors:
                found = errors.read()
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError, ValueError):
                return Ended(code, found, *json.loads((Path(apart) / "met").read_text()))
            return Ended(code, found)

    def _run_and_exit(self, apart: Path, errors: int, fault: Fault | None, version: int, again: bool) -> None:
        code = 70
        try:
            # no files: a limit of files does not limit the output
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors, 2)
            # those of the parent may be files, which can be sought in
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            if fault is not None and fault.largest_bytes:
                # the system's own refusal, as of a disk that is full
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.largest_bytes, resource.RLIM_INFINITY))
            elif fault is not None:
                self.shim.arm(
                    self.folder, fault.kinds, fault.number, fault.error, fault.how, fault.least_bytes
                )
            try:
                self.operation.run(self.folder, self.inputs, version, again)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0
            except FastroofError as error:
                code = 2
                print(f"fastroof: error: {error}", file=sys.stderr)
            except (OSError, MemoryError) as error:
                # as the command line ends where a function of Python lets them through
                code = 2
                print(f"fastroof: error: {type(error).__name__} {error}", file=sys.stderr)
            # what was left open would write when it is collected
            gc.collect()
        except BaseException:
            code = 70
            self.shim.disarm()
            traceback.print_exc()
        finally:
            counts, met, where = self.shim.counts, self.shim.met, self.shim.where
            self.shim.disarm()
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
                (apart / "met").write_text(json.dumps([counts, met, where]))
            os._exit(code)

    def counts(self, start: str, least_bytes: int) -> Mapping[str, int]:
        """How many calls of each kind there are without a fault; of memory those of so many bytes."""
        restore(self.starts[start], self.folder)
        return self.run(Fault((*WRITING, "alloc"), 0, 0, How.ONCE, least_bytes)).counts

    def tried(self, start: str, fault: Fault) -> Verdict:
        """Run it with a fault, judge what is there, and run it again without one."""
        restore(self.starts[start], self.folder)
        ended = self.run(fault)
        there = self._contents()
        outcome, wrong = self._judged(start, there, ended, fault)
        # where all is as it was, running it again is what was shown to succeed before
        if not wrong and there != self.started[start] and (outcome != "new" or self.operation.replaces):
            repeated = self.run(None, again=True)
            _, new = self.trees[start]
            if repeated.code:
                wrong = f"repeated it fails: {repeated.output.strip()[-300:]}"
            elif (after := self._contents()) != new:
                wrong = f"repeated it leads to something else: {_difference(after, new)}"
        return Verdict(outcome, ended, wrong)

    def _contents(self) -> Tree:
        stays = re.compile(self.operation.stays or "-")
        return {name: message for name, message in contents(self.folder).items() if not stays.fullmatch(name)}

    def _judged(self, start: str, there: Tree, ended: Ended, fault: Fault) -> tuple[str, str]:
        operation, (old, new) = self.operation, self.trees[start]
        is_killed = fault.how is How.KILL or ended.code in (-signal.SIGABRT, -signal.SIGSEGV)
        own = old.keys() | new.keys()
        kept = {name: message for name, message in there.items() if name in own}
        # who is gone, may remove nothing or has no memory for it cannot tidy: the next one does
        cannot_tidy = is_killed or fault.kinds in (("alloc",), WRITING) or "unlink" in fault.kinds

        def may_stay(name: str) -> bool:
            return bool(re.fullmatch(operation.leaves or "-", name))

        if kept != new:
            is_more = [n for n in kept.keys() - old if may_stay(n) or (cannot_tidy and _is_empty(n, kept))]
            kept = {name: message for name, message in kept.items() if name not in is_more}
        outcome = "new" if kept == new else "old" if kept == old else "mixed"
        if ended.code not in (0, 2) and not is_killed:
            return outcome, f"ends with {ended.code}: {ended.output.strip()[-600:]}"
        if ended.code == 2 and not _is_one_line(ended.output):
            return outcome, f"prints {ended.output.strip()[-600:]!r}"
        if ended.code == 0 and ended.met == 0 and outcome != "new" and not operation.always_succeeds:
            return outcome, f"ends well and is not new: {_difference(kept, new)}"
        is_less = operation.reports_missing and fault.kinds == ("alloc",)
        if ended.code == 0 and outcome == "mixed" and is_less:
            return "less", ""
        if ended.code == 0 and outcome != "new" and not operation.always_succeeds:
            return outcome, f"reports success and is not new: {_difference(kept, new)}"
        if outcome == "mixed" and ((operation.together and not is_killed) or not _is_either(kept, old, new)):
            return outcome, f"is half: {_difference(kept, old)}; to new: {_difference(kept, new)}"
        left = [name for name in there.keys() - own if not may_stay(name)]
        if operation.interrupted:
            # of the one that was killed before; the next to get as far as writing removes it
            left = [name for name in left if name not in self.started[start]]
        if cannot_tidy:
            left = [name for name in left if not is_hidden_half(name)]
        if left:
            return outcome, f"leaves {', '.join(sorted(left)[:5])}"
        return outcome, ""


WRITING = ("open", "write", "fsync", "close", "rename", "link", "unlink", "mkdir")
"""All kinds of calls that change what lies on a disk."""


def _is_empty(name: str, kept: Tree) -> bool:
    """Whether a folder has nothing but folders in it."""
    return name.endswith("/") and not any(
        other.startswith(name) and not other.endswith("/") for other in kept
    )


def _is_either(kept: Tree, old: Tree, new: Tree) -> bool:
    """Whether each file by itself is old, new, or not there where it was not or will not be."""
    return all(kept.get(name) in (old.get(name), new.get(name)) for name in old.keys() | new.keys())


def _is_one_line(message: str) -> bool:
    # Arrow itself prints on standard error what it could not write to a file; progress has lines
    others = ("fastroof: warning: ", "/arrow/cpp/", "predicting ")
    lines = [line for line in message.splitlines() if not line.startswith(others)]
    return len(lines) == 1 and lines[0].startswith("fastroof: error: ")


def _difference(one: Tree, other: Tree) -> str:
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return ", ".join(f"{name} ({one.get(name)}, {other.get(name)})" for name in names[:4])
