"""What the largest step takes on a GPU beside the weights and the KV cache, measured before the cache is made."""

from collections.abc import Callable

import numpy as np
import torch

from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.schedule.sequence import SAMPLING_OPTIONS, ranges, sampling_options
from pipeline.engine.schedule.step_plan import StepInput
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
    size = resolved.block_size
    count_S = np.full(num_sequences, num_tokens // num_sequences, dtype=np.int64)
    count_S[: num_tokens % num_sequences] += 1
    query_start_S1 = np.append(0, np.cumsum(count_S))
    position_T = np.minimum(ranges(np.zeros_like(count_S), count_S), resolved.max_model_len - 1)
    most_blocks = -(-int(position_T.max() + 1) // size)
    in_order_SM = np.tile(np.arange(most_blocks, dtype=np.int32), (num_sequences, 1))
    table_SM = np.random.default_rng(0).permuted(in_order_SM, axis=1)
    block_T = table_SM[np.repeat(np.arange(num_sequences), count_S), position_T // size].astype(np.int64)
    return StepInput(
        token_id_T=np.ones(num_tokens, dtype=np.int64),
        position_T=position_T,
        slot_mapping_T=block_T * size + position_T % size,
        query_start_S1=query_start_S1.astype(np.int32),
        context_len_S=np.minimum(count_S, resolved.max_model_len).astype(np.int32),
        block_table_SM=table_SM,
        logit_row_R=np.arange(num_rows),
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
