"""Compare the engine's CPU steps with a lower bound (floor): the linears alone, and reading the KV cache.

    python -m benchmarks.floor
    python -m benchmarks.floor --model demo --dtype float32

The linears of the loaded model are timed at some of the steps' numbers of tokens, with linear interpolation between
them. From 64 tokens on, two layers represent all. After the keys and values of the last layer only sampling rows are
needed, so the rest of that layer and the head are counted for those rows only. Decoding also reads each sequence's keys
and values at the memory's bandwidth. The floor excludes prompt attention, norms, rotary embeddings, sampling and the
scheduler. Each floor is the minimum of several passes while the steps' time is a sum, so a busy machine lowers the
share.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measure import facts_to_text, fastest, machine_facts, table, use_threads
from benchmarks.request_sets import run_requests, workload
from benchmarks.script import json_flag, progress, report, script, shared_options
from benchmarks.shapes import bench_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.model.decoder import Decoder

READ_BYTES = 256 << 20  # larger than any cache
MIN_PASSES, MIN_S = 5, 0.1
ALL_LAYERS_BELOW = 64  # tokens; larger steps are not bound by reading weights
MAX_POINTS = 9
PROMPT_TOKENS = 120
DECODE_GROUPS = ((1, 4), (5, 16), (17, 32), (33, 64), (65, 1 << 30))

Curve = Callable[[int], float]
"""Number of tokens -> seconds."""


@dataclass(frozen=True)
class StepTime:
    """Sizes and times of one step.

    kv_tokens: sum of the contexts of sequences that computed a single token. wall_s: the whole step. model_s: the
    model's part of it.
    """

    num_sequences: int
    num_tokens: int
    num_logit_rows: int
    kv_tokens: int
    wall_s: float
    model_s: float

    @property
    def decodes_only(self) -> bool:
        return self.num_tokens == self.num_sequences


class Recorder:
    """Recorder of an engine's steps, which wraps its runner's `execute`. The first step begins at construction."""

    def __init__(self, runner: ModelRunner) -> None:
        self.steps: list[StepTime] = []
        self._execute, self._began = runner.execute, time.perf_counter()
        self._sizes, self._model_s = (0, 0, 0, 0), 0.0
        runner.execute = self._timed  # pyright: ignore[reportAttributeAccessIssue]

    def _timed(self, step: StepInput, *rest: Any) -> torch.Tensor:
        start = time.perf_counter()
        logits = self._execute(step, *rest)
        single_S = np.diff(step.query_start_S1) == 1
        sizes = len(step.context_len_S), len(step.token_id_T), len(step.logit_row_R)
        self._sizes, self._model_s = (*sizes, int(step.context_len_S[single_S].sum())), time.perf_counter() - start
        return logits

    def after_step(self) -> None:
        now = time.perf_counter()
        self.steps.append(StepTime(*self._sizes, now - self._began, self._model_s))
        self._began = now


def phases(steps: Sequence[StepTime], decoder: Decoder, read_bytes_per_s: float) -> list[dict[str, Any]]:
    """Return time and floor of `steps` by phase. Takes tens of seconds."""
    tokens, rows = _points([step.num_tokens for step in steps]), _points([step.num_logit_rows for step in steps])
    before, after = measure_layers(decoder, sorted({*tokens, *rows}))
    head = measure_head(decoder, rows)
    num_layers = len(decoder.layers)
    kv_bytes = decoder.config.kv_bytes_per_token(decoder.dtype)

    def linears_s(step: StepTime) -> float:
        layers_s = before(step.num_tokens) + after(step.num_tokens) * (num_layers - 1) / num_layers
        return layers_s + after(step.num_logit_rows) / num_layers + head(step.num_logit_rows)

    decoding = [step for step in steps if step.decodes_only]
    kinds = [("prompts", [step for step in steps if not step.decodes_only]), ("decoding", decoding)]
    for low, high in DECODE_GROUPS:
        name = f"  {low} to {high} at once" if high < 1 << 30 else f"  {low} and more"
        kinds.append((name, [step for step in decoding if low <= step.num_sequences <= high]))
    found = []
    for name, chosen in kinds:
        if chosen:
            wall_s, gemm_s = sum(s.wall_s for s in chosen), sum(linears_s(s) for s in chosen)
            kv_s = sum(s.kv_tokens for s in chosen) * kv_bytes / read_bytes_per_s
            counts = {"steps": len(chosen), "tokens": sum(s.num_tokens for s in chosen)}
            times = {"wall_s": wall_s, "model_s": sum(s.model_s for s in chosen), "gemm_s": gemm_s, "kv_s": kv_s}
            found.append({"name": name, **counts, **times, "share": (gemm_s + kv_s) / wall_s})
    return found


@torch.inference_mode()
def measure_layers(decoder: Decoder, tokens: Sequence[int]) -> tuple[Curve, Curve]:
    """Time the linears of all layers before and after attention, layer by layer as in a step."""
    c = decoder.config
    widths = (c.hidden_size, c.num_heads * c.head_dim, c.hidden_size, c.intermediate_size)
    before, after = [], []
    for num_tokens in tokens:
        layers = decoder.layers if num_tokens < ALL_LAYERS_BELOW else decoder.layers[:2]
        x_qkv, x_o, x_up, x_down = (torch.randn(num_tokens, width).to(decoder.dtype) for width in widths)
        passes: list[tuple[float, float]] = []
        while len(passes) <= MIN_PASSES or sum(map(sum, passes)) < MIN_S:
            before_s = after_s = 0.0
            for layer in layers:
                start = time.perf_counter()
                layer.qkv(x_qkv)
                between = time.perf_counter()
                layer.o(x_o)
                assert layer.gate_up is not None, "a model without experts"
                assert layer.down is not None
                layer.gate_up(x_up)
                layer.down(x_down)
                before_s += between - start
                after_s += time.perf_counter() - between
            passes.append((before_s, after_s))
        fastest_pass = min(passes[1:], key=sum)  # the first pass warms up
        before.append(fastest_pass[0] * len(decoder.layers) / len(layers))
        after.append(fastest_pass[1] * len(decoder.layers) / len(layers))
    return _curve(tokens, before), _curve(tokens, after)


@torch.inference_mode()
def measure_head(decoder: Decoder, rows: Sequence[int]) -> Curve:
    """Time the output projection."""
    head = decoder.lm_head
    assert head is not None, "a model that generates"
    inputs = (torch.randn(num_rows, decoder.config.hidden_size).to(decoder.dtype) for num_rows in rows)
    return _curve(rows, [fastest(partial(head, x_RH), MIN_PASSES, MIN_S) for x_RH in inputs])


def _curve(tokens: Sequence[int], seconds: Sequence[float]) -> Curve:
    return lambda count: float(np.interp(count, tokens, seconds)) if count else 0.0


def _points(sizes: Sequence[int]) -> list[int]:
    """Return a few positive sizes, including both ends, evenly spread over ranks and logarithms."""
    distinct = np.unique([size for size in sizes if size])
    ranks = distinct[np.linspace(0, len(distinct) - 1, MAX_POINTS).round().astype(int)]
    spread = np.geomspace(distinct[0], distinct[-1], MAX_POINTS)
    nearest = distinct[np.abs(distinct[None, :] - spread[:, None]).argmin(1)]
    return sorted({int(size) for size in (*ranks, *nearest)})


@script(__doc__)
@shared_options(model="qwen3-0.6b", requests=48, output_tokens="16-128", dtype="auto", threads=None, folder=None)
@json_flag
def main(
    model: str, requests: int, output_tokens: tuple[int, int], dtype: str, threads: int | None, folder: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    use_threads(threads)
    found, work = bench_model(model, folder, progress), workload(requests, PROMPT_TOKENS, output_tokens)
    options = EngineConfig(
        str(found.folder), device="cpu", dtype=dtype, max_model_len=work.longest, num_threads=threads
    )
    with Engine(options, progress) as engine:
        engine.warm_up()
        assert isinstance(engine.runner, ModelRunner)
        vocab_size, machine = engine.runner.vocab_size, machine_facts()
        run_requests(engine, work.round("warm-up", vocab_size), False)
        recorder = Recorder(engine.runner)
        run_requests(engine, work.round("counted", vocab_size), False, recorder.after_step)
        progress("measuring the floor")
        read_bytes_per_s = READ_BYTES / fastest(torch.ones(READ_BYTES // 4).sum, 5)
        figures = {
            "model": found.description,
            "work": work.to_text(),
            "dtype": str(engine.resolved["dtype"]),
            "read_bytes_per_s": read_bytes_per_s,
            "phases": phases(recorder.steps, engine.runner.decoder, read_bytes_per_s),
            "machine": machine,
        }
    parts = "s >8.2f | model >8.2f | linears >8.2f | KV >7.2f | share >7.0%"
    lines = [
        f"{found.description}, {figures['dtype']}; {work.to_text()}.",
        f"{facts_to_text(machine)}. Memory read at {read_bytes_per_s / 1e9:.1f} GB/s.",
        "",
        *table(f"steps of <22 | steps >7, | tokens >9, | {parts}", [tuple(p.values()) for p in figures["phases"]]),
        "model: part of s in the model; linears + KV: the floor; share: floor / s. Prompt steps include decoding rows.",
    ]
    report("floor", figures, lines, as_json)


if __name__ == "__main__":
    main()
