"""Fit packaged profiles again, and put what was found into their files: ``python -m``, with their names.

What a person wrote stays: comments, the order of keys. Costs, what rows chose, the fit and its evidence are
replaced.
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

from fastroof.atomic_files import write_whole
from fastroof.config import gpu_names
from fastroof.engines import EngineProfile, engine_names, load_engine
from fastroof.serving.evidence.calibration import calibrate
from fastroof.serving.evidence.profile_file import profile_text
from fastroof.serving.evidence.rows import shipped_rows
from fastroof.tables import load_tables

__all__ = ["refit", "with_fit"]


def with_fit(text: str, profile: EngineProfile) -> str:
    r"""Put a profile's costs, choices, fit and evidence into the text of its file.

    Examples
    --------
    >>> from fastroof.engines import CostForm, StepCosts
    >>> fitted = EngineProfile("mine", costs=StepCosts(step_us=5.0), fit=CostForm(("step_us",)))
    >>> print(with_fit('name = "mine" # ours\n\n[kernels]\ngemm_smoothing = "none"\n', fitted))
    name = "mine" # ours
    <BLANKLINE>
    [costs]
    step_us = 5.0
    <BLANKLINE>
    [kernels]
    fp8_scales = "dynamic"
    gemm_smoothing = "none"
    <BLANKLINE>
    [fit]
    costs = ["step_us"]
    outlier = 0.0
    <BLANKLINE>
    """
    found = profile_text(profile)
    parts = {name: _part(found, name) for name in ("costs", "errors", "fit", "evidence")}
    for name in parts:
        text = re.sub(rf"(?m)^\[+{name}[\].](.*\n)((?!\[).*\n)*", "", text)
    first = re.search(r"(?m)^\[", text)
    at = first.start() if first else len(text)
    top = "\n".join(part for part in (parts["costs"], parts["errors"]) if part)
    text = text[:at] + (top + "\n" if top else "") + text[at:]
    for key in ("gemm_smoothing", "fp8_scales"):
        value = getattr(profile.kernels, key)
        if re.search(rf"(?m)^{key} = ", text):
            text = re.sub(rf'(?m)^{key} = "\w+"', f'{key} = "{value}"', text)
        else:
            text = re.sub(r"(?m)^\[kernels\]\n", f'[kernels]\n{key} = "{value}"\n', text)
    below = "\n".join(part for part in (parts["fit"], parts["evidence"]) if part)
    return re.sub(r"\n{3,}", "\n\n", text.rstrip() + "\n\n" + below)


def _part(text: str, name: str) -> str:
    """All tables of a profile's part, as they are written."""
    return "".join(m[0] for m in re.finditer(rf"(?m)^\[+{name}[\].].*\n((?!\[).*\n)*", text))


def refit(name: str) -> Path:
    """Fit a packaged profile to the runs that ship, on all of their GPUs, and write its file."""
    rows = [row for gpu in gpu_names() for row in shipped_rows(gpu)]
    gpus = sorted({row.gpu for row in rows if row.engine_profile.name == name})
    tables = {gpu: load_tables(gpu) for gpu in gpus}
    command = f"fastroof calibrate --engine {name} --gpu all"
    found = calibrate(rows, tables, name, command=command).profile
    path = Path(str(resources.files("fastroof.engines") / "profiles" / f"{name}.toml"))
    write_whole(path, with_fit(path.read_text("utf-8"), found))
    return path


if __name__ == "__main__":
    for given in sys.argv[1:] or [name for name in engine_names() if load_engine(name).fit is not None]:
        sys.stdout.write(f"{refit(given)}\n")
