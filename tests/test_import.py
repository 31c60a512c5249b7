"""`import fastroof` is quick, quiet and light, and every public name is there when asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import fastroof
from fastroof import errors

CHECKOUT = Path(__file__).resolve().parents[1]
HEAVY = ("numba", "llvmlite", "torch", "numpy", "pyarrow", "pydantic", "typer", "rich", "matplotlib")
LIMIT_MS = 60


def python(code: str) -> str:
    """What a fresh interpreter prints, run in the checkout, with every warning an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_is_quiet_and_loads_nothing_heavy() -> None:
    loaded = python(
        "import sys; before = set(sys.modules); import fastroof; print(*set(sys.modules) - before)"
    )
    modules = {name.partition(".")[0] for name in loaded.split()}
    assert "fastroof" in modules
    assert modules.isdisjoint(HEAVY)


def test_listing_the_names_loads_nothing_heavy() -> None:
    loaded = python("import sys, fastroof; dir(fastroof), fastroof.__all__; print(*sys.modules)").split()
    assert set(loaded).isdisjoint(HEAVY)


def test_on_windows_import_names_wsl_in_one_line() -> None:
    code = """
import sys
sys.platform = "win32"
try:
    import fastroof
except ImportError as error:
    print(error)
"""
    assert python(code) == "fastroof does not run on Windows itself: install it in WSL (wsl --install)\n"


def test_import_takes_less_than_60_ms() -> None:
    # of a processor, which other tests may be waiting for too
    timed = "import time; t = time.process_time(); import fastroof; print((time.process_time() - t) * 1e3)"
    fastest_ms = min(float(python(timed)) for _ in range(5))
    assert fastest_ms < LIMIT_MS


def test_gpus_and_models_load_without_numba() -> None:
    loaded = python(
        "import sys, fastroof; fastroof.load_gpu('h100'); fastroof.model_names(); print(*sys.modules)"
    )
    assert set(loaded.split()).isdisjoint({"numba", "torch", "pyarrow", "pydantic"})


@pytest.mark.parametrize("name", fastroof.__all__)
def test_public_name_is_there(name: str) -> None:
    assert name in dir(fastroof)
    value = getattr(fastroof, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__name__ == name
        assert value.__doc__


def test_subpackages_are_imported_when_they_are_used() -> None:
    loaded = python(
        "import sys, fastroof; print('fastroof.serving' in sys.modules); fastroof.serving.estimate"
    )
    assert loaded.split() == ["False"]
    assert "serving" in dir(fastroof)


def test_its_listed_names_are_public_ones() -> None:
    listed = set(dir(fastroof))
    assert listed > set(fastroof.__all__)
    assert all(inspect.ismodule(getattr(fastroof, name)) for name in listed - set(fastroof.__all__))


def test_a_name_is_looked_up_once() -> None:
    first = fastroof.load_gpu
    assert vars(fastroof)["load_gpu"] is first


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from fastroof import *", names)
    assert set(fastroof.__all__) <= set(names)


def test_every_error_is_public() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert len(raised) > 15
    assert raised <= set(fastroof.__all__)


def test_an_unknown_name_suggests_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'load_table'; did you mean load_tables"):
        fastroof.load_table  # noqa: B018


def test_version_is_the_installed_one() -> None:
    try:
        installed = version("fastroof")
    except PackageNotFoundError:
        pytest.skip("fastroof is on the path, not installed")
    assert installed == fastroof.__version__
