"""Breakdown by operator of the steps behind a sweep's rows, and their plot."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.checks import is_number
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import MEASURED
from fastroof.errors import FastroofError
from fastroof.models import load_model
from fastroof.models.execution import AUTO, ROUTINGS
from fastroof.report import plots
from fastroof.report.results_file import Results
from fastroof.units import MS_PER_S, US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.plan.explain import OperatorTime
    from fastroof.tables import Tables


_NEARLY_WHOLE: Final = 0.03
"""Prompts per step within this distance of an integer are rounded to it."""
_MAX_TOKENS: Final = 8192
_MAX_SEQS: Final = 1024


class LeadingStep(NamedTuple):
    """A step of a row, broken down by operator."""

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
    """Plans of the rows of one results file, compiled on demand."""

    results: Results
    problems: dict[str, int] = field(default_factory=dict)
    _plans: dict[tuple[Any, ...], StepPlan] = field(default_factory=dict, repr=False)
    _tables: dict[str, Tables | None] = field(default_factory=dict, repr=False)

    def steps(self, row: Mapping[str, Any]) -> list[LeadingStep]:
        """Break down the steps of one row; on failure return nothing and count the error in ``problems``."""
        try:
            steps = steps_of_row(self.results.kind.name, row)
            return [self._explained(self._plan(row, steps), step) for step in steps]
        except FastroofError as error:
            self.problems[str(error)] = self.problems.get(str(error), 0) + 1
            return []

    def gpu(self, name: str) -> GpuSpec:
        """Return the GPU with this name in the results."""
        return load_gpu(self._given_gpu(name))

    def _given_gpu(self, name: str) -> str:
        """Return the name or path by which the sweep was given a GPU."""
        for gpu in (name, *self._spec.get("gpus", [self._spec.get("gpu", name)])):
            with suppress(FastroofError):
                if load_gpu(gpu).name == name:
                    return str(gpu)
        return name

    @property
    def stale(self) -> bool:
        """Return whether the measured tables have changed since the sweep."""
        loaded = [tables for tables in self._tables.values() if tables is not None]
        then = self.results.metadata.get("fastroof.sources_hash", "")
        return bool(then) and any(tables.sources_hash not in then for tables in loaded)

    @property
    def _spec(self) -> dict[str, Any]:
        return self.results.metadata_json("fastroof.spec")

    def _plan(self, row: Mapping[str, Any], steps: Sequence[_Requests]) -> StepPlan:
        from fastroof.plan import compile_plan

        tokens = max(sum(new for new, _ in step.requests) for step in steps)
        seqs = max(len(step.requests) for step in steps)
        size = (_room(tokens, _MAX_TOKENS), _room(seqs, _MAX_SEQS))
        values = [row.get(name) for name in ("model", "gpu", "tp", "dtype", "kv_dtype", "engine")]
        split = _split(row)
        key = (*values, *split.values(), *size)
        if key not in self._plans:
            model, gpu, tp, dtype, kv_dtype, engine = values
            spec = self.gpu(str(gpu))
            with warnings.catch_warnings():
                # the page itself reports that nothing was measured
                warnings.simplefilter("ignore", UserWarning)
                self._plans[key] = compile_plan(
                    self._model(str(model)),
                    spec,
                    self._measured(spec),
                    tp=tp if isinstance(tp, int) else 1,
                    dtype=str(dtype or AUTO),
                    kv_dtype=str(kv_dtype or AUTO),
                    engine=self._engine(str(engine or "kernels")),
                    method=str(self._spec.get("method", "roofline")),
                    max_num_batched_tokens=size[0],
                    max_num_seqs=size[1],
                    **split,
                )
        return self._plans[key]

    def _measured(self, gpu: GpuSpec) -> Tables | None:
        from fastroof.tables.table_set import chosen_tables

        if gpu.name not in self._tables:
            where = self._spec.get("tables") or MEASURED
            given = self._given_gpu(gpu.name)
            self._tables[gpu.name] = chosen_tables(where, given, self._spec.get("source"))
        return self._tables[gpu.name]

    def _model(self, name: str) -> Any:
        """Return the spec's model with this name, or the preset."""
        for given in self._spec.get("models", ()):
            try:
                model = load_model(given)
            except FastroofError:
                continue
            if model.name == name:
                return model
        return load_model(name)

    def _engine(self, name: str) -> str:
        engines = self._spec.get("engine", name)
        paths = [engines] if isinstance(engines, str) else engines
        return next((path for path in paths if str(path).endswith(f"{name}.toml")), name)

    def _explained(self, plan: StepPlan, step: _Requests) -> LeadingStep:
        explanation = plan.explain(step.requests)
        # the page lists the engine's overheads by their group
        operators = tuple(part for part in explanation.operators if part.role != "runtime")
        present = {name: us for name, us in plots.grouped_us(plan, explanation.operators).items() if us > 0}
        return LeadingStep(step.name, step.what, explanation.total_us, present, operators)


def _split(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's layout other than tp; results of early versions have none."""
    split: dict[str, Any] = {name: int(_number(row.get(name), 1)) for name in ("pp", "dp", "ep")}
    routing = row.get("routing")
    return split | {"routing": routing if routing in ROUTINGS else None}


def _room(needed: int, usual: int) -> int:
    """Return the usual size of a plan, or the next power of two, so that rows can share plans."""
    return usual if needed <= usual else 1 << (needed - 1).bit_length()


def steps_of_row(kind: str, row: Mapping[str, Any]) -> list[_Requests]:
    """Return the representative steps of a row of results."""
    if kind == "steps":
        batch, kv_len = int(row["batch_size"] or 0), int(row["kv_len"])
        if not batch:
            raise FastroofError("no batch is within the limits")
        return [_decodes(batch, max(kv_len, 2))]
    if _number(row.get("num_draft_tokens"), 0.0) > 0.0:
        raise FastroofError("steps that verify draft tokens cannot be broken down by operator")
    numbers = {name: _number(row.get(name)) for name in _NEEDED}
    missing = [name for name in _NEEDED if math.isnan(numbers[name])]
    if missing:
        raise FastroofError(f"the row has no {', '.join(missing)}")
    workers = max(1, int(_number(row.get("replicas"), 0)), int(_number(row.get("decode_workers"), 0)))
    # each batch in flight counts as a worker on tp GPUs
    split = _split(row)
    workers *= split["pp"] * split["dp"]
    # tokens/s of one worker; not from total_gpus, which includes prefill workers
    rate = _number(row.get("tokens_per_s")) / workers
    if math.isnan(rate):
        rate = numbers["tokens_per_s_per_gpu"] * numbers["tp"]
    isl, osl, step_s = int(numbers["isl"]), int(numbers["osl"]), numbers["tpot_ms"] / MS_PER_S
    batch = max(1, round(rate * step_s))
    decodes = _decodes(batch, max(2, isl + osl // 2))
    budget = int(_number(row.get("max_num_batched_tokens"), _MAX_TOKENS))
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
        # whole prompts: measured GEMMs may take 25 % longer for a few tokens more or less
        arrivals = prompts * new
    tokens = max(1, min(round(arrivals), max(1, budget - batch)))
    return [decodes, _prompts("step with prompts", decodes.requests, tokens, new, cached)]


_NEEDED: Final = ("isl", "osl", "tpot_ms", "tokens_per_s_per_gpu", "tp")


def _decodes(batch: int, kv_len: int) -> _Requests:
    noun = "request" if batch == 1 else "requests"
    return _Requests("decode step", f"{batch:,} {noun} at kv_len {kv_len:,}", [(1, kv_len - 1)] * batch)


def _prompts(name: str, decodes: list[tuple[int, int]], tokens: int, prompt: int, cached: int) -> _Requests:
    """Return prompt tokens as whole prompts, and the rest as one chunk half-way through its prompt."""
    prompts, rest = divmod(tokens, prompt)
    chunks = [(prompt, cached)] * prompts
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
    """Return an operator's FLOPs per byte and FLOP/s; None if it computes nothing."""
    if part.flops <= 0 or part.moved_bytes <= 0 or part.total_us <= 0:
        return None
    return part.flops / part.moved_bytes, part.flops / part.total_us * US_PER_S
