"""State of the page: model, GPUs, step, load and limits; read from JSON, checked, written as commands."""

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
"""Percentiles that a capacity's limits can be on."""

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
"""Valid ranges of whole numbers: larger ones would make the page too slow."""

STEP_TOKENS: Final = 8192
STEP_SEQS: Final = 1024
"""Default plan sizes of `fastroof step` and Python."""

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
                raise BatchError(f"{name} must be a name from `{words}`, got {shown(getattr(self, name))}")
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
        """Create a view from JSON; missing keys have their defaults."""
        if not isinstance(document, Mapping):
            raise BatchError(f"a view must be an object like {{'model': 'qwen3-8b'}}, got {shown(document)}")
        names = [field.name for field in fields(cls)]
        unknown = [key for key in document if key not in names]
        if unknown:
            raise BatchError(f"unknown key {shown(unknown[0])} of a view; valid: {', '.join(names)}")
        return cls(**document)

    def document(self) -> dict[str, Any]:
        """Return the view as JSON values."""
        return asdict(self)

    @property
    def engine(self) -> EngineProfile:
        """Return the engine's profile."""
        return load_engine(self.runtime)

    @property
    def budget(self) -> int:
        """Return the engine's maximum tokens per step."""
        return self.max_batched_tokens or self.engine.scheduling.max_num_batched_tokens

    @property
    def decode_kv_len(self) -> int:
        """Return the tokens that a decode attends to: by default a prompt and half an output."""
        return max(2, self.isl + self.osl // 2) if self.kv_len is None else self.kv_len

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of the step: by default one prompt, within the engine's budget."""
        if self.kind == "decode":
            return 0
        room = self.budget - (self.batch if self.kind == "mixed" else 0)
        return max(1, min(self.isl, room)) if self.chunk is None else self.chunk

    @property
    def decodes(self) -> int:
        """Return the number of decoding requests of the step."""
        return 0 if self.kind == "prefill" else self.batch

    @property
    def requests(self) -> tuple[tuple[int, int, int], ...]:
        """Return the step's requests as (count, new tokens, context) of equal ones."""
        decodes = ((self.batch, 1, self.decode_kv_len - 1),) * bool(self.decodes)
        return (*decodes, *(((1, self.prompt_tokens, 0),) * bool(self.prompt_tokens)))

    @property
    def step_sizes(self) -> dict[str, int]:
        """Return the sizes of the plan that `fastroof step` compiles, which its memory depends on."""
        tokens = sum(count * new for count, new, _ in self.requests)
        seqs = sum(count for count, _, _ in self.requests)
        return {"max_tokens": max(STEP_TOKENS, tokens), "max_seqs": max(STEP_SEQS, seqs)}

    def serving_sizes(self, clients: int) -> dict[str, int]:
        """Return the sizes of the plan that `fastroof serving` compiles for a number of clients."""
        seqs = self.engine.scheduling.max_num_seqs
        return {"max_tokens": self.budget, "max_seqs": max(seqs, min(self.budget, clients))}

    @property
    def capacity_sizes(self) -> dict[str, int]:
        """Return the sizes of the plan that `fastroof capacity` compiles."""
        seqs = self.engine.scheduling.max_num_seqs
        return {"max_tokens": max(self.budget, seqs), "max_seqs": seqs}

    @property
    def plan_options(self) -> dict[str, Any]:
        """Return the arguments of :func:`fastroof.compile_plan` other than sizes."""
        names = ("tp", "pp", "dp", "ep", "dtype", "kv_dtype", "runtime", "allow_modelled")
        return {name: getattr(self, name) for name in names}


def choices(store: PlanStore, start: View) -> dict[str, Any]:
    """Return the values of all controls, and the first view."""
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
"""Number of simulated requests of a capacity."""


def _number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _options(store: PlanStore, view: View, split: dict[str, int] | None = None) -> list[str]:
    """Return the options that all commands share; the model is separate, an argument of some."""
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
    """Return the command that prints the step."""
    words = ["fastroof", "step", "--model", store.written_model(view.model), *_options(store, view)]
    if view.decodes:
        words += ["--decode", f"{view.decodes}x{view.decode_kv_len}"]
    if view.prompt_tokens:
        words += ["--prefill", f"{view.prompt_tokens}@0"]
    return shlex.join([*words, "--explain"])


def serving_command(store: PlanStore, view: View, clients: int, split: dict[str, int] | None = None) -> str:
    """Return the command that estimates a number of clients, for the view's layout or another."""
    words = ["fastroof", "serving", "--model", store.written_model(view.model), *_options(store, view, split)]
    words += ["--isl", str(view.isl), "--osl", str(view.osl), "--concurrency", str(clients)]
    if view.max_batched_tokens is not None:
        words += ["--max-batched-tokens", str(view.max_batched_tokens)]
    return shlex.join(words)


def lengths_written(view: View) -> tuple[int | str, int | str]:
    """Return the lengths of prompts and outputs, as written in a workload and a command."""
    if not view.spread:
        return view.isl, view.osl
    sigma = _number(view.spread)
    return f"lognormal:{view.isl}:{sigma}", f"lognormal:{view.osl}:{sigma}"


def capacity_limits(view: View) -> dict[str, float]:
    """Return the limits of a capacity, as arguments of :func:`fastroof.capacity`."""
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
    """Return Python code that computes the step and its clients."""
    own = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "dtype": "auto", "kv_dtype": "auto", "allow_modelled": False}
    own |= {"max_tokens": STEP_TOKENS, "max_seqs": STEP_SEQS}
    model, gpu = store.written_model(view.model), store.written_gpu(view.gpu)
    where = store.measured(view.gpu).where

    def compiled(sizes: dict[str, int]) -> str:
        # leave out arguments that are at their defaults
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
