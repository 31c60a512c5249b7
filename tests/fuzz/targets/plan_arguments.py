"""Arguments of a plan's methods: types, dtypes, values and layouts of arrays."""

from __future__ import annotations

import operator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

import fastroof
from tests.fuzz.expressions import NAMES, evaluated, integer, integer_array, odd, sizes
from tests.fuzz.made_plans import plan_of
from tests.fuzz.target import Target, Wrong, all_finite

MAX_TOKENS, MAX_SEQS, MAX_KV = 2048, 64, 100_000


def whole_numbers(value: Any) -> Any:
    """Return an argument in int64, or raise Wrong if it has no integers."""
    if isinstance(value, bool | np.bool_):
        raise Wrong(f"{value!r} was taken for an integer")
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        raise Wrong(f"what {value!r} masks was taken for integers")
    if isinstance(value, list | tuple):
        for inner in value:
            whole_numbers(inner)
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        if array.dtype.kind != "O" or any(not _is_integer(one) for one in array.flat):
            raise Wrong(f"{value!r:.80} was taken for integers")
        array = np.array([operator.index(one) for one in array.flat]).reshape(array.shape)
    return array.astype(np.int64)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool | np.bool_)


class PlanCalls(Target):
    """Calls of one plan's methods, as text: ``f(64, np.array([1, 2]))``."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.plan = plan_of(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS)
        self.names = {**NAMES, "StepBatch": fastroof.StepBatch}

    def examples(self) -> list[bytes]:
        return [b"f(2, 100)", b"f([2, 3], [100, 7])"]

    def call(self, case: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return evaluated(case.decode(), self.names)


def two_sizes(random: Random) -> str:
    return f"{sizes(random, MAX_SEQS)}, {sizes(random, MAX_KV)}"


class Scalar(PlanCalls):
    name = "plan.scalar"
    ci_cases = 3000

    def case(self, random: Random) -> bytes:
        if random.random() < 0.02:
            return f"f({', '.join(sizes(random, 9) for _ in range(random.randrange(4)))})".encode()
        return f"f({two_sizes(random)})".encode()

    def check(self, case: bytes) -> None:
        given, options = self.call(case)
        if len(given) != 2:
            try:
                self.plan.scalar(*given, **options)
            except TypeError as error:
                # a call of another number of arguments is Python's to refuse
                if "argument" in str(error):
                    return
                raise
            raise Wrong(f"{len(given)} arguments were answered")
        answer = self.plan.scalar(*given)
        all_finite(answer)
        arrays = [whole_numbers(value) for value in given]
        if not np.all(answer == self.plan.decode_us(*arrays)) or np.any(np.asarray(answer) <= 0.0):
            raise Wrong(f"{answer!r:.80} is not what decode_us returns")


class EqualSteps(PlanCalls):
    """decode_us, prefill_us and verify_us: several sizes that broadcast, ``out`` and ``threads``."""

    method: ClassVar[str]
    most: ClassVar[tuple[int, ...]]
    has_options: ClassVar[bool] = True
    ci_cases = 1500

    def case(self, random: Random) -> bytes:
        words = [sizes(random, most) for most in self.most]
        if self.has_options and random.random() < 0.1:
            words.append(f"threads={random.choice((integer(random, 3), odd(random), '2'))}")
        if self.has_options and random.random() < 0.15:
            dtype = random.choice(("float64", "float64", "float64", "float32", "int64", ">f8", "object"))
            shape = random.choice(("3", "5", "40", "()", "(1, 5)", "(5, 1)", "0", "(2, 0)"))
            words.append(f"out={random.choice((odd(random), f'np.empty({shape}, {dtype!r})[::1]'))}")
        return f"f({', '.join(words)})".encode()

    def check(self, case: bytes) -> None:
        given, options = self.call(case)
        method = getattr(self.plan, self.method)
        answer = method(*given, **options)
        all_finite(answer)
        arrays = [whole_numbers(value) for value in given]
        again = np.array(method(*arrays))
        if again.shape != np.shape(answer) or not np.array_equal(again, answer) or np.any(again <= 0.0):
            raise Wrong(f"{answer!r:.80} of what is {again!r:.80} in int64")
        if "threads" in options and not isinstance(operator.index(options["threads"]), int):
            raise Wrong(f"{options['threads']!r} was taken for a number of threads")


class Decode(EqualSteps):
    name, method, most = "plan.decode_us", "decode_us", (MAX_SEQS, MAX_KV)


class Prefill(EqualSteps):
    name, method, most = "plan.prefill_us", "prefill_us", (MAX_TOKENS // 8, 3000, 4)

    def examples(self) -> list[bytes]:
        return [b"f(200, 30, 2)", b"f([200, 3], 30, 2, threads=2)"]


class Verify(EqualSteps):
    name, method, most = "plan.verify_us", "verify_us", (MAX_SEQS // 4, MAX_KV, 4)

    def examples(self) -> list[bytes]:
        return [b"f(9, 3000, 2)", b"f([9, 3], 3000, 2, threads=2)"]


class DecodeError(EqualSteps):
    name, method, most = "plan.decode_error", "decode_error", (MAX_SEQS, MAX_KV)
    has_options = False
    ci_cases = 300


class StepScalar(PlanCalls):
    name = "plan.step_scalar"
    ci_cases = 2000

    def examples(self) -> list[bytes]:
        return [b"f([1, 2], [100, 0])", b"f(np.array([1, 2]), np.array([100, 0]))"]

    def case(self, random: Random) -> bytes:
        count = random.choice((0, 1, 2, 5, 30))
        words = []
        for most in (40, 5000):
            what = random.random()
            if what < 0.8:
                words.append(integer_array(random, most, count))
            else:
                words.append(odd(random))
        return f"f({', '.join(words)})".encode()

    def check(self, case: bytes) -> None:
        given, _ = self.call(case)
        answer = self.plan.step_scalar(*given)
        all_finite(answer)
        new, context = (whole_numbers(value) for value in given)
        batch = fastroof.StepBatch(new.reshape(-1), context.reshape(-1), np.array([0, new.size]))
        if answer != self.plan.step_us(batch)[0]:
            raise Wrong(f"{answer!r} is not what step_us returns")


class Batches(PlanCalls):
    """Ragged batches: three arrays, or lists of pairs, through every method that takes a batch."""

    name = "plan.step_us"
    ci_cases = 600

    def examples(self) -> list[bytes]:
        return [b"f([[(1, 100), (20, 0)], [(1, 9)]])"]

    def case(self, random: Random) -> bytes:
        if random.random() < 0.5:
            counts = [random.choice((0, 1, 2, 5)) for _ in range(random.choice((0, 1, 2, 4)))]
            total = sum(counts)
            offsets = [sum(counts[:end]) for end in range(len(counts) + 1)]
            if random.random() < 0.2:
                offsets[random.randrange(len(offsets))] = random.choice((-1, 0, 1, 100, 2**31, 2**63 - 1))
            last = (
                str(offsets)
                if random.random() < 0.5
                else f"np.array({offsets}, {random.choice(('int64', 'int32', 'uint8', '>i8', 'object'))!r})"
            )
            words = [integer_array(random, 40, total), integer_array(random, 5000, total), last]
            if random.random() < 0.2:
                words[random.randrange(3)] = odd(random)
            return f"f({', '.join(words)})".encode()

        def request() -> str:
            if random.random() < 0.1:
                return odd(random)
            new = random.choice(
                ("1", "1", "1", str(random.randint(1, 300)), odd(random) if random.random() < 0.3 else "2")
            )
            context = integer(random, 4000) if random.random() < 0.9 else odd(random)
            return random.choice(
                ("({}, {})", "({}, {})", "[{}, {}]", "({}, {}, 1)" if random.random() < 0.1 else "({}, {})")
            ).format(new, context)

        def step() -> str:
            if random.random() < 0.05:
                return odd(random)
            return f"[{', '.join(request() for _ in range(random.choice((0, 1, 2, 4))))}]"

        steps = f"[{', '.join(step() for _ in range(random.choice((0, 1, 2, 3))))}]"
        return f"f({steps if random.random() < 0.95 else odd(random)})".encode()

    def check(self, case: bytes) -> None:
        given, _ = self.call(case)
        batch = fastroof.StepBatch(*given) if len(given) == 3 else fastroof.StepBatch.from_requests(*given)
        if len(given) == 3:
            for value in given:
                whole_numbers(value)
        plan = self.plan
        times = plan.run(batch, with_error=True)
        step_us = plan.step_us(batch)
        all_finite([step_us, times.latency_us, times.relative_error])
        if len(step_us) != batch.num_steps or step_us.tolist() != times.latency_us.tolist():
            raise Wrong("run and step_us differ")
        if (step_us[np.diff(batch.offsets) > 0] <= 0.0).any():
            raise Wrong("a step takes no time")
        parts = sum(np.asarray(part) for part in times.components)
        if not np.allclose(parts, step_us, rtol=1e-9):
            raise Wrong("parts do not add up")
        watts = plan.energy(batch).watts[step_us > 0.0]
        if ((watts < plan.gpu.idle_w * (1.0 - 1e-9)) | (watts > plan.gpu.tdp_w * (1.0 + 1e-9))).any():
            raise Wrong("a step draws less than idle, or more than the limit")
        all_finite([plan.pipeline_us(batch), plan.cycle_us(batch), plan.stage_times_us(batch)])
        for step, (start, end) in enumerate(pairwise(batch.offsets[:4].tolist())):
            new, context = batch.new_tokens[start:end].tolist(), batch.context_len[start:end].tolist()
            if new and plan.explain(zip(new, context, strict=True)).total_us != step_us[step]:
                raise Wrong("explain returns something else")


class Others(PlanCalls):
    """Methods that take a request, an image or a limit: each is called with what is hardly one."""

    name = "plan.others"
    ci_cases = 600

    def examples(self) -> list[bytes]:
        return [
            b"plan.explain([(9, 0)], with_error=True)", b"plan.explain_verification(2, 100, 3)",
            b"plan.step_us(StepBatch([9], [0], [0, 1]), threads=2)",
            b"plan.memory_of(max_num_batched_tokens=64, max_num_seqs=4)",
            b"plan.pipeline_us(StepBatch([9], [0], [0, 1]))", b"plan.cycle_us(StepBatch([9], [0], [0, 1]))",
            b"plan.run(StepBatch([9], [0], [0, 1]))", b"plan.memory.max_sequences(100)",
        ]  # fmt: skip

    calls: ClassVar[tuple[str, ...]] = (
        "explain([({a}, {b})])",
        "explain({a})",
        "explain([({a}, {b})], with_error={c})",
        "explain([(9, 0)], images={a})",
        "explain([(9, 0)], images=[({a}, {b})])",
        "explain_verification({a}, {b}, {c})",
        "step_error({a})",
        "run({a})",
        "run({a}, threads={b})",
        "energy({a}, threads={b}, with_error={c})",
        "step_us({a})",
        "step_us(StepBatch([9], [0], [0, 1]), threads={a})",
        "step_us(StepBatch([9], [0], [0, 1]), images={a})",
        "pipeline_us({a})",
        "cycle_us({a})",
        "stage_times_us({a})",
        "memory_of(max_num_batched_tokens={a}, max_num_seqs={b})",
        "memory_of(max_num_seqs={a})",
        "encode({a})",
        "encode([({a}, {b})])",
        "memory.max_sequences({a})",
    )

    def case(self, random: Random) -> bytes:
        words = {letter: sizes(random, 60) if random.random() < 0.6 else odd(random) for letter in "abc"}
        return f"plan.{random.choice(self.calls)}".format(**words).encode()

    def check(self, case: bytes) -> None:
        # the call itself is the product's, so what it raises counts; arguments alone are tried first
        text = case.decode()
        start = text.index("(")
        evaluated(f"f{text[start:]}", self.names)
        answer = eval(text, {**self.names, "plan": self.plan})
        all_finite(getattr(answer, "total_us", answer))


TARGETS = [Scalar, Decode, Prefill, Verify, DecodeError, StepScalar, Batches, Others]
