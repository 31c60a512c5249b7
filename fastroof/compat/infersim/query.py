"""The arguments of a lookup: checked, broadcast, and named in errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastroof.arrays import Array, Longs, Reals
from fastroof.checks import check_flag, shown
from fastroof.compat.infersim.tree import LARGEST, InfersimTables, file_path
from fastroof.compiled.compat_infersim import NO_KEY
from fastroof.errors import GpuError, LookupInputError, MissingTableError
from fastroof.given_arrays import number_array, refused

__all__ = ["Query", "Result", "Sizes", "attention_kind", "checked_phase", "device_numbers"]

Sizes = int | npt.ArrayLike
Result = float | Reals

PHASES: Final = ("prefill", "decode")


class Query:
    """Arguments of one lookup as flat int64 arrays of equal length."""

    def __init__(self, tables: InfersimTables, device: str | npt.ArrayLike, **sizes: Any) -> None:
        checked = {
            name: _flags(name, value) if name == "fp8_kv" else _sizes(name, value)
            for name, value in sizes.items()
        }
        numbers = device_numbers(tables, device)
        arrays = {"device": numbers, **checked}
        try:
            self._shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items() if array.ndim)
            raise LookupInputError(f"shapes do not broadcast: {shapes}") from None
        self._tables = tables
        self.device = self._flat(numbers)
        self.sizes = {name: self._flat(array) for name, array in checked.items()}

    def _flat(self, array: Array) -> Longs:
        return np.ascontiguousarray(np.broadcast_to(array, self._shape), np.int64).reshape(-1)

    @property
    def default_mfu(self) -> Reals:
        """InferSim's default MFU of each query's device."""
        return self._tables.hardware("default_mfu")[self.device]

    def shaped(self, values: Reals) -> Result:
        """Bring results into the arguments' broadcast shape; a float where all were scalars."""
        return values.reshape(self._shape) if self._shape else float(values[0])

    def path(self, kind: str, in_name: Sequence[Longs], i: int) -> str:
        """Path of the file that query i is answered from."""
        sizes = [int(part[i]) for part in in_name]
        return f"{self._tables.root}/{file_path(kind, self._tables.devices[self.device[i]], sizes)}"

    def refuse_fallbacks(
        self,
        strict: bool,
        row: Longs,
        kind: str,
        in_name: Sequence[Longs],
        axes: Sequence[str],
        has_default: bool = True,
    ) -> None:
        """Raise, if strict, for the first query without a row, naming the file and what ``axes`` are."""
        check_flag("strict", strict, LookupInputError)
        if not strict:
            return
        without = row < 0
        if not without.any():
            return
        i = int(without.argmax())
        path = self.path(kind, in_name, i)
        asked = [f"{name}={self.sizes[name][i]}" for name in axes]
        if path.removeprefix(f"{self._tables.root}/") not in self._tables.files:
            reason = f"no file {path}"
        elif row[i] == NO_KEY:
            reason = f"{path} has no rows for {', '.join(asked)}"
        else:
            *key, at = asked
            reason = f"{path} has no row at or under {at}" + (f" for {', '.join(key)}" if key else "")
        if has_default:
            reason += "; without strict=True InferSim's default answers"
        raise MissingTableError(reason)


def device_numbers(tables: InfersimTables, device: str | npt.ArrayLike) -> Longs:
    """Numbers of devices by name."""
    names = _array("device", device)
    if names.dtype.kind != "U":
        words = [one if isinstance(one, str) else shown(one) for one in names.reshape(-1).tolist()]
        names = np.array(words, str).reshape(names.shape)
    try:
        # Arrow's encoding takes a tenth of the time of np.unique, which sorts
        encoded = pa.array(names.reshape(-1)).dictionary_encode()
    except UnicodeError:
        raise GpuError(f"device must be one of {', '.join(tables.gpus)}, got {shown(device)}") from None
    numbers = np.empty(len(encoded.dictionary), np.int64)
    for i, name in enumerate(encoded.dictionary.to_pylist()):
        if name.lower() not in tables.gpus:
            known = ", ".join(tables.gpus)
            raise GpuError(f"device must be one of {known}, got {name!r}; load(gpus=...) adds more")
        numbers[i] = tables.devices.index(name.lower())
    of_each: Longs = numbers[encoded.indices.to_numpy()]
    return of_each.reshape(names.shape)


def attention_kind(
    mha: Mapping[str, Sizes | None], mla: Mapping[str, Sizes | None]
) -> tuple[bool, dict[str, Sizes]]:
    """Whether the heads are MLA's, and the two arguments that say so."""
    given = [{name: value for name, value in pair.items() if value is not None} for pair in (mha, mla)]
    if sorted(map(len, given)) != [0, 2]:
        names = [name for pair in given for name in pair]
        raise LookupInputError(
            f"give {' and '.join(mha)} for MHA and GQA, or {' and '.join(mla)} for MLA; "
            f"got {', '.join(names) or 'neither'}"
        )
    return bool(given[1]), given[0] or given[1]


def checked_phase(phase: str) -> str:
    """Return the phase."""
    if not isinstance(phase, str) or phase not in PHASES:
        raise LookupInputError(f"phase must be prefill or decode, got {shown(phase)}")
    return phase


def _sizes(name: str, value: Any) -> Array:
    array = number_array(value)
    if array is None:
        _array(name, value)
        raise LookupInputError(f"{name} must hold integers of 1 to {LARGEST - 1}, {refused(value)}")
    if array.size and (array.dtype.kind not in "iu" or array.min() < 1 or array.max() >= LARGEST):
        raise LookupInputError(f"{name} must hold integers of 1 to {LARGEST - 1}, got {shown(value)}")
    return array


def _flags(name: str, value: Any) -> Array:
    array = _array(name, value)
    if array.size and (array.dtype.kind not in "biu" or array.min() < 0 or array.max() > 1):
        raise LookupInputError(f"{name} must be True or False, got {shown(value)}")
    return array


def _array(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise LookupInputError(f"{name} must be a scalar or an array, got {shown(value)}") from None
    if isinstance(value, np.ma.MaskedArray):
        raise LookupInputError(f"{name} must be a scalar or an array, {refused(value)}")
    return array
