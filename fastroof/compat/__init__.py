"""Other methods of predicting step times, reproduced exactly: their lookups, averages and fallbacks.

What fastroof itself answers is in the package's public names; these modules are for comparing with it,
and for those who come from the programs they reproduce.
"""
