"""Log of a card's clocks and power while sections run, by `nvidia-smi`.

Products of large steps may be bound by the power limit, which lowers the clock, and not by their kernel. A section's
summary tells which.
"""

import shutil
import subprocess
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

QUERY = "timestamp,clocks.sm,power.draw,clocks_event_reasons.active"
PERIOD_MS = 200
BUSY_W = 250.0  # samples below are from pauses: loading, compiling
REASONS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class ClockLog:
    """Log of card 0 in a file, from construction until `close`. Does nothing where `nvidia-smi` is missing."""

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, None
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "-i", "0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
            with path.open("w") as file:
                self._process = subprocess.Popen([*command, f"-lms={PERIOD_MS}"], stdout=file)

    def summary(self, began: float) -> dict[str, Any]:
        """Return what the card did since `began` (time.time()); empty without samples under load."""
        text = self._path.read_text() if self._process is not None else ""
        return summarize(text, began)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def summarize(text: str, began: float) -> dict[str, Any]:
    """Summarize lines of `nvidia-smi` from `began` on, without those of pauses: MHz, watts, and what lowered the clock
    in which share of the samples."""
    clocks, watts, active = list[float](), list[float](), list[int]()
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        try:
            at = time.mktime(datetime.strptime(fields[0], "%Y/%m/%d %H:%M:%S.%f").timetuple())
            clock, power, reasons = float(fields[1]), float(fields[2]), int(fields[3], 16)
        except (ValueError, IndexError):  # a line that is being written, or "[N/A]"
            continue
        if at + 1 > began and power >= BUSY_W:
            clocks.append(clock)
            watts.append(power)
            active.append(reasons)
    if not clocks:
        return {}
    shares = {name: sum(bool(each & bit) for each in active) / len(active) for bit, name in REASONS.items()}
    return {
        "sm_mhz": {"median": median(clocks), "min": min(clocks)},
        "watts": {"median": median(watts), "max": max(watts)},
        "lowered_by": {name: share for name, share in shares.items() if share},
    }
