"""What a sweep over steps evaluates; and loading the spec of any sweep, checked whole."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fastroof.config import load_gpu
from fastroof.engines import engine_names, load_engine
from fastroof.models.layout import TP_SIZES
from fastroof.sweep.checks import (
    NAMES_SCHEMA,
    SIZES_SCHEMA,
    checked_choices,
    checked_names,
    count_problem,
    model_name,
    read_values,
    validated,
)
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.grids import expand_sizes

__all__ = ["DATASHEET", "MAX_EVALUATIONS", "MAX_ROWS", "SweepSpec", "load_spec"]

MAX_BATCH_SIZE: Final = 2**16
MAX_KV_LEN: Final = 2**28
MAX_EVALUATIONS: Final = 10**11
"""Most steps that a sweep times: about an hour on one core."""
MAX_ROWS: Final = 20_000_000
"""Most rows that a sweep writes."""

DATASHEET: Final = "datasheet"
"""Value of ``tables`` that asks for the datasheet model."""

DTYPES: Final = ("bf16", "fp8", "fp8_block")
KV_DTYPES: Final = ("bf16", "fp8")
_CHOICES: Final[dict[str, tuple[Any, ...]]] = {"tp": TP_SIZES, "dtype": DTYPES, "kv_dtype": KV_DTYPES}
_AXES: Final = ("models", "tp", "dtype", "kv_dtype", "batch_size", "kv_len")
_LARGEST: Final = {"batch_size": MAX_BATCH_SIZE, "kv_len": MAX_KV_LEN}

Sizes = Annotated[tuple[int, ...], WithJsonSchema(SIZES_SCHEMA)]
Names = Annotated[tuple[str, ...], WithJsonSchema(NAMES_SCHEMA)]


class SweepSpec(BaseModel):
    """What a sweep evaluates, and within which limits.

    Every combination of model, tp, dtype, kv_dtype, batch_size and kv_len is one decode step.
    :func:`load_spec` makes it and words its errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gpu: str = Field("h100", description="a GPU's name, or the path of a gpu.toml")
    tables: str | None = Field(
        None,
        description=f"a folder of measured tables, or {DATASHEET!r} to do without; default the GPU's own",
    )
    source: str | dict[str, str] | None = Field(
        None,
        description="name of one source of the tables, or a table of operators and theirs; default the "
        "best-ranked ones",
    )
    models: Names = Field(description="a list of model names, or paths of config.json files")
    tp: Sizes = Field((1,), description=f"a list out of {', '.join(map(str, TP_SIZES))}")
    dtype: Names = Field(("bf16",), description=f"a list out of {', '.join(DTYPES)}")
    kv_dtype: Names = Field(("bf16",), description=f"a list out of {', '.join(KV_DTYPES)}")
    batch_size: Sizes = Field(
        description="a list of sizes, or a range like {start = 1, stop = 512, step = 1}"
    )
    kv_len: Sizes = Field(
        description="a list of lengths, or a range like {start = 1024, stop = 131072, factor = 2}"
    )
    runtime: str = Field(
        "kernels", description=f"one of {', '.join(engine_names())}, or the path of a profile's .toml file"
    )
    method: Literal["roofline", "linear_mfu", "nearest", "floor"] = Field(
        "roofline", description="one of roofline, linear_mfu, nearest, floor"
    )
    tpot_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="a number of ms above 0, or no such key for no limit"
    )
    report_kv_len: int = Field(
        4096, ge=1, le=MAX_KV_LEN, description=f"a whole number from 1 to {MAX_KV_LEN:,}"
    )
    keep: Literal["best", "all"] = Field("best", description="'best' or 'all'")
    with_error: bool = Field(False, description="true or false")

    @field_validator("gpu", "tables", mode="before")
    @classmethod
    def _take_path(cls, value: Any) -> Any:
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

    @field_validator("models", mode="before")
    @classmethod
    def _check_models(cls, value: Any) -> tuple[str, ...]:
        return checked_names(value, model_name, "model names or paths of config.json files")

    @field_validator("tp", "dtype", "kv_dtype", mode="before")
    @classmethod
    def _check_choices(cls, value: Any, info: ValidationInfo) -> tuple[Any, ...]:
        return checked_choices(value, _CHOICES[str(info.field_name)])

    @field_validator("batch_size", "kv_len", mode="before")
    @classmethod
    def _check_sizes(cls, value: Any, info: ValidationInfo) -> tuple[int, ...]:
        return expand_sizes(value, _LARGEST[str(info.field_name)])

    @model_validator(mode="after")
    def _check_counts(self) -> SweepSpec:
        _check_count(self, _AXES, "evaluations", MAX_EVALUATIONS, "")
        if self.keep == "all":
            _check_count(self, _AXES, "rows", MAX_ROWS, ", or keep = 'best'")
        _check_count(self, [axis for axis in _AXES if axis != "batch_size"], "rows", MAX_ROWS, "")
        return self

    @model_validator(mode="after")
    def _check_error(self) -> SweepSpec:
        if self.with_error and self.method != "roofline":
            raise ValueError(f"with_error goes with method = 'roofline', got {self.method!r}")
        return self

    @property
    def num_plans(self) -> int:
        """Combinations of model, tp, dtype and kv_dtype, whether or not a plan can be made of them."""
        return math.prod(len(axis) for axis in (self.models, self.tp, self.dtype, self.kv_dtype))


def load_spec(
    spec: SweepSpec | DeploymentSpec | Mapping[str, Any] | str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> SweepSpec | DeploymentSpec:
    """Load what to sweep, and check it whole.

    Parameters
    ----------
    spec : SweepSpec, DeploymentSpec, mapping, str, Path or None
        A spec, its keys and values, or the path of a TOML file with them. None is the packaged spec.
        In a file, a gpu, tables, runtime or model that starts with ``./`` or ``../`` lies beside the file.
        With ``isl`` it is a sweep over deployments, otherwise one over steps.
    changes : mapping, optional
        Keys and values that take the place of the spec's; constraints are added to the spec's.

    Returns
    -------
    SweepSpec or DeploymentSpec
        With ranges expanded.

    Raises
    ------
    SweepError
        Naming every wrong key, what was given and what would do.

    Examples
    --------
    >>> load_spec({"models": ["llama-3.1-8b"], "batch_size": [1, 64], "kv_len": 4096}).tp
    (1,)
    >>> load_spec({"models": ["llama-3.1-8b"], "isl": 4000, "osl": 500, "concurrency": [1, 64]}).mode
    ('aggregated',)
    """
    if isinstance(spec, SweepSpec | DeploymentSpec):
        if not changes:
            return spec
        spec = spec.model_dump()
    if spec is None:
        text = (resources.files("fastroof.sweep") / "default.toml").read_text(encoding="utf-8")
        values: dict[Any, Any] = tomllib.loads(text)
        where = "packaged spec"
    else:
        values, where = read_values(spec)
    for key, value in (changes or {}).items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), Mapping) and key == "constraints"
        values[key] = {**values[key], **value} if both else value
    if "isl" in values:
        return validated(DeploymentSpec, values, where)
    return validated(SweepSpec, values, where)


def _check_count(spec: SweepSpec, axes: Sequence[str], what: str, most: int, hint: str) -> None:
    count_problem({axis: len(getattr(spec, axis)) for axis in axes}, what, most, hint)
