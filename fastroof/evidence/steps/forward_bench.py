"""``vllm bench forward --output-json``: forwards of exact batches, each as one CUDA graph.

Read in vllm/benchmarks/forward of vLLM 0.33.0. A graph holds the target model's forward up to its hidden
states, and by default the drafter's. LM head, sampling and the host are not in it. The file names neither
model, GPU nor layout: the engine's arguments do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.acceptance import MTP
from fastroof.checks import is_number, is_whole_number, shown
from fastroof.documents import read_json
from fastroof.errors import TableError
from fastroof.evidence.engine_arguments import EngineArguments
from fastroof.evidence.steps.measured_steps import MeasuredStep, phase_of, step_of_engine
from fastroof.load.steps_file import MAX_REQUESTS

FORWARD_DATASET: Final = "vllm bench forward"
CASE_KEYS: Final = ("case", "requests", "ranks")
TARGET_ONLY: Final = "target_only"
LARGEST_SIZE: Final = 2**30
MOST_US: Final = 1e9
MOST_SPREAD_PERCENT: Final = 0.5
"""Spread of the samples' medians above which vLLM calls a timing unstable."""

_FIELDS: Final = ("query_len", "kv_len", "num_draft_tokens")


def read_cases(path: Path) -> list[Mapping[str, Any]]:
    """Read the cases of a file."""
    document = read_json(path, TableError)
    is_list = isinstance(document, list) and bool(document)
    if not is_list or not all(isinstance(one, Mapping) and one.keys() >= set(CASE_KEYS) for one in document):
        raise TableError(
            f"{path}: not written by `vllm bench forward --output-json`: a list of {', '.join(CASE_KEYS)}"
        )
    return list(document)


def ranks_of(path: Path, cases: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of GPUs that ran every case."""
    counts = {len(case["ranks"]) if isinstance(case["ranks"], list) else 0 for case in cases}
    if len(counts) != 1 or 0 in counts:
        raise TableError(f"{path}: every case must have the ranks of the same GPUs, found {sorted(counts)}")
    return counts.pop()


def steps_of(path: Path, cases: Sequence[Mapping[str, Any]], engine: EngineArguments) -> list[MeasuredStep]:
    """Return the steps of a file that an engine with these arguments ran."""
    gpus = ranks_of(path, cases)
    if engine.layout.world_size != gpus:
        raise TableError(
            f"{path}: {gpus} GPUs ran its cases, and the arguments lay the model out on "
            f"{engine.layout.world_size} ({engine.layout})"
        )
    return [_step(path, case, engine) for case in cases]


def _step(path: Path, case: Mapping[str, Any], engine: EngineArguments) -> MeasuredStep:
    where = f"{path}, case {str(case['case'])[:60]!r}"
    requests = case["requests"]
    if not isinstance(requests, list) or not 1 <= len(requests) <= MAX_REQUESTS:
        raise TableError(f"{where}: requests must be a list of 1 to {MAX_REQUESTS:,} requests")
    sizes = [_sizes(where, request) for request in requests]
    us: Any = case.get("median_us")
    if not is_number(us) or not 0.0 < us <= MOST_US:
        raise TableError(f"{where}: median_us must be above 0 and at most {MOST_US:g}, got {us!r}")
    new = tuple(query for query, _, _ in sizes)
    context = tuple(kv - query for query, kv, _ in sizes)
    drafts = max(draft for _, _, draft in sizes)
    first = _first_rank(case)
    is_drafted = first.get("timing_scope", TARGET_ONLY) != TARGET_ONLY
    return step_of_engine(
        engine, new, context, phase=phase_of(new, context, drafts), latency_us=float(us),
        num_draft_tokens=drafts, timed="forward", dataset=FORWARD_DATASET,
        left_out=_why_not(first, sizes, engine),
        drafted=engine.drafts.num_draft_tokens if is_drafted and engine.drafts is not None else 0,
    )  # fmt: skip


def _first_rank(case: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a case was measured on its first GPU; empty if it is not stated."""
    first = case["ranks"][0]
    return first if isinstance(first, Mapping) else {}


def _sizes(where: str, request: Any) -> tuple[int, int, int]:
    values = [request.get(name, 0) for name in _FIELDS] if isinstance(request, Mapping) else []
    if not values or not all(is_whole_number(value, 0, LARGEST_SIZE) for value in values):
        raise TableError(
            f"{where}: a request needs {', '.join(_FIELDS)} as whole numbers, got {shown(request)}"
        )
    query, kv, drafts = values
    if query < 1 or kv < query:
        raise TableError(f"{where}: a request needs 1 <= query_len <= kv_len, got {query} and {kv}")
    return query, kv, drafts


def _why_not(first: Mapping[str, Any], sizes: Sequence[tuple[int, int, int]], engine: EngineArguments) -> str:
    """Return why a case cannot be compared; empty if it can."""
    if engine.layout.pp > 1:
        return "pipelines of stages are timed as a stream of micro-batches, which is not compared"
    if first.get("timing_scope", TARGET_ONLY) != TARGET_ONLY:
        if engine.drafts is None:
            return "its drafter is timed too, and the arguments name none; measure with --exclude-drafter"
        if engine.drafts.draft != MTP:
            return (
                "its drafter is timed too, and only one like a layer of the model is compared; measure with "
                "--exclude-drafter"
            )
    if first.get("finite") is False:
        return "the model's output was not finite"
    tokens = sum(query for query, _, _ in sizes)
    if first.get("num_tokens", tokens) != tokens:
        return "a prefix hit was replayed: more tokens were computed than its requests have"
    drafts = {draft for _, _, draft in sizes}
    decodes = [query == 1 + draft and kv > query for query, kv, draft in sizes]
    if drafts != {0} and not (len(drafts) == 1 and all(decodes)):
        return "a step that verifies drafts is predicted only if all its requests verify equally many"
    return ""


def notes_of(cases: Sequence[Mapping[str, Any]], has_experts: bool) -> list[str]:
    """Return messages about how cases were measured."""
    firsts = list(map(_first_rank, cases))
    notes = []
    if has_experts and any(first.get("routing") == "real" for first in firsts):
        notes.append(
            "experts were routed by the gates; with dummy weights that is skewed (--routing balanced)"
        )
    unstable = sum(1 for first in firsts if _spread(first) > MOST_SPREAD_PERCENT)
    if unstable:
        notes.append(f"{unstable} cases spread by more than {MOST_SPREAD_PERCENT:g} % between samples")
    return notes


def _spread(first: Mapping[str, Any]) -> float:
    latency = first.get("latency_us")
    spread: Any = latency.get("sample_spread_pct") if isinstance(latency, Mapping) else None
    return float(spread) if is_number(spread) else 0.0
