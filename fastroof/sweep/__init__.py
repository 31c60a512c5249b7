"""Parameter sweeps over plans: a spec in, the best step of each plan and length out, as Parquet."""

from __future__ import annotations

from fastroof.sweep.engine import run_sweep
from fastroof.sweep.spec import SweepSpec, load_spec
from fastroof.sweep.summary import BestStep, SweepSummary

__all__ = ["BestStep", "SweepSpec", "SweepSummary", "load_spec", "run_sweep"]
