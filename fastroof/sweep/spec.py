"""What the specs of all sweeps ask for: models, their precision, and the tables that time them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fastroof.models import ModelSpec
from fastroof.models.execution import AUTO, DTYPES, KV_DTYPES, ROUTING, ROUTINGS
from fastroof.models.layout import ALL_TP_SIZES, SIZES_OF_TP
from fastroof.ranges import expand_sizes
from fastroof.sweep.spec_values import (
    NAMES_SCHEMA,
    SIZES_SCHEMA,
    checked_choices,
    checked_names,
    model_name,
)
from fastroof.sweep.units import Split

__all__ = ["DATASHEET", "MAX_ROWS", "Names", "Sizes", "SweepSpec"]

DATASHEET: Final = "datasheet"
"""Value of ``tables`` that asks for the datasheet model."""

MAX_ROWS: Final = 20_000_000
"""Most rows that a sweep writes."""

MAX_GPUS: Final = 1024
"""Largest size of a layout."""
_SIZES: Final = "a number, a list of numbers, or a range like {start = 1, stop = 8, factor = 2}"
_CHOICES: Final = {"dtype": (AUTO, *DTYPES), "kv_dtype": (AUTO, *KV_DTYPES), "routing": ROUTINGS}

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
    tp: Sizes = Field((1,), description=f"a list out of {SIZES_OF_TP}")
    pp: Sizes = Field((1,), description=f"pipeline stages, {_SIZES}")
    dp: Sizes = Field((1,), description=f"ranks of attention data parallelism in a replica, {_SIZES}")
    ep: Sizes = Field(
        (1,), description=f"groups of experts on GPUs of their own, out of the tp x dp of a stage, {_SIZES}"
    )
    routing: Names = Field(
        (ROUTING,), description=f"how tokens spread over experts, a list out of {', '.join(ROUTINGS)}"
    )
    dtype: Names = Field((AUTO,), description=f"a list out of {', '.join((AUTO, *DTYPES))}")
    kv_dtype: Names = Field((AUTO,), description=f"a list out of {', '.join((AUTO, *KV_DTYPES))}")

    allow_modelled: bool = Field(
        False,
        description="true or false: whether the datasheet model stands for kernels that nobody measured",
    )

    @property
    def splits(self) -> tuple[tuple[int, Split], ...]:
        """Every tensor-parallel size with every other size of a layout, in the order of the rows."""
        others = list(itertools.starmap(Split, itertools.product(self.pp, self.dp, self.ep, self.routing)))
        every = itertools.product(self.tp, others)
        return tuple((tp, split) for tp, split in every if tp * split.dp % split.ep == 0)

    def formats(self, model: ModelSpec) -> tuple[tuple[str, str], ...]:
        """Every dtype with every kv_dtype of a model, each once: auto is what its checkpoint has."""
        own, own_kv = model.checkpoint.formats
        dtypes = dict.fromkeys(own if dtype == AUTO else dtype for dtype in self.dtype)
        kv_dtypes = dict.fromkeys(own_kv if dtype == AUTO else dtype for dtype in self.kv_dtype)
        return tuple(itertools.product(dtypes, kv_dtypes))

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if not self.splits:
            raise ValueError(
                f"ep: {', '.join(map(str, self.ep))} divides none of the tp x dp GPUs of a stage: tp "
                f"{', '.join(map(str, self.tp))}, dp {', '.join(map(str, self.dp))}"
            )
        return self

    @field_validator("tables", mode="before")
    @classmethod
    def _take_path(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @property
    def all_models(self) -> tuple[str, ...]:
        """Models that answers depend on."""
        return self.models

    @property
    def other_inputs(self) -> tuple[str, ...]:
        """What else answers depend on that the spec only names."""
        return ()

    @field_validator("models", mode="before")
    @classmethod
    def _check_models(cls, value: Any) -> tuple[str, ...]:
        return checked_names(value, model_name, "model names or paths of config.json files")

    @field_validator("tp", mode="before")
    @classmethod
    def _check_tp(cls, value: Any) -> tuple[Any, ...]:
        return checked_choices(value, ALL_TP_SIZES)

    @field_validator("pp", "dp", "ep", mode="before")
    @classmethod
    def _check_layouts(cls, value: Any) -> tuple[int, ...]:
        return expand_sizes(value, MAX_GPUS)

    @field_validator("dtype", "kv_dtype", "routing", mode="before")
    @classmethod
    def _check_dtypes(cls, value: Any, info: ValidationInfo) -> tuple[Any, ...]:
        return checked_choices(value, _CHOICES[str(info.field_name)])
