"""Results of a sweep and a browser, for the tests of reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastroof
from tests.reference.browser import Browser, installed
from tests.reference.made_results import deployments, write_deployments


@pytest.fixture(scope="module")
def rows(h100: fastroof.Tables) -> list[dict[str, Any]]:
    return list(deployments(h100))


@pytest.fixture(scope="module")
def deployed(
    h100: fastroof.Tables, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_deployments(tmp_path_factory.mktemp("report") / "results.parquet", rows, h100.content_hash)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed()
    if program is None:
        pytest.skip("no Chromium: install one, or name it in FASTROOF_CHROMIUM")
    with Browser(program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser
