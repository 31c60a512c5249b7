"""Which sources a GPU's tables of aiconfigurator-core make: each engine's version in use, then the others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from fastroof.load.aiconfigurator import WantedPlace
from fastroof.load.package_places import Place, find_place, paired_version, versions_of
from fastroof.load.package_rows import PACKAGE_FILES
from fastroof.operators.foreign_rows import version_order

__all__ = [
    "ENGINES",
    "LAST_RANK",
    "LINK_OPERATORS",
    "PCIE_LINKED",
    "PackageSource",
    "current_version",
    "package_sources",
]

ENGINES: Final = {"vllm": 200, "trtllm": 210, "sglang": 220}
"""Whose kernels were measured, with the rank of the version in use: the order without an engine.

All come after what ships, so that an import changes no answer that there was.
"""

PCIE_LINKED: Final = ("b60", "l40s", "rtx_pro_6000")
"""GPUs whose link is their host's: each version's all-reduces are of another host, and all are wanted."""

LINK_OPERATORS: Final = ("allreduce",)

LIBRARY_RANK: Final = 230

OTHERS_RANK: Final = 240
"""The first rank of versions that are not in use: they come after all that are, and after libraries."""

LAST_RANK: Final = 299
"""Of a version that was asked for by itself: before other programs' measurements alone."""

VERSIONS_FILE: Final = "query_versions.yaml"


class PackageSource(NamedTuple):
    """Files of the package that become one source."""

    name: str
    owner: str
    engine: str
    version: str
    rank: int
    places: tuple[WantedPlace, ...]

    @property
    def is_in_use(self) -> bool:
        """Whether it is the version of its engine or library that the package calls current."""
        return self.rank < OTHERS_RANK


def package_sources(
    data: Path, system: str, shipped: Collection[tuple[str, str]] = ()
) -> list[PackageSource]:
    """List the sources that a system's files make."""
    folder = data / system
    engines = [engine for engine in ENGINES if any(folder.glob(f"*/{engine}/*/*.parquet"))]
    libraries = sorted({wanted.backend for _, wanted in PACKAGE_FILES if wanted.backend is not None})
    in_use: list[PackageSource] = []
    others: list[PackageSource] = []
    for engine in engines:
        version = current_version(data.parent, system, engine)
        wanted = [(operator, file) for operator, file in PACKAGE_FILES if file.backend is None]
        found = [(operator, file, find_place(folder, file, engine, version)) for operator, file in wanted]
        places = [WantedPlace(operator, file, place) for operator, file, place in found if place is not None]
        in_use.append(_source(engine, engine, version, ENGINES[engine], places))
        taken = {(place.operator, place.place.path) for place in places}
        others += _other_versions(folder, engine, engine, taken)
    for library in libraries:
        taken = set()
        version = paired_version(data.parent / f"{system}.yaml", library)
        places = []
        for operator, file in PACKAGE_FILES:
            place = find_place(folder, file, library, version) if file.backend == library else None
            if place is not None and place.path.parents[1].name == library:
                places.append(WantedPlace(operator, file, place))
                taken.add((operator, place.path))
        if places:
            in_use.append(_source(library, "", places[0].place.version, LIBRARY_RANK, places))
            others += _other_versions(folder, library, "", taken)
    ranked = [one._replace(rank=OTHERS_RANK + i) for i, one in enumerate(others)]
    return list(_without(data, [*in_use, *ranked], shipped))


def current_version(systems: Path, system: str, engine: str) -> str:
    """Return the version of an engine that the package calls current on a system; empty if it names none."""
    file = systems / VERSIONS_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found: dict[str, str] = {}
    section = place = ""
    for line in re.sub(r"#.*", "", text).splitlines():
        word = re.match(r"( *)([\w.-]+):", line)
        if word is None:
            continue
        if not word[1]:
            section, place = word[2], ""
        named = re.search(r"current:\s*[\"']?([\w.+-]+)", line)
        if named is None:
            place = word[2]
        elif word[2] == engine and (section == "defaults" or (section == "overrides" and place == system)):
            found[section] = named[1]
    return found.get("overrides", found.get("defaults", ""))


def _source(
    owner: str, engine: str, version: str, rank: int, places: Collection[WantedPlace]
) -> PackageSource:
    return PackageSource(f"aiconfigurator-{owner}-{version}", owner, engine, version, rank, tuple(places))


def _other_versions(
    folder: Path, owner: str, engine: str, taken: Collection[tuple[str, Path]]
) -> list[PackageSource]:
    """What an owner's other versions have, the newest version first."""
    by_version: dict[str, list[WantedPlace]] = {}
    for operator, file in PACKAGE_FILES:
        if (file.backend or engine) != owner:
            continue
        below = folder / file.folder / owner
        for version in versions_of(below, file.file):
            place = Place(below / version / f"{file.file}.parquet", "")
            if (operator, place.path) not in taken:
                by_version.setdefault(version, []).append(WantedPlace(operator, file, place))
    newest_first = sorted(by_version, key=version_order, reverse=True)
    return [_source(owner, engine, version, 0, by_version[version]) for version in newest_first]


def _without(
    data: Path, sources: list[PackageSource], shipped: Collection[tuple[str, str]]
) -> Iterator[PackageSource]:
    """Yield what is left of the sources; those of which nothing is are not wanted."""
    for source in sources:
        left = tuple(
            place
            for place in source.places
            if (place.operator, place.place.path.relative_to(data).as_posix()) not in shipped
        )
        if left:
            yield source._replace(places=left)
