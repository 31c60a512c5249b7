"""How good an interpolated answer is: what tables say of themselves, generic over operators.

:mod:`~fastroof.uncertainty.leave_one_out` predicts each measured node from its neighbours;
:mod:`~fastroof.uncertainty.leave_one_out` turns that into a relative standard error of any point. What is not
leave-one-out of the tables themselves is named there, with where it comes from.
:mod:`~fastroof.uncertainty.campaign` has what no table can say of itself: what another campaign measures.
"""
