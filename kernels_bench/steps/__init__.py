"""Whole steps as ground truth: a hand-written forward pass, timed as one CUDA graph, into steps.csv."""
