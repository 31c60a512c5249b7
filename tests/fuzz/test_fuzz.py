"""Seeded wrong input for each target and all past failures: the same answer or a FastroofError."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from fastroof.errors import FastroofError
from fastroof.operators.registry import OPERATORS
from tests.fuzz import guided
from tests.fuzz.judge import ANSWERED, FAILED, REFUSED, SKIPPED, case_of, judge, warnings_are_errors
from tests.fuzz.mutators import mutated_bytes, mutated_text, mutated_tree
from tests.fuzz.target import SkippedError, Target, Wrong
from tests.fuzz.targets import kernel_lookups, lookups, target_classes

KINDS = target_classes()


@pytest.fixture(scope="module", params=sorted(KINDS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    one = KINDS[request.param]()
    with warnings_are_errors():
        one.begin(tmp_path_factory.mktemp(request.param))
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings_are_errors():
        yield


def test_past_failures_are_answered_or_refused(target: Target) -> None:
    verdicts = {name: judge(target, case) for name, case in target.corpus().items()}
    assert {name: one for name, one in verdicts.items() if one.kind == FAILED} == {}


def test_seeded_cases_are_answered_or_refused(
    target: Target, pytestconfig: pytest.Config, record_property: pytest.FixtureRequest
) -> None:
    first, cases, kept = (
        pytestconfig.getoption(f"--fuzz-{name}", default=None) for name in ("first", "cases", "keep")
    )
    counts: Counter[str] = Counter()
    failures = {}
    for seed in range(first or 0, (first or 0) + (cases or target.ci_cases)):
        case = case_of(target, seed)
        path = kept and kept / target.name / f"seed-{seed}{target.suffix}"
        if path:  # before it runs, since a crash ends the process
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(case)
        verdict = judge(target, case)
        counts[verdict.kind] += 1
        if verdict.kind == FAILED:
            failures.setdefault(verdict.place, (seed, verdict))
        elif path:
            path.unlink()
    record_property("fuzz", (target.name, dict(counts)))  # type: ignore[operator]
    for seed, verdict in failures.values():
        shown = [f"seed {seed}, {place}: {one.why}" for place, (seed, one) in failures.items()]
        raise AssertionError("\n".join(shown)) from verdict.error
    # a target that only answers, or only refuses, tests nothing
    assert cases or (counts[ANSWERED] > 0 < counts[REFUSED])


class Planted(Target):
    """A target with one failure of each kind."""

    name = "planted"
    limit_s = 0.05

    def case(self, random: Random) -> bytes:
        return str(random.randrange(10)).encode()

    def check(self, case: bytes) -> None:
        match case:
            case b"0":
                raise FastroofError("no")
            case b"1":
                raise FastroofError
            case b"2":
                raise Wrong("nan")
            case b"3":
                raise KeyError("x")
            case b"4":
                while True:
                    pass
            case b"5":
                raise SkippedError
            case b"6":
                warnings.warn("overflow", RuntimeWarning, stacklevel=1)


def test_the_judge_distinguishes_faults_from_refusals() -> None:
    verdicts = [judge(Planted(), str(number).encode()) for number in range(8)]
    kinds = [one.kind for one in verdicts]
    assert kinds == [REFUSED, FAILED, FAILED, FAILED, FAILED, SKIPPED, FAILED, ANSWERED]
    assert verdicts[3].place.startswith("KeyError in ")
    assert isinstance(verdicts[3].error, KeyError)


def test_a_seed_is_a_case(target: Target) -> None:
    some = [case_of(target, seed) for seed in range(20)]
    assert some == [case_of(target, seed) for seed in range(20)]
    assert len(set(some)) > 10


def test_targets_of_bytes_take_any_bytes(target: Target) -> None:
    if not target.is_bytes:
        pytest.skip("cases are written out")
    random = Random(7)
    for size in (0, 1, 10, 1000):
        assert judge(target, random.randbytes(size)).kind != FAILED


def test_without_atheris_one_line_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    monkeypatch.setattr(os, "environ", {})
    assert guided.main("gpu.toml", "seeds") == 2
    assert capsys.readouterr().err == "coverage-guided cases need atheris: pip install atheris\n"


def test_mutators_change_what_they_are_given() -> None:
    text = b'a = 1\nb = "two"\n[c]\nd = [1, 2]\n'
    tree = {"a": 1, "b": {"c": [1, 2.5, "x"]}}
    for mutated, given in ((mutated_bytes, text), (mutated_text, text), (mutated_tree, tree)):
        found = [mutated(given, Random(seed)) for seed in range(200)]  # type: ignore[operator]
        assert sum(repr(one) != repr(given) for one in found) > 150
        assert tree == {"a": 1, "b": {"c": [1, 2.5, "x"]}}


def test_every_operator_that_answers_lookups_is_covered() -> None:
    wanted = {name for name, _ in lookups.QUERIES} | kernel_lookups.QUERIES.keys()
    assert wanted == {name for name, operator in OPERATORS.items() if operator.answers_lookups}
