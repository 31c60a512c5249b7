"""GPUs: the specification of a card, read from ``bench_data/<gpu>/gpu.toml``.

The file has ``title``, ``source``, ``num_sms``, optionally ``name`` (default: its folder's, or its own if it
is not called gpu.toml), ``aliases``, ``l2_mib``, ``kernels_of``, a measured card with the same die whose
kernels, scaled, replace missing ones, and ``modelled_error``, the relative standard error of modelled steps
(default: the model's); and three tables.
``[peak_tflops]``: dense peak by dtype (``bf16``, required, or ``fp16`` for cards without bf16 units; ``fp8``,
``fp4``, ``int8``). ``[memory]``: ``hbm_tb_per_s`` and ``hbm_gib``. ``[links]``: ``nvlink_gb_per_s`` or
``pcie_gb_per_s``, per direction; optionally ``linked_gpus``, the number of GPUs that the link joins (8),
``inter_node_gb_per_s``, the bandwidth of one GPU to GPUs beyond them, and ``kernels_of``, a card with the
same link and switches whose measured exchanges replace missing ones; ``[power]``, optional: ``tdp_w``, the
power limit, and ``idle_w``, the power with a model loaded and nothing running. Every value has limits
(:data:`LIMITS`) far beyond any card: a value outside has a wrong unit.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fastroof.checks import MOST_SUGGESTED, is_number, is_whole_number, shown, suggestion
from fastroof.config.paths import bench_data_root
from fastroof.documents import Table, read_table
from fastroof.errors import GpuError
from fastroof.file_access import FilesRead, is_file, is_folder, matches, recorded, resolved
from fastroof.units import GB, GIB, MIB, PEAK_DTYPE, TB, TFLOP

GPU_FILE: Final = "gpu.toml"

LONGEST_NAME: Final = 200

LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "peak_tflops": (1e-3, 1e7),
    "hbm_tb_per_s": (1e-4, 1e4),
    "hbm_gib": (1e-2, 1e6),
    "nvlink_gb_per_s": (1e-3, 1e6),
    "pcie_gb_per_s": (1e-3, 1e6),
    "inter_node_gb_per_s": (1e-3, 1e6),
    "l2_mib": (1e-3, 1e6),
    "num_sms": (1, 1e6),
    "linked_gpus": (1, 1e6),
    "modelled_error": (1e-3, 10),
    "tdp_w": (1e-1, 1e5),
    "idle_w": (1e-2, 1e5),
}
"""Minimum and maximum of the values in a gpu.toml, in their units."""

DATASHEET_ERROR: Final = 0.22
"""Relative standard error of steps of the datasheet model, unless a card's file sets another one: compared
with plans from the H100 tables (three models, bf16 and fp8, tp 1 and 4), 80 % of 756 decode steps are within
28 %. Other measured cards: load/README.md."""

NODE_GPUS: Final = 8
"""GPUs per node, unless a card's file sets another number."""


@dataclass(frozen=True)
class GpuSpec:
    """Datasheet specification of one GPU.

    Attributes
    ----------
    name : str
        Folder name under bench_data: ``"h100"``.
    title : str
        Display name: ``"NVIDIA H100 SXM"``.
    aliases : tuple of str
        Other names that :func:`load_gpu` accepts.
    peak_flops_per_s : mapping of str to float
        Dense peak by dtype, FLOP/s; dtypes without hardware units are absent. Cards without bf16 units have
        fp16 instead.
    hbm_bytes_per_s, hbm_bytes : float, int
        Memory bandwidth (B/s) and capacity (B).
    nvlink_bytes_per_s : float
        Bandwidth to other GPUs per direction, B/s; PCIe bandwidth for cards without NVLink.
    num_sms : int
        Streaming multiprocessors.
    l2_bytes : int
        L2 cache, B; 0 if the source does not give it.
    source : str
        Source of the values.
    linked_gpus : int
        GPUs that the link joins: those of a node, or of a rack whose nodes share one switch.
    inter_node_bytes_per_s : float
        Bandwidth of one GPU to GPUs beyond them, per direction, B/s; 0 if unknown.
    links_of : str
        A GPU with the same link and switches, whose exchanges are used if not measured; empty
        without one.
    kernels_of : str
        A GPU with the same die, whose kernels are used if not measured, scaled to this one's peaks and
        bandwidth; empty without one.
    modelled_error : float
        Relative standard error of modelled steps; 0 for the model's own.
    tdp_w, idle_w : float
        Power limit, and power with a model loaded and nothing running, W; 0 if unknown.

    Raises
    ------
    GpuError
        If a field is outside a card's limits, also in specs built by hand.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    hbm_bytes_per_s: float
    hbm_bytes: int
    nvlink_bytes_per_s: float
    num_sms: int
    l2_bytes: int
    source: str
    linked_gpus: int = NODE_GPUS
    inter_node_bytes_per_s: float = 0.0
    links_of: str = ""
    kernels_of: str = ""
    modelled_error: float = 0.0
    tdp_w: float = 0.0
    idle_w: float = 0.0

    def __post_init__(self) -> None:
        """Reject invalid fields; convert numbers to Python's."""
        for name, may_be_empty in _TEXTS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not (value.strip() or may_be_empty) or not value.isprintable():
                raise GpuError(f"GpuSpec: {name} must be text of one line, got {shown(value)}")
        is_folder_name = os.path.basename(self.name) == self.name and self.name not in (".", "..")
        if not is_folder_name or len(self.name) > LONGEST_NAME:
            raise GpuError(f"GpuSpec: name must be a folder name, got {shown(self.name)}")
        if not isinstance(self.aliases, tuple) or not all(isinstance(alias, str) for alias in self.aliases):
            raise GpuError(f"GpuSpec: aliases must be a tuple of names, got {shown(self.aliases)}")
        peaks = self.peak_flops_per_s
        if not isinstance(peaks, Mapping) or len(peaks.keys() & _HALF) != 1 or not _UNITS.issuperset(peaks):
            known = ", ".join(sorted(_UNITS))
            raise GpuError(
                "GpuSpec: peak_flops_per_s must have bf16, or fp16 without bf16 units; "
                f"valid keys are {known}, got {shown(peaks)}"
            )
        in_floats = {
            dtype: _figure(f"peak of {dtype}", peak, "peak_tflops", TFLOP) for dtype, peak in peaks.items()
        }
        object.__setattr__(self, "peak_flops_per_s", in_floats)
        for name, (key, unit, is_whole, may_be_zero) in _FIGURES.items():
            value = getattr(self, name)
            if not (may_be_zero and is_number(value) and value == 0):
                value = _figure(name, value, key, unit)
            if is_whole and value != int(value):
                raise GpuError(f"GpuSpec: {name} must be a whole number, got {shown(value)}")
            object.__setattr__(self, name, int(value) if is_whole else float(value))
        if not (0.0 < self.idle_w < self.tdp_w or self.idle_w == self.tdp_w == 0.0):
            watts = f"{self.idle_w:g} and {self.tdp_w:g}"
            raise GpuError(f"GpuSpec: idle_w must be below tdp_w, and both or none given, got {watts}")

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of the units on which a kernel of ``dtype`` computes.

        Raises
        ------
        GpuError
            If the card has no units for the dtype.
        """
        units = PEAK_DTYPE.get(dtype)
        if units == _HALF[0]:
            units = self.half_dtype
        if units is None or units not in self.peak_flops_per_s:
            have = ", ".join(sorted(self.peak_flops_per_s))
            raise GpuError(f"{self.title} has no peak for dtype {dtype!r}; valid: {have}")
        return self.peak_flops_per_s[units]

    @property
    def half_dtype(self) -> str:
        """16-bit format that the card computes in: bf16, or fp16 on cards without bf16 units."""
        return next(dtype for dtype in _HALF if dtype in self.peak_flops_per_s)

    @property
    def datasheet_error(self) -> float:
        """Relative standard error of steps that are modelled from these figures."""
        return self.modelled_error or DATASHEET_ERROR

    @property
    def kernel_name(self) -> str:
        """Name of the card whose kernels this one runs: its own, or that of ``kernels_of``."""
        return self.kernels_of or self.name

    @property
    def generation(self) -> str:
        """Architecture, by which engines choose kernels: ``sm9`` (Hopper), ``gfx9``; empty if unknown.

        Examples
        --------
        >>> load_gpu("h200").generation, load_gpu("rtx_pro_6000").generation, load_gpu("mi355x").generation
        ('sm9', 'sm12', 'gfx9')
        """
        return next((one for one, names in _GENERATIONS.items() if names.fullmatch(self.kernel_name)), "")


_GENERATIONS: Final = {
    "sm7": re.compile(r"v100.*|t4|rtx_20.*"),
    "sm8": re.compile(r"a\d+.*|l\d+s?|rtx_(30|40|a\d|\d000_ada|4500_ada).*"),
    "sm9": re.compile(r"(h100|h200|h20|h800|gh200).*"),
    "sm10": re.compile(r"g?b[23]00|vr200"),
    "sm12": re.compile(r"rtx_(50|pro_).*|gb10"),
    "gfx9": re.compile(r"mi3.*"),
}
"""Names of cards by major compute capability (``sm9``: 9.0), or by AMD's family."""

_HALF: Final = ("bf16", "fp16")
_UNITS: Final = {*PEAK_DTYPE.values(), *_HALF}

_TEXTS: Final = {"name": False, "title": False, "source": True, "links_of": True, "kernels_of": True}
"""Text fields, and whether they may be empty."""

_FIGURES: Final = {
    "hbm_bytes_per_s": ("hbm_tb_per_s", TB, False, False),
    "hbm_bytes": ("hbm_gib", GIB, True, False),
    "nvlink_bytes_per_s": ("nvlink_gb_per_s", GB, False, False),
    "num_sms": ("num_sms", 1, True, False),
    "l2_bytes": ("l2_mib", MIB, True, True),
    "linked_gpus": ("linked_gpus", 1, True, False),
    "inter_node_bytes_per_s": ("inter_node_gb_per_s", GB, False, True),
    "modelled_error": ("modelled_error", 1, False, True),
    "tdp_w": ("tdp_w", 1, False, True),
    "idle_w": ("idle_w", 1, False, True),
}
"""Numeric fields: whose limits they have, their unit, whether they are integers and may be 0."""

_ROUNDED: Final = 1e-6
"""Relative tolerance of the limits, for values in bytes that were rounded from them."""


def _figure(name: str, value: Any, key: str, unit: float) -> Any:
    """Return a number within the limits of a key, in base units, or raise an error naming the field."""
    least, most = (limit * unit for limit in LIMITS[key])
    if not is_number(value) or not least * (1.0 - _ROUNDED) <= float(value) <= most * (1.0 + _ROUNDED):
        raise GpuError(f"GpuSpec: {name} must be a number from {least:g} to {most:g}, got {shown(value)}")
    return float(value) if not is_whole_number(value) else int(value)


def gpu_names() -> list[str]:
    """Return the GPUs that have a gpu.toml in bench_data, sorted.

    Returns
    -------
    list of str
        Folder names.

    Examples
    --------
    >>> "h100" in gpu_names()
    True
    """
    return [path.parent.name for path in matches(bench_data_root(), f"*/{GPU_FILE}")]


def is_shipped(gpu: GpuSpec) -> bool:
    """Return whether a specification is that of the GPU of its name, not of your own card."""
    return is_file(bench_data_root() / gpu.name / GPU_FILE) and _shipped(gpu.name) == gpu


def load_gpu(name_or_path: str | Path | Mapping[str, Any] | GpuSpec) -> GpuSpec:
    """Load the specification of one GPU.

    Parameters
    ----------
    name_or_path : str, Path, mapping or GpuSpec
        A name from :func:`gpu_names` or an alias (case, spaces, hyphens and underscores
        do not matter); the path of a gpu.toml or of its folder; or the
        contents of a gpu.toml with the key ``name``. A name takes precedence over a path of the same
        spelling. A name that no GPU has may be that of ``NAME.toml`` in the working folder. Warnings say
        which of them is read. A specification is returned unchanged.

    Returns
    -------
    GpuSpec
        The specification in FLOP/s, B/s and B.

    Raises
    ------
    GpuError
        If the GPU is unknown, or its gpu.toml lacks keys, has unknown keys or values outside the limits; the
        message names all of them.

    Examples
    --------
    >>> load_gpu("H100-SXM").hbm_bytes_per_s
    3350000000000.0
    """
    if isinstance(name_or_path, GpuSpec):
        return name_or_path
    if isinstance(name_or_path, Mapping):
        return _parse(Table(name_or_path, "GPU description", GpuError), None)
    if not isinstance(name_or_path, str | Path):
        raise GpuError(f"a GPU must be a name, a path or a mapping, got {type(name_or_path).__name__}")
    if isinstance(name_or_path, str) and (spec := gpu_named(name_or_path)) is not None:
        _say_unread(name_or_path, spec)
        return spec
    path = gpu_file(name_or_path)
    if path is not None:
        if isinstance(name_or_path, str) and path == _file_called(name_or_path):
            _say(f"no GPU is called {name_or_path}: it is read from {path.absolute()}")
        return _read(path)
    path = Path(name_or_path)
    if name_or_path != "" and is_folder(path):
        path = path / GPU_FILE
    if isinstance(name_or_path, Path) or len(path.parts) > 1 or path.suffix == ".toml":
        names = ", ".join(gpu_names())
        raise GpuError(f"{path} does not exist; give a {GPU_FILE}, its folder, or one of {names}")
    raise GpuError(_unknown(name_or_path))


def gpu_file(given: str | Path) -> Path | None:
    """Return the file of a GPU that has no name here: the given one, its folder's, or NAME.toml; or None."""
    path = Path(given)
    if given != "" and is_folder(path):
        path = path / GPU_FILE
    if is_file(path):
        return path
    called = _file_called(given) if isinstance(given, str) else None
    return called if called is not None and is_file(called) else None


def _file_called(name: str) -> Path | None:
    """Return the path of NAME.toml in the working folder, which a name that is not a path may mean."""
    is_name = len(Path(name).parts) == 1 and not name.endswith(".toml")
    return Path(f"{name}.toml") if is_name else None


def _say_unread(name: str, spec: GpuSpec) -> None:
    """Say that a known GPU's name does not mean a file of that name, if another GPU is in it."""
    for path in (Path(name, GPU_FILE), _file_called(name)):
        if path is None or not is_file(path):
            continue
        try:
            is_other = _parse(read_table(path, GpuError), spec.name) != spec
        except (OSError, ValueError, GpuError):
            continue
        if is_other:
            _say(f"{name} is the {spec.title}; {path.absolute()} is not read (give ./{path} to read it)")


@lru_cache(256)
def _say(message: str) -> None:
    """Warn once of each thing that a name could mean."""
    warnings.warn(message, UserWarning, stacklevel=4)


def _key(name: str) -> str:
    """Return the spelling by which names are compared."""
    return re.sub(r"[\s_-]+", "", name.casefold()).removeprefix("nvidia")


def gpu_named(name: str) -> GpuSpec | None:
    """Return the GPU of a name or an alias, never of a file; None if no GPU has that name."""
    if re.fullmatch("[a-z0-9_]+", name) and is_file(bench_data_root() / name / GPU_FILE):
        return _shipped(name)
    key = _key(name)
    for folder in gpu_names():
        if _key(folder) == key:
            return _shipped(folder)
    for spec in map(_shipped, gpu_names()):
        if key in {_key(alias) for alias in (spec.title, *spec.aliases)}:
            return spec
    return None


_OTHERS: Final[Mapping[str, str]] = {
    "other GPUs of AMD": r"amd|instinct|radeon|mi\d|gfx\d|rx\d{4}",
    "Intel's Gaudi": r"(intel)?gaudi|hl\d{3}|habana",
    "other GPUs of Intel": r"intel|arc[abp]|datacentergpumax|max1\d{3}",
    "Google's TPUs": r"(google)?(cloud)?tpu|trillium|ironwood|v[2-7](e|p|lite|litepod)?$",
    "AWS's Trainium and Inferentia": r"(aws)?(trainium|inferentia|neuron)|trn\d|inf\d",
    "Huawei's Ascend": r"(huawei)?(ascend|atlas)|910[abc]|310[ap]",
    "Apple's GPUs": r"apple|m[1-5](pro|max|ultra)?$",
    "NVIDIA's Jetson modules": r"(jetson)?(agx|orin|thor|xavier)|jetson|tegra",
    "accelerators of other makers": r"cerebras|groq|tenstorrent|wormhole|blackhole|mtt|mlu|cambricon|kunlun"
    r"|hygon|dcu|biren|metax|sambanova|cloudai100|qualcomm",
}
"""Accelerators out of scope, by what they are called: how their names begin, spelled by :func:`_key`."""


def _out_of_scope(name: str) -> str | None:
    """Return one line for the name of an accelerator that fastroof leaves out, as its tools print it."""
    key = _key(name)
    kind = next((kind for kind, names in _OTHERS.items() if re.match(names, key)), None)
    if kind is None:
        return None
    other = [spec.name for spec in map(_shipped, gpu_names()) if not spec.title.startswith("NVIDIA")]
    return (
        f"GPU {shown(name)} is out of scope, as are {kind}: supported are GPUs of NVIDIA, {', '.join(other)} "
        f"(`fastroof gpus` lists all {len(gpu_names())})"
    )


def _unknown(name: str) -> str:
    if reason := _out_of_scope(name):
        return reason
    specs = [_shipped(folder) for folder in gpu_names()]
    for spec in specs:
        rest = _key(name).removeprefix(_key(spec.name))
        # "l40pcie" starts like l4, but is another card
        is_variant = rest != _key(name) and not re.match(r"\d+(?!\d|gb)", rest)
        if is_variant and re.search("pcie|nvl", rest):
            variants = [s for s in specs if re.match(rf"{spec.name}(?!\d)", s.name)]
            cards = ", ".join(f"{s.name} is the {s.title}" for s in variants)
            return f"unknown GPU {name!r}: {cards}; for another card, give the path of its {GPU_FILE}"
    spellings = {_key(alias): spec.name for spec in specs for alias in (spec.name, *spec.aliases)}
    close = difflib.get_close_matches(_key(name), spellings, n=MOST_SUGGESTED, cutoff=0.5)
    line = suggestion(
        "GPU", name, list(dict.fromkeys(spellings[key] for key in close)), gpu_names(), "fastroof gpus"
    )
    return f"{line}, or give the path of a {GPU_FILE}"


def _shipped(folder: str) -> GpuSpec:
    path = bench_data_root() / folder / GPU_FILE
    spec, read = _read_once(path, path.stat().st_mtime_ns)
    read.repeat()
    return spec


@lru_cache(256)
def _read_once(path: Path, changed_ns: int) -> tuple[GpuSpec, FilesRead]:
    """Return a shipped GPU, and the reads for it: names that are not folders are looked for in all files."""
    with recorded() as read:
        return _read(path), read


def _read(path: Path) -> GpuSpec:
    place = resolved(path)
    return _parse(read_table(path, GpuError), place.parent.name if place.name == GPU_FILE else place.stem)


_TOP = (
    "title", "name", "aliases", "source", "num_sms", "l2_mib", "kernels_of", "modelled_error",
    "peak_tflops", "memory", "links", "power",
)  # fmt: skip
_MEMORY = ("hbm_tb_per_s", "hbm_gib")
_LINKS = ("nvlink_gb_per_s", "pcie_gb_per_s")
_BEYOND = ("linked_gpus", "inter_node_gb_per_s", "kernels_of")
_POWER = ("tdp_w", "idle_w")
_WHOLE = ("num_sms", "linked_gpus")


def _parse(top: Table, folder: str | None) -> GpuSpec:
    top.problems = []
    peaks, memory, links, power = (top.table(key) for key in ("peak_tflops", "memory", "links", "power"))
    known = {top: _TOP, peaks: sorted(_UNITS), memory: _MEMORY, links: (*_LINKS, *_BEYOND), power: _POWER}
    for table, allowed in known.items():
        table.allow(allowed)
    tdp_w, idle_w = (_amount(power, key, 1) for key in _POWER) if power.data else (0.0, 0.0)
    if idle_w >= tdp_w > 0.0:
        power.fail(f"must be below power.tdp_w, got {idle_w:g} and {tdp_w:g}", "idle_w")
    half = "fp16" if "fp16" in peaks.data else "bf16"
    if len(peaks.data.keys() & _HALF) == len(_HALF):
        peaks.fail("is for cards without bf16 units; leave it out next to bf16", "fp16")
    link = [key for key in _LINKS if key in links.data]
    if len(link) != 1:
        top.fail(f"must have one of {' and '.join(_LINKS)}, got {' and '.join(link) or 'none'}", "links")
    of_link = [_amount(links, key, GB) for key in link]
    fields: dict[str, Any] = {
        "name": top.text("name") if folder is None or "name" in top.data else folder,
        "title": top.text("title"),
        "source": top.text("source"),
        "aliases": tuple(top.texts("aliases")) if top.data.get("aliases", []) != [] else (),
        "peak_flops_per_s": {dtype: _amount(peaks, dtype, TFLOP) for dtype in {**peaks.data, half: None}},
        "hbm_bytes_per_s": _amount(memory, "hbm_tb_per_s", TB),
        "hbm_bytes": _amount(memory, "hbm_gib", GIB),
        "num_sms": _amount(top, "num_sms", 1),
        "l2_bytes": _amount(top, "l2_mib", MIB, 0.0),
        "linked_gpus": _amount(links, "linked_gpus", 1, NODE_GPUS),
        "inter_node_bytes_per_s": _amount(links, "inter_node_gb_per_s", GB, 0.0),
        "links_of": links.text("kernels_of") if "kernels_of" in links.data else "",
        "kernels_of": top.text("kernels_of") if "kernels_of" in top.data else "",
        "modelled_error": _amount(top, "modelled_error", 1, 0.0),
    }
    top.check()
    for name in ("hbm_bytes", "l2_bytes"):
        fields[name] = round(fields[name])
    return GpuSpec(**fields, nvlink_bytes_per_s=of_link[0], tdp_w=tdp_w, idle_w=idle_w)


def _amount(table: Table, key: str, unit: float, default: float | None = None) -> float:
    """Return the value of a key in base units; nan if it is wrong."""
    if default is not None and key not in table.data:
        return default
    limits = LIMITS[key if key in LIMITS else "peak_tflops"]
    if key in _WHOLE:
        return table.size(key, *map(int, limits))
    # decimal, because 2.039 * 1e12 in float is not 2.039e12
    return float(Decimal(repr(table.number(key, *limits))) * Decimal(unit))
