"""GPU readings once a second, taken outside the ranks through NVML: power, clock, temperature, memory, throttling, guests.

A device that doesn't support a reading has no such key; a host without NVML has no readings at all, and nothing runs there.
Imports no torch: it lives in the supervisor.
"""

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

GIB = 2**30
PERIOD_SECONDS = 1.0
FILE = "telemetry.json"
#: clock event reasons that mean less speed than the clocks allow (nvml.h, nvmlClocksEventReason*); idle, application
#: clocks and display settings are no throttling
THROTTLE = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
#: memory that the driver itself holds on an empty device, seen up to 0.6 GiB
DRIVER_GIB = 1.0


@dataclass
class Guest:
    """Another's process on a device of ours. pid 0: seen only by the memory it holds (another container)."""

    gpu: int
    pid: int
    name: str
    memory_gib: Optional[float]


@dataclass
class Gpu:
    """One device: NVML handle and what was seen since the point began."""

    handle: Any
    readings: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    before_gib: Optional[float] = None


class Telemetry:
    """Samples the given devices while a point runs. With no device, or without NVML, every method is a no-op."""

    def __init__(self, uuids: list[str]) -> None:
        self.gpus: list[Gpu] = []
        self.used: list[Gpu] = []  # by the point that runs: the first ones, as ranks take them
        self.nvml: Any = None
        self.thread: Optional[threading.Thread] = None
        self.reasons: set[str] = set()
        self.guests: dict[tuple[int, int], Guest] = {}
        self.samples = 0
        if not uuids:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self.gpus = [Gpu(pynvml.nvmlDeviceGetHandleByUUID(u)) for u in uuids]
            self.nvml = pynvml
        except Exception:  # no driver library, or a container without NVML: the keys are simply absent
            self.gpus = []

    def begin(self, scratch: Path, pids: Callable[[], set[int]], devices: int) -> None:
        """Start sampling `devices` devices for a point, before its ranks start. `pids`: this point's processes so far."""
        if not self.gpus:
            return
        self.scratch, self.pids, self.used = scratch, pids, self.gpus[:devices]
        self.reasons, self.guests, self.samples = set(), {}, 0
        for index, gpu in enumerate(self.used):
            gpu.readings.clear()
            gpu.before_gib = self._memory(gpu)
            self._processes(index, gpu, ours=set(), expected=0)
            if gpu.before_gib is not None and gpu.before_gib > DRIVER_GIB and not self._guests_on(index):
                self.guests[index, 0] = Guest(index, 0, "unknown (another container?)", gpu.before_gib)
        self.wake = threading.Event()
        self.thread = threading.Thread(target=self._loop, daemon=True, name="telemetry")
        self.thread.start()

    def end(self) -> dict[str, Any]:
        """Stop sampling; the point's summary, {} without devices."""
        if self.thread is None:
            return {}
        self.wake.set()
        self.thread.join()
        self.thread = None
        return {
            "samples": self.samples,
            "period_s": PERIOD_SECONDS,
            "gpus": [_digest(g) for g in self.used],
            "throttle_reasons": sorted(self.reasons),
            "foreign_processes": [vars(g) for g in self.guests.values()],
        }

    def foreign(self, index: int) -> list[Guest]:
        """Other processes seen on device `index` since `begin`."""
        return self._guests_on(index)

    def _guests_on(self, index: int) -> list[Guest]:
        return [g for (gpu, _), g in self.guests.items() if gpu == index]

    def _loop(self) -> None:
        while not self.wake.wait(PERIOD_SECONDS):
            self._sample()

    def _sample(self) -> None:
        ours = self.pids()
        now: dict[str, list[float]] = defaultdict(list)
        throttled = []
        for index, gpu in enumerate(self.used):
            values = self._read(gpu)
            bits = values.pop("throttle_bits", None)
            for key, value in values.items():
                gpu.readings[key].append(value)
                now[key].append(value)
            if bits is not None:
                names = {name for bit, name in THROTTLE.items() if int(bits) & bit}
                self.reasons |= names
                throttled.append(bool(names))
            self._processes(index, gpu, ours, expected=1)
        self.samples += 1
        line: dict[str, float] = {}
        for key, pick in (("power_w", sum), ("sm_clock_mhz", min), ("temperature_c", max)):
            if now[key]:
                line[f"gpu/{key}"] = pick(now[key])
        if throttled:
            line["gpu/throttle"] = sum(throttled)
        temp = self.scratch / f".{FILE}"
        try:
            temp.write_text(json.dumps(line))
            temp.replace(self.scratch / FILE)
        except OSError:  # the temporary directory is full or the point has just ended: one sample less
            pass

    def _try(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # NVMLError_NotSupported and its kin: the device has no such reading
            return None

    def _memory(self, gpu: Gpu) -> Optional[float]:
        info = self._try(lambda: self.nvml.nvmlDeviceGetMemoryInfo(gpu.handle))
        return None if info is None else info.used / GIB

    def _read(self, gpu: Gpu) -> dict[str, float]:
        n, h = self.nvml, gpu.handle
        new, old = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        events = getattr(n, new if hasattr(n, new) else old)  # renamed in NVML 12.2
        power = self._try(lambda: n.nvmlDeviceGetPowerUsage(h))
        found = {
            "power_w": None if power is None else power / 1000,
            "sm_clock_mhz": self._try(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
            "temperature_c": self._try(lambda: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
            "memory_used_gib": self._memory(gpu),
            "throttle_bits": self._try(lambda: events(h)),
        }
        return {k: float(v) for k, v in found.items() if v is not None and math.isfinite(v)}

    def _processes(self, index: int, gpu: Gpu, ours: set[int], expected: int) -> None:
        """Note processes on the device that are not ours.

        NVML may report the host's process ids, which mean nothing in a container; then all that counts is how many more
        there are than our own one a device.
        """
        listed = self._try(lambda: self.nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)) or []
        others = [p for p in listed if p.pid not in ours]
        if ours and len(others) == len(listed):  # none of ours is listed: not started yet, or other process ids
            others = others[expected:] if not any(_exists(p.pid) for p in others) else others
        for p in others:
            if p.pid in ours or (index, p.pid) in self.guests:
                continue
            used = None if p.usedGpuMemory is None else p.usedGpuMemory / GIB
            self.guests[index, p.pid] = Guest(index, p.pid, _name(p.pid), used)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "unknown"


def _digest(gpu: Gpu) -> dict[str, float]:
    """Mean and the extreme that matters of each reading."""
    out: dict[str, float] = {}
    for key, values in gpu.readings.items():
        extreme, name = (min(values), "min") if key == "sm_clock_mhz" else (max(values), "max")
        out |= {f"{key}_mean": sum(values) / len(values), f"{key}_{name}": extreme}
    if gpu.before_gib is not None:
        out["memory_before_gib"] = gpu.before_gib
    return out


class Reader:
    """A rank's view: the newest sample as metric keys, {} while there is none."""

    def __init__(self, scratch: Path) -> None:
        self.path = scratch / FILE
        self.stamp = 0
        self.line: dict[str, float] = {}

    def __call__(self, step: int) -> dict[str, float]:
        """Keys for the line of `step`: one stat call unless there is a new sample."""
        try:
            stamp = self.path.stat().st_mtime_ns
            if stamp != self.stamp:
                self.line, self.stamp = json.loads(self.path.read_text()), stamp
        except (OSError, ValueError):
            pass
        return self.line
