"""Checks of measured tables: what is wrong in a file, which rows disagree, how well they cover others."""
