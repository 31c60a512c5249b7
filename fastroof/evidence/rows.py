"""A run measured end to end: the served model, engine and load, and the clients' TTFT and TPOT."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from fastroof.engines import EngineProfile, Recipe, engine_of_version, recipe_for
from fastroof.engines.front_end import NAMES, NO_FRONT_END
from fastroof.engines.values import UNKNOWN_VERSION
from fastroof.evidence.steps.measured_steps import plan_dtype_of
from fastroof.models.layout import Layout
from fastroof.plan.speculation import SpeculativeDecoding

CLIENT, ENGINE_CLOCK = "client", "engine"
CLOCKS: Final = (CLIENT, ENGINE_CLOCK)
"""Who took a run's times: its clients, behind HTTP and tokenizer, or the engine's scheduler."""

LARGEST_STEP: Final = 16384
"""Tokens of the largest step of a row's plan, unless the row has a larger one."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A measured model: source, GPU, engine, version, format and layout."""

    dataset: str
    row: str
    gpu: str
    engine: str
    engine_version: str
    checkpoint: str
    model: str
    dtype: str
    kv_dtype: str
    kv_dtype_from: str
    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1
    left_out: str
    clock: str = CLIENT

    def on_its_clock(self, profile: EngineProfile) -> EngineProfile:
        """Return a profile without a front end if the engine's own clock took the times."""
        return profile if self.clock == CLIENT else replace(profile, front_end=NO_FRONT_END)

    @property
    def layout(self) -> Layout:
        """Layout of its engine."""
        return Layout(self.tp, self.pp, self.dp, self.ep)

    @property
    def plan_dtype(self) -> str:
        """The ``dtype`` option of its plan: ``auto`` if the checkpoint defines each layer's format."""
        return plan_dtype_of(self.model, self.dtype)

    @property
    def engine_profile(self) -> EngineProfile:
        """The packaged profile of its engine and version."""
        # of an unknown version: not the newest; limits that a row does not state are those of its profile
        profile = engine_of_version(self.engine, self.engine_version or UNKNOWN_VERSION)
        profile = replace(profile, scheduling=replace(profile.scheduling, by_card=False))
        return self.started(profile)

    @property
    def started_settings(self) -> frozenset[str]:
        """Known settings that its engine was started with, as ``EngineProfile.started_with`` takes them."""
        return frozenset()

    def started(self, profile: EngineProfile) -> EngineProfile:
        """Return a profile as the row's engine was started."""
        return profile.started_with(self.started_settings)


@dataclass(frozen=True, kw_only=True)
class ServingRow(ServedModel):
    """One measured run: clients with one request in flight each, and the means that they saw."""

    isl: float
    osl: float
    concurrency: float
    length_factor: float = 1.0
    prefix_tokens: float = 0.0
    requests_per_client: float
    frontend: str = ""
    ttft_ms: float
    tpot_ms: float
    aic_ttft_ms: float = math.nan
    aic_tpot_ms: float = math.nan
    architecture: str = ""
    bench: str = ""
    length_spread: float = 0.0
    measured_on: str = ""
    also_as: str = ""
    decode_workers: int = 0
    prefill_workers: int = 0
    prefill_tp: int = 0
    prefill_dp: int = 0
    prefill_ep: int = 0
    exchange: str = ""
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    order: str = ""
    settings_from: str = ""
    speculation: SpeculativeDecoding | None = None
    draft_model: str = ""
    draft_tp: int = 1

    def on_its_clock(self, profile: EngineProfile) -> EngineProfile:
        """Return a profile behind the front end of the row's bench, if it is a named one."""
        profile = super().on_its_clock(profile)
        named = self.frontend if self.clock == CLIENT and self.frontend in NAMES else ""
        return profile.behind(named) if named else profile

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode run on separate engines."""
        return self.decode_workers > 0

    @property
    def bench_label(self) -> str:
        """The bench that measured it: by its protocol, its front end, or its data set."""
        return self.bench or self.frontend or self.dataset

    @property
    def whole_model(self) -> str:
        """The model under which its rows are left out, in any format."""
        return self.architecture or self.model

    @property
    def schedule(self) -> dict[str, Any]:
        """Return its engine's schedule, as :func:`fastroof.serving.estimate` takes it."""
        engine = self.engine_profile
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens or engine.scheduling.max_num_batched_tokens,
            "chunked_prefill": engine.scheduling.chunked_prefill,
            "kv_reservation": engine.memory.kv_reservation,
            "max_num_seqs": self.engine_seqs,
            "order": self.order or engine.scheduling.order,
            "length_spread": self.length_spread,
            "wait_steps": self.wait_steps,
        }

    @property
    def _recipe(self) -> Recipe | None:
        """How the public benchmark launched its engine; None for other runs."""
        if self.bench != "inferencemax":
            return None
        return recipe_for(
            self.engine, self.engine_version, self.gpu, self.whole_model, self.dtype,
            layout=(self.tp, self.dp, self.ep), measured_on=self.measured_on,
        )  # fmt: skip

    @property
    def started_settings(self) -> frozenset[str]:
        """Known settings of its engine: the public benchmark's recipes fuse kernels and cache no prefixes."""
        has = {
            "speculation": self.speculation is not None,
            "disaggregation": self.is_disaggregated,
            "fused": self._recipe is not None,
            "no_prefix_cache": self._recipe is not None,
        }
        return frozenset(name for name, is_on in has.items() if is_on)

    @property
    def memory_fraction(self) -> float:
        """Share of memory that the public benchmark's launch script set; 0 for the engine's own."""
        return 0.0 if self._recipe is None else self._recipe.memory_fraction

    def started(self, profile: EngineProfile) -> EngineProfile:
        """Return a profile as the row's engine was started, with its share of memory."""
        profile = super().started(profile)
        if not self.memory_fraction:
            return profile
        return replace(profile, memory=replace(profile.memory, fraction=self.memory_fraction))

    @property
    def wait_steps(self) -> int:
        """Steps that prompts wait for others, from the public benchmark's launch scripts."""
        recipe = self._recipe
        return 0 if recipe is None else recipe.steps_to_wait(self.isl, self.osl, self.tp, self.concurrency)

    @property
    def engine_seqs(self) -> int:
        """Maximum number of concurrent requests of its engine, for which vLLM reserves memory."""
        if self.max_num_seqs:
            return self.max_num_seqs
        limit = self.engine_profile.scheduling.max_num_seqs
        # rows of a source without versions and benchmark names are InferenceMAX's if their lengths are
        limits = self.bench == "inferencemax" or not (self.bench or self.frontend or self.length_factor == 1)
        return min(limit, max(round(self.concurrency), 1)) if limits and self.engine == "vllm" else limit

    @property
    def is_single(self) -> bool:
        """Whether one request was in flight: its TPOT is the decode step of batch 1."""
        return self.concurrency == 1

    @property
    def mean_isl(self) -> float:
        """Mean tokens of a prompt."""
        return self.isl * self.length_factor

    @property
    def mean_osl(self) -> float:
        """Mean tokens of an output."""
        return self.osl * self.length_factor


class LeftOut(NamedTuple):
    """Rows of a source that are not evaluated, and why; ``quantity`` if a row's others are evaluated."""

    source: str
    reason: str
    rows: int
    quantity: str = ""
