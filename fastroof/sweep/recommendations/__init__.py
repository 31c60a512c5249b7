"""Recommend a deployment for a model on some GPUs within limits, with its engine's commands and files."""

from __future__ import annotations

from fastroof.sweep.recommendations.candidates import layouts_to_try
from fastroof.sweep.recommendations.deployment import Deployment, TokenPrice, deployment_of
from fastroof.sweep.recommendations.recommend import (
    Recommendation,
    deployment_question,
    recommend,
    recommend_for_spec,
)
from fastroof.sweep.recommendations.shared_budget import GpuShare, SharedBudget, recommend_shared
from fastroof.sweep.recommendations.traffic import Traffic, is_shared_spec

__all__ = [
    "Deployment",
    "GpuShare",
    "Recommendation",
    "SharedBudget",
    "TokenPrice",
    "Traffic",
    "deployment_of",
    "deployment_question",
    "is_shared_spec",
    "layouts_to_try",
    "recommend",
    "recommend_for_spec",
    "recommend_shared",
]
