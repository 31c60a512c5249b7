"""Parameter sweeps: a spec of steps, deployments or capacities in, a file out; or plans in, arrays out."""

from __future__ import annotations

from fastroof.sweep.best import best_deployments
from fastroof.sweep.capacities import CapacitySpec, CapacitySummary
from fastroof.sweep.deployments import Constraints, DeploymentSpec, DeploymentSummary
from fastroof.sweep.kinds import load_spec
from fastroof.sweep.recommendations import (
    Deployment,
    GpuShare,
    Recommendation,
    SharedBudget,
    TokenPrice,
    Traffic,
    deployment_of,
    deployment_question,
    is_shared_spec,
    recommend,
    recommend_for_spec,
    recommend_shared,
)
from fastroof.sweep.replay import Replay
from fastroof.sweep.run import run_sweep
from fastroof.sweep.steps import BestStep, StepSpec, StepSummary
from fastroof.sweep.steps.plan_batches import LIMITS, BestBatches, best_batches, decode_times_us
from fastroof.sweep.units import WorkUnit

__all__ = [
    "LIMITS",
    "BestBatches",
    "BestStep",
    "CapacitySpec",
    "CapacitySummary",
    "Constraints",
    "Deployment",
    "DeploymentSpec",
    "DeploymentSummary",
    "GpuShare",
    "Recommendation",
    "Replay",
    "SharedBudget",
    "StepSpec",
    "StepSummary",
    "TokenPrice",
    "Traffic",
    "WorkUnit",
    "best_batches",
    "best_deployments",
    "decode_times_us",
    "deployment_of",
    "deployment_question",
    "is_shared_spec",
    "load_spec",
    "recommend",
    "recommend_for_spec",
    "recommend_shared",
    "run_sweep",
]
