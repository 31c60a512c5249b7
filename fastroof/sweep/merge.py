"""Merging the result files of a sweep's shards."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastroof.documents import parse_json
from fastroof.errors import SweepError
from fastroof.sweep.identity import differences
from fastroof.sweep.kinds import Summary, load_spec, sweep_of
from fastroof.sweep.shards import Shard, shard_units

if TYPE_CHECKING:
    from fastroof.sweep.shard_files import ShardFile


def merge_shards(shards: Iterable[str | Path], output: str | Path) -> Summary:
    """Merge the files of all shards of a sweep into one results file.

    Parameters
    ----------
    shards : iterable of str or Path
        Outputs of ``run_sweep(..., shard=(i, n))`` for each i from 1 to n, in any order.
    output : str or Path
        Path of the results, ending in .parquet, .csv or .jsonl.

    Returns
    -------
    StepSummary, DeploymentSummary or CapacitySummary
        Summary of the whole sweep; ``evaluate_s`` is the sum over shards, ``total_s`` the time of merging.

    Raises
    ------
    SweepError
        If a file is not a shard, a shard is missing or given twice, or they belong to different sweeps:
        spec, tables, models and version must be the same.

    Notes
    -----
    Rows and their order are the same as without shards. Files are read unit by unit, so that memory holds
    one unit of each at a time.

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

    # imported here: dealing out shards needs no pyarrow
    from fastroof.arrow import arrow_schema
    from fastroof.sweep.collect import Collected
    from fastroof.sweep.identity import inputs_hash
    from fastroof.sweep.result_file import ResultFile
    from fastroof.sweep.shard_files import OF_A_SHARD, ShardFile

    files = _checked_shards([ShardFile(Path(path)) for path in shards])
    if Path(output).exists() and any(Path(output).samefile(file.path) for file in files):
        raise SweepError(f"output {output} is one of the shards; use another path")
    metadata = files[0].metadata
    sweep = sweep_of(
        load_spec(parse_json(metadata["fastroof.spec"], f"the spec of {files[0].path}", SweepError))
    )
    if inputs_hash(sweep) != metadata["fastroof.inputs_hash"]:
        raise SweepError("a model, GPU, engine or trace of the spec has changed since the shards were run")
    units = sweep.units()
    schema = arrow_schema(
        sweep.columns, {key: value for key, value in metadata.items() if key not in OF_A_SHARD}
    )
    for file in files:
        file.check_columns(schema)
    of_file = [file.results(shard_units(units, file.shard)) for file in files]
    merged = heapq.merge(*of_file, key=lambda numbered: numbered[0])
    with ResultFile(Path(output), schema) as results:
        collected = Collected(sweep, results)
        for unit, (_, result) in zip(units, merged, strict=True):
            collected.add(unit, result)
        collected.finish()
    return sweep.summary(collected.totals(time.perf_counter() - started))


def _checked_shards(files: Sequence[ShardFile]) -> list[ShardFile]:
    """Check that the files are all shards of one sweep, each once."""
    if not files:
        raise SweepError("nothing to merge: need the files of all shards of a sweep")
    first = files[0]
    for file in files[1:]:
        differing = differences(first.metadata, file.metadata)
        if file.shard.total != first.shard.total:
            differing.append(f"shards: of {first.shard.total} there, of {file.shard.total} here")
        if differing:
            raise SweepError(f"{first.path} and {file.path} are of different sweeps: {'; '.join(differing)}")
    by_number: dict[int, Path] = {}
    for file in files:
        if file.shard.number in by_number:
            raise SweepError(
                f"shard {file.shard} is given twice: {by_number[file.shard.number]}, {file.path}"
            )
        by_number[file.shard.number] = file.path
    missing = [
        str(Shard(i, first.shard.total)) for i in range(1, first.shard.total + 1) if i not in by_number
    ]
    if missing:
        shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise SweepError(f"missing: shard {shown}; run `fastroof sweep --shard` for each")
    return list(files)
