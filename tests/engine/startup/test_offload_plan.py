"""`engine.cpu_offload_gb` on a GPU: the layers that it chooses, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.demo import demo_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup import resolve as resolving
from pipeline.engine.startup.memory import weight_bytes
from pipeline.errors import ConfigError
from pipeline.model.config import ModelConfig, read_config

GPU = torch.device("cuda", 0)
FOLDERS = {name: demo_model(name) for name in ("target", "target-awq")}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(resolving, "find_device", lambda name: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def resolve(name: str, gb: float, **options: int) -> tuple[ModelConfig, resolving.Resolved]:
    model = read_config(FOLDERS[name])
    return model, resolving.resolve(EngineConfig(str(FOLDERS[name]), cpu_offload_gb=gb, **options), model)


@pytest.mark.parametrize(("name", "gb", "layers"), [("target", 0.003, (0, 1, 3)), ("target-awq", 1e-3, (0, 1, 2, 3))])
def test_plan(name: str, gb: float, layers: tuple[int, ...]) -> None:
    model, resolved = resolve(name, gb)
    plan = resolved.offload
    assert plan is not None
    assert plan.layers == layers
    embeddings = (model.num_parameters() - model.num_linear_parameters()) * 2
    layer_bytes = (weight_bytes(model, GPU, torch.bfloat16, keeps_dense=False) - embeddings) / model.num_layers
    assert plan.host_bytes == pytest.approx(len(layers) * layer_bytes)
    assert plan.staging_bytes == pytest.approx(2 * layer_bytes)
    assert plan.host_bytes >= gb * 1e9


def test_off_by_default() -> None:
    assert resolve("target", 0)[1].offload is None


@pytest.mark.parametrize("gb", [0.0001, 1.0])
def test_layers_must_hold_it_and_staging_must_take_less(gb: float) -> None:
    with pytest.raises(ConfigError, match=r"engine.cpu_offload_gb = .* more than 2.4 MB.* at most 4.7 MB"):
        resolve("target", gb)


def test_host_memory_must_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "free_cpu_bytes", lambda: 4_000_000)
    resolve("target", 0.003)
    with pytest.raises(ConfigError, match=r"engine.cpu_offload_gb = 0.003: 7.1 MB of weights .* free memory of 4.0 MB"):
        resolve("target", 0.003, tensor_parallel_size=2)


def test_larger_steps_if_the_rest_of_the_weights_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weight_bytes(read_config(FOLDERS["target"]), GPU, torch.bfloat16)
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    seen = []
    monkeypatch.setattr(
        resolving, "gpu_limits", lambda memory, capability, size: seen.append(size) or resolving.CPU_LIMITS
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    _, resolved = resolve("target", 0.003)
    assert resolved.offload is not None
    assert seen == [weights - resolved.offload.freed_bytes]
