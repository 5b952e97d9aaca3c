"""Which sequences have begun to repeat themselves (`SamplingParams.repetition_detection`). No torch.

Nothing is remembered from token to token: the answer follows from the known tokens alone, so it is the same with and
without drafts, after a preemption, and however prompts are cut.

Suffixes: R sequences, G those that are looked at, P sizes of patterns, C candidates (a sequence and a size).
"""

import numpy as np

from pipeline.engine.schedule.sequence import SlotTable


def repeats_itself(table: SlotTable, slot_R: np.ndarray) -> np.ndarray:
    """Of each sequence, just after a token was appended, whether its last patterns are the same (bool)."""
    found_R = np.zeros(len(slot_R), dtype=bool)
    looked_at = np.flatnonzero((table.max_pattern[slot_R] > 0) & (table.num_known[slot_R] >= table.min_known[slot_R]))
    if len(looked_at):
        found_R[looked_at] = _repeat(table, slot_R[looked_at])
    return found_R


def _repeat(table: SlotTable, slot_G: np.ndarray) -> np.ndarray:
    known_G, repeats_G, found_G = table.num_known[slot_G], table.min_repeats[slot_G], np.zeros(len(slot_G), dtype=bool)
    shortest_G = table.min_pattern[slot_G]
    longest_G = np.minimum(table.max_pattern[slot_G], (known_G - table.num_prompt[slot_G]) // repeats_G)
    if not (longest_G >= shortest_G).any():
        return found_G
    # Most sizes fall at once: the last token of a pattern is not that of the pattern before it.
    tokens, last_G = table.token_ids.reshape(-1), slot_G * table.max_model_len + known_G - 1
    size_P = np.arange(shortest_G.min(), longest_G.max() + 1)
    same_GP = tokens[last_G[:, None] - size_P] == tokens[last_G][:, None]
    of_C, at_C = np.divmod(np.flatnonzero(same_GP), len(size_P))  # np.nonzero takes three times as long
    fits_C = np.flatnonzero((size_P[at_C] >= shortest_G[of_C]) & (size_P[at_C] <= longest_G[of_C]))
    of_C, at_C = of_C[fits_C], at_C[fits_C]
    # Nearly all others fall with the last tokens of the earlier patterns.
    number = 2
    while len(of_C) and number < repeats_G[of_C].max():
        last_C, back_C = last_G[of_C], size_P[at_C] * np.minimum(number, repeats_G[of_C] - 1)
        stays = np.flatnonzero(tokens[last_C - back_C] == tokens[last_C])
        of_C, at_C = of_C[stays], at_C[stays]
        number += 1
    for g, p in zip(of_C.tolist(), at_C.tolist()):
        if not found_G[g]:
            size, end = int(size_P[p]), int(known_G[g])
            tail = table.token_ids[slot_G[g], end - size * int(repeats_G[g]) : end]
            found_G[g] = bool((tail[size:] == tail[:-size]).all())
    return found_G
