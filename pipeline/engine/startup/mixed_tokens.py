"""Up to how many tokens steps with prompts (mixed steps) are captured: as long as launching one kernel by kernel takes
the host longer than computing it takes the device.

By the cost model, with assumed times: nothing was measured on a card. A step of one prompt stands for all, since it has
the least to do beside its linears; with more sequences the device takes longer, and the host waits sooner.
"""

import numpy as np

from pipeline.engine.forward.graphs import mixed_sizes
from pipeline.engine.startup.resolve import Resolved
from pipeline.engine.startup.served_form import served_form
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import DENSE_BYTES, Ceilings, DecoderSize, Reached, StepTokens, Weights, step_seconds

LAUNCH_S = 180e-6
"""Of the host for a layer, kernel by kernel: 10 to 16 launches, which docs/performance/gpu-audit.md counts."""
ASSUMED = Reached(bandwidth=0.85, kv=0.8, gemm=0.66, int4=0.45, attention=0.4, fp8=0.5)
"""Shares of the data sheet that kernels are assumed to reach; `pipeline bench gpu` measures them."""
FEWEST_TOKENS = 256
"""Where mixed steps of more are not captured, none are: by `pipeline bench schedule` those of fewer gain 0.6 % at most,
and each size takes time at start."""


def most_mixed_tokens(model: ModelConfig, resolved: Resolved, card: Card | None) -> int:
    """One of `mixed_sizes`; 0: no mixed steps are captured, as on a card that is not known, or where the reference
    computes what the card has no products for."""
    if card is None:
        return 0
    ceilings, size = Ceilings.of_card(card, ASSUMED), model.size
    weights = model.weights_on_card(resolved.activation_dtype)
    if weights.fp8 and ceilings.fp8_flops_per_s is None:
        return 0
    borders = crossover_of(card.compute_capability)
    weights = served_form(weights, size, ceilings, borders, resolved.max_num_seqs, DENSE_BYTES)
    return host_bound_tokens(size, weights, ceilings, resolved.max_num_batched_tokens)


def host_bound_tokens(size: DecoderSize, weights: Weights, ceilings: Ceilings, max_num_batched_tokens: int) -> int:
    """See `most_mixed_tokens`."""
    most = 0
    for num_tokens in mixed_sizes(max_num_batched_tokens):
        prompt = np.array([num_tokens])
        device_s = step_seconds(StepTokens(prompt, prompt, 1), size, weights, ceilings).total_s
        if device_s > size.layers * LAUNCH_S:
            break
        most = num_tokens
    return most if most >= FEWEST_TOKENS else 0
