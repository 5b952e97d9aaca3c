"""What steps and draft passes take on this machine, timed before the first request: the controller's cost tables.

Steps are run on the engine's own KV cache while nobody is in it; what they leave there is never read.
"""

import time
from collections.abc import Callable, Sequence

import torch

from pipeline.engine.propose.draft_model import DraftModelProposer
from pipeline.engine.propose.proposer import Proposer
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import made_input
from pipeline.engine.speculation.acceptance import DRAFT_MODEL, NGRAM
from pipeline.engine.speculation.controlled import ControlledDrafts
from pipeline.engine.speculation.controller import Controller
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.measuring import TOKENS_PER_SEQUENCE
from pipeline.engine.speculation.proposing import ProposingCost
from pipeline.engine.step.runner import Runner

CONTEXTS = (64, 1024)  # tokens of the contexts that steps are timed at, as far as the model goes
BUDGET_S = 1.5  # seconds for the table of steps
WRITING_S = 0.1  # and for blocks that they read
BLOCKS_AT_ONCE = 256


def controlled_drafts(
    proposers: Sequence[Proposer],
    most_drafts: int,
    runner: Runner,
    table: SlotTable,
    max_num_batched_tokens: int,
    padded_to: Sequence[int],
    num_blocks: int,
) -> ControlledDrafts:
    """Time steps and passes, and make the policy that drafts where it pays. padded_to: see `StepCost`; num_blocks: that
    the KV cache has."""
    most_tokens = min(max_num_batched_tokens, table.num_slots * (1 + most_drafts))
    more = TOKENS_PER_SEQUENCE[-1]
    longest = max(table.max_model_len - most_tokens // table.num_slots - more, 1)
    short, long = (min(context, longest) for context in CONTEXTS)
    blocks = min(num_blocks, table.num_slots * -(-(long + more) // table.block_size))
    step = _timed_step(runner, table, blocks)
    cost = StepCost.measure(step, max(most_tokens, 2), (short, long), padded_to, BUDGET_S)
    priors, proposing = [], []
    for proposer in proposers:
        if isinstance(proposer, DraftModelProposer):
            priors.append(DRAFT_MODEL)
            proposing.append(
                ProposingCost.measure_passes(_timed_pass(proposer.runner, table, blocks, short), table.num_slots)
            )
        else:
            priors.append(NGRAM)
            proposing.append(ProposingCost())
    return ControlledDrafts(Controller(cost, priors, proposing, most_drafts))


def _timed_step(runner: Runner, table: SlotTable, num_blocks: int) -> Callable[[int, int, int], None]:
    """Runs a step of (tokens, sequences, context) and waits for it: see `cost.RunStep`. Sequences have blocks of their
    own as far as `num_blocks` go: if all read the same ones, these would come from the nearest caches."""
    written, begun = 0, time.perf_counter()  # what was never written lies nowhere, and is read as fast
    while written < num_blocks and time.perf_counter() - begun < WRITING_S:
        more = min(written + BLOCKS_AT_ONCE, num_blocks)
        runner.zero_blocks(list(range(written, more)))
        written = more

    def run(num_tokens: int, num_sequences: int, context_len: int) -> None:
        logits_RV = runner.execute(
            made_input(
                num_tokens, num_sequences, context_len, table.block_size, table.max_model_len, num_tokens, written
            )
        )
        if logits_RV.is_cuda:
            torch.cuda.synchronize(logits_RV.device)

    return run


def _timed_pass(runner: Runner, table: SlotTable, num_blocks: int, context_len: int) -> Callable[[int], None]:
    """Runs a draft pass over so many sequences."""
    step = _timed_step(runner, table, num_blocks)
    return lambda num_sequences: step(num_sequences, num_sequences, context_len)
