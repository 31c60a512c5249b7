"""Many cases, in one process per target that records each case's seed first, so that a crash is traced."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.corpus_files import keep_case
from tests.fuzz.judge import ANSWERED, FAILED, REFUSED, SKIPPED, case_of, judge
from tests.fuzz.target import Target

__all__ = ["Counts", "run_target", "serve_cases", "table", "warnings_are_errors"]

HUNG_S = 600.0
"""Wall seconds without a new case after which a process counts as hung."""

BEGINS_S = 1800.0
"""Maximum wall seconds until the first case, compilation included."""

MOST_MEMORY = 8 * 2**30
KEPT_OF_ONE_PLACE = 3
_STATE = struct.Struct("<q4q")


@dataclass
class Counts:
    """Outcomes of a target's cases, and their processor seconds."""

    cases: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: dict[str, list[Any]] = field(default_factory=dict)
    """By the place that raised: count, first seeds, first message."""

    def add(self, kind: str) -> None:
        if kind == SKIPPED:
            return
        self.cases += 1
        self.answered += kind == ANSWERED
        self.refused += kind == REFUSED
        self.failed += kind == FAILED

    def merge(self, other: Counts) -> None:
        for name in ("cases", "answered", "refused", "failed", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for place, (count, seeds, why) in other.failures.items():
            known = self.failures.setdefault(place, [0, [], why])
            known[0] += count
            known[1] = [*known[1], *seeds][:KEPT_OF_ONE_PLACE]


def serve_cases(
    target: Target,
    first: int,
    cases: int | None,
    until_s: float | None,
    state: mmap.mmap | None = None,
    seen: Path | None = None,
) -> Counts:
    """Run cases of seeds from ``first`` on in this process, up to a count or a time."""
    counts = Counts()
    began_s = time.process_time()
    seed = first
    with warnings.catch_warnings():
        warnings_are_errors()
        while (cases is None or seed - first < cases) and (until_s is None or time.monotonic() < until_s):
            if state is not None:
                state[: _STATE.size] = _STATE.pack(
                    seed, counts.cases, counts.answered, counts.refused, counts.failed
                )
            verdict = judge(target, case_of(target, seed))
            counts.add(verdict.kind)
            if verdict.kind == FAILED:
                known = counts.failures.setdefault(verdict.place, [0, [], verdict.why])
                known[0] += 1
                if len(known[1]) < KEPT_OF_ONE_PLACE:
                    known[1].append(seed)
                    if seen is not None:
                        seen.write_text(json.dumps(vars(counts)))
            seed += 1
    counts.seconds = time.process_time() - began_s
    return counts


def warnings_are_errors() -> None:
    """Make every warning a failure, except the datasheet model's own."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "no measured tables of|what was not|.* has no bf16")


def run_target(
    kind: type[Target], first: int, cases: int | None, seconds: float | None, kept: Path | None
) -> Counts:
    """Run cases in child processes; where one dies or hangs, the next continues after that case."""
    total = Counts()
    until_s = None if seconds is None else time.monotonic() + seconds
    last = None if cases is None else first + cases
    while (last is None or first < last) and (until_s is None or time.monotonic() < until_s):
        with tempfile.TemporaryDirectory(prefix="fastroof-fuzz-") as name:
            left = None if last is None else last - first
            part, died_at = _in_a_process(kind, first, left, until_s, Path(name))
        total.merge(part)
        if died_at is None:
            break
        first = died_at + 1
    if kept is not None and total.failures:
        target = kind()
        folder = Path(tempfile.mkdtemp(prefix="fastroof-fuzz-"))
        target.prepare(folder)
        for _, seeds, _ in total.failures.values():
            for seed in seeds:
                keep_case(kind.name, f"seed-{seed}{kind.suffix}", case_of(target, seed), kept)
        target.close()
        shutil.rmtree(folder, ignore_errors=True)
    return total


def _in_a_process(
    kind: type[Target], first: int, cases: int | None, until_s: float | None, folder: Path
) -> tuple[Counts, int | None]:
    """Return one process's counts, and the seed it died at, if it did."""
    answer = folder / "counts.json"
    state_path = folder / "case"
    state_path.write_bytes(_STATE.pack(first - 1, 0, 0, 0, 0))
    with state_path.open("r+b") as file:
        state = mmap.mmap(file.fileno(), _STATE.size)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()  # a crash is counted, and its traceback shown by --case
            _set_memory(kind)
            own = folder / "own"
            own.mkdir()
            target = kind()
            target.begin(own)
            counts = serve_cases(target, first, cases, until_s, state, answer)
            target.close()
            answer.write_text(json.dumps(vars(counts)))
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    began_s = seen_s = time.monotonic()
    seen, status, hung = None, 0, False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        at = state[: _STATE.size]
        if at != seen:
            seen, seen_s = at, time.monotonic()
        has_begun = _STATE.unpack(at)[0] >= first
        if time.monotonic() - seen_s > (HUNG_S + 3 * kind.limit_s if has_begun else BEGINS_S):
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02 if time.monotonic() - began_s < 2 else 0.2)
    if status == 0:
        return Counts(**json.loads(answer.read_text())), None
    seed, cases, answered, refused, failed = _STATE.unpack(state[: _STATE.size])
    if seed < first or not os.WIFSIGNALED(status):
        what = "it does not begin" if seed < first else f"the case of seed {seed} cannot be made"
        raise RuntimeError(f"{kind.name}: {what}, status {os.waitstatus_to_exitcode(status)}, see above")
    why = "hangs" if hung else f"ends the process with signal {os.WTERMSIG(status)}"
    failures = json.loads(answer.read_text())["failures"] if answer.exists() else {}
    failures[f"crash: {why}"] = [1, [seed], f"the process {why}"]
    return Counts(cases + 1, answered, refused, failed + 1, time.monotonic() - began_s, failures), seed


def _set_memory(kind: type[Target]) -> None:
    most = getattr(kind, "most_memory", MOST_MEMORY)
    if most:
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def table(counts: dict[str, Counts]) -> str:
    """Return a Markdown table of counts, with cases per processor second."""
    lines = [
        "| target | cases | answered | refused | failures | cases/s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    rows = [*counts.items(), ("all", _sum(counts))]
    lines += [
        f"| {name} | {one.cases:,} | {one.answered:,} | {one.refused:,} | {one.failed:,} "
        f"| {one.cases / max(one.seconds, 1e-3):,.0f} |"
        for name, one in rows
    ]
    return "\n".join(lines)


def _sum(counts: dict[str, Counts]) -> Counts:
    total = Counts()
    for one in counts.values():
        total.merge(one)
    return total
