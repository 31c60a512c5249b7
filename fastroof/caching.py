"""Caches that threads share."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Final, Generic, TypeVar, overload

from fastroof.errors import FastroofError, StoppedError

T = TypeVar("T")

ERROR_BYTES: Final = 2**10
"""Size of a cached error."""

_locks: Final[dict[tuple[int, Hashable], Any]] = {}
# here and not in the values, which are pickled; a child process has none of the threads that hold them
os.register_at_fork(after_in_child=_locks.clear)


@contextmanager
def _locked(values: object, key: Hashable) -> Iterator[None]:
    """Let one thread at a time compute a value of a cache; others would read the same tables again."""
    lock_key = (id(values), key)  # of no other object while `values` is in use here
    with _locks.setdefault(lock_key, RLock()):
        try:
            yield
        finally:
            _locks.pop(lock_key, None)


def computed_once(values: dict[Any, Any], key: Hashable, make: Callable[[], T]) -> T:
    """Return the value of a key; compute and store it if missing, in one thread."""
    missing = object()
    value: Any = values.get(key, missing)
    if value is missing:
        with _locked(values, key):
            value = values.get(key, missing)
            if value is missing:
                value = values[key] = make()
    computed: T = value
    return computed


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
        return computed_once(instance.__dict__, self.name, lambda: self.make(instance))


class BoundedCache(Generic[T]):
    """Values by key, limited in bytes; values not used recently are evicted."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
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
        entries = {**self._old, **self._young}
        return sum(num_bytes for _, num_bytes in entries.values())

    def get(
        self,
        key: Hashable,
        make: Callable[[], T],
        num_bytes_of: Callable[[T], int],
        is_usable: Callable[[T], bool] | None = None,
    ) -> T:
        """Return the value of a key; compute it if it is not cached."""
        entry = self._young.get(key)
        if entry is not None and (is_usable is None or is_usable(entry[0])):
            return entry[0]
        with _locked(self, key):
            before = self._young.get(key)
            cached = (one for one in (before, self._old.get(key)) if one is not None)
            entry = next((one for one in cached if is_usable is None or is_usable(one[0])), None)
            if entry is None:
                value = make()
                entry = value, num_bytes_of(value)
                before = self._young.get(key)
            self._young[key] = entry
            self._young_bytes += entry[1] - (0 if before is None else before[1])
            if 2 * self._young_bytes > self.max_bytes:
                self._old, self._young, self._young_bytes = self._young, {}, 0
        return entry[0]

    def get_or_raise(self, key: Hashable, make: Callable[[], T], bytes_of: Callable[[T], int]) -> T:
        """Return the value of a key, or raise the error of computing it, which is cached too."""

        def value_or_error() -> Any:
            try:
                return make()
            except StoppedError:
                raise  # another caller may wait longer
            except FastroofError as error:
                return error.with_traceback(None)

        def num_bytes(made: Any) -> int:
            return ERROR_BYTES if isinstance(made, FastroofError) else bytes_of(made)

        found = self.get(key, value_or_error, num_bytes)
        if isinstance(found, FastroofError):
            raise found.with_traceback(None)
        return found

    def clear(self) -> None:
        """Forget every value."""
        self._young, self._old, self._young_bytes = {}, {}, 0
