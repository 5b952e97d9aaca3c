"""What outputs have in common apart from what they copy out of their prompts. No torch.

A summary, an extraction or a filled form says something of its own ("serviced by"), then what its prompt says at some
place ("Technician: Ann Lee"), then something of its own again. The next row's output has other words there, which no
run of tokens that occurred before foretells. So of each output its symbols are kept: its tokens, but each run of at
least two tokens that stands in its prompt is one symbol, the same for all of them. Where the last symbols of an output
occurred in a finished one, its drafts are what came then, each copy replaced by what the output's own prompt has in its
place. That place is after the same two tokens as in the finished output's prompt, or as in others' whose copies came
after the same symbols: forms of a prompt differ. It ends where the same token stands after it.

Whether a token begins a copy is not known before the next one, so for the last one both is tried.

Shapes: those of `compiled_copies.py`, which does it.
"""

import numpy as np

from pipeline.engine.drafts.lookup import compiled_copies
from pipeline.engine.drafts.lookup.compiled_lookup import BORDER, new_table
from pipeline.engine.drafts.lookup.finished_outputs import FinishedOutputs
from pipeline.engine.drafts.policy import Offer
from pipeline.engine.schedule.sequence import SlotTable

MOST_CONTEXTS = 1 << 13  # of copies
MOST_COPIES = 16  # that are known for each


class CopyPatterns:
    """Of the rows of one engine's `table`, and of outputs that are in `finished`."""

    def __init__(self, table: SlotTable, finished: FinishedOutputs) -> None:
        capacity = len(finished.tokens)
        self._table, self._tokens = table, table.token_ids.reshape(-1)
        self._symbol_N = np.full(capacity, BORDER, dtype=np.int32)
        self._copy_N4 = np.zeros((capacity, 4), dtype=np.int32)
        self._end_E = new_table(8 * capacity)
        self._known_TQ4 = np.full((MOST_CONTEXTS, MOST_COPIES, 4), -1, dtype=np.int32)
        self._symbol_BW = np.zeros((table.num_slots, table.max_model_len + 1), dtype=np.int32)
        self._state_B4 = np.zeros((table.num_slots, 4), dtype=np.int64)

    def admitted(self, slot: int) -> None:
        self._symbol_BW[slot, 0] = BORDER
        self._state_B4[slot] = 0, 1, -1, 0

    def learn(self, tokens: np.ndarray, num_prompt: int, place: int) -> None:
        """A row has ended, these are its prompt and its output, which is in `finished` at that place."""
        compiled_copies.learn(tokens, num_prompt, place, self._symbol_N, self._copy_N4, self._end_E, self._known_TQ4)

    def exchange(self, offer: Offer, known_S: np.ndarray, most_new: int) -> None:
        """Exchange the drafts of those sequences of the offer, of which so many tokens are known, whose last symbols
        are known at least as well as the tokens before its drafts. Of at most most_new tokens of each the symbols are
        found in one call; whoever has more has to wait."""
        table, slot_S = self._table, offer.slot_S
        compiled_copies.draft(
            *(self._tokens, slot_S, slot_S * table.max_model_len, table.num_prompt[slot_S], known_S),
            *(most_new, self._symbol_BW, self._state_B4),
            *(self._symbol_N, self._copy_N4, self._end_E, self._known_TQ4),
            *(offer.token_id_SK, offer.count_S, offer.match_len_S),
        )
