"""`cuda` without an index: some calls of torch refuse such a device, so its index is resolved once."""

import pytest
import torch
from torch._utils import _get_device_index

from pipeline.doctor.check import Setup
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup import resolve as resolve_module
from pipeline.engine.startup.batch_limits import CPU_LIMITS
from pipeline.engine.startup.resolve import resolve
from pipeline.errors import ConfigError
from pipeline.machine.device import find_device
from pipeline.model.config import read_config
from tests.model_folders import Family, make_family


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fake torch.cuda with two GPUs, the second current; return the list of indices that `set_device` selects.

    The fake looks up the index as torch does: a device without one is refused.
    """
    selected: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append(_get_device_index(device)))
    return selected


@pytest.mark.parametrize(("name", "index"), [("cuda", 1), ("auto", 1), ("cuda:0", 0)])
def test_every_way_to_a_gpu_has_its_index(
    name: str, index: int, two_gpus: list[int], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "_default_limits", lambda *_: CPU_LIMITS)
    folder = make_family(tmp_path, Family("llama3", "llama"), seed=1)
    resolved = resolve(EngineConfig(str(folder), device=name), read_config(folder))
    for device in (resolved.device, Setup(engine=EngineConfig("", device=name)).torch_device, find_device(name)):
        torch.cuda.set_device(device)
    assert two_gpus == [index] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [("cuda:2", "torch sees 2 CUDA devices, cuda:0 to cuda:1"), ("gpu", "expected auto, cpu"), ("meta", "expected")],
)
def test_what_is_no_device_is_refused(name: str, message: str, two_gpus: list[int]) -> None:
    with pytest.raises(ConfigError, match=message):
        find_device(name)


def test_cuda_without_a_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="sees no CUDA device; use cpu or auto"):
        find_device("cuda")
    assert find_device("auto") == torch.device("cpu")
