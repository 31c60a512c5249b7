"""Arguments of simulations, capacities, workloads, estimates and sweeps of plans, as calls."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

import fastroof
from fastroof import serving
from fastroof.simulation import Autoscaler, Fleet, Link, Pool, fleet_arrays
from fastroof.simulation.fewest_replicas import fewest_by_hour, fewest_replicas
from fastroof.simulation.pools import POOLED_ROUTINGS
from fastroof.sweep import best_batches, decode_times_us
from tests.fuzz.expressions import NAMES, evaluated, integer, integer_array, odd, sizes
from tests.fuzz.made_plans import plan_of
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite

REALS = (
    "0", "1", "2", "0.5", "1.5", "20", "100", "1e3", "1e6", "1e9", "1e15", "1e300", "1e308", "5e-324", "1e-9",
    "-1", "-0.5", "nan", "inf", "-inf", "np.float32(3)", "np.float64(0.1)", "np.int8(3)", "10**30",
)  # fmt: skip
WORDS = (
    "'round_robin'", "'least_load'", "'random'", "'prefill_first'", "'mixed'", "'given'", "'error'",
    "'reject'", "'blocks'", "'x'", "''", "'poisson'", "'gamma'", "'constant'", "'ramp'", "'closed'", "'full'",
    "'vllm'",
)  # fmt: skip
LENGTHS = (
    "'lognormal:100:0.5'", "'lognormal:100:0.5:900'", "'uniform:1:90'", "'share:0.5'", "'uniform:9:1'",
    "'lognormal:0:1'", "'lognormal:1e300:9'", "'lognormal:nan:1'", "'uniform:1:1e30'", "'file:/nowhere'",
    "'share:2'", "'lognormal:::'", "':'", "'uniform:-1:5'", "'file:'", "'share:nan'",
)  # fmt: skip
MOST_TOKENS = 20_000
"""Of a case's trace, so that it takes milliseconds; lengths that are refused may be any."""

MOST_STATE_BYTES = 2**28
"""Of the engines of a case, so that all of it takes less than a gibibyte."""


class Calls(Target):
    """Calls of one function as text: what its arguments are, and what else might be given for them.

    Attributes
    ----------
    known : dict of str to tuple of str
        What is mostly given for each argument by its name; an empty tuple: numbers.
    always : dict of str to str
        Arguments that every call has, unless they are mutated.
    """

    known: ClassVar[dict[str, tuple[str, ...]]]
    always: ClassVar[dict[str, str]]
    ci_cases = 400

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.most_bytes, fleet_arrays.MOST_STATE_BYTES = fleet_arrays.MOST_STATE_BYTES, MOST_STATE_BYTES
        self.plan = plan_of(max_num_batched_tokens=8192, max_num_seqs=1024)
        self.other = plan_of(tp=2, max_num_batched_tokens=8192, max_num_seqs=1024)
        self.names = {
            **NAMES, "plan": self.plan, "other": self.other, "Workload": fastroof.Workload,
            "Trace": fastroof.Trace, "Link": Link, "Autoscaler": Autoscaler,
        }  # fmt: skip

    def close(self) -> None:
        fleet_arrays.MOST_STATE_BYTES = self.most_bytes

    def value(self, name: str, random: Random) -> str:
        what = random.random()
        if what < 0.2:
            return odd(random)
        if known := self.known.get(name):
            return random.choice(known) if what < 0.85 else random.choice(WORDS)
        return integer(random, 300) if what < 0.6 else random.choice(REALS)

    def options(self, random: Random) -> dict[str, str]:
        words = dict(self.always)
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            name = random.choice(list(self.known))
            words[name] = self.value(name, random)
        if random.random() < 0.03:
            words[random.choice(("x", "_drawn", "self"))] = "1"
        if words and random.random() < 0.05:
            del words[random.choice(list(words))]
        return words

    def first(self, random: Random) -> list[str]:
        """Return arguments without a name."""
        return []

    def case(self, random: Random) -> bytes:
        words = [*self.first(random), *(f"{name}={value}" for name, value in self.options(random).items())]
        return f"f({', '.join(words)})".encode()

    def call(self, case: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, options = evaluated(case.decode(), self.names)
        if any(not isinstance(name, str) or name not in self.known for name in options):
            raise SkippedError  # another name is Python's to refuse
        return given, options


FLAGS = ("True", "False", "None")
SIMULATE: dict[str, tuple[str, ...]] = {
    "max_num_batched_tokens": (), "max_num_seqs": (), "num_gpu_blocks": (), "block_size": (), "replicas": (),
    "async_scheduling": FLAGS, "order": ("'mixed'", "'prefill_first'"), "chunked_prefill": FLAGS,
    "admit_whole_prompt": FLAGS, "reserve_output": FLAGS, "timeout_s": (),
    "router": tuple(map(repr, POOLED_ROUTINGS)), "prefix_cache": ("'given'", "'lru'", "'auto'"),
    "seed": (), "on_too_long": ("'error'", "'reject'"), "time_scale": (),
    "kv_tiers": (
        "'host:1GB:1GB/s'", "'vllm-offloading:1GB'", "'sglang-hicache,mooncake-store:1TB'", "'lmcache-cpu'",
        "'a:9MB:1MB/s:write_back:by_layer,b:inf:inf/s:9ms:prompts'", "'host:0B:1B/s:before_step'", "'host'",
        "'host:1e9B:1GB/s'", "'host:-1GB:1GB/s'", "'host:1GB:inf/s:99999999999999ms'", "','", "()",
    ),
    "autoscaler": (
        "Autoscaler('concurrency', 4, max_replicas=3, startup_s=0.1, interval_s=0.5)",
        "Autoscaler.parsed('kv:0.9:0.5', max_replicas=2, startup_s=0)",
        "Autoscaler('rate', 1e-6, 8, 0.01, interval_s=0.5, scale_down_delay_s=0)",
        "Autoscaler('queue', 1, 8, 1e6, tolerance=0)", "Autoscaler('queue', 2, 3, inf)", "'queue:1'",
    ),
}  # fmt: skip
WORKLOAD: dict[str, tuple[str, ...]] = {
    "rate": (), "arrivals": ("'poisson'", "'gamma'", "'constant'", "'ramp'", "'closed'"), "burstiness": (),
    "ramp": ("(2, 20)", "(2, 20, 2)", "(0, 0)", "(1,)", "[1, 2]", "(1, nan)", "(1e308, 1e308)"),
    "turns": (*LENGTHS, "3", "'uniform:1:4'"), "calls": (*LENGTHS, "2", "'uniform:1:3'"),
    "growth_tokens": (*LENGTHS, "7", "None"), "system_tokens": ("0", "50", "-1", "10**9"),
    "tool_s": ("0.5", "'exponential:2'", "'uniform:1:0'", "'lognormal:1:2'", "'x'"),
    "clients": (), "think_s": ("0.2", "'exponential:1'", "'lognormal:1:0.5'"),
    "requests": ("1", "5", "40", "0", "-1", "2.5", "10**9"),
    "isl": (*LENGTHS, "100", "1"), "osl": (*LENGTHS, "9", "1"),
    "cached_tokens": (*LENGTHS, "0", "5"), "seed": (), "name": ("'x'", "''"),
}  # fmt: skip


FEW = "Workload(rate=50, requests=20, isl=100, osl=9)"
SESSIONS = "Workload(rate=50, requests=20, turns=3, isl=100, osl=9, think_s=0.1)"
ENGINES = (
    "", ", replicas=2", ", replicas=2, router='least_load'", ", order='prefill_first'",
    ", kv_tiers='host:1GB:1GB/s', prefix_cache='lru'",
)  # fmt: skip
"""Engines that other loops simulate."""


def drawn(random: Random, calls: Calls) -> str:
    """Return a workload's trace, or what is hardly one."""
    words = {"rate": "50", "requests": "20", "isl": "100", "osl": "9"}
    if random.random() < 0.4:
        words |= {"turns": "3", "think_s": "0.1"}
    if random.random() < 0.3:
        name = random.choice(list(WORKLOAD))
        words[name] = random.choice(WORKLOAD[name] or REALS)
    return f"Workload({', '.join(f'{name}={value}' for name, value in words.items())})"


def few_tokens(trace: Any) -> None:
    """Leave out what is fine, and takes long."""
    if int(trace.output_tokens.sum()) + int(trace.input_tokens.sum()) // 64 > MOST_TOKENS:
        raise SkippedError


class Workloads(Calls):
    name = "workload"
    known = WORKLOAD
    always: ClassVar[dict[str, str]] = {"rate": "10", "requests": "20"}
    ci_cases = 800

    def examples(self) -> list[bytes]:
        return [b"f(rate=10, requests=20)", b"f(clients=3, requests=20, isl='uniform:1:90')"]

    def check(self, case: bytes) -> None:
        _, options = self.call(case)
        workload = fastroof.Workload(**options)
        if workload.requests > 10_000:
            raise SkippedError
        trace = workload.trace()
        all_finite(trace.arrival_s)
        if len(trace) != workload.requests or trace.input_tokens.min() < 1 or trace.output_tokens.min() < 1:
            raise Wrong("a request has no tokens")


class Simulations(Calls):
    name = "simulate"
    known = SIMULATE
    always: ClassVar[dict[str, str]] = {"num_gpu_blocks": "2000"}
    limit_s = 10.0
    has_energy: ClassVar[bool] = True

    def examples(self) -> list[bytes]:
        return [
            f"f(plan, {load}.trace(), num_gpu_blocks=2000{more})".encode()
            for load in (FEW, SESSIONS)
            for more in ENGINES
        ]

    def first(self, random: Random) -> list[str]:
        what = random.random()
        if what < 0.55:
            return ["plan" if what > 0.01 else odd(random), f"{drawn(random, self)}.trace()"]
        if what < 0.9:
            arrays = [integer_array(random, most, 5) for most in (3, 300, 20)]
            return [
                "plan",
                f"{{'arrival_s': {arrays[0]}, 'input_tokens': {arrays[1]}, 'output_tokens': {arrays[2]}}}",
            ]
        return ["plan", odd(random) if what < 0.97 else drawn(random, self)]

    def check(self, case: bytes) -> None:
        # what a workload refuses is the workload's target
        given, options = self._called(case)
        trace = given[-1] if len(given) > 1 else None
        if isinstance(trace, dict):
            few_tokens(fastroof.load_trace(trace))
        elif isinstance(trace, fastroof.Trace):
            few_tokens(trace)
        simulated = self.simulated(*given, **options)
        summary = simulated.summary()
        requests = simulated.requests
        if len(requests) != len(simulated.requests["status"]):
            raise Wrong("rows are missing")
        for name in ("ttft_ms", "e2e_ms"):
            times = requests[name].drop_null().to_numpy()
            if not np.isfinite(times).all() or (times < 0).any():
                raise Wrong(f"{name} has {times.min() if len(times) else ''}")
        if summary["finished"] and not 0 < summary["requests_per_s"] < math.inf:
            raise Wrong(f"{summary['requests_per_s']} requests/s")
        if summary["finished"] and self.has_energy:
            joules = simulated.energy()["joules"]
            if not 0 < joules < math.inf:
                raise Wrong(f"{joules} J")

    def simulated(self, *given: Any, **options: Any) -> fastroof.Simulation:
        return fastroof.simulate(*given, **options)

    def _called(self, case: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return self.call(case)
        except fastroof.FastroofError:
            raise SkippedError from None


POOLS: dict[str, tuple[str, ...]] = {
    "prefill_replicas": ("1", "2", "3"), "decode_replicas": ("1", "2", "3"), "timeout_s": (),
    "time_scale": (),
    "link": (
        "Link(back_pressure=True)", "Link(1e8, back_pressure=True, first_token='decode')",
        "Link(by_layer=True)", "Link(1e8, 5.0, False, 'prefill')", "Link(back_pressure=True, by_layer=True)",
        "Link(by_layer=2)", "Link(nan)", "Link(latency_us='9')", "Link(is_shared=None)", "Link(5e-324)",
    ),
    "prefill": ("{'num_gpu_blocks': 30}", "{'max_num_seqs': 1, 'num_gpu_blocks': 40}", "{'x': 1}"),
    "decode": ("{'num_gpu_blocks': 30}", "{'timeout_s': 0.05}", "{'reserve_output': True}", "7"),
    "on_too_long": SIMULATE["on_too_long"],
    "prefill_router": SIMULATE["router"], "decode_router": SIMULATE["router"],
}  # fmt: skip


class Pools(Simulations):
    name = "fleets"
    known = POOLS
    always: ClassVar[dict[str, str]] = {}
    has_energy = False

    def examples(self) -> list[bytes]:
        return [
            f"f(plan, plan, {load}.trace(), link={link})".encode()
            for load in (FEW, SESSIONS, "Workload(clients=3, requests=20, isl=100, osl=9)")
            for link in POOLS["link"][:4]
        ]

    def first(self, random: Random) -> list[str]:
        return [random.choice(("plan", "plan", "other")), *super().first(random)]

    def simulated(self, *given: Any, **options: Any) -> fastroof.Simulation:
        run = {name: options.pop(name) for name in ("on_too_long", "time_scale") if name in options}
        pools: list[Any] = []
        for plan, name in zip(given, ("prefill", "decode"), strict=False):
            own = options.pop(name, {})
            if not isinstance(own, dict) or not own.keys() <= Pool.__dataclass_fields__.keys():
                raise SkippedError  # Python's to refuse
            named = {word: options.pop(f"{name}_{word}", None) for word in ("replicas", "router")}
            own = {"timeout_s": options.get("timeout_s")} | own
            pools.append(
                Pool(plan, **own, **{word: value for word, value in named.items() if value is not None})
            )
        fleet = Fleet(pools, **{name: options[name] for name in ("link",) if name in options})
        return fastroof.simulate(fleet, *given[2:], **run)


CAPACITY: dict[str, tuple[str, ...]] = {
    **{name: SIMULATE[name] for name in ("max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks",
       "block_size", "replicas", "async_scheduling", "order", "chunked_prefill", "reserve_output",
       "timeout_s", "router", "prefix_cache", "kv_tiers")},
    "goodput": (), "tolerance": ("0.1", "0.01", "0.5"), "draws": ("1", "2", "0"), "with_range": FLAGS,
    "steady": FLAGS, "threads": ("1", "2", "0"), "ttft_p99_ms": (), "tpot_p99_ms": (), "e2e_p50_ms": (),
    "itl_p90_ms": (), "ttft_p101_ms": (), "ttft_mean_ms": (), "x_p9_ms": (), "ttft_ms": (),
}  # fmt: skip


class Capacities(Simulations):
    name = "capacity"
    known = CAPACITY
    always: ClassVar[dict[str, str]] = {
        "num_gpu_blocks": "2000", "tolerance": "0.2", "with_range": "False", "steady": "False",
        "ttft_p99_ms": "500",
    }  # fmt: skip
    limit_s = 20.0
    ci_cases = 120

    def examples(self) -> list[bytes]:
        return [
            f"f(plan, {FEW}, num_gpu_blocks=2000, tolerance=0.2, ttft_p99_ms=500{more})".encode()
            for more in ENGINES
        ]

    def first(self, random: Random) -> list[str]:
        what = random.random()
        if what < 0.9:
            words = drawn(random, self)
            return ["plan", words if what < 0.6 else f"{words}.trace()"]
        return ["plan" if what < 0.97 else odd(random), odd(random)]

    def check(self, case: bytes) -> None:
        given, options = self._called(case)
        if len(given) == 2 and isinstance(given[1], fastroof.Workload):
            if given[1].requests > 10_000:
                raise SkippedError
            few_tokens(given[1].trace(rate=None if given[1].is_closed else 1.0))
        elif len(given) == 2 and isinstance(given[1], fastroof.Trace):
            few_tokens(given[1])
        self.find(*given, **options)

    def find(self, *given: Any, **options: Any) -> None:
        found = fastroof.capacity(*given, **options)
        if not 0 <= found.low <= found.requests_per_s <= found.high < math.inf:
            raise Wrong(f"{found.low} to {found.requests_per_s} to {found.high} requests/s")
        found.document()


ONLY_OF_RATES = ("replicas", "tolerance", "draws", "with_range")
FEWEST: dict[str, tuple[str, ...]] = {
    **{name: given for name, given in CAPACITY.items() if name not in ONLY_OF_RATES},
    "most": (), "by_hour": ("True",),
}  # fmt: skip


class Fewest(Capacities):
    """``fewest_replicas`` and, with ``by_hour``, ``fewest_by_hour``."""

    name = "fewest_replicas"
    known = FEWEST
    always: ClassVar[dict[str, str]] = {"num_gpu_blocks": "2000", "ttft_p99_ms": "500"}

    def examples(self) -> list[bytes]:
        return [f"f(plan, {load}, num_gpu_blocks=2000, ttft_p99_ms=500)".encode() for load in (FEW, SESSIONS)]

    def find(self, *given: Any, by_hour: Any = None, **options: Any) -> None:
        search: Any = fewest_by_hour if by_hour is True else fewest_replicas
        search(*given, **options).document()


class Estimates(Calls):
    """``estimate``, by one plan or by two."""

    name = "estimate"
    limit_s = 20.0  # a million estimates may take ten
    known: ClassVar[dict[str, tuple[str, ...]]] = {
        "max_num_batched_tokens": (), "chunked_prefill": FLAGS, "kv_reservation": ("'full'", "'grow'"),
        "max_kv_tokens": (), "max_num_seqs": (), "order": ("'mixed'", "'prefill_first'"), "length_spread": (),
        "wait_steps": (), "requests_per_client": (), "prefix_hit": (),
        "with_error": FLAGS, "prefill_workers": (), "decode_workers": (),
        "link_bytes_per_s": (),
    }  # fmt: skip
    two: ClassVar[frozenset[str]] = frozenset({"prefill_workers", "decode_workers", "link_bytes_per_s"})
    both: ClassVar[frozenset[str]] = frozenset(
        {"max_num_batched_tokens", "chunked_prefill", "kv_reservation", "max_num_seqs", "with_error"}
    )
    always: ClassVar[dict[str, str]] = {}
    ci_cases = 800

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        # for steps as large as they are unless max_num_batched_tokens limits them
        self.names["plan"] = plan_of(max_num_batched_tokens=8192, max_num_seqs=256)

    def examples(self) -> list[bytes]:
        return [
            b"f(plan, 1000, 100, 16)",
            b"f(plan, 1000, 100, 16, order='prefill_first', with_error=True)",
            b"f(plan, plan, 1000, 100, 16)",
        ]

    def first(self, random: Random) -> list[str]:
        plans = ["plan"] if random.random() < 0.7 else ["plan", random.choice(("plan", "other"))]
        if random.random() < 0.02:
            plans[0] = odd(random)
        lengths = [sizes(random, most) if random.random() < 0.5 else str(most) for most in (1000, 100, 16)]
        return [*plans, *lengths]

    def check(self, case: bytes) -> None:
        given, options = self.call(case)
        if len(given) == 5:
            if not options.keys() <= self.both | self.two:
                raise SkippedError
            found: Any = serving.estimate_disaggregated(*given, **options)
        else:
            if options.keys() & self.two:
                raise SkippedError
            found = serving.estimate(*given, **options)
        columns = found.columns()
        for name in ("ttft_ms", "tokens_per_s_per_gpu", "request_latency_ms"):
            value = np.asarray(columns[name])
            many = np.asarray(given[-2], float) > 1 if name == "request_latency_ms" else True
            if not (np.isfinite(value) & (value >= 0) | ~np.asarray(many)).all():
                raise Wrong(f"{name} is {value!r:.80}")


class PlanSweeps(Calls):
    """Sweeps over plans in memory, and plans that are compiled together."""

    name = "plans"
    known: ClassVar[dict[str, tuple[str, ...]]] = {
        "tpot_ms": (), "threads": ("1", "2", "0", "np.int8(2)"),
    }  # fmt: skip
    always: ClassVar[dict[str, str]] = {}
    calls = ("best_batches", "decode_times_us")
    takes: ClassVar[dict[str, frozenset[str]]] = {
        "best_batches": frozenset({"tpot_ms", "threads"}), "decode_times_us": frozenset({"threads"}),
    }  # fmt: skip
    ci_cases = 800

    def examples(self) -> list[bytes]:
        return [
            b"f('best_batches', plan, range(1, 30), [100, 5000])",
            b"f('decode_times_us', plan, [1, 2], [100])",
        ]

    def first(self, random: Random) -> list[str]:
        name = random.choice(self.calls)
        plans = random.choice(("plan", "[plan, other]", "(plan,)", "iter([plan])", "[]", odd(random)))
        lists = [
            random.choice(("range(1, 30)", "[1, 2, 64]", sizes(random, 60))),
            random.choice(("[100, 5000]", sizes(random, 9000))),
        ]
        return [repr(name), plans if random.random() < 0.4 else "plan", *lists]

    def check(self, case: bytes) -> None:
        (name, *given), options = self.call(case)
        if name not in self.takes or not options.keys() <= self.takes[name]:
            raise SkippedError
        functions: dict[str, Any] = {
            "best_batches": best_batches,
            "decode_times_us": decode_times_us,
        }
        found = functions[name](*given, **options)
        if name == "best_batches":
            if (np.isfinite(found.step_us) != (found.batch_size > 0)).any():
                raise Wrong(f"steps of {found.batch_size!r:.80} take {found.step_us!r:.80}")
        else:
            all_finite(found)


TARGETS = [Workloads, Simulations, Pools, Capacities, Fewest, Estimates, PlanSweeps]
