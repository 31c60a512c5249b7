"""``fastroof doctor``: what is installed here, which tables and caches there are, and what is broken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import typer

from fastroof._version import __version__
from fastroof.cli.gpu_tables import source_files
from fastroof.cli.options import Json
from fastroof.cli.output import print_facts, print_json, print_line, print_records, print_table

EPILOG: Final = """\b
JSON: one object: versions, processor (name, processors, usable), tables ({gpu: [source]}), caches (list of
folder, bytes, loops, plans, trusted, why_not), compiled_loops (of the wheel: number, level of x86-64,
why_not: why they are not used, else ""), extras ({extra: {package: version or null}}), environment, problems
(list of sentences).
"""

PACKAGES: Final = ("numba", "llvmlite", "numpy", "pyarrow", "pydantic", "rich", "typer")
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+).*;.*extra\s*==\s*['\"]([^'\"]+)['\"]")


def doctor(as_json: Json = False) -> None:
    """Check this installation: versions, tables, caches, extras."""
    from fastroof.compiled.trusted_files import cache_roots
    from fastroof.host import usable_processors

    tables, problems = _tables()
    caches = [_cache(root) for root in cache_roots()]
    problems += [
        f"what is kept in {cache['folder']} is not used: {cache['why_not']}; take the right to write from "
        "others there, or let FASTROOF_CACHE_DIR name a folder of your own"
        for cache in caches
        if not cache["trusted"]
    ]
    versions = {"fastroof": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        version = _installed(package)
        versions[package] = version or "missing"
        if version is None:
            problems.append(f"{package} is not installed: pip install {package}")
    answer: dict[str, Any] = {
        "versions": versions,
        "processor": {
            "name": platform.processor() or platform.machine(),
            "processors": os.cpu_count(),
            "usable": usable_processors(),
        },
        "tables": tables,
        "caches": caches,
        "compiled_loops": _compiled_loops(),
        "extras": _extras(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("FASTROOF_", "NUMBA_")) and "TOKEN" not in name
        },
        "problems": problems,
    }
    if as_json:
        print_json(answer)
    else:
        _print(answer)
    if problems:
        raise typer.Exit(1)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tables() -> tuple[dict[str, list[str]], list[str]]:
    """Sources by GPU, of which nothing is read, and what is wrong with their folders."""
    from fastroof import gpu_names
    from fastroof.load.by_name import has_imported
    from fastroof.load.rows import ENDINGS

    found: dict[str, list[str]] = {}
    problems = []
    for gpu in gpu_names():
        for file in source_files(gpu):
            sources = found.setdefault(gpu, [])
            if file.parent.name not in sources:
                sources.append(file.parent.name)
            has_tables = any(path.suffix in ENDINGS for path in file.parent.iterdir())
            if not has_tables and not has_imported(file):
                problems.append(f"{file.parent} has no tables: import them again, or remove the folder")
    return found, problems


def _compiled_loops() -> dict[str, Any]:
    """Return the compiled loops of the wheel; numba may be missing or broken."""
    try:
        from fastroof.compiled.code_cache import code_version
        from fastroof.compiled.shipped_loops import shipped_loops
    except ImportError as reason:
        return {"number": 0, "level": "", "why_not": f"numba cannot be imported: {reason}"}
    return shipped_loops(code_version())._asdict()


def _cache(root: Path) -> dict[str, Any]:
    """What a folder of the cache holds, and whether it may be used; one that is not there may be."""
    from fastroof.compiled.trusted_files import UntrustedFolder, open_trusted

    why_not = ""
    try:
        os.close(open_trusted(root))
    except UntrustedFolder as reason:
        why_not = str(reason)
    except FileNotFoundError:
        pass
    except OSError as reason:
        why_not = reason.strerror or str(reason)
    sizes = {"loops": 0, "plans": 0}
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            kind = Path(name).suffixes[:1]
            sizes["loops"] += ".loop" in name
            sizes["plans"] += kind == [".plan"]
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return {"folder": str(root), "bytes": total, **sizes, "trusted": not why_not, "why_not": why_not}


def _extras() -> dict[str, dict[str, str | None]]:
    """Packages of each extra, and which release of them is here."""
    try:
        requirements = importlib.metadata.requires("fastroof") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, str | None]] = {}
    for requirement in requirements:
        if read := _REQUIREMENT.match(requirement):
            extras.setdefault(read[2], {})[read[1]] = _installed(read[1])
    return extras


def _print(answer: dict[str, Any]) -> None:
    processor, loops = answer["processor"], answer["compiled_loops"]
    facts = {
        **answer["versions"],
        "processor": f"{processor['name']}, {processor['usable']} of {processor['processors']} may be used",
        "compiled loops": f"compiled at first use: {loops['why_not']}"
        if loops["why_not"]
        else f"{loops['number']} of the wheel, for {loops['level']}",
    }
    print_facts(facts)
    print_line()
    print_table(
        ("gpu", "sources"),
        [(gpu, ", ".join(sources)) for gpu, sources in answer["tables"].items()],
        left=("gpu", "sources"),
    )
    print_line()
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "cache": lambda cache: cache["folder"],
        "MiB": lambda cache: f"{cache['bytes'] / 2**20:,.1f}",
        "loops": lambda cache: str(cache["loops"]),
        "plans": lambda cache: str(cache["plans"]),
        "trusted": lambda cache: "yes" if cache["trusted"] else f"no: {cache['why_not']}",
    }
    print_records(answer["caches"], columns, left=("cache", "trusted"))
    print_line()
    print_table(
        ("extra", "missing", "to install it"),
        [_extra_cells(extra, packages) for extra, packages in answer["extras"].items()],
        left=("extra", "missing", "to install it"),
    )
    if answer["environment"]:
        print_line()
        print_facts(answer["environment"])
    print_line()
    for problem in answer["problems"] or ["nothing is broken"]:
        print_line(problem)


def _extra_cells(extra: str, packages: dict[str, str | None]) -> tuple[str, str, str]:
    missing = [name for name, version in packages.items() if version is None]
    return extra, ", ".join(missing) or "-", f"pip install 'fastroof[{extra}]'" if missing else "-"
