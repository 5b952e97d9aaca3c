"""What a card could do at the most with a model and the fixed request sets, by the cost model. Needs no card.

Figures are bounds where all shares are 1: no engine is faster. With shares that kernels reach they are predictions.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipeline.bench.gpu.request_sets import REQUEST_SETS, RequestSet
from pipeline.bench.shapes import GROUP, NAMES, SHAPES
from pipeline.errors import ConfigError
from pipeline.hardware import Card, load_cards
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.locate import locate_model
from pipeline.roofline.job import Batching, JobSeconds, kv_room, simulate_job
from pipeline.roofline.step import (
    AWQ,
    DENSE,
    Ceilings,
    DecoderSize,
    Reached,
    StepSeconds,
    StepTokens,
    Weights,
    crossover,
    step_seconds,
)

CONTEXT = 1024  # of each sequence in the table of steps
DECODING = (1, 16, 64, 256, 1024)  # sequences that compute one token each
PROMPTS = 8  # prompts of CONTEXT tokens in one step


@dataclass(frozen=True)
class StepBound:
    card: str
    work: str
    seconds: StepSeconds


@dataclass(frozen=True)
class JobBound:
    """A request set on a card; `job` is None where the model or a request does not fit its memory."""

    card: str
    requests: str
    weights: str
    kv_tokens: int
    job: JobSeconds | None


@dataclass(frozen=True)
class RooflineBench:
    model: str
    reached: Reached
    cards: tuple[Card, ...]
    crossovers: dict[str, int | None]  # card -> tokens from which 16-bit products are faster than int4 ones
    steps: tuple[StepBound, ...]
    jobs: tuple[JobBound, ...]
    sets: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "roofline", **asdict(self)}

    def to_text(self) -> str:
        r = self.reached
        lines = [
            f"By the cost model, nothing was run: {self.model}.",
            f"Shares of the cards' figures that kernels reach: bandwidth {r.bandwidth:g}, products {r.gemm:g}, int4 "
            f"products {r.int4:g}; {r.step_s * 1e3:g} ms beside each step."
            + (" A bound: nothing is faster." if r == Reached() else ""),
            "",
            f"Steps, milliseconds; contexts of {CONTEXT:,} tokens. Attention counts the longer of products and KV.",
            f"{'card':<16} {'step':<26} {'all':>8} {'linears':>8} {'attention':>10} {'KV':>8} {'head':>8}",
        ]
        for bound in self.steps:
            s = bound.seconds
            parts = (s.total_s, s.linears_s, s.attention_s, s.kv_s, s.head_s)
            widths = (8, 8, 10, 8, 8)
            told = " ".join(f"{part * 1e3:>{width}.2f}" for part, width in zip(parts, widths))
            lines.append(f"{bound.card:<16} {bound.work:<26} {told}")
        for card, tokens in self.crossovers.items():
            if tokens is not None:
                lines.append(f"{card}: 16-bit products are faster than int4 ones from {tokens} tokens on.")
        lines += [
            "",
            "Whole jobs. tail: seconds in which fewer requests were left than half of the most at once.",
            f"{'card':<16} {'requests':<16} {'weights':<14} {'seconds':>8} {'tokens out/s':>13} {'all/s':>9} "
            f"{'tail s':>7} {'at once':>8} {'KV used':>8}",
        ]
        for bound in self.jobs:
            name = f"{bound.card:<16} {bound.requests:<16} {bound.weights:<14}"
            if bound.job is None:
                lines.append(f"{name} does not fit: {bound.kv_tokens:,} tokens of room beside the weights")
                continue
            j = bound.job
            lines.append(
                f"{name} {j.wall_s:>8.2f} {j.output_tokens_per_s:>13,.0f} {j.tokens_per_s:>9,.0f} {j.tail_s:>7.2f} "
                f"{j.sequences:>8.0f} {j.kv_used:>8.0%}"
            )
        return "\n".join([*lines, "", *self.sets])


def bench_roofline(
    model: str = "llama-8b-awq",
    cards: Sequence[str] = (),
    requests: Sequence[str] = (),
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 8192,
    reached: Reached = Reached(),  # noqa: B008 (frozen)
) -> RooflineBench:
    """Steps and jobs of `model` (a shape's name or a checkpoint) on `cards` (beginnings of their names; else all).

    Raises ConfigError for a card or request set that is not there, ModelError for the checkpoint.
    """
    size, weights, about = model_size(model)
    chosen = tuple(dict.fromkeys(find_card(name) for name in cards)) or load_cards()
    sets = [find_set(name) for name in requests] or list(REQUEST_SETS.values())
    steps: list[StepBound] = []
    jobs: list[JobBound] = []
    crossovers: dict[str, int | None] = {}
    for card in chosen:
        ceilings = ceilings_of(card, reached)
        crossovers[card.name] = crossover(size, weights, ceilings)
        steps += [
            StepBound(card.name, work, step_seconds(tokens, size, weights, ceilings)) for work, tokens in _steps()
        ]
        jobs += [_job(each, size, weights, ceilings, max_num_seqs, max_num_batched_tokens) for each in sets]
    told = tuple(each.to_text() for each in sets)
    return RooflineBench(about, reached, chosen, crossovers, tuple(steps), tuple(jobs), told)


def ceilings_of(card: Card, reached: Reached) -> Ceilings:
    """The card's figures as its maker states them."""
    return Ceilings(card.name, card.bandwidth_bytes_per_s, card.bf16_flops, card.memory_bytes, reached)


def find_card(name: str) -> Card:
    """The card of that name, else the first whose name begins so, in any case. Raises ConfigError."""
    cards = load_cards()
    found = [card for card in cards if card.name.lower().startswith(name.lower())]
    if not found:
        raise ConfigError(f"--card {name}: expected the beginning of one of {', '.join(c.name for c in cards)}")
    return min(found, key=lambda card: card.name.lower() != name.lower())


def find_set(name: str) -> RequestSet:
    if name not in REQUEST_SETS:
        raise ConfigError(f"--requests {name}: expected one of {', '.join(REQUEST_SETS)}")
    return REQUEST_SETS[name]


def model_size(name: str) -> tuple[DecoderSize, Weights, str]:
    """Sizes and weights of a shape, without writing it, or of a checkpoint, and what to say of it."""
    if name not in NAMES:
        config = read_config(locate_model(name))
        return decoder_size(config), weights_of(config), f"model {name}"
    shape = SHAPES[name.removesuffix("-awq")]
    size = DecoderSize(
        shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab
    )
    return size, replace(AWQ, group_size=GROUP) if name.endswith("-awq") else DENSE, f"shape {name}"


def decoder_size(config: ModelConfig) -> DecoderSize:
    return DecoderSize(
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
    )


def weights_of(config: ModelConfig) -> Weights:
    """What the linears of a checkpoint are on a card: 4-bit ones stay so, all others are computed from 16 bit."""
    quantized = config.quantization
    if quantized is None or quantized.bits != 4:
        return DENSE
    return replace(AWQ, group_size=quantized.group_size or config.hidden_size)


def _steps() -> list[tuple[str, StepTokens]]:
    def tokens(sequences: int, count: int) -> StepTokens:
        return StepTokens(np.full(sequences, count), np.full(sequences, CONTEXT), sequences)

    decoding = [(f"decoding, {n:,} at once", tokens(n, 1)) for n in DECODING]
    return [*decoding, (f"{PROMPTS} prompts of {CONTEXT:,}", tokens(PROMPTS, CONTEXT))]


def _job(
    work: RequestSet,
    size: DecoderSize,
    weights: Weights,
    ceilings: Ceilings,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> JobBound:
    """With 16-bit weights beside int4 ones or without, whichever ends sooner."""
    kinds = [("16 bit", weights)]
    if weights.int4:
        kinds = [("int4", replace(weights, cached=False)), ("int4 + 16 bit", weights)]
    found: list[JobBound] = []
    for name, kind in kinds:
        room = kv_room(size, kind, ceilings)
        job = None
        if room >= work.longest + 64:
            batching = Batching(max_num_seqs, max_num_batched_tokens, room)
            job = simulate_job(work.lengths(), size, kind, ceilings, batching, work.shared_prefix)
        found.append(JobBound(ceilings.name, work.name, name, room, job))
    return min(found, key=lambda bound: float("inf") if bound.job is None else bound.job.wall_s)
