"""Readers of load generators' results: vLLM's and SGLang's benchmarks, aiperf, guidellm, ..."""

from __future__ import annotations

from fastroof.evidence.load_generators.files import GENERATORS, FoundRuns, read_runs
from fastroof.evidence.load_generators.runs import GeneratorRun

__all__ = ["GENERATORS", "FoundRuns", "GeneratorRun", "read_runs"]
