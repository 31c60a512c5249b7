"""Mutants are what they say: one change each, of nothing that no answer depends on."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.mutation.mutants import count_of, mutant_of, mutated
from tests.mutation.selection import CHECKOUT, Recorded, merged

SOURCE = '''
"""Text, 1 + 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 3
__all__ = ["area", "LIMIT"[0:5]]
LIMIT: int = 60


@decorated(7)
def area(width: "int < 3", height=2) -> float:
    if not width:
        raise ValueError(f"{width + 1} is less than {2}", 1)
    return width * height if width >= 0 and True else -height


class Shape:
    sides: int = 4

    def corners(self, name):
        for side in zip([1], [2], strict=True):
            print(name + " of " + "4")
        return [n for n in side if n != 9]
'''


def _texts():
    return [mutant_of("shapes", SOURCE, i) for i in range(count_of(SOURCE))]


def test_every_mutant_is_one_change_of_the_source():
    whole = ast.dump(mutated(SOURCE, None))
    dumps = [ast.dump(mutated(SOURCE, i)) for i in range(count_of(SOURCE))]
    assert len({whole, *dumps}) == len(dumps) + 1
    for i in range(len(dumps)):
        compile(mutated(SOURCE, i), "shapes.py", "exec")


def test_what_is_changed():
    changes = {(m.function, m.before, m.after) for m in _texts()}
    assert {
        ("", "60", "61"),
        ("area", "2", "4"),
        ("area", "not width", "width"),
        ("area", "width * height", "width / height"),
        ("area", "width >= 0", "width > 0"),
        ("area", "-height", "height"),
        ("area", "True", "False"),
        ("Shape", "4", "5"),
        ("Shape.corners", "n != 9", "n == 9"),
    } <= changes
    # a negation is one mutant, whichever way it is written
    assert not [after for _, _, after in changes if after.startswith(("not not", "not width >="))]
    # nothing of types, text, errors, decorators and what guards Python itself
    assert not {before for _, before, _ in changes} & {"3", "5", "7", "width + 1", "'int < 3'"}
    assert ("Shape.corners", "True", "False") not in changes
    assert not [m for m in _texts() if m.context.startswith(("raise", "__all__", "print(name + "))]


def test_a_mutant_says_where_it_is():
    (one,) = [m for m in _texts() if m.before == "width >= 0" and m.after == "width > 0"]
    line = SOURCE.splitlines()[one.line - 1]
    assert one.context == line.strip()
    assert one.statement == (one.line, one.line)


def test_a_file_of_tests_recorded_again_takes_the_place_of_what_was_seen_of_it():
    before = Recorded({"a.py::one": 1.0, "a.py::two": 1.0, "b.py::one": 2.0}, {"m.py": {
        1: {"a.py::one", "b.py::one"}, 2: {"a.py::two"},
    }})  # fmt: skip
    new = Recorded({"a.py::one": 3.0}, {"m.py": {2: {"a.py::one"}}, "n.py": {5: {"a.py::one"}}})
    assert merged(before, new, ["a.py"]) == Recorded(
        {"a.py::one": 3.0, "b.py::one": 2.0},
        {"m.py": {1: {"b.py::one"}, 2: {"a.py::one"}}, "n.py": {5: {"a.py::one"}}},
    )


_CHILD = """
import json, sys
from pathlib import Path
from tests.mutation.mutants import count_of, mutant_of
from tests.mutation.child import Changed
from tests.mutation.warm import replace

module, way = "fastroof.checks", sys.argv[1]
path = Path("fastroof/checks.py").resolve()
source = path.read_text()
mutants = [mutant_of(module, source, i) for i in range(count_of(source))]
(mutant,) = [m for m in mutants if m.function == sys.argv[2] and (m.before, m.after) == tuple(sys.argv[3:5])]
if way == "cold":
    changed = Changed(module, mutant.number)
    sys.meta_path.insert(0, changed)
if way == "doctests":
    from tests.mutation.child import run_tests
    changed = Changed(module, mutant.number)
    sys.meta_path.insert(0, changed)
    run_tests(["fastroof/checks.py"])
import fastroof.checks
done = changed.was_imported if way != "warm" else replace(path, mutant.number)
print(json.dumps([done, eval(sys.argv[5], vars(fastroof.checks))]))
"""


@pytest.mark.parametrize("way", ["cold", "doctests", "warm"])
def test_a_changed_module_is_the_one_that_runs(way):
    from fastroof.checks import is_number

    assert is_number(1.5)
    assert not is_number("1")
    before = "not isinstance(value, Real)"
    asked = [way, "is_number", before, before.removeprefix("not "), "[is_number(1.5), is_number('1')]"]
    found = subprocess.run(
        [sys.executable, "-c", _CHILD, *asked], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    done, answers = json.loads(found.stdout)
    assert done
    assert answers == [False, True]
