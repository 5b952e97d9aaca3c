"""Steps of every kind that an engine may compute, of no real sequences: so that all kernels are compiled before a job.

Kernels are compiled anew for other tiles and types. What decides is how many tokens a step has, how many each of its
sequences computes, whether contexts begin with the same blocks, and whether a step is captured.
"""

from typing import NamedTuple

import numpy as np
import torch

from pipeline.engine.forward.graphs import graph_sizes
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.startup.resolve import Resolved

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
