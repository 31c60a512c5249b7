"""Adapters against the real programs, from a checkout: one script a program."""
