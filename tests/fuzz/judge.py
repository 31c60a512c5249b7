"""One case before its surface: answered, refused, or a failure, within its time and memory."""

from __future__ import annotations

import resource
import signal
import time
import traceback
from random import Random
from typing import NamedTuple
from zlib import crc32

from fastroof.errors import FastroofError
from tests.fuzz.surface import SkippedError, Surface

__all__ = ["ANSWERED", "FAILED", "REFUSED", "SKIPPED", "Verdict", "case_of", "judge"]

ANSWERED, REFUSED, FAILED, SKIPPED = "answered", "refused", "failed", "skipped"
MOST_GROWTH_KIB = 2**20
"""How far one case may raise the most memory that the process ever had, KiB."""


class Verdict(NamedTuple):
    """What became of a case: its kind; what went wrong, and where, so that like ones are told as one."""

    kind: str
    why: str = ""
    place: str = ""


class _TooLongError(BaseException):
    """Not an Exception, so that nothing under test catches it."""


def case_of(surface: Surface, seed: int) -> bytes:
    """Return the case that a surface makes of a seed."""
    return surface.case(Random(seed << 32 | crc32(surface.name.encode())))


def judge(surface: Surface, case: bytes) -> Verdict:
    """Hand a case to its surface, and say what became of it."""
    was = signal.signal(signal.SIGPROF, _too_long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    try:
        # at three times the limit whatever runs is interrupted, where Python can
        signal.setitimer(signal.ITIMER_PROF, 3.0 * surface.limit_s)
        try:
            surface.check(case)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        kind = ANSWERED
    except FastroofError as error:
        kind = REFUSED
        if not str(error).strip():
            return Verdict(FAILED, f"{type(error).__name__} without a word", _place(error))
    except SkippedError:
        return Verdict(SKIPPED)
    except KeyboardInterrupt:
        raise
    except _TooLongError as error:
        return Verdict(FAILED, f"takes over {3.0 * surface.limit_s:g} s", _place(error))
    except BaseException as error:
        return Verdict(FAILED, f"{type(error).__name__}: {error!s:.300}", _place(error))
    finally:
        signal.signal(signal.SIGPROF, was)
    took_s = time.process_time() - began_s
    if took_s > surface.limit_s:
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
