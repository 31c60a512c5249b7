"""Which tests a plain `pytest` and CI run, and in how many processes."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections import defaultdict
from zlib import crc32

import pytest
from _pytest.pathlib import import_path, module_name_from_path

CASES = 2
"""Number of cases of a parametrized test that a plain `pytest` runs."""

FEW_FILES = 5
"""Number of files up to which a `pytest` of files runs every case, in one process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests, and every case of the others")
    parser.addoption(
        "--slow-part", metavar="I/N", type=_part, help="with --all, run part I of N of the slow tests only"
    )


def _part(text: str) -> tuple[int, int]:
    number, slash, total = text.partition("/")
    if not (slash and number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        raise ArgumentTypeError(f"{text!r} is not I/N, as 2/4, with I from 1 to N")
    return int(number), int(total)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return 0 where starting workers takes longer than the tests, or would disturb what they time."""
    option = config.option
    few = bool(option.keyword) or option.collectonly or _names_few_files(config)
    timed = _names_benchmarks(config) and not option.benchmark_disable
    return 0 if few or timed else None


@pytest.hookimpl
def pytest_collection(session: pytest.Session) -> None:
    """Import all test files first, each worker from another one on.

    Each reads what others have compiled, which for tests is slow; in one order all would compile everything.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or "tests" not in config.args:
        return
    files = sorted((config.rootpath / "tests").rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        try:
            import_path(file, mode="importlib", root=config.rootpath, consider_namespace_packages=False)
        except BaseException:  # collection reports the reason, such as a missing package
            sys.modules.pop(module_name_from_path(file, config.rootpath), None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only --all runs, unless it is named."""
    option = config.option
    if any("::" in name for name in config.args):
        return
    left_out = set()
    if option.all:
        if option.slow_part is not None:
            left_out.update(_other_parts(items, *option.slow_part))
    else:
        # what only a release runs may be marked slow too
        for mark, named in (("slow", ("slow", "release")), ("release", ("release",))):
            if not any(name in option.markexpr for name in named):
                left_out.update(item for item in items if item.get_closest_marker(mark))
        if not (option.keyword or _names_few_files(config) or _names_benchmarks(config)):
            left_out.update(_further_cases([item for item in items if item not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _names_few_files(config: pytest.Config) -> bool:
    files = [name for name in config.args if name.partition("::")[0].endswith(".py")]
    return len(files) == len(config.args) <= FEW_FILES


def _names_benchmarks(config: pytest.Config) -> bool:
    return config.rootpath / "benchmarks" in [config.invocation_params.dir / name for name in config.args]


def _other_parts(items: list[pytest.Item], number: int, total: int) -> list[pytest.Item]:
    """Return the slow tests of all parts but one; cases of a test share fixtures, so they are of one part."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    return [item for item in slow if crc32(_test_of(item).encode()) % total != number - 1]


def _test_of(item: pytest.Item) -> str:
    """Return the name of a test without its case."""
    return item.nodeid.removesuffix(f"[{item.callspec.id}]") if hasattr(item, "callspec") else item.nodeid


def _further_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return all but a sample of each test's cases; tests with the same parameters keep the same ones."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[_test_of(item)].append(item)
    return [
        item
        for cases in tests.values()
        for item in sorted(cases, key=lambda case: crc32(case.callspec.id.encode()))[CASES:]
    ]
