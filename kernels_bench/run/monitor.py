"""Reads the device's state, read only: no clock, power or persistence setting is touched."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

from fastroof.units import US_PER_S
from kernels_bench.protocol import DeviceState, Monitor

SMI_EVERY_S: Final = 2.0
"""nvidia-smi takes about 50 ms to start, so it is called this often and not after every point."""
_MILLI: Final = 1e-3
_MICRO: Final = 1e-6
_SAMPLES: Final = "accumulation_counter"
_AMD_LIMITS: Final = {"ppt": 0x04, "prochot": 0x08, "socket_thm": 0x40, "vr_thm": 0x40, "hbm_thm": 0x40}
"""What holds an AMD GPU's clocks back, and NVML's bit for the like."""
_SMI_STATE: Final = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
_SMI_FACTS: Final = {
    "gpu_name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "power_limit_w": "enforced.power.limit",
    "max_sm_clock_mhz": "clocks.max.sm",
    "vbios": "vbios_version",
}


def visible_device(environment: Mapping[str, str] | None = None) -> str:
    """Return the GPU that torch's device 0 is: an index or a UUID; HIP has a variable too.

    >>> visible_device({"CUDA_VISIBLE_DEVICES": "3,1"})
    '3'
    >>> visible_device({})
    '0'
    """
    environment = os.environ if environment is None else environment
    named = (environment.get(f"{name}_VISIBLE_DEVICES", "") for name in ("HIP", "CUDA"))
    return next(filter(None, (value.split(",")[0].strip() for value in named)), "0")


def open_monitor(device: str | None = None) -> Monitor:
    """Open the best monitor there is: NVML through pynvml, nvidia-smi, AMD SMI, or none."""
    device = visible_device() if device is None else device
    with contextlib.suppress(Exception):  # no library, no driver, no such GPU: the next one may work
        return NvmlMonitor(importlib.import_module("pynvml"), device)
    path = shutil.which("nvidia-smi")
    if path is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            return SmiMonitor(device, path)
    with contextlib.suppress(Exception):
        return AmdMonitor(importlib.import_module("amdsmi"), device)
    return HostMonitor(is_device=False)


class NvmlMonitor:
    """Queries NVML."""

    def __init__(self, nvml: Any, device: str = "0") -> None:
        nvml.nvmlInit()
        self._nvml = nvml
        if device.isdecimal():
            self._handle = nvml.nvmlDeviceGetHandleByIndex(int(device))
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(device)

    def read(self) -> DeviceState:
        """Clock, power, temperature and throttle reasons now; NaN if the GPU does not report it."""
        nvml, handle = self._nvml, self._handle
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return DeviceState(
            sm_clock_mhz=_number(self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)),
            power_w=_number(self._ask("nvmlDeviceGetPowerUsage", handle)) * _MILLI,
            temperature_c=_number(self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=int(reasons or 0),
        )

    def power_limited_us(self) -> float:
        """NVML's counter of power violations, ns; NaN if the GPU does not report it."""
        status = self._ask("nvmlDeviceGetViolationStatus", self._handle, self._nvml.NVML_PERF_POLICY_POWER)
        return _number(getattr(status, "violationTime", None)) * _MILLI

    def facts(self) -> Mapping[str, Any]:
        """GPU name, driver, power cap, memory; absent if the GPU does not report it."""
        handle = self._handle
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        limit_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        default_mw = self._ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2") or self._ask("nvmlSystemGetCudaDriverVersion")
        facts = {
            "monitor": "nvml",
            "gpu_name": _text(self._ask("nvmlDeviceGetName", handle)),
            "uuid": _text(self._ask("nvmlDeviceGetUUID", handle)),
            "driver": _text(self._ask("nvmlSystemGetDriverVersion")),
            "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "vbios": _text(self._ask("nvmlDeviceGetVbiosVersion", handle)),
            "memory_bytes": None if memory is None else int(memory.total),
            "memory_free_bytes": None if memory is None else int(memory.free),
            "power_limit_w": None if limit_mw is None else limit_mw * _MILLI,
            "power_default_w": None if default_mw is None else default_mw * _MILLI,
            "max_sm_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", handle, self._nvml.NVML_CLOCK_SM),
        }
        return {name: value for name, value in facts.items() if value not in (None, "")}

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer, None where this driver or card has none."""
        function = getattr(self._nvml, question, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


class SmiMonitor(Monitor):
    """Queries nvidia-smi, if pynvml is not installed."""

    def __init__(
        self, device: str = "0", path: str = "nvidia-smi", seconds: Callable[[], float] = monotonic
    ) -> None:
        self._command = [path, "-i", device, "--format=csv,noheader,nounits"]
        self._seconds = seconds
        self._requested_at: float | None = None
        self._facts = self._query(tuple(_SMI_FACTS.values()))

    def read(self) -> DeviceState:
        """State now; NaN between two questions, since an old state is not this point's."""
        now = self._seconds()
        if self._requested_at is not None and now - self._requested_at < SMI_EVERY_S:
            return DeviceState()
        self._requested_at = now
        try:
            answer = self._query(_SMI_STATE)
        except (OSError, subprocess.SubprocessError, ValueError):
            return DeviceState()
        clock, power, temperature = (_number(answer[name]) for name in _SMI_STATE[:3])
        reasons = answer[_SMI_STATE[3]]
        known = reasons.startswith("0x")
        return DeviceState(clock, power, temperature, int(reasons, 16) if known else 0)

    def facts(self) -> Mapping[str, Any]:
        """GPU name, driver, power cap, memory; absent if the GPU does not report it."""
        facts: dict[str, Any] = {"monitor": "nvidia-smi"}
        for name, question in _SMI_FACTS.items():
            answer = self._facts[question]
            if answer.startswith("["):  # "[N/A]", "[Not Supported]"
                continue
            facts[name] = float(answer) if name.endswith(("_w", "_mhz", "_mib")) else answer
        return facts

    def _query(self, questions: tuple[str, ...]) -> dict[str, str]:
        command = [*self._command, f"--query-gpu={','.join(questions)}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        answers = [cell.strip() for cell in done.stdout.strip().splitlines()[0].split(",")]
        return dict(zip(questions, answers, strict=True))


class AmdMonitor:
    """Queries AMD SMI. Written by reading ``amdsmi`` 7.0.2; never run on a card."""

    def __init__(self, smi: Any, device: str = "0", seconds: Callable[[], float] = monotonic) -> None:
        smi.amdsmi_init()
        self._smi, self._seconds = smi, seconds
        handles = smi.amdsmi_get_processor_handles()
        # AMD SMI lists GPUs in the order of their bus, HIP in its own.
        name = "hip_id" if device.isdecimal() else "hip_uuid"
        names = [str(smi.amdsmi_get_gpu_enumeration_info(handle)[name]) for handle in handles]
        self._handle = handles[names.index(device)]
        self._seen, self._seen_s, self._limited_us = self._counts(self._metrics()), seconds(), 0.0

    def read(self) -> DeviceState:
        """Clock of the slowest die, power, temperature; by NVML's bits what held clocks back lately."""
        metrics = self._metrics()
        clocks = [float(clock) for clock in metrics.get("current_gfxclks", ()) if _number(clock) > 0]
        power_w = [_number(metrics.get(f"{name}_socket_power")) for name in ("current", "average")]
        return DeviceState(
            sm_clock_mhz=min(clocks, default=_number(metrics.get("current_gfxclk"))),
            power_w=power_w[0] if power_w[0] == power_w[0] else power_w[1],
            temperature_c=_number(metrics.get("temperature_hotspot")),
            throttle_reasons=self._count(metrics),
        )

    def power_limited_us(self) -> float:
        """Time in which the firmware's samples are at the power limit; NaN if the GPU does not report it."""
        self._count(self._metrics())
        return self._limited_us

    def _count(self, metrics: Mapping[str, Any]) -> int:
        """Add what counters grew by since they were last read; return the bits of those that grew."""
        now, now_s = self._counts(metrics), self._seconds()
        grown = {name: now[name] - self._seen[name] for name in now}
        samples = grown.pop(_SAMPLES)
        if samples != 0:  # NaN included
            self._limited_us += grown["ppt"] / samples * (now_s - self._seen_s) * US_PER_S
            self._seen, self._seen_s = now, now_s
        return sum({_AMD_LIMITS[name] for name, more in grown.items() if more > 0})

    @staticmethod
    def _counts(metrics: Mapping[str, Any]) -> dict[str, float]:
        limits = {name: _number(metrics.get(f"{name}_residency_acc")) for name in _AMD_LIMITS}
        return {_SAMPLES: _number(metrics.get(_SAMPLES)), **limits}

    def facts(self) -> Mapping[str, Any]:
        """GPU name, driver, power cap, memory; absent if the GPU does not report it."""
        asic, cap = self._ask("gpu_asic_info"), self._ask("power_cap_info")
        memory = self._ask("gpu_vram_usage")
        facts = {
            "monitor": "amdsmi",
            "gpu_name": str(asic.get("market_name", "")).removesuffix(" OAM"),
            "uuid": self._ask("gpu_enumeration_info").get("hip_uuid"),
            "driver": self._ask("gpu_driver_info").get("driver_version"),
            "vbios": self._ask("gpu_vbios_info").get("version"),
            "memory_bytes": memory and memory["vram_total"] * 2**20,
            "memory_free_bytes": memory and (memory["vram_total"] - memory["vram_used"]) * 2**20,
            "power_limit_w": cap and cap["power_cap"] * _MICRO,
            "power_default_w": cap and cap["default_power_cap"] * _MICRO,
            "max_sm_clock_mhz": self._ask("clock_info", self._smi.AmdSmiClkType.GFX).get("max_clk"),
        }
        return {name: value for name, value in facts.items() if value not in (None, "", "N/A", {})}

    def _metrics(self) -> Mapping[str, Any]:
        return self._ask("gpu_metrics_info")

    def _ask(self, what: str, *arguments: Any) -> Mapping[str, Any]:
        """Return the answer, empty where this driver or card has none."""
        try:
            answer: Mapping[str, Any] = getattr(self._smi, f"amdsmi_get_{what}")(self._handle, *arguments)
        except self._smi.AmdSmiException:
            return {}
        return answer


class HostMonitor(Monitor):
    """Knows the host only: for the cpu provider, and where no GPU can be queried."""

    def __init__(self, is_device: bool = True) -> None:
        self._is_device = is_device

    def read(self) -> DeviceState:
        """Nothing: a host's cores have different clocks."""
        return DeviceState()

    def facts(self) -> Mapping[str, Any]:
        """State whether a CPU is measured instead of a GPU."""
        if not self._is_device:
            wanted = "pynvml or nvidia-smi, or on AMD pip install amdsmi, of the driver's ROCm release"
            return {"monitor": f"none answers here: need {wanted}"}
        return {
            "monitor": "none",
            "device": "cpu",
            "gpu_name": f"no GPU: {_cpu_model()}",
            "num_cores": os.cpu_count() or 1,
        }


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
