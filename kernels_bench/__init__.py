"""Measures kernels on a GPU and writes the tables that fastroof reads: not implemented yet."""
