"""Shipped tables of aisimulate; ``python -m fastroof.load.shipped`` makes them again.

The choice keeps bench_data within 16 MB: H100 and H200 with all three engines, B200 and GB200 with the
engines of most published measurements. The rest of the package comes with the extra ``tables``; its sources
are listed here in advance, so that the first question about a GPU converts only the tables that it reads.
``python -m fastroof.load.shipped list`` lists them again, after any change of a conversion.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.atomic_files import write_whole
from fastroof.config.paths import bench_data_root
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.load.aiconfigurator import SYSTEMS, import_aiconfigurator, write_imported
from fastroof.load.by_name import planned_import
from fastroof.load.family_checks import flag_source, siblings_of
from fastroof.load.package_import import LISTED, import_system
from fastroof.load.package_rows import PACKAGE_FILES
from fastroof.load.sources import PROVENANCE_FILE, load_sources


class ShippedSource(NamedTuple):
    """One shipped source; ``only`` some operators of it, and why they come before another version's."""

    system: str
    backend: str
    version: str
    rank: int
    only: Collection[str] = ()
    reason: str = ""


SHIPPED: Final = (
    ShippedSource(
        "h100_sxm",
        "vllm",
        "0.24.0",
        99,
        ("attention_prefill", "attention_decode"),
        "kernels of 0.25.0, whose short calls jitter there: decodes fall five times as often as a size grows",
    ),
    ShippedSource("h100_sxm", "vllm", "0.25.0", 100),
    ShippedSource("h100_sxm", "sglang", "0.5.14", 120),
    ShippedSource("h100_sxm", "trtllm", "1.3.0rc20", 110),
    ShippedSource("h200_sxm", "vllm", "0.25.0", 100),
    ShippedSource("h200_sxm", "sglang", "0.5.14", 120),
    ShippedSource("h200_sxm", "trtllm", "1.3.0rc20", 110),
    ShippedSource("b200_sxm", "vllm", "0.25.0", 100),
    ShippedSource("b200_sxm", "trtllm", "1.3.0rc20", 110),
    ShippedSource("gb200", "trtllm", "1.3.0rc20", 110),
)
"""All shipped sources, by GPU."""


LEFT_OUT: Final = (
    "csa_prefill", "csa_decode", "hca_prefill", "hca_decode", "msa_prefill", "msa_decode", "sparse_part",
)  # fmt: skip
"""Operators that do not ship, for size: attention of DeepSeek-V4 and MiniMax-M3."""


def convert_shipped(
    bench_data: Path, root: Path | None = None, systems: Collection[str] | None = None
) -> list[Path]:
    """Convert the shipped sources, replacing existing ones."""
    files = dict.fromkeys(file.file for operator, file in PACKAGE_FILES if operator not in LEFT_OUT)
    sources = [source for source in SHIPPED if systems is None or source.system in systems]
    written = []
    for source in sources:
        system, backend, version, rank, only, reason = source
        imported = import_aiconfigurator(system, backend, version, root, list(files))
        if only:
            about = next(iter(imported.tables.values())).provenance
            operators = {name: {**about["operators"][name], "first": reason} for name in only}
            about = {**about, "operators": operators}
            tables = {name: replace(imported.tables[name], provenance=about) for name in only}
            imported = replace(imported, tables=tables)
        written.append(write_imported(imported, bench_data, overwrite=True, rank=rank, codec="brotli"))
    for folder in written:
        measured = load_sources(folder)
        flag_source(measured, siblings_of(measured, [load_sources(folder.parent)]))
    return written


def list_package(folder: Path, gpus: Collection[str] = tuple(SYSTEMS.values())) -> list[Path]:
    """Convert the installed package's tables of each GPU, and list their sources in a file per GPU."""
    written = []
    for gpu in gpus:
        planned = planned_import(gpu)
        if planned is None:
            raise TableError(f"no installed package has tables of {gpu}")
        with tempfile.TemporaryDirectory() as unfinished:
            place, shipped = Path(unfinished), bench_data_root() / gpu
            names = import_system(planned.data, planned.system, gpu, place, made_from="", shipped=shipped)
            sources = {name: read_toml(place / name / PROVENANCE_FILE, TableError) for name in names}
        listed = {"made_from": planned.inputs, "sources": sources}
        written.append(folder / f"{gpu}.json")
        write_whole(written[-1], json.dumps(listed, indent=1) + "\n")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Convert the shipped tables, and list the package's sources."
    )
    parser.add_argument(
        "what", nargs="?", choices=["all", "list"], default="all", help="list: no table is converted"
    )
    made = [] if parser.parse_args().what == "list" else convert_shipped(bench_data_root())
    for path in (*made, *list_package(LISTED)):
        print(path)
