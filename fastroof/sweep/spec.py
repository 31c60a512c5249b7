"""What the specs of all sweeps ask for: models, their precision, and the tables that time them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from fastroof.models.execution import DTYPES, KV_DTYPES
from fastroof.sweep.spec_values import (
    NAMES_SCHEMA,
    SIZES_SCHEMA,
    checked_choices,
    checked_names,
    model_name,
)

__all__ = ["DATASHEET", "MAX_ROWS", "Names", "Sizes", "SweepSpec"]

DATASHEET: Final = "datasheet"
"""Value of ``tables`` that asks for the datasheet model."""

MAX_ROWS: Final = 20_000_000
"""Most rows that a sweep writes."""

_CHOICES: Final = {"dtype": DTYPES, "kv_dtype": KV_DTYPES}

Sizes = Annotated[tuple[int, ...], WithJsonSchema(SIZES_SCHEMA)]
Names = Annotated[tuple[str, ...], WithJsonSchema(NAMES_SCHEMA)]


class SweepSpec(BaseModel):
    """Keys that every kind of sweep has. :func:`fastroof.sweep.load_spec` makes specs, and words errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    models: Names = Field(description="a list of model names, or paths of config.json files")
    tables: str | None = Field(
        None,
        description=f"a folder of measured tables, or {DATASHEET!r} to do without; default each GPU's own",
    )
    source: str | dict[str, str] | None = Field(
        None,
        description="name of one source of the tables, or a table of operators and theirs; default the "
        "best-ranked ones",
    )
    method: Literal["roofline", "linear_mfu", "nearest", "floor"] = Field(
        "roofline", description="one of roofline, linear_mfu, nearest, floor"
    )
    dtype: Names = Field(("bf16",), description=f"a list out of {', '.join(DTYPES)}")
    kv_dtype: Names = Field(("bf16",), description=f"a list out of {', '.join(KV_DTYPES)}")

    @field_validator("tables", mode="before")
    @classmethod
    def _take_path(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("models", mode="before")
    @classmethod
    def _check_models(cls, value: Any) -> tuple[str, ...]:
        return checked_names(value, model_name, "model names or paths of config.json files")

    @field_validator("dtype", "kv_dtype", mode="before")
    @classmethod
    def _check_dtypes(cls, value: Any, info: ValidationInfo) -> tuple[Any, ...]:
        return checked_choices(value, _CHOICES[str(info.field_name)])
