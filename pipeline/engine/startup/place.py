"""Where an engine computes: on which CUDA device, and with how many CPU threads.

Both are settings of torch for everybody in the process. Several engines and their caller may want other ones, so an
engine sets its own while it computes.
"""

import os

import torch

from pipeline.errors import ConfigError


class Place:
    """A context manager: inside, torch has the engine's settings, and afterwards those of before. It may be entered
    again inside. Takes about half a microsecond on a CPU."""

    def __init__(self, num_threads: int | None, device: torch.device) -> None:
        """num_threads: None leaves those of the caller. A `device` without a number is the current one from now on.

        Raises ConfigError for less than one thread.
        """
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads = {num_threads}: expected at least 1")
        self._num_threads = None if num_threads is None else min(num_threads, os.cpu_count() or 1)
        self._cuda: int | None = None
        if device.type == "cuda":
            self._cuda = torch.cuda.current_device() if device.index is None else device.index
        self._before: list[tuple[int, torch.cuda.device | None]] = []

    @property
    def num_threads(self) -> int:
        return self._num_threads or torch.get_num_threads()

    def __enter__(self) -> None:
        before = torch.get_num_threads()
        if self._num_threads is not None and self._num_threads != before:
            torch.set_num_threads(self._num_threads)
        on_device = None
        if self._cuda is not None:
            on_device = torch.cuda.device(self._cuda)  # Triton launches on the current device, and events record there
            on_device.__enter__()
        self._before.append((before, on_device))

    def __exit__(self, *_: object) -> None:
        before, on_device = self._before.pop()
        if on_device is not None:
            on_device.__exit__(None, None, None)
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
