"""What the page shows: a model on GPUs, one step of it, a load and limits; read from JSON and checked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from fastroof._version import __version__
from fastroof.checks import check_flag, is_number, shown, whole_number
from fastroof.columns import ORIGINS
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import EngineProfile, engine_names, load_engine
from fastroof.errors import BatchError
from fastroof.load.by_name import can_import, table_folders
from fastroof.models.execution import AUTO, DTYPES, KV_DTYPES
from fastroof.report.steps import GROUPS

if TYPE_CHECKING:
    from fastroof.ui.plans import PlanStore


KINDS: Final = ("decode", "prefill", "mixed")
"""Decode, prefill and mixed steps."""

PERCENTILES: Final = (50, 90, 95, 99)
"""Of times that have limits, in capacities."""

SIZES: Final[dict[str, tuple[int, int]]] = {
    "tp": (1, 64),
    "pp": (1, 64),
    "dp": (1, 64),
    "ep": (1, 64),
    "isl": (1, 2**20),
    "osl": (2, 2**16),
    "batch": (1, 4096),
    "kv_len": (2, 2**21),
    "chunk": (1, 2**16),
    "max_batched_tokens": (1, 2**16),
    "gpus": (1, 64),
}
"""Ranges of whole numbers: more would make the picture too slow."""

STEP_TOKENS: Final = 8192
STEP_SEQS: Final = 1024
"""Default sizes that a plan is compiled for, in `fastroof step` and in Python."""

_OPTIONAL: Final = ("kv_len", "chunk", "max_batched_tokens")
_LIMITS: Final = ("ttft_ms", "tpot_ms")
_LEAST_MS, _MOST_MS = 1e-3, 1e9
_MOST_SPREAD: Final = 2.0


@dataclass(frozen=True)
class View:
    """One state of the page."""

    model: str = "qwen3-32b-fp8"
    gpu: str = "h100"
    tp: int = 2
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dtype: str = AUTO
    kv_dtype: str = AUTO
    runtime: str = DEFAULT_ENGINE
    allow_modelled: bool = False
    isl: int = 4000
    osl: int = 500
    kind: str = "decode"
    batch: int = 32
    kv_len: int | None = None
    chunk: int | None = None
    max_batched_tokens: int | None = None
    ttft_ms: float | None = 1000.0
    tpot_ms: float | None = 30.0
    percentile: int = 99
    spread: float = 0.0
    gpus: int = 8

    def __post_init__(self) -> None:
        for name, words in (("model", "fastroof models"), ("gpu", "fastroof gpus")):
            if not isinstance(getattr(self, name), str):
                raise BatchError(f"{name} must be a name out of `{words}`, got {shown(getattr(self, name))}")
        for name, allowed in (
            ("dtype", (AUTO, *DTYPES)),
            ("kv_dtype", (AUTO, *KV_DTYPES)),
            ("runtime", engine_names()),
            ("kind", KINDS),
            ("percentile", PERCENTILES),
        ):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise BatchError(f"{name} must be one of {', '.join(map(str, allowed))}, got {shown(value)}")
        check_flag("allow_modelled", self.allow_modelled, BatchError)
        for name, (least, most) in SIZES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                whole_number(name, value, least, most, BatchError)
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and not (is_number(value) and _LEAST_MS <= value <= _MOST_MS):
                raise BatchError(
                    f"{name} must be a number of ms from {_LEAST_MS:g} to {_MOST_MS:g}, or null for none, "
                    f"got {shown(value)}"
                )
        if not is_number(self.spread) or not 0.0 <= self.spread <= _MOST_SPREAD:
            raise BatchError(f"spread must be a number from 0 to {_MOST_SPREAD:g}, got {shown(self.spread)}")

    @classmethod
    def of(cls, document: Any) -> View:
        """Read a view as JSON has it; what is not there has its default."""
        if not isinstance(document, Mapping):
            raise BatchError(f"a view is an object like {{'model': 'llama-3.1-8b'}}, got {shown(document)}")
        names = [field.name for field in fields(cls)]
        unknown = [key for key in document if key not in names]
        if unknown:
            raise BatchError(f"a view has no {shown(unknown[0])}; it has {', '.join(names)}")
        return cls(**document)

    def document(self) -> dict[str, Any]:
        """Return all of it, as JSON has it."""
        return asdict(self)

    @property
    def engine(self) -> EngineProfile:
        """The engine's profile."""
        return load_engine(self.runtime)

    @property
    def budget(self) -> int:
        """Tokens that a step of the engine holds at most."""
        return self.max_batched_tokens or self.engine.scheduling.max_num_batched_tokens

    @property
    def decode_kv_len(self) -> int:
        """Tokens that a decode attends to: by default a prompt and half an output."""
        return max(2, self.isl + self.osl // 2) if self.kv_len is None else self.kv_len

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the step: by default one prompt's, as far as the engine's budget has room."""
        if self.kind == "decode":
            return 0
        room = self.budget - (self.batch if self.kind == "mixed" else 0)
        return max(1, min(self.isl, room)) if self.chunk is None else self.chunk

    @property
    def decodes(self) -> int:
        """Requests that decode in the step."""
        return 0 if self.kind == "prefill" else self.batch

    @property
    def requests(self) -> tuple[tuple[int, int, int], ...]:
        """Equal requests of the step: how many, new tokens and context of each."""
        decodes = ((self.batch, 1, self.decode_kv_len - 1),) * bool(self.decodes)
        return (*decodes, *(((1, self.prompt_tokens, 0),) * bool(self.prompt_tokens)))

    @property
    def step_sizes(self) -> dict[str, int]:
        """Sizes of the plan that `fastroof step` compiles: its memory depends on them."""
        tokens = sum(count * new for count, new, _ in self.requests)
        seqs = sum(count for count, _, _ in self.requests)
        return {"max_tokens": max(STEP_TOKENS, tokens), "max_seqs": max(STEP_SEQS, seqs)}

    def serving_sizes(self, clients: int) -> dict[str, int]:
        """Sizes of the plan that `fastroof serving` compiles for so many clients."""
        seqs = self.engine.scheduling.max_num_seqs
        return {"max_tokens": self.budget, "max_seqs": max(seqs, min(self.budget, clients))}

    @property
    def capacity_sizes(self) -> dict[str, int]:
        """Sizes of the plan that `fastroof capacity` compiles."""
        seqs = self.engine.scheduling.max_num_seqs
        return {"max_tokens": max(self.budget, seqs), "max_seqs": seqs}

    @property
    def plan_options(self) -> dict[str, Any]:
        """Arguments of :func:`fastroof.compile_plan`, but for sizes."""
        names = ("tp", "pp", "dp", "ep", "dtype", "kv_dtype", "runtime", "allow_modelled")
        return {name: getattr(self, name) for name in names}


def choices(store: PlanStore, start: View) -> dict[str, Any]:
    """Return what can be chosen, and what the page starts with."""
    return {
        "version": __version__,
        "models": list(store.models),
        "gpus": [_gpu(store, name) for name in store.gpus],
        "choices": {
            "dtype": [AUTO, *DTYPES],
            "kv_dtype": [AUTO, *KV_DTYPES],
            "runtime": list(engine_names()),
            "kind": list(KINDS),
            "percentile": list(PERCENTILES),
        },
        "sizes": SIZES,
        "start": start.document(),
        "groups": list(GROUPS),
        "origins": list(ORIGINS),
    }


def _gpu(store: PlanStore, name: str) -> dict[str, str]:
    written = store.gpus[name]
    known = "measured"
    if written == name and not table_folders(name):
        known = "importable" if can_import(name) else "datasheet"
    return {"name": name, "title": store.gpu(name).title, "known": known}


CAPACITY_REQUESTS: Final = 1000
"""Requests that a capacity is found with."""


def _number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _options(store: PlanStore, view: View, split: dict[str, int] | None = None) -> list[str]:
    """What all commands take of a view; the model goes first, which not all take by an option."""
    options = ["--gpu", store.written_gpu(view.gpu)]
    sizes = {name: getattr(view, name) for name in ("tp", "pp", "dp", "ep")} | (split or {})
    for name, size in sizes.items():
        if size != 1:
            options += [f"--{name}", str(size)]
    for name in ("dtype", "kv_dtype"):
        if getattr(view, name) != "auto":
            options += [f"--{name.replace('_', '-')}", getattr(view, name)]
    options += ["--allow-modelled"] * view.allow_modelled
    return [*options, "--runtime", view.runtime]


def step_command(store: PlanStore, view: View) -> str:
    """Return the command that answers what the step shows."""
    words = ["fastroof", "step", "--model", store.written_model(view.model), *_options(store, view)]
    if view.decodes:
        words += ["--decode", f"{view.decodes}x{view.decode_kv_len}"]
    if view.prompt_tokens:
        words += ["--prefill", f"{view.prompt_tokens}@0"]
    return shlex.join([*words, "--explain"])


def serving_command(store: PlanStore, view: View, clients: int, split: dict[str, int] | None = None) -> str:
    """Return the command that answers what so many clients see, of the view's layout or another."""
    words = ["fastroof", "serving", "--model", store.written_model(view.model), *_options(store, view, split)]
    words += ["--isl", str(view.isl), "--osl", str(view.osl), "--concurrency", str(clients)]
    if view.max_batched_tokens is not None:
        words += ["--max-batched-tokens", str(view.max_batched_tokens)]
    return shlex.join(words)


def lengths_written(view: View) -> tuple[int | str, int | str]:
    """Return the lengths of drawn prompts and outputs, as a workload and a command have them."""
    if not view.spread:
        return view.isl, view.osl
    sigma = _number(view.spread)
    return f"lognormal:{view.isl}:{sigma}", f"lognormal:{view.osl}:{sigma}"


def capacity_limits(view: View) -> dict[str, float]:
    """Return the limits that a capacity keeps, by the names that :func:`fastroof.capacity` has."""
    limits = {"ttft": view.ttft_ms, "tpot": view.tpot_ms}
    return {f"{name}_p{view.percentile}_ms": float(ms) for name, ms in limits.items() if ms is not None}


def capacity_command(store: PlanStore, view: View) -> str:
    """Return the command that finds the capacity."""
    words = ["fastroof", "capacity", store.written_model(view.model), *_options(store, view)]
    limits = {"ttft": view.ttft_ms, "tpot": view.tpot_ms}
    written = [f"{name}_p{view.percentile}={_number(ms)}" for name, ms in limits.items() if ms is not None]
    words += ["--slo", ",".join(written)]
    prompts, outputs = lengths_written(view)
    words += ["--num-requests", str(CAPACITY_REQUESTS), "--input", str(prompts), "--output", str(outputs)]
    if view.max_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(view.max_batched_tokens)]
    return shlex.join(words)


def step_python(store: PlanStore, view: View, clients: int) -> str:
    """Return the Python that answers what the step and its clients show."""
    own = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "dtype": "auto", "kv_dtype": "auto", "allow_modelled": False}
    own |= {"max_tokens": STEP_TOKENS, "max_seqs": STEP_SEQS}
    model, gpu = store.written_model(view.model), store.written_gpu(view.gpu)
    where = store.measured(view.gpu).where

    def compiled(sizes: dict[str, int]) -> str:
        # a plan's defaults are not printed
        given = {
            name: value for name, value in {**view.plan_options, **sizes}.items() if own.get(name) != value
        }
        options = "".join(f", {name}={value!r}" for name, value in given.items())
        return f"plan = fastroof.compile_plan({model!r}, {gpu!r}, tables{options})"

    step, serving = compiled(view.step_sizes), compiled(view.serving_sizes(clients))
    requests = " + ".join(f"[({new}, {context})] * {count}" for count, new, context in view.requests)
    error = "" if where is None else ", with_error=True"
    budget = "" if view.max_batched_tokens is None else f", max_batched_tokens={view.max_batched_tokens}"
    lines = [
        "import fastroof",
        "from fastroof.serving import estimate",
        "",
        "tables = None" if where is None else f"tables = fastroof.load_tables({where!r})",
        step,
        f"step = plan.explain({requests}{error})",
        "print(step.total_us, step.relative_error)",
        *[serving] * (serving != step),
        f"seen = estimate(plan, isl={view.isl}, osl={view.osl}, concurrency={clients}{budget}{error})",
        "print(seen.ttft_ms, seen.tpot_ms, seen.tokens_per_s_per_gpu)",
    ]
    return "\n".join(lines)
