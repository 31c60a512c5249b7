"""A property computed once per instance, and a cache with a limit in bytes; threads share the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Final, Generic, TypeVar, overload

T = TypeVar("T")

_busy: Final[dict[tuple[int, Hashable], Any]] = {}
# the threads that hold these locks are not in the child
os.register_at_fork(after_in_child=_busy.clear)


@contextmanager
def _in_turn(values: object, key: Hashable) -> Iterator[None]:
    """Let one thread at a time compute a value of a cache; others would read the same tables again."""
    place = (id(values), key)
    with _busy.setdefault(place, RLock()):
        try:
            yield
        finally:
            _busy.pop(place, None)


def made_once(values: dict[Any, Any], key: Hashable, make: Callable[[], T]) -> T:
    """Return the value of a key; compute and store it if missing, in one thread."""
    missing = object()
    made: Any = values.get(key, missing)
    if made is missing:
        with _in_turn(values, key):
            made = values.get(key, missing)
            if made is missing:
                made = values[key] = make()
    found: T = made
    return found


class lazy_property(Generic[T]):
    """Like ``functools.cached_property``; one thread computes the value, and others wait for it."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> lazy_property[T] | T:
        if instance is None:
            return self
        return made_once(instance.__dict__, self.name, lambda: self.make(instance))


class BoundedCache(Generic[T]):
    """Values by key, limited in bytes; values not used recently are evicted."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._young: dict[Hashable, tuple[T, int]] = {}
        self._old: dict[Hashable, tuple[T, int]] = {}
        self._young_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all cached values."""
        held = {**self._old, **self._young}
        return sum(num_bytes for _, num_bytes in held.values())

    def get(
        self,
        key: Hashable,
        make: Callable[[], T],
        bytes_of: Callable[[T], int],
        serves: Callable[[T], bool] | None = None,
    ) -> T:
        """Return the value of a key; compute it if it is not cached."""
        held = self._young.get(key)
        if held is not None and (serves is None or serves(held[0])):
            return held[0]
        with _in_turn(self, key):
            before = self._young.get(key)
            there = (one for one in (before, self._old.get(key)) if one is not None)
            held = next((one for one in there if serves is None or serves(one[0])), None)
            if held is None:
                made = make()
                held = made, bytes_of(made)
                before = self._young.get(key)
            self._young[key] = held
            self._young_bytes += held[1] - (0 if before is None else before[1])
            if 2 * self._young_bytes > self.most_bytes:
                self._old, self._young, self._young_bytes = self._young, {}, 0
        return held[0]

    def clear(self) -> None:
        """Forget every value."""
        self._young, self._old, self._young_bytes = {}, {}, 0
