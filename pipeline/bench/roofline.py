"""Predict steps and jobs on a card with the cost model, for a model and the fixed request sets. Needs no card.

With the measured utilization of kernels and the engine's own paths, the figures are predictions. With a utilization of
1 and the fastest path for every linear, they are bounds: no engine is faster.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipeline.bench.measure import table
from pipeline.bench.request_sets import REQUEST_SETS, RequestSet, find_set
from pipeline.bench.shapes import GROUP, NAMES, SHAPES
from pipeline.checkpoints.locate import locate_model
from pipeline.engine.startup.memory import weight_layout
from pipeline.engine.startup.resolve import check_activations, no_such_weight
from pipeline.kernels.activations.fp8 import MIN_CAPABILITY
from pipeline.kernels.triton.linear.crossover import Crossover, crossover_of
from pipeline.model.config import read_config
from pipeline.roofline.cards import Card, find_card, load_cards
from pipeline.roofline.cost_model import (
    AWQ,
    DENSE,
    DENSE_BYTES,
    Ceilings,
    DecoderSize,
    Reached,
    StepLoad,
    StepSeconds,
    Weights,
    step_seconds,
)
from pipeline.roofline.job_simulation import Batching, JobSeconds, kv_room, simulate_job
from pipeline.roofline.shares import BOUND, MEASURED, source

CONTEXT = 1024  # of each sequence in the table of steps
DECODING = (1, 16, 64, 256, 1024)  # sequences that decode one token each
PROMPTS = 8  # prompts of CONTEXT tokens in one step
BLOCK_SIZE = 64  # of the KV cache on a card


@dataclass(frozen=True)
class Serving:
    """Settings of the engine that the cost model predicts.

    paths: `engine` uses the engine's crossover and its rule for keeping 16-bit weights next to int4 ones; `fastest`
    uses the fastest path of each linear. shared_reads: a shared prefix is read `once` a step or by `each` sequence.
    """

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    activation_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    paths: str = "engine"
    shared_reads: str = "once"

    def value_bytes(self, size: DecoderSize) -> float:
        return size.fp8_value_bytes if self.kv_cache_dtype == "fp8" else DENSE_BYTES

    def to_text(self) -> str:
        return (
            f"Linears use {'the path that the engine takes' if self.paths == 'engine' else 'the fastest path'}, with "
            f"activations in {'16 bit' if self.activation_dtype == 'auto' else 'fp8'}; the KV cache is in "
            f"{'16 bit' if self.kv_cache_dtype == 'auto' else 'fp8'}; a shared prefix is read "
            f"{'once a step' if self.shared_reads == 'once' else 'by each sequence'}."
        )


@dataclass(frozen=True)
class StepBound:
    card: str
    work: str
    seconds: StepSeconds


@dataclass(frozen=True)
class JobBound:
    """Request set on a card.

    job: None if the model or a request does not fit the memory, or the card lacks a feature. lacks: that feature.
    """

    card: str
    requests: str
    weights: str
    kv_tokens: int
    job: JobSeconds | None
    lacks: str = ""


@dataclass(frozen=True)
class RooflineBench:
    model: str
    serving: Serving
    reached: Reached
    cards: tuple[Card, ...]
    steps: tuple[StepBound, ...]
    jobs: tuple[JobBound, ...]
    sets: tuple[str, ...]

    @property
    def has_choice(self) -> bool:
        """Return whether linears have several paths to choose from."""
        return any(bound.weights.startswith("int4") for bound in self.jobs)

    @property
    def is_bound(self) -> bool:
        served = self.serving.paths == "fastest" or not self.has_choice
        return self.reached == BOUND and self.serving.shared_reads == "once" and served

    def to_json(self) -> dict[str, Any]:
        return {"bench": "roofline", **asdict(self), "is_bound": self.is_bound}

    def to_text(self) -> str:
        reached = "kernels at the data sheet" if self.reached == BOUND else source([card.name for card in self.cards])
        lines = [
            f"Predicted by the cost model; nothing was run: {self.model}.",
            self.serving.to_text(),
            f"{reached[0].upper()}{reached[1:]}." + (" A bound: no engine is faster." if self.is_bound else ""),
            "",
            f"Steps in milliseconds, contexts of {CONTEXT:,} tokens. Attention is the maximum of compute and KV reads.",
        ]
        steps = [
            (b.card, b.work, *(part * 1e3 for part in (s.total_s, s.linears_s, s.attention_s, s.kv_s, s.head_s)))
            for b, s in ((bound, bound.seconds) for bound in self.steps)
        ]
        parts = "all >8.2f | linears >8.2f | attention >10.2f | KV >8.2f | head >8.2f"
        lines += table(f"card <16 | step <26 | {parts}", steps)
        if self.has_choice and self.serving.paths == "engine":
            lines += [_crossover(card) for card in self.cards]
        lines += [
            "",
            "Whole jobs. tail: seconds with fewer requests left than half of the maximum at once.",
        ]
        rows = []
        for bound in self.jobs:
            name, j = (bound.card, bound.requests, bound.weights), bound.job
            if j is None:
                lacks = bound.lacks or f"does not fit: the KV cache has room for {bound.kv_tokens:,} tokens"
                rows.append((*name, lacks, *[None] * 5))
            else:
                rates = j.output_tokens_per_s, j.tokens_per_s
                rows.append((*name, j.wall_s, *rates, j.tail_s, j.sequences, j.kv_used))
        figures = "tokens out/s >13,.0f | all/s >9,.0f | tail s >7.2f | at once >8.0f | KV used >8.0%"
        lines += table(f"card <16 | requests <16 | weights <14 | seconds >8.2f | {figures}", rows)
        return "\n".join([*lines, "", *self.sets])


def _crossover(card: Card) -> str:
    at = crossover_of(card.compute_capability)
    return (
        f"{card.name}: int4 kernel up to {at.cached} tokens with 16-bit weights kept, up to {at.scratch} without "
        f"({at.source})."
    )


def bench_roofline(
    model: str = "llama-8b-awq",
    cards: Sequence[str] = (),
    requests: Sequence[str] = (),
    serving: Serving = Serving(),
    reached: Reached = MEASURED,
) -> RooflineBench:
    """Predict steps and jobs of `model` (a shape's name or a checkpoint) on `cards` (prefixes of names; empty: all).

    Raises ConfigError for an unknown card or request set and for an activation dtype that the weights do not support,
    ModelError for a checkpoint that cannot be read.
    """
    size, weights, description = model_size(model, serving.activation_dtype)
    chosen = tuple(dict.fromkeys(find_card(name) for name in cards)) or load_cards()
    sets = [find_set(name) for name in requests] or list(REQUEST_SETS.values())
    steps: list[StepBound] = []
    jobs: list[JobBound] = []
    for card in chosen:
        ceilings = Ceilings.of_card(card, reached)
        served = crossover_of(card.compute_capability)
        jobs += [_job(each, size, weights, ceilings, serving, served) for each in sets]
        if weights.fp8 and card.fp8_flops is None:
            continue
        _, kind = _kinds(size, weights, ceilings, serving, served)[-1]
        steps += [
            StepBound(card.name, work, step_seconds(tokens, size, kind, ceilings, serving.value_bytes(size)))
            for work, tokens in _steps()
        ]
    texts = tuple(each.to_text() for each in sets)
    return RooflineBench(description, serving, reached, chosen, tuple(steps), tuple(jobs), texts)


def model_size(name: str, activation_dtype: str = "auto") -> tuple[DecoderSize, Weights, str]:
    """Return sizes, weights and a description of a shape, without writing it, or of a checkpoint.

    Raises ConfigError for an activation dtype that the weights do not support.
    """
    if name in NAMES:
        shape = SHAPES[name.removesuffix("-awq")]
        size = shape.size
        weights = replace(AWQ, group_size=GROUP, fp8=activation_dtype == "fp8") if name.endswith("-awq") else DENSE
        if activation_dtype != "auto" and not weights.fp8:
            raise no_such_weight(activation_dtype, "16- or 32-bit weights")
        return size, weights, f"shape {name}"
    config = read_config(locate_model(name))
    check_activations(activation_dtype, config.quantization)
    return config.size, config.weights_on_card(activation_dtype), f"model {name}"


def _steps() -> list[tuple[str, StepLoad]]:
    def tokens(sequences: int, count: int) -> StepLoad:
        return StepLoad(np.full(sequences, count), np.full(sequences, CONTEXT), sequences)

    decoding = [(f"decoding, {n:,} at once", tokens(n, 1)) for n in DECODING]
    return [*decoding, (f"{PROMPTS} prompts of {CONTEXT:,}", tokens(PROMPTS, CONTEXT))]


def _kinds(
    size: DecoderSize, weights: Weights, ceilings: Ceilings, serving: Serving, served: Crossover
) -> list[tuple[str, Weights]]:
    """Return names and layouts of the weights: the engine's choice, or all layouts for the `fastest` paths."""
    if weights.fp8 or not weights.int4:
        return [("fp8" if weights.fp8 else "16 bit", weights)]
    if serving.paths == "fastest":
        return [("int4", replace(weights, cached=False)), ("int4 + 16 bit", replace(weights, cached=True))]
    form = weight_layout(weights, size, ceilings, served, serving.max_num_seqs, serving.value_bytes(size))
    return [("int4 + 16 bit" if form.cached else "int4", form)]


def _job(
    work: RequestSet, size: DecoderSize, weights: Weights, ceilings: Ceilings, serving: Serving, served: Crossover
) -> JobBound:
    """Simulate a request set with each layout of the weights and return the fastest job."""
    if weights.fp8 and ceilings.fp8_flops_per_s is None:
        needed = ".".join(map(str, MIN_CAPABILITY))
        lacks = f"has no fp8, which needs compute capability {needed}"
        return JobBound(ceilings.name, work.name, "fp8", 0, None, lacks)
    value_bytes = serving.value_bytes(size)
    bounds: list[JobBound] = []
    for name, kind in _kinds(size, weights, ceilings, serving, served):
        room = kv_room(size, kind, ceilings, kv_value_bytes=value_bytes)
        job = None
        if room >= work.longest + BLOCK_SIZE:
            batching = Batching(serving.max_num_seqs, serving.max_num_batched_tokens, room, BLOCK_SIZE)
            once = serving.shared_reads == "once"
            lengths = work.lengths()
            job = simulate_job(lengths, size, kind, ceilings, batching, work.shared_prefix, value_bytes, once)
        bounds.append(JobBound(ceilings.name, work.name, name, room, job))
    return min(bounds, key=lambda bound: float("inf") if bound.job is None else bound.job.wall_s)
