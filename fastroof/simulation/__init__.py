"""Simulation of a serving engine, request by request: workloads, scheduling, results.

Names are imported on first use: reading a trace needs no compiled loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "Autoscaler",
    "EngineSettings",
    "Fleet",
    "KvTier",
    "Link",
    "Pool",
    "Simulation",
    "Trace",
    "Workload",
    "load_trace",
    "simulate",
    "write_trace",
]

if TYPE_CHECKING:
    from fastroof.simulation.autoscaling import Autoscaler
    from fastroof.simulation.deployment import simulate
    from fastroof.simulation.fleet import Fleet, Pool
    from fastroof.simulation.kv_tiers import KvTier
    from fastroof.simulation.pools import Link
    from fastroof.simulation.settings import EngineSettings
    from fastroof.simulation.simulation import Simulation
    from fastroof.traces.trace import Trace
    from fastroof.traces.trace_files import load_trace
    from fastroof.traces.trace_writing import write_trace
    from fastroof.traces.workload import Workload
else:
    # Hidden from type checkers, for which a module with __getattr__ has every name.
    _MODULE_OF = {
        "Autoscaler": "simulation.autoscaling",
        "EngineSettings": "simulation.settings",
        "Fleet": "simulation.fleet",
        "KvTier": "simulation.kv_tiers",
        "Link": "simulation.pools",
        "Pool": "simulation.fleet",
        "Simulation": "simulation.simulation",
        "Trace": "traces.trace",
        "Workload": "traces.workload",
        "load_trace": "traces.trace_files",
        "simulate": "simulation.deployment",
        "write_trace": "traces.trace_writing",
    }

    def __getattr__(name):
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'fastroof.simulation' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"fastroof.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
