"""Copies between the host and the device that do not wait for what the device is doing."""

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`: the same memory on a CPU, else a copy that is queued after the device's work.

    A copy from ordinary memory would first wait until the device has nothing left to do. torch keeps the pinned memory
    until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory that is queued after the device's work; of a CPU's tensor, the tensor itself."""
    return tensor.to("cpu", non_blocking=True)


def staging_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 memory on the host, pinned where a GPU copies from it. torch keeps it until its copy is done."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
