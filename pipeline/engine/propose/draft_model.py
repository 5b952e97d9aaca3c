"""Drafts by a smaller model with the same tokens.

It has a KV cache of its own with as many blocks as the target's, and follows the target's block tables: a token's draft
keys lie in the block and at the place where its target keys lie. So nothing has to be allocated or shared for it, and a
shared prefix is shared here too. What differs is how far each sequence is computed: while nobody drafts the draft
model stands still, and catches up when it is asked again, a bounded number of tokens in a step.

Passes run one after the other, each over all sequences that draft so deep. Where a request samples, its drafts are
drawn from the draft's distribution under the same options, so that rejection sampling can accept most of them; a
greedy request gets the draft's best tokens. Where tokens must not depend on drafts, the distribution is kept back, and
drafts are drawn with the very number that the target will draw with: then they are accepted where they are what it
draws.

How much of a sequence's last drafts was accepted says most about its next ones; offers say it as their match length,
for a while.

Shapes: S sequences of the offer, A of them drafting, K most drafts of one, V the target's vocabulary, B blocks.
"""

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.engine.block_pool import BlockPool
from pipeline.engine.draft_room import share
from pipeline.engine.draws import DRAFT, PLAIN, draw, uniforms
from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.proposer import Drafts
from pipeline.engine.runner import Runner
from pipeline.engine.sampler import distribution, greedy
from pipeline.engine.sampling_batch import SamplingBatch
from pipeline.engine.sequence import SlotTable
from pipeline.engine.step import StepPlan, build_input

RECENT_TOKENS = 16  # known tokens after which what became of the last drafts is forgotten
NEAR = 8  # known tokens behind that the first pass computes besides; who is further behind catches up first


class DraftModelProposer:
    """Implements `Proposer`. `runner` holds the draft model and its KV cache, of `pool`'s number and size of blocks."""

    name = "draft"

    def __init__(
        self,
        runner: Runner,
        table: SlotTable,
        pool: BlockPool,
        max_draft_tokens: int,
        vocab_size: int,
        catch_up_tokens: int = 512,
        tells_law: bool = True,
    ) -> None:
        """vocab_size: the target's; ids from there on are never drafted. catch_up_tokens: that one step computes for
        sequences which are behind. tells_law: for rejection sampling, where drawn tokens may depend on drafts."""
        assert max_draft_tokens >= 1
        assert catch_up_tokens >= 1
        self.runner, self.table, self.pool = runner, table, pool
        self.max_draft_tokens, self.vocab_size, self.catch_up_tokens = max_draft_tokens, vocab_size, catch_up_tokens
        self.tells_law = tells_law
        self._num_computed = np.zeros(table.num_slots, dtype=np.int64)  # known tokens whose draft keys are in the cache
        self._drafted = (np.zeros(0, dtype=np.int64),) * 3  # slots, known tokens and drafts of the last `draft`
        self._match_len = np.zeros(table.num_slots, dtype=np.int64)  # 1 and what was accepted of the last drafts
        self._settled_at = np.zeros(table.num_slots, dtype=np.int64)  # known tokens when they were drafted
        self._num_marked = np.zeros(table.num_slots, dtype=np.int64)  # blocks of it known as filled
        self._filled_B = np.full(pool.num_blocks, -1, dtype=np.int64)  # generation in which the draft filled it

    def admitted(self, slot: int) -> None:
        block_B = self.table.block_table[slot, : self.table.num_blocks[slot]]
        empty = np.flatnonzero(self._filled_B[block_B] != self.pool.generation[block_B])
        filled = int(empty[0]) if len(empty) else len(block_B)
        self._num_marked[slot] = filled
        self._num_computed[slot] = filled * self.table.block_size
        self._match_len[slot] = 0

    def left(self, slot: int, finished: bool) -> None:
        pass

    def offer(self, slot_S: np.ndarray) -> Offer:
        """Sequences that are far behind come nearer, and have nothing to offer until they are near."""
        known_S = self.table.num_known[slot_S]
        computed_S = self._num_computed[slot_S]  # never the last known token, which gives the logits
        behind_S = known_S - 1 - computed_S
        if behind_S.max(initial=0) > NEAR:
            count_S = share(np.where(behind_S > NEAR, behind_S, 0), self.catch_up_tokens)
            some = np.flatnonzero(count_S)
            self._run(slot_S[some], computed_S[some], count_S[some], wants_logits=False)
            computed_S = computed_S + count_S
            behind_S = behind_S - count_S
        self._num_computed[slot_S] = computed_S
        self._mark_filled(slot_S, computed_S)
        count_S = np.where(behind_S <= NEAR, self.max_draft_tokens, 0)
        is_recent_S = known_S - self._settled_at[slot_S] <= RECENT_TOKENS
        match_len_S = np.where(is_recent_S, self._match_len[slot_S], 0)
        return Offer(slot_S, count_S, match_len_S, np.zeros((len(slot_S), 0), dtype=np.int64))

    def draft(self, offer: Offer, count_S: np.ndarray) -> Drafts:
        table = self.table
        token_id_SK = np.zeros((len(count_S), int(count_S.max())), dtype=np.int64)
        q_SKV: torch.Tensor | None = None
        is_drawn = bool((table.sampling["temperature"][offer.slot_S[count_S > 0]] > 0.0).any())
        drafting = np.flatnonzero(count_S)
        slot_A = offer.slot_S[drafting]
        known_A, start_A = table.num_known[slot_A], self._num_computed[slot_A]
        self._drafted = slot_A, known_A, count_S[drafting]
        for place in range(token_id_SK.shape[1]):
            logits_AV = self._run(slot_A, start_A, known_A + place - start_A)
            if is_drawn:
                token_A, q_AV = self._drawn(logits_AV, slot_A, known_A + place)
                if self.tells_law:
                    if q_SKV is None:
                        q_SKV = logits_AV.new_zeros((*token_id_SK.shape, self.vocab_size))
                    q_SKV[torch.from_numpy(drafting).to(q_SKV.device), place] = q_AV
            else:
                token_A = self._best(logits_AV, slot_A, known_A + place)
            token_id_SK[drafting, place] = token_A
            table.token_ids[slot_A, known_A + place] = token_A
            deeper = np.flatnonzero(count_S[drafting] > place + 1)
            drafting, slot_A, known_A = drafting[deeper], slot_A[deeper], known_A[deeper]
            start_A = known_A + place
        return Drafts(token_id_SK, q_SKV)

    def settled(self, slot_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Only now: an undone step takes blocks away, and behind a rejected draft stands another token."""
        slot_A, known_A, count_A = self._drafted
        assert (slot_A == slot_S).all()
        self._num_computed[slot_A] = known_A + np.minimum(accepted_S, count_A - 1)  # the last draft is not computed
        self._match_len[slot_A] = 1 + accepted_S
        self._settled_at[slot_A] = known_A

    # -- parts

    def _run(
        self, slot_A: np.ndarray, start_A: np.ndarray, count_A: np.ndarray, wants_logits: bool = True
    ) -> torch.Tensor:
        """Compute count_A tokens of each from start_A on; the logits (A, V) behind the last one, or none."""
        plan = StepPlan(slot_A, start_A, count_A, np.full(len(slot_A), wants_logits))
        logits_AV = self.runner.execute(build_input(plan, self.table))
        missing = self.vocab_size - logits_AV.shape[1]
        if missing > 0:
            return F.pad(logits_AV, (0, missing), value=float("-inf"))
        return logits_AV[:, : self.vocab_size]

    def _best(self, logits_AV: torch.Tensor, slot_A: np.ndarray, known_A: np.ndarray) -> np.ndarray:
        """The draft behind the first known_A tokens of each sequence, all of them greedy."""
        if not self.table.is_plain[slot_A].all():
            logits_AV = distribution(logits_AV, SamplingBatch.of(self.table, slot_A, known_A))
        return greedy(logits_AV).token_ids

    def _drawn(
        self, logits_AV: torch.Tensor, slot_A: np.ndarray, known_A: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor]:
        """The same where some are not greedy, and what it was drawn from (A, V).

        Where logits are not finite that is nothing at all: then the target does not trust it as a law.
        """
        batch = SamplingBatch.of(self.table, slot_A, known_A)
        q_AV = distribution(logits_AV, batch)
        stream = DRAFT if self.tells_law else PLAIN
        u_A = torch.from_numpy(uniforms(batch.seeds, batch.positions, stream)).to(q_AV.device)
        return draw(q_AV, u_A).cpu().numpy(), q_AV

    def _mark_filled(self, slot_S: np.ndarray, computed_S: np.ndarray) -> None:
        """Blocks that the draft has filled with confirmed tokens need not be computed by who shares them."""
        full_S = computed_S // self.table.block_size
        for s in np.flatnonzero(full_S > self._num_marked[slot_S]).tolist():
            slot, full = int(slot_S[s]), int(full_S[s])
            block_B = self.table.block_table[slot, self._num_marked[slot] : full]
            self._filled_B[block_B] = self.pool.generation[block_B]
            self._num_marked[slot] = full
