"""Parameter sweeps over plans: a spec in, a file of the best steps out; or plans in, arrays out."""

from __future__ import annotations

from fastroof.sweep.cartesian import LIMITS, BestBatches, best_batches, decode_grid_us
from fastroof.sweep.engine import run_sweep
from fastroof.sweep.spec import SweepSpec, load_spec
from fastroof.sweep.summary import BestStep, SweepSummary

__all__ = [
    "LIMITS",
    "BestBatches",
    "BestStep",
    "SweepSpec",
    "SweepSummary",
    "best_batches",
    "decode_grid_us",
    "load_spec",
    "run_sweep",
]
