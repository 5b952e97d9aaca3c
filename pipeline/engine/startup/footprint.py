"""What the largest step takes on a GPU beside the weights and the KV cache, measured before the cache is made."""

from collections.abc import Callable

import numpy as np
import torch

from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_device import draw_on_device
from pipeline.engine.sampling.top_p import weights
from pipeline.engine.schedule.sequence import SAMPLING_OPTIONS, sampling_options
from pipeline.engine.schedule.step_plan import StepInput, made_input
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.startup.resolve import Resolved
from pipeline.engine.step.runner import ModelRunner


def step_input_shape(resolved: Resolved) -> tuple[int, int, int]:
    """Tokens, sequences and rows that sample of the step that takes most: prompts as long as there can be, and as many
    rows as can run."""
    num_tokens = resolved.max_num_batched_tokens
    num_sequences = -(-num_tokens // min(resolved.max_model_len, num_tokens))
    return num_tokens, num_sequences, min(resolved.max_num_seqs, num_tokens)


def largest_step_bytes(runner: ModelRunner, resolved: Resolved) -> int:
    """Run that step and draw its tokens in the way that takes most memory; and a step with as many drafts as there can
    be, of rows that want no more than a token. (A step of as many rows that want more may not fit; then it is undone,
    and smaller ones follow.)

    `runner` has a small cache of its own: as many blocks as one of the sequences needs.
    """
    num_tokens, num_sequences, num_rows = step_input_shape(resolved)
    draws_law = resolved.speculation is not None and "draft" in resolved.speculation.proposers

    def costliest() -> None:
        logits_RV, batch = runner.execute(_made(resolved, num_tokens, num_sequences, num_rows)), _drawn_rows(num_rows)
        draw_on_device(runner, logits_RV, batch)
        if draws_law:
            weights(logits_RV, batch, np.arange(num_rows))  # to settle drafts of known law

    def checking() -> None:
        most = resolved.most_checked_tokens
        draw_on_device(runner, runner.execute(_made(resolved, most, num_sequences, most)), None)

    return max(_peak_bytes(costliest, resolved.device), _peak_bytes(checking, resolved.device))


def forward_bytes(runner: ModelRunner, resolved: Resolved, num_tokens: int) -> int:
    """What a step of so many tokens takes without logits, with the hidden states of all of them."""
    _, num_sequences, _ = step_input_shape(resolved)
    hidden = num_tokens * runner.decoder.config.hidden_size * resolved.dtype.itemsize
    return hidden + _peak_bytes(lambda: runner.execute(_made(resolved, num_tokens, num_sequences, 1)), resolved.device)


def _made(resolved: Resolved, num_tokens: int, num_sequences: int, num_rows: int) -> StepInput:
    return made_input(num_tokens, num_sequences, 0, resolved.block_size, resolved.max_model_len, num_rows)


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    release_cached_memory()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _drawn_rows(num_rows: int) -> SamplingBatch:
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
