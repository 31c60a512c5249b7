"""A process that has imported the product and collected the tests, and forks a child for each mutant.

In the child the changed function's code takes the place of the original's, in every function object made from
it, whoever holds it by then. What runs at import (a constant, a default, a class's fields) cannot be replaced
so: the answer is ``cold``, and the mutant is imported in a process of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import pytest

from tests.mutation.child import failure, limit
from tests.mutation.mutants import mutated
from tests.mutation.processes import in_child

__all__ = ["Warm", "replace"]

CHECKOUT: Final = Path(__file__).resolve().parents[2]


class Warm:
    """A plugin whose loop over the tests is one over mutants.

    Parameters
    ----------
    requests : iterator
        Of a file, a change's number (None for no change) and the tests, stage by stage.
    answer : callable
        Told what came of a request.
    seconds : dict
        Processor seconds by test, on the product as it is.
    """

    def __init__(
        self,
        requests: Iterator[tuple[str, int | None, list[list[str]]]],
        answer: Callable[[dict[str, Any]], None],
        seconds: dict[str, float],
    ) -> None:
        self._requests, self._answer, self._seconds = requests, answer, seconds
        self._noticed: dict[str, str] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try mutants until there are no more."""
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        for file, number, planned in self._requests:
            stages = [[items[name] for name in tests if name in items] for tests in planned]
            self._answer(self._try(file, number, [stage for stage in stages if stage]))
        return True

    def _try(self, file: str, number: int | None, stages: list[list[pytest.Item]]) -> dict[str, Any]:
        def work(say: Callable[[Any], None]) -> None:
            if not replace(CHECKOUT / file, number):
                say({"cold": True})
                return
            for stage in stages:
                limit(4.0 + 3.0 * sum(self._seconds[item.nodeid] for item in stage))
                say({"stage": len(stage)})
                for item, after in zip(stage, [*stage[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                    if self._noticed:
                        name, how = next(iter(self._noticed.items()))
                        say({"killed": "failed", "by": name, "how": how})
                        return
            say({"lived": True})

        started = time.monotonic()
        total_s = sum(self._seconds[item.nodeid] for stage in stages for item in stage)
        said, ended = in_child(work, 240.0 + 20.0 * total_s)
        return {"said": said, "ended": ended, "seconds": round(time.monotonic() - started, 2)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a failure."""
        if report.failed:
            self._noticed.setdefault(report.nodeid, failure(report))


def replace(path: Path, number: int | None) -> int:
    """Give functions of a module the code of a mutant; of ``number`` None, all of them their own once more.

    Returns
    -------
    int
        How many functions were changed: 0 if the change is not within a function, or there is none of it.
    """
    source = path.read_text()
    before = _module_code(source, None, path)
    after = _module_code(source, number, path)
    pairs = list(_functions(before, after))
    if number is not None:
        if _own(before) != _own(after):
            return 0
        pairs = [(old, new) for old, new in pairs if old != new]
    codes = {(old.co_qualname, old.co_firstlineno): new for old, new in pairs}
    count = 0
    for function in _live_functions():
        code = function.__code__
        new = codes.get((code.co_qualname, code.co_firstlineno)) if code.co_filename == str(path) else None
        if new is not None:
            function.__code__ = new
            count += 1
    return count


def _live_functions() -> list[FunctionType]:
    gc.unfreeze()
    return [each for each in gc.get_objects() if type(each) is FunctionType]


def _module_code(source: str, number: int | None, path: Path) -> CodeType:
    code = compile(mutated(source, number), str(path), "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & 0x2)  # CO_NEWLOCALS: not a module's or a class's body


def _functions(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Functions of a module and of its classes, and those within them, as they were and as they are."""
    for old, new in zip(_inner(before), _inner(after), strict=True):
        if _is_function(old):
            yield old, new
        yield from _functions(old, new)


def _own(code: CodeType) -> Sequence[object]:
    """What a module's or a class's body does itself, with the bodies of its classes."""
    bodies = [_own(inner) for inner in _inner(code) if not _is_function(inner)]
    # a code object's repr has its address
    constants = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return [code.co_code, constants, code.co_names, *bodies]
