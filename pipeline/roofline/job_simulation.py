"""The time of a whole job by the cost model: continuous batching over requests of known lengths.

A request is admitted when those that run, growing token by token, leave it its whole room in the KV cache, so nothing
is preempted: what the engine's admission comes to where it foresees lengths well. A step computes one token of each
running sequence that generates, and chunks of prompts beside them, in the order of admission.
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
    StepSeconds,
    StepTokens,
    Weights,
    step_seconds,
)


@dataclass(frozen=True)
class RequestTokens:
    """Lengths of a request. Each computes a token of its prompt at least, and generates one at least."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Batching:
    """Bounds of a step and the KV cache's room, in tokens that it holds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    block_size: int = 64


@dataclass(frozen=True)
class JobSeconds:
    """What a job takes. `parts` add up the steps'; overlapping ones are both in it whole, so they may exceed wall_s.

    tail_s: the last part of wall_s, in which fewer requests were unfinished than half of the most that ran at once.
    kv_used and sequences: means over the time.
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
        """Prompt tokens computed, and generated ones."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s


def kv_room(
    size: DecoderSize, weights: Weights, card: Ceilings, share: float = 0.9, kv_value_bytes: float = DENSE_BYTES
) -> int:
    """Tokens that fit in what `share` of the card's memory leaves beside the weights; 0 where they do not fit."""
    left = card.memory_bytes * share - weights.resident_bytes(size)
    return max(int(left // size.kv_bytes_per_token(kv_value_bytes)), 0)


@dataclass(frozen=True)
class Moment:
    """How far a run was: seconds from its beginning, requests unfinished by then, sequences in the step before."""

    at_s: float
    unfinished: int
    sequences: int


def tail_seconds(moments: Sequence[Moment]) -> float:
    """The time after the last moment at which at least half as many requests were unfinished as ran at once at most."""
    half = max(moment.sequences for moment in moments) / 2
    full = [moment.at_s for moment in moments if moment.unfinished >= half]
    return moments[-1].at_s - (full[-1] if full else 0.0)


class _Job:
    """Continuous batching in numbers: arrays over the requests that run, in the order of admission.

    blocks: what each holds in the end, of its own.
    """

    def __init__(self, requests: Sequence[RequestTokens], batching: Batching, shared_prefix: int) -> None:
        self.batching = batching
        self.waiting = deque(requests)
        self.num_blocks = batching.kv_tokens // batching.block_size
        self.shared_blocks = shared_prefix // batching.block_size  # held once, by the first request and until the end
        self.shared_tokens = self.shared_blocks * batching.block_size
        self.has_prefix = self.shared_blocks == 0
        self.holds_prefix = 0  # blocks
        self.computed, self.prompt, self.end, self.blocks = (np.zeros(0, dtype=np.int64) for _ in range(4))

    @property
    def held_blocks(self) -> int:
        """Now: those of a prompt from its admission on."""
        tokens = np.maximum(self.computed, self.prompt)
        return int((-(-tokens // self.batching.block_size) - self.shared_blocks).sum()) + self.holds_prefix

    def admit(self) -> None:
        size, new, least = self.batching.block_size, [], None
        while self.waiting and len(self.computed) + len(new) < self.batching.max_num_seqs:
            is_first = not self.has_prefix
            if is_first and (new or len(self.computed)):
                break  # the first one computes the prefix; the others find it when it is done
            request = self.waiting[0]
            own = -(-(request.prompt + request.output) // size) - self.shared_blocks
            joining = own + self.shared_blocks * is_first + sum(blocks for *_, blocks in new)
            if self.holds_prefix + int(self.blocks.sum()) + joining > self.num_blocks:
                least = self._peak_blocks() if least is None else least
                if self.holds_prefix + least + joining > self.num_blocks:
                    if not new and not len(self.computed):
                        raise ConfigError(
                            f"a request of {request.prompt} and {request.output} tokens does not fit a KV cache of "
                            f"{self.batching.kv_tokens}: the card is too small for this work"
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
        """The most blocks that the running requests will hold at once: some end before others have grown. Each that
        decodes is taken to have half a block empty, and one with a prompt to compute to hold its last size already."""
        size, decodes = self.batching.block_size, self.computed >= self.prompt
        computed, left = self.computed[decodes], (self.end - self.computed)[decodes]
        order = np.argsort(-left, kind="stable")
        tokens = np.cumsum(computed[order] - self.shared_tokens)  # of those that end last
        peaks = (tokens + np.arange(1, len(order) + 1) * (left[order] + size / 2)) / size
        return float(self.blocks[~decodes].sum()) + float(peaks.max(initial=0.0))

    def step(self) -> StepTokens:
        """Plan and take one step; requests that end leave. What sequences share is read once for all of them."""
        wanted = np.where(self.computed < self.prompt, self.prompt - self.computed, 1)
        decodes = self.computed >= self.prompt
        room = self.batching.max_num_batched_tokens - int(decodes.sum())
        before = np.cumsum(np.where(decodes, 0, wanted)) - np.where(decodes, 0, wanted)
        count = np.where(decodes, 1, np.clip(room - before, 0, wanted))
        taken = count > 0
        num_sharing = int((taken & (self.computed >= self.shared_tokens)).sum())
        self.computed = self.computed + count
        rows = int((taken & (self.computed >= self.prompt)).sum())
        spared = max(num_sharing - 1, 0) * self.shared_tokens
        tokens = StepTokens(count[taken], self.computed[taken], rows, spared)
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
    """Run `requests` in their order through the cost model of a step. Takes about 0.1 ms of the host a step.

    The first `shared_prefix` tokens, fewer than any prompt has, are the same in all: their whole blocks are computed
    and held once, and a step reads them once for all of its sequences (reads_shared_once), or once for each. Raises
    ConfigError when a request does not fit the KV cache, or the card has no products that the weights are for.
    """
    assert len(requests) > 0, "a job has requests"
    assert shared_prefix < min(request.prompt for request in requests), "each computes some of its prompt"
    job = _Job(requests, batching, shared_prefix)
    parts, wall_s, kv_s, sequence_s, prompt_tokens = StepSeconds(), 0.0, 0.0, 0.0, 0
    moments: list[Moment] = []
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
        moments.append(Moment(wall_s, len(job.waiting) + len(job.computed), running))
    output_tokens = sum(request.output for request in requests)
    prompt_tokens -= output_tokens - len(requests)  # each request's last token is not computed
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
    """Operations that a job's products need. cached_tokens: of prompts, found computed; spread over the requests."""
    computed = sum(n.prompt + n.output - 1 for n in requests) - cached_tokens
    cached = cached_tokens / len(requests)
    keys = sum((n.prompt + n.output) * (n.prompt + n.output - 1) / 2 - cached * (cached + 1) / 2 for n in requests)
    attention = 4.0 * size.layers * size.heads * size.head_dim * keys
    head = 2.0 * size.head_parameters * sum(n.output for n in requests)
    return 2.0 * size.linear_parameters * computed + head + attention


def job_bytes(
    requests: Sequence[RequestTokens],
    size: DecoderSize,
    weights: Weights,
    num_steps: int,
    kv_value_bytes: float = DENSE_BYTES,
    shared_prefix: int = 0,
) -> float:
    """Bytes that a job of `num_steps` has to read: all weights in each step, as small as they are kept, and the keys
    and values that each generated token sees, those of a prefix that all requests share once a step."""
    a_step = size.linear_parameters * weights.read_bytes + size.head_parameters * DENSE_BYTES
    decoded = sum(n.output - 1 for n in requests)
    contexts = sum((n.output - 1) * n.prompt + n.output * (n.output - 1) / 2 for n in requests)
    contexts -= shared_prefix * max(decoded - num_steps, 0)
    return num_steps * a_step + size.kv_bytes_per_token(kv_value_bytes) * contexts
