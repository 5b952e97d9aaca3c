"""Tracks which running rows are reasoning, for those whose next tokens depend on it (`Thinking`). No torch.

Suffixes: R sequences, one for each token or row of logits.
"""

import numpy as np

from pipeline.engine.reasoning.tracking import RowReasoning, Thinking
from pipeline.engine.schedule.slot_table import SlotTable


def update_thinking(table: SlotTable, slot_R: np.ndarray, token_R: np.ndarray) -> np.ndarray:
    """Update the reasoning state after these tokens. Return which tokens belong to reasoning, markers too (bool)."""
    state_R = table.thinking[slot_R]
    begins_R = (state_R == Thinking.MAY_BEGIN) & (token_R == table.start_id[slot_R])
    thought_R = begins_R | (state_R == Thinking.YES)
    continues_R = begins_R | thought_R & (token_R != table.end_id[slot_R])
    for r in np.flatnonzero(thought_R & ~continues_R & table.has_channels[slot_R]).tolist():
        continues_R[r] = not _ends(table, int(slot_R[r]), [])
    table.thinking[slot_R] = np.where(continues_R, Thinking.YES, Thinking.NO)
    return thought_R


def num_thoughts(table: SlotTable, slot: int, draft_ids: list[int]) -> int | None:
    """Return how many of the drafts of a sequence that is reasoning belong to that; None if all do."""
    for index, token in enumerate(draft_ids):
        if token == table.end_id[slot] and (not table.has_channels[slot] or _ends(table, slot, draft_ids[: index + 1])):
            return index + 1
    return None


def closing_ids(table: SlotTable, slot_R: np.ndarray) -> np.ndarray:
    """Return the token that each of these sequences must sample next to end its reasoning."""
    token_R = table.end_id[slot_R]
    for r in np.flatnonzero(table.has_channels[slot_R]).tolist():
        slot = int(slot_R[r])
        token_R[r] = _reasoning(table, slot).closing_id(_generated(table, slot))
    return token_R


def _ends(table: SlotTable, slot: int, draft_ids: list[int]) -> bool:
    """Return whether reasoning has ended after these drafts."""
    generated = np.append(_generated(table, slot), np.array(draft_ids, dtype=np.int64))
    return _reasoning(table, slot).thinking(generated) == Thinking.NO


def _generated(table: SlotTable, slot: int) -> np.ndarray:
    return table.token_ids[slot, table.num_prompt[slot] : table.num_known[slot]]


def _reasoning(table: SlotTable, slot: int) -> RowReasoning:
    reasoning = table.at(slot).reasoning
    assert isinstance(reasoning, RowReasoning)
    return reasoning


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
