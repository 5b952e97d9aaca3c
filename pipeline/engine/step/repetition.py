"""Repetition detection (`SamplingParams.repetition_detection`). No torch.

It is stateless: the answer depends only on the known tokens, so it is the same with and without drafts, after a
preemption, and however prompts are chunked.

Suffixes: R sequences, G those with detection, P pattern sizes, C candidates (a sequence and a size).
"""

import numpy as np

from pipeline.engine.schedule.slot_table import SlotTable


def repeats_itself(table: SlotTable, slot_R: np.ndarray) -> np.ndarray:
    """Return for each sequence, just after a token was appended, whether its last patterns are equal (bool)."""
    found_R = np.zeros(len(slot_R), dtype=bool)
    checked = np.flatnonzero((table.max_pattern[slot_R] > 0) & (table.num_known[slot_R] >= table.min_known[slot_R]))
    if len(checked):
        found_R[checked] = _repeat(table, slot_R[checked])
    return found_R


def _repeat(table: SlotTable, slot_G: np.ndarray) -> np.ndarray:
    known_G, repeats_G, found_G = table.num_known[slot_G], table.min_repeats[slot_G], np.zeros(len(slot_G), dtype=bool)
    shortest_G = table.min_pattern[slot_G]
    longest_G = np.minimum(table.max_pattern[slot_G], (known_G - table.num_prompt[slot_G]) // repeats_G)
    if not (longest_G >= shortest_G).any():
        return found_G
    # Most sizes are excluded at once: the last token of a pattern differs from that of the previous pattern.
    tokens, last_G = table.token_ids.reshape(-1), slot_G * table.max_model_len + known_G - 1
    size_P = np.arange(shortest_G.min(), longest_G.max() + 1)
    same_GP = tokens[last_G[:, None] - size_P] == tokens[last_G][:, None]
    seq_C, size_C = np.divmod(np.flatnonzero(same_GP), len(size_P))  # np.nonzero takes three times as long
    valid_C = np.flatnonzero((size_P[size_C] >= shortest_G[seq_C]) & (size_P[size_C] <= longest_G[seq_C]))
    seq_C, size_C = seq_C[valid_C], size_C[valid_C]
    # Nearly all others are excluded by the last tokens of earlier patterns.
    number = 2
    while len(seq_C) and number < repeats_G[seq_C].max():
        last_C, back_C = last_G[seq_C], size_P[size_C] * np.minimum(number, repeats_G[seq_C] - 1)
        equal = np.flatnonzero(tokens[last_C - back_C] == tokens[last_C])
        seq_C, size_C = seq_C[equal], size_C[equal]
        number += 1
    for g, p in zip(seq_C.tolist(), size_C.tolist()):
        if not found_G[g]:
            size, end = int(size_P[p]), int(known_G[g])
            tail = table.token_ids[slot_G[g], end - size * int(repeats_G[g]) : end]
            found_G[g] = bool((tail[size:] == tail[:-size]).all())
    return found_G
