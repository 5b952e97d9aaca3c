"""Lookup of the tokens that followed earlier occurrences of a text's last tokens, compiled by numba; no torch.

A table maps the hash of every run of MIN_MATCH to MAX_MATCH tokens to its last end. Entries are not chained: a run
overwrites another one with the same entry, and a lookup compares the tokens themselves. So a small table forgets runs
but never returns a wrong one. Several texts share a table, each with its own salt, and find only their own runs.

Shapes: S sequences, K maximum drafts of one, M tokens before a position (the last one first), E entries of a table.
"""

import numpy as np
from numba import njit

from pipeline.kernels.cpu.compile.versions import made_of_imports

MIN_MATCH, MAX_MATCH = 2, 8
BORDER = -2  # between finished outputs: not a token, and different from the padding before a text
# Constants of the hash, a polynomial modulo 2**64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SALT = np.uint64(0xD1B54A32D192ED03)
LENGTH = np.uint64(0x8CB92BA72F3D8DD7)

_32, _64, _2 = np.uint64(32), np.uint64(64), np.uint64(2)


def new_table(num_entries: int) -> np.ndarray:
    """Return an empty table with a power of two of entries, 4 bytes each. All entries are written here: the first touch
    of a memory page takes microseconds, and hashes touch all pages in the first steps with drafts, which are timed.
    """
    return np.full(1 << max(int(num_entries - 1).bit_length(), 1), 0, dtype=np.int32)  # np.zeros would not touch pages


@njit(cache=True)
@made_of_imports
def look_up(
    tokens, begin_S, known_S, indexed_S, salt_S, end_E, finished, finished_end_E, max_new, token_SK, count_S, match_S
):
    """Index at most `max_new` new runs of each text, which begins at tokens[begin_S] and has known_S tokens, and write
    its drafts, their number, and the length of the matched run.

    Drafts continue the longest run that ends the text, found in the text or in `finished`; of equally long ones the
    last, and the text's own before another's. Drafts from the text itself may run past its end into themselves, which
    repeats the last tokens, as in LZ77. The run at the very end of a text is indexed later: nothing follows it yet.

    Written: end_E, and every entry of token_SK, count_S and match_S.
    """
    key_L = np.empty(MAX_MATCH - MIN_MATCH + 1, dtype=np.int64)
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    bits, finished_bits = bits_of(len(end_E)), bits_of(len(finished_end_E))
    for s in range(len(begin_S)):
        begin, known, salt = begin_S[s], known_S[s], np.uint64(salt_S[s]) * SALT
        for end in range(indexed_S[s] + 1, min(known, indexed_S[s] + max_new + 1)):
            write_tail(tokens, begin, end, tail_M)
            write_keys(tail_M, salt, bits, key_L)
            for key in key_L:
                end_E[key] = end
    # Index all texts before any lookup: runs of different texts may share an entry.
    for s in range(len(begin_S)):
        begin, known, salt = begin_S[s], known_S[s], np.uint64(salt_S[s]) * SALT
        write_tail(tokens, begin, known, tail_M)
        write_keys(tail_M, salt, bits, key_L)
        end, match = longest(tokens, begin, known, tail_M, key_L, end_E)
        count_S[s], match_S[s] = token_SK.shape[1] if match > 0 else 0, match
        write_keys(tail_M, np.uint64(0), finished_bits, key_L)
        other_end, other_match = longest(finished, 0, len(finished), tail_M, key_L, finished_end_E)
        other_count = 0
        while other_match > match and other_count < token_SK.shape[1]:
            if finished[min(other_end + other_count, len(finished) - 1)] == BORDER:
                break
            other_count += 1
        if other_count > 0:
            count_S[s], match_S[s] = other_count, other_match
        for k in range(token_SK.shape[1]):
            if other_count > 0:
                token_SK[s, k] = finished[min(other_end + k, len(finished) - 1)]
            else:
                token_SK[s, k] = tokens[begin + end + k % (known - end)]


@njit(cache=True)
@made_of_imports
def index_runs(tokens, begin, end, end_E):
    """Write the ends of the runs of the text tokens[begin:end] into the table, except those at its very end."""
    key_L = np.empty(MAX_MATCH - MIN_MATCH + 1, dtype=np.int64)
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    for at in range(begin + MIN_MATCH, end):
        write_tail(tokens, 0, at, tail_M)
        write_keys(tail_M, np.uint64(0), bits_of(len(end_E)), key_L)
        for key in key_L:
            end_E[key] = at


@njit(inline="always")
def bits_of(num_entries):
    """Return log2 of the size of a table."""
    bits = 0
    while (1 << bits) < num_entries:
        bits += 1
    return np.uint64(bits)


@njit
def write_tail(tokens, begin, end, tail_M):
    """Write the last tokens before `end` of the text that begins at `begin` to tail_M; -1 before the text."""
    for m in range(MAX_MATCH):
        index = end - 1 - m
        tail_M[m] = tokens[begin + index] if index >= 0 else -1


@njit
def write_keys(tail_M, salt, bits, key_L):
    """Write the table entries of the runs that end the tail to key_L."""
    total, factor = np.uint64(0), np.uint64(1)
    for m in range(MAX_MATCH):
        factor *= GOLDEN
        total += (np.uint64(tail_M[m]) + _2) * factor
        if m + 1 >= MIN_MATCH:
            mixed = total + np.uint64(m + 1) * LENGTH + salt
            mixed ^= mixed >> _32
            mixed *= GOLDEN
            key_L[m + 1 - MIN_MATCH] = np.int64(mixed >> (_64 - bits))


@njit
def longest(tokens, begin, before, tail_M, key_L, end_E):
    """Return where the longest run that ends the tail ended (of equals the last one) and its length; 0: no match."""
    best_end, best = 0, -1
    for key in key_L:
        end = np.int64(end_E[key])
        if end >= before:
            end = 0
        length = 0
        while length < MAX_MATCH:
            index = end - 1 - length
            if (tokens[begin + index] if index >= 0 else -1) != tail_M[length]:
                break
            length += 1
        if length > best or (length == best and end > best_end):
            best_end, best = end, length
    return best_end, best if best >= MIN_MATCH else 0
