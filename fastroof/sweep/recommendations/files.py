"""Files of a recommendation: scripts to start and measure it, manifests, and the rows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fastroof.atomic_files import check_file_place, whole_file, write_whole
from fastroof.checks import one_of
from fastroof.documents import yaml_text
from fastroof.engines.launch.settings import LOOPBACK, SIDE_HOST, SIDE_PORTS, Command
from fastroof.errors import SweepError
from fastroof.sweep.recommendations.deployment import GPUS_VARIABLE, Deployment
from fastroof.sweep.recommendations.manifests import KUBERNETES, PLATFORMS, label_name

ROWS: Final = "deployments.parquet"


def save_deployments(
    rows: list[dict[str, Any]],
    deployments: Sequence[Deployment],
    folder: str | Path,
    manifest: str = KUBERNETES,
) -> list[Path]:
    """Write the files of deployments, one folder each if there are several, and their rows."""
    one_of("manifest", manifest, PLATFORMS, SweepError)
    files = [_files(deployment, manifest) for deployment in deployments]
    place = Path(folder)
    written: list[Path] = []
    try:
        place.mkdir(parents=True, exist_ok=True)
        written += _write_rows(rows, place)
        for number, (deployment, texts) in enumerate(zip(deployments, files, strict=True), start=1):
            target = place
            if len(deployments) > 1:
                target = place / f"{number}-{label_name(deployment.checkpoint.name)}"
            target.mkdir(exist_ok=True)
            for name, text in texts.items():
                path = target / name
                write_whole(path, text)
                if name.endswith(".sh"):
                    path.chmod(0o755)
                written.append(path)
    except OSError as error:
        raise SweepError(f"{place} cannot be written: {error.strerror or error}") from None
    return written


def check_place(folder: str | Path, manifest: str) -> None:
    """Reject a folder that cannot be written, or an unknown platform, before the work starts."""
    one_of("manifest", manifest, PLATFORMS, SweepError)
    place = existing = Path(folder)
    while not os.path.exists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):
        raise SweepError(f"{place} cannot be written: {existing} is not a folder")
    check_file_place(existing / ROWS, str(place), SweepError)


def _write_rows(rows: list[dict[str, Any]], place: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    from fastroof._version import __version__
    from fastroof.arrow import arrow_schema
    from fastroof.columns import guarded_columns
    from fastroof.parquet import write_parquet
    from fastroof.sweep.deployments.columns import columns_of

    columns = columns_of("energy" if "joules_per_token" in rows[0] else "") if rows else columns_of("")
    table = pa.Table.from_pylist(rows, schema=arrow_schema(columns, {"fastroof_version": __version__}))
    parquet, text = place / ROWS, place / "deployments.csv"
    with whole_file(parquet) as unfinished:
        write_parquet(table, unfinished)
    with whole_file(text) as unfinished:
        pacsv.write_csv(guarded_columns(table), unfinished)
    return [parquet, text]


def _files(deployment: Deployment, manifest: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for role, command in deployment.commands.items():
        if command.config:
            files[command.config_name] = yaml_text(command.config)
        files[_script_name(role)] = _start_script(deployment, role, command)
    placement = deployment.placement
    if len(placement) > 1 and all(copy.address.host == LOOPBACK for copy in placement):
        files["start-all.sh"] = _start_all(deployment)
    if deployment.benchmark is not None:
        comments = [_measures(deployment), _expected(deployment)]
        if (engine := deployment.engine) is not None:
            comments.append(f"Arguments are those of {engine.title} {engine.release}.")
        url = next(value for name, *value in deployment.benchmark.arguments if name == "--base-url")[0]
        files["benchmark.sh"] = _script(
            comments, deployment.benchmark.shell(raw={"--base-url": f'"${{1:-{url}}}"'})
        )
    return files | PLATFORMS[manifest](deployment)


def _script_name(role: str) -> str:
    return "start.sh" if role == "server" else f"start-{role}.sh"


def _measures(deployment: Deployment) -> str:
    row = deployment.row
    share, of = f"{deployment.benchmark_clients}", f"{row['clients']:,.0f} clients"
    if deployment.benchmark_rate:
        share, of = f"{deployment.benchmark_rate:.4g}", f"{row['requests_per_s']:,.4g} requests/s"
    if not deployment.copies:
        return f"Measures all workers through the router with all {of}."
    return f"Measures one replica with {share} of the {of}."


def _expected(deployment: Deployment) -> str:
    row = deployment.row
    times = [f"mean TTFT {row['ttft_ms']:.4g} ms"]
    if row["tpot_ms"] is not None:
        times.append(f"mean TPOT {row['tpot_ms']:.4g} ms")
    rate = f"{row['tokens_per_s'] / max(deployment.copies, 1):,.4g} output tokens/s"
    return f"Estimated: {', '.join(times)}, {rate}{' per replica' * bool(deployment.copies)}."


def _script(comments: list[str], command: str) -> str:
    # quoted text must not start a new line in a comment
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    return "\n".join(["#!/bin/sh", *lines, "set -eu", command]) + "\n"


def _start_script(deployment: Deployment, role: str, command: Command) -> str:
    comments, before = list(deployment.notes), []
    raw = {command.config_option: f'"$here"/{shlex.quote(command.config_name)}'}
    if command.config:
        before.append('here="$(cd "$(dirname "$0")" && pwd)"')
    if GPUS_VARIABLE in command.environment:
        name, copies = _script_name(role), [copy for copy in deployment.placement if copy.role == role]
        comments.append(f"{name} N starts copy N of {len(copies)}, from 0, with its GPUs and ports.")
        before.append('case "${1:-0}" in')
        for copy in copies:
            side = f" {copy.address.side_port}" if copy.address.side_port else ""
            place = f"{','.join(map(str, copy.gpus))} {copy.address.port}{side}"
            before.append(f"{copy.number}) set -- {place} ;; # on {copy.address.host}")
        before += [f'*) echo "{name}: copies are 0 to {len(copies) - 1}, got $1" >&2; exit 2 ;;', "esac"]
        raw |= {GPUS_VARIABLE: '"$1"', "--port": '"$2"', **dict.fromkeys(SIDE_PORTS, '"$3"')}
        if copies[0].address.host != LOOPBACK:
            raw[SIDE_HOST] = '"$(hostname -I | cut -d " " -f 1)"'
    start = "exec env" if command.environment else "exec"
    return _script(comments, "\n".join([*before, f"{start} {command.shell(raw=raw)}"]))


def _start_all(deployment: Deployment) -> str:
    """Return the script that starts all copies and the router on one machine."""
    starts = [f"./{_script_name(copy.role)} {copy.number}" for copy in deployment.placement]
    if deployment.router is not None:
        starts.append(f"./{_script_name('router')}")
    lines = ['cd "$(dirname "$0")"', 'started=""', "trap 'kill $started 2>/dev/null || true' EXIT"]
    lines += ["trap 'exit 1' INT TERM", *(f'{start} & started="$started $!"' for start in starts), "wait"]
    return _script(["Starts everything on this machine, and ends it together."], "\n".join(lines))
