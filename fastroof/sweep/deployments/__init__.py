"""Sweeps over deployments: which layout of a model on GPUs serves a load best, within limits."""

from fastroof.sweep.deployments.columns import COLUMNS
from fastroof.sweep.deployments.kind import DeploymentSweep
from fastroof.sweep.deployments.spec import Constraints, DeploymentSpec
from fastroof.sweep.deployments.summary import DeploymentSummary

__all__ = ["COLUMNS", "Constraints", "DeploymentSpec", "DeploymentSummary", "DeploymentSweep"]
