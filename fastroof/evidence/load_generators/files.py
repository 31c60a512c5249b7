"""Reading files and folders of load generators, each with the reader of the program that wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.errors import TableError
from fastroof.evidence.load_generators.documents import REQUESTS, STDIN, Document, documents_of
from fastroof.evidence.load_generators.formats import FORMATS, Format
from fastroof.evidence.load_generators.runs import GeneratorRun, with_concurrency

GENERATORS: Final = tuple(dict.fromkeys(one.name for one in FORMATS))
"""Load generators whose files are supported."""

SUFFIXES: Final = (".json", ".jsonl")


class FoundRuns(NamedTuple):
    """Runs of files, and files in folders that contain no run."""

    runs: tuple[GeneratorRun, ...]
    others: tuple[str, ...] = ()


def read_runs(paths: Sequence[str | Path]) -> FoundRuns:
    """Read the results of load generators, each run once, even if its file is given twice.

    Of a folder, every .json and .jsonl is read, but not aiperf's single requests, which are next to its JSON.
    """
    runs: list[GeneratorRun] = []
    others: list[str] = []
    for path, was_given in _files(paths):
        documents = documents_of(path)
        formats = [
            next((one for one in FORMATS if one.is_written_by(document)), None) for document in documents
        ]
        if None in formats or (REQUESTS in documents[0] and not was_given):
            if was_given or (None in formats and any(formats)):
                place = "" if len(documents) == 1 else f", line {formats.index(None) + 1}"
                raise TableError(f"{path}{place}: no result of {', '.join(GENERATORS)}: {_keys(documents)}")
            others.append(str(path))
            continue
        for line, (document, one) in enumerate(zip(documents, formats, strict=True), start=1):
            assert one is not None
            several = len(documents) > 1
            where = f"{path}, line {line}" if several else str(path)
            file = "standard input" if str(path) == STDIN else path.name
            name = f"{file} {line}" if several else file
            try:
                found = [with_concurrency(run) for run in _runs_of(one, where, document, name)]
            except (ZeroDivisionError, OverflowError) as error:
                raise TableError(f"{where}: invalid figures: {error}") from None
            runs += [replace(run, path=str(path)) for run in found]
    if not runs:
        raise TableError(f"no run of {', '.join(GENERATORS)} in {', '.join(map(str, paths)) or 'nothing'}")
    return FoundRuns(tuple(runs), tuple(others))


def _runs_of(one: Format, where: str, document: Document, name: str) -> Iterator[GeneratorRun]:
    if not one.several:
        yield one.read(where, document, name)
    elif not document[one.several]:
        raise TableError(f"{where}: a report without {one.several}; was the run cut off?")
    else:
        for number, run in enumerate(document[one.several], start=1):
            yield one.read(f"{where}, benchmark {number}", run, f"{name} {number}")


def _keys(documents: Sequence[Document]) -> str:
    keys = list(documents[0])[:6]
    listed = ", ".join(str(key)[:40] for key in keys)
    return f"it begins with {listed}" if keys else "it is empty"


def _files(paths: Iterable[str | Path]) -> list[tuple[Path, bool]]:
    """Return the files without duplicates, each with whether it was given explicitly."""
    listed: dict[Path, bool] = {}
    for given in paths:
        path = Path(given)
        if str(given) == STDIN:
            listed[path] = True
            continue
        try:
            is_folder, is_file = os.path.isdir(path), os.path.isfile(path)
        except ValueError:
            is_folder = is_file = False
        if is_folder:
            for one in sorted(path.rglob("*")):
                if one.suffix in SUFFIXES and one.is_file() and not one.name.startswith(("engine_args", ".")):
                    listed.setdefault(one, False)
        elif is_file:
            listed[path] = True
        else:
            raise TableError(f"{path} does not exist; give files of load generators, or folders of them")
    return list(listed.items())
