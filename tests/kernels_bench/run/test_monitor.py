"""Monitors read what the device reports, accept missing readings, and change nothing."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels_bench
from kernels_bench.run.monitor import (
    AmdMonitor,
    HostMonitor,
    NvmlMonitor,
    SmiMonitor,
    open_monitor,
    visible_device,
)
from tests.kernels_bench.fakes import FakeNvml, NVMLError

PACKAGE = Path(kernels_bench.__file__).parent

SMI = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *clocks.sm*) echo "{state}" ;;
  *) echo "NVIDIA H100 80GB HBM3, GPU-1, 580.95.05, 81559, 700.00, 1980, [N/A]" ;;
esac
"""


def test_nvml_state_and_facts_in_our_units() -> None:
    monitor = NvmlMonitor(FakeNvml(), "0")
    state = monitor.read()
    assert (state.sm_clock_mhz, state.power_w, state.temperature_c, state.throttle_reasons) == (
        1980.0, 351.5, 44.0, 4,
    )  # fmt: skip
    assert monitor.power_limited_us() == 2500.0
    assert math.isnan(NvmlMonitor(FakeNvml(("nvmlDeviceGetViolationStatus",))).power_limited_us())
    assert math.isnan(HostMonitor().power_limited_us())
    assert monitor.facts() == {
        "monitor": "nvml",
        "gpu_name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-1",
        "driver": "580.95.05",
        "cuda_driver": "13.0",
        "vbios": "96.00",
        "memory_bytes": 80 * 2**30,
        "memory_free_bytes": 79 * 2**30,
        "power_limit_w": 700.0,
        "power_default_w": 700.0,
        "max_sm_clock_mhz": 1980,
    }


def test_unreported_readings_are_nan_or_absent() -> None:
    silent = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetMemoryInfo")
    monitor = NvmlMonitor(FakeNvml(silent))
    assert math.isnan(monitor.read().power_w)
    assert monitor.read().sm_clock_mhz == 1980.0
    assert {"vbios", "memory_bytes"}.isdisjoint(monitor.facts())


def test_older_drivers_have_other_names_for_the_reasons() -> None:
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=8)
    del nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    assert NvmlMonitor(nvml).read().throttle_reasons == 8


class FakeAmdSmi:
    """Two GPUs, in the other order than HIP's; as ``amdsmi`` 7.0.2 answers."""

    AmdSmiException = KeyError
    AmdSmiClkType = SimpleNamespace(GFX=1)

    def __init__(self, **metrics: object) -> None:
        limits = dict.fromkeys(("ppt", "prochot", "socket_thm", "vr_thm", "hbm_thm"), 5)
        clocks = [2100, 2095, *["N/A"] * 6]
        self.metrics: dict[str, object] = {
            "current_gfxclks": clocks, "current_gfxclk": 2100, "current_socket_power": 702,
            "average_socket_power": "N/A", "temperature_hotspot": 58, "accumulation_counter": 1000,
            **{f"{name}_residency_acc": count for name, count in limits.items()}, **metrics,
        }  # fmt: skip
        self.answers: dict[str, dict[str, object]] = {
            "gpu_asic_info": {"market_name": "AMD Instinct MI300X OAM"},
            "power_cap_info": {"power_cap": 750_000_000, "default_power_cap": 750_000_000},
            "gpu_vram_usage": {"vram_total": 196_592, "vram_used": 592},
            "gpu_driver_info": {"driver_version": "6.14.14"},
            "clock_info": {"max_clk": 2100},
        }

    def amdsmi_init(self) -> None:
        return None

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [7, 8]

    def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, object]:
        return {"hip_id": 8 - handle, "hip_uuid": f"GPU-{handle}"}

    def __getattr__(self, name: str) -> object:
        what = name.removeprefix("amdsmi_get_")
        if what == name:
            raise AttributeError(name)
        return lambda handle, *_: self.metrics if what == "gpu_metrics_info" else self.answers[what]


def test_amd_smi_state_and_facts_in_our_units() -> None:
    now = [0.0]
    smi = FakeAmdSmi()
    monitor = AmdMonitor(smi, "1", lambda: now[0])
    state = monitor.read()
    assert (state.sm_clock_mhz, state.power_w, state.temperature_c) == (2095.0, 702.0, 58.0)
    assert (state.throttle_reasons, monitor.power_limited_us()) == (0, 0.0)
    now[0] = 0.5
    smi.metrics |= {"accumulation_counter": 1500, "ppt_residency_acc": 130, "hbm_thm_residency_acc": 6}
    assert monitor.read().throttle_reasons == 0x44
    assert monitor.power_limited_us() == pytest.approx(125_000), "a quarter of half a second"
    assert monitor.facts() == {
        "monitor": "amdsmi", "gpu_name": "AMD Instinct MI300X", "uuid": "GPU-7", "driver": "6.14.14",
        "memory_bytes": 196_592 * 2**20, "memory_free_bytes": 196_000 * 2**20,
        "power_limit_w": pytest.approx(750.0), "power_default_w": pytest.approx(750.0),
        "max_sm_clock_mhz": 2100,
    }  # fmt: skip
    assert AmdMonitor(smi, "GPU-8")._handle == 8
    with pytest.raises(ValueError, match="not in list"):
        AmdMonitor(smi, "2")


def test_what_an_older_card_of_amd_does_not_report_is_nan() -> None:
    names = ("current_gfxclks", "accumulation_counter", "temperature_hotspot", "current_socket_power")
    smi = FakeAmdSmi(**dict.fromkeys(names, "N/A"))
    smi.metrics |= {"current_gfxclks": [], "average_socket_power": 310}
    monitor = AmdMonitor(smi)
    assert (monitor.read().sm_clock_mhz, monitor.read().power_w) == (2100.0, 310.0)
    assert math.isnan(monitor.read().temperature_c)
    assert math.isnan(monitor.power_limited_us())
    smi.metrics = {}
    smi.answers.clear()
    assert monitor.facts() == {"monitor": "amdsmi", "uuid": "GPU-8"}


def test_a_device_is_found_by_index_or_uuid() -> None:
    nvml = FakeNvml()
    NvmlMonitor(nvml, "GPU-1")
    assert nvml.calls == ["nvmlInit", "nvmlDeviceGetHandleByUUID"]


@pytest.mark.parametrize(("value", "device"), [("2,0", "2"), ("GPU-abc", "GPU-abc"), ("", "0"), (" 1 ", "1")])
def test_visible_device(value: str, device: str) -> None:
    assert visible_device({"CUDA_VISIBLE_DEVICES": value}) == device
    assert visible_device({"CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": f"{device},5"}) == device


def test_nothing_in_the_package_changes_a_setting() -> None:
    writes = re.compile(
        r"nvml\w*(Set|Reset|Clear)|amdsmi_(set|reset|clean)|--(gpu-reset|lock|persistence|power-limit|applications)|-[rp]gc"
    )
    for path in PACKAGE.rglob("*.py"):
        assert not writes.search(path.read_text()), path


def smi(tmp_path: Path, state: str) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(log=tmp_path / "log", state=state))
    program.chmod(0o755)
    return program


def test_nvidia_smi_is_queried_periodically(tmp_path: Path) -> None:
    now = [0.0]
    program = smi(tmp_path, "1755, 612.34, 61, 0x0000000000000004")
    monitor = SmiMonitor("3", str(program), lambda: now[0])
    state = monitor.read()
    assert (state.sm_clock_mhz, state.power_w, state.throttle_reasons) == (1755.0, 612.34, 4)
    assert math.isnan(monitor.read().sm_clock_mhz), "an old state was given as this point's"
    now[0] = 2.5
    assert monitor.read().sm_clock_mhz == 1755.0
    wanted = (tmp_path / "log").read_text().splitlines()
    assert len(wanted) == 3
    assert all(line.startswith("-i 3 ") and "--query-gpu=" in line for line in wanted)
    facts = monitor.facts()
    assert facts["gpu_name"] == "NVIDIA H100 80GB HBM3"
    assert facts["power_limit_w"] == 700.0
    assert "vbios" not in facts


def test_nvidia_smi_that_knows_little(tmp_path: Path) -> None:
    state = SmiMonitor("0", str(smi(tmp_path, "[N/A], [N/A], 40, [Not Supported]"))).read()
    assert math.isnan(state.power_w)
    assert (state.temperature_c, state.throttle_reasons) == (40.0, 0)


def test_the_best_monitor_that_works_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert isinstance(open_monitor(), NvmlMonitor)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(["nvmlInit"]))  # type: ignore[arg-type]
    nothing = open_monitor()
    assert isinstance(nothing, HostMonitor)
    assert math.isnan(nothing.read().sm_clock_mhz)
    assert "gpu_name" not in nothing.facts()
    assert "pip install amdsmi" in str(nothing.facts()["monitor"])
    with monkeypatch.context() as amd:
        amd.setitem(sys.modules, "amdsmi", FakeAmdSmi())  # type: ignore[arg-type]
        assert isinstance(open_monitor(), AmdMonitor)
    smi(tmp_path, "1, 1, 1, 0x0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert isinstance(open_monitor(), SmiMonitor)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert isinstance(open_monitor(), SmiMonitor)


def test_a_host_reports_that_it_has_no_gpu() -> None:
    facts = HostMonitor().facts()
    assert facts["device"] == "cpu"
    assert str(facts["gpu_name"]).startswith("no GPU: ")


def test_the_fake_refuses_to_be_set() -> None:
    with pytest.raises(AttributeError):
        FakeNvml().nvmlDeviceSetPowerManagementLimit("handle", 1)
    with pytest.raises(NVMLError):
        FakeNvml(["nvmlInit"]).nvmlInit()
