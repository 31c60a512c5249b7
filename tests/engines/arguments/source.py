"""What Python source states: constants, and classes with the annotations and defaults of their fields.

Expressions are evaluated only as far as they are made of literals; nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_DEEPEST = 12
_DEPRECATED = re.compile(r"(--[a-z0-9-]+)\)? (?:is|was) deprecated")
_OF_ARGUMENT = ("list", "tuple", "sorted", "set", "get_args", "int", "float", "cast")
"""Calls whose value is that of their last argument, as far as a record goes."""


class UnknownValue(Exception):
    """A value that the source does not state as a literal."""


class Field(NamedTuple):
    annotation: ast.expr | None
    default: ast.expr | None
    text: str = ""


@dataclass
class _Class:
    bases: list[str]
    fields: dict[str, Field] = field(default_factory=dict)


class Source:
    """Definitions of some modules, by name."""

    def __init__(self, modules: Iterable[ast.Module]) -> None:
        self.constants: dict[str, ast.expr] = {}
        self.classes: dict[str, _Class] = {}
        self.deprecated: set[str] = set()
        for module in modules:
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef):
                    self._class(node)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    self._assign(node)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    self.deprecated |= set(_DEPRECATED.findall(node.value))

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in (one.id for one in targets if isinstance(one, ast.Name)):
            # a Literal before what stands in for it where types are not checked
            if node.value is not None and (is_literal(node.value) or name not in self.constants):
                self.constants[name] = node.value

    def _class(self, node: ast.ClassDef) -> None:
        found = _Class([ast.unparse(base) for base in node.bases])
        last = ""
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                last = one.target.id
                found.fields[last] = Field(one.annotation, one.value)
            elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                last = one.targets[0].id
                found.fields[last] = Field(None, one.value)
            elif last and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                found.fields[last] = found.fields[last]._replace(text=str(one.value.value))
        self.classes.setdefault(node.name, found)

    def field_of(self, name: str, key: str) -> Field | None:
        """Return a field of a class or of its bases."""
        one = self.classes.get(name)
        if one is None:
            return None
        if key in one.fields:
            return one.fields[key]
        return next((found for base in one.bases if (found := self.field_of(base, key))), None)

    def known(self, node: ast.expr | None) -> Any:
        """Return the value of an expression; None if the source does not state it."""
        try:
            return None if node is None else self._value(node, 0)
        except (UnknownValue, TypeError):
            return None

    def choices(self, annotation: ast.expr | None) -> list[Any]:
        """Return the values of a Literal in an annotation."""
        for node in ast.walk(annotation) if annotation is not None else ():
            named = self.constants.get(node.id) if isinstance(node, ast.Name) else node
            if named is not None and is_literal(named):
                return list(self.known(named) or [])  # type: ignore[arg-type]
        return []

    def _value(self, node: ast.expr | None, depth: int) -> Any:
        if node is None or depth > _DEEPEST:
            raise UnknownValue
        more = depth + 1
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [value for one in node.elts for value in self._items(one, more)]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                pairs = zip(node.keys, node.values, strict=True)
                return {self._value(key, more): self.known(value) for key, value in pairs}
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand, more)
            case ast.BinOp(op=ast.Add()):
                return self._value(node.left, more) + self._value(node.right, more)
            case ast.BinOp(op=ast.Mult()):
                return self._value(node.left, more) * self._value(node.right, more)
            case ast.Name() if node.id in self.constants:
                return self._value(self.constants[node.id], more)
            case ast.Attribute(attr="value"):
                return self._value(node.value, more)
            case ast.Attribute(value=ast.Name(id=owner)) if found := self.field_of(owner, node.attr):
                return self._value(found.default, more)
            case ast.Subscript(value=ast.Name(id="Literal")):
                values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                return flat(self._value(one, more) for one in values)
            case ast.Call():
                return self._call(node, more)
            case ast.ListComp(generators=[ast.comprehension(iter=ast.Name(id=name))]) if name in self.classes:
                return [self._value(one.default, more) for one in self.classes[name].fields.values()]
        raise UnknownValue

    def _items(self, node: ast.expr, depth: int) -> list[Any]:
        if isinstance(node, ast.Starred):
            return list(self._value(node.value, depth))
        return [self._value(node, depth)]

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = called(node)
        keywords = keywords_of(node)
        if name in ("field", "Field"):
            return self._value(keywords.get("default") or next(iter(node.args), None), depth)
        if name in _OF_ARGUMENT and node.args:
            return self._value(node.args[-1], depth)
        if name == "keys" and isinstance(node.func, ast.Attribute):
            return list(self._value(node.func.value, depth))
        raise UnknownValue


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def keywords_of(node: ast.Call) -> dict[str, ast.expr]:
    return {one.arg: one.value for one in node.keywords if one.arg}


def is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"


def flat(values: Iterable[Any]) -> list[Any]:
    return [one for value in values for one in (flat(value) if isinstance(value, list) else [value])]
