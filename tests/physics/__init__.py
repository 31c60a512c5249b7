"""What physics allows a kernel and a step to take, and the list of where the shipped tables disagree.

:mod:`.kernels` checks measured tables, :mod:`.steps` compiled plans; each check returns its violations as
arrays. :mod:`.ledger` settles them against violations.toml, entry by entry.
"""
