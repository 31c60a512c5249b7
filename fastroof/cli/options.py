"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Final

import typer

__all__ = [
    "GPU_NAMES",
    "AllowModelled",
    "Cp",
    "Dp",
    "DpImbalance",
    "Dtype",
    "Ep",
    "Eplb",
    "Exchange",
    "Gpu",
    "GpuName",
    "Json",
    "KvDtype",
    "MaxBatchedTokens",
    "MaxSeqs",
    "MemoryFraction",
    "Method",
    "Model",
    "MoeTp",
    "NumSlots",
    "OneSource",
    "Pp",
    "Routing",
    "Runtime",
    "Source",
    "TablesInstead",
    "TablesPath",
    "Tp",
    "TwoBatchOverlap",
    "WideExperts",
]

GPU_NAMES: Final = ("--gpu", "--system")
"""The option that names a GPU, and what aiconfigurator calls it."""

Model = Annotated[str, typer.Option(help="Preset (see fastroof models) or path of a config.json.")]
Gpu = Annotated[
    str | None,
    typer.Option(*GPU_NAMES, help="GPU (see fastroof gpus) or path of a gpu.toml.  [default: h100]"),
]
Tp = Annotated[int, typer.Option(help="GPUs that share each layer: 1, 2, 4, 8; 16, 32, 64 over nodes.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
Dp = Annotated[int, typer.Option(help="Ranks of attention data parallelism; batches are those of one.")]
Ep = Annotated[int, typer.Option(help="Groups of experts on GPUs of their own.")]
MoeTp = Annotated[
    int | None, typer.Option(help="GPUs that share each expert.  [default: what tp x dp / ep leaves]")
]
Routing = Annotated[
    str | None,
    typer.Option(
        help="How tokens spread over experts: balanced, power_law_1.01, power_law_1.2 (default).",
    ),
]
AllowModelled = Annotated[
    bool,
    typer.Option("--allow-modelled", help="Take what was not measured from the datasheet, and say so."),
]
Exchange = Annotated[
    str | None,
    typer.Option(
        help="How tokens reach experts: gather, alltoall, nvlink_one_sided or nvlink_two_sided (racks), "
        "or megamoe (one kernel with the experts).  "
        "[default: as the runtime does]"
    ),
]
Cp = Annotated[
    int, typer.Option(help="GPUs that share the new tokens of each prompt (context parallelism of prefill).")
]
WideExperts = Annotated[
    bool | None,
    typer.Option(
        help="Whether experts run the kernels of wide expert parallelism.  "
        "[default: as the runtime does, where measured]"
    ),
]
Eplb = Annotated[bool, typer.Option("--eplb", help="Balance experts' load over GPUs, as was measured.")]
NumSlots = Annotated[
    int | None,
    typer.Option(help="With --eplb: places for experts on all GPUs, copies in those beyond one an expert."),
]
TwoBatchOverlap = Annotated[
    bool,
    typer.Option(
        "--two-batch-overlap", help="Halves of a batch take turns: one computes, one sends (modelled)."
    ),
]
DpImbalance = Annotated[
    float,
    typer.Option(help="Tokens of the most loaded rank of dp over the mean; steps are those of that rank."),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Linear layers and experts: auto (the checkpoint's), bf16, fp8 (a scale a tensor), fp8_block, "
        "int8, int8_wo, int4_wo, w4afp8, nvfp4, nvfp4_wo or mxfp4."
    ),
]
KvDtype = Annotated[str, typer.Option(help="KV cache: auto (the checkpoint's, else bf16), bf16 or fp8.")]
Runtime = Annotated[
    str,
    typer.Option(
        help="Engine: its own cost, schedule and memory (see fastroof engines), or a .toml file; "
        "kernels adds nothing."
    ),
]
Method = Annotated[str, typer.Option(help="Lookup: roofline, linear_mfu, nearest or floor.")]
MaxBatchedTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens a step holds at most.  [default: the runtime's]")
]
MaxSeqs = Annotated[
    int | None, typer.Option(min=1, help="Requests that run at once at most.  [default: the runtime's]")
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        help="gpu_memory_utilization, free_gpu_memory_fraction or mem_fraction_static.  "
        "[default: the runtime's]"
    ),
]
TablesPath = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Folder of measured tables to use instead of the shipped."),
]
Source = Annotated[
    str | None, typer.Option(help="Use only this source of the tables; or OPERATOR=SOURCE,... for some.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

GpuName = Annotated[str | None, typer.Option(*GPU_NAMES, help="GPU (see fastroof gpus).  [default: h100]")]
TablesInstead = Annotated[
    str | None, typer.Option(metavar="PATH", help="Folder of measured tables to use instead.")
]
OneSource = Annotated[str | None, typer.Option(help="Use only this source of the tables.")]
