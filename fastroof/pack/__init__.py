"""Measured rows -> packed tables: sorted, contiguous arrays that the compiled loops only interpolate in.

Everything outside the measured range is settled here, once, as padded nodes: each axis gets a node at
0 and one at :data:`SIZE_LIMIT`, and holes of a grid are filled. Two rules do it, both in the
coordinates of the operator's roofline ``B = t_launch + flops / peak + bytes / bandwidth``:

* *add*: ``T = T_edge + (B - B_edge)``, what the roofline adds. Decode attention.
* *hold*: ``T = T_edge * B / B_edge``, the edge's distance to the roofline. Everything else.

B is linear in m, n, k, batch and kv_len, and quadratic in q_len, so one far node carries a rule
exactly. Which of several neighbours fills a hole was decided on held-out points of the H100 tables
(hiding the outer 1, 2 and 3 measured nodes): decode takes the larger of the two additions along kv
and along batch (3.2, 4.2, 6.2 %; along kv alone 3.3, 4.7, 6.8; their mean 4.6, 6.8, 8.6), prefill
holds along batch at equal q_len (2.2, 3.0, 3.6 %; along q_len 8.7, 14.6, 19.0).
"""

from fastroof.pack.curves import PackedCurve, PackedGemm, pack_curve, pack_gemm
from fastroof.pack.grids import PackedGrid, grid_cells, pack_grid
from fastroof.pack.points import SIZE_LIMIT

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
