"""PredictedSpeed of a model on a card by the cost model.

Kernels reach the utilization in `roofline/shares.py`. Int4 linears use the engine's path.
"""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.startup.batch_limits import BatchLimits
from pipeline.engine.startup.memory import OffloadPlan
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import Ceilings, StepLoad, step_seconds
from pipeline.roofline.shares import MEASURED

CONTEXT = 512  # tokens of each sequence, limited by the model's context


@dataclass(frozen=True)
class PredictedSpeed:
    """Tokens per second of CONTEXT-token prompts alone, and of decoding `sequences` at once at such contexts."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    sequences: int


def speed_on(
    card: Card,
    config: ModelConfig,
    limits: BatchLimits,
    activation_dtype: str,
    kv_value_bytes: float,
    keeps_dense: bool,
    room: int,
    num_cards: int = 1,
    offload: OffloadPlan | None = None,
) -> PredictedSpeed | None:
    """Return the predicted speed, or None if no sequence fits or the card lacks fp8.

    config: of the whole model. num_cards: of the engine. limits: of a step. room: capacity of the KV cache in tokens.
    """
    context = min(CONTEXT, config.max_position)
    sequences = min(room // context, limits.max_num_seqs)
    weights = config.weights_on_card(activation_dtype)
    if sequences == 0 or (weights.fp8 and card.fp8_flops is None):
        return None
    of_card = crossover_of(card.compute_capability)
    max_fused = of_card.cached if keeps_dense else of_card.scratch
    weights = replace(weights, cached=keeps_dense, fused_tokens=max_fused)
    if offload is not None:
        weights = replace(weights, host_bytes=offload.host_bytes)
    size, ceilings = config.size, Ceilings.of_card(card, MEASURED, num_cards)

    def tokens_per_s(sequences: int, count: int) -> float:
        step = StepLoad(np.full(sequences, count), np.full(sequences, context), sequences)
        return step.num_tokens / step_seconds(step, size, weights, ceilings, kv_value_bytes).total_s

    prompts = max(limits.max_num_batched_tokens // context, 1)
    return PredictedSpeed(tokens_per_s(prompts, context), tokens_per_s(sequences, 1), sequences)
