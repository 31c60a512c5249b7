"""Specs of sweeps of every kind, sweeps of them, arguments of a run, and parts that it left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pyarrow.parquet as pq

import fastroof
from fastroof.errors import SweepError
from fastroof.sweep import DeploymentSpec, StepSpec, checkpoint, load_spec, run_sweep
from fastroof.sweep.checkpoint import parts_folder
from fastroof.sweep.steps import StepSweep
from fastroof.sweep.steps import spec as step_units
from tests.fuzz.expressions import NAMES, evaluated, odd
from tests.fuzz.mutators import mutated_bytes, mutated_text, mutated_tree
from tests.fuzz.target import SkippedError, Target, TextFiles, Wrong

CHECKOUT = Path(__file__).resolve().parents[3]
STEPS: dict[str, Any] = {
    "models": ["llama-3.1-8b"], "gpu": "h100", "tp": [1, 2], "batch_size": [1, 8, 64],
    "kv_len": [1024, 8192], "keep": "all", "dtype": ["auto"], "engine": "kernels",
}  # fmt: skip
DEPLOYMENTS: dict[str, Any] = {
    "models": ["llama-3.1-8b"], "gpus": ["h100"], "tp": [1, 2], "isl": [500, 2000], "osl": 100,
    "clients": [1, 8], "constraints": {"tpot_ms": 20.0, "ttft_ms": 2000.0}, "keep": "pareto",
    "mode": ["aggregated", "disaggregated"], "total_gpus": [2, 4], "engine": ["vllm"],
    "max_num_batched_tokens": [2048], "max_num_seqs": 64, "prefix_hit": [0.0], "k": 3, "histogram": True,
}  # fmt: skip
CAPACITIES: dict[str, Any] = {
    "models": ["llama-3.1-8b"], "gpus": ["h100"], "tp": 1, "engine": ["vllm"],
    "workload": {"requests": 10, "isl": "lognormal:300:0.5", "osl": 9, "seed": 2},
    "slo": {"ttft_p99_ms": 2000.0, "tpot_p99_ms": 100.0}, "max_num_seqs": [32],
}  # fmt: skip
SPECS = (STEPS, DEPLOYMENTS, CAPACITIES)
MOST_EVALUATIONS = 400


class SpecTrees(Target):
    """Specs as mappings, as ``load_spec`` takes them."""

    name = "sweep.spec"
    is_one_line = False  # a line for each problem
    suffix = ".json"
    ci_cases = 1000

    def examples(self) -> list[bytes]:
        return [json.dumps(spec).encode() for spec in SPECS]

    def case(self, random: Random) -> bytes:
        return json.dumps(mutated_tree(random.choice(SPECS), random, SPECS)).encode(errors="surrogatepass")

    def check(self, case: bytes) -> None:
        given = json.loads(case)
        if not isinstance(given, dict):
            raise SkippedError
        spec = load_spec(given)
        again = load_spec(spec)
        if again != spec:
            raise Wrong("the same spec is another")


class SpecFiles(TextFiles):
    """Specs as files."""

    name = "sweep.toml"
    is_one_line = False  # a line for each problem
    suffix = ".toml"
    ci_cases = 500

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        shipped = CHECKOUT / "fastroof" / "sweep"
        self.texts = [
            (shipped / "deployments" / "example.toml").read_bytes(),
            (shipped / "steps" / "default.toml").read_bytes(),
            *(_toml(spec) for spec in SPECS),
        ]

    def read(self) -> None:
        load_spec(self.path)


def _toml(spec: dict[str, Any]) -> bytes:
    lines = [f"{key} = {json.dumps(value)}" for key, value in spec.items() if not isinstance(value, dict)]
    for key, table in spec.items():
        if isinstance(table, dict):
            lines += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    return "\n".join(lines).encode()


class Sweeps(SpecTrees):
    """Sweeps of small specs: each is evaluated, and its file read back."""

    name = "sweep.run"
    is_one_line = False  # a line for each problem
    limit_s = 20.0
    ci_cases = 40

    def check(self, case: bytes) -> None:
        given = json.loads(case)
        if not isinstance(given, dict):
            raise SkippedError
        spec = load_spec(given)
        if _evaluations(spec) > MOST_EVALUATIONS:
            raise SkippedError
        output = self.folder / "r.parquet"
        try:
            summary = run_sweep(spec, output)
            table = pq.read_table(output)
        finally:
            output.unlink(missing_ok=True)
        if summary.rows != table.num_rows:
            raise Wrong(f"{summary.rows} rows are {table.num_rows} in the file")
        if "step_us" in table.column_names and any(not 0 < us < 1e15 for us in table["step_us"].to_pylist()):
            raise Wrong("a step takes no time")


def _evaluations(spec: Any) -> float:
    """Estimate how much a spec is from above, from the lengths of all of its lists."""
    count = 1.0
    for value in spec.model_dump().values():
        if isinstance(value, tuple | list):
            count *= max(1, len(value))
    if isinstance(spec, StepSpec):
        return count / 20
    # simulations take longer
    return count if isinstance(spec, DeploymentSpec) else count * 10


class RunArguments(Target):
    """Arguments of ``run_sweep`` beside the spec."""

    name = "sweep.arguments"
    limit_s = 20.0
    ci_cases = 60
    options: ClassVar[dict[str, tuple[str, ...]]] = {
        "executor": ("'local'", "'local'", "'x'", "''"), "threads": ("1", "2", "0", "np.int8(1)"),
        "resume": ("True", "False"), "restart": ("True", "False"),
        "address": ("None", "'x'"), "progress": ("None",),
    }  # fmt: skip

    def case(self, random: Random) -> bytes:
        words = {}
        for _ in range(random.choice((0, 1, 1, 2))):
            name = random.choice(list(self.options))
            words[name] = odd(random) if random.random() < 0.5 else random.choice(self.options[name])
        spec = "spec" if random.random() < 0.9 else odd(random)
        output = (
            "output"
            if random.random() < 0.8
            else random.choice((odd(random), "'/nowhere/x.parquet'", "'/'", "'.'", "'x' * 300"))
        )
        return (
            f"f({', '.join((spec, output, *(f'{name}={value}' for name, value in words.items())))})".encode()
        )

    def check(self, case: bytes) -> None:
        output = self.folder / "r.parquet"
        names = {**NAMES, "spec": STEPS, "output": output}
        given, options = evaluated(case.decode(), names)
        if isinstance(given[1], str) and not given[1].startswith("/nowhere") and given[1] not in ("/", "."):
            given = (given[0], self.folder / given[1] if "\0" not in given[1] else given[1])
        if isinstance(given[0], str | type(None)):
            raise SkippedError  # the packaged spec, or a file
        try:
            run_sweep(*given, **options)
        finally:
            shutil.rmtree(parts_folder(output), ignore_errors=True)
            output.unlink(missing_ok=True)


class Parts(Target):
    """An interrupted sweep's folder, one file of it mutated: resumed to the same rows, or refused.

    A case is the file's name, and its bytes.
    """

    name = "sweep.parts"
    suffix = ".bin"
    limit_s = 20.0
    ci_cases = 40

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.kept = (step_units.EVALUATIONS_A_UNIT, step_units.ROWS_A_UNIT, checkpoint.PART_EVERY_S)
        step_units.EVALUATIONS_A_UNIT = step_units.ROWS_A_UNIT = 4
        checkpoint.PART_EVERY_S = 0.0
        self.output = folder / "r.parquet"
        whole = folder / "whole.parquet"
        run_sweep(STEPS, whole)
        self.rows = pq.read_table(whole)
        evaluate, done = StepSweep.evaluate, 0

        def some(*given: Any) -> Any:
            nonlocal done
            done += 1
            if done == 3:
                raise KeyboardInterrupt
            return evaluate(*given)

        StepSweep.evaluate = some  # type: ignore[method-assign]
        try:
            run_sweep(STEPS, self.output)
        except KeyboardInterrupt:
            pass
        finally:
            StepSweep.evaluate = evaluate  # type: ignore[method-assign]
        self.parts = parts_folder(self.output)
        self.files = {path.name: path.read_bytes() for path in sorted(self.parts.iterdir())}

    def close(self) -> None:
        step_units.EVALUATIONS_A_UNIT, step_units.ROWS_A_UNIT, checkpoint.PART_EVERY_S = self.kept

    def case(self, random: Random) -> bytes:
        name = random.choice([name for name in self.files if self.files[name]])
        content = self.files[name]
        others = list(self.files.values())
        mutate = mutated_text if name.endswith(".json") else mutated_bytes
        return name.encode() + b"\n" + mutate(content, random, [one for one in others if one])

    def check(self, case: bytes) -> None:
        name, _, content = case.partition(b"\n")
        if name.decode() not in self.files:
            raise SkippedError
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir()
        for known, whole in self.files.items():
            (self.parts / known).write_bytes(content if known == name.decode() else whole)
        try:
            run_sweep(STEPS, self.output, resume=True)
            rows = pq.read_table(self.output)
        except fastroof.FastroofError as error:
            if not isinstance(error, SweepError) or str(self.parts) not in str(error):
                raise Wrong(f"another error: {error}") from None
            raise
        finally:
            self.output.unlink(missing_ok=True)
        if not rows.replace_schema_metadata(None).equals(self.rows.replace_schema_metadata(None)):
            raise Wrong("resumed to other rows")


TARGETS = [SpecTrees, SpecFiles, Sweeps, RunArguments, Parts]
