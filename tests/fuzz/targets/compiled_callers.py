"""``numba_step`` and ``numba_decode`` from compiled callers: a plan's answer, NaN, or no compilation."""

from __future__ import annotations

import ctypes
import math
import mmap
from random import Random
from typing import Any, ClassVar

import numba
import numpy as np

import fastroof
from fastroof.errors import BatchError, FastroofError
from tests.fuzz.expressions import EDGES, NAMES, evaluated, integer, odd
from tests.fuzz.made_plans import plan_of
from tests.fuzz.target import SkippedError, Target, Wrong
from tests.reference.layouts import LAYOUTS

DTYPES = ("int64", "int64", "int64", "int32", "int32", "uint64")
OTHER_DTYPES = ("bool", "float64", "float32", "complex128", "object", "M8[s]", "m8[s]", "U3", "S2")
INTEGERS = (np.int64, np.int32, np.uint64)
"""Each pair of types is a caller to compile, which takes a second: these and no more are ever compiled."""
PAGE = mmap.PAGESIZE


class Guarded:
    """Memory that ends at an unreadable page: a read beyond an array there ends the process."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        library = ctypes.CDLL(None, use_errno=True)
        if library.mprotect(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def at_the_end(self, values: Any) -> Any:
        """The same values as the last ones before the end."""
        if values.nbytes > PAGE or values.dtype.hasobject:
            return values
        own = np.frombuffer(self.memory, np.uint8, values.nbytes, PAGE - values.nbytes)
        laid = own.view(values.dtype).reshape(values.shape) if values.nbytes else values
        laid[...] = values
        return laid


class Callers(Target):
    """A call of a compiled caller; what types it has compiled, or refused, it does not compile again."""

    limit_s = 60.0
    """Of which the compiler takes some, once a pair of types."""
    most_arguments: ClassVar[int] = 2
    is_one_line = False  # the compiler's errors

    def prepare(self, folder: Any) -> None:
        super().prepare(folder)
        self.plans = {
            "dense": plan_of(max_num_batched_tokens=512, max_num_seqs=64),
            "windowed": plan_of("gemma-3-12b", max_num_batched_tokens=512, max_num_seqs=64),
        }
        self.guards = Guarded(), Guarded()
        self.refused: dict[Any, str] = {}
        self.names = {
            **NAMES,
            "lay": lambda name, values: LAYOUTS[name](values),
            "first": self.guards[0].at_the_end,
            "second": self.guards[1].at_the_end,
        }

    def called(self, call: Any, data: Any, given: tuple[Any, ...]) -> float:
        """Return the answer of the compiled caller; FastroofError for what does not compile."""
        try:
            kinds = tuple(numba.typeof(one) for one in given)
        except (ValueError, TypeError, OverflowError, numba.core.errors.NumbaError) as error:
            raise FastroofError(f"Numba has no type of it: {error}") from None
        except NotImplementedError as error:  # a view of a structure
            raise FastroofError(f"Numba has no type of it: {error!r}") from None
        if kinds in self.refused:
            raise FastroofError(self.refused[kinds])
        try:
            found = call(data, *given)
        except (TypeError, OverflowError, numba.core.errors.NumbaError) as error:
            is_typing = isinstance(error, OverflowError | numba.core.errors.TypingError)
            if not is_typing and "of a step is" not in str(error):
                raise
            self.refused[kinds] = str(error)
            raise FastroofError(str(error)) from None
        if type(found) is not float or math.isinf(found) or found < 0.0:
            raise Wrong(f"a step takes {found!r}")
        return found


def caller_of(function: Any) -> Any:
    """Return a compiled caller of a compiled function of a plan and two arguments."""

    @numba.njit
    def timed(data: Any, one: Any, other: Any) -> Any:
        return function(data, one, other)

    return timed


def same(found: float, plan: fastroof.StepPlan, method: str, *sizes: Any) -> None:
    """Raise Wrong if a plan returns another time, or one where it was NaN, or none where it was not."""
    try:
        expected = getattr(plan, method)(*sizes)
    except BatchError:
        expected = math.nan
    if not (found == expected or (math.isnan(found) and math.isnan(expected))):
        raise Wrong(f"the compiled caller returns {found!r}, plan.{method} {expected!r}")


class Steps(Callers):
    """``step_us(data, new_tokens, context_len)``."""

    name = "numba_step"
    ci_cases = 150

    def prepare(self, folder: Any) -> None:
        super().prepare(folder)
        self.timed = caller_of(fastroof.numba_step(self.plans["dense"])[0])

    def examples(self) -> list[bytes]:
        return [
            f"f({name!r}, np.array([1, 40], {dtype!r}), np.array([100, 0], {dtype!r}))".encode()
            for name in self.plans
            for dtype in dict.fromkeys(DTYPES)
        ]

    def array(self, random: Random, dtype: str, count: int, most: int, place: str) -> str:
        numbers = [1 if random.random() < 0.4 else random.randint(1, most) for _ in range(count)]
        if numbers and random.random() < 0.3:
            numbers[random.randrange(count)] = random.choice(
                (*EDGES, 512, 513, 2**63 - 1, 2**64 - 1, -(2**63))
            )
        info = np.iinfo(dtype)
        numbers = [min(max(number, int(info.min)), int(info.max)) for number in numbers]
        text = f"np.array({numbers}, {dtype!r})"
        what = random.random()
        if what < 0.4:
            return f"{place}({text})"
        if what < 0.85:
            return f"lay({random.choice(list(LAYOUTS))!r}, {text})"
        if what < 0.9:
            return (
                f"{text}{random.choice(('[None]', '[:, None]', '[::2]', '[:0]', '[:1]', '.reshape(1, -1)'))}"
            )
        return f"{text}.astype({random.choice(OTHER_DTYPES)!r})"

    def case(self, random: Random) -> bytes:
        dtype = random.choice(DTYPES)
        count = random.choice((0, 1, 1, 2, 3, 5, 16, 64, 65))
        others = count if random.random() < 0.95 else random.randrange(9)
        words = [
            self.array(random, dtype, count, 600 // max(count, 1) + 1, "first"),
            self.array(random, dtype, others, 9000, "second"),
        ]
        if random.random() < 0.06:
            words[random.randrange(2)] = odd(random)
        return f"f({random.choice(list(self.plans))!r}, {', '.join(words)})".encode()

    def check(self, case: bytes) -> None:
        (name, *given), options = evaluated(case.decode(), self.names)
        if options or len(given) != 2 or name not in self.plans:
            raise SkippedError
        kinds = [one.dtype if isinstance(one, np.ndarray) else None for one in given]
        if all(
            kind is not None and kind.kind in "iu" and kind.newbyteorder("=") in INTEGERS for kind in kinds
        ):
            if kinds[0].newbyteorder("=") != kinds[1].newbyteorder("="):
                raise SkippedError  # another caller to compile
        elif any(kind is not None and kind.kind in "iu" and kind not in INTEGERS for kind in kinds):
            raise SkippedError
        plan = self.plans[name]
        native = all(kind is None or kind.isnative for kind in kinds)
        try:
            found = self.called(self.timed, plan.arena, tuple(given))
        except FastroofError:
            plain = all(
                isinstance(one, np.ndarray)
                and one.ndim == 1
                and one.flags.c_contiguous
                and one.dtype in INTEGERS
                for one in given
            )
            if plain and all(type(one) is np.ndarray for one in given):
                raise Wrong("what loops can read does not compile") from None
            raise
        if native:  # Numba may take the other order of bytes for this one, which is written down
            new, context = (one.tolist() for one in given)
            same(found, plan, "step_scalar", new, context)


class Decodes(Callers):
    """``decode_us(data, batch_size, kv_len)``."""

    name = "numba_decode"
    ci_cases = 150

    def prepare(self, folder: Any) -> None:
        super().prepare(folder)
        self.timed = caller_of(fastroof.numba_decode(self.plans["dense"])[0])

    def examples(self) -> list[bytes]:
        kinds = dict.fromkeys(DTYPES)
        return [
            b"f('dense', 8, 100)",
            *(f"f('windowed', np.{kind}(3), np.{kind}(9))".encode() for kind in kinds),
        ]

    def case(self, random: Random) -> bytes:
        dtype = random.choice(DTYPES)
        info = np.iinfo(dtype)
        words = []
        for most in (70, 9000):
            edge = (*EDGES, 63, 64, 65, 2**28, 2**28 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
            number = random.randint(1, most) if random.random() < 0.7 else random.choice(edge)
            number = min(max(number, int(info.min)), int(info.max))
            words.append(
                str(number) if dtype == "int64" and random.random() < 0.7 else f"np.{dtype}({number})"
            )
        if random.random() < 0.15:
            words[random.randrange(2)] = odd(random)
        return f"f({random.choice(list(self.plans))!r}, {', '.join(words)})".encode()

    def check(self, case: bytes) -> None:
        (name, *given), options = evaluated(case.decode(), self.names)
        if options or len(given) != 2 or name not in self.plans:
            raise SkippedError
        integers = [isinstance(one, int | np.integer) and not isinstance(one, bool) for one in given]
        if all(integers):
            if any(isinstance(one, int) and not -(2**63) <= one < 2**63 for one in given):
                raise (
                    SkippedError
                    if max(given) < 2**64 and min(given) >= -(2**63)
                    else FastroofError("no int64")
                )
            kinds = {np.int64 if isinstance(one, int) else type(one) for one in given}
            if len(kinds) > 1 or kinds.pop() not in INTEGERS:
                raise SkippedError  # another caller to compile
        plan = self.plans[name]
        found = self.called(self.timed, plan.arena, tuple(given))
        if not all(integers):
            raise Wrong(f"what is no integer is timed: {found}")
        same(found, plan, "decode_us", *map(int, given))


class CompiledCallers(Target):
    """What ``numba_decode`` and ``numba_step`` return, called with integers of a kind that compiles."""

    name = "numba.callers"
    ci_cases = 300

    def prepare(self, folder: Any) -> None:
        super().prepare(folder)
        self.plan = plan_of(max_num_batched_tokens=2048, max_num_seqs=64)
        self.names = {**NAMES, "plan": self.plan}

    def examples(self) -> list[bytes]:
        return [b"f('decode', plan, 2, 100)", b"f('step', plan, [1, 20], [100, 0])"]

    def case(self, random: Random) -> bytes:
        plan = "plan" if random.random() < 0.93 else odd(random)
        if random.random() < 0.5:
            return f"f('decode', {plan}, {integer(random, 70)}, {integer(random, 9000)})".encode()
        count = random.choice((0, 1, 2, 5, 70))
        new, context = ([int(integer(random, most)) for _ in range(count)] for most in (40, 5000))
        if random.random() < 0.1:
            context = context[1:]
        return f"f('step', {plan}, {new}, {context})".encode()

    def check(self, case: bytes) -> None:
        given, _ = evaluated(case.decode(), self.names)
        if len(given) != 4 or given[0] not in ("decode", "step"):
            raise SkippedError
        if given[0] == "decode":
            decode_us, data = fastroof.numba_decode(given[1])
            answer, wanted = decode_us(data, *given[2:]), lambda: self.plan.decode_us(*given[2:])
        else:
            step_us, data = fastroof.numba_step(given[1])
            arrays = [np.array(one, np.int64) for one in given[2:]]
            answer, wanted = step_us(data, *arrays), lambda: self.plan.step_scalar(*arrays)
        try:
            known = wanted()
        except FastroofError:
            if not np.isnan(answer):
                raise Wrong(f"{answer} us of what a plan refuses") from None
            raise
        if answer != known:
            raise Wrong(f"{answer} us of what takes {known}")


TARGETS = [Steps, Decodes, CompiledCallers]
