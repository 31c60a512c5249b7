"""A notice on the terminal while loops are compiled: what it is, and that it happens once."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_S: Final = 1.0
"""Seconds of compiling after which the notice is shown: one small loop is not worth it."""

NOTICE: Final = "compiling loops for this machine once, about 20 s (`fastroof warm` does it ahead)"


def watch_compiling() -> None:
    """Show the notice in this process."""
    logger = logging.getLogger("fastroof.compiled")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(CompileNotice())


class CompileNotice(logging.Handler):
    """Follows the messages of :mod:`fastroof.compiled.code_cache`; compilations nest."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()
        self._depth = self._loops = 0
        self._began = self._spent_s = 0.0
        self._notice = NOTICE
        self._progress: Progress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Count a compilation that begins or ends; show the notice between."""
        if os.getpid() != self._process:  # a forked worker
            return
        now = time.monotonic()
        if record.msg.startswith("compiling"):
            if self._depth == 0:
                self._began = now - self._spent_s
                words = record.getMessage()  # two of them name a loop, more are a notice
                self._notice = words if words.count(" ") > 1 else NOTICE
            self._depth += 1
            if self._progress is None and now - self._began > DELAY_S:
                self._progress = _shown(self._notice)
        else:
            self._depth = max(0, self._depth - 1)
            self._loops += 1
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], loops=self._loops)
        if self._depth == 0:
            self._spent_s = now - self._began
            if self._progress is not None:  # the command may print now; the next loop shows it again
                self._progress.stop()
                self._progress = None


def _shown(notice: str) -> Progress:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from fastroof.cli.output import console

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.fields[loops]} done,"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console(stderr=True), transient=True)
    progress.add_task(notice, total=None, loops=0)
    progress.start()
    return progress
