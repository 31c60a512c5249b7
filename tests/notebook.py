"""Runs the guide that is a notebook, in plain Python: ``python -m tests.notebook`` writes its outputs anew.

Only what the cells answer is written, not the source: edit that in Jupyter or by hand. Nothing else is needed
than what fastroof itself needs.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

NOTEBOOK: Final = Path(__file__).resolve().parents[1] / "fastroof" / "notebook.ipynb"
MOST_PLAIN: Final = 150
"""Characters of a repr that are kept where there is a table too; longer ones give way to the type's name."""


def shown(value: Any) -> dict[str, list[str]]:
    """What a notebook keeps of a cell's last value, by MIME type, in lines."""
    kept = {"text/plain": repr(value)}
    if hasattr(value, "_repr_html_"):
        kept["text/html"] = value._repr_html_()
        if len(kept["text/plain"]) > MOST_PLAIN:
            kept["text/plain"] = f"<{type(value).__name__}>"
    return {kind: text.splitlines(keepends=True) for kind, text in sorted(kept.items())}


def cell_output(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell among the names of those before it; the outputs that a notebook would hold, uncounted."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "notebook", "exec"), names)
    if last is None:
        return []
    value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
    return [] if value is None else [{"data": shown(value), "metadata": {}, "output_type": "execute_result"}]


def executed(document: dict[str, Any]) -> dict[str, Any]:
    """A notebook with the outputs that its cells have when they are run in order from nothing."""
    names: dict[str, Any] = {"__name__": "notebook"}
    cells, count = [], 0
    for place, cell in enumerate(document["cells"], 1):
        made = {**cell, "id": f"cell-{place:02}"}
        if cell["cell_type"] == "code":
            count += 1
            outputs = cell_output("".join(cell["source"]), names)
            made["execution_count"] = count
            made["outputs"] = [{**output, "execution_count": count} for output in outputs]
        cells.append(made)
    return {**document, "cells": cells}


def written(document: dict[str, Any]) -> str:
    """The file's text, as Jupyter lays it out: keys sorted, one blank of indent."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    # tables that ship, whoever runs it
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "FASTROOF_TABLES": folder,
            "FASTROOF_TABLES_IMPORT": "never",
            "FASTROOF_KEEP_PLANS": "never",
        }
        text = written(executed(json.loads(NOTEBOOK.read_text(encoding="utf-8"))))
    NOTEBOOK.write_text(text, encoding="utf-8")
