"""The process of a command line: ``python -m kernels_bench`` and the console script ``kernels-bench``."""

from __future__ import annotations

from fastroof.interrupts import end_at_once


def main() -> None:
    """Run the command line and end the process."""
    end_at_once()
    from kernels_bench.cli import main as run

    run()


if __name__ == "__main__":
    main()
