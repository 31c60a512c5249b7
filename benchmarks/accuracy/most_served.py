"""Steps of the most-served models by fastroof and aiconfigurator-core, and the part that differs.

    python -m benchmarks.accuracy most-served

Models and layouts are those of the most runs in the package's sample. Needs aiconfigurator-core;
:mod:`benchmarks.accuracy.aiconfigurator_steps` times the steps.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.accuracy.aiconfigurator_estimates import aiconfigurator_version
from benchmarks.accuracy.aiconfigurator_steps import STEPS, StepCase, SteppedCase, stepped_cases
from benchmarks.accuracy.silicon_sample import SAMPLE_FILE
from fastroof.errors import TableError
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.models import Layout
from fastroof.models.execution import AUTO

GPUS: Final = ("h200", "b200")
ENGINES: Final = ("vllm", "sglang", "trtllm-1.1")
COUNT: Final = 10
SHOWN_FROM: Final = 0.1
"""Difference from which the cause is named."""
_SIZES: Final = (8, 4, 2, 1)

_SAME: Final = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "nvidia/DeepSeek-R1-NVFP4": "nvidia/DeepSeek-V3.1-NVFP4",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "zhipuai/GLM-5": "zai-org/GLM-5-FP8",
}
"""Models whose config.json has another name in the package: DeepSeek-R1 is built as V3."""


class ServedModel(NamedTuple):
    """A model of the sample, its runs and layouts."""

    model: str
    rows: int
    layouts: dict[str, list[Layout]]

    def layouts_on(self, gpu: str) -> list[Layout]:
        """Return layouts to try on a GPU: its own first, then those of other GPUs."""
        return list(dict.fromkeys([*self.layouts.get(gpu, ()), *self.layouts.get("", ())]))


def most_served(count: int = COUNT, path: str | Path | None = None) -> tuple[ServedModel, ...]:
    """Count the runs of the sample by model; one architecture counts as one."""
    path = installed_root() / SAMPLE_FILE if path is None else Path(path)
    rows: Counter[str] = Counter()
    layouts: dict[str, dict[str, Counter[Layout]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for cell in csv.DictReader(file):
                model = _SAME.get(cell["model_path"], cell["model_path"])
                rows[model] += 1
                layout = _layout(cell)
                if layout is not None:
                    of_model = layouts.setdefault(model, {})
                    for gpu in (SYSTEMS.get(cell["system"], ""), ""):
                        of_model.setdefault(gpu, Counter())[layout] += 1
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise TableError(f"{path}: cannot be read as the sample of aiconfigurator-core: {error!r}") from None
    return tuple(
        ServedModel(model, runs, {gpu: _by_runs(found) for gpu, found in layouts.get(model, {}).items()})
        for model, runs in rows.most_common(count)
    )


def _layout(cell: Mapping[str, str]) -> Layout | None:
    """Return the layout of a run; None unless it is aggregated, in one node, without replicas."""
    if cell["mode"] != "agg" or cell["pp_size"] != "1" or cell["attention_dp_size"] not in ("", "0", "1"):
        return None
    # a dense model has 0, 1 or nothing
    tp, ep = int(cell["tp_size"]), max(1, int(cell["moe_ep_size"] or 1))
    return Layout(tp, ep=ep) if tp in _SIZES and tp % ep == 0 else None


def _by_runs(found: Counter[Layout]) -> list[Layout]:
    return sorted(found, key=lambda layout: (-found[layout], layout.tp, layout.ep))


class ServedSteps(NamedTuple):
    """A model, GPU and engine: each of :data:`STEPS` by both, or the reason for no answer."""

    case: StepCase
    steps: tuple[SteppedCase, ...]
    why_not: str


def served_steps(
    models: Iterable[ServedModel], gpus: Sequence[str] = GPUS, engines: Sequence[str] = ENGINES
) -> Iterator[ServedSteps]:
    """Time the steps of models in the first layout that both answer and that fits the memory."""
    for served in models:
        for gpu in gpus:
            layouts = list(dict.fromkeys([*served.layouts_on(gpu), *map(Layout, _SIZES)]))
            for engine in engines:
                yield _first_answered([StepCase(served.model, gpu, engine, one, AUTO) for one in layouts])


def _first_answered(cases: Sequence[StepCase]) -> ServedSteps:
    """Return the first case that both answer; otherwise the reason of the first."""
    first = ""
    for case in cases:
        stepped = tuple(stepped_cases([case]))
        why_not = next((one.why_not for one in stepped if one.why_not), "")
        if not why_not:
            return ServedSteps(case, stepped, "")
        first = first or why_not
    return ServedSteps(cases[0], (), first)


def cause_of(stepped: SteppedCase) -> str:
    """Return the part that explains a difference of 10 % or more, ms by both; empty below."""
    if abs(stepped.apart) < SHOWN_FROM:
        return ""
    sign = 1.0 if stepped.apart > 0 else -1.0
    part = max(stepped.own_ms, key=lambda name: sign * (stepped.own_ms[name] - stepped.their_ms[name]))
    donor = stepped.donors.get(part, "")
    from_what = f" (from {donor.removeprefix('aiconfigurator-')})" if donor else ""
    return f"{part} {stepped.own_ms[part]:.2f}, {stepped.their_ms[part]:.2f}{from_what}"


def main() -> None:
    """Compare steps of the most-served models with aiconfigurator-core, as Markdown."""
    columns: tuple[str, ...] = ("model", "gpu", "engine", "layout")
    for name in STEPS:
        columns += (f"{name}: fastroof, it, ms", "apart", "most by")
    for cells in (columns, ["---"] * len(columns)):
        print(f"| {' | '.join(cells)} |")
    refused: dict[str, list[str]] = {}
    for served in served_steps(most_served()):
        case = served.case
        what = (case.model.split("/")[1], case.gpu, case.engine, str(case.layout))
        if served.why_not:
            refused.setdefault(served.why_not, []).append(" ".join(what[:3]))
            continue
        cells = []
        for one in served.steps:
            own, theirs = sum(one.own_ms.values()), sum(one.their_ms.values())
            cells += [f"{own:.2f}, {theirs:.2f}", f"{one.apart:+.1%}", cause_of(one)]
        print(f"| {' | '.join((*what, *cells))} |", flush=True)
    for why, places in refused.items():
        print(f"\nNo answer: {', '.join(places)}: {why}")
    print(f"\naiconfigurator-core {aiconfigurator_version()}; kernels alone.")
