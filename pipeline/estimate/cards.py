"""Speed and price of a model on the cards of `hardware.yaml`, by the cost model, and the settings that cost least.

Kernels reach the measured shares of the data sheet (`roofline/shares.py`). A job's time is that of a sample of its
requests, simulated on one engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from pipeline.engine.startup.memory import weight_bytes, weights_of_steps
from pipeline.estimate.fit import GROUP_SIZES, Fit, ServedModel
from pipeline.formatting import counted, money
from pipeline.kernels.cache import head_bytes
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Reached, StepLoad, Weights, step_seconds
from pipeline.roofline.job_simulation import Batching, JobSeconds, RequestTokens, simulate_job
from pipeline.roofline.shares import BOUND, MEASURED

CONTEXT = 512  # tokens of each sequence of `predicted_speed`, limited by the model's context
LOAD_BYTES_PER_S = 1e9  # assumed speed of reading the checkpoint
STARTUP_S = 40.0  # assumed start of a process with CUDA and its kernels
MIN_GAIN = 0.03  # share of the cost; the cost model cannot resolve less


@dataclass(frozen=True)
class PredictedSpeed:
    """Tokens per second of CONTEXT-token prompts alone, and of decoding `sequences` at once at such contexts."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    sequences: int


def predicted_speed(card: Card, model: ServedModel, fit: Fit) -> PredictedSpeed | None:
    """Return the speed of an engine on cards of this kind; None if it cannot run, or the cost model does not cover its
    dtype."""
    context = min(CONTEXT, model.config.max_position)
    sequences = min(fit.num_sequences(context), fit.limits.max_num_seqs)
    if fit.lacks or not sequences or fit.dtype.itemsize != 2:
        return None
    size, weights, value_bytes = _costs(card, model, fit)
    ceilings = Ceilings.of_card(card, MEASURED, fit.num_cards)

    def tokens_per_s(sequences: int, count: int) -> float:
        step = StepLoad(np.full(sequences, count), np.full(sequences, context), sequences)
        return step.num_tokens / step_seconds(step, size, weights, ceilings, value_bytes).total_s

    prompts = max(fit.limits.max_num_batched_tokens // context, 1)
    return PredictedSpeed(tokens_per_s(prompts, context), tokens_per_s(sequences, 1), sequences)


def _costs(card: Card, model: ServedModel, fit: Fit) -> tuple[DecoderSize, Weights, float]:
    """Return what the cost model needs: sizes, form of the weights, and bytes of one number in the KV cache."""
    config, head_dim = model.config, model.config.head_dim
    weights = weights_of_steps(config, card, fit.activations, fit.keeps_dense)
    return config.size, replace(weights, host_bytes=fit.host_bytes), head_bytes(head_dim, fit.kv_dtype) / head_dim


@dataclass(frozen=True)
class OnCard:
    """One engine on `fit.num_cards` cards that computes a sample of requests. lacks: why it cannot; else empty."""

    card: Card
    model: ServedModel
    fit: Fit
    requests: Sequence[RequestTokens]
    lacks: str = ""

    @property
    def num_cards(self) -> int:
        return self.fit.num_cards

    @cached_property
    def best(self) -> JobSeconds:
        """The simulated job with kernels at the data sheet."""
        return self._simulated(BOUND)

    @cached_property
    def expected(self) -> JobSeconds:
        """The simulated job with kernels at the engine's share of the data sheet."""
        return self._simulated(MEASURED)

    def _simulated(self, reached: Reached) -> JobSeconds:
        size, weights, value_bytes = _costs(self.card, self.model, self.fit)
        limits, fit = self.fit.limits, self.fit
        batching = Batching(limits.max_num_seqs, limits.max_num_batched_tokens, fit.num_pages, fit.pages)
        ceilings = Ceilings.of_card(self.card, reached, fit.num_cards)
        return simulate_job(self.requests, size, weights, ceilings, batching, kv_value_bytes=value_bytes)

    @property
    def load_s(self) -> float:
        """Assumed time of reading the checkpoint."""
        config, fit = self.model.config, self.fit
        num_bytes = weight_bytes(
            config, torch.device("cuda"), fit.dtype, keeps_dense=False, activations=fit.activations
        )
        return num_bytes / LOAD_BYTES_PER_S

    @property
    def card_tokens_per_s(self) -> float:
        """Expected prompt and generated tokens per second of each card."""
        return self.expected.tokens_per_s / self.num_cards

    @property
    def usd_per_million(self) -> float | None:
        """Expected price of 1M of these tokens; None if the card has none."""
        usd = self.card.on_demand_usd
        return None if usd is None else usd / 3600 / self.card_tokens_per_s * 1e6


def on_card(card: Card, model: ServedModel, num_cards: int, requests: Sequence[RequestTokens]) -> OnCard:
    """Return an engine over `num_cards` cards of this kind, perhaps with what it lacks."""
    fit = model.on_card(card, num_cards)
    lacks, longest = fit.lacks, max(request.prompt + request.output for request in requests)
    if not lacks and fit.dtype.itemsize != 2:
        lacks = "its speed is known in 16 bit only"
    if not lacks and fit.kv_tokens < longest + fit.pages.page_size:
        cards = "its memory" if num_cards == 1 else f"the memory of {num_cards} cards"
        lacks = f"the weights and one request do not fit {cards}"
    return OnCard(card, model, fit, requests, lacks)


def options_on(card: Card, models: Sequence[ServedModel], requests: Sequence[RequestTokens]) -> list[OnCard]:
    """Return the engines that fit, of each model and each size of GROUP_SIZES."""
    found = (on_card(card, model, num_cards, requests) for model in models for num_cards in GROUP_SIZES)
    return [each for each in found if not each.lacks]


def cheapest(options: Sequence[OnCard]) -> OnCard:
    """Return the option of a card with the lowest cost per token; of nearly equal ones the first."""
    fastest = max(option.card_tokens_per_s for option in options)
    return next(option for option in options if option.card_tokens_per_s >= fastest * (1 - MIN_GAIN))


@dataclass(frozen=True)
class Advice:
    """A setting to change. key: the setting with its value. effect: saved share of the machine time (0.2: a fifth);
    None if the advice is not about time."""

    key: str
    reason: str
    effect: float | None = None


def advice_for_card(options: Sequence[OnCard], model: ServedModel) -> list[Advice]:
    """Advise on the cards of an engine, then on the form of the model, by the cost per token. options: of one card."""
    own = [option for option in options if option.model is model]
    num_cards = model.engine.tensor_parallel_size
    before = next((option for option in own if option.num_cards == num_cards), None)
    advice: list[Advice] = []
    for better in (cheapest(each) for each in (own, options) if each):
        key = ", ".join(f"{name}: {value}" for name, value in _changes(better, model).items())
        if before is None:
            advice.append(Advice(key, f"the model does not fit {counted(num_cards, 'card')}"))
        elif (gain := 1 - before.card_tokens_per_s / better.card_tokens_per_s) >= MIN_GAIN:
            reason = f"{better.card_tokens_per_s:,.0f} tokens/s a card instead of {before.card_tokens_per_s:,.0f}"
            if better.usd_per_million is not None:
                reason += f", 1M tokens for {money(better.usd_per_million)} instead of {money(before.usd_per_million)}"
            if better.model is not model:
                reason += "; `pipeline eval` shows how outputs change"
            advice.append(Advice(key, reason, gain))
        else:
            continue
        before = better
    return advice


def _changes(option: OnCard, model: ServedModel) -> dict[str, object]:
    """Return the keys of the job file by which an option differs from the job."""
    engine, own = option.model.engine, model.engine
    settings = {
        "engine.tensor_parallel_size": (option.num_cards, own.tensor_parallel_size),
        "model.quantization": (engine.quantization, own.quantization),
        "engine.activation_dtype": (engine.activation_dtype, own.activation_dtype),
    }
    return {key: value for key, (value, before) in settings.items() if value != before}
