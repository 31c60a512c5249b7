"""Operators: one file each, with all that fastroof knows of a family of kernels.

:mod:`~fastroof.operators.registry` finds them: a new file is all that a new operator takes. They load
without numba; what looks up is imported when it is first used.
"""
