"""Number of launches for a layer and for a step on a GPU. One more launch in a layer costs some microseconds of each
layer of each step that is not replayed.

The engine's own runner computes steps of a small model on the kernels for NVIDIA GPUs, whose launches are recorded and
not run. Operations of torch are recorded as they are dispatched.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.engine.config import EngineConfig
from pipeline.engine.forward import runner
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.sampling import on_device
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.resolve import resolve
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.launch import H100, CompileTarget, Launch
from pipeline.model import decoder
from pipeline.model.config import read_config
from pipeline.model.decoder import DecoderLayer
from pipeline.model.kv_cache import single_kv_pages
from tests.kernels.triton.problems import DEVICE, recorded_launches
from tests.model_folders import Family, small_config, write_checkpoint
from tests.weights.packers import quantize_randomly

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="recorded launches are not run, and the CPU has no graphs"
)

LAYERS = 3
DEPTH = {"bfloat16": 128, "AWQ": 512}  # of linears: 4-bit ones are divided among programs above some depth
BLOCK, ROWS, CONTEXT = 16, 8, 320
# torch's operations without a kernel, except views.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty"}


class _Dispatched(TorchDispatchMode):
    """Mode that appends the names of torch's operations that would launch a kernel to a list."""

    def __init__(self, into: list[Any]) -> None:
        super().__init__()
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returned = func._schema.name.removeprefix("aten::"), func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        made = func(*args, **kwargs or {})
        if name not in NO_KERNEL and (not is_view or (name == "to" and made is not args[0])):
            self._into.append(name)
        return made


Counts = tuple[Counter[str], Counter[str], Counter[str]]
"""Launches by name: of a layer in the middle, of the last, which computes only sampled rows, and of a step outside its
layers, which includes launches that plan attention in the first layer."""


def counts_of(events: Sequence[Any]) -> Counts:
    """Count events: launches and names, between the index of a layer and None at its end."""
    by_layer: dict[int | None, Counter[str]] = {layer: Counter() for layer in (None, *range(LAYERS))}
    layer = None
    for event in events:
        if event is None or isinstance(event, int):
            layer = event
        else:
            by_layer[layer][event.kernel.__name__ if isinstance(event, Launch) else event] += 1
    first, second, last = by_layer[0], by_layer[1], by_layer[LAYERS - 1]
    assert second <= first
    return second, last, by_layer[None] + first - second


class Counting:
    """Counter of launches. Inside `watched`, layers mark their beginning and end in the list of launches."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    @contextmanager
    def watched(self) -> Iterator["Counting"]:
        forward = DecoderLayer.forward

        def marked(layer: DecoderLayer, *arguments: Any) -> Any:
            self._events.append(layer.index)
            made = forward(layer, *arguments)
            self._events.append(None)
            return made

        uploads = [patch.object(module, "on_device", self._upload) for module in (decoder, runner)]
        download = patch.object(on_device, "to_host", self._download)
        with patch.object(DecoderLayer, "forward", marked), uploads[0], uploads[1], download:
            yield self

    def _upload(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        self._events.append("copy to the device")
        return torch.from_numpy(array)

    def _download(self, tensor: torch.Tensor) -> torch.Tensor:
        self._events.append("copy to the host")
        return tensor

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a replay for `capture_steps` that counts as one launch."""
        function()
        return lambda: self._events.append("replay")

    def count(self, call: Callable[[], object]) -> Counts:
        with recorded_launches() as events, _Dispatched(events):
            self._events = events
            call()
        return counts_of(events)


def step_of(counts: Sequence[int], contexts: Sequence[int], *, shared: bool = False) -> StepInput:
    """Build a step of sequences that compute the last `counts` tokens of `contexts`; shared: all begin with the same
    blocks."""
    blocks = -(-max(contexts) // BLOCK)
    table_SM = np.tile(np.arange(blocks, dtype=np.int32), (len(counts), 1))
    if not shared:
        table_SM += blocks * np.arange(len(counts), dtype=np.int32)[:, None]
    count_S, context_len_S, row_R = np.array(counts), np.array(contexts), np.cumsum(counts) - 1
    return dummy_step(
        count_S=count_S, context_len_S=context_len_S, block_table_SM=table_SM, block_size=BLOCK, row_R=row_R
    )


DECODING, MIXED = "decoding", "a prompt with decoding"
STEPS: dict[str, StepInput] = {
    DECODING: step_of([1] * ROWS, [CONTEXT] * ROWS),
    "decoding after a shared prefix": step_of([1] * ROWS, [CONTEXT] * ROWS, shared=True),
    MIXED: step_of([1] * ROWS + [CONTEXT], [CONTEXT] * (ROWS + 1)),
}


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    config = EngineConfig(str(folder), device="cpu", dtype="bfloat16", kernels="triton", max_model_len=512, **options)
    shape = read_config(folder)
    with recorded_launches():
        loaded = LoadedModel.load(folder, shape, resolve(config, shape))
    return loaded.runner((ROWS + 1) * CONTEXT // BLOCK, single_kv_pages(loaded.config, BLOCK, loaded.kv_dtype), 512)


REPLAYED = [(0, 0, 6), (0, 0, 6), (0, 0, 7)]  # the second one step ahead of its tokens
MODELS: list[tuple[str, dict[str, Any], list[tuple[int, int, int]]]] = [
    ("bfloat16", {}, [(10, 10, 12), (11, 11, 12), (11, 16, 12)]),
    ("bfloat16", {"kv_cache_dtype": "fp8"}, [(10, 10, 12), (11, 11, 12), (12, 16, 12)]),
    ("AWQ", {}, [(11, 11, 12), (12, 12, 12), (11, 17, 12)]),
    ("AWQ", {"activation_dtype": "fp8"}, [(12, 12, 12), (13, 13, 12), (12, 18, 12)]),
]
"""Weights, options, and launches of a layer, of the last one and outside them, for STEPS launched kernel by kernel."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write checkpoints by the kind of weights."""
    folder, plain = tmp_path_factory.mktemp("launches"), {}
    for kind, depth in DEPTH.items():
        shape = small_config(depth, 2 * depth, LAYERS, 4, 2, head_dim=64, max_position_embeddings=2048)
        plain[kind] = write_checkpoint(folder / kind, Family("qwen3", "qwen3"), shape, seed=4)
    awq = quantize_randomly(plain["AWQ"], folder / "int4", group_size=128, zero_point=True, seed=5)
    return {"bfloat16": plain["bfloat16"], "AWQ": awq}


@pytest.mark.parametrize(("weights", "options", "expected"), MODELS)
def test_launches_are_those_of_the_table(
    weights: str,
    options: dict[str, Any],
    expected: list[tuple[int, int, int]],
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Use an H100's tiles, and read prefixes of any length together.
    monkeypatch.setattr(CompileTarget, "from_device", classmethod(lambda cls, device: H100))
    monkeypatch.setattr(cascade_metadata, "MIN_SAVED_BYTES", 0)
    with Counting().watched() as counting:
        runner = runner_of(folders[weights], **options)

        def counted(step: StepInput, future: FutureTokens | None = None) -> Counts:
            return counting.count(lambda: sample_on_device(runner, runner.execute(step, future), None))

        found = [counted(step) for step in STEPS.values()]
        sizes: Any = {"max_num_seqs": ROWS + 1, "max_queries": 1, "max_tokens": ROWS}
        sizes |= {"max_mixed_tokens": ROWS + CONTEXT, "log": lambda done, total: None}
        counting.count(lambda: runner.capture_steps(counting.capture, **sizes))
        future = FutureTokens(np.arange(ROWS), np.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64))
        found += [counted(STEPS[DECODING]), counted(STEPS[DECODING], future), counted(STEPS[MIXED])]
    assert [tuple(each.total() for each in counts) for counts in found] == expected + REPLAYED, found
