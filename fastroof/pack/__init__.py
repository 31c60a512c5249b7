"""Packed tables: measured rows as sorted, contiguous arrays, in which compiled loops only interpolate.

Everything outside the measured range becomes padded nodes once: each axis gets a node at 0 and one at
:data:`SIZE_LIMIT`, and holes of a grid are filled. Two rules, in the coordinates of the operator's roofline
``B = t_launch + flops / peak + bytes / bandwidth``:

* *line*: ``T = T_edge + slope (B - B_edge)``, with slopes of :mod:`fastroof.pack.grids`: along batch
  the slope of the line so far, along kv_len halfway between that and the slope of B. Decode attention.
* *hold*: ``T = T_edge * B / B_edge``, the edge's distance to the roofline. Everything else.

Below a first node of a size above 2, lines fall by :func:`fastroof.pack.curves.carried_below`. Where tables
start at 1 or 2 the node at 0 only serves cells: decode falls with slope 1, not below its smallest latency.

B is linear in m, n, k, batch and kv_len, and quadratic in q_len, so one far node carries a rule
exactly. A hole beyond both of its lines takes their mean (decode), or holds along batch at equal q_len
(prefill; hiding the outer 1, 2 and 3 measured nodes 2.2, 3.0, 3.6 %; along q_len 8.7, 14.6, 19.0).

The line rule was chosen on the H100's decode tables of three engines. On 12 other tables (H200, B200, A100,
L40S) hiding the outer 1, 2 and 3 nodes leaves 5.4, 15.3, 15.4 % (median 2.0, 5.5, 8.3) along batch, 12.5,
15.6, 18.0 along kv_len and 9.0, 12.6, 16.1 along the staircase; the slope of B instead leaves 33.0, 39.0,
41.5, 16.7, 20.4, 22.7 and 13.3, 17.2, 20.6.
"""

from fastroof.compiled.layout import PackedCurve, PackedGemm
from fastroof.pack.curves import SIZE_LIMIT, pack_curve, pack_gemm
from fastroof.pack.grids import PackedGrid, grid_cells, pack_grid

__all__ = [
    "SIZE_LIMIT",
    "PackedCurve",
    "PackedGemm",
    "PackedGrid",
    "grid_cells",
    "pack_curve",
    "pack_gemm",
    "pack_grid",
]
