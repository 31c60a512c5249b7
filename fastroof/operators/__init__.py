"""Operators: what a step is made of."""
