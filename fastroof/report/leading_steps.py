"""The steps behind rows of a sweep's results, broken down by operator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.checks import is_number
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import FastroofError
from fastroof.models import load_model
from fastroof.models.execution import AUTO, ROUTINGS
from fastroof.report.components import component_words
from fastroof.units import MS_PER_S, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.plan.explain import OperatorTime
    from fastroof.report.results_file import Results
    from fastroof.tables import Tables

__all__ = ["GROUPS", "LeadingStep", "StepSource", "achieved", "steps_of_row"]

GROUPS: Final = (
    "linear layers",
    "experts",
    "decode attention",
    "prefill attention",
    "norms, rope, activation",
    "communication",
    "LM head",
    "runtime",
)
"""What a step's operators are summed up as, in the order in which they are drawn."""

_NEARLY_WHOLE: Final = 0.03
"""Prompts a step that are so near a whole number are that many."""
_MAX_TOKENS: Final = 8192
_MAX_SEQS: Final = 1024


class LeadingStep(NamedTuple):
    """One step of a row, by operator."""

    name: str
    what: str
    total_us: float
    groups_us: dict[str, float]
    operators: tuple[OperatorTime, ...]


class _Requests(NamedTuple):
    name: str
    what: str
    requests: list[tuple[int, int]]


@dataclass
class StepSource:
    """Plans of the rows of one results file, compiled when they are asked for."""

    results: Results
    problems: dict[str, int] = field(default_factory=dict)
    _plans: dict[tuple[Any, ...], StepPlan] = field(default_factory=dict, repr=False)
    _tables: dict[str, Tables | None] = field(default_factory=dict, repr=False)

    def steps(self, row: Mapping[str, Any]) -> list[LeadingStep]:
        """Break down the steps of one row; empty where that fails, which ``problems`` then says."""
        try:
            wanted = steps_of_row(self.results.kind.name, row)
            return [self._explained(self._plan(row, wanted), step) for step in wanted]
        except FastroofError as error:
            self.problems[str(error)] = self.problems.get(str(error), 0) + 1
            return []

    def gpu(self, name: str) -> GpuSpec:
        """Return the GPU that results call ``name``."""
        given = self._spec.get("gpus", [self._spec.get("gpu", name)])
        for gpu in (name, *given):
            try:
                spec = load_gpu(gpu)
            except FastroofError:
                continue
            if spec.name == name:
                return spec
        return load_gpu(name)

    @property
    def stale(self) -> bool:
        """Whether the measured tables are others than those the sweep was made from."""
        loaded = [tables for tables in self._tables.values() if tables is not None]
        # results of earlier versions know those sources alone that come first
        then = self.results.metadata.get("fastroof.sources_hash", "")
        if then:
            return any(tables.sources_hash not in then for tables in loaded)
        then = self.results.metadata.get("fastroof.tables_hash", "")
        return bool(then) and any(tables.content_hash not in then for tables in loaded)

    @property
    def _spec(self) -> dict[str, Any]:
        return self.results.metadata_json("fastroof.spec")

    def _plan(self, row: Mapping[str, Any], wanted: Sequence[_Requests]) -> StepPlan:
        from fastroof.plan import compile_plan

        tokens = max(sum(new for new, _ in step.requests) for step in wanted)
        seqs = max(len(step.requests) for step in wanted)
        size = (_room(tokens, _MAX_TOKENS), _room(seqs, _MAX_SEQS))
        words = [row.get(name) for name in ("model", "gpu", "tp", "dtype", "kv_dtype", "runtime")]
        split = _split(row)
        key = (*words, *split.values(), *size)
        if key not in self._plans:
            model, gpu, tp, dtype, kv_dtype, runtime = words
            spec = self.gpu(str(gpu))
            with warnings.catch_warnings():
                # that nothing was measured, which the page says in its own words
                warnings.simplefilter("ignore", UserWarning)
                self._plans[key] = compile_plan(
                    self._model(str(model)),
                    spec,
                    self._measured(spec),
                    tp=tp if isinstance(tp, int) else 1,
                    dtype=str(dtype or AUTO),
                    kv_dtype=str(kv_dtype or AUTO),
                    runtime=self._runtime(str(runtime or "kernels")),
                    method=str(self._spec.get("method", "roofline")),
                    max_tokens=size[0],
                    max_seqs=size[1],
                    **split,
                )
        return self._plans[key]

    def _measured(self, gpu: GpuSpec) -> Tables | None:
        from fastroof.tables import load_tables

        if gpu.name not in self._tables:
            where = self._spec.get("tables")
            self._tables[gpu.name] = (
                None
                if where == "datasheet"
                else load_tables(where or gpu.name, gpu=gpu.name, source=self._spec.get("source"))
            )
        return self._tables[gpu.name]

    def _model(self, name: str) -> Any:
        """The preset of that name, or the spec's path of a model that is called so."""
        for given in self._spec.get("models", ()):
            try:
                model = load_model(given)
            except FastroofError:
                continue
            if model.name == name:
                return model
        return load_model(name)

    def _runtime(self, name: str) -> str:
        given = self._spec.get("runtime", name)
        paths = [given] if isinstance(given, str) else given
        return next((path for path in paths if str(path).endswith(f"{name}.toml")), name)

    def _explained(self, plan: StepPlan, step: _Requests) -> LeadingStep:
        explanation = plan.explain(step.requests)
        components = {curve.operator.role: component_words(curve.operator) for curve in plan.row_curves}
        groups = dict.fromkeys(GROUPS, 0.0)
        for part in explanation.operators:
            groups[components.get(part.role, part.role.replace("_", " "))] += part.total_us
        # the page lists what the engine adds by its group
        operators = tuple(part for part in explanation.operators if part.role != "runtime")
        kept = {name: us for name, us in groups.items() if us > 0}
        return LeadingStep(step.name, step.what, explanation.total_us, kept, operators)


def _split(row: Mapping[str, Any]) -> dict[str, Any]:
    """How a row's model is split beside tp; results of before layouts say nothing of it."""
    split: dict[str, Any] = {name: int(_number(row.get(name), 1)) for name in ("pp", "dp", "ep")}
    routing = row.get("routing")
    return split | {"routing": routing if routing in ROUTINGS else None}


def _room(needed: int, usual: int) -> int:
    """The usual size of a plan, or the next power of two: few sizes, so that rows share plans."""
    return usual if needed <= usual else 1 << (needed - 1).bit_length()


def steps_of_row(kind: str, row: Mapping[str, Any]) -> list[_Requests]:
    """Say which steps a row of results stands for."""
    if kind == "steps":
        batch, kv_len = int(row["batch_size"] or 0), int(row["kv_len"])
        if not batch:
            raise FastroofError("no batch is within the limits")
        return [_decodes(batch, max(kv_len, 2))]
    if _number(row.get("num_draft_tokens"), 0.0) > 0.0:
        raise FastroofError("a step that verifies draft tokens is not broken down by operator")
    numbers = {name: _number(row.get(name)) for name in _NEEDED}
    missing = [name for name in _NEEDED if math.isnan(numbers[name])]
    if missing:
        raise FastroofError(f"the row has no {', '.join(missing)}")
    workers = max(1, int(_number(row.get("replicas"), 0)), int(_number(row.get("decode_workers"), 0)))
    # a worker's batches in flight are as many of them, each on tp GPUs
    split = _split(row)
    workers *= split["pp"] * split["dp"]
    # tokens a second of one of them; total_gpus counts those that prefill too, so it is no way to find it
    rate = _number(row.get("tokens_per_s")) / workers
    if math.isnan(rate):
        rate = numbers["tokens_per_s_per_gpu"] * numbers["tp"]
    isl, osl, step_s = int(numbers["isl"]), int(numbers["osl"]), numbers["tpot_ms"] / MS_PER_S
    batch = max(1, round(rate * step_s))
    decodes = _decodes(batch, max(2, isl + osl // 2))
    budget = int(_number(row.get("max_batched_tokens"), _MAX_TOKENS))
    cached = int(_number(row.get("prefix_hit"), 0.0) * isl)
    new = max(1, isl - cached)
    if row.get("mode") == "disaggregated":
        return [decodes, _prompts("prefill step", [], min(new, budget), new, cached)]
    mixed = _number(row.get("mixed_share"), 0.0)
    if mixed <= 0.0:
        return [decodes]
    running = max(1.0, _number(row.get("effective_concurrency"), math.inf) / workers)
    arrivals = rate / osl * step_s * new / mixed * (1.0 - 1.0 / running)
    prompts = max(1, round(arrivals / new))
    if abs(arrivals / new - prompts) < _NEARLY_WHOLE:
        # as they come: measured GEMMs may take a quarter more time for a few tokens more or less
        arrivals = prompts * new
    tokens = max(1, min(round(arrivals), max(1, budget - batch)))
    return [decodes, _prompts("step with prompts", decodes.requests, tokens, new, cached)]


_NEEDED: Final = ("isl", "osl", "tpot_ms", "tokens_per_s_per_gpu", "tp")


def _decodes(batch: int, kv_len: int) -> _Requests:
    noun = "request" if batch == 1 else "requests"
    return _Requests("decode step", f"{batch:,} {noun} at kv_len {kv_len:,}", [(1, kv_len - 1)] * batch)


def _prompts(name: str, decodes: list[tuple[int, int]], tokens: int, prompt: int, cached: int) -> _Requests:
    """Prompt tokens as whole prompts, and one chunk half-way through its prompt for the rest of them."""
    whole, rest = divmod(tokens, prompt)
    chunks = [(prompt, cached)] * whole
    if rest:
        chunks.append((rest, cached + (prompt - rest) // 2))
    words = f"{tokens:,} prompt tokens"
    if len(chunks) > 1:
        words += f" of {len(chunks):,} requests"
    if decodes:
        words += f", with {len(decodes):,} decode{'s' * (len(decodes) != 1)}"
    return _Requests(name, words, [*decodes, *chunks])


def _number(value: Any, default: float = math.nan) -> float:
    return float(value) if is_number(value) else default


def achieved(part: OperatorTime) -> tuple[float, float] | None:
    """Place an operator under a roofline: FLOPs a byte, and FLOP/s; None where it computes nothing."""
    if part.flops <= 0 or part.moved_bytes <= 0 or part.total_us <= 0:
        return None
    return part.flops / part.moved_bytes, part.flops / part.total_us * US_PER_S
