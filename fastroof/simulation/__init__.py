"""Simulation of a serving engine, request by request: workloads, scheduling, results.

Names are imported on first use: reading a trace needs no compiled loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "AutoscaledSimulation",
    "Autoscaler",
    "DisaggregatedSimulation",
    "EngineSettings",
    "KvTier",
    "Link",
    "Simulation",
    "Trace",
    "Workload",
    "hit_rate",
    "load_trace",
    "simulate",
    "simulate_disaggregated",
    "write_trace",
]

if TYPE_CHECKING:
    from fastroof.simulation.autoscaled_simulation import AutoscaledSimulation
    from fastroof.simulation.autoscaling import Autoscaler
    from fastroof.simulation.deployment import simulate
    from fastroof.simulation.disaggregated import DisaggregatedSimulation, simulate_disaggregated
    from fastroof.simulation.kv_tiers import KvTier
    from fastroof.simulation.pools import Link
    from fastroof.simulation.settings import EngineSettings
    from fastroof.simulation.simulation import Simulation
    from fastroof.simulation.trace import Trace
    from fastroof.simulation.trace_columns import hit_rate
    from fastroof.simulation.trace_files import load_trace
    from fastroof.simulation.trace_writing import write_trace
    from fastroof.simulation.workload import Workload
else:
    # Hidden from type checkers, for which a module with __getattr__ has every name.
    _MODULE_OF = {
        "AutoscaledSimulation": "autoscaled_simulation",
        "Autoscaler": "autoscaling",
        "DisaggregatedSimulation": "disaggregated",
        "EngineSettings": "settings",
        "KvTier": "kv_tiers",
        "Link": "pools",
        "Simulation": "simulation",
        "Trace": "trace",
        "Workload": "workload",
        "hit_rate": "trace_columns",
        "load_trace": "trace_files",
        "simulate": "deployment",
        "simulate_disaggregated": "disaggregated",
        "write_trace": "trace_writing",
    }

    def __getattr__(name):
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'fastroof.simulation' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"fastroof.simulation.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
