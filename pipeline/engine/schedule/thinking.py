"""Tracks which running rows are reasoning, for those whose next tokens depend on it (`Thinking`). No torch.

Suffixes: R sequences, one for each token or row of logits.
"""

import numpy as np

from pipeline.engine.reasoning.tracking import Thinking
from pipeline.engine.schedule.sequence import SlotTable


def update_thinking(table: SlotTable, slot_R: np.ndarray, token_R: np.ndarray) -> np.ndarray:
    """Update the reasoning state after these tokens. Return which tokens belong to reasoning, markers too (bool)."""
    state_R = table.thinking[slot_R]
    begins_R = (state_R == Thinking.MAY_BEGIN) & (token_R == table.start_id[slot_R])
    thought_R = begins_R | (state_R == Thinking.YES)
    continues_R = begins_R | thought_R & (token_R != table.end_id[slot_R])
    table.thinking[slot_R] = np.where(continues_R, Thinking.YES, Thinking.NO)
    return thought_R


def budget_exhausted(table: SlotTable, slot_R: np.ndarray) -> np.ndarray:
    """Return which sequences have used up their thinking budget, so that the end marker is next. Tokens in flight
    count."""
    known_R = table.num_known[slot_R]
    return (table.thinking[slot_R] != Thinking.NO) & (known_R >= table.thinking_deadline[slot_R])


def end_of_drafts(table: SlotTable, slot_S: np.ndarray) -> np.ndarray:
    """Return the number of known tokens at which drafting stops because of reasoning: drafts do not cross the end of a
    budget, and a first token that may begin reasoning gets none, because the tokens after it depend on it."""
    state_S = table.thinking[slot_S]
    end_S = np.where(state_S == Thinking.YES, table.thinking_deadline[slot_S], np.iinfo(np.int64).max)
    return np.where(state_S == Thinking.MAY_BEGIN, 0, end_S)
