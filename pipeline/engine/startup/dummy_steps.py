"""Steps without real sequences, computed at startup: to compile all kernels, and to measure the memory of the largest
step on a GPU besides weights and KV cache, before the cache is allocated.

Kernels are compiled separately for each set of tile sizes and types. These depend on the number of tokens of a step,
the number of each of its sequences, whether contexts share their first blocks, and whether the step is captured.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from pipeline.engine.forward.graphs import graph_sizes
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.sampling_options import SAMPLING_OPTIONS, sampling_options
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.startup.resolve import Resolved


def step_input_shape(resolved: Resolved) -> tuple[int, int, int]:
    """Return tokens, sequences and sampling rows of the largest step: prompts of maximum length, and the maximum number
    of rows."""
    num_tokens = resolved.max_num_batched_tokens
    num_sequences = -(-num_tokens // min(resolved.max_model_len, num_tokens))
    return num_tokens, num_sequences, min(resolved.max_num_seqs, num_tokens)


def largest_step_bytes(runner: ModelRunner, resolved: Resolved) -> int:
    """Measure the peak memory of the largest step with the most expensive sampling, and of a step with the maximum
    number of drafts, of greedy rows. (A step with that many rows and more sampling options may not fit; then it is
    undone, and smaller ones follow.)

    `runner` has a small cache of its own: the blocks of one of the sequences.
    """
    num_tokens, num_sequences, num_rows = step_input_shape(resolved)
    rejects = resolved.speculation.method == "draft_model"

    def sampling() -> None:
        logits_RV, batch = runner.execute(_step(resolved, num_tokens, num_sequences, num_rows)), _sampled_rows(num_rows)
        sample_on_device(runner, logits_RV, batch)
        if rejects:
            weights(logits_RV, batch, np.arange(num_rows))  # rejection sampling

    def verifying() -> None:
        max_tokens = resolved.max_verified_tokens
        sample_on_device(runner, runner.execute(_step(resolved, max_tokens, num_sequences, max_tokens)), None)

    return max(_peak_bytes(sampling, resolved.device), _peak_bytes(verifying, resolved.device))


def forward_bytes(runner: ModelRunner, resolved: Resolved, num_tokens: int) -> int:
    """Return the memory of a step of `num_tokens` tokens without logits, including all their hidden states."""
    _, num_sequences, _ = step_input_shape(resolved)
    hidden = num_tokens * runner.decoder.config.hidden_size * resolved.dtype.itemsize
    return hidden + _peak_bytes(lambda: runner.execute(_step(resolved, num_tokens, num_sequences, 1)), resolved.device)


def _step(resolved: Resolved, num_tokens: int, num_sequences: int, num_rows: int) -> StepInput:
    """Build a step without real sequences: each computes its share of the tokens from position 0 on, and the first
    `num_rows` tokens have logits. All use the same blocks, each in a different order, because attention processes
    common leading blocks together."""
    count_S = np.full(num_sequences, num_tokens // num_sequences, dtype=np.int64)
    count_S[: num_tokens % num_sequences] += 1
    max_blocks = -(-int(count_S.max()) // resolved.block_size)
    in_order_SM = np.tile(np.arange(max_blocks, dtype=np.int32), (num_sequences, 1))
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
    zeros_R = np.zeros(num_rows, dtype=np.int64)
    return SamplingBatch(
        options=np.full(num_rows, np.array(options, dtype=SAMPLING_OPTIONS)),
        seeds=zeros_R.astype(np.uint64),
        positions=zeros_R,
        ending_ids=np.full(num_rows, None, dtype=object),
        token_ids=np.zeros((1, 1), dtype=np.int32),
        slots=zeros_R,
        num_prompt=zeros_R,
        num_known=zeros_R,
    )


FEW_TOKENS = 256  # up to here every padded size of a step compiles its own kernels; above, powers of two suffice
MAX_QUERIES = 8  # of a sequence that decodes or verifies drafts; sequences with more compute prompts
SHARED_TOKENS = 2048  # of contexts with a common prefix, long enough for shared-prefix attention


class CapturedShape(NamedTuple):
    """Limits of a model's captured steps; see `ModelRunner.capture_steps`."""

    max_queries: int
    max_tokens: int
    max_mixed_tokens: int = 0

    @property
    def largest(self) -> int:
        """Number of tokens of the largest captured step."""
        return max(self.max_tokens, self.max_mixed_tokens)


@torch.inference_mode()
def compute_step_kinds(runner: ModelRunner, resolved: Resolved, captured: CapturedShape) -> None:
    """Call every kernel that the steps of this model call.

    Use only while kernels are compiled, not run: block tables and contexts exceed `runner`'s cache. `runner` cannot be
    used afterwards.
    """
    max_tokens = resolved.max_num_batched_tokens

    def both_kinds(step: StepInput) -> StepInput:
        """Return the step for layers with windows too, which may have a block table of their own."""
        if not any(runner.kv.is_windowed):
            return step
        return replace(step, window_block_table_SM=step.block_table_SM, window_slot_mapping_T=step.slot_mapping_T)

    for num_tokens in _token_counts(max_tokens):
        step = both_kinds(_prompts(resolved, num_tokens))
        runner.execute(step)
        if runner.decoder.adapters is not None:
            runner.execute(replace(step, adapter_S=np.zeros(len(step.context_len_S), dtype=np.int64)))
    for queries in (1, 2, 4, MAX_QUERIES):
        num_sequences = min(resolved.max_num_seqs, max_tokens // queries)
        if num_sequences and resolved.max_model_len > queries:
            for shared in (False, True):
                logits_RV = runner.execute(both_kinds(_decoding(resolved, num_sequences, queries, shared)))
                runner.greedy(logits_RV)
                params_5R = torch.zeros(5, len(logits_RV), dtype=torch.float64, device=logits_RV.device)
                runner.sample(logits_RV, params_5R)
                runner.sample(logits_RV.float(), params_5R)  # with masks or penalties
    if runner.decoder.kernels.graph_attention is not None:
        runner.capture_steps(
            lambda function: (function(), function)[1],
            max_num_seqs=resolved.max_num_seqs,
            **captured._asdict(),
            log=lambda done, total: None,
        )


def _token_counts(max_tokens: int) -> list[int]:
    small = graph_sizes(min(max_tokens, FEW_TOKENS))
    doubled = [FEW_TOKENS << n for n in range(1, 32) if FEW_TOKENS << n < max_tokens]
    return sorted({*small, *doubled, max_tokens})


def _prompts(resolved: Resolved, num_tokens: int) -> StepInput:
    """Build a step of prompts of maximum length, from their first token on; the last token of each is sampled."""
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
    """Build a step of `queries` tokens of each sequence, after contexts with a common prefix or with separate blocks,
    and with the maximum number of logits."""
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
        row_R=np.arange(min(num_sequences * queries, resolved.max_verified_tokens)),
    )
