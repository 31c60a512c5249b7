"""Plan options: defined once, in PlanOptions."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import fastroof
from fastroof.errors import PlanError
from fastroof.plan.options import OPTIONS, PlanOptions


def test_compile_plan_takes_every_option_with_its_default() -> None:
    parameters = inspect.signature(fastroof.compile_plan).parameters
    names = [name for name in parameters if name not in ("model", "gpu", "tables", "curves", "runtime")]
    assert names == list(OPTIONS)
    assert {name: parameters[name].default for name in names} == {
        name: option.default for name, option in OPTIONS.items()
    }
    documented = inspect.getdoc(fastroof.compile_plan) or ""
    assert not [name for name in OPTIONS if name not in documented.split("Returns\n")[0]]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_help_text_and_refuses_an_object(name: str) -> None:
    assert OPTIONS[name].metadata["help"].endswith(".")
    options = PlanOptions(**{name: object()})
    with pytest.raises(PlanError, match=name):
        options.checked().layout  # noqa: B018 -- made when it is asked for


def test_options_import_nothing_that_a_help_text_does_not_need() -> None:
    code = "import sys, fastroof.plan.options; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"numpy", "fastroof.models", "fastroof.engines", "fastroof.tables"} & set(loaded.split())
