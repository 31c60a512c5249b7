"""Options of commands that simulate pools of engines: some only prefill, the others only decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof.simulation import Link

__all__ = [
    "DecodeReplicas",
    "FirstToken",
    "KvBandwidth",
    "KvLatency",
    "PrefillReplicas",
    "PrefillTp",
    "asked_link",
]

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
