"""Ctrl-C ends a command within about a second and with exit code 130, whatever it is doing.

Python handles a signal between two of its own instructions, only in the main thread, and leaving a block
waits for the block's threads. Compiling a loop is one instruction of many seconds, and compiling threads run
for minutes. So there are three stages: during a command's imports, Ctrl-C ends the process immediately; after
them it raises KeyboardInterrupt as usual; a process still running a second later is ended by a thread that
only waits for the signal.

Programs that import fastroof are unaffected: only the command line's own process enables this.
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
"""Seconds after Ctrl-C in which a command may end by itself."""

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
        # another thread that is ending the process may have removed it
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
    """Start a thread that ends the process if it still runs a second after Ctrl-C."""
    if _signal.getsignal(_signal.SIGINT) is not _end:
        return
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    # the C-level handler writes there even while the main thread compiles
    _signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    sys.unraisablehook = _unraisable
    os.register_at_fork(after_in_child=lambda: _signal.set_wakeup_fd(-1))
    # a thread that Python neither waits for nor counts
    _thread.start_new_thread(_watch, (read_fd,))


def _watch(read_fd: int) -> None:
    import time

    while True:
        numbers = os.read(read_fd, 64)
        # servers install their own handlers, and Ray must stop its processes
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
        except BaseException:  # the process ends regardless
            continue
    if "rich.live" in sys.modules and os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
    os._exit(EXIT_INTERRUPTED)


def _unraisable(given: Any) -> None:
    """End the process on an interrupt that Python could not raise and would ignore."""
    if given.exc_type is KeyboardInterrupt:
        _end()
    sys.__unraisablehook__(given)
