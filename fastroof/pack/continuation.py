"""How fast a decode table's lines rise where they go on past their last measured nodes.

In multiples of what the roofline B adds, and at least that:

* along batch the *chord*, what the whole line from its first node to its last has added over what B added
  there. Sequences are alike: once they fill a GPU each costs the same, which the line has and B has not (the
  work of a short sequence is not its bytes).
* along kv_len the mean of 1 and the chord, but never more than latency / B at the edge: tokens come at the
  bandwidth that the line is still on its way to, and latency / B falls on the way.

Tried on the H100's decode tables of three engines, their outer 1, 2 and 3 nodes hidden. MAPE along batch,
SGLang's of head_dim 128: the chord 3.3, 6.6, 12.1 %; the last segment 4.0, 6.2, 8.0, and of vLLM's, whose
kernel changes at batch 1024, 15.7 where the chord has 4.8; B alone 37, 44, 47; latency / B held 19, 28, 36.
Along kv_len, 2 nodes of every head shape of the three: 6.8, 7.0, 10.5; the chord held under latency / B 7.1,
6.3, 12.1; B alone 11.4, 11.8, 16.7.
"""

from __future__ import annotations

import numpy as np

from fastroof.arrays import Floats

__all__ = ["slopes_above"]


def slopes_above(latency_us: Floats, bound_us: Floats, *, is_length: bool) -> Floats:
    """Rise of each line past its last known node, over that of B."""
    known = ~np.isnan(latency_us)
    line = np.arange(latency_us.shape[1])
    first = np.argmax(known, axis=0)
    last = len(known) - 1 - np.argmax(known[::-1], axis=0)
    edge_us, edge_bound_us = latency_us[last, line], bound_us[last, line]
    added_us = edge_bound_us - bound_us[first, line]
    is_line = (last > first) & (added_us > 0.0)
    chord = np.where(is_line, (edge_us - latency_us[first, line]) / np.where(is_line, added_us, 1.0), 1.0)
    slope = np.minimum(0.5 * (1.0 + chord), edge_us / edge_bound_us) if is_length else chord
    return np.fmax(slope, 1.0)
