"""Time decoding steps by rows and context, in the engine's own loop.

The largest number of rows comes first. Prompts are computed once, and rows are aborted for the next point, so contexts
grow by a few dozen tokens from point to point. At each point some steps are timed by the clock, some are traced, and
some are mixed with a new prompt: first as served (captured if the engine captures such steps), then kernel by kernel.
In the end a step of as many prompt tokens as a step may have is timed and traced.
"""

import gzip
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.section import Found, Setting, launch_mixed_steps
from benchmarks.gpu.trace import Trace, Traced, Window
from benchmarks.measure import table
from benchmarks.request_sets import FIRST_TOKEN
from benchmarks.shapes import bench_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams

ROWS, CONTEXTS = (1, 8, 32, 64, 128, 256, 512), (256, 1024)
SMOKE_ROWS, SMOKE_CONTEXTS = (1, 2), (20,)
PROMPT = 64  # tokens of the prompt in a mixed step
LARGE, SMOKE_LARGE = 735, 20  # tokens of each prompt in the largest step
NUM_SETTLE = 3  # steps before the timed steps of a point
NUM_TIMED, NUM_TRACED, NUM_MIXED, NUM_MIXED_TRACED, NUM_LARGE = 12, 8, 6, 2, 4
MIXED = "mixed step"
OUTPUT = 384  # max tokens of a row: more than all points together generate
SEED = 3


def step_times(setting: Setting) -> Iterator[Found]:
    """Time an engine's loading, and its steps at each point."""
    rows, contexts = (SMOKE_ROWS, SMOKE_CONTEXTS) if setting.is_smoke else (ROWS, CONTEXTS)
    found, phases, times = Found(), Phases(), list[StepTime]()
    config = EngineConfig(
        str(bench_model(setting.model).folder),
        device=str(setting.device),
        max_model_len=max(contexts) + OUTPUT + PROMPT,
        max_num_seqs=max(rows) + 1,  # a slot for the prompt of a mixed step
    )
    with Engine(config, phases.log) as engine:
        engine.warm_up()
        head = f"{setting.model}, {setting.dtype}\n{phases.to_text()}"
        found.figures = {"model": setting.model, "loading_s": phases.seconds(), "engine": dict(engine.resolved)}
        bench = StepBench(engine, setting.traces, setting.model)
        for context in contexts:
            with found.case(f"contexts of {context}"):
                for each in bench.measure(rows, context):
                    times.append(each)
                    found.text = f"{head}\n{steps_to_text(times)}"
                    found.figures["steps"] = [asdict(step) for step in times]
                    yield found
        with found.case("largest step"):
            large = bench.largest_step(SMOKE_LARGE if setting.is_smoke else LARGE)
            found.text += f"\n{large.to_text()}"
            found.figures["largest_step"] = asdict(large)
            yield found


class Phases:
    """Loading phases that an engine logs, with their times."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._phases: list[tuple[str, float]] = [("building the engine", self._began)]

    def log(self, text: str) -> None:
        print(text, flush=True)
        phase = text.split(",")[0]  # without percentages and counts
        if phase != self._phases[-1][0]:
            self._phases.append((phase, time.monotonic()))

    def seconds(self) -> dict[str, float]:
        """Return phase -> seconds, up to now."""
        ends = [*(began for _, began in self._phases[1:]), time.monotonic()]
        found: dict[str, float] = {}
        for (phase, began), end in zip(self._phases, ends):
            found[phase] = found.get(phase, 0.0) + end - began
        return found

    def to_text(self) -> str:
        parts = [f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds().items()]
        return f"until the first step {time.monotonic() - self._began:.1f} s: {', '.join(parts)}"


@dataclass(frozen=True)
class StepTime:
    """Times of steps of `rows` rows with a mean context of `context` tokens.

    wall_s: of a step without tracing. traced: None without a card. mixed_s: wall time of a step with a prompt of PROMPT
    tokens in addition to the rows, as served. by_kernel_s: of the same step launched kernel by kernel, on a card.
    mixed: traces of the latter.
    """

    rows: int
    context: float
    wall_s: float
    traced: Traced | None
    mixed_s: float
    mixed: tuple[Window, ...] = ()
    by_kernel_s: float | None = None


@dataclass(frozen=True)
class LargestStep:
    """Time of a step of `tokens` prompt tokens, and of sampling a token of each prompt. traced: None without a card."""

    prompts: int
    tokens: int
    wall_s: float
    traced: Traced | None

    def to_text(self) -> str:
        lines = [f"{self.prompts} prompts, {self.tokens:,} tokens in a step: {self.wall_s * 1e3:.2f} ms"]
        if self.traced is not None:
            lines.append(f"busy {self.traced.busy_s * 1e3:.2f} ms, by kernel:")
            lines += [f"  {seconds * 1e3:9.4f} {name}" for name, seconds in self.traced.kernels.items()]
        return "\n".join(lines)


class StepBench:
    """Measurement of steps of an idle engine without drafts. traces: tar file to append traces to."""

    def __init__(self, engine: Engine, traces: Path, name: str) -> None:
        self._engine, self._traces, self._name = engine, traces, name
        self._random = np.random.default_rng(SEED)
        assert isinstance(engine.runner, ModelRunner)
        self._on_card = engine.runner.decoder.device.type == "cuda"

    def measure(self, rows: Sequence[int], context: int) -> Iterator[StepTime]:
        """Yield points of `rows` rows, the largest first, up to the rows that fit the engine at that context."""
        room = self._engine.pool.num_blocks * self._engine.pool.block_size
        max_rows = min(room // (context + OUTPUT + PROMPT), self._engine.table.num_slots - 1)
        counts = sorted({min(count, max_rows) for count in rows}, reverse=True)
        if counts[0] < 1:
            return
        ids = [self._add(context, OUTPUT) for _ in range(counts[0])]
        try:
            self._until_all_decode()
            for count in counts:
                for row_id in ids[count:]:
                    self._engine.abort(row_id)
                del ids[count:]
                yield self._point(count, context)
        finally:
            for each in ids:
                self._engine.abort(each)
            while self._engine.has_unfinished:  # prompts of mixed steps
                self._engine.step()
            self._engine.forget()

    def _point(self, rows: int, context: int) -> StepTime:
        self._steps(NUM_SETTLE)
        table = self._engine.table
        running = self._engine.scheduler.running.copy()
        mean = float(table.num_known[running].mean())
        wall_s = self._timed(NUM_TIMED, self._engine.step)
        traced = self._traced(f"{self._name}-{rows}x{context}", NUM_TRACED, self._engine.step)
        mixed_s = self._timed(NUM_MIXED, self._mixed_step)
        replay_again = launch_mixed_steps(self._engine)
        by_kernel_s = self._timed(NUM_MIXED, self._mixed_step) if self._on_card else None
        windows = self._traced(f"{self._name}-{rows}x{context}-mixed", NUM_MIXED_TRACED, self._mixed_step)
        replay_again()
        return StepTime(
            len(running),
            mean,
            wall_s,
            None if traced is None else traced.steps(NUM_TRACED),
            mixed_s,
            () if windows is None else tuple(windows.windows(MIXED)),
            by_kernel_s,
        )

    def largest_step(self, length: int) -> LargestStep:
        """Measure a step of prompts of `length` tokens, of an idle engine."""
        most = int(self._engine.resolved["max_num_batched_tokens"])
        count = min(most // length, self._engine.table.num_slots)

        def run() -> None:
            for _ in range(count):
                self._add(length, 1)
            while self._engine.has_unfinished:
                self._engine.step()

        run()  # compiles
        wall_s = self._timed(NUM_LARGE, run)
        trace = self._traced(f"{self._name}-largest", 1, run)
        return LargestStep(count, count * length, wall_s, None if trace is None else trace.steps(1))

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
        """Return the trace of `count` steps, or None without a card."""
        if not self._on_card:
            return None
        self._wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                step()
            self._wait()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            written = Path(file.name).read_bytes()
        packed = gzip.compress(written, 6)
        member = tarfile.TarInfo(f"{name}.json.gz")
        member.size = len(packed)
        with tarfile.open(self._traces, "a") as tar:
            tar.addfile(member, io.BytesIO(packed))
        return Trace(json.loads(written)["traceEvents"])

    def _wait(self) -> None:
        if self._on_card:
            torch.cuda.synchronize()


def steps_to_text(times: Sequence[StepTime]) -> str:
    lines = [
        "Milliseconds of a step. wall: clock time without tracing. replay: first to last kernel of a captured step; "
        "busy: a kernel ran; idle: no kernel ran; waits: part of idle in pauses of more than 5 us, which wait for the "
        f"host. mixed: with a prompt of {PROMPT} tokens in addition to the rows, as served; by kernel: the same step "
        "launched kernel by kernel, traced and therefore slower; host: until its last launch; card: busy.",
    ]
    rows = []
    for time_ in times:
        traced = time_.traced
        parts = [None] * 4 if traced is None else [traced.replay_s, traced.busy_s, traced.idle_s, traced.host_s]
        # The engine launches one step ahead, so a window may contain the launches of a step without the prompt.
        window = max(time_.mixed, key=lambda each: each.num_launches, default=None)
        mixed = [
            time_.mixed_s,
            time_.by_kernel_s,
            *([None] * 2 if window is None else [window.launched_s, window.device_s]),
        ]
        in_ms = [None if part is None else part * 1e3 for part in (time_.wall_s, *parts, *mixed)]
        rows.append((time_.rows, time_.context, *in_ms, None if window is None else window.num_launches))
    columns = "rows >5, | context >8,.0f | wall >8.3f | replay >8.3f | busy >8.3f | idle >7.3f | waits >7.3f"
    lines += table(f"{columns} | mixed >8.3f | by kernel >9.3f | host >8.3f | card >8.3f | launches >8,", rows)
    for time_ in times:
        if time_.traced is not None:
            lines.append(f"{time_.rows:,} rows at {time_.context:,.0f} by kernel:")
            lines += [f"  {seconds * 1e3:9.4f} {name}" for name, seconds in time_.traced.kernels.items()]
    return "\n".join(lines)
