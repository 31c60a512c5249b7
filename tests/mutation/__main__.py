"""Change the product's source, a little and at random, and see whether tests notice: see README.md."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.mutation.child import Changed, limit, run_tests, without_jit
from tests.mutation.mutants import Mutant, count_of, mutant_of
from tests.mutation.processes import Partner, in_child
from tests.mutation.selection import CHECKOUT, Recorded, merged, record, stages
from tests.mutation.warm import Warm

AREAS: Final = {
    "operators": ("operators",),
    "models": ("models",),
    "plan": ("plan",),
    "tables": ("tables", "pack"),
    "serving": ("serving",),
    "sweep": ("sweep",),
    "compiled": ("compiled",),
}
"""The packages of an area."""

_FROZEN: Final = "tests/frozen/test_frozen.py::test_answers_are_those_on_record"
_QUICK: Final = ["-m", "not slow"]
_TESTS: Final[dict[str, tuple[list[str], list[str]]]] = {
    "tables": (
        [
            *(f"tests/{name}" for name in ("operators", "models", "plan", "tables", "pack", "uncertainty")),
            *(f"fastroof/{name}" for name in ("operators", "models", "plan", "tables", "pack")),
            *(
                f"{_FROZEN}[lookups-{name}]"
                for name in ("allreduce", "attention_decode", "gemm", "moe", "errors")
            ),
            *(
                f"{_FROZEN}[plans-{name}]"
                for name in ("errors", "explained", "options", "of-kinds", "qwen3-8b")
            ),
        ],
        [*_QUICK, "-k", "not 80_percent and not keeps_to_its_limits and not a_lookup_a_layer"],
    ),
    "serving": (["tests/serving", "fastroof/serving", f"{_FROZEN}[estimates-sizing]"], _QUICK),
    "sweep": (["tests/sweep", "fastroof/sweep", f"{_FROZEN}[sweeps-of-steps]"], _QUICK),
    "compiled": (["tests"], ["-m", "loops and not slow"]),
}
"""Where to look for tests that run a line, and which of them: a few of the longest are left out."""
_GROUP: Final = {
    **dict.fromkeys(("operators", "models", "plan", "tables"), "tables"),
    **{area: area for area in ("serving", "sweep", "compiled")},
}
"""Whose tests an area's mutants meet."""

_FIRST_S: Final = 1.0
"""Processor seconds of the unchanged tests that a mutant meets first."""
_WORDS: Final = {1: "failed", 2: "collection", 3: "pytest itself", 4: "collection", 5: "no tests"}


class _Tried:
    """The tests of a group, collected by a process that waits for mutants."""

    def __init__(self, seen: Recorded, jit: bool, most_s: float) -> None:
        self._seen, self._jit, self._budgets_s = seen, jit, (_FIRST_S, most_s)
        self._warm: Partner | None = None

    def __call__(self, mutant: Mutant, number: int | None) -> dict[str, Any]:
        """Run a mutant's tests and say what noticed it; of ``number`` None, the module as it is."""
        file = file_of(mutant.module)
        planned = [tests for tests in stages(mutant, file, self._seen, self._budgets_s) if tests]
        if not planned:
            return {"result": "no tests", "tests": 0, "seconds": 0.0}
        started = time.monotonic()
        self._warm = self._warm or Partner(self._collect)
        answer = self._warm.ask([file, number, planned])
        said, ended = answer["said"], answer["ended"]
        way = "warm"
        if any("cold" in one or "error" in one for one in said):
            said, ended = in_child(partial(self._cold, mutant, number, planned), 300.0)
            way = "cold"
        last = said[-1] if said else {}
        if "error" in last:
            raise SystemExit(f"{mutant}: {last['error']}")
        tests = sum(one.get("stage", 0) for one in said)
        answer = {"tests": tests, "way": way, "seconds": round(time.monotonic() - started, 2)}
        if "killed" in last:
            return {
                "result": "killed",
                "word": last["killed"],
                "by": last["by"],
                "how": last["how"],
                **answer,
            }
        if ended:
            return {"result": "killed", "word": ended, "by": "", "how": "", **answer}
        return {"result": "survived" if last.get("lived") else "not imported", **answer}

    def close(self) -> None:
        """End the process."""
        if self._warm:
            self._warm.close()

    def _collect(self, requests: Iterator[Any], say: Callable[[Any], None]) -> None:
        if not self._jit:
            without_jit()
        run_tests(
            sorted({test.partition("::")[0] for test in self._seen.seconds}),
            extra=Warm(requests, say, self._seen.seconds),
        )

    def _cold(
        self, mutant: Mutant, number: int | None, planned: list[list[str]], say: Callable[[Any], None]
    ) -> None:
        if not self._jit:
            without_jit()
        changed = Changed(mutant.module, number)
        sys.meta_path.insert(0, changed)
        for tests in planned:
            limit(15.0 + 3.0 * sum(self._seen.seconds[test] for test in tests))
            say({"stage": len(tests)})
            code, session = run_tests((test.partition("::")[0] for test in tests), tests)
            if code:
                noticed = next(iter(session.failed.items()), ("", ""))
                say({"killed": _WORDS.get(code, str(code)), "by": noticed[0], "how": noticed[1]})
                return
        say({"lived": changed.was_imported})


def file_of(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}.py" if (CHECKOUT / f"{path}.py").exists() else f"{path}/__init__.py"


def _modules_of(area: str) -> Iterator[str]:
    for package in AREAS[area]:
        for path in sorted((CHECKOUT / "fastroof" / package).rglob("*.py")):
            parts = path.relative_to(CHECKOUT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _drawn(area: str, seed: int) -> Iterator[Mutant]:
    """All mutants of an area in an order that the seed decides."""
    sources = {module: (CHECKOUT / file_of(module)).read_text() for module in _modules_of(area)}
    places = [(module, i) for module, source in sources.items() for i in range(count_of(source))]
    random.Random(f"{seed} {area}").shuffle(places)
    for module, number in places:
        yield mutant_of(module, sources[module], number)


def _record(group: str, paths: list[str], target: Path, say: Callable[[Any], None]) -> None:
    if group == "compiled":
        without_jit()
    record(paths, _TESTS[group][1], target)


def _record_all(folder: Path, groups: Iterable[str], only: list[str] | None) -> None:
    """Record the tests of groups, or of these files alone, in the place of what was seen of them before."""
    for group in groups:
        started = time.monotonic()
        name = f"{group}-new" if only else group
        work = partial(_record, group, only or _TESTS[group][0], folder / f"{name}.pickle")
        said, ended = in_child(work, 3600.0)
        if ended or said:
            raise SystemExit(f"recording the tests of {group} ended with {ended}: {said}")
        seen, failed = _read(folder, name)
        if only:
            (folder / f"{name}.pickle").unlink()
            there = (folder / f"{group}.pickle").exists()
            whole = merged(_read(folder, group)[0], seen, only) if there else seen
            (folder / f"{group}.pickle").write_bytes(pickle.dumps((whole._asdict(), failed)))
        print(f"{group}: {len(seen.seconds)} tests passed in {time.monotonic() - started:.0f} s", flush=True)
        for name, how in failed.items():
            print(f"  left out, since it fails on the product as it is: {name}: {how}", flush=True)


def _read(folder: Path, group: str) -> tuple[Recorded, dict[str, str]]:
    fields, failed = pickle.loads((folder / f"{group}.pickle").read_bytes())
    return Recorded(**fields), failed


def _import_others() -> None:
    """Import what fastroof and its tests need of others, for all children at once."""
    for name in (
        *("coverage", "hypothesis", "numba", "platformdirs", "pyarrow.compute", "pyarrow.dataset"),
        *("pyarrow.parquet", "pydantic", "rich.table", "typer.testing", "yaml"),
    ):
        importlib.import_module(name)
    assert "fastroof" not in sys.modules, "a child imports it, changed"


def main() -> None:
    """Record what tests run, then try mutants until enough or the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--mutants", type=int, default=500, help="how many in all, evenly over the areas")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--area", action="append", choices=AREAS, help="one area, or several; all without it")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--module", help="every mutant of this module, and no others")
    parser.add_argument("--function", help="of the module, what lies in this function alone")
    parser.add_argument("--again", action="store_true", help="those on record as not killed, and no others")
    parser.add_argument("--seconds", type=float, default=8.0, help="of tests, for what the first let live")
    parser.add_argument("--record", action="append", choices=_TESTS, help="first see what tests run; again")
    parser.add_argument("--only", action="append", help="of the tests to record, this file's; others stay")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "build" / "mutation", help="for records")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ["CI"] = "1"  # hypothesis takes the same examples each time
    os.chdir(CHECKOUT)
    _import_others()
    until = time.monotonic() + 60.0 * given.minutes
    areas = given.area or list(AREAS)
    needed = sorted({_GROUP[area] for area in areas})
    _record_all(
        given.folder,
        given.record or [g for g in needed if not (given.folder / f"{g}.pickle").exists()],
        given.only,
    )

    results = given.folder / "results.jsonl"
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(one["module"], one["number"]): one for one in known}
    share = -(-given.mutants // len(areas))
    queues: dict[str, Iterator[Mutant]] = {}
    for area in areas:
        drawn = _drawn(area, given.seed)
        if given.module:
            chosen = (one for one in drawn if one.module == given.module)
            queues[area] = (one for one in chosen if given.function in (None, one.function))
        else:
            queues[area] = (one for _, one in zip(range(share), drawn, strict=False))
    checked: set[str] = set()
    seen = {group: _read(given.folder, group)[0] for group in needed}
    tried = {group: _Tried(seen[group], group != "compiled", given.seconds) for group in needed}
    counts: Counter[tuple[str, str]] = Counter()
    # the areas in turn, so that whatever the time allows is even
    while queues and time.monotonic() < until:
        for area in list(queues):
            mutant = next(queues[area], None)
            if mutant is None:
                del queues[area]
                continue
            before = done.get((mutant.module, mutant.number))
            if given.again:
                if not before or before["result"] == "killed":
                    continue
            elif before:
                continue
            attempt = tried[_GROUP[area]]
            if area not in checked:
                checked.add(area)
                as_it_is = attempt(mutant, None)
                print(f"{area}, nothing changed: {as_it_is}", flush=True)
                if as_it_is["result"] == "killed":
                    raise SystemExit("its tests fail on the product as it is")
            answer = attempt(mutant, mutant.number)
            counts[area, answer["result"]] += 1
            with results.open("a") as file:
                file.write(json.dumps({"area": area, **mutant._asdict(), **answer}) + "\n")
            if answer["result"] != "killed":
                print(f"{answer['result']}: {_words(mutant)}", flush=True)
    for each in tried.values():
        each.close()
    for area in areas:
        print(area, {result: n for (of, result), n in counts.items() if of == area}, flush=True)


def _words(mutant: Mutant) -> str:
    where = f"{file_of(mutant.module)}:{mutant.line} {mutant.function}"
    return f"{where}: {mutant.before} -> {mutant.after}   [{mutant.context}]"


if __name__ == "__main__":
    main()
