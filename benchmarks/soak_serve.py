"""``python -m benchmarks.soak_serve --route stdio --seconds 600 --clients 16``: servers under load and abuse.

First the load: messages of one step and of a million, by one client and by all, beside the same calls in
process. Then the soak: every client, a process of its own, sends good and bad messages in bursts until the
time is up. Every good reply is compared to the bit, every bad message must get an error, nothing may be lost,
and the memory of the servers is read as they run. One more client keeps leaving rudely.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.soak_flight import FlightRoute
from benchmarks.soak_http import HttpRoute
from benchmarks.soak_routes import LIMITS, PLANS, Message, Route
from benchmarks.soak_stdio import StdioRoute
from fastroof.errors import FastroofError

ROUTES: Final[dict[str, Callable[[], Route]]] = {
    "stdio": StdioRoute,
    "flight": FlightRoute,
    "http": HttpRoute,
}

GOOD_SHARE: Final = 0.6
MOST_A_BURST: Final = 8
WARM_SHARE: Final = 0.2
RSS_EVERY_S: Final = 1.0
LOAD_S: Final = 4.0
LOAD_STEPS: Final = 1_000_000
START_S: Final = 180.0
MB: Final = 1e6


@dataclass
class Account:
    """What one client met."""

    good: int = 0
    steps: int = 0
    differing: int = 0
    unrefused: int = 0
    lost: int = 0
    departures: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)
    failure: str = ""


def good_messages(seed: int) -> list[Message]:
    """Requests of every kind and size, with the times of plans in this process."""
    from fastroof import StepBatch
    from fastroof.cli.named_plans import named_plans

    rng = np.random.default_rng(seed)
    plans = list(named_plans(PLANS).values())
    messages = []
    for number, plan in enumerate(plans):
        for count in (1, 1, 1, 2, 33, 400, 5000, 200_000):
            dtype = rng.choice([np.int32, np.int64])
            sizes = rng.integers(1, 1025, count, dtype=dtype), rng.integers(2, 20_000, count, dtype=dtype)
            messages.append(Message(number, sizes, plan.decode_us(*sizes)))
            lengths = rng.integers(0, 64, min(count, 2000))
            requests = int(lengths.sum())
            new, context = (
                rng.integers(1, 9, requests, dtype=dtype),
                rng.integers(0, 9000, requests, dtype=dtype),
            )
            batch = StepBatch(new, context, np.r_[0, np.cumsum(lengths)])
            messages.append(
                Message(number, (batch.new_tokens, batch.context_len, batch.offsets), plan.step_us(batch))
            )
    return messages


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak_client(
    route: Route, started: Any, client: int, messages: Sequence[Message], seconds: float
) -> Account:
    """Send bursts of good and bad messages, and count what comes back."""
    account, rng = Account(), random.Random(client)
    connection = route.connect(started, client, LIMITS)
    connection.exchange([messages[0]], rng)
    account.rss_bytes.append((0.0, rss_bytes(connection.server_pid)))
    begin = last = time.monotonic()
    few = [message for message in messages if len(message.expected_us) <= 5000]
    while (now := time.monotonic()) < begin + seconds:
        pool = messages if rng.random() < 0.1 else few
        burst: list[Message | str] = []
        for _ in range(rng.randrange(1, MOST_A_BURST)):
            if rng.random() > GOOD_SHARE:
                # a good one after each: what follows a break is part of it up to the next good one
                burst.append(rng.choice(connection.bad_kinds))
            burst.append(rng.choice(pool))
        try:
            replies = connection.exchange(burst, rng)
        except (FastroofError, OSError, ValueError) as error:
            account.failure = f"{type(error).__name__}: {error}"
            account.lost += sum(isinstance(each, Message) for each in burst)
            return account
        for sent, got in zip(burst, replies, strict=True):
            if isinstance(sent, str):
                account.refused[sent] += 1
                account.unrefused += not isinstance(got, FastroofError)
            elif isinstance(got, FastroofError) or got.tobytes() != sent.expected_us.tobytes():
                account.differing += 1
            else:
                account.good += 1
                account.steps += len(got)
        if now - last >= RSS_EVERY_S:
            last = now
            account.rss_bytes.append((now - begin, rss_bytes(connection.server_pid)))
    account.rss_bytes.append((time.monotonic() - begin, rss_bytes(connection.server_pid)))
    connection.close()
    return account


def leaving_client(route: Route, started: Any, messages: Sequence[Message], seconds: float) -> Account:
    """Come and go rudely."""
    account, rng = Account(), random.Random(1)
    begin = time.monotonic()
    few = [message for message in messages if len(message.expected_us) <= 33]
    while time.monotonic() < begin + seconds:
        account.lost += route.leave(started, rng.choices(few, k=20), rng)
        account.departures += 1
        time.sleep(1.0)
    return account


def load_client(
    route: Route, started: Any, client: int, message: Message, seconds: float, barrier: Any
) -> Account:
    """Send one message after the other, as fast as replies come."""
    account, rng = Account(), random.Random(client)
    connection = route.connect(started, 4 * client)  # frames, where a route has others
    for _ in range(3):
        connection.exchange([message], rng)
    barrier.wait()
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        (got,) = connection.exchange([message], rng)
        account.good += 1
        account.steps += len(got)
    account.differing += got.tobytes() != message.expected_us.tobytes()
    connection.close()
    return account


def in_processes(
    works: Sequence[tuple[Callable[..., Account], tuple[Any, ...]]], seconds: float
) -> list[Account]:
    """Run clients side by side; one that does not come back in time has lost something."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_work, args=(answers, *work), daemon=False) for work in works]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds + START_S
    accounts: list[Account] = []
    while len(accounts) < len(works) and time.monotonic() < until:
        if answers.empty():
            time.sleep(0.05)
        else:
            accounts.append(answers.get())
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            accounts.append(Account(lost=1, failure="a client waited for a reply that did not come"))
    return accounts


def _work(answers: Any, work: Callable[..., Account], arguments: tuple[Any, ...]) -> None:
    try:
        answers.put(work(*arguments))
    except BaseException as error:
        answers.put(Account(lost=1, failure=f"{type(error).__name__}: {error}"))
        raise


def load(route: Route, messages: Sequence[Message], clients: int) -> dict[str, dict[str, float]]:
    """Messages and steps a second of one client and of all, and of the same calls in process."""
    from fastroof.cli.named_plans import named_plans

    plan = next(iter(named_plans(PLANS[:1]).values()))
    rng = np.random.default_rng(7)
    bulk = rng.integers(1, 513, LOAD_STEPS, dtype=np.int32), rng.integers(2, 8193, LOAD_STEPS, dtype=np.int32)
    one = np.array([64]), np.array([4096])
    context = multiprocessing.get_context("spawn")
    found = {}
    for name, sizes in (("one step a message", one), (f"{LOAD_STEPS:,} steps a message", bulk)):
        message = Message(0, sizes, plan.decode_us(*sizes))
        call: Callable[[], Any] = (
            (lambda: plan.decode_us(64, 4096)) if sizes is one else lambda: plan.decode_us(*bulk)
        )
        found[name] = {"in_process_us": 1e6 * median_s(call, 15 if sizes is bulk else 2000)}
        for count in sorted({1, clients}):
            started = route.start()
            barrier = context.Barrier(count)
            works = [(load_client, (route, started, i, message, LOAD_S, barrier)) for i in range(count)]
            accounts = in_processes(works, LOAD_S)
            route.stop(started)
            if any(account.failure or account.differing for account in accounts):
                raise SystemExit(f"load failed: {[a.failure for a in accounts]}")
            total = sum(account.good for account in accounts)
            found[name][f"us_a_message_{count}"] = 1e6 * LOAD_S * count / total
            found[name][f"steps_per_s_{count}"] = sum(account.steps for account in accounts) / LOAD_S
    return found


def median_s(call: Callable[[], Any], times: int) -> float:
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def soak(route: Route, messages: Sequence[Message], clients: int, seconds: float) -> dict[str, Any]:
    """What all clients met together."""
    started = route.start()
    works: list[Any] = [(soak_client, (route, started, i, messages, seconds)) for i in range(clients)]
    works.append((leaving_client, (route, started, messages, seconds)))
    accounts = in_processes(works, seconds)
    route.stop(started)
    series = [account.rss_bytes for account in accounts if account.rss_bytes]
    if route.shares_a_server:
        series = series[:1]
    shares = [0.0, WARM_SHARE, *np.arange(3, 11) / 10]
    at_shares = [[_rss_mb(one, share * seconds) for one in series] for share in shares]
    warm, end = at_shares[1], at_shares[-1]
    refused: Counter[str] = sum((account.refused for account in accounts), Counter())
    totals = {
        name: sum(getattr(account, name) for account in accounts)
        for name in ("good", "steps", "differing", "unrefused", "lost", "departures")
    }
    return {
        "seconds": seconds,
        "clients": clients,
        **totals,
        "refused": sum(refused.values()),
        "refused_by_kind": dict(sorted(refused.items())),
        "messages_per_s": (totals["good"] + sum(refused.values())) / seconds,
        "steps_per_s": totals["steps"] / seconds,
        "servers": len(series),
        "rss_mb_at_start": sum(at_shares[0]),
        "rss_mb_warm": sum(warm),
        "rss_mb_at_end": sum(end),
        "rss_mb_over_time": [round(sum(each)) for each in at_shares],
        "rss_mb_most_growth": max((b - a for a, b in zip(warm, end, strict=True)), default=0.0),
        "failures": [account.failure for account in accounts if account.failure],
    }


def _rss_mb(series: Sequence[tuple[float, int]], at_s: float) -> float:
    return next((held for at, held in series if at >= at_s), series[-1][1]) / MB


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--route", choices=sorted(ROUTES), default="stdio")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--no-load", action="store_true", help="the soak alone")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    given = parser.parse_args(arguments)
    route, messages = ROUTES[given.route](), good_messages(seed=0)
    found: dict[str, Any] = {"route": given.route}
    if not given.no_load:
        found["load"] = load(route, messages, given.clients)
        for name, figures in found["load"].items():
            print(
                f"{name}: " + ", ".join(f"{key} {value:,.4g}" for key, value in figures.items()), flush=True
            )
    found["soak"] = met = soak(route, messages, given.clients, given.seconds)
    for key, value in met.items():
        print(f"{key}: {value:,.1f}" if isinstance(value, float) else f"{key}: {value}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(bool(met["differing"] or met["unrefused"] or met["lost"] or met["failures"]))


if __name__ == "__main__":
    sys.exit(main())
