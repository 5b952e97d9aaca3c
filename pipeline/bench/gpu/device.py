"""The device that the GPU benchmark runs on: whether it is there, what it is, and how much memory it has."""

import torch

from pipeline.bench.measure import machine_facts
from pipeline.engine.startup.memory import free_cpu_bytes
from pipeline.errors import ConfigError
from pipeline.machine.host import package_versions


def memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(free_cpu_bytes())


def find_device(name: str, is_smoke: bool) -> torch.device:
    """The device, which is the current one from now on. Raises as `require_device`."""
    device = require_device(name, is_smoke)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def require_device(name: str, is_smoke: bool) -> torch.device:
    """Takes nothing of the card. Raises ConfigError where there is none, or it is a processor and not to see that
    everything runs."""
    if name == "cpu":
        if not is_smoke:
            raise ConfigError(
                "--device cpu: only with --smoke, to see that everything runs; `pipeline bench engine` measures "
                "processors"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name}: this needs an NVIDIA GPU and torch {torch.__version__} sees none, so nothing was "
            "measured. `--device cpu --smoke` runs every section on the processor, to see that they work"
        )
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name}: expected cuda, cuda:N or cpu") from None


def device_facts(device: torch.device) -> dict[str, str]:
    facts = machine_facts() | package_versions(("triton", "vllm"))
    if device.type != "cuda":
        return {"card": "none: run on the processor, to see that it works"} | facts
    card = torch.cuda.get_device_properties(device)
    return {
        "card": card.name,
        "card memory": f"{card.total_memory / 1e9:.1f} GB",
        "compute capability": f"{card.major}.{card.minor}",
        "multiprocessors": str(card.multi_processor_count),
        "cuda": str(torch.version.cuda),
    } | facts
