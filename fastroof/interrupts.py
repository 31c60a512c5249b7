"""How a command ends on Ctrl-C: soon and with exit code 130, whatever it is doing.

Python acts on a signal between two of its own instructions, in the main thread alone, and its way out of a
block waits for the block's threads. Compiling a loop is one instruction of many seconds, and threads that
compile go on for minutes. So there are three stages: while a command is imported Ctrl-C ends the process at
once; then it is a KeyboardInterrupt, as ever; and a process that this has not ended a second later is ended
by a thread that waits for nothing but the signal.

Nothing of this happens to a program that imports fastroof: a command line's own process begins it.
"""

from __future__ import annotations

# signal itself imports enum, which takes as long as everything else before a command's imports
import _signal  # type: ignore[import-not-found]
import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

EXIT_INTERRUPTED: Final = 130

GRACE_S: Final = 1.0
"""Seconds that a command has after Ctrl-C to end by itself."""

_last: list[Callable[[], object]] = []


class BeforeTheEnd:
    """Run a cleanup before Ctrl-C ends the process, inside this block only."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def __enter__(self) -> None:
        """Begin the block."""
        _last.append(self._action)

    def __exit__(self, *error: object) -> None:
        """End the block."""
        # another thread may be about to end the process, and have taken it
        if self._action in _last:
            _last.remove(self._action)


def end_at_once() -> None:
    """Make Ctrl-C end the process immediately, without a traceback of imports."""
    if _signal.getsignal(_signal.SIGINT) in (_signal.default_int_handler, _raise):
        try:
            _signal.signal(_signal.SIGINT, _end)
        except ValueError:
            return


def raise_again() -> None:
    """Make Ctrl-C raise KeyboardInterrupt instead of ending the process; a second one ends it."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _raise)


def end_soon() -> None:
    """Have a process that Ctrl-C has not ended within a second end without waiting for anything."""
    if _signal.getsignal(_signal.SIGINT) is not _end:
        return
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    # the system's own handler writes there, also while the main thread compiles
    _signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    sys.unraisablehook = _unraisable
    os.register_at_fork(after_in_child=lambda: _signal.set_wakeup_fd(-1))
    # one that Python does not wait for, nor counts
    _thread.start_new_thread(_watch, (read_fd,))


def _watch(read_fd: int) -> None:
    import time

    while True:
        numbers = os.read(read_fd, 64)
        # servers install their own handlers, and Ray has to stop its processes
        is_ours = _signal.getsignal(_signal.SIGINT) in (_end, _raise) and "ray" not in sys.modules
        if _signal.SIGINT in numbers and is_ours:
            time.sleep(GRACE_S)
            _end()


def _raise(*_: object) -> None:
    _signal.signal(_signal.SIGINT, _end)
    raise KeyboardInterrupt


def _end(*_: object) -> None:
    while _last:
        try:
            _last.pop()()
        except BaseException:  # whatever it is: the process ends
            continue
    if "rich.live" in sys.modules and os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
    os._exit(EXIT_INTERRUPTED)


def _unraisable(given: Any) -> None:
    """End where an interrupt came while Python could not raise it, and would go on."""
    if given.exc_type is KeyboardInterrupt:
        _end()
    sys.__unraisablehook__(given)
