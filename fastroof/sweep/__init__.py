"""Parameter sweeps: a spec of steps or deployments in, a file of the best out; or plans in, arrays out."""

from __future__ import annotations

from fastroof.sweep.cartesian import LIMITS, BestBatches, best_batches, decode_grid_us
from fastroof.sweep.deployments import Constraints, DeploymentSpec
from fastroof.sweep.engine import run_sweep
from fastroof.sweep.shards import Shard, merge_shards
from fastroof.sweep.spec import SweepSpec, load_spec
from fastroof.sweep.summary import BestStep, DeploymentSummary, SweepSummary
from fastroof.sweep.units import WorkUnit, work_units

__all__ = [
    "LIMITS",
    "BestBatches",
    "BestStep",
    "Constraints",
    "DeploymentSpec",
    "DeploymentSummary",
    "Shard",
    "SweepSpec",
    "SweepSummary",
    "WorkUnit",
    "best_batches",
    "decode_grid_us",
    "load_spec",
    "merge_shards",
    "run_sweep",
    "work_units",
]
