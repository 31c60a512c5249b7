"""Sweeps over deployments: which layout of a model on GPUs serves a load best, within limits."""

from fastroof.sweep.deployments.spec import Constraints, DeploymentSpec

__all__ = ["Constraints", "DeploymentSpec"]
