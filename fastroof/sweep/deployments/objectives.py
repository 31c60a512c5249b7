"""Objectives of sweeps over deployments: their columns, and what the energy of a deployment needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastroof.columns import Column
from fastroof.config import load_gpu

RATES: Final = ("tokens_per_s_per_gpu", "tokens_per_s_per_user")
OBJECTIVES: Final = (*RATES, "cost", "goodput", "energy")
"""In the order of the compiled loops' codes; they maximize tokens/s for those that they do not know."""

MINIMIZED: Final = ("cost", "energy")
"""Objectives of which less is better."""

JOULES: Final = Column(
    "joules_per_token", "float", "J", "energy of all GPUs per output token, idle time too", 0
)
"""The column that results have with the objective ``energy``."""

OBJECTIVE_COLUMNS: Final = {
    "cost": "cost_per_million_tokens",
    "goodput": "tokens_per_s",
    "energy": JOULES.name,
}
"""Columns of the objectives that are not columns themselves."""


def energy_problems(
    modes: Sequence[str], gpus: Sequence[str], has_drafts: bool, has_histogram: bool
) -> list[str]:
    """Return why the objective ``energy`` does not go with a spec's other keys."""
    unknown = [gpu for gpu in gpus if not load_gpu(gpu).tdp_w]
    problems = {
        "objective: 'energy' needs mode 'aggregated', whose steps it is estimated from": (
            "disaggregated" in modes
        ),
        "objective: 'energy' does not go with speculation: the power of drafts is unknown": has_drafts,
        "histogram: values of the objective 'energy' are not counted": has_histogram,
        f"objective: 'energy' needs [power] in the gpu.toml of {', '.join(unknown)}": bool(unknown),
    }
    return [problem for problem, applies in problems.items() if applies]
