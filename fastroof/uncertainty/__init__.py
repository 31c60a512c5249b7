"""Errors of lookups, generic over operators.

:mod:`~fastroof.uncertainty.leave_one_out` predicts each measured node from its neighbours and derives a
relative standard error of any point, :mod:`~fastroof.uncertainty.band_errors` does it for bands along m, and
:mod:`~fastroof.uncertainty.campaign` has the error between measurement campaigns.
"""
