"""Energy that an engine's device has used, by its own counter: NVML for GPUs, RAPL for processors.

RAPL counts whole processor packages, without memory and boards; an engine on some of the cores is charged that share.
Counters wrap around, so they must be read every few minutes. Without a readable counter (virtual machines, RAPL
without permission) there is no meter.

RAPL: https://www.kernel.org/doc/html/latest/power/powercap/powercap.html. NVML: `nvmlDeviceGetTotalEnergyConsumption`,
millijoules since the driver was loaded, from Volta on.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Energy meter of one engine. counters: pairs of a function that returns microjoules and the value at which it
    wraps around (0: never). share: the engine's share of them. source: name of the counter, for reports."""

    def __init__(self, counters: list[tuple[Callable[[], int], int]], share: Fraction, source: str) -> None:
        self._counters, self._share, self.source = counters, share, source
        self._last = [read() for read, _ in counters]
        self._used_uj = 0

    def read_uj(self) -> int:
        """Return microjoules since the meter was created. The value stays the same once a counter cannot be read."""
        with suppress(OSError, ValueError):
            now = [read() for read, _ in self._counters]
            for i, (last, (_, wraps_at)) in enumerate(zip(self._last, self._counters)):
                grown = now[i] - last
                self._used_uj += grown if grown >= 0 else grown + wraps_at
            self._last = now
        return int(self._used_uj * self._share)

    @classmethod
    def from_resolved(cls, resolved: Mapping[str, str | int]) -> Self | None:
        """Create the meter of an engine with these resolved settings; None without a readable counter."""
        device = str(resolved.get("device", "cpu"))
        with suppress(OSError, ValueError, ImportError):  # pynvml is not on every image
            if device.startswith("cuda"):
                first, num_gpus = int(device.partition(":")[2] or 0), int(resolved.get("tensor_parallel_size", 1))
                counters = [_nvml_counter(f"cuda:{first + number}") for number in range(num_gpus)]
                cards = "the whole card" if num_gpus == 1 else f"{num_gpus} whole cards"
                found = [(counter, 0) for counter in counters if counter is not None]
                return cls(found, Fraction(1), f"NVML, {cards}") if len(found) == num_gpus else None
            packages = _rapl_counters(POWERCAP)
            cores, all_cores = int(resolved.get("num_threads", 0)), os.cpu_count() or 1
            if packages and cores:
                share = min(Fraction(cores, all_cores), Fraction(1))
                return cls(packages, share, f"RAPL, {cores} of {all_cores} cores' share of the processors")
        return None


def _rapl_counters(folder: Path) -> list[tuple[Callable[[], int], int]]:
    """Return a counter for each processor package. Raises OSError without permission to read them."""
    found = []
    for zone in sorted(folder.glob("intel-rapl:*")):  # AMD processors use this name too
        if (zone / "name").read_text().strip().startswith("package"):
            wraps_at = int((zone / "max_energy_range_uj").read_text()) + 1
            found.append((_reader(zone / "energy_uj"), wraps_at))
    for read, _ in found:
        read()
    return found


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text())


def _nvml_counter(device: str) -> Callable[[], int] | None:
    """Return the counter of the GPU that torch knows by this name; None if the driver has none."""
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None

    def read(handle: Any = handle) -> int:
        try:
            return 1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error

    return read
