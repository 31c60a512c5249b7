"""Shipped tables of aiconfigurator-core; ``python -m fastroof.load.shipped`` converts them again.

The choice keeps within 15 MB of Parquet: H100 and H200 with all three engines, B200 and GB200 with the
engines of most published measurements. The rest of the package comes with the extra ``tables``.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.config.paths import bench_data_root
from fastroof.load.aiconfigurator import convert_aiconfigurator
from fastroof.load.package_rows import PACKAGE_FILES


class ShippedSource(NamedTuple):
    """One shipped source."""

    system: str
    backend: str
    version: str
    rank: int


SHIPPED: Final = (
    ShippedSource("h100_sxm", "vllm", "0.24.0", 100),
    ShippedSource("h100_sxm", "sglang", "0.5.14", 120),
    ShippedSource("h100_sxm", "trtllm", "1.3.0rc20", 110),
    ShippedSource("h200_sxm", "vllm", "0.24.0", 100),
    ShippedSource("h200_sxm", "sglang", "0.5.14", 120),
    ShippedSource("h200_sxm", "trtllm", "1.3.0rc20", 110),
    ShippedSource("b200_sxm", "vllm", "0.24.0", 100),
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
    return [
        convert_aiconfigurator(
            source.system,
            source.backend,
            source.version,
            bench_data,
            root,
            overwrite=True,
            files=list(files),
            rank=source.rank,
        )
        for source in sources
    ]


if __name__ == "__main__":
    for written in convert_shipped(bench_data_root()):
        print(written)
