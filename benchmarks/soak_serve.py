"""``python -m benchmarks.soak_serve --route stdio --seconds 600 --clients 16``: servers under load and abuse.

First the load: messages of one step and of a million, by one client and by all, beside the same calls in
process. Then the soak: every client, a process of its own, sends good and bad messages in bursts until the
time is up. Every good reply is compared to the bit, every bad message must get an error, nothing may be lost,
and the memory of the servers is read as they run, with their threads and file descriptors. One more client
keeps leaving rudely.

``--route all --no-load --seconds 3600 --clients 3 --pause-ms 1000 --leave-every-s 20`` soaks every server at
once, of clients that pause, on a machine that others use as well.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.soak_http import ArrowRoute, HttpRoute
from benchmarks.soak_routes import LIMITS, PLANS, Message, Route
from benchmarks.soak_stdio import StdioRoute
from fastroof.errors import FastroofError

ROUTES: Final[dict[str, Callable[[], Route]]] = {
    "stdio": StdioRoute,
    "http": HttpRoute,
    "arrow": ArrowRoute,
}

ALL: Final = tuple(ROUTES)
"""Routes of ``--route all``."""

GOOD_SHARE: Final = 0.6
MOST_A_BURST: Final = 8
PARTS: Final = 6
"""Equal parts of a soak, at the ends of which is told what servers hold; the first warms them up."""

READ_EVERY_S: Final = 1.0
LOAD_S: Final = 4.0
LOAD_STEPS: Final = 1_000_000
START_S: Final = 180.0
END_S: Final = 60.0
MB: Final = 1e6


class Held(NamedTuple):
    """What a server's process holds."""

    at_s: float
    rss_bytes: int
    threads: int
    files: int


class Pace(NamedTuple):
    """How long clients take, and how long they pause."""

    seconds: float
    pause_s: float = 0.0
    leave_every_s: float = 1.0


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
    held: list[Held] = field(default_factory=list)
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


def held_by(pid: int, at_s: float) -> Held:
    """Resident memory, threads and file descriptors of a process."""
    process = Path(f"/proc/{pid}")
    rss_bytes = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(
        at_s, rss_bytes, len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))
    )


def soak_client(route: Route, started: Any, client: int, messages: Sequence[Message], pace: Pace) -> Account:
    """Send bursts of good and bad messages, and count what comes back."""
    account, rng = Account(), random.Random(client)
    connection = route.connect(started, client, LIMITS)
    connection.exchange([messages[0]], rng)
    account.held.append(held_by(connection.server_pid, 0.0))
    begin = last = time.monotonic()
    few = [message for message in messages if len(message.expected_us) <= 5000]
    while (now := time.monotonic()) < begin + pace.seconds:
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
                account.failure = f"a good message of {len(sent.expected_us)} steps was answered {got!r:.200}"
            else:
                account.good += 1
                account.steps += len(got)
        if now - last >= READ_EVERY_S:
            last = now
            account.held.append(held_by(connection.server_pid, now - begin))
        if pace.pause_s:
            time.sleep(min(rng.expovariate(1 / pace.pause_s), 10 * pace.pause_s))
    account.held.append(held_by(connection.server_pid, time.monotonic() - begin))
    connection.close()
    return account


def leaving_client(route: Route, started: Any, messages: Sequence[Message], pace: Pace) -> Account:
    """Come and go rudely."""
    account, rng = Account(), random.Random(1)
    begin = time.monotonic()
    few = [message for message in messages if len(message.expected_us) <= 33]
    while time.monotonic() < begin + pace.seconds:
        account.lost += route.leave(started, rng.choices(few, k=20), rng)
        account.departures += 1
        time.sleep(pace.leave_every_s)
    return account


def load_client(
    route: Route, started: Any, client: int, message: Message, seconds: float, barrier: Any
) -> Account:
    """Send one message after the other, as fast as replies come."""
    account, rng = Account(), random.Random(client)
    connection = route.connect(started, client)
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
        process.join(END_S if len(accounts) == len(works) else 1.0)
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


def soak(route: Route, messages: Sequence[Message], clients: int, pace: Pace) -> dict[str, Any]:
    """What all clients met together."""
    started = route.start()
    works: list[Any] = [(soak_client, (route, started, i, messages, pace)) for i in range(clients)]
    works.append((leaving_client, (route, started, messages, pace)))
    accounts = in_processes(works, pace.seconds)
    route.stop(started)
    series = [account.held for account in accounts if account.held]
    if route.shares_a_server:
        series = series[:1]
    at = [[_at(one, part * pace.seconds / PARTS) for one in series] for part in range(PARTS + 1)]
    refused: Counter[str] = sum((account.refused for account in accounts), Counter())
    totals = {
        name: sum(getattr(account, name) for account in accounts)
        for name in ("good", "steps", "differing", "unrefused", "lost", "departures")
    }
    return {
        **pace._asdict(),
        "clients": clients,
        **totals,
        "refused": sum(refused.values()),
        "refused_by_kind": dict(sorted(refused.items())),
        "messages_per_s": (totals["good"] + sum(refused.values())) / pace.seconds,
        "steps_per_s": totals["steps"] / pace.seconds,
        "servers": len(series),
        "rss_mb_over_time": [round(sum(each.rss_bytes for each in held) / MB, 1) for held in at],
        "threads_over_time": [sum(each.threads for each in held) for held in at],
        "files_over_time": [sum(each.files for each in held) for held in at],
        "rss_mb_most_growth": max(
            ((end.rss_bytes - warm.rss_bytes) / MB for warm, end in zip(at[1], at[-1], strict=True)),
            default=0.0,
        ),
        "failures": [account.failure for account in accounts if account.failure],
    }


def _at(series: Sequence[Held], at_s: float) -> Held:
    return next((held for held in series if held.at_s >= at_s), series[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--route", choices=[*sorted(ROUTES), "all"], default="stdio")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="mean pause of a client between bursts")
    parser.add_argument("--leave-every-s", type=float, default=1.0, help="of the client that leaves rudely")
    parser.add_argument("--no-load", action="store_true", help="the soak alone")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    given = parser.parse_args(arguments)
    names = ALL if given.route == "all" else (given.route,)
    routes, messages = {name: ROUTES[name]() for name in names}, good_messages(seed=0)
    found: dict[str, Any] = {name: {} for name in names}
    if not given.no_load:
        for name, route in routes.items():
            found[name]["load"] = load(route, messages, given.clients)
            for what, figures in found[name]["load"].items():
                said = ", ".join(f"{key} {value:,.4g}" for key, value in figures.items())
                print(f"{name}, {what}: {said}", flush=True)
    pace = Pace(given.seconds, given.pause_ms / 1000, given.leave_every_s)
    with ThreadPoolExecutor(len(routes)) as side_by_side:
        works = {
            name: side_by_side.submit(soak, route, messages, given.clients, pace)
            for name, route in routes.items()
        }
        for name, work in works.items():
            found[name]["soak"] = work.result()
    is_bad = False
    for name in names:
        met = found[name]["soak"]
        print(f"{name}:")
        for key, value in met.items():
            print(f"  {key}: {value:,.1f}" if isinstance(value, float) else f"  {key}: {value}")
        is_bad |= bool(met["differing"] or met["unrefused"] or met["lost"] or met["failures"])
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
