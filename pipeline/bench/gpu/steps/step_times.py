"""Times of decoding steps by rows and context, in the engine's own loop.

The most rows come first: their prompts are computed once, then rows are dropped for the next point, so that contexts
grow by some dozen tokens from point to point. At each point some steps are timed by the clock, some are traced, and
some get a new prompt beside the rows: as served, captured where the engine captures such steps, then kernel by kernel.
"""

import gzip
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.bench.gpu.steps.trace import Trace, Traced, Window
from pipeline.bench.measure import table
from pipeline.bench.request_sets import FIRST_TOKEN
from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.params import Request, SamplingParams

PROMPT = 64  # tokens of the prompt in a mixed step
SETTLE = 3  # steps of a point before those that count
NUM_MIXED, NUM_MIXED_TRACED = 6, 2
MIXED = "mixed step"
OUTPUT = 384  # tokens that rows may generate: more than all points together take
SEED = 3


@dataclass(frozen=True)
class StepTime:
    """Steps of `rows` rows with contexts of `context` tokens on average. wall_s: of a step, nothing traced. traced:
    None where there was no card. mixed_s: wall time of a step in which a prompt of PROMPT tokens is beside the rows, as
    served; by_kernel_s: the same on a card, launched kernel by kernel; mixed: those, traced."""

    rows: int
    context: float
    wall_s: float
    traced: Traced | None
    mixed_s: float
    mixed: tuple[Window, ...] = ()
    by_kernel_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "StepTime":
        traced = None if told["traced"] is None else Traced(**told["traced"])
        return cls(**told | {"traced": traced, "mixed": tuple(Window(**each) for each in told["mixed"])})


class StepBench:
    """Of one engine without drafts, in which nothing runs. num_timed, num_traced: steps of each point. traces: the
    folder of the traces, whose names begin with `name`."""

    def __init__(self, engine: Engine, num_timed: int, num_traced: int, traces: Path, name: str) -> None:
        self._engine, self._num_timed, self._num_traced = engine, num_timed, num_traced
        self._traces, self._name, self._random = traces, name, np.random.default_rng(SEED)
        assert isinstance(engine.runner, ModelRunner)
        self._runner = engine.runner
        self._on_card = engine.place is not None and engine.runner.is_asynchronous

    def measure(self, rows: Sequence[int], context: int) -> Iterator[StepTime]:
        """Points of `rows` rows, the most first; of more than the engine holds at that context, as many as it does."""
        room = self._engine.pool.num_blocks * self._engine.pool.block_size
        most = min(room // (context + OUTPUT + PROMPT), self._engine.table.num_slots - 1)
        counts = sorted({min(count, most) for count in rows}, reverse=True)
        if counts[0] < 1:
            return
        ids = [self._add(context, OUTPUT) for _ in range(counts[0])]
        try:
            self._until_all_decode()
            for count in counts:
                for gone in ids[count:]:
                    self._engine.abort(gone)
                del ids[count:]
                yield self._point(count, context)
        finally:
            for each in ids:
                self._engine.abort(each)
            while self._engine.has_unfinished:  # prompts of mixed steps
                self._engine.step()
            self._engine.forget()

    def _point(self, rows: int, context: int) -> StepTime:
        self._steps(SETTLE)
        table = self._engine.table
        running = self._engine.scheduler.running.copy()
        mean = float(table.num_known[running].mean())
        wall_s = self._timed(self._num_timed, self._engine.step)
        traced = self._traced(f"{self._name}-{rows}x{context}", self._num_traced, self._engine.step)
        mixed_s = self._timed(NUM_MIXED, self._mixed_step)
        self._runner.replays_mixed = False
        by_kernel_s = self._timed(NUM_MIXED, self._mixed_step) if self._on_card else None
        windows = self._traced(f"{self._name}-{rows}x{context}-mixed", NUM_MIXED_TRACED, self._mixed_step)
        self._runner.replays_mixed = True
        return StepTime(
            len(running),
            mean,
            wall_s,
            None if traced is None else traced.steps(self._num_traced),
            mixed_s,
            () if windows is None else tuple(windows.windows(MIXED)),
            by_kernel_s,
        )

    def _add(self, prompt: int, output: int) -> object:
        tokens = self._random.integers(FIRST_TOKEN, self._engine.runner.vocab_size, prompt).tolist()
        request = Request(object(), tokens, SamplingParams(max_tokens=output, ignore_eos=True))
        self._engine.add(request)
        return request.row_id

    def _until_all_decode(self) -> None:
        scheduler, table = self._engine.scheduler, self._engine.table
        while scheduler.waiting or (table.num_computed[scheduler.running] < table.num_prompt[scheduler.running]).any():
            self._engine.step()

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._engine.step()

    def _mixed_step(self) -> None:
        self._add(min(PROMPT, self._engine.max_model_len - 2), 1)
        with record_function(MIXED):
            self._engine.step()

    def _timed(self, count: int, step: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            step()
        self._wait()
        return (time.perf_counter() - began) / count

    def _traced(self, name: str, count: int, step: Callable[[], object]) -> Trace | None:
        """None where there is no card to trace."""
        if not self._on_card:
            return None
        self._wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                step()
            self._wait()
        plain, packed = self._traces / f".{name}.json.part", self._traces / f"{name}.json.gz"
        profiler.export_chrome_trace(str(plain))
        packed.write_bytes(gzip.compress(plain.read_bytes(), 6))
        plain.unlink()
        return Trace.read(packed)

    def _wait(self) -> None:
        if self._on_card:
            torch.cuda.synchronize()


def steps_to_text(times: Sequence[StepTime]) -> str:
    lines = [
        "Steps. wall: by the clock, nothing traced. replay: a captured step from its first kernel to its last; busy: "
        "some kernel ran; idle, and of it in pauses of more than 5 us, which wait for the host. mixed: with a prompt "
        f"of {PROMPT} tokens beside the rows, as served; by kernel: by the clock, the host until its last launch "
        "(traced, so slower), the card's busy time, launches.",
    ]
    rows = []
    for time_ in times:
        of = time_.traced
        parts = [None] * 4 if of is None else [of.replay_s, of.busy_s, of.idle_s, of.host_s]
        window = time_.mixed[-1] if time_.mixed else None
        mixed = [
            time_.mixed_s,
            time_.by_kernel_s,
            *([None] * 2 if window is None else [window.launched_s, window.device_s]),
        ]
        in_ms = [None if part is None else part * 1e3 for part in (time_.wall_s, *parts, *mixed)]
        rows.append((time_.rows, time_.context, *in_ms, None if window is None else window.num_launches))
    columns = "rows >5, | context >8,.0f | wall ms >8.3f | replay >8.3f | busy >8.3f | idle >7.3f | waits >7.3f"
    lines += table(f"{columns} | mixed ms >9.3f | by kernel >9.3f | host >8.3f | card >8.3f | launches >8,", rows)
    for time_ in times:
        if time_.traced is not None:
            lines.append(f"{time_.rows:,} rows at {time_.context:,.0f}, milliseconds of a step by kernel:")
            lines += [f"  {seconds * 1e3:9.4f} {name}" for name, seconds in time_.traced.kernels.items()]
    return "\n".join(lines)
