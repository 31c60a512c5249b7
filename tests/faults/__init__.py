"""Calls that fail, disks that are full and processes that are killed: old or new, never half (README.md)."""
