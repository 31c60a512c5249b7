"""The guide that is a notebook answers what it shows, is small, and links to files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.notebook import MOST_PLAIN, NOTEBOOK, cell_output, executed, shown, written

MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def text() -> str:
    return NOTEBOOK.read_text(encoding="utf-8")


@pytest.mark.slow
def test_cells_run_in_order_and_answer_what_is_shown(text: str) -> None:
    """Who changed an answer on purpose: ``python -m tests.notebook``."""
    document = json.loads(text)
    again = executed(document)
    for cell, made in zip(document["cells"], again["cells"], strict=True):
        assert made == cell, "".join(cell["source"])
    assert written(again) == text


def test_it_is_small_and_of_text(text: str) -> None:
    assert len(text.encode()) < MOST_BYTES
    document = json.loads(text)
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    kinds = {
        kind for cell in document["cells"] for output in cell.get("outputs", ()) for kind in output["data"]
    }
    assert kinds == {"text/plain", "text/html"}


def test_it_shows_what_its_text_names(text: str) -> None:
    code = "".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code")
    for name in (
        "load_tables",
        "compile_plan",
        "decode_us",
        "prefill_us",
        "explain",
        "simulate",
        "recommend",
    ):
        assert f"{name}(" in code


def test_links_lead_to_files(text: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert links
    assert all((NOTEBOOK.parent / Path(link)).exists() for link in links)


def test_outputs_of_cells_are_recorded() -> None:
    cell = {"cell_type": "code", "id": "x", "metadata": {}, "source": ["1 + 1"]}
    [made] = executed({"cells": [cell]})["cells"]
    assert made["outputs"][0]["data"] == {"text/plain": ["2"]}
    assert cell_output("x = 1", {}) == cell_output("None", {}) == []


def test_a_long_repr_gives_way_to_a_table() -> None:
    class Rows:
        def __repr__(self) -> str:
            return "r" * (MOST_PLAIN + 1)

        def _repr_html_(self) -> str:
            return "<table>\n</table>"

    assert shown(Rows()) == {"text/html": ["<table>\n", "</table>"], "text/plain": ["<Rows>"]}
    assert shown("r" * 999)["text/plain"] == [repr("r" * 999)]
