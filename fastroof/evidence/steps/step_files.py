"""Files of whole steps: kernels-bench (.csv), ``vllm bench forward`` (.json), passes and logs (.parquet)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.errors import TableError
from fastroof.evidence.engine_arguments import EngineArguments, read_engine_arguments
from fastroof.evidence.steps.forward_bench import notes_of, ranks_of, read_cases, steps_of
from fastroof.evidence.steps.measured_steps import MeasuredStep, read_steps
from fastroof.evidence.steps.pass_tables import read_pass_table
from fastroof.evidence.steps.step_logs import is_step_log, read_step_log
from fastroof.models import load_model

STEP_FILES: Final = (
    "steps.csv of kernels-bench, .json of `vllm bench forward`, .parquet of forward passes or of a step log"
)


class OwnSteps(NamedTuple):
    """Steps of a file, the arguments of their engine if the file does not name it, and notes."""

    steps: tuple[MeasuredStep, ...]
    engine: EngineArguments | None = None
    notes: tuple[str, ...] = ()


def read_own_steps(
    path: str | Path, engine_args: str | Path | None = None, given: Mapping[str, Any] | None = None
) -> OwnSteps:
    """Read the steps of a file, each kind with its reader."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _forward_steps(path, engine_args, dict(given or {}))
    if suffix == ".parquet":
        if is_step_log(path):
            return _logged_steps(path, engine_args, dict(given or {}))
        return OwnSteps(tuple(read_pass_table(path)))
    if suffix != ".csv" and path.is_file():
        raise TableError(f"{path} is not a file of steps; valid: {STEP_FILES}")
    return OwnSteps(read_steps(path))


def _logged_steps(path: Path, engine_args: str | Path | None, arguments: dict[str, Any]) -> OwnSteps:
    if engine_args is None and (arguments.get("gpu") is None or arguments.get("model") is None):
        raise TableError(
            f"{path} does not say what its engine ran on: give --gpu, and --engine-args with the engine's "
            "command line or --model"
        )
    engine = read_engine_arguments(engine_args, {**arguments, "engine": "vllm"})
    return OwnSteps(tuple(read_step_log(path, engine)), engine)


def _forward_steps(path: Path, engine_args: str | Path | None, arguments: dict[str, Any]) -> OwnSteps:
    cases = read_cases(path)
    notes = []
    if arguments.get("engine") not in (None, "vllm"):
        raise TableError(f"{path}: vLLM ran these steps, and --engine is {arguments['engine']}")
    if engine_args is None:
        if arguments.get("gpu") is None or arguments.get("model") is None:
            raise TableError(
                f"{path} names neither model nor GPU: give --gpu, and --engine-args with the bench's "
                "command line or --model"
            )
        gpus = ranks_of(path, cases)
        arguments |= {"tp": gpus}
        if gpus > 1:
            notes.append(
                f"{path}: its {gpus} GPUs are taken for tp {gpus}; --engine-args names another layout"
            )
    engine = read_engine_arguments(engine_args, {**arguments, "engine": "vllm"})
    has_experts = load_model(engine.model).has_experts
    return OwnSteps(tuple(steps_of(path, cases, engine)), engine, (*notes, *notes_of(cases, has_experts)))
