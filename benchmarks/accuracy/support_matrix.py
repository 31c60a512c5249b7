"""The support matrices of aisimulate and aiconfigurator-core: which models they estimate where, and why not.

The packages (Apache-2.0, https://github.com/ai-dynamo) have ``systems/support_matrix/*.csv`` and the models'
config.json, aisimulate also ``systems/fpe_support_matrix/*.csv`` of whole forward passes. Only these files
are read; neither package is imported.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.errors import FastroofError, TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.models import ModelSpec, load_model

PASS: Final = "PASS"
VERDICTS: Final = (PASS, "HYBRID_PASS", "FAIL", "FRAMEWORK_INCOMPATIBLE", "HW_INCOMPATIBLE")
"""Statuses from best to worst; a combination has its best over the versions of an engine."""

MATRIX: Final = "systems/support_matrix"
FORWARD_MATRIX: Final = "systems/fpe_support_matrix"
"""Matrix of whole forward passes, which has no modes."""
CONFIGS: Final = "model_configs"
_PACKAGES: Final = ("aisimulate", "aiconfigurator-core")
_CONFIG: Final = "_config.json"
_HF_QUANT: Final = "_hf_quant"
_AGGREGATED: Final = "agg"
_MODE: Final = "Mode"
_COLUMNS: Final = ("HuggingFaceID", "System", "Backend", "Status", "ErrMsg")

_ERROR: Final = re.compile(r"\b[A-Za-z_]*(?:Error|Exception): (.*)")
_WANT_OF_DATA: Final = re.compile(r"no answerable perf data|Unsupported \w+ quant mode|but no compatible \w+")


class Combination(NamedTuple):
    """A model on a GPU and engine."""

    model: str
    gpu: str
    engine: str
    verdict: str
    why: str = ""

    @property
    def wants_data(self) -> bool:
        """Return whether data is missing, or a part is only modelled."""
        return self.verdict == "HYBRID_PASS" or (
            self.verdict == "FAIL" and _WANT_OF_DATA.search(self.why) is not None
        )


def package_of(root: str | Path | None = None) -> str:
    """Return the name and version of the package in a folder, by the metadata next to it."""
    root = installed_root() if root is None else Path(root)
    names = [name for name in _PACKAGES if root.name == name.replace("-", "_") or root.name == f"{name}_core"]
    for name in names:
        for entry in root.parent.glob(f"{name.replace('-', '_')}-*.dist-info"):
            return f"{name} {entry.name.removesuffix('.dist-info').partition('-')[2]}"
    return root.name


def read_support_matrix(root: str | Path | None = None, matrix: str = MATRIX) -> tuple[Combination, ...]:
    """Read the status of every model, GPU and engine."""
    root = installed_root() if root is None else Path(root)
    files = sorted((root / matrix).glob("*.csv"))
    if not files:
        raise TableError(f"{root / matrix} holds no support matrix: no CSV file")
    best: dict[tuple[str, str, str], Combination] = {}
    for file in files:
        for one in _rows(file):
            key = (one.gpu, one.model, one.engine)
            if key not in best or VERDICTS.index(one.verdict) < VERDICTS.index(best[key].verdict):
                best[key] = one
    return tuple(best[key] for key in sorted(best))


def _rows(file: Path) -> Iterator[Combination]:
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            for cell in csv.DictReader(opened):
                if any(cell.get(name) is None for name in _COLUMNS) or cell["Status"] not in VERDICTS:
                    raise TableError(f"{file}: no row of a support matrix: {dict(cell)!s:.200}")
                if cell.get(_MODE, _AGGREGATED) == _AGGREGATED:
                    gpu = SYSTEMS.get(cell["System"], cell["System"])
                    why = "" if cell["Status"] == PASS else _last_error(cell["ErrMsg"])
                    yield Combination(cell["HuggingFaceID"], gpu, cell["Backend"], cell["Status"], why)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{file}: cannot be read as a support matrix: {error}") from None


def _last_error(message: str) -> str:
    """Return the last error of a traceback whose lines are separated by a literal \\n; else its last line."""
    lines = message.replace("\\n", "\n").splitlines()
    errors = [found[1] for line in lines if (found := _ERROR.search(line))]
    return (errors or lines or [""])[-1].strip()


def published_models(root: str | Path | None = None) -> dict[str, ModelSpec | FastroofError]:
    """Load every config.json of the package, with its quantisation file."""
    root = installed_root() if root is None else Path(root)
    models: dict[str, ModelSpec | FastroofError] = {}
    for file in sorted((root / CONFIGS).glob(f"*{_CONFIG}")):
        name = file.name.removesuffix(_CONFIG).replace("--", "/", 1)
        if name.endswith(_HF_QUANT):
            # read with the config.json next to it
            continue
        try:
            models[name] = load_model(str(file))
        except FastroofError as error:
            models[name] = error
    return models
