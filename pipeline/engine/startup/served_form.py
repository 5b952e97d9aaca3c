"""The form in which an engine on a card would keep its weights, for estimates: the rule of `dense_weights_fit`, by the
cost model and without a card."""

from dataclasses import replace

from pipeline.engine.startup.memory import EXPECTED_TOKENS, SLACK_BYTES, cache_before_dense
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Weights
from pipeline.roofline.job_simulation import kv_room


def served_form(
    weights: Weights, size: DecoderSize, card: Ceilings, borders: Crossover, max_num_seqs: int, kv_value_bytes: float
) -> Weights:
    """What the engine keeps 4-bit weights as, and up to how many tokens it takes the fused product. Other weights stay
    as they are."""
    if weights.fp8 or not weights.int4:
        return weights
    cached = replace(weights, cached=True, fused_tokens=borders.cached)
    if usable_kv_room(size, cached, card, kv_value_bytes) >= cache_before_dense(max_num_seqs, EXPECTED_TOKENS):
        return cached
    return replace(weights, cached=False, fused_tokens=borders.scratch)


def usable_kv_room(size: DecoderSize, weights: Weights, card: Ceilings, kv_value_bytes: float) -> int:
    """Tokens in the KV cache beside the weights and what is kept free."""
    slack = int(SLACK_BYTES / size.kv_bytes_per_token(kv_value_bytes))
    return kv_room(size, weights, card, kv_value_bytes=kv_value_bytes) - slack
