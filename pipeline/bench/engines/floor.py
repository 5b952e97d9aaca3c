"""How fast the engine's steps could have been: its own linears alone, and keys and values read from memory.

The linears of the loaded model are timed at numbers of tokens that the steps had (between them: linear interpolation;
from 64 tokens on, where weights are no longer what is waited for, two layers stand for all). After the last layer's
keys and values only the rows that sample are needed, so the rest of that layer and the head count for those alone.
Decoding also reads each sequence's keys and values, which takes its time at the memory's measured bandwidth. Not in the
floor: attention over a prompt, norms, rotations, sampling, the scheduler. Each floor is the least of some passes and
the steps' time is a sum, so a little disturbance makes the share too low; on a busy machine it says nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pipeline.bench.engines.contender import StepTime
from pipeline.bench.measure import fastest
from pipeline.model.decoder import Decoder

MIN_PASSES, MIN_S = 5, 0.1
MANY_TOKENS = 64
MAX_POINTS = 9
DECODE_GROUPS = ((1, 4), (5, 16), (17, 32), (33, 64), (65, 1 << 30))


@dataclass(frozen=True)
class Phase:
    """Steps of one kind: their time, the model's part of it, and the floor."""

    name: str
    steps: int
    tokens: int
    wall_s: float
    model_s: float
    gemm_s: float
    kv_s: float

    @property
    def share(self) -> float:
        """How much of the time the floor is; 1.0 is as fast as can be."""
        return (self.gemm_s + self.kv_s) / self.wall_s


@dataclass(frozen=True)
class Curve:
    """Seconds by number of tokens; none take none."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, num_tokens: int) -> float:
        return float(np.interp(num_tokens, self.tokens, self.seconds)) if num_tokens else 0.0


def phases(steps: Sequence[StepTime], decoder: Decoder, bytes_per_s: float) -> list[Phase]:
    """The time of `steps` by phase, beside the floor. Takes seconds to some ten of them."""
    tokens = _points([step.num_tokens for step in steps])
    rows = _points([step.num_logit_rows for step in steps])
    before, after = measure_layers(decoder, sorted({*tokens, *rows}))
    head = measure_head(decoder, rows)
    num_layers = len(decoder.layers)
    kv_bytes = decoder.config.kv_bytes_per_token(decoder.dtype)

    def linears_s(step: StepTime) -> float:
        layers_s = before.at(step.num_tokens) + after.at(step.num_tokens) * (num_layers - 1) / num_layers
        return layers_s + after.at(step.num_logit_rows) / num_layers + head.at(step.num_logit_rows)

    def phase(name: str, chosen: list[StepTime]) -> Phase:
        return Phase(
            name,
            len(chosen),
            sum(s.num_tokens for s in chosen),
            sum(s.wall_s for s in chosen),
            sum(s.model_s for s in chosen),
            sum(linears_s(s) for s in chosen),
            sum(s.kv_tokens for s in chosen) * kv_bytes / bytes_per_s,
        )

    decoding = [step for step in steps if step.decodes_only]
    kinds = [("prompts", [step for step in steps if not step.decodes_only]), ("decoding", decoding)]
    for low, high in DECODE_GROUPS:
        name = f"  {low} to {high} at once" if high < 1 << 30 else f"  {low} and more"
        kinds.append((name, [step for step in decoding if low <= step.num_sequences <= high]))
    return [phase(name, chosen) for name, chosen in kinds if chosen]


@torch.inference_mode()
def measure_layers(decoder: Decoder, tokens: Sequence[int]) -> tuple[Curve, Curve]:
    """Of all layers, run one after the other as in a step: the linears before attention, and those after it."""
    c = decoder.config
    widths = (c.hidden_size, c.num_heads * c.head_dim, c.hidden_size, c.intermediate_size)
    before, after = [], []
    for num_tokens in tokens:
        layers = decoder.layers if num_tokens < MANY_TOKENS else decoder.layers[:2]
        x_qkv, x_o, x_up, x_down = (torch.randn(num_tokens, width).to(decoder.dtype) for width in widths)
        passes: list[tuple[float, float]] = []
        while _wants_more([sum(each) for each in passes]):
            before_s = after_s = 0.0
            for layer in layers:
                start = time.perf_counter()
                layer.qkv(x_qkv)
                between = time.perf_counter()
                layer.o(x_o)
                layer.gate_up(x_up)
                layer.down(x_down)
                before_s += between - start
                after_s += time.perf_counter() - between
            passes.append((before_s, after_s))
        scale = len(decoder.layers) / len(layers)
        least = min(passes[1:], key=sum)  # the first one warms up
        before.append(least[0] * scale)
        after.append(least[1] * scale)
    return Curve(tuple(tokens), tuple(before)), Curve(tuple(tokens), tuple(after))


@torch.inference_mode()
def measure_head(decoder: Decoder, rows: Sequence[int]) -> Curve:
    """The output embedding."""
    seconds, head = [], decoder.lm_head
    assert head is not None, "a model that generates"
    for num_rows in rows:
        x_RH = torch.randn(num_rows, decoder.config.hidden_size).to(decoder.dtype)
        seconds.append(fastest(partial(head, x_RH), MIN_PASSES, MIN_S))
    return Curve(tuple(rows), tuple(seconds))


def _wants_more(passes: Sequence[float]) -> bool:
    """One pass to warm up, then some, and more where they are so short that a few may all be disturbed."""
    return len(passes) <= MIN_PASSES or sum(passes) < MIN_S


def _points(sizes: Sequence[int]) -> list[int]:
    """A few of the sizes above 0, the ends among them, evenly spread over their ranks and over their logarithm."""
    distinct = np.unique([size for size in sizes if size])
    ranks = distinct[np.linspace(0, len(distinct) - 1, MAX_POINTS).round().astype(int)]
    spread = np.geomspace(distinct[0], distinct[-1], MAX_POINTS)
    nearest = distinct[np.abs(distinct[None, :] - spread[:, None]).argmin(1)]
    return sorted({int(size) for size in (*ranks, *nearest)})
