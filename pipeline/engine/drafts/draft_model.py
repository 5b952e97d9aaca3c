"""Drafts by a smaller model with the same tokens.

It has its own KV cache with as many blocks as the target's, whose layers then all keep all tokens, and follows the
target's block tables: a token's draft keys have the same block and offset as its target keys. So it allocates and
shares nothing itself, and a prefix shared in the target is shared here too. Only the number of computed tokens differs:
while there are no drafts the draft model computes nothing, and catches up when it is needed again, by a bounded number
of tokens in a step.

Passes run one after the other: pass k covers all sequences that draft more than k tokens.

For sampled requests, drafts are sampled from the draft model's distribution under the same options, so that rejection
sampling can accept most of them; a greedy request gets the draft model's best tokens. Where tokens must not depend on
drafts, the distribution is not exposed, and drafts are sampled with the same random number that the target will use:
then they are accepted if they equal its sample.

Shapes: S sequences of the proposal, A of them drafting, K maximum drafts of one, V the target's vocabulary, B blocks.
"""

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.engine.drafts.policy import Proposal
from pipeline.engine.drafts.proposer import Drafts
from pipeline.engine.forward.runner import Runner
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_host import distribution, greedy
from pipeline.engine.sampling.random_numbers import DRAFT, PLAIN, draw, uniforms
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.sampling_options import is_greedy
from pipeline.engine.schedule.scheduler import allot
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.engine.schedule.step_plan import StepPlan, build_input
from pipeline.kernels.memory import on_device

NEAR = 8  # known tokens behind that the first pass also computes; a sequence further behind catches up first


class DraftModelProposer:
    """Implements `Proposer`. `runner` holds the draft model and its KV cache, which has `pool`'s blocks."""

    def __init__(
        self,
        runner: Runner,
        table: SlotTable,
        pool: BlockPool,
        max_draft_tokens: int,
        vocab_size: int,
        catch_up_tokens: int = 512,
        exposes_draft_probs: bool = True,
    ) -> None:
        """vocab_size: the target's; higher ids are never drafted. catch_up_tokens: maximum tokens that one step
        computes for sequences that are behind. exposes_draft_probs: return probabilities for rejection sampling, where
        sampled tokens may depend on drafts."""
        assert max_draft_tokens >= 1
        assert catch_up_tokens >= 1
        self.runner, self.table, self.pool = runner, table, pool
        self.max_draft_tokens, self.vocab_size, self.catch_up_tokens = max_draft_tokens, vocab_size, catch_up_tokens
        self.exposes_draft_probs = exposes_draft_probs
        self._num_computed = np.zeros(table.num_slots, dtype=np.int64)  # known tokens whose draft keys are in the cache
        self._num_marked = np.zeros(table.num_slots, dtype=np.int64)  # leading blocks that are marked as filled
        self._filled_B = np.full(pool.num_blocks, -1, dtype=np.int64)  # generation in which the draft model filled it

    def admitted(self, slot: int) -> None:
        block_B = self.table.block_table[slot, : self.table.num_pages[slot]]
        empty = np.flatnonzero(self._filled_B[block_B] != self.pool.generation[block_B])
        filled = int(empty[0]) if len(empty) else len(block_B)
        self._num_marked[slot] = filled
        self._num_computed[slot] = filled * self.table.pages.page_size

    def on_evicted(self, slot: int, finished: bool) -> None:
        pass

    def propose(self, slot_S: np.ndarray) -> Proposal:
        """Return a proposal. Sequences that are far behind catch up first, and get no drafts until then."""
        computed_S = self._num_computed[slot_S]
        behind_S = self.table.num_known[slot_S] - 1 - computed_S  # without the last token, which gives the logits
        if behind_S.max(initial=0) > NEAR:
            count_S = allot(np.where(behind_S > NEAR, behind_S, 0), self.catch_up_tokens)
            behind = np.flatnonzero(count_S)
            self._run(StepPlan(slot_S[behind], computed_S[behind], count_S[behind], np.zeros(len(behind), dtype=bool)))
            self._num_computed[slot_S] = computed_S + count_S
            behind_S = behind_S - count_S
        self._mark_filled(slot_S)
        count_S = np.where(behind_S <= NEAR, self.max_draft_tokens, 0)
        return Proposal(slot_S, count_S, np.zeros_like(count_S), np.zeros((len(slot_S), 0), dtype=np.int64))

    def draft(self, proposal: Proposal, count_S: np.ndarray) -> Drafts:
        table = self.table
        token_id_SK = np.zeros((len(count_S), int(count_S.max())), dtype=np.int64)
        q_SKV: torch.Tensor | None = None
        drafting = np.flatnonzero(count_S)
        slot_A = proposal.slot_S[drafting]
        known_A, start_A = table.num_known[slot_A], self._num_computed[slot_A]
        plan = _pass(slot_A, start_A, known_A - start_A)
        for k in range(token_id_SK.shape[1]):
            logits_AV = self._run(plan)
            token_A, q_AV = self._sample(logits_AV, slot_A, known_A + k)
            if q_AV is not None:
                if q_SKV is None:
                    q_SKV = logits_AV.new_zeros((*token_id_SK.shape, self.vocab_size))
                q_SKV[on_device(drafting, q_SKV.device), k] = q_AV
            token_id_SK[drafting, k] = table.token_ids[slot_A, known_A + k] = token_A
            remaining = np.flatnonzero(count_S[drafting] > k + 1)
            drafting, slot_A, known_A = drafting[remaining], slot_A[remaining], known_A[remaining]
            plan = _pass(slot_A, known_A + k, np.ones_like(slot_A))
        return Drafts(token_id_SK, q_SKV)

    def on_verified(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Update the computed counts, only now: undone steps free blocks, and other tokens follow rejected drafts."""
        known_S = self.table.num_computed[slot_S] - accepted_S  # before the step; forced tokens may have come since
        self._num_computed[slot_S] = known_S + np.minimum(accepted_S, drafted_S - 1)  # the last draft is not computed

    def on_rollback(self, slot_S: np.ndarray) -> None:
        computed_S = np.minimum(self._num_computed[slot_S], self.table.num_computed[slot_S])
        self._num_computed[slot_S] = computed_S
        self._num_marked[slot_S] = np.minimum(self._num_marked[slot_S], computed_S // self.table.pages.page_size)

    # -- parts

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """Return the logits (A, V) after each sequence that samples."""
        logits_AV = self.runner.execute(build_input(plan, self.table))
        missing = self.vocab_size - logits_AV.shape[1]
        if missing > 0:
            return F.pad(logits_AV, (0, missing), value=float("-inf"))
        return logits_AV[:, : self.vocab_size]

    def _sample(
        self, logits_AV: torch.Tensor, slot_A: np.ndarray, known_A: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """Return the draft after the first known_A tokens of each sequence. If probabilities are exposed, also return
        its distribution (A, V); it is zero where logits are not finite, and the target rejects it as a distribution."""
        if is_greedy(self.table.sampling[slot_A]).all():
            return greedy(logits_AV).token_ids, None
        batch = SamplingBatch.from_slots(self.table, slot_A, known_A)
        q_AV = distribution(logits_AV, batch)
        if not (batch.options["temperature"] > 0.0).any():
            return greedy(q_AV).token_ids, None
        stream = DRAFT if self.exposes_draft_probs else PLAIN
        token_A = draw(q_AV, on_device(uniforms(batch.seeds, batch.positions, stream), q_AV.device))
        return token_A.cpu().numpy(), q_AV if self.exposes_draft_probs else None

    def _mark_filled(self, slot_S: np.ndarray) -> None:
        """Mark blocks that hold draft keys of confirmed tokens, which sequences sharing them need not compute."""
        full_S = self._num_computed[slot_S] // self.table.pages.page_size
        for s in np.flatnonzero(full_S > self._num_marked[slot_S]).tolist():
            slot, full = int(slot_S[s]), int(full_S[s])
            block_B = self.table.block_table[slot, self._num_marked[slot] : full]
            self._filled_B[block_B] = self.pool.generation[block_B]
            self._num_marked[slot] = full


def _pass(slot_A: np.ndarray, start_A: np.ndarray, count_A: np.ndarray) -> StepPlan:
    return StepPlan(slot_A, start_A, count_A, np.ones(len(slot_A), dtype=bool))
