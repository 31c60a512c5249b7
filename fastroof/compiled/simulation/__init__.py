"""The loops of a serving engine, request by request: a step costs O(1), whatever its batch.

A step takes what sums over its requests say, and these are kept up to date: ``state`` names what an engine
remembers, ``scheduling`` makes a step, ``completion`` ends one, ``leaving`` takes requests out before their
end, ``records`` keeps what is answered, and ``engine`` lets them follow each other. ``block_pool`` holds
blocks that requests share; ``pooled_slots``, ``pooled_scheduling`` and ``pooled_engine`` are an engine over
it.
"""
