"""The compiled loops: lookups, steps, sweeps. Of fastroof they import the names of array types alone.

Every loop takes its output arrays last, allocates nothing, raises nothing and clamps every index, so
that it never reads out of bounds whatever it is given. What it met on the way is OR-ed into a code
that its wrapper turns into an error, or into an origin.
"""
