"""One thread of an API server, shared by the requests that it handles at the same time."""

from __future__ import annotations

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit


@jit
def shared_ends(sent_us: Floats, takes_us: float, received_us: Floats, out: Floats) -> None:
    """Find when requests leave a thread that all of them share equally; each takes ``takes_us`` of it.

    ``received_us`` is scratch: the time that a request of the thread had got when each was sent.
    """
    count = len(sent_us)
    oldest = 0
    now_us = 0.0
    got_us = 0.0
    for i in range(count + 1):
        while oldest < i:
            # the oldest ends first, as all take the same
            end_us = now_us + (received_us[oldest] + takes_us - got_us) * (i - oldest)
            if i < count and end_us > sent_us[i]:
                break
            out[oldest] = end_us
            now_us = end_us
            got_us = received_us[oldest] + takes_us
            oldest += 1
        if i < count:
            if oldest < i:
                got_us += (sent_us[i] - now_us) / (i - oldest)
            else:
                got_us = 0.0
            now_us = sent_us[i]
            received_us[i] = got_us
