"""Operators: one file per family of kernels, with everything fastroof knows about it.

:mod:`~fastroof.operators.registry` finds them, so a new operator needs one new file. Operators import without
numba; compiled loops are imported by the first lookup.
"""
