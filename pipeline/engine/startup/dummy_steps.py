"""Steps of no real sequences, computed before a job: to compile all kernels, and to measure what the largest step takes
on a GPU besides weights and KV cache, before the cache is made.

Kernels are compiled anew for other tiles and types. What decides is how many tokens a step has, how many each of its
sequences computes, whether contexts begin with the same blocks, and whether a step is captured.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from pipeline.engine.forward.graphs import graph_sizes
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.schedule.sequence import SAMPLING_OPTIONS, sampling_options
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.startup.resolve import Resolved


def step_input_shape(resolved: Resolved) -> tuple[int, int, int]:
    """Tokens, sequences and rows that sample of the step that takes most: prompts as long as there can be, and as many
    rows as can run."""
    num_tokens = resolved.max_num_batched_tokens
    num_sequences = -(-num_tokens // min(resolved.max_model_len, num_tokens))
    return num_tokens, num_sequences, min(resolved.max_num_seqs, num_tokens)


def largest_step_bytes(runner: ModelRunner, resolved: Resolved) -> int:
    """Run that step and sample its tokens the way that takes most memory; and a step with as many drafts as there can
    be, of rows that want no more than a token. (A step of as many rows that want more may not fit; then it is undone,
    and smaller ones follow.)

    `runner` has a small cache of its own: as many blocks as one of the sequences needs.
    """
    num_tokens, num_sequences, num_rows = step_input_shape(resolved)
    rejects = resolved.speculation.method == "draft_model"

    def costliest() -> None:
        logits_RV, batch = runner.execute(_made(resolved, num_tokens, num_sequences, num_rows)), _sampled_rows(num_rows)
        sample_on_device(runner, logits_RV, batch)
        if rejects:
            weights(logits_RV, batch, np.arange(num_rows))  # rejection sampling

    def checking() -> None:
        most = resolved.most_checked_tokens
        sample_on_device(runner, runner.execute(_made(resolved, most, num_sequences, most)), None)

    return max(_peak_bytes(costliest, resolved.device), _peak_bytes(checking, resolved.device))


def forward_bytes(runner: ModelRunner, resolved: Resolved, num_tokens: int) -> int:
    """What a step of so many tokens takes without logits, with the hidden states of all of them."""
    _, num_sequences, _ = step_input_shape(resolved)
    hidden = num_tokens * runner.decoder.config.hidden_size * resolved.dtype.itemsize
    return hidden + _peak_bytes(lambda: runner.execute(_made(resolved, num_tokens, num_sequences, 1)), resolved.device)


def _made(resolved: Resolved, num_tokens: int, num_sequences: int, num_rows: int) -> StepInput:
    """A step of no real sequences: each computes its share of the tokens from position 0 on, and the first `num_rows`
    tokens want logits. All read and write the same blocks, each in an order of its own: attention reads together what
    several begin with."""
    count_S = np.full(num_sequences, num_tokens // num_sequences, dtype=np.int64)
    count_S[: num_tokens % num_sequences] += 1
    most_blocks = -(-int(count_S.max()) // resolved.block_size)
    in_order_SM = np.tile(np.arange(most_blocks, dtype=np.int32), (num_sequences, 1))
    return dummy_step(
        count_S=count_S,
        context_len_S=count_S,
        block_table_SM=np.random.default_rng(0).permuted(in_order_SM, axis=1),
        block_size=resolved.block_size,
        row_R=np.arange(num_rows),
    )


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    release_cached_memory()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _sampled_rows(num_rows: int) -> SamplingBatch:
    options = sampling_options(SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=0))
    nobody = np.zeros(num_rows, dtype=np.int64)
    return SamplingBatch(
        options=np.full(num_rows, np.array(options, dtype=SAMPLING_OPTIONS)),
        seeds=nobody.astype(np.uint64),
        positions=nobody,
        ending_ids=np.full(num_rows, None, dtype=object),
        token_ids=np.zeros((1, 1), dtype=np.int32),
        slots=nobody,
        num_prompt=nobody,
        num_known=nobody,
    )


FEW_TOKENS = 256  # of a step, up to which every size that steps are padded to is a kind of its own; then powers of two
MOST_QUERIES = 8  # of a sequence that decodes or checks drafts; more are a prompt's
SHARED_TOKENS = 2048  # of contexts that begin alike, long enough to be read together


class CapturedShape(NamedTuple):
    """Which steps of a model are captured; see `ModelRunner.capture_steps`."""

    max_queries: int
    most_tokens: int
    most_mixed_tokens: int = 0

    @property
    def largest(self) -> int:
        """Tokens of the largest."""
        return max(self.most_tokens, self.most_mixed_tokens)


@torch.inference_mode()
def compute_step_kinds(runner: ModelRunner, resolved: Resolved, captured: CapturedShape) -> None:
    """Call whatever the steps of this model call.

    Only where kernels are not run: block tables and contexts name what `runner`'s cache does not have. Afterwards
    `runner` is of no use.
    """
    most = resolved.max_num_batched_tokens
    for num_tokens in _token_counts(most):
        runner.execute(_prompts(resolved, num_tokens))
    for queries in (1, 2, 4, MOST_QUERIES):
        num_sequences = min(resolved.max_num_seqs, most // queries)
        if num_sequences and resolved.max_model_len > queries:
            for shared in (False, True):
                logits_RV = runner.execute(_decoding(resolved, num_sequences, queries, shared))
                runner.greedy(logits_RV)
                how_5R = torch.zeros(5, len(logits_RV), dtype=torch.float64, device=logits_RV.device)
                runner.sample(logits_RV, how_5R)
                runner.sample(logits_RV.float(), how_5R)  # with masks or penalties
    if runner.decoder.kernels.graph_attention is not None:
        runner.capture_steps(
            lambda function: (function(), function)[1],
            max_num_seqs=resolved.max_num_seqs,
            **captured._asdict(),
            say=lambda done, total: None,
        )


def _token_counts(most: int) -> list[int]:
    few = graph_sizes(min(most, FEW_TOKENS))
    doubled = [FEW_TOKENS << n for n in range(1, 32) if FEW_TOKENS << n < most]
    return sorted({*few, *doubled, most})


def _prompts(resolved: Resolved, num_tokens: int) -> StepInput:
    """Prompts as long as there can be, from their beginning on; the last token of each is sampled."""
    longest = min(resolved.max_model_len, num_tokens)
    count_S = np.full(-(-num_tokens // longest), longest)
    count_S[-1] = num_tokens - longest * (len(count_S) - 1)
    table_SM = np.zeros((len(count_S), -(-longest // resolved.block_size)), dtype=np.int32)
    return dummy_step(
        count_S=count_S,
        context_len_S=count_S,
        block_table_SM=table_SM,
        block_size=resolved.block_size,
        row_R=np.cumsum(count_S) - 1,
    )


def _decoding(resolved: Resolved, num_sequences: int, queries: int, shared: bool) -> StepInput:
    """`queries` tokens of each sequence, after contexts that begin alike or with blocks of their own, and as many
    logits as can be wanted of a step."""
    context = min(resolved.max_model_len, SHARED_TOKENS + queries)
    num_blocks = -(-context // resolved.block_size)
    table_SM = np.tile(np.arange(num_blocks, dtype=np.int32), (num_sequences, 1))
    if not shared:
        table_SM += num_blocks * np.arange(num_sequences, dtype=np.int32)[:, None]
    return dummy_step(
        count_S=np.full(num_sequences, queries),
        context_len_S=np.full(num_sequences, context),
        block_table_SM=table_SM,
        block_size=resolved.block_size,
        row_R=np.arange(min(num_sequences * queries, resolved.most_checked_tokens)),
    )
