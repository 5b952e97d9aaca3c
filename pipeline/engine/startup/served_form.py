"""The form in which an engine would keep its weights on a card, for estimates made without one: the rule of
`dense_weights_fit` in `startup/memory.py`, with sizes from the cost model."""

from dataclasses import replace

from pipeline.engine.startup.memory import EXPECTED_TOKENS, SLACK_BYTES, cache_before_dense
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Weights
from pipeline.roofline.job_simulation import kv_room


def served_form(
    weights: Weights, size: DecoderSize, card: Ceilings, borders: Crossover, max_num_seqs: int, kv_value_bytes: float
) -> Weights:
    """4-bit weights with `cached` set where 16-bit copies fit beside the KV cache, and `fused_tokens` the most tokens
    of a step that go through the fused product. Other weights are returned unchanged."""
    if weights.fp8 or not weights.int4:
        return weights
    cached = replace(weights, cached=True, fused_tokens=borders.cached)
    if usable_kv_room(size, cached, card, kv_value_bytes) >= cache_before_dense(max_num_seqs, EXPECTED_TOKENS):
        return cached
    return replace(weights, cached=False, fused_tokens=borders.scratch)


def usable_kv_room(size: DecoderSize, weights: Weights, card: Ceilings, kv_value_bytes: float) -> int:
    """Tokens that the KV cache holds beside the weights and the memory that is kept free."""
    slack = int(SLACK_BYTES / size.kv_bytes_per_token(kv_value_bytes))
    return kv_room(size, weights, card, kv_value_bytes=kv_value_bytes) - slack
