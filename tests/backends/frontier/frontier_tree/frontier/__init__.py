"""A stand-in for Frontier's source tree, which no package index has.

Written for these tests after NetX-lab/Frontier (MIT): registering and calling predictors, what a request
counts in each cluster, the terms of ExecutionTime for dense layers, as in the files and commits that
tests/backends/interfaces/frontier.toml names; with their names, fields and units, and none of their code.
Left out: experts, events, transfers, memory, metrics, and most options.
"""
