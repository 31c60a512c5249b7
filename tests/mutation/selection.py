"""Which tests run which line: recorded once, so that a mutant meets the few tests that can notice it.

A line that runs once for many tests (a cached table, a fixture of a module) is recorded with the first of
them alone. So tests that run the line go first, and for a mutant that they let live all that run anything of
its module follow, the quickest first.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutation.child import run_tests
from tests.mutation.mutants import Mutant

__all__ = ["Recorded", "merged", "record", "stages"]

CHECKOUT: Final = Path(__file__).resolve().parents[2]


class Recorded(NamedTuple):
    """Tests that passed on the unchanged product, their time and the lines that they run.

    Attributes
    ----------
    seconds : dict
        Processor seconds by the test's name.
    lines : dict
        Names of tests by line, by file.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]


def record(paths: Iterable[str], options: Iterable[str], target: Path) -> None:
    """Run tests with every line traced, and write what was seen; in a process of its own."""
    import coverage

    # "ctrace" alone knows which test runs
    trace = coverage.Coverage(data_file=None, include=[str(CHECKOUT / "fastroof" / "*")], config_file=False)
    trace.start()
    _, session = run_tests(paths, stop=False, options=tuple(options), observe=trace.switch_context)
    trace.stop()
    passed = {name for name in session.passed if name not in session.failed}
    data = trace.get_data()
    lines = {}
    for file in data.measured_files():
        by_line = data.contexts_by_lineno(file)
        lines[str(Path(file).relative_to(CHECKOUT))] = {
            line: passed.intersection(names) for line, names in by_line.items()
        }
    seconds = {name: session.seconds[name] for name in passed}
    target.write_bytes(pickle.dumps((Recorded(seconds, lines)._asdict(), session.failed)))


def merged(before: Recorded, new: Recorded, files: Iterable[str]) -> Recorded:
    """Put what was seen of some files of tests in the place of what was seen of them before."""
    paths = set(files)

    def stays(test: str) -> bool:
        return test.partition("::")[0] not in paths

    seconds = {test: s for test, s in before.seconds.items() if stays(test)} | new.seconds
    lines = {
        file: {line: {*filter(stays, tests)} for line, tests in of_file.items()}
        for file, of_file in before.lines.items()
    }
    for file, of_file in new.lines.items():
        for line, tests in of_file.items():
            lines.setdefault(file, {}).setdefault(line, set()).update(tests)
    return Recorded(seconds, lines)


def stages(mutant: Mutant, file: str, seen: Recorded, budgets_s: tuple[float, ...]) -> list[list[str]]:
    """Tests for a mutant: those of its lines within the first budget, more of them, then of its module.

    Within a stage the tests of a file stay together, the quickest file first.
    """
    lines = seen.lines.get(file, {})
    span = {*range(mutant.line, mutant.end + 1)}
    its_own = set().union(*(lines.get(line, set()) for line in span))
    if not its_own:
        first, last = mutant.statement
        its_own = set().union(*(lines.get(line, set()) for line in range(first, last + 1)))
    of_module = set().union(*lines.values()) - its_own
    name = mutant.module.rpartition(".")[2]

    def place(test: str) -> tuple[bool, float]:
        return f"test_{name}.py" not in test, seen.seconds[test]

    rest = [*sorted(its_own, key=place), *sorted(of_module, key=place)]
    made = []
    for budget_s in budgets_s:
        taken, left, spent_s = [], [], 0.0
        for test in rest:
            # a quick test costs its fixtures and its module's import
            spent_s += seen.seconds[test] + 0.01
            (taken if spent_s <= budget_s or not taken else left).append(test)
        made.append(_by_file(taken, seen))
        rest = left
    return made


def _by_file(tests: list[str], seen: Recorded) -> list[str]:
    spent_s: dict[str, float] = {}
    for test in tests:
        file = test.partition("::")[0]
        spent_s[file] = spent_s.get(file, 0.0) + seen.seconds[test]
    return sorted(tests, key=lambda t: (spent_s[t.partition("::")[0]], t.partition("::")[0], seen.seconds[t]))
