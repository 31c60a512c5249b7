"""Naive lookups and steps, written for reading: what the compiled loops are tested against."""
