"""State of the page: model, GPUs, step, load and limits; read from JSON, checked, written as commands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from fastroof.caching import lazy_property
from fastroof.checks import check_flag, is_number, shown, whole_number
from fastroof.config import gpu_names, load_gpu
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import EngineProfile, engine_names, load_engine, serving_engines
from fastroof.engines.front_end import front_end_given
from fastroof.errors import BatchError
from fastroof.models import load_model, model_names
from fastroof.models.execution import AUTO, DTYPES, KV_DTYPES
from fastroof.models.lora import Lora
from fastroof.plan.options import default_sizes

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
    "max_num_batched_tokens": (1, 2**16),
    "gpus": (1, 64),
    "num_requests": (1, 2**17),
    "clients": (1, 2**16),
    "turns": (1, 1000),
    "growth": (1, 2**20),
}
"""Valid ranges of whole numbers: larger ones would make the page too slow."""

_MS: Final = (1e-3, 1e9, "a number of ms from 0.001 to 1e+09, or null for none")
_NUMBERS: Final[dict[str, tuple[float, float, str]]] = {
    "ttft_ms": _MS,
    "tpot_ms": _MS,
    "spread": (0.0, 2.0, "a number from 0 to 2"),
    "rate": (math.ulp(0.0), 1e6, "requests/s above 0 up to 1e+06, or null for clients"),
    "think_s": (0.0, 1e6, "seconds from 0 to 1e+06"),
}
"""Least and most of other numbers, and these in words."""

_OR_NULL: Final = (
    "kv_len", "chunk", "max_num_batched_tokens", "clients", "growth", "ttft_ms", "tpot_ms", "rate",
)  # fmt: skip
_MOST_LETTERS: Final = 256
_PLAN_OPTIONS: Final = (
    "tp", "pp", "dp", "ep", "dtype", "kv_dtype", "engine", "allow_modelled", "front_end", "lora",
)  # fmt: skip


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
    engine: str = DEFAULT_ENGINE
    allow_modelled: bool = False
    front_end: str | float | None = None
    lora: str | None = None
    isl: int = 4000
    osl: int = 500
    kind: str = "decode"
    batch: int = 32
    kv_len: int | None = None
    chunk: int | None = None
    max_num_batched_tokens: int | None = None
    ttft_ms: float | None = 1000.0
    tpot_ms: float | None = 30.0
    percentile: int = 99
    spread: float = 0.0
    gpus: int = 8
    rate: float | None = 1.0
    clients: int | None = None
    num_requests: int = 1000
    turns: int = 1
    growth: int | None = None
    think_s: float = 0.0
    prefix_cache: bool = True
    kv_tiers: str | None = None
    fleet: str | None = None

    def __post_init__(self) -> None:
        for name, words in (("model", "fastroof models"), ("gpu", "fastroof gpus")):
            if not isinstance(getattr(self, name), str):
                raise BatchError(f"{name} must be a name from `{words}`, got {shown(getattr(self, name))}")
        for name, allowed in (
            ("dtype", (AUTO, *DTYPES)),
            ("kv_dtype", (AUTO, *KV_DTYPES)),
            ("engine", (*engine_names(), *serving_engines())),
            ("kind", KINDS),
            ("percentile", PERCENTILES),
        ):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise BatchError(f"{name} must be one of {', '.join(map(str, allowed))}, got {shown(value)}")
        for name in ("allow_modelled", "prefix_cache"):
            check_flag(name, getattr(self, name), BatchError)
        for name, (least, most) in SIZES.items():
            value = getattr(self, name)
            if value is not None or name not in _OR_NULL:
                whole_number(name, value, least, most, BatchError)
        if self.front_end is not None:
            front_end_given("front_end", self.front_end)
        if self.lora is not None:
            if not isinstance(self.lora, str):
                raise BatchError(
                    f"lora must be a text such as 16:4, or null for none, got {shown(self.lora)}"
                )
            # a page names no files
            Lora.of(self.lora, reads_files=False)
        for name, (low, high, words) in _NUMBERS.items():
            value = getattr(self, name)
            if not (value is None and name in _OR_NULL) and not (is_number(value) and low <= value <= high):
                raise BatchError(f"{name} must be {words}, got {shown(value)}")
        for name in ("kv_tiers", "fleet"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and len(text) <= _MOST_LETTERS):
                raise BatchError(
                    f"{name} must be a text of at most {_MOST_LETTERS} characters, or null for none, "
                    f"got {shown(text)}"
                )

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

    @lazy_property
    def profile(self) -> EngineProfile:
        """Return the engine's profile with its limits on the GPU, on a custom card its own."""
        profile = load_engine(self.engine)
        if self.has_known_card:
            is_known = self.dp > 1 and self.model in model_names()
            return profile.on(load_gpu(self.gpu), load_model(self.model).ranks(self.dp) if is_known else 1)
        return replace(profile, scheduling=replace(profile.scheduling, by_card=False))

    @property
    def has_known_card(self) -> bool:
        """Whether the GPU is one that commands know by name."""
        return self.gpu in gpu_names()

    @property
    def budget(self) -> int:
        """Return the engine's maximum tokens per step."""
        return self.profile.scheduling.step_limits(self.max_num_batched_tokens).tokens

    @property
    def max_num_seqs(self) -> int:
        """Return the engine's maximum number of requests."""
        return self.profile.scheduling.step_limits(self.max_num_batched_tokens).seqs

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
    def step_sizes(self) -> dict[str, int | None]:
        """Return the sizes of the plan that `fastroof step` compiles, which its memory depends on."""
        tokens = sum(count * new for count, new, _ in self.requests)
        seqs = sum(count for count, _, _ in self.requests)
        own = self.profile.scheduling
        least, sizes = default_sizes(own), default_sizes(own, tokens, seqs)
        return {name: size if size > least[name] else None for name, size in sizes.items()}

    def serving_sizes(self, clients: int) -> dict[str, int]:
        """Return the sizes of the plan that `fastroof serving` compiles for a number of clients."""
        seqs = max(self.max_num_seqs, min(self.budget, clients))
        return self.profile.scheduling.plan_sizes(self.budget, seqs)

    @property
    def simulated_sizes(self) -> dict[str, int]:
        """Return the sizes of the plan that `fastroof simulate` and `fastroof capacity` compile."""
        return self.serving_sizes(0)

    @property
    def plan_options(self) -> dict[str, Any]:
        """Return the arguments of :func:`fastroof.compile_plan` other than sizes."""
        return {name: getattr(self, name) for name in _PLAN_OPTIONS}
