"""GPUs and models as a caller makes them: a description that is loaded, with other fields."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from random import Random
from typing import Any

import fastroof
from tests.fuzz.expressions import NAMES, evaluated, odd, sizes
from tests.fuzz.made_plans import h100
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite
from tests.fuzz.targets.simulations import REALS


class GpuSpecs(Target):
    """``f(peak_flops_per_s={'bf16': nan})``: fields of the H100 that are others."""

    name = "gpu.spec"
    ci_cases = 200

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.given: Any = fastroof.load_gpu("h100")
        self.fields = [field.name for field in dataclasses.fields(self.given) if field.init]

    def examples(self) -> list[bytes]:
        return [b"f()"]

    def case(self, random: Random) -> bytes:
        words = []
        for name in random.sample(self.fields, random.choice((1, 1, 1, 2))):
            what, given = random.random(), getattr(self.given, name)
            if random.random() < 0.6 and (isinstance(given, int | float) or name == "peak_flops_per_s"):
                words.append(f"{name}={_scaled(given, random)}")
                continue
            value = odd(random) if what < 0.5 else sizes(random, 90) if what < 0.75 else random.choice(REALS)
            if name == "peak_flops_per_s":
                value = f"{{'bf16': {value}, 'fp8': 1e15}}" if what < 0.9 else value
            words.append(f"{name}={value}")
        return f"f({', '.join(words)})".encode()

    def check(self, case: bytes) -> None:
        _, options = evaluated(case.decode(), NAMES)
        if not options.keys() <= set(self.fields):
            raise SkippedError
        self.use(dataclasses.replace(self.given, **options))

    def use(self, made: Any) -> None:
        """Compile a plan without tables: every figure of the card is its time."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no measured tables of|what was not|.* has no bf16")
            plan = fastroof.compile_plan(
                "llama-3.1-8b", made, None, max_num_batched_tokens=64, max_num_seqs=8, engine="kernels"
            )
        _timed(plan)


class ModelSpecs(GpuSpecs):
    """Fields of a model that are others."""

    name = "model.spec"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.given = fastroof.load_model("llama-3.1-8b")
        self.fields = [field.name for field in dataclasses.fields(self.given) if field.init]

    def use(self, made: Any) -> None:
        _timed(
            fastroof.compile_plan(
                made, "h100", h100(), max_num_batched_tokens=64, max_num_seqs=8, engine="kernels"
            )
        )


def _scaled(given: Any, random: Random) -> str:
    """Another number of the kind, from far below what a card or model has to far beyond."""
    factor = 10.0 ** random.choice((-9, -6, -3, -1, 0, 0.3, 1, 3, 6, 9))
    if isinstance(given, int):
        return str(int(given * factor))
    if isinstance(given, float):
        return repr(given * factor)
    return repr({dtype: peak * factor for dtype, peak in given.items() if random.random() < 0.8})


def _timed(plan: fastroof.StepPlan) -> None:
    times = [plan.decode_us(4, 100), plan.prefill_us(50)]
    all_finite([*times, plan.memory._asdict()])
    if min(times) <= 0.0:
        raise Wrong(f"steps take {times} us")


TARGETS = [GpuSpecs, ModelSpecs]
