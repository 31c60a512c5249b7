"""Run the command line as a process: ``python -m fastroof``, or the console script.

Most commands answer in less time than Python takes to start and exit, so garbage collection is held off
during imports, and the process exits without tearing the interpreter down.
"""

from __future__ import annotations

import os
import sys

from fastroof.interrupts import EXIT_INTERRUPTED, end_at_once, end_soon

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, NoReturn

YOUNG_OBJECTS: Final = 500_000
"""Allocations between two collections of the youngest generation: imports allocate about 300,000 objects
and no garbage, and each collection at 100,000 takes 20 ms."""


def main() -> NoReturn:
    """Run the command line and end the process, as ``sys.exit`` would."""
    end_at_once()
    end_soon()
    import gc

    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
    # pyarrow's own allocator holds 40 MB of what tables needed while they were read
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from fastroof.cli import main as run

    try:
        run()
    except SystemExit as ending:
        end_at_once()
        _leave(ending)
        raise
    raise SystemExit(0)


def _leave(ending: SystemExit) -> None:
    """Exit the process now after running its exit handlers; return if this is not possible."""
    import atexit
    import threading
    from contextlib import suppress

    code = 0 if ending.code is None else ending.code
    is_watched = sys.gettrace() is not None or sys.getprofile() is not None or bool(sys.flags.inspect)
    is_waited_for = threading.active_count() > 1 and code != EXIT_INTERRUPTED
    if not isinstance(code, int) or is_watched or is_waited_for:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    # a failing handler is printed and does not change the exit code
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
