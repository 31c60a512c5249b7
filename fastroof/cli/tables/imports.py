"""``fastroof tables new`` and ``import``: tables of your own card, and those that other programs measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.gpu_tables import import_progress
from fastroof.cli.options import GPU_NAMES, option
from fastroof.cli.output import print_line, print_table
from fastroof.cli.tables.list import print_missing
from fastroof.command_group import Group, GroupValues, taking
from fastroof.errors import GpuError, TableError

NEW_EPILOG: Final = """\b
Example:
  fastroof tables new b300-mine
  fastroof best --model llama-3.1-8b --gpu b300-mine --gpus 2 --isl 1000 --osl 100

gpu.toml has the datasheet, which alone models the card. measured/ is for your own rows: write their times
into the latency_us of gemm.csv.template and rename it gemm.csv. What has no rows stays modelled.
"""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of your GPU, and of its folder.")],
) -> None:
    """Write the files of your own GPU."""
    import fastroof.load
    from fastroof.atomic_files import whole_folder
    from fastroof.config.gpu import gpu_named

    folder = Path(name)
    if (known := gpu_named(name)) is not None:
        raise GpuError(f"{name} is the {known.title}; give your card another name")
    if folder.name != name or folder.exists():
        why = "exists" if folder.exists() else "is not the name of a folder"
        raise GpuError(f"{name} {why}; give your card another name")
    shipped = Path(fastroof.load.__file__).with_name("new_gpu")
    files = sorted(path.relative_to(shipped) for path in shipped.rglob("*.*"))
    with whole_folder(folder) as unfinished:
        for file in files:
            (unfinished / file).parent.mkdir(exist_ok=True)
            text = (shipped / file).read_text(encoding="utf-8").replace("NAME", name)
            (unfinished / file).write_text(text, encoding="utf-8")
    for file in files:
        print_line(f"{folder / file}")
    print_line(f"write the card's figures into gpu.toml; then --gpu {name} is modelled from them")


AICONFIGURATOR_EPILOG: Final = """\b
Without --backend, everything measured on the GPU is converted: of each engine the newest version with GEMMs,
attention and experts, and files that only others have. Without this command, each table is converted when it
is first read. With --backend it is a custom source, which is never replaced, and which --engine NAME-VERSION
reads first.

\b
Examples:
  fastroof tables import aiconfigurator h200
  fastroof tables import aiconfigurator h200 --backend sglang --version 0.5.10 -o my_tables
  fastroof step --model llama-3.1-8b --decode 64x4096 --tables my_tables/h200
"""


def aiconfigurator(
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="GPU, or the package's system: h200, b300_sxm.")],
    backend: Annotated[str | None, typer.Option(help="vllm, sglang or trtllm. [default: all]")] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of the backend.  [default: the one in use]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder to write <gpu>/<source>/ to. [default: the user's tables]"
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="Folder of aisimulate_core or aiconfigurator_core, or of an unpacked wheel.  "
            "[default: the installed one]"
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing source of one backend.")
    ] = False,
) -> None:
    """Convert what NVIDIA's aisimulate measured on a GPU."""
    from fastroof.load.aiconfigurator import SYSTEMS, system_of

    chosen = system_of(gpu)
    if backend is None:
        if version:
            raise TableError("--version goes with --backend: without it everything is converted")
        folder = _import_all(SYSTEMS[chosen], output, root)
    else:
        from fastroof.config.paths import user_tables_root
        from fastroof.load.aiconfigurator import data_folder, import_aiconfigurator, write_imported
        from fastroof.load.package_import import ENGINES, LAST_RANK, current_version

        in_use = current_version(data_folder(root), chosen, backend)
        version = in_use if version is None else version
        place = user_tables_root() if output is None else output
        # registered next to the GPU's own tables, it serves what they lack, and lookups that name it
        rank = None if output is not None else ENGINES.get(backend) if version == in_use else LAST_RANK
        imported = import_aiconfigurator(chosen, backend, version, root)
        folder = write_imported(imported, place, overwrite, rank)
    _print(folder, root)


def _import_all(gpu: str, output: Path | None, root: Path | None) -> Path:
    from fastroof.load.aiconfigurator import data_folder
    from fastroof.load.by_name import ensure_imported

    data_folder(root)  # says what to install
    with import_progress(gpu) as progress:
        folder = ensure_imported(gpu, progress=progress, always=True, root=output, package=root)
    assert folder is not None
    return folder


def _print(folder: Path, package: Path | None) -> None:
    from fastroof.load.listing import list_tables

    if not any(folder.rglob("provenance.toml")):
        typer.echo("all that the package measured on it ships with fastroof")
        return
    sources = list_tables([folder])
    rows = [(one.source, table.operator, f"{table.rows:,}") for one in sources for table in one.operators]
    print_table(("source", "operator", "rows"), rows, left=("source", "operator"))
    print_missing([asdict(source) for source in sources], package)
    typer.echo(f"wrote {folder}")


PLACE: Final[Group] = {
    "output": option(
        Path, "Folder to write <gpu>/<program>/ to. [default: the user's tables]", None, "--output", "-o"
    ),
    "gpu": option(str, "GPU, if the folder has several or names none.", None, *GPU_NAMES),
    "overwrite": option(bool, "Replace an existing source.", None, "--overwrite", default=False),
}
"""Where converted tables go, and of which GPU they are."""


def print_source(folder: Path) -> None:
    """Print the rows of each operator, what was left out, and the folder."""
    from fastroof.load.sources import list_sources, load_sources

    rows = [(name, f"{table.num_rows:,}") for name, table in load_sources(folder).tables.items()]
    print_table(("operator", "rows"), rows, left=("operator",))
    provenance = list_sources(folder)[0].provenance
    left_out: dict[str, int] = {}
    for name, about in (*provenance["imported"].items(), *provenance["operators"].items()):
        if "ignored" in about:
            print_line(f"not read: {name}: {about['ignored']}")
        for reason, count in about.get("left_out", {}).items():
            left_out[reason] = left_out.get(reason, 0) + count
    for reason, count in left_out.items():
        print_line(f"left out: {count:,} rows: {reason}")
    typer.echo(f"wrote {folder}")


LLMSERVINGSIM_EPILOG: Final = """\b
Example:
  fastroof tables import llmservingsim LLMServingSim/profiler/perf --gpu rtx_pro_6000 -o my_tables
  fastroof step --model llama-3.1-8b --decode 64x4096 --tables my_tables/rtx_pro_6000
"""


@taking(place=PLACE)
def llmservingsim(
    *,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="LLMServingSim's profiler/perf, or a folder below it."),
    ],
    place: GroupValues,
    model: Annotated[
        str | None,
        typer.Option(help="Preset or config.json of the profiled model, if the folders name no preset."),
    ] = None,
) -> None:
    """Convert profiles that LLMServingSim measured."""
    from fastroof.load.simulator_profiles.llmservingsim import convert_llmservingsim

    print_source(convert_llmservingsim(folder, **place, model=model))


VIDUR_EPILOG: Final = """\b
Example:
  fastroof tables import vidur vidur/data/profiling --gpu a100 --topology a100_dgx -o my_tables
  fastroof lookup gemm --m 64 --n 6144 --k 4096 --tables my_tables/a100
"""


@taking(place=PLACE)
def vidur(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Vidur's data/profiling, or a folder below it.")
    ],
    place: GroupValues,
    topology: Annotated[
        str | None, typer.Option(help="Folder below network whose all-reduces to convert: a100_dgx.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of rows measured in float16: bf16 or fp16.")] = "bf16",
) -> None:
    """Convert profiles that Vidur measured."""
    from fastroof.load.simulator_profiles.vidur import convert_vidur

    print_source(convert_vidur(folder, **place, topology=topology, dtype=dtype))
