"""Inputs and outputs of sampling for one step. See on_host.py.

Suffixes: R rows of logits, S sequences.
"""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.grammar.token_mask import TokenMask
from pipeline.engine.schedule.slot_table import SlotTable, ranges
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.tasks import TokenLogprobs


@dataclass(frozen=True)
class SamplingBatch:
    """Rows of one step that need a token, in the order of the logits.

    options: of SAMPLING_OPTIONS. seeds (uint64) and positions (int64; number of tokens the row has generated so far)
    are the key of its random number. ending_ids (object): the tokens that would end the row (int64), masked before its
    min_tokens, or None. mask: of the rows with a grammar.
    token_ids is a table of known tokens, read only for rows with penalties: row r has the first num_known[r] of
    token_ids[slots[r]], and the first num_prompt[r] of those are its prompt.
    """

    options: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    ending_ids: np.ndarray
    token_ids: np.ndarray
    slots: np.ndarray
    num_prompt: np.ndarray
    num_known: np.ndarray
    mask: TokenMask | None = None

    @classmethod
    def of_plan(cls, plan: StepPlan, table: SlotTable) -> "SamplingBatch":
        """Build one row after the known tokens of each sequence that samples, and one after each draft, which follows
        the drafts before it."""
        slot_S = plan.sampling_slot_S
        known_S = table.num_known[slot_S]
        if plan.draft_S is None:
            return cls.from_slots(table, slot_S, known_S)
        count_S = plan.draft_S[plan.samples_S] + 1
        return cls.from_slots(table, np.repeat(slot_S, count_S), ranges(known_S, count_S))

    @classmethod
    def from_slots(cls, table: SlotTable, slot_R: np.ndarray, known_R: np.ndarray) -> "SamplingBatch":
        """Build rows whose next token follows the first known_R tokens of the sequences in these slots."""
        return cls(
            options=table.sampling[slot_R],
            seeds=table.seed[slot_R],
            positions=known_R - table.num_prompt[slot_R],
            ending_ids=table.ending_ids[slot_R],
            token_ids=table.token_ids,
            slots=slot_R,
            num_prompt=table.num_prompt[slot_R],
            num_known=known_R,
        )

    @property
    def is_sampled(self) -> np.ndarray:
        """Rows with a temperature; the others are greedy."""
        return self.options["temperature"] > 0.0

    @property
    def must_go_on(self) -> np.ndarray:
        """Rows that have not reached their min_tokens."""
        return self.options["min_tokens"] > self.positions

    @property
    def is_masked(self) -> np.ndarray:
        """Rows that may not sample every token."""
        masked = self.must_go_on
        if self.mask is not None:
            masked[self.mask.row_M] = True
        return masked

    def with_mask(self, mask: TokenMask | None) -> "SamplingBatch":
        """Return the same rows with the masks of their grammars."""
        return self if mask is None else replace(self, mask=mask)


@dataclass(frozen=True)
class SamplerOutput:
    """One token per row, and log-probabilities by row where requested. If `finite` is False, the row's logits contain
    NaN or +inf, or nothing above -inf; its token id is then 0 and meaningless."""

    token_ids: np.ndarray  # int64 [R]
    finite: np.ndarray  # bool [R]
    logprobs: dict[int, TokenLogprobs]

    def of_rows(self, rows: np.ndarray) -> "SamplerOutput":
        """Return the output of these rows, in their order."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs:
            logprobs = {r: self.logprobs[row] for r, row in enumerate(rows.tolist()) if row in self.logprobs}
        return SamplerOutput(self.token_ids[rows], self.finite[rows], logprobs)


def tokens_and_finite(token_and_finite_2R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    finite = token_and_finite_2R[1].astype(bool)
    return np.where(finite, token_and_finite_2R[0], 0), finite
