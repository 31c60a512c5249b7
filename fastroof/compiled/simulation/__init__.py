"""The loop of a fleet: pools of engines that serve a trace, step by step.

``records`` names its state, ``run`` is the loop. ``engine`` is one engine over time, ``scheduler`` what one
of its lanes computes next, ``decodes`` runs of decode steps between two events; ``router``, ``scaling`` and
``transfers`` are what happens between engines.
"""
