"""Options that several commands have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.command_group import warn
from fastroof.errors import BatchError, SimulationError

if TYPE_CHECKING:
    from fastroof.simulation import Link


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


ENGINE: Final = "engine"
"""What stands for the default of the engine's own profile."""

MaxNumBatchedTokens = Annotated[
    str, typer.Option(metavar="TOKENS", help="New tokens of a step at most; engine: the runtime's own.")
]
MaxNumSeqs = Annotated[
    str,
    typer.Option(metavar="REQUESTS", help="Requests that run at once at most; engine: the runtime's own."),
]
NumGpuBlocks = Annotated[
    int | None,
    typer.Option(min=1, help="Blocks of KV cache.  [default: what memory has room for beside the weights]"),
]
BlockSize = Annotated[
    str, typer.Option(metavar="TOKENS", help="Tokens of a block; engine: the runtime's own.")
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Schedule a step while the one before runs.  [default: the runtime's]",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="Prompts beside decodes (mixed) or in steps of their own ahead of them (prefill_first).  "
        "[default: the runtime's]"
    ),
]
ChunkedPrefill = Annotated[
    bool | None,
    typer.Option(
        "--chunked-prefill/--no-chunked-prefill",
        help="Cut prompts where a step has no room for the whole.  [default: the runtime's]",
    ),
]
ReserveOutput = Annotated[
    bool | None,
    typer.Option(
        "--reserve-output/--no-reserve-output",
        help="Start a request only where its whole output has room.  [default: the runtime's]",
    ),
]
Replicas = Annotated[
    int, typer.Option(min=1, help="Engines that share the requests, each on GPUs of its own.")
]
Router = Annotated[
    str,
    typer.Option(
        help="Which replica a request goes to: round_robin, least_outstanding, least_load, least_kv, "
        "power_of_two, or with --prefix-cache lru prefix_aware."
    ),
]
PrefixCache = Annotated[
    str,
    typer.Option(
        metavar="given|lru",
        help="What requests find of their prompts: what the trace gives, or what a pool of blocks holds, by "
        "its hash_ids; preempted ones find their own.",
    ),
]
Timeout = Annotated[
    float | None, typer.Option(metavar="S", help="Seconds after which a client gives up.  [default: never]")
]
TooLong = Annotated[
    str,
    typer.Option(
        metavar="error|reject", help="What becomes of requests that the KV cache can never hold whole."
    ),
]

_WHOLE: Final = re.compile(r"[0-9]{1,9}")
_LIMIT: Final = re.compile(r"([a-z0-9_]+)[=:]([0-9]*\.?[0-9]+)")
_LIMIT_NAMES: Final = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "e2e": "e2e_ms",
    "e2el": "e2e_ms",
    "ttft_ms": "ttft_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
}
"""Limits by what they are called: e2el as in vLLM's ``bench serve --goodput``."""


def number_or_engine(option: str, text: str) -> int | None:
    """Read a whole number, or ``engine``: None, the engine's own."""
    word = text.strip()
    if word == ENGINE:
        return None
    if _WHOLE.fullmatch(word) is None or int(word) < 1:
        raise SimulationError(f"{option} needs a whole number of at least 1, or {ENGINE}, got {shown(text)}")
    return int(word)


def parse_limits(text: str | None) -> dict[str, Any]:
    """Read limits of a request as ``ttft=500,tpot=50``, ms."""
    limits: dict[str, Any] = {}
    for part in text.split(",") if text is not None else ():
        match = _LIMIT.fullmatch(part.strip())
        name = _LIMIT_NAMES.get(match[1]) if match else None
        if match is None or name is None or name in limits or float(match[2]) <= 0.0:
            raise BatchError(
                "--slo needs milliseconds above 0 as ttft=500,tpot=50,e2e=10000, each at most once; "
                f"got {shown(part)}"
            )
        limits[name] = float(match[2])
    return limits


PrefillReplicas = Annotated[
    int | None, typer.Option(min=1, help="Engines that only prefill; goes with --decode-replicas.")
]
DecodeReplicas = Annotated[
    int | None, typer.Option(min=1, help="Engines that only decode, each on the GPUs of --tp.")
]
PrefillTp = Annotated[
    int | None, typer.Option(help="GPUs that share each layer of a prefill engine.  [default: --tp]")
]
KvBandwidth = Annotated[
    float | None,
    typer.Option(
        metavar="GB/S",
        help="What a GPU of a prefill engine sends to one of a decode engine: 50 is a 400 Gb/s NIC.  "
        "[default: NVLink's]",
    ),
]
KvLatency = Annotated[
    float | None, typer.Option(metavar="US", help="Added to each transfer of a KV cache, us.  [default: 0]")
]
FirstToken = Annotated[
    str | None,
    typer.Option(
        metavar="transfer|prefill|decode",
        help="Where a first token is seen: with the KV cache at the decode engine, at the prefill engine, or "
        "made by the decode engine.  [default: transfer]",
    ),
]


def asked_link(
    replicas: int,
    pools: tuple[int | None, int | None],
    *,
    prefill_tp: int | None,
    kv_bandwidth: float | None,
    kv_latency: float | None,
    first_token: str | None,
) -> Link | None:
    """Return the link between pools of engines, or None where there are none."""
    from fastroof.simulation import Link
    from fastroof.units import GB

    given: dict[str, Any] = {
        "--prefill-tp": prefill_tp,
        "--kv-bandwidth": kv_bandwidth,
        "--kv-latency": kv_latency,
        "--first-token": first_token,
    }
    if pools == (None, None):
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise SimulationError(f"{alone[0]} needs --prefill-replicas and --decode-replicas")
        return None
    if None in pools:
        raise SimulationError("--prefill-replicas and --decode-replicas go together: give both")
    if replicas != 1:
        raise SimulationError(
            f"--replicas {replicas} are engines that do both: leave it away beside --prefill-replicas and "
            "--decode-replicas"
        )
    link = Link(None if kv_bandwidth is None else kv_bandwidth * GB, kv_latency or 0.0)
    return link if first_token is None else link._replace(first_token=first_token)


def warn_beyond_context(name: str, max_position: int, longest: float) -> None:
    """Warn in one line where a request has more tokens than the model's config takes."""
    if longest > max_position:
        warn(
            f"a request of {longest:,.0f} tokens is longer than the context of {name}, "
            f"{max_position:,} (max_position_embeddings, with rope scaling): engines refuse it"
        )
