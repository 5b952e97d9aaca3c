"""The device of `engine.device`."""

import torch

from pipeline.errors import ConfigError


def find_device(name: str) -> torch.device:
    """Return the device `name`: auto, cpu, cuda or cuda:N. A GPU always has an index, since some torch calls require
    it: `torch.cuda.set_device(torch.device("cuda"))` raises ValueError.

    Raises ConfigError if torch rejects the name or finds no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device = {name!r}: expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device = {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"engine.device = {name!r}: torch {torch.__version__} sees no CUDA device; use cpu or auto")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"engine.device = {name!r}: torch sees {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return device
