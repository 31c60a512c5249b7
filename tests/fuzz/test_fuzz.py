"""Seeded wrong input for each target and all past failures: the same answer or a FastroofError."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fastroof.errors import FastroofError
from fastroof.operators.registry import OPERATORS
from tests.fuzz.corpus_files import corpus_cases
from tests.fuzz.guided import run_guided
from tests.fuzz.judge import ANSWERED, FAILED, REFUSED, SKIPPED, case_of, judge
from tests.fuzz.mutators import mutated_bytes, mutated_text, mutated_tree
from tests.fuzz.running import Counts, run_target, serve_cases, table, warnings_are_errors
from tests.fuzz.target import SkippedError, Target, Wrong
from tests.fuzz.targets import kernel_lookups, lookups, target_classes

KINDS = target_classes()


@pytest.fixture(scope="module", params=sorted(KINDS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    one = KINDS[request.param]()
    one.begin(tmp_path_factory.mktemp(request.param))
    yield one
    one.close()


def test_past_failures_are_answered_or_refused(target: Target) -> None:
    with warnings.catch_warnings():
        warnings_are_errors()
        verdicts = {name: judge(target, case) for name, case in corpus_cases(target.name).items()}
    assert {name: one for name, one in verdicts.items() if one.kind == FAILED} == {}


def test_seeded_cases_are_answered_or_refused(target: Target, record_property: pytest.FixtureRequest) -> None:
    counts = serve_cases(target, 0, target.ci_cases, None)
    record_property("fuzz", {**vars(counts), "target": target.name})  # type: ignore[operator]
    assert counts.failures == {}
    # a target that only answers, or only refuses, tests nothing
    assert counts.answered > 0
    assert counts.refused > 0


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


class Crashing(Planted):
    name = "crashing"

    def check(self, case: bytes) -> None:
        if case == b"3":
            import os
            import signal

            os.kill(os.getpid(), signal.SIGSEGV)


def test_the_judge_distinguishes_faults_from_refusals() -> None:
    with warnings.catch_warnings():
        warnings_are_errors()
        kinds = [judge(Planted(), str(number).encode()).kind for number in range(8)]
    assert kinds == [REFUSED, FAILED, FAILED, FAILED, FAILED, SKIPPED, FAILED, ANSWERED]


def test_counts_are_of_cases_and_name_the_first_of_a_place() -> None:
    counts = serve_cases(Planted(), 0, 60, None)
    of = [case_of(Planted(), seed) for seed in range(60)]
    assert counts.cases == 60 - of.count(b"5")
    assert counts.refused == of.count(b"0")
    assert counts.failed == sum(case in (b"1", b"2", b"3", b"4", b"6") for case in of)
    assert sum(number for number, _, _ in counts.failures.values()) == counts.failed
    [keyed] = [seeds for place, (_, seeds, _) in counts.failures.items() if place.startswith("KeyError")]
    assert keyed[0] == of.index(b"3")


def test_a_crash_is_named_and_the_next_case_follows(tmp_path: Path) -> None:
    of = [case_of(Crashing(), seed) for seed in range(30)]
    counts = run_target(Crashing, 0, 30, None, tmp_path)
    assert (counts.cases, counts.failed) == (30, of.count(b"3"))
    [(place, (number, seeds, _))] = counts.failures.items()
    assert place == "crash: ends the process with signal 11"
    assert number == of.count(b"3")
    assert seeds[0] == of.index(b"3")
    assert (tmp_path / "crashing" / f"seed-{seeds[0]}.txt").read_bytes() == b"3"


def test_a_seed_is_a_case(target: Target) -> None:
    some = [case_of(target, seed) for seed in range(20)]
    assert some == [case_of(target, seed) for seed in range(20)]
    assert len(set(some)) > 10


def test_a_target_that_does_not_begin_is_an_error(tmp_path: Path) -> None:
    class Broken(Planted):
        name = "broken"

        def examples(self) -> list[bytes]:
            return [b"3"]

    with pytest.raises(RuntimeError, match="broken: it does not begin, status 1"):
        run_target(Broken, 0, 10, None, None)


def test_the_table_has_a_row_per_target_and_their_sum() -> None:
    counts = Counts(cases=1000, answered=600, refused=300, failed=100, seconds=2.0)
    rows = table({"one": counts, "other": counts}).splitlines()[2:]
    assert rows == [
        "| one | 1,000 | 600 | 300 | 100 | 500 |",
        "| other | 1,000 | 600 | 300 | 100 | 500 |",
        "| all | 2,000 | 1,200 | 600 | 200 | 500 |",
    ]


def test_targets_of_bytes_take_any_bytes(target: Target) -> None:
    if not target.is_bytes:
        pytest.skip("cases are written out")
    random = Random(7)
    with warnings.catch_warnings():
        warnings_are_errors()
        for size in (0, 1, 10, 1000):
            assert judge(target, random.randbytes(size)).kind != FAILED


def test_without_atheris_one_line_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert run_guided(["gpu.toml"], 1.0, None) == 2
    assert capsys.readouterr().err == "--guided needs atheris: pip install atheris\n"


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
