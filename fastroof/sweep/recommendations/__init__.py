"""Recommend a deployment for a model on some GPUs within limits, with its engine's commands and files."""

from __future__ import annotations

from fastroof.sweep.recommendations.candidates import layouts_to_try
from fastroof.sweep.recommendations.deployment import Deployment, TokenPrice, deployment_of
from fastroof.sweep.recommendations.recommend import (
    Recommendation,
    deployment_question,
    recommend,
    recommend_for_spec,
    save_recommendation,
)

__all__ = [
    "Deployment",
    "Recommendation",
    "TokenPrice",
    "deployment_of",
    "deployment_question",
    "layouts_to_try",
    "recommend",
    "recommend_for_spec",
    "save_recommendation",
]
