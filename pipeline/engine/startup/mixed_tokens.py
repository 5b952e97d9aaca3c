"""Maximum number of tokens of captured steps with prompts (mixed steps): mixed steps are captured as long as launching
one kernel by kernel takes the host longer than the device takes to compute it.

The host's time was measured, the device's comes from the cost model. A step of one prompt represents all mixed steps,
because it has the least work besides its linears; with more sequences the device takes longer.
"""

import numpy as np

from pipeline.engine.forward.graphs import mixed_sizes
from pipeline.engine.startup.memory import cache_before_dense, dense_weights_fit, weights_of_steps
from pipeline.engine.startup.resolve import Resolved
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import Ceilings, DecoderSize, StepLoad, Weights, step_seconds
from pipeline.roofline.shares import MEASURED

LAUNCH_S = 250e-6
"""Host time of a layer, kernel by kernel: 13 launches of 19 us. Measured next to one H200, 2026-11-26: 240 to 290 us in
steps of an 8B model, 210 to 300 in those of a 0.6B model."""


def max_mixed_tokens(model: ModelConfig, resolved: Resolved, card: Card | None) -> int:
    """Return one of `mixed_sizes`; 0 if no mixed steps are captured, as on an unknown card, or where the card lacks the
    products and the reference computes them."""
    if card is None:
        return 0
    keeps_dense = resolved.offload is None and dense_weights_fit(
        model,
        resolved.dtype,
        resolved.kv_dtype,
        int(card.memory_bytes * resolved.gpu_memory_utilization),
        cache_before_dense(resolved.max_num_seqs, resolved.max_model_len),
    )
    weights = weights_of_steps(model, card, resolved.activations, keeps_dense)
    if weights.fp8 and card.fp8_flops is None:
        return 0
    return host_bound_tokens(model.size, weights, Ceilings.of_card(card, MEASURED), resolved.max_num_batched_tokens)


def host_bound_tokens(size: DecoderSize, weights: Weights, ceilings: Ceilings, max_num_batched_tokens: int) -> int:
    """Return the largest of `mixed_sizes` that the host limits; see `max_mixed_tokens`."""
    max_tokens = 0
    for num_tokens in mixed_sizes(max_num_batched_tokens):
        prompt = np.array([num_tokens])
        device_s = step_seconds(StepLoad(prompt, prompt, 1), size, weights, ceilings).total_s
        if device_s > size.layers * LAUNCH_S:
            break
        max_tokens = num_tokens
    return max_tokens
