"""Families of models: a file each, which says what its config.json means; found by its ``FAMILIES``."""
