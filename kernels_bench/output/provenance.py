"""Provenance of tables: where, when, with what and how steadily they were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Array
from fastroof.checks import is_number, is_whole_number, shown
from fastroof.config.gpu import load_gpu
from fastroof.errors import GpuError, MeasureError
from kernels_bench.output.recorded import Recorded, Run
from kernels_bench.sentinels import repeatability

Columns = Mapping[str, Array]

THROTTLE_REASONS: Final = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, as NVML's reference names them."""
HARMLESS_THROTTLES: Final = ("gpu_idle", "applications_clocks_setting", "display_clock_setting")
MOST_REASONS: Final = 20
"""Reasons often hold sizes; beyond so many different ones of a kind the rest are counted together."""
_DEVICE_STATE: Final = ("sm_clock_mhz", "power_w", "temperature_c", "power_limited_us")


def recorded_gpu(recorded: Recorded) -> str:
    """Return the one GPU that the runs measured, by fastroof's name where it has one."""
    names = list(dict.fromkeys(_canonical(gpu) for gpu in recorded.gpus))
    if len(names) > 1:
        raise MeasureError(f"the journals are of several GPUs, {', '.join(names)}: one table holds one GPU")
    return names[0]


def _canonical(gpu: str) -> str:
    try:
        return load_gpu(gpu).name
    except GpuError:
        return gpu


def provenance_of(
    recorded: Recorded, tables: Mapping[str, Columns], left_out: Mapping[str, str], rank: int | None = None
) -> dict[str, Any]:
    """Return the content of provenance.toml."""
    provenance: dict[str, Any] = {
        "gpu": recorded_gpu(recorded),
        "name": "kernels_bench",
        "tool": f"kernels_bench {__version__}",
    }
    if rank is not None:
        provenance["rank"] = rank
    lines = recorded.rows.values()
    provenance["rows"] = sum(len(columns["latency_us"]) for columns in tables.values())
    provenance["measured_again"] = sum(bool(line.get("remeasured")) for line in lines)
    repeats = [r for run in recorded.runs for r in repeatability(run.name, run.sentinels)]
    provenance["sentinels"] = [asdict(repeat) for repeat in repeats]
    if left_out:
        provenance["left_out"] = dict(left_out)
    provenance["device"] = _device(lines)
    skipped = Counter(str(line.get("operator")) for line in recorded.skips.values())
    provenance["operators"] = {
        operator: {
            "rows": len(columns["latency_us"]),
            "skipped": skipped[operator],
            "providers": sorted(set(columns["provider"].tolist())),
            "kernels": sorted(set(columns["kernel"].tolist())),
        }
        for operator, columns in tables.items()
    }
    provenance["skips"] = _skips(recorded.skips.values())
    provenance["runs"] = {run.name: _run(run) for run in recorded.runs}
    plain: dict[str, Any] = _plain(provenance)
    return plain


def of_engine(provenance: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return provenance that names the engine whose kernels were measured, and its version.

    ``vllm`` takes the version that all runs record, ``vllm-0.26.0`` is for runs that record none.
    """
    name, _, version = engine.partition("-")
    recorded = {str(run.get("versions", {}).get(name, version)) for run in _runs(provenance)}
    if len(recorded) != 1 or "" in recorded or version not in {"", *recorded}:
        found = ", ".join(sorted(one for one in recorded if one)) or "none"
        raise MeasureError(
            f"--engine {engine}: the runs must record one version of it, found {found}; "
            f"{name}-VERSION names that of runs that record none"
        )
    return {**provenance, "framework": name, "framework_version": recorded.pop()}


def _runs(provenance: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what each run's start line has, also of merged tables."""
    yield from provenance.get("runs", {}).values()
    for part in provenance.get("merged_from", []):
        yield from _runs(part)


def refuse_odd_provenance(provenance: Any) -> None:
    """Refuse a provenance.toml whose own parts are not what :func:`provenance_of` writes."""
    if not isinstance(provenance, Mapping):
        raise MeasureError(f"provenance.toml: merged_from has {shown(provenance)}, need tables")
    device = provenance.get("device", {})
    throttled = device.get("throttled_rows", {}) if isinstance(device, Mapping) else None
    skips, sentinels = provenance.get("skips", {}), provenance.get("sentinels", [])
    for name, is_right, what in (
        ("device", isinstance(device, str) or _are_counts(throttled), "throttled_rows of counts"),
        ("left_out", _are_texts(provenance.get("left_out", {})), "texts by key"),
        ("skips", isinstance(skips, Mapping) and all(map(_are_counts, skips.values())), "counts by reason"),
        ("skips", not isinstance(skips, Mapping) or all(skips.values()), "a reason of each kind"),
        ("sentinels", _are_repeats(sentinels), "a list of key, run, spread and drift"),
        ("merged_from", isinstance(provenance.get("merged_from", []), list), "tables"),
    ):
        if not is_right:
            raise MeasureError(
                f"provenance.toml: {name} is {shown(provenance.get(name))}, need {what}; "
                "kernels-bench tables and merge write it"
            )
    for part in provenance.get("merged_from", []):
        refuse_odd_provenance(part)


def _are_counts(given: Any) -> bool:
    return isinstance(given, Mapping) and all(is_whole_number(count, 0) for count in given.values())


def _are_texts(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(text, str) for text in given.values())


def _are_repeats(given: Any) -> bool:
    return isinstance(given, list) and all(
        isinstance(one, Mapping)
        and all(isinstance(one.get(name), str) for name in ("key", "run"))
        and all(is_number(one.get(name)) for name in ("spread", "drift"))
        for one in given
    )


def _run(run: Run) -> dict[str, Any]:
    facts = {name: value for name, value in run.start.items() if name != "type"}
    ended = {name: v for name, v in run.end.items() if name != "type" and run.start.get(name) != v}
    return {**facts, "rows": run.rows, "finished": bool(run.end), **({"end": ended} if ended else {})}


def _device(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    lines = list(lines)
    device: dict[str, Any] = {}
    for name in _DEVICE_STATE:
        values = [v for line in lines if isinstance(v := line.get(name), int | float) and math.isfinite(v)]
        if values:
            device[name] = {"min": min(values), "median": float(np.median(values)), "max": max(values)}
    throttled: Counter[str] = Counter()
    for line in lines:
        bits = int(line.get("throttle_reasons") or 0)
        throttled.update(word for bit, word in THROTTLE_REASONS.items() if bits & bit)
    return {**device, "throttled_rows": dict(sorted(throttled.items()))}


def _skips(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Count points without a row by kind, then by reason."""
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        kind = str(line.get("kind", "error"))
        counts.setdefault(kind, Counter())[str(line.get("reason", "no reason given"))] += 1
    by_kind = {}
    for kind, reasons in sorted(counts.items()):
        common = dict(reasons.most_common(MOST_REASONS))
        rest = reasons.total() - sum(common.values())
        by_kind[kind] = common | ({"other reasons": rest} if rest else {})
    return by_kind


def _plain(value: Any) -> Any:
    """Return what TOML can hold: None is left out, other objects become text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value if v is not None]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | bool | int | float) else str(value)
