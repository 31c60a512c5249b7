"""What is measured: a point is one kernel at one size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastroof.operators.registry import OPERATORS


@dataclass(frozen=True)
class Point:
    """One kernel at one size, named by the columns of its operator's table."""

    # A key of :data:`fastroof.operators.registry.OPERATORS`: gemm, attention_prefill, attention_decode, ...
    operator: str
    # Every key and axis column of that schema but the latency: ``{"dtype": "bf16", "m": 64, ...}``.
    values: Mapping[str, Any]
    # Which points a time budget drops first: the highest number. 0 is never dropped before 1.
    priority: int = field(default=0, compare=False)
    # The part of the grid it belongs to; a line of ``kernels-bench plan``.
    group: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """Stable text that names the point: what resuming and merging go by."""
        return f"{self.operator} {json.dumps(dict(self.values), sort_keys=True)}"

    @property
    def family(self) -> str:
        """The points that share one correctness check: same operator, dtypes and head shape."""
        keys = {c.name: self.values[c.name] for c in OPERATORS[self.operator].keys}
        return f"{self.operator} {json.dumps(keys, sort_keys=True)}"
