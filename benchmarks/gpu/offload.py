"""Time steps with some layers' weights in host memory (`engine.cpu_offload_gb`).

A step cannot take less time than the copies of these weights, which are timed alone. Steps with all weights on the card
are the baseline.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.section import Found, Setting
from benchmarks.measure import table
from benchmarks.shapes import bench_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.forward.graphs import CudaCapture
from pipeline.engine.forward.runner import DeviceContext
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.memory import layer_bytes_on_gpu
from pipeline.engine.startup.resolve import resolve
from pipeline.model.config import read_config
from pipeline.model.kv_cache import single_kv_pages
from pipeline.model.load import as_stored
from pipeline.model.offload import CudaCopies

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of the layers' weights
ROWS, CONTEXT, PROMPT, SMOKE_PROMPT = (1, 16, 64), 256, 4096, 32
BLOCK_SIZE = 64
NUM_WARM_UPS, NUM_TIMED = 2, 7


@dataclass(frozen=True)
class OffloadTimes:
    """Times with `host_bytes` of weights in host memory. copies_s: of their copies alone; 0 without any."""

    host_bytes: int
    num_layers: int
    card_bytes: int
    loading_s: float
    copies_s: float
    steps_s: dict[str, float]


def offload_times(setting: Setting) -> Iterator[Found]:
    """Time captured steps of ROWS sequences, and a step of one prompt, with each share of the weights in host memory.
    Without a card only the baseline is timed."""
    found, times = Found(), list[OffloadTimes]()
    with DeviceContext(None, setting.device):
        for share in SHARES if setting.device.type == "cuda" else SHARES[:1]:
            with found.case(f"{share:.0%} of the layers' weights"):
                times.append(_measure(setting, share))
            found.text = times_to_text(times)
            found.figures["offload"] = [asdict(each) for each in times]
            yield found


def _measure(setting: Setting, share: float) -> OffloadTimes:
    device, prompt = setting.device, SMOKE_PROMPT if setting.is_smoke else PROMPT
    folder = bench_model(setting.model).folder
    model = as_stored(read_config(folder), folder)
    config = EngineConfig(
        str(folder),
        device=str(device),
        max_model_len=max(prompt, CONTEXT),
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=max(prompt, *ROWS),
        # Slightly less, which is not rounded up to one more layer.
        cpu_offload_gb=0.999 * share * sum(layer_bytes_on_gpu(model, setting.dtype)) / 1e9,
    )
    began, resolved = time.perf_counter(), resolve(config, model)
    loaded = LoadedModel.load(folder, model, resolved)
    num_blocks = max(ROWS) * -(-CONTEXT // BLOCK_SIZE) + -(-prompt // BLOCK_SIZE)
    runner = loaded.runner(
        num_blocks, single_kv_pages(loaded.config, BLOCK_SIZE, loaded.kv_dtype), resolved.max_model_len
    )
    if device.type == "cuda":
        sizes = {"max_num_seqs": max(ROWS), "max_queries": 1, "max_tokens": max(ROWS)}
        runner.capture_steps(CudaCapture(), log=lambda done, total: None, **sizes)
    loading_s = time.perf_counter() - began
    steps = {f"{rows} rows": _decoding(rows) for rows in ROWS} | {f"prompt of {prompt:,}": _prompt(prompt)}
    offload = loaded.decoder.offload
    num_layers, host_bytes = (0, 0) if offload is None else (offload.num_layers, offload.host_bytes)
    return OffloadTimes(
        host_bytes=host_bytes,
        num_layers=num_layers,
        card_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        loading_s=loading_s,
        copies_s=num_layers * copy_seconds(device, host_bytes // num_layers) if num_layers else 0.0,
        steps_s={name: _median_seconds(device, partial(runner.execute, step)) for name, step in steps.items()},
    )


def times_to_text(times: Sequence[OffloadTimes]) -> str:
    steps = [f"{name} >12.2f" for name in times[0].steps_s] if times else []
    rows = []
    for each in times:
        sizes = each.host_bytes / 1e9, each.num_layers, each.card_bytes / 1e9, each.loading_s
        rows.append((*sizes, *(1e3 * seconds for seconds in (each.copies_s, *each.steps_s.values()))))
    return "\n".join(
        [
            "GB of weights in host memory, their layers, GB on the card, seconds to load and capture; milliseconds of",
            "the copies alone, and of steps.",
            *table(" | ".join(["host >6.2f | layers >6 | card >6.2f | load >6.1f | copies >8.2f", *steps]), rows),
        ]
    )


def copy_seconds(device: torch.device, num_bytes: int) -> float:
    """Return the time of a copy of `num_bytes` from pinned host memory, without other work."""
    host, target = (torch.empty(num_bytes, dtype=torch.uint8, device=each) for each in ("cpu", device))
    copies = CudaCopies(device)
    copies.pin(host)
    return _median_seconds(device, lambda: copies.wait(copies.start(target, host)))


def _median_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of a call within several, which the host launches without waiting."""
    runs = []
    for run in range(NUM_WARM_UPS + NUM_TIMED):
        began = time.perf_counter()
        for _ in range(2):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run >= NUM_WARM_UPS:
            runs.append((time.perf_counter() - began) / 2)
    return median(runs)


def _decoding(rows: int) -> StepInput:
    blocks = -(-CONTEXT // BLOCK_SIZE)
    return dummy_step(
        count_S=np.ones(rows, dtype=np.int64),
        context_len_S=np.full(rows, CONTEXT),
        block_table_SM=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        block_size=BLOCK_SIZE,
        row_R=np.arange(rows),
    )


def _prompt(length: int) -> StepInput:
    blocks = np.arange(-(-length // BLOCK_SIZE), dtype=np.int32)
    length_S = np.array([length])
    return dummy_step(
        count_S=length_S,
        context_len_S=length_S,
        block_table_SM=blocks[None],
        block_size=BLOCK_SIZE,
        row_R=length_S - 1,
    )
