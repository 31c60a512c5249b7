"""Measuring: providers chosen, points timed and checked, a journal written as they finish."""
