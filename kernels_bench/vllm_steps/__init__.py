"""Whole steps of vLLM's own engine, with dummy weights: ``kernels-bench steps``."""
