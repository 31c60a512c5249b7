"""What tests share: the material beside the checkout, the H100 tables, and how hypothesis searches."""

from __future__ import annotations

import functools
import gc
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from _pytest.doctest import DoctestModule
from hypothesis import settings

from tests.selection import (  # noqa: F401
    pytest_addoption,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from fastroof import Tables

os.environ["MPLBACKEND"] = "Agg"
# Sentences are compared whole; tests/cli/test_width.py takes the width that a pipe has.
os.environ["COLUMNS"] = "1000"

# What a test sees of a GPU is what ships, whoever runs it: no tables of the user's, and none that a package
# that happens to be installed would bring. Tests of imports point these elsewhere for themselves.
_NO_TABLES = tempfile.TemporaryDirectory(prefix="fastroof-tables-")
# tables that were imported, for tests of what was made with them
os.environ["FASTROOF_TABLES"] = os.environ.get("FASTROOF_TEST_TABLES", _NO_TABLES.name)
os.environ["FASTROOF_TABLES_IMPORT"] = "never"
# and plans are made: a test may have changed what makes them
os.environ["FASTROOF_KEEP_PLANS"] = "never"

# A shell starts what runs in the background deaf to Ctrl-C, and so would be every process that a test
# starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiling makes millions of objects and little garbage: by Python's own thresholds it takes a tenth longer.
gc.set_threshold(20_000, 20, 20)

# The commands of an app are made once: making those of fastroof takes as long as many commands do.
vars(typer.testing)["_get_command"] = functools.cache(typer.main.get_command)

CHECKOUT = Path(__file__).resolve().parents[1]

# No deadline: the first example of a compiled loop pays for its compilation.
settings.register_profile("quick", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True, print_blob=True)
# for loops that run without being compiled, which takes ten times as long
settings.register_profile("interpreted", settings.get_profile("ci"), max_examples=12)
settings.load_profile("ci" if os.environ.get("CI") else "quick")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, Iterable[pytest.Collector], list[pytest.Collector]]:
    """Look for no doctests in tests.

    Their import forgives a module its wrong imports, and all that the module tests would be skipped.
    """
    collectors = yield
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


@pytest.fixture(params=["fitting", "all"])
def features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate with loops of the features that a run needs, then with those of all."""
    if request.param == "all":
        if os.environ.get("NUMBA_DISABLE_JIT") == "1":
            pytest.skip("uncompiled loops have all features")
        from fastroof.compiled.simulation.records import Features

        every = Features(*[1] * len(Features._fields))
        monkeypatch.setattr("fastroof.simulation.fleet_arrays.features_of", lambda *_: every)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference material, which lies beside the checkout where it is available."""
    folder = CHECKOUT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder `shared` beside the checkout")
    return folder


@pytest.fixture(scope="session")
def h100() -> Tables:
    import fastroof

    return fastroof.load_tables("h100")


SHARING = ("accuracy", "backends", "cli", "evidence", "frozen", "report", "serving", "simulation", "sweep")
"""Folders of tests that look at answers, not at how tables are read."""


@functools.cache
def _own_tables(load: Any, gpu: str) -> Any:
    return load(gpu)


@pytest.fixture(autouse=True, scope="module")
def _tables_are_read_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give all that loads the H100's or H200's own tables one set of them, instead of reading them anew."""
    if request.path.relative_to(CHECKOUT).parts[1] not in SHARING:
        yield
        return
    import fastroof
    from fastroof.tables import table_set

    environment = ("FASTROOF_TABLES", "FASTROOF_TABLES_IMPORT", "FASTROOF_KEEP_PLANS")
    before = [os.environ.get(name) for name in environment]

    def sharing(load: Any) -> Any:
        def shared(gpu: Any, /, **options: Any) -> Tables | None:
            is_own = gpu in ("h100", "h200") and options.get("source") is None and not options.get("gpu")
            is_own = is_own and before == [os.environ.get(name) for name in environment]
            return _own_tables(load, gpu) if is_own else load(gpu, **options)

        return shared

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table_set, "load_gpu_tables", sharing(table_set.load_gpu_tables))
        patched.setattr(fastroof, "load_tables", sharing(fastroof.load_tables))
        yield
