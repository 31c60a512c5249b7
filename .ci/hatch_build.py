"""Build hook: adds the compiled loops in the folder that FASTROOF_LOOPS names to the wheel, and tags it.

They are object code for one minor version of Python on Linux, x86-64 or aarch64, which Numba links into the
process. No shared library is among them, and they need no newer glibc than numba's own wheels do.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class CompiledLoops(BuildHookInterface):
    """Without FASTROOF_LOOPS, or with an empty folder, the wheel stays pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change what is built."""
        folder = Path(os.environ.get("FASTROOF_LOOPS") or os.devnull)
        if version == "editable" or not folder.is_dir() or not any(folder.iterdir()):
            return
        python = next(iter(sys_tags()))
        build_data["force_include"][str(folder)] = "fastroof/compiled/loops"
        build_data["pure_python"] = False
        build_data["tag"] = f"{python.interpreter}-{python.abi}-manylinux_2_17_{platform.machine()}"
