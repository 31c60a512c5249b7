"""Serving engines: what each adds to its kernels, its scheduling and memory rules, and the evidence.

A TOML in ``profiles`` describes an engine in a range of versions, one in ``recipes`` how a public benchmark
launched it. Only the standard library is needed.
"""

from __future__ import annotations

from fastroof.engines.costs import CostForm, LayerCost, NotFitted, StepCosts
from fastroof.engines.data_parallel import DataParallel
from fastroof.engines.deployments import Recipe, recipe_for, recipes_of
from fastroof.engines.front_end import FrontEnd
from fastroof.engines.kernel_choices import ExpertRows, KernelChoices, MixedAttention, OperatorKernel
from fastroof.engines.load import engine_names, engine_of_version, load_engine, serving_engines
from fastroof.engines.memory import KV_RESERVATIONS, KvMemory
from fastroof.engines.prefill_graphs import PrefillGraphs
from fastroof.engines.profile import EngineProfile
from fastroof.engines.scheduling import STEP_ORDERS, Scheduling
from fastroof.engines.values import ServingErrors

__all__ = [
    "KV_RESERVATIONS",
    "STEP_ORDERS",
    "CostForm",
    "DataParallel",
    "EngineProfile",
    "ExpertRows",
    "FrontEnd",
    "KernelChoices",
    "KvMemory",
    "LayerCost",
    "MixedAttention",
    "NotFitted",
    "OperatorKernel",
    "PrefillGraphs",
    "Recipe",
    "Scheduling",
    "ServingErrors",
    "StepCosts",
    "engine_names",
    "engine_of_version",
    "load_engine",
    "recipe_for",
    "recipes_of",
    "serving_engines",
]
