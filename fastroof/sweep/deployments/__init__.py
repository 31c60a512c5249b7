"""Sweeps over deployments: find the layout of a model that serves a load best within limits."""

from fastroof.sweep.deployments.columns import COLUMNS
from fastroof.sweep.deployments.kind import DeploymentSummary, DeploymentSweep
from fastroof.sweep.deployments.nested_tables import Constraints
from fastroof.sweep.deployments.spec import DeploymentSpec

__all__ = ["COLUMNS", "Constraints", "DeploymentSpec", "DeploymentSummary", "DeploymentSweep"]
