"""GPU telemetry without a GPU: no library, a device that supports nothing, and samples recorded on one."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from train.measure import telemetry
from train.measure.telemetry import GIB, Gpu, Reader, Telemetry


def test_without_a_driver_nothing_runs_and_nothing_is_said(tmp_path: Path) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pytest.skip("this host has NVIDIA's driver")
    it = Telemetry(["GPU-00000000-0000-0000-0000-000000000000"])
    before = threading.active_count()
    it.begin(tmp_path, lambda: {1}, 1)
    assert threading.active_count() == before
    assert it.end() == {} and it.foreign(0) == []
    assert Reader(tmp_path)(0) == {}


class Device:
    """Stands for NVML's module at the one boundary that needs a GPU: plays samples back; a reading that is None, or not in
    the sample, is answered as a device answers that does not support it."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples, self.at = samples, 0

    def _get(self, key: str) -> Any:
        value = self.samples[min(self.at, len(self.samples) - 1)].get(key)
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._get("power_mw")

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return self._get("sm_mhz")

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._get("celsius")

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=self._get("used"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._get("reasons")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        try:
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get("processes")]
        finally:
            self.at += 1  # the last reading of a sample


def watch(device: Device, scratch: Path, monkeypatch: pytest.MonkeyPatch, ours: set[int]) -> dict[str, Any]:
    """Telemetry over all samples of a device; the point's summary."""
    monkeypatch.setattr(telemetry, "PERIOD_SECONDS", 0.01)
    it = Telemetry([])
    it.nvml, it.gpus = device, [Gpu("handle")]
    it.begin(scratch, lambda: ours, 1)
    deadline = time.monotonic() + 10
    while (device.at < len(device.samples) or it.samples < 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    return it.end()


def test_a_device_that_supports_no_reading_has_no_such_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch(Device([{}]), tmp_path, monkeypatch, {1})
    assert found["samples"] >= 3 and found["gpus"] == [{}]
    assert found["throttle_reasons"] == [] and found["foreign_processes"] == []
    assert Reader(tmp_path)(0) == {}
    some = watch(Device([{"power_mw": 500_000, "celsius": 60}]), tmp_path, monkeypatch, {1})  # no clock, no reasons
    assert set(some["gpus"][0]) == {"power_w_mean", "power_w_max", "temperature_c_mean", "temperature_c_max"}
    assert Reader(tmp_path)(0) == {"gpu/power_w": 500.0, "gpu/temperature_c": 60.0}


def test_samples_are_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is capped by power in one sample; a process that is not ours holds memory from the second one on."""
    ours, guest = 1, 4_000_001  # no such process here: its name is unknown
    base = {"celsius": 50, "used": 40 * GIB, "reasons": 0x01, "processes": [(ours, 30 * GIB)]}
    samples = [
        base | {"power_mw": 100_000, "sm_mhz": 1980, "processes": [], "used": GIB // 2},  # before the ranks start
        base | {"power_mw": 600_000, "sm_mhz": 1980},
        base | {"power_mw": 700_000, "sm_mhz": 1200, "reasons": 0x04, "processes": [(ours, GIB), (guest, 8 * GIB)]},
    ]
    device = Device(samples)
    found = watch(device, tmp_path, monkeypatch, {ours})
    gpu = found["gpus"][0]
    assert gpu["memory_before_gib"] == 0.5
    assert gpu["power_w_max"] == 700.0 and gpu["sm_clock_mhz_min"] == 1200.0 and gpu["temperature_c_mean"] == 50.0
    assert 600 < gpu["power_w_mean"] <= 700
    assert found["throttle_reasons"] == ["sw_power_cap"]  # idle (0x01) is none
    assert found["foreign_processes"] == [{"gpu": 0, "pid": guest, "name": "unknown", "memory_gib": 8.0}]
    line = json.loads((tmp_path / telemetry.FILE).read_text())
    assert line == {"gpu/power_w": 700.0, "gpu/sm_clock_mhz": 1200.0, "gpu/temperature_c": 50.0, "gpu/throttle": 1}


def test_memory_held_from_outside_the_container_is_a_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is listed, yet 9 GiB are in use before the point's ranks start."""
    device = Device([{"used": 9 * GIB, "processes": []}])
    found = watch(device, tmp_path, monkeypatch, {1})
    assert found["foreign_processes"] == [
        {"gpu": 0, "pid": 0, "name": "unknown (another container?)", "memory_gib": 9.0}
    ]
