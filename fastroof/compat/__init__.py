"""Other methods of predicting step times, reproduced exactly with their lookups, averages and fallbacks.

fastroof's own predictions are in the package's public names; these modules serve comparison, and users of
the programs that they reproduce.
"""
