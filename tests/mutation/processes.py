"""Children that say what they found, line by line, and are ended when they take too long."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["Partner", "in_child"]

Say = Callable[[Any], None]


def in_child(work: Callable[[Say], None], wall_s: float) -> tuple[list[Any], str]:
    """Fork, work, and wait.

    Parameters
    ----------
    work : callable
        Run in the child, told how to say something.
    wall_s : float
        When to end the child and all that it started.

    Returns
    -------
    list
        What it said; the last may be ``{"error": ...}``.
    str
        How it ended: ``""``, ``"time"`` or ``"crash"`` and a code.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        os.setpgid(0, 0)
        _work(work, writes)
    os.close(writes)
    previous = signal.signal(signal.SIGALRM, lambda *_: _end(child))
    signal.alarm(int(wall_s))
    try:
        with open(reads, "rb") as pipe:
            said = [json.loads(line) for line in pipe if line.endswith(b"\n")]
        _, status = os.waitpid(child, 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        _end(child)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return said, "time"
    return said, "" if code == 0 else f"crash {code}"


class Partner:
    """A child that answers one line with one line, for as long as it is asked.

    Parameters
    ----------
    work : callable
        Run in the child with an iterator of questions and a function for the answers.
    """

    def __init__(self, work: Callable[[Any, Say], None]) -> None:
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self._writes)
            os.close(self._reads)
            questions = (json.loads(line) for line in open(reads, "rb"))  # noqa: SIM115
            _work(lambda say: work(questions, say), writes)
        os.close(reads)
        os.close(writes)
        self._answers = open(self._reads, "rb")  # noqa: SIM115

    def ask(self, question: Any) -> Any:
        """Ask, and wait for the answer."""
        os.write(self._writes, json.dumps(question).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the process with the collected tests has ended")
        return json.loads(line)

    def close(self) -> None:
        """Ask no more."""
        os.close(self._writes)
        os.waitpid(self._child, 0)
        self._answers.close()


def _work(work: Callable[[Say], None], writes: int) -> None:
    code = 70
    with open(writes, "wb", buffering=0) as pipe:

        def say(said: Any) -> None:
            pipe.write(json.dumps(said).encode() + b"\n")

        try:
            work(say)
            code = 0
        except BaseException:
            say({"error": traceback.format_exc()})
        finally:
            os._exit(code)


def _end(child: int) -> None:
    """End a child and whatever it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
