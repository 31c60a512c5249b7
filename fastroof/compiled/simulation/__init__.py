"""The loops of a serving engine, request by request: a step costs O(1), whatever its batch.

A step's time depends on sums over its requests, which are kept up to date. ``state`` defines the arrays,
``slots`` what all engines share, ``scheduling`` makes a step, ``preemption`` removes requests early, and
``engine`` runs it all over time. ``prefix_cache`` holds blocks that requests share, ``tiers`` those that left
the GPU, ``lookup`` finds both for a request; ``sessions`` are requests that start after others.
``ranks`` and ``replicas`` run several engines, ``stages`` one with pipeline stages, ``pools`` engines that
prefill and others that decode, with ``transfers`` between them.
"""
