"""Small changes of a module's source, one at a time: what a test that holds the line must notice.

A mutant changes one operator, comparison, constant, condition or returned number. Nothing is changed that no
answer depends on: annotations, decorators, ``__all__``, what only type checkers read, text, and the arguments
of a raised error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

__all__ = ["Mutant", "count_of", "mutant_of", "mutated"]

_ARITHMETIC: Final[dict[type[ast.operator], tuple[type[ast.operator], ...]]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Div),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_CHECKED_BY_NOBODY: Final = {"strict", "stacklevel", "slots", "frozen", "kw_only"}
"""Arguments that guard or tune Python itself: ``zip(strict=True)`` holds in every correct program."""


class Mutant(NamedTuple):
    """One change of one module.

    Attributes
    ----------
    module : str
        As it is imported.
    number : int
        Which of the module's changes it is.
    function : str
        Qualified name of what it lies in, ``""`` at the module's level.
    kind : str
        What is changed: arithmetic, comparison, boolean, condition, constant, sign or result.
    line, end : int
        First and last line of the changed expression.
    statement : tuple of int
        First and last line of the statement around it, of a compound one those of its header.
    before, after : str
        The changed expression.
    context : str
        The statement's first line.
    """

    module: str
    number: int
    function: str
    kind: str
    line: int
    end: int
    statement: tuple[int, int]
    before: str
    after: str
    context: str


class _Change(NamedTuple):
    kind: str
    node: ast.expr
    around: ast.stmt
    function: str
    make: Callable[[], ast.expr]
    """Changes the tree in place and returns the expression as it is now."""


def count_of(source: str) -> int:
    """How many mutants a module has."""
    return sum(1 for _ in _changes(ast.parse(source)))


def mutant_of(module: str, source: str, number: int) -> Mutant:
    """Describe one mutant of a module."""
    # of a tree of its own, which the change spoils
    change = _at(ast.parse(source), number)
    node, around = change.node, change.around
    before = ast.unparse(node)
    place = (node.lineno, node.end_lineno or node.lineno, _header(around))
    context = source.splitlines()[around.lineno - 1].strip()
    return Mutant(
        module, number, change.function, change.kind, *place, before, ast.unparse(change.make()), context
    )


def mutated(source: str, number: int | None) -> ast.Module:
    """Return a module's tree with one change, or none."""
    tree = ast.parse(source)
    if number is not None:
        _at(tree, number).make()
    return ast.fix_missing_locations(tree)


def _at(tree: ast.Module, number: int) -> _Change:
    return next(change for i, change in enumerate(_changes(tree)) if i == number)


def _header(statement: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement without the block under it."""
    block = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    return statement.lineno, (max(statement.lineno, block[0].lineno - 1) if block else end)


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for statement in tree.body:
        yield from _of_statement(statement, "")


def _of_statement(statement: ast.stmt, inside: str) -> Iterator[_Change]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        name = f"{inside}.{statement.name}" if inside else statement.name
        if not isinstance(statement, ast.ClassDef):
            for default in (*statement.args.defaults, *statement.args.kw_defaults):
                if default is not None:
                    yield from _of_expression(default, statement, statement.args, name)
        for part in statement.body:
            yield from _of_statement(part, name)
        return
    if isinstance(statement, ast.Raise | ast.Import | ast.ImportFrom):
        return
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return
    if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
        return
    if isinstance(statement, ast.Return) and statement.value is not None:
        yield from _of_result(statement, inside)
    if isinstance(statement, ast.If | ast.While):
        yield from _condition(statement, statement, inside)
    for field, value in ast.iter_fields(statement):
        if field in {"annotation", "targets", "target", "type_comment"}:
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.stmt):
                yield from _of_statement(part, inside)
            elif isinstance(part, ast.expr):
                yield from _of_expression(part, statement, statement, inside)
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                for inner in part.body:
                    yield from _of_statement(inner, inside)
            elif isinstance(part, ast.withitem):
                yield from _of_expression(part.context_expr, statement, part, inside)


def _of_expression(node: ast.expr, statement: ast.stmt, parent: ast.AST, inside: str) -> Iterator[_Change]:
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.BinOp) and not _is_text(node):
        for arithmetic in _ARITHMETIC.get(type(node.op), ()):
            yield _Change("arithmetic", node, statement, inside, _setter(node, "op", arithmetic()))
    elif isinstance(node, ast.Compare):
        for i, operation in enumerate(node.ops):
            for comparison in _COMPARISONS[type(operation)]:
                changed = [*node.ops[:i], comparison(), *node.ops[i + 1 :]]
                yield _Change("comparison", node, statement, inside, _setter(node, "ops", changed))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _Change("boolean", node, statement, inside, _setter(node, "op", other))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        kind = "condition" if isinstance(node.op, ast.Not) else "sign"
        yield _Change(kind, node, statement, inside, _swap(parent, node, node.operand))
    elif isinstance(node, ast.IfExp):
        yield from _condition(node, statement, inside)
    elif isinstance(node, ast.Constant):
        for value in _other_values(node.value):
            yield _Change("constant", node, statement, inside, _setter(node, "value", value))
    if isinstance(node, ast.Lambda):
        yield from _of_expression(node.body, statement, node, inside)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _of_expression(child, statement, node, inside)
        elif isinstance(child, ast.keyword) and child.arg not in _CHECKED_BY_NOBODY:
            yield from _of_expression(child.value, statement, child, inside)
        elif isinstance(child, ast.comprehension):
            for part in (child.iter, *child.ifs):
                yield from _of_expression(part, statement, child, inside)


def _of_result(statement: ast.Return, inside: str) -> Iterator[_Change]:
    """A returned number or truth, negated; of other results nobody can say."""
    value = statement.value
    assert value is not None
    if isinstance(value, ast.BoolOp | ast.Compare):
        if not _is_negated_elsewhere(value):
            yield _Change("result", value, statement, inside, _swap(statement, value, _negated(value)))
    elif isinstance(value, ast.BinOp) and not _is_text(value):
        minus = ast.copy_location(ast.UnaryOp(ast.USub(), value), value)
        yield _Change("result", value, statement, inside, _swap(statement, value, minus))


def _condition(node: ast.If | ast.While | ast.IfExp, statement: ast.stmt, inside: str) -> Iterator[_Change]:
    if not _is_negated_elsewhere(node.test):
        swap = _swap(node, node.test, _negated(node.test))
        yield _Change("condition", node.test, statement, inside, swap)


def _is_negated_elsewhere(node: ast.expr) -> bool:
    """Whether a change of the expression itself is its negation: ``not x``, and one comparison."""
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _negated(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), node), node)


def _setter(node: ast.expr, field: str, value: object) -> Callable[[], ast.expr]:
    def make() -> ast.expr:
        setattr(node, field, value)
        return node

    return make


def _swap(parent: ast.AST, old: ast.expr, new: ast.expr) -> Callable[[], ast.expr]:
    """Put an expression into another's place, wherever its parent holds it."""

    def make() -> ast.expr:
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
                return new
            if isinstance(value, list) and any(one is old for one in value):
                setattr(parent, field, [new if one is old else one for one in value])
                return new
        raise LookupError(f"{ast.unparse(old)} is not in {ast.dump(parent)}")

    return make


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operator joins or formats text."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _other_values(value: object) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (1, -1) if value == 0 else (value + 1, value - 1) if value == 1 else (value + 1, 2 * value)
    if isinstance(value, float):
        return (1.0,) if value == 0.0 else (2.0 * value, value + 1.0)
    return ()
