"""Memory and work of a model of which only the sizes are known, for the cost model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.startup.memory import EXPECTED_TOKENS, SLACK_BYTES, cache_before_dense
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.roofline.cost_model import DENSE_BYTES, Ceilings, DecoderSize, Weights, seen_keys
from pipeline.roofline.job_simulation import RequestTokens


def resident_bytes(weights: Weights, size: DecoderSize) -> float:
    """Return the bytes of the linears, the embedding and the head (tied ones counted twice)."""
    cached_bytes = DENSE_BYTES if weights.packed_bits is not None and weights.cached else 0.0
    linears = (size.linear_parameters - size.expert_parameters) * (weights.read_bytes + cached_bytes)
    return linears + size.expert_parameters * weights.expert_bytes + 2 * size.head_parameters * DENSE_BYTES


def kv_room(size: DecoderSize, weights: Weights, card: Ceilings, slack_bytes: float = 0.0) -> int:
    """Return the KV cache's tokens in 90% of each card's memory minus its share of the weights; 0 if the weights do not
    fit. size: of the whole model."""
    size = size.local(card.num_cards)
    left = card.memory_bytes * 0.9 - resident_bytes(weights, size) - slack_bytes
    return max(int(left // size.kv_bytes_per_token()), 0)


def weight_layout(
    weights: Weights, size: DecoderSize, card: Ceilings, borders: Crossover, max_num_seqs: int
) -> Weights:
    """Return packed weights with `cached` set if 16-bit copies fit in addition to the KV cache, and `fused_tokens`, the
    maximum tokens of a step for the fused product. Other weights are returned unchanged."""
    if weights.packed_bits is None:
        return weights
    cached = replace(weights, cached=True, fused_tokens=borders.cached)
    if kv_room(size, cached, card, SLACK_BYTES) >= cache_before_dense(max_num_seqs, EXPECTED_TOKENS):
        return cached
    return replace(weights, cached=False, fused_tokens=borders.scratch)


@dataclass(frozen=True)
class Moment:
    """Progress of a run: seconds since its start, unfinished requests, sequences in the previous step."""

    at_s: float
    unfinished: int
    sequences: int


def tail_seconds(moments: Sequence[Moment]) -> float:
    """Return the time after the last moment at which unfinished requests were at least half of the peak batch size."""
    half = max(moment.sequences for moment in moments) / 2
    full = [moment.at_s for moment in moments if moment.unfinished >= half]
    return moments[-1].at_s - (full[-1] if full else 0.0)


def job_flops(requests: Sequence[RequestTokens], size: DecoderSize, cached_tokens: int = 0) -> float:
    """Return the operations of a job's products. cached_tokens: prompt tokens found in the cache, spread evenly."""
    computed = sum(n.prompt + n.output - 1 for n in requests) - cached_tokens
    last, cached = np.array([n.prompt + n.output - 1 for n in requests]), np.array(cached_tokens / len(requests))
    key_dims = sum(
        dims * (seen_keys(last, window) - seen_keys(cached, window)).sum()
        for window, (dims, _) in size.kv_widths().items()
    )
    attention = 4.0 * size.heads * float(key_dims)
    head = 2.0 * size.head_parameters * sum(n.output for n in requests)
    active = size.linear_parameters - size.expert_parameters + size.active_expert_parameters
    return 2.0 * active * computed + head + attention


def job_bytes(
    requests: Sequence[RequestTokens], size: DecoderSize, weights: Weights, num_steps: int, shared_prefix: int = 0
) -> float:
    """Return the bytes that a job of `num_steps` must read: in each step all weights in their smallest form, and the
    keys and values that each generated token sees. A prefix that all requests share is read once per step. Of experts,
    the number that steps of equal size use."""
    decoded = sum(n.output - 1 for n in requests)
    linears, experts = size.read_parameters((decoded + sum(n.prompt for n in requests)) / num_steps)
    step_bytes = linears * weights.read_bytes + experts * weights.expert_bytes + size.head_parameters * DENSE_BYTES
    prompt = np.array([n.prompt for n in requests])
    last = np.array([n.prompt + n.output - 1 for n in requests])
    spared = shared_prefix * max(decoded - num_steps, 0)
    key_values = sum(
        values * ((seen_keys(last, window) - seen_keys(prompt, window)).sum() - (spared if window is None else 0))
        for window, (_, values) in size.kv_widths().items()
    )
    return num_steps * step_bytes + 2 * DENSE_BYTES * float(key_values)
