"""Spec of a sweep over deployments: models, GPUs, layouts and load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fastroof.acceptance import AUTO
from fastroof.checks import is_number, shown
from fastroof.config import load_gpu
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import load_engine
from fastroof.engines.front_end import NAMES, front_end_given
from fastroof.models import load_model
from fastroof.models.execution import AUTO as ANY_ROUTING
from fastroof.models.layout import ALL_TP_SIZES
from fastroof.models.lora import Lora
from fastroof.ranges import expand_reals, expand_sizes
from fastroof.sweep.deployments.columns import OBJECTIVES, RATES, energy_problems
from fastroof.sweep.deployments.nested_tables import Constraints, Speculation, SplitChoice
from fastroof.sweep.spec import (
    COUNTS,
    MAX_ROWS,
    SIZES_SCHEMA,
    CandidateSpec,
    Names,
    Sizes,
    checked_choices,
    count_problem,
    listed,
    out_of,
)
from fastroof.sweep.units import NO_ROUTING, PlanKey, Split


class Layout(NamedTuple):
    """Either replicas or prefill and decode workers; the others are 0."""

    replicas: int
    prefill_workers: int
    decode_workers: int

    def total_gpus(self, gpus_each: int) -> int:
        """Return the number of GPUs of all replicas or workers."""
        return gpus_each * sum(self)


MAX_CANDIDATES: Final = 10**10
"""Maximum number of candidates of a sweep: about two hours on one core."""
MAX_GROUPS: Final = 2**16
"""Maximum number of groups per plan."""

MODES: Final = ("aggregated", "disaggregated")
GROUP_COLUMNS: Final = (
    "model", "gpu", "mode", "tp", "pp", "dp", "ep", "routing", "dtype", "kv_dtype", "engine", "replicas",
    "prefill_workers", "decode_workers", "total_gpus", "isl", "osl", "clients", "request_rate_per_s",
    "max_num_batched_tokens", "prefix_hit",
)  # fmt: skip
"""Columns that rows can be grouped by."""
_LARGEST: Final = {
    "isl": 2**27,
    "osl": 2**27,
    "clients": 2**20,
    "max_num_batched_tokens": 2**20,
    "max_num_seqs": 2**16,
    "replicas": 2**16,
    "total_gpus": 2**16,
    "prefill_workers": 2**12,
    "decode_workers": 2**12,
}
_SPLIT_KEYS: Final = ("tp", "pp", "dp", "ep")

Reals = Annotated[tuple[float, ...], WithJsonSchema(SIZES_SCHEMA)]


def _splits(total: int, gpus_each: int) -> bool:
    """Return whether GPUs divide into at least one worker of each kind."""
    return total % gpus_each == 0 and total >= 2 * gpus_each


def _engines_own(info: ValidationInfo, name: str) -> int:
    """Return the engines' common default of a scheduling option; invalid engines are reported elsewhere."""
    engines = info.data.get("engine", (DEFAULT_ENGINE,))
    by_engine = {engine: getattr(load_engine(engine).scheduling, name) for engine in engines}
    if len(set(by_engine.values())) > 1:
        defaults = ", ".join(f"{engine} {size:,}" for engine, size in by_engine.items())
        raise ValueError(f"is needed: the engines' defaults differ, {defaults}")
    return int(by_engine[engines[0]])


class DeploymentSpec(CandidateSpec):
    """Spec of a sweep over deployments: candidates, load, limits, and which rows to keep.

    Every combination of models, gpus, mode, tp, pp, dp, ep (or split), routing, dtype, kv_dtype, engine,
    layout, isl, osl, load, max_num_batched_tokens and prefix_hit is one candidate.
    :func:`fastroof.sweep.load_spec` creates and validates it.
    """

    mode: Annotated[Names, out_of(MODES)] = Field(
        ("aggregated",), description=f"a list out of {', '.join(MODES)}"
    )
    split: tuple[SplitChoice, ...] | None = Field(
        None,
        description="a list of splits like {tp = 1, dp = 8, ep = 8}, instead of all combinations of tp, pp, "
        "dp and ep",
    )
    prefill_workers: Sizes | None = Field(
        None, description=f"workers that only prefill, {COUNTS}; or total_gpus; default: one"
    )
    decode_workers: Sizes | None = Field(
        None, description=f"workers that only decode, {COUNTS}; or total_gpus; default: one"
    )
    isl: Sizes = Field(description=f"tokens per prompt, {COUNTS}")
    osl: Sizes = Field(description=f"tokens per output, {COUNTS}")
    clients: Sizes | None = Field(None, description=f"concurrent clients, {COUNTS}; or rate")
    rate: Reals | None = Field(None, description=f"requests/s of the deployment, {COUNTS}; or clients")
    max_num_batched_tokens: Sizes = Field(
        None,
        validate_default=True,
        description=f"max tokens per step, {COUNTS}; default: the engines' own",
    )
    max_num_seqs: Sizes = Field(
        None,
        validate_default=True,
        description=f"max concurrent requests per replica, {COUNTS}: a candidate takes the one with which "
        "most requests run, the largest of equals; default: the engines' own",
    )
    prefix_hit: Reals = Field(
        (0.0,), description=f"share of a prompt found in the prefix cache, below 1: {COUNTS}"
    )
    speculation: Speculation | None = Field(
        None,
        description="a table for speculative decoding, like {num_draft_tokens = 3, accepted = 2.2, draft = "
        "'mtp'}; default: none",
    )
    link_bytes_per_s: float | None = Field(
        None, ge=1, allow_inf_nan=False,
        description="bandwidth from a GPU to a GPU of another worker, a number of B/s; default: NVLink",
    )  # fmt: skip
    front_end: str | float | None = Field(
        None,
        description=f"what requests pass outside the engine: {', '.join(NAMES)}, or milliseconds a request; "
        "default: the engines' own",
    )
    lora: str | None = Field(
        None,
        description="LoRA adapters of all requests: RANK[:ADAPTERS[:MODULES]], like '16:4'; default: none",
    )
    constraints: Constraints = Field(
        default_factory=Constraints, description="a table of limits, like {ttft_ms = 500}"
    )
    objective: Literal["tokens_per_s_per_gpu", "tokens_per_s_per_user", "cost", "goodput", "energy"] = Field(
        "tokens_per_s_per_gpu", description=f"one of {', '.join(OBJECTIVES)}"
    )
    gpu_hour_price: float | dict[str, float] | None = Field(
        None, description="price per GPU-hour, a number above 0, or a table of prices by GPU"
    )
    keep: Literal["all", "pareto", "best"] = Field(
        "pareto",
        description="'best', 'pareto' or 'all'; default: pareto, or best if k is given or the objective is "
        "cost, goodput or energy",
    )
    per: Annotated[Names, out_of(GROUP_COLUMNS, may_be_empty=True)] = Field(
        ("model", "isl", "osl"), description=f"a list of columns out of {', '.join(GROUP_COLUMNS)}"
    )
    histogram: bool = Field(False, description="true to count the objective's values by group")

    @field_validator("split", mode="before")
    @classmethod
    def _check_split(cls, value: Any) -> Any:
        if value is None:
            return None
        tables = [each.model_dump() if isinstance(each, SplitChoice) else each for each in listed(value)]
        for each in tables:
            if not isinstance(each, Mapping):
                raise ValueError(f"got {shown(each)}, need tables like {{tp = 1, dp = 8, ep = 8}}")
            unknown = [key for key in each if key not in SplitChoice.model_fields]
            if unknown:
                raise ValueError(f"unknown key {shown(unknown[0])} of a split; valid: tp, pp, dp, ep")
            if "tp" in each:
                checked_choices(each["tp"], ALL_TP_SIZES)
        return tuple(tables)

    @field_validator(*_LARGEST, mode="before")
    @classmethod
    def _check_sizes(cls, value: Any, info: ValidationInfo) -> tuple[int, ...] | None:
        if value is None and info.field_name in ("max_num_batched_tokens", "max_num_seqs"):
            value = _engines_own(info, info.field_name)
        return None if value is None else expand_sizes(value, _LARGEST[str(info.field_name)])

    @field_validator("front_end", mode="before")
    @classmethod
    def _check_front_end(cls, value: Any) -> str | float | None:
        """Check a named front end or its milliseconds."""
        return None if value is None else front_end_given("front_end", value)

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, value: str | None) -> str | None:
        # of a folder, what was read: its file may change before the sweep goes on
        return None if value is None else Lora.of(value).words

    @field_validator("rate", mode="before")
    @classmethod
    def _check_rates(cls, value: Any) -> tuple[float, ...] | None:
        return None if value is None else expand_reals(value, 0, 1e6, above=True)

    @field_validator("prefix_hit", mode="before")
    @classmethod
    def _check_hits(cls, value: Any) -> tuple[float, ...]:
        return expand_reals(value, 0, 0.999)

    @field_validator("constraints", "speculation", mode="before")
    @classmethod
    def _take_tables(cls, value: Any) -> Any:
        return value.model_dump() if isinstance(value, BaseModel) else value

    @field_validator("gpu_hour_price", mode="before")
    @classmethod
    def _check_price(cls, value: Any, info: ValidationInfo) -> Any:
        prices = list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
        for price in prices:
            if not is_number(price) or price <= 0:
                raise ValueError(f"got {shown(price)}, need a number above 0, or a table of prices by GPU")
        if isinstance(value, dict):
            # the spec uses the name of a GPU that is given by its file
            gpu_names = {load_gpu(gpu).name for gpu in info.data.get("gpus", ())}
            names = {gpu: gpu if gpu in gpu_names else load_gpu(gpu).name for gpu in value}
            return {names[gpu]: float(price) for gpu, price in value.items()}
        return None if value is None else float(value)

    @model_validator(mode="after")
    def _check_together(self) -> DeploymentSpec:
        if "keep" not in self.model_fields_set:
            # the front of two rates holds the best of either, but not the best of another objective
            is_front = "k" not in self.model_fields_set and self.objective in RATES
            object.__setattr__(self, "keep", "pareto" if is_front else "best")
        problems = list(self._contradictions())
        if problems:
            raise ValueError("; ".join(problems))
        self._check_counts()
        return self

    def _contradictions(self) -> list[str]:
        problems = []
        changed = [key for key in _SPLIT_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if self.split is not None and changed:
            problems.append(f"split: sets {' and '.join(changed)} itself; give only one of them")
        if (self.clients is None) == (self.rate is None):
            got = "neither" if self.clients is None else "both"
            problems.append(f"clients: need clients or rate, got {got}")
        laid_out = [key for key in ("replicas", "prefill_workers", "decode_workers") if getattr(self, key)]
        if self.total_gpus is not None and laid_out:
            problems.append(f"total_gpus: determines {' and '.join(laid_out)}; give only one of them")
        if "disaggregated" in self.mode:
            if self.osl[0] < 2:
                problems.append("osl: mode 'disaggregated' needs at least 2, else there is nothing to decode")
            if self.prefix_hit[-1] > 0:
                problems.append("prefix_hit: above 0 needs mode 'aggregated'")
        if (
            self.speculation is not None
            and self.max_num_batched_tokens[0] <= self.speculation.num_draft_tokens
        ):
            most = self.speculation.num_draft_tokens + 1
            problems.append(
                f"max_num_batched_tokens: must be at least {most}, which a request verifies per step"
            )
        prices = self.gpu_hour_price
        if self.objective == "cost" and prices is None:
            problems.append("objective: 'cost' needs a gpu_hour_price")
        if self.objective == "energy":
            problems += energy_problems(self.mode, self.gpus, self.speculation is not None, self.histogram)
        if isinstance(prices, dict):
            missing = [gpu for gpu in self.gpu_names if gpu not in prices]
            if missing:
                problems.append(f"gpu_hour_price: missing for {', '.join(missing)}")
        unknown = "request_rate_per_s" if self.rate is None else "clients"
        if unknown in self.per:
            problems.append(f"per: {unknown} is not an axis of this sweep")
        return problems

    def _check_counts(self) -> None:
        fixed = {key: len(getattr(self, key)) for key in ("models", "gpus", "dtype", "kv_dtype", "engine")}
        load = {key: len(values) for key, values in self.load_axes.items()}
        counts = fixed | {"layouts": sum(self.layouts_by_split.values())} | load
        count_problem(counts, "candidates", MAX_CANDIDATES, "")
        if self.keep == "all":
            count_problem(counts, "rows", MAX_ROWS, ", or keep = 'best' or 'pareto'")
            return
        grouped = {key: size for key, size in load.items() if key in self.per}
        if {"replicas", "prefill_workers", "decode_workers", "total_gpus"} & set(self.per):
            grouped["layouts"] = max(self.layouts_by_split.values())
        if grouped:
            count_problem(grouped, "groups per plan", MAX_GROUPS, ", or remove it from per")

    @property
    def splits(self) -> tuple[tuple[int, Split], ...]:
        """Return the layouts of ``split``, by default all combinations of sizes; each with every routing."""
        if self.split is None:
            return super().splits
        choices = itertools.product(dict.fromkeys(self.split), self.routing)
        return tuple((each.tp, Split(each.pp, each.dp, each.ep, routing)) for each, routing in choices)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """Return the GPUs' names, as in results."""
        return tuple(load_gpu(gpu).name for gpu in self.gpus)

    @property
    def load_axes(self) -> dict[str, tuple[float, ...]]:
        """Return the axes of the load by column name, the slowest-varying first."""
        rates = self.rate
        return {
            "isl": self.isl,
            "osl": self.osl,
            **({"clients": self.clients or ()} if rates is None else {"request_rate_per_s": rates}),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "prefix_hit": self.prefix_hit,
        }

    def num_layouts(self, mode: str, gpus_each: int) -> int:
        """Return the number of requested layouts, including impossible ones."""
        if self.total_gpus is None:
            workers = len(self.prefill_workers or (1,)) * len(self.decode_workers or (1,))
            return len(self.replicas or (1,)) if mode == "aggregated" else workers
        if mode == "aggregated":
            return len(self.total_gpus)
        return sum(total // gpus_each - 1 if _splits(total, gpus_each) else 1 for total in self.total_gpus)

    def layouts(self, mode: str, gpus_each: int) -> tuple[Layout, ...]:
        """Return the possible layouts: every split of a number of GPUs into replicas or workers."""
        if mode == "aggregated":
            return tuple(Layout(count, 0, 0) for count in self.replica_counts(gpus_each))
        if self.total_gpus is None:
            both = itertools.product(self.prefill_workers or (1,), self.decode_workers or (1,))
            return tuple(Layout(0, *pair) for pair in both)
        return tuple(
            Layout(0, prefill, total // gpus_each - prefill)
            for total in self.total_gpus
            if _splits(total, gpus_each)
            for prefill in range(1, total // gpus_each)
        )

    @property
    def layouts_by_split(self) -> dict[tuple[str, tuple[int, Split]], int]:
        """Return the number of layouts, possible or not, by mode and split."""
        return {
            (mode, (tp, split)): self.num_layouts(mode, tp * split.pp * split.dp)
            for mode, (tp, split) in itertools.product(self.mode, self.splits)
        }

    @property
    def num_candidates(self) -> int:
        """Return the number of all candidates, possible or not."""
        return (
            self.num_plans
            * sum(self.layouts_by_split.values())
            * math.prod(map(len, self.load_axes.values()))
        )

    @property
    def num_configurations(self) -> int:
        """Return the number of possible deployments to compare, whatever their load."""
        layouts = sum(
            len(self.layouts(mode, tp * split.pp * split.dp))
            for mode, (tp, split) in itertools.product(self.mode, self.splits)
        )
        return self.num_plans * layouts * len(self.max_num_batched_tokens) * len(self.max_num_seqs)

    @property
    def plan_options(self) -> dict[str, Any]:
        """Options of all plans of the sweep."""
        return {**super().plan_options, "front_end": self.front_end, "lora": self.lora}

    @property
    def all_models(self) -> tuple[str, ...]:
        """Return all models that the results depend on, including a draft's."""
        draft = None if self.speculation is None else self.speculation.draft_model
        return self.models if draft is None else (*self.models, draft)

    def accepted_sources(self) -> dict[str, str]:
        """Return what an acceptance length of ``auto`` was measured on, by model; empty if it is given."""
        # fastroof.serving imports loops
        from fastroof.plan.acceptance_curves import accepted_auto

        speculation = self.speculation
        if speculation is None or speculation.accepted != AUTO:
            return {}
        sources = {}
        for name in self.models:
            model = load_model(name).name
            length, source = accepted_auto(model, speculation.num_draft_tokens, speculation.drafter)
            sources[model] = f"{length:g} tokens a step ({source})"
        return sources

    def plan_key(self, row: Mapping[str, Any]) -> PlanKey:
        """Return the plan of a row, by the names in this spec, which may be paths."""
        return PlanKey(
            next(name for name in self.models if load_model(name).name == row["model"]),
            next(name for name in self.gpus if load_gpu(name).name == row["gpu"]),
            row["tp"], row["dtype"], row["kv_dtype"],
            next(name for name in self.engine if load_engine(name).name == row["engine"]),
            row["pp"], row["dp"], row["ep"],
            ANY_ROUTING if row["routing"] == NO_ROUTING else row["routing"],
        )  # fmt: skip

    def price(self, gpu: str) -> float | None:
        """Return the price per hour of a GPU, given by its name in results."""
        prices = self.gpu_hour_price
        return prices.get(gpu) if isinstance(prices, dict) else prices
