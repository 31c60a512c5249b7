"""Shards of a sweep: dealing its units out to jobs, and joining what the jobs wrote."""

from __future__ import annotations

import heapq
import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.errors import SweepError
from fastroof.sweep.identity import differences, inputs_hash
from fastroof.sweep.spec import load_spec
from fastroof.sweep.units import WorkUnit, work_units

# Dealing units out needs neither numba nor pyarrow; whatever needs them is imported when shards are joined.
if TYPE_CHECKING:
    from fastroof.sweep.shard_files import ShardFile
    from fastroof.sweep.summary import DeploymentSummary, SweepSummary

__all__ = ["Shard", "merge_shards", "shard_units"]

MAX_SHARDS: Final = 100_000
_OF_A_SHARD: Final = ("fastroof.shard", "fastroof.outcomes")


class Shard(NamedTuple):
    """One of some jobs that share a sweep: ``number`` from 1 to ``total``."""

    number: int
    total: int

    @classmethod
    def from_text(cls, text: str) -> Shard:
        """Read ``"3/16"``.

        Raises
        ------
        SweepError
            If it is something else.

        Examples
        --------
        >>> Shard.from_text("3/16")
        Shard(number=3, total=16)
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        if found is None:
            raise SweepError(f"shard must be i/n, as 1/8 to 8/8 for eight jobs, got {text!r:.60}")
        return cls(*map(int, found.groups())).checked()

    def checked(self) -> Shard:
        """Return itself.

        Raises
        ------
        SweepError
            If the number is not from 1 to the total.
        """
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in self)
        if not whole or not 1 <= self.number <= self.total <= MAX_SHARDS:
            raise SweepError(
                f"shard must be i/n with i from 1 to n and n up to {MAX_SHARDS:,}, "
                f"got {self.number}/{self.total}"
            )
        return self

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def shard_units(units: Sequence[WorkUnit], shard: Shard) -> list[WorkUnit]:
    """Deal units out, the largest first and each to the shard that has the least, and take one shard's.

    Parameters
    ----------
    units : sequence of WorkUnit
        All of a sweep's.
    shard : Shard
        Whose to take.

    Returns
    -------
    list of WorkUnit
        In order; always the same ones. Every unit is in one shard.

    Examples
    --------
    >>> from fastroof.sweep import load_spec, work_units
    >>> spec = {"models": ["llama-3.1-8b"], "tp": [1, 2, 4], "batch_size": [1, 64], "kv_len": 1024}
    >>> [unit.number for unit in shard_units(work_units(load_spec(spec)), Shard(1, 2))]
    [0, 2]
    """
    load = [(0, number) for number in range(1, shard.total + 1)]
    mine = []
    for unit in sorted(units, key=lambda unit: (-unit.size, unit.number)):
        size, number = load[0]
        # a unit of no evaluations is work too: its plan is compiled
        heapq.heapreplace(load, (size + max(unit.size, 1), number))
        if number == shard.number:
            mine.append(unit)
    return sorted(mine, key=lambda unit: unit.number)


def merge_shards(shards: Iterable[str | Path], output: str | Path) -> SweepSummary | DeploymentSummary:
    """Join the files of all shards of a sweep into the results of the whole.

    Parameters
    ----------
    shards : iterable of str or Path
        What ``run_sweep(..., shard=(i, n))`` wrote for each i from 1 to n, in any order.
    output : str or Path
        The results, ending in .parquet, .csv or .jsonl.

    Returns
    -------
    SweepSummary or DeploymentSummary
        As of the whole sweep; ``evaluate_s`` is the sum of the shards', ``total_s`` the time of joining.

    Raises
    ------
    SweepError
        If a file is no shard, a shard is missing or there twice, or they are not of one sweep: spec,
        tables, models and version must be the same.

    Notes
    -----
    The rows are those of the sweep without shards, in its order. Files are read unit by unit, so that
    memory holds a unit of each at a time.

    Examples
    --------
    >>> import tempfile
    >>> from fastroof.sweep import run_sweep
    >>> spec = {"models": ["llama-3.1-8b"], "tp": [1, 2], "batch_size": [16, 64], "kv_len": 4096}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = [f"{folder}/{i}.parquet" for i in (1, 2)]
    ...     shards = [run_sweep(spec, file, shard=(i, 2)) for i, file in enumerate(files, 1)]
    ...     whole = merge_shards(files, folder + "/all.parquet")
    >>> [shard.evaluations for shard in shards], whole.evaluations
    ([2, 2], 4)
    """
    started = time.perf_counter()

    from fastroof.sweep.engine import Collected
    from fastroof.sweep.output import ResultFile, result_schema
    from fastroof.sweep.shard_files import ShardFile

    files = _checked_shards([ShardFile(Path(path)) for path in shards])
    if Path(output).exists() and any(Path(output).samefile(file.path) for file in files):
        raise SweepError(f"output {output} is one of the shards, name another")
    metadata = files[0].metadata
    spec = load_spec(json.loads(metadata["fastroof.spec"]))
    if inputs_hash(spec) != metadata["fastroof.inputs_hash"]:
        raise SweepError("a model, GPU or runtime that the spec names is not here what it was for the shards")
    units = work_units(spec)
    of_file = [file.results(shard_units(units, file.shard)) for file in files]
    found = heapq.merge(*of_file, key=lambda numbered: numbered[0])
    kept = {key: value for key, value in metadata.items() if key not in _OF_A_SHARD}
    with ResultFile(Path(output), result_schema(spec, kept)) as results:
        collected = Collected(spec, results)
        for unit, (_, result) in zip(units, found, strict=True):
            collected.add(unit, result)
        collected.finish()
    return collected.summary(time.perf_counter() - started)


def _checked_shards(files: Sequence[ShardFile]) -> list[ShardFile]:
    """Check that these are all shards of one sweep, each once."""
    if not files:
        raise SweepError("nothing to merge: need the files of all shards of a sweep")
    first = files[0]
    for file in files[1:]:
        found = differences(first.metadata, file.metadata)
        if file.shard.total != first.shard.total:
            found.append(f"shards: of {first.shard.total} there, of {file.shard.total} here")
        if found:
            raise SweepError(f"{first.path} and {file.path} are not of one sweep: {'; '.join(found)}")
    by_number: dict[int, Path] = {}
    for file in files:
        if file.shard.number in by_number:
            raise SweepError(
                f"shard {file.shard} is there twice: {by_number[file.shard.number]}, {file.path}"
            )
        by_number[file.shard.number] = file.path
    missing = [
        str(Shard(i, first.shard.total)) for i in range(1, first.shard.total + 1) if i not in by_number
    ]
    if missing:
        shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise SweepError(f"missing: shard {shown}; run `fastroof sweep --shard` for each")
    return list(files)
