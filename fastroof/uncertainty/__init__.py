"""Errors of lookups, generic over operators.

:mod:`~fastroof.uncertainty.leave_one_out` predicts each measured node from its neighbours, in bands along m
if there are any, and derives a relative standard error of any point.
:mod:`~fastroof.uncertainty.campaign` has the error between measurement campaigns.
"""
