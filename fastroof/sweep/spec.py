"""What to sweep: a spec out of TOML or a dict, checked whole before anything runs."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fastroof.config import load_gpu, load_model
from fastroof.config.parallel import TP_SIZES
from fastroof.config.runtime import load_runtime, runtime_names
from fastroof.errors import FastroofError, SweepError
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
_SHOWN: Final = 10


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
    source: str | None = Field(
        None, description="name of one source of the tables; default the best-ranked ones"
    )
    models: tuple[str, ...] = Field(description="a list of model names, or paths of config.json files")
    tp: tuple[int, ...] = Field((1,), description=f"a list out of {', '.join(map(str, TP_SIZES))}")
    dtype: tuple[str, ...] = Field(("bf16",), description=f"a list out of {', '.join(DTYPES)}")
    kv_dtype: tuple[str, ...] = Field(("bf16",), description=f"a list out of {', '.join(KV_DTYPES)}")
    batch_size: tuple[int, ...] = Field(
        description="a list of sizes, or a range like {start = 1, stop = 512, step = 1}"
    )
    kv_len: tuple[int, ...] = Field(
        description="a list of lengths, or a range like {start = 1024, stop = 131072, factor = 2}"
    )
    runtime: str = Field(
        "kernels", description=f"one of {', '.join(runtime_names())}, or the path of a profile's .toml file"
    )
    method: Literal["roofline", "linear_mfu", "nearest", "floor"] = Field(
        "roofline", description="one of roofline, linear_mfu, nearest, floor"
    )
    tpot_limit_ms: float | None = Field(
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
        load_runtime(runtime)
        return str(runtime)

    @field_validator("models", mode="before")
    @classmethod
    def _check_models(cls, value: Any) -> tuple[str, ...]:
        names = list(dict.fromkeys(map(_text, _listed(value))))
        problems = []
        known = ""  # the presets, listed once for all
        by_name: dict[str, str] = {}
        for name in names:
            try:
                called = load_model(name).name
            except FastroofError as error:
                message, listing, presets = str(error).partition("; presets are ")
                problems.append(message)
                known = listing + presets or known
                continue
            if called in by_name:
                both = f"{name!r} and {by_name[called]!r} are both called {called}"
                problems.append(f"{both}: results could not tell them apart")
            by_name[called] = name
        if problems:
            more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise ValueError("; ".join([*problems[:_SHOWN], *more]) + known)
        return tuple(names)

    @field_validator("tp", "dtype", "kv_dtype", mode="before")
    @classmethod
    def _check_choices(cls, value: Any, info: ValidationInfo) -> tuple[Any, ...]:
        choices = _CHOICES[str(info.field_name)]
        given = _listed(value)
        # by type too: True == 1 and 1.0 == 1
        wrong = [v for v in given if not any(type(v) is type(c) and v == c for c in choices)]
        if wrong:
            some = ", ".join(f"{v!r:.30}" for v in wrong[:_SHOWN])
            raise ValueError(f"got {some}, need some of {', '.join(map(str, choices))}")
        return tuple(choice for choice in choices if choice in given)

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


def load_spec(spec: SweepSpec | Mapping[str, Any] | str | Path | None = None) -> SweepSpec:
    """Load what to sweep, and check it whole.

    Parameters
    ----------
    spec : SweepSpec, mapping, str, Path or None
        A spec, its keys and values, or the path of a TOML file with them. None is the packaged spec.
        In a file, a gpu, tables, runtime or model that starts with ``./`` or ``../`` lies beside the file.

    Returns
    -------
    SweepSpec
        With ranges expanded.

    Raises
    ------
    SweepError
        Naming every wrong key, what was given and what would do.

    Examples
    --------
    >>> load_spec({"models": ["llama-3.1-8b"], "batch_size": [1, 64], "kv_len": 4096}).tp
    (1,)
    """
    if isinstance(spec, SweepSpec):
        return spec
    if isinstance(spec, Mapping):
        return _checked(spec, "sweep spec")
    if spec is None:
        text = (resources.files("fastroof.sweep") / "default.toml").read_text(encoding="utf-8")
        return _checked(tomllib.loads(text), "packaged spec")
    if not isinstance(spec, str | Path):
        raise SweepError(f"a spec is a dict or the path of a TOML file, got {type(spec).__name__}")
    path = Path(spec)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepError(f"{path} cannot be read ({error.strerror}); give a dict or a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} is not TOML: {error}") from None
    return _checked(_beside_file(values, path.parent), str(path))


def _beside_file(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve ``./`` and ``../`` against the spec file's folder, not the current one."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(v) for v in value]
        return str(folder / value) if isinstance(value, str) and value.startswith(("./", "../")) else value

    paths = ("gpu", "tables", "runtime", "models")
    return {key: resolve(value) if key in paths else value for key, value in values.items()}


def _checked(values: Mapping[str, Any], where: str) -> SweepSpec:
    try:
        return SweepSpec.model_validate(dict(values))
    except ValidationError as error:
        problems = [_problem(e["loc"], e["type"], e.get("ctx", {}), e["input"]) for e in error.errors()]
        one = len(problems) == 1
        raise SweepError(
            f"{where}: {problems[0]}" if one else "\n  ".join([f"{where}:", *problems])
        ) from None


def _problem(loc: Sequence[int | str], kind: str, context: Mapping[str, Any], given: Any) -> str:
    """Word one of pydantic's errors: the key, what was given, what would do."""
    key = str(loc[0]) if loc else ""
    if "error" in context:
        return f"{key}: {context['error']}" if key else str(context["error"])
    fields = SweepSpec.model_fields
    if kind == "missing":
        return f"{key}: missing, need {fields[key].description}"
    if key not in fields:
        close = difflib.get_close_matches(key, fields, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{key or 'an empty name'}: no such key; {hint}the keys are {', '.join(fields)}"
    return f"{key}: got {given!r:.60}, need {fields[key].description}"


def _listed(value: Any) -> list[Any]:
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if not listed:
        raise ValueError("the list is empty, need at least one")
    return listed


def _text(name: Any) -> str:
    if not isinstance(name, str | Path):
        raise ValueError(f"got {name!r:.60}, need model names or paths of config.json files")
    return str(name)


def _check_count(spec: SweepSpec, axes: Sequence[str], what: str, most: int, hint: str) -> None:
    sizes = {axis: len(getattr(spec, axis)) for axis in axes}
    count = math.prod(sizes.values())
    if count <= most:
        return
    product = " x ".join(f"{size:,} {axis}" for axis, size in sizes.items())
    longest = max(sizes, key=lambda axis: sizes[axis])
    room = sizes[longest] * most // count
    cut = f"cut {longest} to {room:,} values" if room else f"cut {longest} and the next longest"
    raise ValueError(f"{count:,} {what} are too many, at most {most:,} ({product}): {cut}{hint}")
