"""``fastroof gpus``: the GPUs known by name, and what was measured on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from fastroof.cli.gpu_tables import source_files
from fastroof.cli.options import Json
from fastroof.cli.output import print_json, print_records
from fastroof.units import GB, GIB, TB, TFLOP

if TYPE_CHECKING:
    from fastroof.config import GpuSpec

EPILOG: Final = """\b
JSON: a list with one object per GPU: name, title, aliases, peak_flops_per_s (by dtype), hbm_bytes_per_s,
hbm_bytes, nvlink_bytes_per_s, num_sms, l2_bytes, source, linked_gpus (that its link joins),
inter_node_bytes_per_s (of a GPU beyond them),
links_of (a GPU with the same link, whose measured exchanges are used), kernels_of (a GPU with the same die,
whose kernels are used, scaled), modelled_error (relative standard error of modelled steps; 0:
the model's own), tdp_w and idle_w (power limit, and power with a model loaded and nothing running; 0:
unknown), has_tables, tables (source names).
"""


def gpus(as_json: Json = False) -> None:
    """List the GPUs known by name, and their tables."""
    from fastroof import gpu_names, load_gpu
    from fastroof.load.by_name import can_import

    specs = [load_gpu(name) for name in gpu_names()]
    sources = {
        spec.name: list(dict.fromkeys(path.parent.name for path in source_files(spec.name))) for spec in specs
    }
    if as_json:
        print_json(
            [
                {**asdict(spec), "has_tables": bool(sources[spec.name]), "tables": sources[spec.name]}
                for spec in specs
            ]
        )
        return
    known = ("bf16", "fp8", "fp4", "int8")
    dtypes = [dtype for dtype in known if any(dtype in s.peak_flops_per_s for s in specs)]
    columns: dict[str, Callable[[GpuSpec], str]] = {
        "gpu": lambda spec: spec.name,
        "name": lambda spec: spec.title,
        **{f"{dtype} TFLOP/s": partial(_peak, dtype) for dtype in dtypes},
        "HBM TB/s": lambda spec: f"{spec.hbm_bytes_per_s / TB:.4g}",
        "HBM GiB": lambda spec: f"{spec.hbm_bytes / GIB:.4g}",
        "link GB/s": lambda spec: f"{spec.nvlink_bytes_per_s / GB:.4g}",
        "tables": lambda spec: _tables(sources[spec.name], spec, can_import(spec.name)),
    }
    print_records(
        specs, columns, left=("gpu", "name", "tables"), least=("name", "int8 TFLOP/s", "link GB/s", "tables")
    )


def _tables(sources: list[str], spec: GpuSpec, can_import: bool) -> str:
    if sources:
        return sources[0] if len(sources) == 1 else f"{len(sources)} sources"
    if spec.kernels_of:
        return f"none: kernels of {spec.kernels_of}, scaled"
    return "none yet: fastroof tables import" if can_import else "none: datasheet model"


def _peak(dtype: str, spec: GpuSpec) -> str:
    used = spec.half_dtype if dtype == "bf16" else dtype
    flops_per_s = spec.peak_flops_per_s.get(used)
    text = "-" if flops_per_s is None else f"{flops_per_s / TFLOP:,.5g}"
    return text if used == dtype else f"{text} ({used})"
