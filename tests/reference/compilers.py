"""Compilers that run: one on the PATH may be a shim without its toolchain."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

_C = ("trial.c", "int main(void) { return 0; }\n", ("-o", "trial", "trial.c"))
_CPP = ("trial.cc", "int main() { return 0; }\n", ("-o", "trial", "trial.cc"))
_TRIALS = {
    "c++": _CPP,
    "g++": _CPP,
    "go": ("trial.go", "package main\n\nfunc main() {}\n", ("build", "-o", "trial", "trial.go")),
    "rustc": ("trial.rs", "fn main() {}\n", ("-o", "trial", "trial.rs")),
}


@cache
def failure(compiler: str) -> str | None:
    """Return why a compiler cannot build a program that does nothing, or None if it can."""
    if (path := shutil.which(compiler)) is None:
        return f"{compiler} is not installed"
    name, source, arguments = _TRIALS.get(compiler, _C)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        (Path(folder) / name).write_text(source)
        environment = {**os.environ, "GOCACHE": f"{folder}/cache", "GOPROXY": "off", "GOTOOLCHAIN": "local"}
        try:
            done = subprocess.run(
                [path, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"{path} does not run: {error}"
    output = " ".join(done.stderr.split())[-200:]
    return f"{path} does not run: {output or done.returncode}" if done.returncode else None


def find_compiler(*names: str) -> str:
    """Return the first of these compilers that runs, or skip the test."""
    failures = {name: failure(name) for name in names}
    if (found := next((name for name, why in failures.items() if why is None), None)) is None:
        pytest.skip("; ".join(map(str, failures.values())))
    return found


def links_a_library() -> bool:
    """Whether ``export_c`` can link its library here: its default linker is missing, or runs."""
    compiler = os.environ.get("CC", "cc")
    return shutil.which(compiler) is None or failure(compiler) is None
