"""Kill processes at random times, continue their work, and compare its end with an undisturbed run."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.operations import NEW, OPERATIONS, prepare_inputs
from tests.faults.running import Bench
from tests.faults.shim import NoShim
from tests.faults.trees import contents, restore

__all__ = ["KILLED", "KillCounts", "count_kills", "run_kills"]

KILLED = (
    "sweep, steps to Parquet", "sweep, capacities to JSON lines", "tables import aiconfigurator GPU",
    "sweep, deployments to CSV", "sweep, capacities to JSON lines", "export c",
    "tables import aiconfigurator --backend", "export npz", "export llmservingsim",
)  # fmt: skip
"""Operations in turn; sweeps come more often, since they take hours in practice."""

IN_A_ROW = 3
"""Maximum number of kills in a row before a run may end."""


@dataclass
class KillCounts:
    """What became of an operation's runs that were killed.

    Attributes
    ----------
    kills : int
        Processes that were ended.
    had_begun : int
        Of these how many had left something of what they were at.
    had_ended : int
        How many had their files in place already.
    resumed : int
        Runs that were then let through, and led to what an undisturbed one does.
    wrong : list of str
        What else was found.
    """

    kills: int = 0
    had_begun: int = 0
    had_ended: int = 0
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)


def count_kills(kills: int, seed: int, work: Path, names: Sequence[str] = KILLED) -> dict[str, KillCounts]:
    """Kill so many processes, and continue what each was at.

    Parameters
    ----------
    kills : int
        How many.
    seed : int
        Of the moments.
    work : Path
        An empty folder.
    names : sequence of str
        Operations, in turn.
    """
    (inputs := work / "inputs").mkdir()
    prepare_inputs(inputs)
    known = {operation.name: operation for operation in OPERATIONS}
    counts = {name: KillCounts() for name in names}
    benches: dict[str, tuple[Bench, float]] = {}
    moments = random.Random(seed)
    done = turn = 0
    while done < kills:
        name = names[turn % len(names)]
        turn += 1
        if name not in benches:
            (place := work / str(len(benches))).mkdir()
            bench = Bench(known[name], inputs, place, NoShim())
            restore(bench.starts["none"], bench.folder)
            began_s = time.monotonic()
            bench.run(None)
            benches[name] = (bench, time.monotonic() - began_s)
        of, before = counts[name], counts[name].kills
        _one_turn(*benches[name], of, min(IN_A_ROW, kills - done), moments)
        done += of.kills - before
        print(f"{done} of {kills}: {name}, {len(of.wrong)} wrong", file=sys.stderr, flush=True)
    return counts


def _one_turn(bench: Bench, takes_s: float, of: KillCounts, most: int, moments: random.Random) -> None:
    """Kill an operation a few times, each time continuing it, then let it through."""
    start = moments.choice(sorted(bench.starts))
    old, new = bench.trees[start]
    restore(bench.starts[start], bench.folder)
    killed = 0
    for again in range(most):
        ended = bench.run(None, NEW, again > 0, kill_after_s=moments.uniform(0.0, takes_s))
        there = contents(bench.folder)
        if ended.code >= 0:
            if ended.code or there != new:
                of.wrong.append(f"not killed, it ends with {ended.code}: {ended.output.strip()[-300:]}")
            break
        killed += 1
        of.kills += 1
        of.had_begun += there != old and there != new
        of.had_ended += there == new
        for path, message in there.items():
            if path in old.keys() | new.keys() and message not in (old.get(path), new.get(path)):
                of.wrong.append(f"killed, {path} is neither old nor new")
        if there == new and not bench.operation.replaces:
            break
    if not killed:
        return
    if contents(bench.folder) != new or bench.operation.replaces:
        ended = bench.run(None, again=True)
        if ended.code:
            of.wrong.append(f"continued, it fails: {ended.output.strip()[-300:]}")
            return
    if contents(bench.folder) != new:
        of.wrong.append(f"continued, it ends otherwise, begun from {start}")
        return
    of.resumed += 1


def run_kills(kills: int, seed: int) -> int:
    """Kill so many processes, and print what became of them; 1 if anything is wrong."""
    with tempfile.TemporaryDirectory(prefix="fastroof-kills-") as folder:
        counts = count_kills(kills, seed, Path(folder))
    columns = ("operation", "kills", "something done", "done", "continued to equal results", "wrong")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, of in counts.items():
        print(f"| {name} | {of.kills} | {of.had_begun} | {of.had_ended} | {of.resumed} | {len(of.wrong)} |")
        for why in of.wrong:
            print(f"    {why}")
    total = list(counts.values())
    print(
        f"| all | {sum(of.kills for of in total)} | {sum(of.had_begun for of in total)} "
        f"| {sum(of.had_ended for of in total)} | {sum(of.resumed for of in total)} "
        f"| {sum(len(of.wrong) for of in total)} |"
    )
    return int(any(of.wrong for of in total))
