"""Time of a whole job by the cost model: continuous batching of requests with known lengths.

A request is admitted if the running ones, which grow token by token, will always leave it its full length in the KV
cache, so nothing is preempted. The engine's admission does the same if it predicts lengths well. A step computes one
token of each running sequence that decodes, and chunks of prompts in the order of admission.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.errors import ConfigError
from pipeline.roofline.cost_model import (
    DENSE_BYTES,
    Ceilings,
    DecoderSize,
    StepLoad,
    StepSeconds,
    Weights,
    seen_keys,
    step_seconds,
)


@dataclass(frozen=True)
class RequestTokens:
    """Lengths of a request. Each computes at least one token of its prompt, and generates at least one."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Batching:
    """Limits of a step, and the capacity of the KV cache in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    block_size: int = 64


@dataclass(frozen=True)
class JobSeconds:
    """Simulated time of a job. `parts` sums those of its steps; overlapping parts both count in full, so their total
    may exceed wall_s.

    tail_s: the end of wall_s, in which fewer requests were unfinished than half of the maximum that ran at once.
    kv_used and sequences: averages over time.
    """

    wall_s: float
    tail_s: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    kv_used: float
    sequences: float
    parts: StepSeconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Rate of computed prompt tokens and generated tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s


def kv_room(
    size: DecoderSize, weights: Weights, card: Ceilings, share: float = 0.9, kv_value_bytes: float = DENSE_BYTES
) -> int:
    """Return the KV cache's tokens in `share` of each card's memory minus its share of the weights; 0 if the weights do
    not fit. size: of the whole model."""
    size = size.local(card.num_cards)
    left = card.memory_bytes * share - weights.resident_bytes(size)
    return max(int(left // size.kv_bytes_per_token(kv_value_bytes)), 0)


@dataclass(frozen=True)
class SimulatedMoment:
    """Progress of a run: seconds since its start, unfinished requests, sequences in the previous step."""

    at_s: float
    unfinished: int
    sequences: int


def tail_seconds(moments: Sequence[SimulatedMoment]) -> float:
    """Return the time after the last moment at which unfinished requests were at least half of the peak batch size."""
    half = max(moment.sequences for moment in moments) / 2
    full = [moment.at_s for moment in moments if moment.unfinished >= half]
    return moments[-1].at_s - (full[-1] if full else 0.0)


class RunningRequests:
    """State of continuous batching: arrays over the running requests, in the order of admission.

    waiting: requests to admit, which are removed from it. blocks: each request's final number of blocks, without shared
    ones.
    """

    def __init__(self, waiting: deque[RequestTokens], batching: Batching, shared_prefix: int = 0) -> None:
        self.batching = batching
        self.waiting = waiting
        self.num_blocks = batching.kv_tokens // batching.block_size
        self.shared_blocks = shared_prefix // batching.block_size  # held once, from the first request to the end
        self.shared_tokens = self.shared_blocks * batching.block_size
        self.has_prefix = self.shared_blocks == 0
        self.holds_prefix = 0  # blocks
        self.computed, self.prompt, self.end, self.blocks = (np.zeros(0, dtype=np.int64) for _ in range(4))

    @property
    def held_blocks(self) -> int:
        """Number of blocks in use; a prompt holds its blocks from admission on."""
        tokens = np.maximum(self.computed, self.prompt)
        return int((-(-tokens // self.batching.block_size) - self.shared_blocks).sum()) + self.holds_prefix

    def admit(self) -> None:
        size, new, peak = self.batching.block_size, [], None
        while self.waiting and len(self.computed) + len(new) < self.batching.max_num_seqs:
            is_first = not self.has_prefix
            if is_first and (new or len(self.computed)):
                break  # the first request computes the prefix; the others wait until it is cached
            request = self.waiting[0]
            own = -(-(request.prompt + request.output) // size) - self.shared_blocks
            joining = own + self.shared_blocks * is_first + sum(blocks for *_, blocks in new)
            if self.holds_prefix + int(self.blocks.sum()) + joining > self.num_blocks:
                peak = self._peak_blocks() if peak is None else peak
                if self.holds_prefix + peak + joining > self.num_blocks:
                    if not new and not len(self.computed):
                        raise ConfigError(
                            f"a request of {request.prompt} prompt and {request.output} output tokens does not fit "
                            f"into a KV cache of {self.batching.kv_tokens} tokens: the card is too small for this job"
                        )
                    break
            self.waiting.popleft()
            if is_first:
                self.holds_prefix = self.shared_blocks
            start = 0 if is_first else self.shared_blocks * size
            new.append((start, request.prompt, request.prompt + request.output - 1, own))
        if new:  # a request's last token is sampled and not computed
            fresh = np.array(new, dtype=np.int64).T
            self.computed, self.prompt, self.end, self.blocks = (
                np.concatenate(pair) for pair in zip((self.computed, self.prompt, self.end, self.blocks), fresh)
            )

    def _peak_blocks(self) -> float:
        """Return the maximum blocks that the running requests will hold at once: some finish before others have grown.

        A decoding request counts half a block as empty; one that still computes its prompt counts with its final size.
        """
        size, decodes = self.batching.block_size, self.computed >= self.prompt
        computed, left = self.computed[decodes], (self.end - self.computed)[decodes]
        order = np.argsort(-left, kind="stable")
        tokens = np.cumsum(computed[order] - self.shared_tokens)  # of the requests that finish last
        peaks = (tokens + np.arange(1, len(order) + 1) * (left[order] + size / 2)) / size
        return float(self.blocks[~decodes].sum()) + float(peaks.max(initial=0.0))

    def step(self) -> StepLoad:
        """Plan and run one step; finished requests leave. Shared tokens are read once for all sequences."""
        wanted = np.where(self.computed < self.prompt, self.prompt - self.computed, 1)
        decodes = self.computed >= self.prompt
        room = self.batching.max_num_batched_tokens - int(decodes.sum())
        before = np.cumsum(np.where(decodes, 0, wanted)) - np.where(decodes, 0, wanted)
        count = np.where(decodes, 1, np.clip(room - before, 0, wanted))
        is_scheduled = count > 0
        num_sharing = int((is_scheduled & (self.computed >= self.shared_tokens)).sum())
        self.computed = self.computed + count
        rows = int((is_scheduled & (self.computed >= self.prompt)).sum())
        spared = max(num_sharing - 1, 0) * self.shared_tokens
        tokens = StepLoad(count[is_scheduled], self.computed[is_scheduled], rows, spared)
        self.has_prefix = self.has_prefix or bool((self.computed >= self.prompt).any())
        stays = self.computed < self.end
        self.computed, self.prompt, self.end, self.blocks = (
            array[stays] for array in (self.computed, self.prompt, self.end, self.blocks)
        )
        return tokens


def simulate_job(
    requests: Sequence[RequestTokens],
    size: DecoderSize,
    weights: Weights,
    card: Ceilings,
    batching: Batching,
    shared_prefix: int = 0,
    kv_value_bytes: float = DENSE_BYTES,
    reads_shared_once: bool = True,
) -> JobSeconds:
    """Run `requests` in order through the cost model of a step. Takes about 0.1 ms of host time per step.

    All requests share their first `shared_prefix` tokens, fewer than any prompt has: the whole blocks of the prefix are
    computed and held once. reads_shared_once: a step reads them once for all of its sequences, else once for each.
    Raises ConfigError if a request does not fit into the KV cache, or the card lacks the products that the weights
    need.
    """
    assert len(requests) > 0, "a job has requests"
    assert shared_prefix < min(request.prompt for request in requests), "each request computes some of its prompt"
    job = RunningRequests(deque(requests), batching, shared_prefix)
    parts, wall_s, kv_s, sequence_s, prompt_tokens = StepSeconds(), 0.0, 0.0, 0.0, 0
    moments: list[SimulatedMoment] = []
    while job.waiting or len(job.computed):
        job.admit()
        held, running = min(job.held_blocks, job.num_blocks), len(job.computed)
        tokens = job.step()
        if not reads_shared_once:
            tokens = replace(tokens, spared_tokens=0)
        seconds = step_seconds(tokens, size, weights, card, kv_value_bytes)
        parts, wall_s = parts + seconds, wall_s + seconds.total_s
        kv_s += held / job.num_blocks * seconds.total_s
        sequence_s += running * seconds.total_s
        prompt_tokens += tokens.num_tokens
        moments.append(SimulatedMoment(wall_s, len(job.waiting) + len(job.computed), running))
    output_tokens = sum(request.output for request in requests)
    prompt_tokens -= output_tokens - len(requests)  # the last token of each request is not computed
    return JobSeconds(
        wall_s=wall_s,
        tail_s=tail_seconds(moments),
        num_steps=len(moments),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        kv_used=kv_s / wall_s,
        sequences=sequence_s / wall_s,
        parts=parts,
    )


def job_flops(requests: Sequence[RequestTokens], size: DecoderSize, cached_tokens: int = 0) -> float:
    """Return the operations of a job's products. cached_tokens: prompt tokens found in the cache, spread evenly."""
    computed = sum(n.prompt + n.output - 1 for n in requests) - cached_tokens
    last, cached = np.array([n.prompt + n.output - 1 for n in requests]), np.array(cached_tokens / len(requests))
    keys = sum(
        layers * (seen_keys(last, window) - seen_keys(cached, window)).sum()
        for window, layers in size.window_counts().items()
    )
    attention = 4.0 * size.heads * size.head_dim * float(keys)
    head = 2.0 * size.head_parameters * sum(n.output for n in requests)
    return 2.0 * size.active_parameters * computed + head + attention


def job_bytes(
    requests: Sequence[RequestTokens],
    size: DecoderSize,
    weights: Weights,
    num_steps: int,
    kv_value_bytes: float = DENSE_BYTES,
    shared_prefix: int = 0,
) -> float:
    """Return the bytes that a job of `num_steps` must read: in each step all weights in their smallest form, and the
    keys and values that each generated token sees. A prefix that all requests share is read once per step. Of experts,
    the number that steps of equal size use."""
    decoded = sum(n.output - 1 for n in requests)
    step_bytes = weights.step_bytes(size, (decoded + sum(n.prompt for n in requests)) / num_steps)
    prompt = np.array([n.prompt for n in requests])
    last = np.array([n.prompt + n.output - 1 for n in requests])
    spared = shared_prefix * max(decoded - num_steps, 0)
    contexts = sum(
        layers * ((seen_keys(last, window) - seen_keys(prompt, window)).sum() - (spared if window is None else 0))
        for window, layers in size.window_counts().items()
    )
    return num_steps * step_bytes + size.kv_bytes_per_token(kv_value_bytes) / size.layers * float(contexts)
