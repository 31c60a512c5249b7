"""Small kernels between GEMMs and attention, copies and empty launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Bools
from kernels_bench.operators.gemm import COMPILE_S
from kernels_bench.operators.operator import Columns, Limits, MeasuredOperator, ModelShapes, Values

ELEMENTWISE_BYTES: Final[dict[str, int]] = {
    "rmsnorm_residual": 8,
    "rope": 4,
    "silu_and_mul": 6,
    "kv_write": 4,
    "fp8_quantise": 3,
    "copy": 4,
    "launch": 0,
}
"""Compulsory bytes an element by kind, of ``m`` rows of ``width`` elements, all bf16 but for fp8 outputs.

- ``rmsnorm_residual``: width is the hidden size; input and residual are read and both written.
- ``rope``: width is (query heads + KV heads) x head_dim on one GPU, rotated in place.
- ``silu_and_mul``: width is that of the output; gate and up are read.
- ``kv_write``: width is 2 x KV heads x head_dim, keys and values into a bf16 cache.
- ``fp8_quantise``: width is that of the input; one scale for all of it.
- ``copy``: one row; device to device, so 2 x width bytes are copied.
- ``launch``: an empty kernel; m = width = io_bytes = 1.
"""

NOT_COMPILED: Final = ("kv_write", "copy", "launch")


def elementwise_bytes(kind: str, m: int, width: int) -> int:
    """Compulsory bytes that an elementwise kernel reads and writes, at least 1.

    >>> elementwise_bytes("silu_and_mul", 2, 1024), elementwise_bytes("launch", 1, 1)
    (12288, 1)
    """
    return max(1, ELEMENTWISE_BYTES[kind] * m * width)


class ElementwiseOperator(MeasuredOperator):
    """Kernels that stream rows: norm, rope, activation, KV write, quantisation, copy; and an empty one."""

    name = "elementwise"
    launch_us = 3.0
    compile_s = COMPILE_S
    shape_columns = ("width",)
    model_shapes: ClassVar[ModelShapes] = {
        "hidden": lambda model, tp: [(model.hidden,)],
        "activations": lambda model, tp: [(model.share(tp).intermediate,)],
        "rope": lambda model, tp: [(model.rope_width(tp),)],
        "kv": lambda model, tp: [(model.kv_width(tp),)],
    }
    limits: ClassVar[Limits] = {"max_io_bytes": lambda values: float(values["io_bytes"])}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": tuple(ELEMENTWISE_BYTES)}

    def given_columns(self) -> tuple[str, ...]:
        """All but ``io_bytes``."""
        return tuple(name for name in self.columns if name != "io_bytes")

    def completed(self, given: Values) -> Values:
        """``io_bytes``, of the kind."""
        return {**given, "io_bytes": elementwise_bytes(given["kind"], given["m"], given["width"])}

    def impossible(self, given: Values) -> str | None:
        """Copies have one row, an empty launch has nothing."""
        if reason := super().impossible(given):
            return reason
        kind, m, width = given["kind"], given["m"], given["width"]
        if kind == "launch" and (m, width) != (1, 1):
            return f"an empty launch has m 1 and width 1, not m {m} and width {width}"
        if kind == "copy" and m != 1:
            return f"a copy has one row, not m {m}"
        return None

    def rotates(self, columns: Columns) -> Bools:
        """An empty launch has no inputs."""
        return np.asarray(columns["kind"] != "launch", np.bool_)

    def compiled_shape(self, values: Values) -> tuple[Any, ...] | None:
        """What Inductor compiles vLLM's layers for."""
        return None if values["kind"] in NOT_COMPILED else (values["kind"], values["width"])

    def line(self, values: Values) -> tuple[Any, ...]:
        """One width; copies have one row each, and their line is along the width."""
        return () if values["kind"] == "copy" else (values["width"],)

    def checked_dtype(self, values: Values) -> str:
        """A copy is exact, an fp8 output is not."""
        return {"copy": "exact", "fp8_quantise": "fp8"}.get(values["kind"], "bf16")

    def has_result(self, values: Values) -> bool:
        """An empty launch writes nothing."""
        return bool(values["kind"] != "launch")

    def reference_work(self, values: Values) -> float:
        """Of every element."""
        return float(values["m"]) * float(values["width"])


OPERATORS: Final = (ElementwiseOperator(),)
