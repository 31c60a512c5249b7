"""The compiled loops: lookups, steps, sweeps. The only other module of fastroof they import is ``arrays``.

Every loop takes its output arrays last, allocates nothing, raises nothing and clamps every index, so
that it never reads out of bounds on any input. Problems on the way are OR-ed into a code that its
wrapper turns into an error or an origin.
"""
