"""Speed of fastroof on this machine: workloads, baselines, timing and a plot."""

from __future__ import annotations

from fastroof.bench.lookups import lookup_workloads
from fastroof.bench.report import BenchReport, report_document, run_workloads
from fastroof.bench.timing import Machine, Measured, measure, this_machine
from fastroof.bench.workload import Baseline, Setup, Workload, new_setup
from fastroof.bench.workloads import WORKLOADS

__all__ = [
    "WORKLOADS",
    "Baseline",
    "BenchReport",
    "Machine",
    "Measured",
    "Setup",
    "Workload",
    "lookup_workloads",
    "measure",
    "new_setup",
    "report_document",
    "run_workloads",
    "this_machine",
]
