"""Predict how long one LLM inference step takes on a GPU, from measured kernels.

Every public name and subpackage is imported when it is first used: ``import fastroof`` loads neither numba
nor torch.

Examples
--------
>>> import fastroof
>>> fastroof.compile_plan("llama-3.1-8b", "h100").engine
'vllm'
"""

from __future__ import annotations

from sys import platform as _platform

if _platform == "win32":
    raise ImportError("fastroof does not run on Windows itself: install it in WSL (wsl --install)")

from fastroof._version import __version__
from fastroof.errors import (
    BackendError,
    BatchError,
    FastroofError,
    GpuError,
    LookupInputError,
    MeasureError,
    MissingTableError,
    ModelError,
    PlanError,
    PlanRangeError,
    SimulationError,
    StoppedError,
    SweepError,
    TableError,
    TraceError,
    UnsupportedModelError,
)

# importing typing takes ten times as long as this whole module
TYPE_CHECKING = False

__all__ = [
    "BackendError",
    "BatchError",
    "FastroofError",
    "Fleet",
    "GpuError",
    "GpuSpec",
    "Lookup",
    "LookupInputError",
    "Lora",
    "MeasureError",
    "MissingTableError",
    "ModelError",
    "ModelSpec",
    "PlanError",
    "PlanRangeError",
    "Pool",
    "Simulation",
    "SimulationError",
    "SpeculativeDecoding",
    "StepBatch",
    "StepPlan",
    "StepTimes",
    "StoppedError",
    "SweepError",
    "TableError",
    "Tables",
    "Trace",
    "TraceError",
    "UnsupportedModelError",
    "Workload",
    "__version__",
    "capacity",
    "compile_plan",
    "compile_plans",
    "fit",
    "gpu_names",
    "load_gpu",
    "load_model",
    "load_tables",
    "load_trace",
    "model_names",
    "numba_decode",
    "numba_step",
    "recommend",
    "recommend_shared",
    "run_sweep",
    "simulate",
]

if TYPE_CHECKING:
    from fastroof import (  # isort: skip
        backends as backends, bench as bench, compat as compat, config as config,
        engines as engines, evidence as evidence, judging as judging, load as load,
        memory as memory, models as models, operators as operators, plan as plan,
        report as report, run as run, serving as serving, simulation as simulation,
        sweep as sweep, tables as tables, traces as traces, uncertainty as uncertainty,
    )  # fmt: skip
    from fastroof.backends.numba_callers import numba_decode, numba_step
    from fastroof.config import GpuSpec, gpu_names, load_gpu
    from fastroof.models import ModelSpec, load_model, model_names
    from fastroof.models.lora import Lora
    from fastroof.plan import StepPlan, compile_plan, compile_plans
    from fastroof.run import StepBatch, StepTimes
    from fastroof.serving import SpeculativeDecoding, fit
    from fastroof.simulation import Fleet, Pool, Simulation, Trace, Workload, load_trace, simulate
    from fastroof.simulation.capacity import capacity
    from fastroof.sweep import recommend, recommend_shared, run_sweep
    from fastroof.tables import Lookup, Tables, load_tables
else:
    # Hidden from type checkers: they accept any attribute of a module with __getattr__.
    _MODULE_OF = {
        "Fleet": "simulation",
        "GpuSpec": "config",
        "Lookup": "tables",
        "Lora": "models.lora",
        "ModelSpec": "models",
        "Pool": "simulation",
        "Simulation": "simulation",
        "SpeculativeDecoding": "serving",
        "StepBatch": "run",
        "StepPlan": "plan",
        "StepTimes": "run",
        "Tables": "tables",
        "Trace": "simulation",
        "Workload": "simulation",
        "capacity": "simulation.capacity",
        "compile_plan": "plan",
        "compile_plans": "plan",
        "fit": "serving",
        "gpu_names": "config",
        "load_gpu": "config",
        "load_model": "models",
        "load_tables": "tables",
        "load_trace": "simulation",
        "model_names": "models",
        "numba_decode": "backends.numba_callers",
        "numba_step": "backends.numba_callers",
        "recommend": "sweep",
        "recommend_shared": "sweep",
        "run_sweep": "sweep",
        "simulate": "simulation",
    }

    _PACKAGES = (
        "backends", "bench", "compat", "config", "engines", "evidence", "judging", "load", "memory", "models",
        "operators", "plan", "report", "run", "serving", "simulation", "sweep", "tables", "traces",
        "uncertainty",
    )  # fmt: skip

    def __getattr__(name):
        module = _MODULE_OF.get(name)
        if module is None and name not in _PACKAGES:
            from difflib import get_close_matches

            close = get_close_matches(name, [*__all__, *_PACKAGES], n=5)
            hint = f"did you mean {', '.join(close)}?" if close else "dir(fastroof) lists all"
            raise AttributeError(f"module 'fastroof' has no attribute {name!r}; {hint}")
        from importlib import import_module

        if module is None:
            return import_module(f"fastroof.{name}")
        value = getattr(import_module(f"fastroof.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*__all__, *_PACKAGES})
