"""Compile the loops of a wheel, for the checkout that this file is in: .ci/compiled_loops.py FOLDER [LEVEL].

For each level that this processor runs, or the one named, `fastroof warm` runs on an empty cache.
The loops that Python calls are shipped; the others are compiled into their callers. With those of x86-64-v3
comes the object file for C, which is for that level by default.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def compiled(level: str, scratch: Path) -> list[Path]:
    """Compile for a level in a folder, and return the files of the loops that Python calls."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FASTROOF_CACHE_DIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch / "none"),  # the home's cache may hold some
        "NUMBA_CPU_NAME": level,
        "NUMBA_CPU_FEATURES": "",
    }
    questions = [["-m", "fastroof", "warm"]]
    if level == "x86-64-v3":
        questions.append(["-c", "from fastroof.backends.c.objects import object_code; object_code()"])
    for question in questions:
        subprocess.run([sys.executable, *question], env=environment, check=True, stdout=subprocess.DEVNULL)
    # IR is compiled into callers
    return [path for path in sorted(scratch.glob("*/*.loop")) if "-IR-" not in path.name]


def main() -> None:
    """Write the loops, and what they are for, into a folder; nothing where no level is known."""
    from fastroof.compiled.shipped_loops import BUILT_WITH, compiler_versions, host_levels

    folder = Path(sys.argv[1])
    levels = host_levels() if platform.system() == "Linux" else ()
    if len(sys.argv) > 2:
        levels = tuple(level for level in levels if level == sys.argv[2])
    if not levels:
        return
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        found = list(pool.map(compiled, levels, (Path(scratch, level) for level in levels)))
        for loops in found:
            for path in loops:
                place = folder / path.parent.name
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
    for level, loops in zip(levels, found, strict=True):
        print(f"{level}: {len(loops)} loops")
    loops_a_level = sum(not path.name.startswith("object-") for path in found[0])
    built = {**compiler_versions(), "levels": levels, "loops": loops_a_level}
    (folder / BUILT_WITH).write_text(json.dumps(built) + "\n")


if __name__ == "__main__":
    main()
