"""Layers in host memory compute the same bits as resident ones, whenever their copies run within the order that the
device guarantees."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.checkpoints.adapters import locate_adapter
from pipeline.demo import demo_adapter, demo_model
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.memory import layer_bytes_on_gpu
from pipeline.kernels.contract import Kernels
from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.linear.dispatch import DequantBuffer
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder
from pipeline.model.kv_cache import single_kv_pages
from pipeline.model.lora import Adapters, read_adapter
from pipeline.model.offload import LayerOffload, spread_layers
from tests.kernels.triton.problems import DEVICE
from tests.model_folders import FAMILIES, Family, make_family, small_config, write_checkpoint

CPU = torch.device("cpu")
REFERENCE = reference_kernels(torch.float32, CPU)
# Files map weights at any address, and BLAS chooses its order of sums by their alignment.
ALIGNED = replace(
    REFERENCE,
    prepare_linear=lambda weight: partial(
        F.linear, weight=weight.dequantize(torch.float32).clone(), bias=weight.bias_N
    ),
)
DENSE = Family("qwen3", "qwen3")
SHAPE = small_config(32, 48, 7, 4, 2, max_position_embeddings=64, initializer_range=0.2)


class EarliestCopies:
    """Copies that are done as soon as they are queued."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []

    def pin(self, host: torch.Tensor) -> None:
        pass

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.targets.append(target)
        target.copy_(source)

    def overwrite(self) -> None:
        """Overwrite the staging buffers with NaN."""
        for target in self.targets:
            target.fill_(255)

    def wait(self, copy: Any) -> None:
        pass


class LatestCopies(EarliestCopies):
    """Copies that run when a layer waits for them."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.targets.append(target)
        return target, source

    def wait(self, copy: Any) -> None:
        target, source = copy
        target.copy_(source)


def step_of(counts: list[int], contexts: list[int], rows: list[int]) -> StepInput:
    return dummy_step(
        count_S=np.array(counts),
        context_len_S=np.array(contexts),
        block_table_SM=np.arange(2 * len(counts), dtype=np.int32).reshape(-1, 2),
        block_size=16,
        row_R=np.array(rows),
    )


def logits_of(decoder: Decoder, kernels: Kernels, after_step: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    """Compute prompts, then decode; with adapters if the decoder has some."""
    loaded = LoadedModel(decoder.config, decoder, kernels, torch.float32)
    runner = loaded.runner(4, single_kv_pages(loaded.config, 16, torch.float32), 32)
    logits = []
    for step in (step_of([9, 1], [9, 1], [8, 9]), step_of([3], [12], [2]), step_of([1, 1], [13, 2], [0, 1])):
        step.token_id_T[:] = 5 + np.arange(len(step.token_id_T))
        adapter_S = None if decoder.adapters is None else np.arange(len(step.context_len_S)) - 1
        logits.append(runner.execute(replace(step, adapter_S=adapter_S)).clone())
        after_step()
    return logits


def check_same_logits(folder: Path, kernels: Callable[[], Kernels], layers: list[int], adapter: str = "") -> int:
    """Assert that layers in host memory give the logits of resident ones; return their size."""
    config = read_config(folder)

    def load(offload: LayerOffload | None) -> tuple[Decoder, Kernels]:
        decoder = Decoder(folder, config, used := kernels(), torch.float32, CPU, offload=offload)
        if adapter:
            decoder.adapters = Adapters([read_adapter(locate_adapter(adapter, "adapter"), config)], used, CPU)
        return decoder, used

    expected, host_bytes = logits_of(*load(None)), 0
    for copies in (EarliestCopies(), LatestCopies()):
        offload = LayerOffload(layers, copies, CPU)
        found, host_bytes = logits_of(*load(offload), after_step=copies.overwrite), offload.host_bytes
        assert all(map(torch.equal, found, expected))
        assert len({target.untyped_storage().data_ptr() for target in copies.targets}) == min(2, len(layers))
        assert len(copies.targets) == len(layers) * len(expected)
    return host_bytes


@pytest.mark.parametrize("layers", [[0], [6], [0, 1, 2, 3, 4, 5, 6], [1, 4, 6], [2, 3, 4, 6]], ids=str)
def test_any_layers(tmp_path: Path, layers: list[int]) -> None:
    check_same_logits(write_checkpoint(tmp_path, DENSE, SHAPE, seed=1), lambda: ALIGNED, layers)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families(tmp_path: Path, family: Family) -> None:
    check_same_logits(make_family(tmp_path, family, seed=2), lambda: ALIGNED, [0, 1])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="Triton's interpreter is off")
@pytest.mark.parametrize("adapter", ["", str(demo_adapter("short"))], ids=["", "adapter"])
def test_4_bit_weights(adapter: str) -> None:
    def kernels() -> Kernels:
        return triton_kernels(torch.float32, CPU, scratch=DequantBuffer(torch.float32, CPU))

    host_bytes = check_same_logits(demo_model("target-awq"), kernels, [0, 1, 3], adapter)
    expected = layer_bytes_on_gpu(read_config(demo_model("target-awq")), torch.float32)
    assert host_bytes == pytest.approx(3 * expected[0], rel=0.05)  # and none of the shared workspace


@pytest.mark.parametrize(
    ("sizes", "wanted", "chosen"),
    [
        ([10] * 8, 0, ()),
        ([10] * 8, 1, (7,)),
        ([10] * 8, 20, (3, 7)),
        ([10] * 8, 21, (1, 4, 7)),
        ([10] * 8, 80, (0, 1, 2, 3, 4, 5, 6, 7)),
        ([10] * 8, 81, None),
        ([1, 1, 30, 30], 31, (1, 3)),
    ],
)
def test_layers_hold_the_bytes_and_are_evenly_spread(
    sizes: list[int], wanted: int, chosen: tuple[int, ...] | None
) -> None:
    assert spread_layers(sizes, wanted) == chosen
