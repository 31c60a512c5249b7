"""What splitwise-sim's lookups of a plan are off: ``python -m fastroof.backends.splitwise_sim_example``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import fastroof
from fastroof.backends.splitwise_sim import splitwise_errors, write_splitwise_table

KV_LEN = 2048


def main() -> None:
    """Write a table, and measure what steps looked up in it are off."""
    plan = fastroof.compile_plan("llama-2-70b", "h100", engine="kernels", tp=8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "perf_model.csv"
        table = write_splitwise_table(plan, path, KV_LEN, model="llama2-70b")
        print(f"{plan}\n{path.stat().st_size:,} bytes, {len(table['tokens']):,} rows")
        for error in splitwise_errors(plan, table):
            print(f"{error.kind:24} {error.mean:6.1%} mean error, {error.worst:6.1%} max")


if __name__ == "__main__":
    main()
