"""Operators as they are measured, a file each; :mod:`~kernels_bench.operators.registry` finds them."""
