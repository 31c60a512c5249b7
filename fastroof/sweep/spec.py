"""Keys and checks that the specs of all sweeps share: models, layouts, formats and tables."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from fastroof.checks import shown
from fastroof.config import load_gpu
from fastroof.defaults import DATASHEET, DEFAULT_ENGINE
from fastroof.documents import Table, read_table
from fastroof.engines import engine_names, load_engine
from fastroof.errors import FastroofError, SweepError
from fastroof.models import load_model
from fastroof.models.execution import AUTO, DTYPES, KV_DTYPES, ROUTINGS
from fastroof.models.layout import ALL_TP_SIZES, SIZES_OF_TP, TP_SIZES
from fastroof.plan.options import PlanOptions
from fastroof.ranges import expand_sizes
from fastroof.sweep.units import Split

Spec = TypeVar("Spec", bound=BaseModel)

_SHOWN: Final = 10

_PATHS: Final = ("gpu", "gpus", "tables", "engine", "models", "speculation", "workload", "traffic")

_RANGE: Final = {
    "type": "object",
    "required": ["start", "stop"],
    "additionalProperties": False,
    "properties": {
        "start": {"type": "number"},
        "stop": {"type": "number"},
        "step": {"type": "number"},
        "factor": {"type": "number"},
        "num": {"type": "integer"},
        "scale": {"enum": ["linear", "log2"]},
    },
}
SIZES_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}, _RANGE]
}
"""JSON schema of a key that takes one number, a list of them, or a range."""

NAMES_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
"""JSON schema of a key that takes one name or a list of them."""


def listed(value: Any) -> list[Any]:
    """Return one value or a list of values as a list."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ValueError("the list is empty, need at least one")
    return values


def text(name: Any, what: str) -> str:
    """Return a name or a path as text."""
    if not isinstance(name, str | Path):
        raise ValueError(f"got {shown(name)}, need {what}")
    return str(name)


def model_name(name: str) -> str:
    """Load a model and return its name."""
    return load_model(name).name


def checked_names(value: Any, called: Callable[[str], str], what: str) -> tuple[str, ...]:
    """Check that every name of a list can be loaded; report all that cannot together."""
    names = list(dict.fromkeys(text(name, what) for name in listed(value)))
    problems = []
    by_name: dict[str, str] = {}
    for name in names:
        try:
            loaded = called(name)
        except FastroofError as error:
            problems.append(str(error))
            continue
        if loaded in by_name:
            both = f"{name!r} and {by_name[loaded]!r} are both called {loaded}"
            problems.append(f"{both}: results could not distinguish them")
        by_name[loaded] = name
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ValueError("; ".join([*problems[:_SHOWN], *more]))
    return tuple(names)


def checked_choices(value: Any, choices: Sequence[Any]) -> tuple[Any, ...]:
    """Check that all values are valid choices, and sort them in the order of the choices."""
    values = listed(value)
    # compare types too: True == 1 and 1.0 == 1
    wrong = [v for v in values if not any(type(v) is type(c) and v == c for c in choices)]
    if wrong:
        examples = ", ".join(f"{shown(v, 30)}" for v in wrong[:_SHOWN])
        raise ValueError(f"got {examples}, need some of {', '.join(map(str, choices))}")
    return tuple(choice for choice in choices if choice in values)


def count_problem(sizes: Mapping[str, int], what: str, most: int, hint: str) -> None:
    """Reject a product of sizes that is too large."""
    count = math.prod(sizes.values())
    if count <= most:
        return
    product = " x ".join(f"{size:,} {axis}" for axis, size in sizes.items())
    longest = max(sizes, key=lambda axis: sizes[axis])
    room = sizes[longest] * most // count
    cut = f"cut {longest} to {room:,} values" if room else f"cut {longest} and the next longest"
    raise ValueError(f"{count:,} {what} are too many, at most {most:,} ({product}): {cut}{hint}")


def read_values(spec: Any) -> Table:
    """Return a spec's keys and values."""
    if isinstance(spec, Mapping):
        return Table(dict(spec), "sweep spec", SweepError)
    if not isinstance(spec, str | Path):
        raise SweepError(f"a spec must be a dict or the path of a TOML file, got {type(spec).__name__}")
    top = read_table(Path(spec), SweepError)
    top.data = _relative_to_folder(top.data, Path(spec).parent)
    return top


def _relative_to_folder(values: Mapping[str, Any], folder: Path) -> dict[Any, Any]:
    """Resolve ``./`` and ``../`` against the spec file's folder, not the current one."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(v) for v in value]
        if isinstance(value, dict):
            return {key: resolve(v) for key, v in value.items()}
        return str(folder / value) if isinstance(value, str) and value.startswith(("./", "../")) else value

    return {key: resolve(value) if key in _PATHS else value for key, value in values.items()}


def validated(kind: type[Spec], top: Table, changed: Collection[str] = ()) -> Spec:
    """Create a spec from its keys and values, or raise all problems as one error."""
    try:
        return kind.model_validate(dict(top.data))
    except ValidationError as error:
        problems = []
        for e in error.errors():
            words = _problem(kind, e["loc"], e["type"], e.get("ctx", {}), e["input"])
            key = str(e["loc"][0]) if e["loc"] else ""
            problems.append(top.placed(words, at="" if key in changed else key))
    raise top.as_error(problems)


def _problem(
    kind: type[BaseModel], loc: Sequence[int | str], error: str, context: Mapping[str, Any], value: Any
) -> str:
    """Describe one of pydantic's errors: the key, the given value, the valid values."""
    key = str(loc[0]) if loc else ""
    path = ".".join(map(str, loc))
    if "error" in context:
        return f"{path}: {context['error']}" if key else str(context["error"])
    fields = kind.model_fields
    table = _table(fields[key].annotation) if key in fields and len(loc) > 1 else None
    if table is not None:
        # a nested table, like constraints
        return f"{key}.{_problem(table, loc[1:], error, context, value)}"
    if error == "missing":
        return f"{key}: missing, need {fields[key].description}"
    if key not in fields:
        close = difflib.get_close_matches(key, _named(kind), n=1)
        hint = f"did you mean {_named(kind)[close[0]]}? " if close else ""
        keys = ", ".join(fields)
        return f"{key or 'an empty name'}: unknown key; {hint}the keys are {keys}"
    return f"{key}: got {shown(value)}, need {fields[key].description}"


def _table(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a key that takes a nested table, like constraints; None for other keys."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _named(kind: type[BaseModel]) -> dict[str, str]:
    """Map the keys of a spec and of its tables to their paths: ``tpot_ms`` to ``constraints.tpot_ms``."""
    tables = {key: _table(field.annotation) for key, field in kind.model_fields.items()}
    inner = {
        key: f"{name}.{key}"
        for name, table in tables.items()
        if table is not None
        for key in table.model_fields
    }
    return inner | {key: key for key in kind.model_fields}


MAX_ROWS: Final = 20_000_000
"""Maximum number of rows that a sweep writes."""

MAX_GPUS: Final = 1024
"""Maximum of each size of a layout."""
_SIZES: Final = "a number, a list of numbers, or a range like {start = 1, stop = 8, factor = 2}"

Sizes = Annotated[tuple[int, ...], WithJsonSchema(SIZES_SCHEMA)]
Names = Annotated[tuple[str, ...], WithJsonSchema(NAMES_SCHEMA)]


def up_to(largest: int) -> BeforeValidator:
    """Expand a key's sizes, which are at most this large; None stays None."""
    return BeforeValidator(lambda value: None if value is None else expand_sizes(value, largest))


def out_of(choices: Sequence[Any], *, may_be_empty: bool = False) -> BeforeValidator:
    """Check a key's list of choices."""
    return BeforeValidator(
        lambda value: () if may_be_empty and value in ([], ()) else checked_choices(value, choices)
    )


def loaded_by(called: Callable[[str], str], what: str) -> BeforeValidator:
    """Check that every name of a key can be loaded."""
    return BeforeValidator(lambda value: checked_names(value, called, what))


path_as_text: Final = BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)

MODEL_NAMES: Final = "model names or paths of config.json files"
LayoutSizes = Annotated[Sizes, up_to(MAX_GPUS)]
TpSizes = Annotated[Sizes, out_of(ALL_TP_SIZES)]


class SweepSpec(BaseModel):
    """Keys of every kind of sweep; :func:`fastroof.sweep.load_spec` creates and validates specs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    models: Annotated[Names, loaded_by(model_name, MODEL_NAMES)] = Field(
        description="a list of model names, or paths of config.json files"
    )
    tables: Annotated[str | None, path_as_text] = Field(
        None,
        description=f"a folder of measured tables, or {DATASHEET!r} for none; default: each GPU's own",
    )
    source: str | dict[str, str] | None = Field(
        None,
        description="name of one source of the tables, or a table of sources by operator; default: the "
        "best-ranked sources",
    )
    method: Literal["roofline", "linear_mfu", "nearest", "floor"] = Field(
        "roofline", description="one of roofline, linear_mfu, nearest, floor"
    )
    tp: TpSizes = Field((1,), description=f"a list out of {SIZES_OF_TP}")
    pp: LayoutSizes = Field((1,), description=f"pipeline stages, {_SIZES}")
    dp: LayoutSizes = Field((1,), description=f"ranks of attention data parallelism in a replica, {_SIZES}")
    ep: LayoutSizes = Field(
        (1,), description=f"expert-parallel groups, out of the tp x dp of a stage, {_SIZES}"
    )
    routing: Annotated[Names, out_of((AUTO, *ROUTINGS))] = Field(
        (AUTO,), description=f"how tokens spread over experts, a list out of {', '.join((AUTO, *ROUTINGS))}"
    )
    dtype: Annotated[Names, out_of((AUTO, *DTYPES))] = Field(
        (AUTO,), description=f"a list out of {', '.join((AUTO, *DTYPES))}"
    )
    kv_dtype: Annotated[Names, out_of((AUTO, *KV_DTYPES))] = Field(
        (AUTO,), description=f"a list out of {', '.join((AUTO, *KV_DTYPES))}"
    )

    allow_modelled: bool = Field(
        False,
        description="true or false: whether the datasheet model may replace kernels that were not measured",
    )

    @property
    def plan_options(self) -> dict[str, Any]:
        """Options of all plans of the sweep."""
        return {"method": self.method, "allow_modelled": self.allow_modelled}

    @property
    def splits(self) -> tuple[tuple[int, Split], ...]:
        """Return all layouts, by tensor-parallel size and other sizes, in the order of the rows."""
        splits = list(itertools.starmap(Split, itertools.product(self.pp, self.dp, self.ep, self.routing)))
        every = itertools.product(self.tp, splits)
        return tuple((tp, split) for tp, split in every if tp * split.dp % split.ep == 0)

    def formats(self, model: str, gpu: str) -> tuple[tuple[str, str, str], ...]:
        """Return all dtypes, kv_dtypes and engines of a model on a GPU, with auto replaced as in plans."""
        spec, card = load_model(model), load_gpu(gpu)
        found: dict[tuple[str, str, str], None] = {}
        for dtype, kv_dtype, name in itertools.product(self.dtype, self.kv_dtype, self.all_engines):
            given = PlanOptions(dtype=dtype, kv_dtype=kv_dtype, engine=load_engine(name))
            one = given.for_model(spec, card)
            found[one.dtype, one.kv_dtype, name] = None
        return tuple(found)

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if not self.splits:
            raise ValueError(
                f"ep: {', '.join(map(str, self.ep))} divides none of the tp x dp GPUs of a stage: tp "
                f"{', '.join(map(str, self.tp))}, dp {', '.join(map(str, self.dp))}"
            )
        return self

    @property
    def all_gpus(self) -> tuple[str, ...]:
        """Return all GPUs in the spec."""
        raise NotImplementedError

    @property
    def all_engines(self) -> tuple[str, ...]:
        """Return all engines in the spec."""
        raise NotImplementedError

    @property
    def all_models(self) -> tuple[str, ...]:
        """Return all models that the results depend on."""
        return self.models

    @property
    def other_inputs(self) -> tuple[str, ...]:
        """Return hashes of other inputs that the spec only names."""
        return ()


COUNTS: Final = "a number, a list of numbers, or a range like {start = 1, stop = 512, factor = 2}"
"""Description of a key that takes counts of anything."""


def _engine_name(name: str) -> str:
    """Return the name of an engine's profile, refusing schedules that have no closed form in sweeps."""
    profile = load_engine(name)
    if profile.scheduling.pauses_on:
        on = ", ".join(f"{option} {value}" for option, value in profile.scheduling.pauses_on.items())
        raise SweepError(f"sweeps do not model {on} of engine {profile.name}; simulate a trace instead")
    return profile.name


class CandidateSpec(SweepSpec):
    """Keys of sweeps that compare deployments."""

    gpus: Annotated[
        Names, loaded_by(lambda name: load_gpu(name).name, "GPU names or paths of gpu.toml files")
    ] = Field(("h100",), description="a list of GPU names, or paths of gpu.toml files")
    tp: TpSizes = Field(TP_SIZES, description=f"a list out of {SIZES_OF_TP}")
    replicas: Sizes | None = Field(
        None, description=f"number of replicas, {COUNTS}; or total_gpus; default: one"
    )
    total_gpus: Sizes | None = Field(
        None, description=f"GPUs that replicas, or prefill and decode workers, share: {COUNTS}"
    )
    engine: Annotated[Names, loaded_by(_engine_name, "names of engines or paths of profiles")] = Field(
        (DEFAULT_ENGINE,),
        description=f"a list out of {', '.join(engine_names())}, or paths of profiles' .toml files",
    )
    k: int = Field(5, ge=1, le=10_000, description="rows to keep per group, a whole number up to 10,000")

    @property
    def all_gpus(self) -> tuple[str, ...]:
        """Return all GPUs in the spec."""
        return self.gpus

    @property
    def all_engines(self) -> tuple[str, ...]:
        """Return all engines in the spec."""
        return self.engine

    @property
    def num_plans(self) -> int:
        """Return the number of plans of one layout."""
        return sum(len(self.formats(*one)) for one in itertools.product(self.models, self.gpus))

    def replica_counts(self, gpus_each: int) -> tuple[int, ...]:
        """Return the numbers of replicas of some GPUs each that are possible."""
        if self.total_gpus is None:
            return self.replicas or (1,)
        return tuple(total // gpus_each for total in self.total_gpus if total % gpus_each == 0)
