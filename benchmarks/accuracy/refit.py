"""Fit packaged profiles and write the result into their files: ``python -m benchmarks.accuracy refit``.

Costs, choices, the fit and its evidence are replaced; [errors], comments and the order of keys stay.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.accuracy.calibration import calibrate
from benchmarks.accuracy.rows import shipped_rows
from fastroof.atomic_files import write_whole
from fastroof.config import gpu_names
from fastroof.engines import EngineProfile, engine_names, load_engine
from fastroof.evidence.profile_file import profile_text
from fastroof.tables import load_tables

PROFILES: Final = Path(str(resources.files("fastroof.engines") / "profiles"))


def with_fit(text: str, profile: EngineProfile) -> str:
    """Put a profile's costs, choices, fit and evidence into the text of its file."""
    found = profile_text(profile)
    parts = {name: _part(found, name) for name in ("costs", "fit", "evidence")}
    for name in parts:
        text = re.sub(rf"(?m)^\[+{name}[\].](.*\n)((?!\[).*\n)*", "", text)
    first = re.search(r"(?m)^\[", text)
    at = first.start() if first else len(text)
    text = text[:at] + (parts["costs"] + "\n" if parts["costs"] else "") + text[at:]
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


def refit(name: str, folder: Path = PROFILES) -> Path:
    """Fit a packaged profile to the shipped runs of all GPUs, and write its file into a folder."""
    rows = [row for gpu in gpu_names() for row in shipped_rows(gpu)]
    gpus = sorted({row.gpu for row in rows if row.engine_profile.name == name})
    tables = {gpu: load_tables(gpu) for gpu in gpus}
    command = f"fastroof calibrate --engine {name} --gpu all"
    found = calibrate(rows, tables, name, command=command).profile
    path = folder / f"{name}.toml"
    write_whole(path, with_fit((PROFILES / path.name).read_text("utf-8"), found))
    return path


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Profiles.  [default: all that have a fit]")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write to.", show_default=False)
    ] = PROFILES,
) -> None:
    """Fit packaged profiles and write their files, into the package by default."""
    output.mkdir(parents=True, exist_ok=True)
    for name in names or [name for name in engine_names() if load_engine(name).fit is not None]:
        print(refit(name, output), flush=True)
