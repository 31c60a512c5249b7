"""What runs in a child: one pytest session over chosen tests, with one module of the product changed.

The child is forked before fastroof is imported, from a parent that has imported what fastroof and the tests
need of others: a mutant costs a second or two and not five.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import mutated

__all__ = ["Changed", "failure", "limit", "run_tests", "without_jit"]

CHECKOUT: Final = Path(__file__).resolve().parents[2]
_MEMORY_BYTES: Final = 8 << 30
_QUIET: Final = (
    *("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:benchmark"),
    # the parent has imported it
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with one change, and says whether it did.

    Parameters
    ----------
    module : str
        The module's name.
    number : int, optional
        The change; None for the module as it is, by the same way.
    """

    def __init__(self, module: str, number: int | None) -> None:
        self._module, self._number = module, number
        self.was_imported = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the one module, wherever it is looked for (pytest names other folders), and load it here."""
        if fullname != self._module:
            return None
        place = CHECKOUT.joinpath(*fullname.split("."))
        is_package = place.is_dir()
        origin = place / "__init__.py" if is_package else place.with_suffix(".py")
        return importlib.util.spec_from_file_location(
            fullname, origin, loader=self, submodule_search_locations=[str(place)] if is_package else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave the module's making to Python."""

    def exec_module(self, module: Any) -> None:
        """Run the changed source."""
        path = Path(module.__spec__.origin)
        tree = mutated(path.read_text(), self._number)
        self.was_imported = True
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)


class _Session:
    """Chooses and orders the tests, times them and keeps the first that fails."""

    def __init__(self, chosen: Sequence[str] | None, observe: Callable[[str], None]) -> None:
        self._place = None if chosen is None else {name: i for i, name in enumerate(chosen)}
        self._observe = observe
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        """No shrinking: that an example fails is enough; and the same examples each time."""
        settings.register_profile(
            "mutants",
            settings.get_profile("ci"),
            phases=(Phase.explicit, Phase.generate),
            database=None,
            print_blob=False,
        )
        settings.load_profile("mutants")

    def pytest_sessionstart(self) -> None:
        """Put a changed module before pytest's own importer, which takes files that are named to it."""
        sys.meta_path.sort(key=lambda finder: not isinstance(finder, Changed))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, in their order; tests of a file stay together for its fixtures."""
        place = self._place
        if place is not None:
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda i: place[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Time a test in processor seconds."""
        self._observe(item.nodeid)
        started = time.process_time()
        result = yield
        self.seconds[item.nodeid] = time.process_time() - started
        self._observe("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what passed and what failed, and of what kind the failure was."""
        if report.failed:
            self.failed.setdefault(report.nodeid, failure(report))
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a module of tests that cannot be imported."""
        if report.failed:
            self.failed.setdefault(report.nodeid, f"collect: {report.longreprtext[-200:]}")


def failure(report: pytest.TestReport) -> str:
    """Say what a test failed with, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{report.when}: {getattr(crash, 'message', '')[:200]}"


def run_tests(
    paths: Iterable[str],
    chosen: Sequence[str] | None = None,
    *,
    stop: bool = True,
    options: Sequence[str] = (),
    observe: Callable[[str], None] = lambda name: None,
    extra: object = None,
) -> tuple[int, _Session]:
    """Run tests in this process.

    Parameters
    ----------
    paths : iterable of str
        Files or folders to collect.
    chosen : sequence of str, optional
        The tests to run, in this order; all that are found without it.
    stop : bool
        Whether to stop at the first failure.
    options : sequence of str
        More of pytest's.
    observe : callable
        Told each test's name before it runs, and ``""`` after it.
    extra : object, optional
        Another plugin.

    Returns
    -------
    int
        pytest's exit code.
    _Session
        What passed and failed, and in what time.
    """
    session = _Session(chosen, observe)
    arguments = [*_QUIET, *(["-x"] if stop else []), *options, *dict.fromkeys(paths)]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main(arguments, plugins=[session, *([extra] if extra else [])])
    return int(code), session


def limit(cpu_s: float) -> None:
    """End this process once it has used so many more processor seconds, or asks for too much memory."""
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + cpu_s) + 1, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def without_jit() -> None:
    """Let loops run as Python: compiled ones would come from the cache, which knows nothing of the change."""
    import numba

    assert "fastroof" not in sys.modules
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    numba.config.reload_config()
    assert numba.config.DISABLE_JIT
