"""The commands of ``kernels-bench``, a module each; :mod:`kernels_bench.cli` lists them."""
