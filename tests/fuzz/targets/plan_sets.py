"""Plans that are compiled together, and what steps of drafts are."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np

import fastroof
from fastroof import serving
from tests.fuzz.expressions import NAMES, evaluated, odd, sizes
from tests.fuzz.made_plans import h100, plan_of
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite
from tests.fuzz.targets.lookups import PLAN_OPTIONS
from tests.fuzz.targets.plan_arguments import whole_numbers
from tests.fuzz.targets.simulations import REALS

MODELS = ("'llama-3.1-8b'",) * 4 + ("'qwen3-30b-a3b'", "'gemma-3-12b'")
FEW = {
    "tp": ("1", "2", "3", "0"), "dtype": ("'bf16'", "'fp8'", "'x'"), "kv_dtype": ("'bf16'", "'fp8'"),
    "pp": ("1", "2"), "ep": ("1", "2"), "dp": ("1", "2"), "engine": ("'vllm'", "'kernels'", "{}"),
    "max_num_batched_tokens": ("64", "32", "10**30", "0"), "max_num_seqs": ("8", "4", "np.int8(4)"),
}  # fmt: skip
"""What is mostly given: plans of these options are compiled in milliseconds."""


class PlanSets(Target):
    """``compile_plans``: each plan is the one that ``compile_plan`` makes of its request."""

    name = "compile_plans"
    limit_s = 30.0
    ci_cases = 80

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.names = {**NAMES, "tables": h100()}

    def examples(self) -> list[bytes]:
        return [
            b"f([{'model': 'llama-3.1-8b', 'max_num_batched_tokens': 64, 'max_num_seqs': 8}], 'h100', None)",
            b"f(iter([]), 'h100', None)",
        ]

    def case(self, random: Random) -> bytes:
        count = random.choice((0, 1, 1, 2, 3, 4))
        requests = ", ".join(self._request(random) for _ in range(count))
        what = random.random()
        if what < 0.9:
            many = random.choice(("[{}]", "[{}]", "({},)", "iter([{}])")).format(requests) if count else "[]"
        else:
            many = odd(random)
        gpu = "'h100'" if random.random() < 0.93 else random.choice(("'h200'", "'x'", odd(random)))
        tables = "tables" if random.random() < 0.93 else random.choice(("None", odd(random)))
        return f"f({many}, {gpu}, {tables})".encode()

    def _request(self, random: Random) -> str:
        if random.random() < 0.04:
            return odd(random)
        words = {"'max_num_batched_tokens'": "64", "'max_num_seqs'": "8"}
        if random.random() < 0.97:
            words["'model'"] = random.choice(MODELS) if random.random() < 0.95 else odd(random)
        for _ in range(random.choice((0, 1, 1, 2))):
            name = random.choice(list(FEW)) if random.random() < 0.8 else random.choice(PLAN_OPTIONS)
            known = FEW.get(name, ("1", "True", "None"))
            words[repr(name)] = random.choice(known) if random.random() < 0.85 else odd(random)
        if random.random() < 0.04:
            words[random.choice(("'x'", "1", "'architecture'", "None", "()"))] = odd(random)
        return f"{{{', '.join(f'{key}: {value}' for key, value in words.items())}}}"

    def check(self, case: bytes) -> None:
        given, _ = evaluated(case.decode(), self.names)
        again, _ = evaluated(case.decode(), self.names)  # iterators are read once
        if len(given) != 3:
            raise SkippedError
        plans = fastroof.compile_plans(*given)
        requests = list(again[0])
        if len(plans) != len(requests):
            raise Wrong(f"{len(requests)} requests are {len(plans)} plans")
        for plan, request in zip(plans, requests, strict=True):
            options = dict(request)
            alone = fastroof.compile_plan(options.pop("model"), given[1], given[2], **options)
            all_finite(plan.arena)
            if plan.arena.tobytes() != alone.arena.tobytes() or plan.memory != alone.memory:
                raise Wrong(f"{plan} is another plan than {alone}")


class Speculation(Target):
    """``SpeculativeDecoding``, and an estimate with it."""

    name = "speculation"
    ci_cases = 500

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.plan = plan_of(max_num_batched_tokens=2048, max_num_seqs=256)
        self.names = {**NAMES, "plan": self.plan}

    def examples(self) -> list[bytes]:
        return [b"f(3, accepted=(0.8, 0.5, 0.25))", b"f(3, 2.5, 'mtp')", b"f(2, 1.5, plan)"]

    def case(self, random: Random) -> bytes:
        drafts = str(random.randint(0, 5)) if random.random() < 0.8 else sizes(random, 9)
        what = random.random()
        if what < 0.4:
            count = (
                random.choice((int(drafts), int(drafts), 2)) if drafts.isdigit() and int(drafts) < 50 else 2
            )
            rates = sorted((random.random() for _ in range(count)), reverse=True)
            words = [f"{rate:.3f}" for rate in rates]
            if words and random.random() < 0.3:
                words[random.randrange(count)] = random.choice((*REALS, odd(random)))
            accepted = f"[{', '.join(words)}]" if random.random() < 0.5 else f"({', '.join([*words, ''])})"
        else:
            accepted = (
                random.choice((f"{1 + 3 * random.random():.3f}", *REALS)) if what < 0.8 else odd(random)
            )
        draft = random.choice(("None", "None", "'mtp'", "plan", odd(random)))
        return f"f({drafts}, {accepted}, {draft})".encode()

    def check(self, case: bytes) -> None:
        given, options = evaluated(case.decode(), self.names)
        made = fastroof.SpeculativeDecoding(*given, **options)
        hash(made)
        if not str(made) or made.tokens != whole_numbers(given[0]) + 1:
            raise Wrong(f"{made} verifies {made.tokens}")
        if not 1.0 <= made.acceptance_length <= made.tokens:
            raise Wrong(f"{made.acceptance_length} of {made.tokens} tokens are accepted")
        found = serving.estimate(self.plan, 1000, 100, 16, speculation=made, max_num_batched_tokens=512)
        all_finite([np.asarray(found.columns()[name]) for name in ("ttft_ms", "tpot_ms")])


TARGETS = [PlanSets, Speculation]
