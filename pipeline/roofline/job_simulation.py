"""Time of a whole job by the cost model: continuous batching of requests with known lengths.

A request is admitted if the running ones, which grow token by token, will always leave it its full length in the KV
cache, so nothing is preempted. The engine's admission does the same if it predicts lengths well. A step computes one
token of each running sequence that decodes, and chunks of prompts in the order of admission.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.errors import ConfigError
from pipeline.roofline.cost_model import (
    DENSE_BYTES,
    Ceilings,
    DecoderSize,
    StepLoad,
    StepSeconds,
    Weights,
    step_seconds,
)
from pipeline.roofline.kv_pages import KVPages


@dataclass(frozen=True)
class RequestTokens:
    """Lengths of a request. Each computes at least one token of its prompt, and generates at least one."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Batching:
    """Limits of a step, and the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    pages: KVPages


@dataclass(frozen=True)
class JobSeconds:
    """Simulated time of a job. `parts` sums those of its steps; overlapping parts both count in full, so their total
    may exceed wall_s."""

    wall_s: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    parts: StepSeconds

    @property
    def tokens_per_s(self) -> float:
        """Rate of computed prompt tokens and generated tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s


class RunningRequests:
    """State of continuous batching: arrays over the running requests, in the order of admission.

    waiting: requests to admit, which are removed from it. blocks: each request's final number of pages, without shared
    ones.
    """

    def __init__(self, waiting: deque[RequestTokens], batching: Batching, shared_prefix: int = 0) -> None:
        self.batching = batching
        self.waiting = waiting
        self.num_blocks = batching.num_pages
        self.shared_blocks = shared_prefix // batching.pages.page_size  # held once, from the first request to the end
        self.shared_tokens = self.shared_blocks * batching.pages.page_size
        self.has_prefix = self.shared_blocks == 0
        self.holds_prefix = 0  # blocks
        self.computed, self.prompt, self.end, self.blocks = (np.zeros(0, dtype=np.int64) for _ in range(4))

    def admit(self) -> None:
        pages, new, peak = self.batching.pages, [], None
        running_blocks, new_blocks = int(self.blocks.sum()), 0
        while self.waiting and len(self.computed) + len(new) < self.batching.max_num_seqs:
            is_first = not self.has_prefix
            if is_first and (new or len(self.computed)):
                break  # the first request computes the prefix; the others wait until it is cached
            request = self.waiting[0]
            own = pages.num_pages(request.prompt + request.output) - self.shared_blocks
            joining = own + self.shared_blocks * is_first + new_blocks
            if self.holds_prefix + running_blocks + joining > self.num_blocks:
                peak = self._peak_blocks() if peak is None else peak
                if self.holds_prefix + peak + joining > self.num_blocks:
                    if not new and not len(self.computed):
                        raise ConfigError(
                            f"a request of {request.prompt} prompt and {request.output} output tokens does not fit "
                            f"into a KV cache of {pages.max_tokens(self.num_blocks)} tokens: the card is too small "
                            "for this job"
                        )
                    break
            self.waiting.popleft()
            if is_first:
                self.holds_prefix = self.shared_blocks
            start = 0 if is_first else self.shared_tokens
            new.append((start, request.prompt, request.prompt + request.output - 1, own))
            new_blocks += own
        if new:  # a request's last token is sampled and not computed
            fresh = np.array(new, dtype=np.int64).T
            self.computed, self.prompt, self.end, self.blocks = (
                np.concatenate(pair) for pair in zip((self.computed, self.prompt, self.end, self.blocks), fresh)
            )

    def _peak_blocks(self) -> float:
        """Return the maximum blocks that the running requests will hold at once: some finish before others have grown.

        A decoding request counts half a block as empty; one that still computes its prompt counts with its final size.
        """
        decodes = self.computed >= self.prompt
        computed, end = self.computed[decodes], self.end[decodes]
        order = np.argsort(computed - end, kind="stable")
        num, rate = self.batching.pages.growth(computed[order], end[order])
        # of the requests that finish last
        peaks = np.cumsum(num - self.shared_blocks) + np.cumsum(rate) * (end - computed)[order]
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
) -> JobSeconds:
    """Run `requests` in order through the cost model of a step. Takes about 0.1 ms of host time per step.

    All requests share their first `shared_prefix` tokens, fewer than any prompt has: the whole blocks of the prefix are
    computed and held once, and a step reads them once for all of its sequences. Raises ConfigError if a request does
    not fit into the KV cache, or the card lacks the products that the weights need.
    """
    assert len(requests) > 0, "a job has requests"
    assert shared_prefix < min(request.prompt for request in requests), "each request computes some of its prompt"
    job = RunningRequests(deque(requests), batching, shared_prefix)
    parts, wall_s, num_steps, num_tokens = StepSeconds(), 0.0, 0, 0
    while job.waiting or len(job.computed):
        job.admit()
        step = job.step()
        seconds = step_seconds(step, size, weights, card, kv_value_bytes)
        parts, wall_s = parts + seconds, wall_s + seconds.total_s
        num_steps, num_tokens = num_steps + 1, num_tokens + step.num_tokens
    output_tokens = sum(request.output for request in requests)
    prompt_tokens = num_tokens - (output_tokens - len(requests))  # the last token of each request is not computed
    return JobSeconds(wall_s, num_steps, prompt_tokens, output_tokens, parts)
