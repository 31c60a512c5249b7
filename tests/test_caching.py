"""The cache of what was used lately, and that what grows with questions is in it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastroof
from fastroof.caching import ERROR_BYTES, BoundedCache, computed_once, lazy_property
from fastroof.config import gpu
from fastroof.engines import engine_of_version, load
from fastroof.engines.deployments import recipes_of
from fastroof.engines.launch.commands import engine_commands
from fastroof.errors import FastroofError, PlanError, StoppedError
from fastroof.plan.curves import TableCurves, row_values
from fastroof.tables import table_set

QUESTIONS = """
import random
from fastroof.errors import FastroofError
from fastroof.tables import table_set
from fastroof.ui import plans
from fastroof.ui.view import View
from fastroof.ui.answers import step_answer

table_set.BOUNDED_CACHE_BYTES = plans.PLANS_BYTES = 2**23

def rss():
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * 4096

store, dice = plans.PlanStore(), random.Random(7)
for number in range(200):
    if number == 50:
        before = rss()
    view = View(
        model=dice.choice(["llama-3.1-8b", "qwen3-32b-fp8", "qwen3-30b-a3b"]),
        tp=dice.choice([1, 2, 4]),
        kind=dice.choice(["decode", "prefill", "mixed"]),
        isl=dice.randrange(1, 9000),
        osl=dice.randrange(2, 900),
        chunk=dice.randrange(1, 65536) if number % 4 else None,
        max_num_batched_tokens=dice.randrange(2048, 32768),
        engine=dice.choice(["vllm", "sglang"]),
    )
    try:
        step_answer(store, view)
    except FastroofError as error:
        assert "limit" in str(error) or "room" in str(error) or "up to" in str(error), error
print(rss() - before)
"""


@pytest.mark.slow
@pytest.mark.release
def test_the_page_does_not_grow_with_questions() -> None:
    """Each of 200 has another number of tokens; with caches of 8 MiB, growth is what Python makes of it."""
    done = subprocess.run([sys.executable, "-c", QUESTIONS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60e6


def test_what_fits_is_held_and_what_was_used_lately_stays() -> None:
    cache: BoundedCache[bytes] = BoundedCache(1000)
    made: list[int] = []

    def get(i: int) -> bytes:
        return cache.get(i, lambda: made.append(i) or bytes(100), len)  # type: ignore[func-returns-value]

    for i in range(5):
        get(i)
    assert cache.num_bytes == 500
    for i in range(5):
        get(i)
    assert made == [0, 1, 2, 3, 4]
    for i in range(5, 300):
        get(i)
        get(0)  # used all the time
        assert cache.num_bytes <= 1000
        assert i in cache
        assert len(cache) * 100 == cache.num_bytes
    assert made == list(range(300))


def test_a_value_that_does_not_serve_is_replaced() -> None:
    cache: BoundedCache[bytes] = BoundedCache(1000)

    def at_least(size: int) -> int:
        return len(cache.get("one", lambda: bytes(size), len, lambda held: len(held) >= size))

    assert [at_least(size) for size in (10, 5, 300, 20, 2000, 1)] == [10, 10, 300, 300, 2000, 2000]
    assert cache.num_bytes == 2000  # one that is larger than all the room is still there once
    cache.get("two", lambda: bytes(600), len)
    cache.get("three", lambda: bytes(1), len)
    assert "one" not in cache


def test_an_error_is_cached_and_a_stop_is_not() -> None:
    cache: BoundedCache[int] = BoundedCache(10 * ERROR_BYTES)
    made: list[FastroofError] = []

    def get(error: FastroofError) -> int:
        def make() -> int:
            made.append(error)
            raise error

        return cache.get_or_raise(type(error), make, lambda _: 1)

    for error, times in ((PlanError("no"), 1), (StoppedError("late"), 3)):
        for _ in range(3):
            with pytest.raises(type(error), match=str(error)):
                get(error)
        assert made.count(error) == times
    assert cache.num_bytes == ERROR_BYTES
    assert cache.get_or_raise("key", lambda: 3, lambda _: 1) == 3


def test_caches_by_the_words_of_users_have_a_limit() -> None:
    for name in range(1000):
        engine_of_version("vllm", f"build-{name}")
        engine_commands("vllm", "", f"build-{name}")
        recipes_of(f"engine-{name}")
    for cached in (load._narrowed, engine_commands, recipes_of, gpu._say, gpu._read_once):
        found = cached.cache_info()
        assert found.maxsize is not None
        assert found.currsize <= found.maxsize


def test_threads_that_meet_get_right_values() -> None:
    cache: BoundedCache[str] = BoundedCache(300)
    wrong: list[int] = []

    def look_up(seed: int) -> None:
        keys = np.random.default_rng(seed).integers(0, 9, 20_000).tolist()
        wrong.extend(i for i in keys if cache.get(i, lambda i=i: str(i), lambda _: 60) != str(i))

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.num_bytes <= 300


@pytest.mark.parametrize("method", ["roofline", "linear_mfu"])
def test_values_up_to_a_smaller_number_begin_alike(h100: fastroof.Tables, method: str) -> None:
    """Whatever was queried before, they are those of the curve, to the bit."""
    curves = TableCurves(h100, method=method)
    plan = fastroof.compile_plan(
        "qwen3-30b-a3b", "h100", h100, method=method, tp=2, max_num_batched_tokens=64, engine="kernels"
    )
    for call in {curve.operator for curve in plan.row_curves}:
        for limit in (100, 8192, 7, 8193, 1, 3000):
            latency_us, origin = curves.row_values(call, limit)
            expected = row_values(curves.row_curve(call, limit), limit)
            assert len(latency_us) == len(origin) == limit + 1
            assert latency_us.tobytes() == expected[0].tobytes()
            assert origin.tobytes() == expected[1].tobytes()


def test_tables_hold_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_set, "BOUNDED_CACHE_BYTES", 2**20)
    tables = fastroof.load_tables("h100")
    for engine in ("vllm", "sglang", "kernels"):
        for max_num_batched_tokens in range(2000, 9000, 700):
            fastroof.compile_plan(
                "llama-3.1-8b", "h100", tables, max_num_batched_tokens=max_num_batched_tokens, engine=engine
            )
            assert 0 < tables._bounded.num_bytes <= 2**20
        fastroof.compile_plan(
            "llama-3.1-8b", "h100", tables, max_num_batched_tokens=900, method="linear_mfu", engine="kernels"
        )
    kinds = {key[0] for key in tables._cached}
    assert not [key for key in tables._cached if "linear_mfu" in str(key) and key[0] == "row nodes"]
    assert "row values" not in kinds


class Slow:
    """A value that takes long, and a record of who made it."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.values: dict[str, int] = {}
        self.bounded: BoundedCache[int] = BoundedCache(1000)

    def make(self) -> int:
        self.made.append(threading.get_ident())
        time.sleep(0.05)
        return len(self.made)

    @lazy_property
    def once(self) -> int:
        return self.make()

    def of_dict(self) -> int:
        return computed_once(self.values, "key", self.make)

    def of_bounded(self) -> int:
        return self.bounded.get("key", self.make, lambda _: 8)


@pytest.mark.parametrize("name", ["once", "of_dict", "of_bounded"])
def test_threads_wait_for_the_one_that_makes_a_value(name: str) -> None:
    slow = Slow()

    def get(_: int) -> int:
        found = getattr(slow, name)
        made: int = found() if callable(found) else found
        return made

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(get, range(8))) == {1}
    assert len(slow.made) == 1


def test_a_value_that_failed_is_made_again() -> None:
    values: dict[str, int] = {}
    with pytest.raises(ZeroDivisionError):
        computed_once(values, "key", lambda: 1 // 0)
    assert computed_once(values, "key", lambda: computed_once(values, "other", lambda: 2)) == 2
    assert values == {"other": 2, "key": 2}
