"""Patterns that outputs share apart from what they copy out of their prompts. No torch.

A summary, an extraction or a filled form contains fixed text ("serviced by"), then text of its prompt ("Technician: Ann
Lee"), then fixed text again. The next row's output has different words there, which no earlier run of tokens predicts.
So outputs are stored as symbols: each token is a symbol, but each run of at least two tokens that occurs in the prompt
becomes one symbol, the same for all of them. If the last symbols of an output occurred in a finished one, its drafts
are the symbols that followed, each copy replaced by the corresponding text of the output's own prompt. That text begins
after the same two tokens as in the finished output's prompt, or as in other prompts whose copies followed the same
symbols, since prompts vary. It ends where the same token follows.

Only the next token shows whether a token begins a copy, so both cases are tried for the last one.

Shapes: those of `compiled_copies.py`, which computes it.
"""

import numpy as np

from pipeline.engine.drafts.lookup import compiled_copies
from pipeline.engine.drafts.lookup.compiled_lookup import BORDER, new_table
from pipeline.engine.drafts.lookup.finished_outputs import FinishedOutputs
from pipeline.engine.drafts.policy import Proposal
from pipeline.engine.schedule.slot_table import SlotTable

MAX_CONTEXTS = 1 << 13  # of copies
MAX_COPIES = 16  # known for each context


class CopyPatterns:
    """Copy patterns of the rows of one engine's `table`, and of the outputs in `finished`."""

    def __init__(self, table: SlotTable, finished: FinishedOutputs) -> None:
        capacity = len(finished.tokens)
        self._table, self._tokens = table, table.token_ids.reshape(-1)
        self._symbol_N = np.full(capacity, BORDER, dtype=np.int32)
        self._copy_N4 = np.zeros((capacity, 4), dtype=np.int32)
        self._end_E = new_table(8 * capacity)
        self._known_TQ4 = np.full((MAX_CONTEXTS, MAX_COPIES, 4), -1, dtype=np.int32)
        self._symbol_BW = np.zeros((table.num_slots, table.max_model_len + 1), dtype=np.int32)
        self._state_B4 = np.zeros((table.num_slots, 4), dtype=np.int64)

    def admitted(self, slot: int) -> None:
        self._symbol_BW[slot, 0] = BORDER
        self._state_B4[slot] = 0, 1, -1, 0

    def index_finished(self, tokens: np.ndarray, num_prompt: int, position: int) -> None:
        """Learn from an ended row: its prompt and its output, which is at index `position` of `finished`."""
        compiled_copies.learn(tokens, num_prompt, position, self._symbol_N, self._copy_N4, self._end_E, self._known_TQ4)

    def apply_patterns(self, proposal: Proposal, known_S: np.ndarray, max_new: int) -> None:
        """Replace the drafts of sequences whose last symbols have a match no shorter than that of their last tokens.
        known_S: their known tokens. At most max_new tokens of each are parsed in one call; the rest waits."""
        table, slot_S = self._table, proposal.slot_S
        compiled_copies.draft(
            *(self._tokens, slot_S, slot_S * table.max_model_len, table.num_prompt[slot_S], known_S),
            *(max_new, self._symbol_BW, self._state_B4),
            *(self._symbol_N, self._copy_N4, self._end_E, self._known_TQ4),
            *(proposal.token_id_SK, proposal.count_S, proposal.match_len_S),
        )
