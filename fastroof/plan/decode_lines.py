"""The lines of equal decodes of a plan: a table by batch size and kv_len, made when first needed."""

from __future__ import annotations

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled import decode_lines as loops
from fastroof.compiled import grids, steps
from fastroof.pack.keys import key_columns

__all__ = ["decode_lines"]


def decode_lines(arena: Floats) -> Floats | None:
    """Tabulate a plan's decode steps, see :mod:`fastroof.compiled.decode_lines`."""
    block = arena[int(arena[steps.DECODE_AT]) :]
    if block[grids.FORM] != grids.FORM_LATENCY:
        return None
    columns = key_columns(grids.x_axis_of(block))
    if columns is None:
        return None
    max_batch = int(min(arena[steps.MAX_TOKENS], arena[steps.MAX_SEQS]))
    # the row of batch size 0 is never read, and never written to: its pages cost nothing
    lines = np.zeros(loops.LINES_HEADER + 2 * len(columns.starts) * (max_batch + 1))
    lines[: loops.FIRST_KEY + 1] = (max_batch, len(columns.starts), columns.shift, columns.first)
    loops.fill_decode_lines(arena, columns.starts, lines)
    lines.flags.writeable = False
    return lines
