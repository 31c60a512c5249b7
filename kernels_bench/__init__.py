"""Measures kernels on a GPU and writes the tables that fastroof reads; README.md in this folder is its map.

A grid lists the points to measure, a provider launches the kernel of a point, its result is checked
against float64 and timed, a journal keeps every row as it is measured, and journals become tables. Nothing
here predicts a time: fastroof does, from the tables.
"""
