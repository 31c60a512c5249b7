"""What tests of C share: a module's plans exported, their library loaded, a program that is to survive."""

from __future__ import annotations

import ctypes

import pytest

from fastroof.backends.c import export_c
from tests.reference.compilers import links_a_library


@pytest.fixture(scope="module")
def exported(plans, tmp_path_factory):
    """The module's own plans."""
    shared = None if links_a_library() else False
    return export_c(plans, tmp_path_factory.mktemp("exported"), shared=shared)


@pytest.fixture(scope="module")
def loaded(exported):
    """The shared library, without types of its functions."""
    path = next((path for path in exported.files if path.suffix in (".so", ".dylib")), None)
    if path is None:
        pytest.skip("no C compiler links the shared library")
    return ctypes.CDLL(str(path))
