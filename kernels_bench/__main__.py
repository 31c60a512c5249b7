"""``python -m kernels_bench`` is the ``kernels-bench`` command."""

from kernels_bench.cli import main

if __name__ == "__main__":
    main()
