"""Run one case: answered, refused or failed, within limits of time and memory."""

from __future__ import annotations

import resource
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple
from zlib import crc32

from fastroof.errors import FastroofError
from tests.fuzz.target import SkippedError, Target

ANSWERED, REFUSED, FAILED, SKIPPED = "answered", "refused", "failed", "skipped"
MOST_GROWTH_KIB = 2**20
"""Maximum growth of the process's peak memory by one case, KiB."""


class Verdict(NamedTuple):
    """A case's outcome; of failures the message, the place that groups them, and what was raised."""

    kind: str
    why: str = ""
    place: str = ""
    error: BaseException | None = None


class _TooLongError(BaseException):
    """Not an Exception, so that nothing under test catches it."""


def case_of(target: Target, seed: int) -> bytes:
    return target.case(Random(seed << 32 | crc32(target.name.encode())))


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Make every warning a failure, except the datasheet model's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "no measured tables of|what was not|.* has no bf16")
        yield


def judge(target: Target, case: bytes) -> Verdict:
    was = signal.signal(signal.SIGPROF, _too_long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    try:
        # at three times the limit whatever runs is interrupted, where Python can
        signal.setitimer(signal.ITIMER_PROF, 3.0 * target.limit_s)
        try:
            target.check(case)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        kind = ANSWERED
    except FastroofError as error:
        kind = REFUSED
        if not str(error).strip():
            return Verdict(FAILED, f"{type(error).__name__} without a word", _place(error), error)
        if target.is_one_line and "\n" in str(error):
            return Verdict(FAILED, f"several lines: {str(error)!r:.300}", f"lines of {_place(error)}", error)
    except SkippedError:
        return Verdict(SKIPPED)
    except KeyboardInterrupt:
        raise
    except _TooLongError as error:
        return Verdict(FAILED, f"takes over {3.0 * target.limit_s:g} s", _place(error), error)
    except BaseException as error:
        return Verdict(FAILED, f"{type(error).__name__}: {error!s:.300}", _place(error), error)
    finally:
        signal.signal(signal.SIGPROF, was)
    took_s = time.process_time() - began_s
    if took_s > target.limit_s:
        return Verdict(FAILED, f"takes {took_s:.1f} s, {kind}", "time")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > MOST_GROWTH_KIB:
        return Verdict(FAILED, f"takes {grown / 2**20:.1f} GiB, {kind}", "memory")
    return Verdict(kind)


def _too_long(number: int, frame: object) -> None:
    raise _TooLongError


def _place(error: BaseException) -> str:
    """Where it was raised: the innermost function of fastroof, or of the test."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/fastroof/" in frame.filename and "/tests/" not in frame.filename]
    last = own[-1] if own else frames[-1]
    at = last.filename.split("/fastroof/")[-1].split("/tests/")[-1]
    return f"{type(error).__name__} in {at}:{last.name}"
