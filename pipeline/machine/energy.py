"""How much energy an engine's device has used, by the device's own counter: NVML's of a GPU, RAPL's of processors.

RAPL counts processor packages whole, without memory and boards: an engine on some of the cores gets that share of it.
Counters wrap around, so that they have to be read every few minutes. Where a machine tells nothing (virtual machines,
RAPL without the right to read it) there is no meter.

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
    """counters: each a function that gives microjoules, and where it wraps around (0: nowhere). share: of them, which
    is the engine's. told: what is measured, for people."""

    def __init__(self, counters: list[tuple[Callable[[], int], int]], share: Fraction, told: str) -> None:
        self._counters, self._share, self.told = counters, share, told
        self._last = [read() for read, _ in counters]
        self._used_uj = 0

    def read_uj(self) -> int:
        """Microjoules since the meter was made. Where a counter cannot be read any more, it stands still."""
        with suppress(OSError, ValueError):
            now = [read() for read, _ in self._counters]
            for i, (last, (_, wraps_at)) in enumerate(zip(self._last, self._counters)):
                grown = now[i] - last
                self._used_uj += grown if grown >= 0 else grown + wraps_at
            self._last = now
        return int(self._used_uj * self._share)

    @classmethod
    def of(cls, resolved: Mapping[str, str | int]) -> Self | None:
        """Of the device of an engine that resolved to this; None where it has no counter that can be read."""
        device = str(resolved.get("device", "cpu"))
        with suppress(OSError, ValueError, ImportError):  # pynvml is not on every image
            if device.startswith("cuda"):
                counter = _nvml_counter(device)
                return None if counter is None else cls([(counter, 0)], Fraction(1), "NVML, the whole card")
            packages = _rapl_counters(POWERCAP)
            cores, all_cores = int(resolved.get("num_threads", 0)), os.cpu_count() or 1
            if packages and cores:
                share = min(Fraction(cores, all_cores), Fraction(1))
                return cls(packages, share, f"RAPL, {cores} of {all_cores} cores' share of the processors")
        return None


def _rapl_counters(folder: Path) -> list[tuple[Callable[[], int], int]]:
    """Of all processor packages. Raises OSError where they must not be read."""
    found = []
    for zone in sorted(folder.glob("intel-rapl:*")):  # AMD's too
        if (zone / "name").read_text().strip().startswith("package"):
            wraps_at = int((zone / "max_energy_range_uj").read_text()) + 1
            found.append((_reader(zone / "energy_uj"), wraps_at))
    for read, _ in found:
        read()
    return found


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text())


def _nvml_counter(device: str) -> Callable[[], int] | None:
    """Of the card that torch knows by this name; None where the driver does not count."""
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
