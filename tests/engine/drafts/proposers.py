"""Proposers whose drafts are right at a rate that a test chooses."""

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import DraftPolicy, FixedDrafts, Proposal
from pipeline.engine.drafts.proposer import Drafts, Proposer
from pipeline.engine.drafts.spec_decoder import SpecDecoder
from pipeline.engine.engine import Engine
from pipeline.engine.schedule.slot_table import SlotTable


def draft_with(engine: Engine, proposer: Proposer, policy: DraftPolicy | None = None) -> Engine:
    """Make the engine draft in every step, or by `policy`."""
    engine.draft_as(SpecDecoder(proposer, policy or FixedDrafts(), engine.scheduler))
    return engine


def looking_up(engine: Engine) -> Engine:
    return draft_with(engine, NgramProposer(engine.table, 4))


class Recorded:
    """Proposer of a run's recorded outputs, by row id, with errors; drafts are ragged and sometimes empty.

    Fails if sequences are admitted and evicted in another order than their own.
    """

    def __init__(
        self,
        table: SlotTable,
        outputs: Mapping[object, Sequence[int]],
        rng: np.random.Generator,
        max_drafts: int = 5,
        error_rate: float = 0.2,
        vocab_size: int = 97,
    ) -> None:
        self.table, self.outputs, self.rng = table, outputs, rng
        self.max_drafts, self.error_rate, self.vocab_size = max_drafts, error_rate, vocab_size
        self.order_of: dict[int, int] = {}
        self.num_finished = 0

    def admitted(self, slot: int) -> None:
        assert slot not in self.order_of
        self.order_of[slot] = self.table.at(slot).order

    def on_evicted(self, slot: int, finished: bool) -> None:
        assert self.order_of.pop(slot) == self.table.at(slot).order
        self.num_finished += finished

    def propose(self, slot_S: np.ndarray) -> Proposal:
        token_SK = np.full((len(slot_S), self.max_drafts), -1, dtype=np.int64)
        count_S = np.zeros(len(slot_S), dtype=np.int64)
        for s, slot in enumerate(slot_S.tolist()):
            sequence = self.table.at(slot)
            assert self.order_of[slot] == sequence.order
            at = int(self.table.num_known[slot]) - sequence.num_prompt
            rest = list(self.outputs[sequence.request.row_id][at : at + self.max_drafts])
            rest += self.rng.integers(0, self.vocab_size, self.max_drafts - len(rest)).tolist()
            wrong = self.rng.random(self.max_drafts) < self.error_rate
            count_S[s] = self.rng.integers(0, self.max_drafts + 1)
            drafts = np.where(wrong, self.rng.integers(0, self.vocab_size, self.max_drafts), rest)
            token_SK[s, : count_S[s]] = drafts[: count_S[s]]
        return Proposal(slot_S, count_S, np.zeros_like(count_S), token_SK)

    def draft(self, proposal: Proposal, count_S: np.ndarray) -> Drafts:
        assert (count_S <= proposal.count_S).all()
        return Drafts(proposal.token_id_SK)

    def on_rollback(self, slot_S: np.ndarray) -> None:
        pass

    def on_verified(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        pass


class Certain(Recorded):
    """Proposer of the maximal number of drafts, exactly the given ones."""

    def propose(self, slot_S: np.ndarray) -> Proposal:
        token_SK = np.zeros((len(slot_S), self.max_drafts), dtype=np.int64)
        for s, sequence in enumerate(map(self.table.at, slot_S.tolist())):
            at = int(self.table.num_known[sequence.slot]) - sequence.num_prompt
            drafts = self.outputs[sequence.request.row_id][at : at + self.max_drafts]
            token_SK[s, : len(drafts)] = drafts
        return Proposal(slot_S, np.full(len(slot_S), self.max_drafts), np.zeros(len(slot_S), dtype=np.int64), token_SK)
