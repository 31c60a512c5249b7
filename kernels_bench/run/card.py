"""The GPU that is measured: its name, and the facts next to its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import write_whole
from fastroof.config.gpu import GPU_FILE, GpuSpec, load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.documents import parse_toml, read_toml
from fastroof.errors import GpuError, MeasureError

CPU: Final = "cpu"

CPU_GPU_TOML: Final = """\
title = "no GPU: a host's CPU, to prove the harness"
name = "cpu"
source = "ceilings that no host's CPU reaches on tiny sizes; not facts of any card"
num_sms = 1

[peak_tflops]
bf16 = 1000
fp8 = 1000

[memory]
hbm_tb_per_s = 10
hbm_gib = 1

[links]
pcie_gb_per_s = 1
"""
"""Written next to tables that were measured without a GPU, so that they load and are recognised."""


def measured_gpu(name: str | None, facts: Mapping[str, Any], on_cpu: bool) -> GpuSpec:
    """Return the card that is measured; refuse to call one by another's name.

    >>> measured_gpu(None, {"gpu_name": "NVIDIA H100 80GB HBM3"}, on_cpu=False).name
    'h100'
    """
    if on_cpu:
        if name not in (None, CPU):
            raise MeasureError(
                f"the cpu provider measures no {name}: leave --gpu out, its tables are named cpu"
            )
        return load_gpu(parse_toml(CPU_GPU_TOML, "the gpu.toml of CPUs"))
    printed = str(facts.get("gpu_name", ""))
    if name is not None and name.endswith(".toml"):
        return load_gpu(Path(name))
    if not printed:
        if name is None:
            raise MeasureError("the driver does not report which GPU this is; pass --gpu NAME or a gpu.toml")
        return load_gpu(name)
    wanted = None if name is None else load_gpu(name)
    try:
        spec = load_gpu(printed)
    except GpuError as error:
        raise MeasureError(f"the driver reports the GPU {printed!r}: {error} as --gpu") from None
    if wanted is not None and wanted.name != spec.name:
        raise MeasureError(
            f"--gpu {name} is {wanted.title}, but this is {printed} ({spec.name}): leave --gpu out, "
            "or give its own gpu.toml"
        )
    return spec


def refuse_other_gpu(folder: Path, gpu: GpuSpec) -> None:
    """Refuse an output folder of another card."""
    held = folder / GPU_FILE
    if held.is_file() and (name := load_gpu(held).name) != gpu.name:
        raise MeasureError(f"{folder} holds measurements of {name}, this is {gpu.name}; give another -o")


def write_gpu_file(folder: Path, gpu: GpuSpec, given: str | None) -> None:
    """Write the GPU's facts next to its tables, so that they load where fastroof does not know the GPU."""
    from fastroof.load.write import toml_text

    if (folder / GPU_FILE).is_file():
        return
    try:
        if gpu.name == CPU:
            text = CPU_GPU_TOML
        else:
            own = given is not None and given.endswith(".toml")
            path = Path(str(given)) if own else bench_data_root() / gpu.name / GPU_FILE
            # The file's name may be its folder's, which it leaves.
            text = toml_text({"name": gpu.name, **read_toml(path, MeasureError)})
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / GPU_FILE, text)
    except OSError as error:
        raise MeasureError(f"{folder} cannot be written: {error.strerror}; give another -o") from None
