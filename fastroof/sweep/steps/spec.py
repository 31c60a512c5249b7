"""Which decode steps to sweep, and within which limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fastroof.config import load_gpu
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.engines import engine_names, load_engine
from fastroof.ranges import expand_sizes
from fastroof.sweep.spec import MAX_ROWS, Sizes, SweepSpec
from fastroof.sweep.spec_values import count_problem
from fastroof.sweep.units import Split

__all__ = ["MAX_EVALUATIONS", "StepSpec"]

MAX_BATCH_SIZE: Final = 2**16
MAX_KV_LEN: Final = 2**28
MAX_EVALUATIONS: Final = 10**11
"""Most steps that a sweep times: about an hour on one core."""

_AXES: Final = ("models", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "batch_size", "kv_len")
_LARGEST: Final = {"batch_size": MAX_BATCH_SIZE, "kv_len": MAX_KV_LEN}


class StepSpec(SweepSpec):
    """Which decode steps a sweep times, within which limits, and what it keeps.

    Every combination of models, tp, pp, dp, ep, routing, dtype, kv_dtype, batch_size and kv_len is one
    decode step of one rank; layouts that a model cannot have are left out and counted.
    :func:`fastroof.sweep.load_spec` makes it and words its errors.
    """

    gpu: str = Field("h100", description="a GPU's name, or the path of a gpu.toml")
    batch_size: Sizes = Field(
        description="a list of sizes, or a range like {start = 1, stop = 512, step = 1}"
    )
    kv_len: Sizes = Field(
        description="a list of lengths, or a range like {start = 1024, stop = 131072, factor = 2}"
    )
    runtime: str = Field(
        DEFAULT_RUNTIME,
        description=f"one of {', '.join(engine_names())}, or the path of a profile's .toml file",
    )
    tpot_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="a number of ms above 0, or no such key for no limit"
    )
    report_kv_len: int = Field(
        4096, ge=1, le=MAX_KV_LEN, description=f"a whole number from 1 to {MAX_KV_LEN:,}"
    )
    keep: Literal["best", "all"] = Field("best", description="'best' or 'all'")
    with_error: bool = Field(False, description="true or false")

    @field_validator("gpu", mode="before")
    @classmethod
    def _take_gpu_path(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("gpu")
    @classmethod
    def _check_gpu(cls, gpu: str) -> str:
        load_gpu(gpu)
        return gpu

    @field_validator("runtime", mode="before")
    @classmethod
    def _check_runtime(cls, runtime: Any) -> str:
        load_engine(runtime)
        return str(runtime)

    @field_validator("batch_size", "kv_len", mode="before")
    @classmethod
    def _check_sizes(cls, value: Any, info: ValidationInfo) -> tuple[int, ...]:
        return expand_sizes(value, _LARGEST[str(info.field_name)])

    @model_validator(mode="after")
    def _check_counts(self) -> StepSpec:
        _check_count(self, _AXES, "evaluations", MAX_EVALUATIONS, "")
        if self.keep == "all":
            _check_count(self, _AXES, "rows", MAX_ROWS, ", or keep = 'best'")
        _check_count(self, [axis for axis in _AXES if axis != "batch_size"], "rows", MAX_ROWS, "")
        return self

    @model_validator(mode="after")
    def _check_error(self) -> StepSpec:
        if self.with_error and self.method != "roofline":
            raise ValueError(f"with_error goes with method = 'roofline', got {self.method!r}")
        return self


def _check_count(spec: StepSpec, axes: Sequence[str], what: str, most: int, hint: str) -> None:
    sizes = {axis: len(getattr(spec, axis)) for axis in axes}
    asked = {axis: size for axis, size in sizes.items() if size > 1 or axis not in Split._fields}
    count_problem(asked, what, most, hint)
