"""Drafts from patterns that outputs share apart from what they copy out of their prompts, compiled by numba; no torch.

`copy_patterns.py` explains the method and owns the arrays. A symbol is a token of an output (0 and up), `COPY` for a
run of tokens that also occurs in the prompt, or `BORDER` before and after an output. Four tokens describe a copy: the
two before it in its prompt (its source), and how it ends there: the next token, if the copy does not contain it,
and NONE; otherwise the next two tokens. NONE as the first of these means that the prompt ended there.

Shapes: N positions in the finished outputs, E entries of the index of runs of symbols, T contexts of copies, Q known
copies of one, S sequences of a step, B slots, W symbols of one, M symbols before a position (the last one first),
K maximum drafts of one sequence.
"""

import numpy as np
from numba import njit

from pipeline.engine.drafts.lookup.compiled_lookup import (
    BORDER,
    GOLDEN,
    MAX_MATCH,
    MIN_MATCH,
    bits_of,
    longest,
    write_keys,
    write_tail,
)
from pipeline.kernels.cpu.compile.versions import made_of_imports

COPY, NONE = -3, -1
PARSED, SYMBOLS, COPY_FROM, COPY_POSITION = 0, 1, 2, 3  # of a slot's state; see `draft`
CONTEXT = 3  # maximum symbols before a copy by which known copies are found
_BLOCK = 64  # tokens compared at once
_SOURCE = 2  # tokens before a copy
_32, _64 = np.uint64(32), np.uint64(64)


@njit(cache=True)
@made_of_imports
def learn(text, num_prompt, begin, symbol_N, copy_N4, end_E, known_TQ4):
    """Store the symbols of the output of this text (prompt and output) from index `begin` of the finished outputs on,
    with a border after it; index their runs, and remember the descriptions of its copies."""
    num_output = len(text) - num_prompt
    count, copy_from, copy_position = 0, -1, 0
    for at in range(num_prompt, len(text)):
        count, copy_from, copy_position = _push(text, num_prompt, at, symbol_N[begin:], count, copy_from, copy_position)
        if copy_from >= 0:
            _describe(text, num_prompt, copy_position, at + 1 - copy_from, copy_N4[begin + count - 1])
    for position in range(begin + count, begin + num_output + 1):
        symbol_N[position] = BORDER
    key_L = np.empty(MAX_MATCH - MIN_MATCH + 1, dtype=np.int64)
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    for end in range(begin, begin + count):  # a run at the very end has no continuation
        write_tail(symbol_N, begin - 1, end - begin + 1, tail_M)  # with the border before it
        write_keys(tail_M, np.uint64(0), bits_of(len(end_E)), key_L)
        for key in key_L:
            end_E[key] = end
        if symbol_N[end] == COPY:
            for number in range(1, CONTEXT + 1):
                _remember(known_TQ4[_context(tail_M, number, len(known_TQ4))], copy_N4[end])


@njit(cache=True)
@made_of_imports
def draft(
    tokens,
    slot_S,
    begin_S,
    num_prompt_S,
    known_S,
    max_new,
    symbol_BW,
    state_B4,
    symbol_N,
    copy_N4,
    end_E,
    known_TQ4,
    token_SK,
    count_S,
    match_S,
):
    """Parse up to `max_new` new tokens of each text into symbols; a text begins at tokens[begin_S] and has known_S
    tokens. If its last symbols occurred in finished outputs, in a run no shorter than match_S, replace its drafts.

    state_B4: number of output tokens that are parsed into symbol_BW, number of these symbols including the border,
    index where the copy of the last tokens began (-1 without one), and its position in the prompt. Written: symbol_BW,
    state_B4, and rows of token_SK, count_S and match_S.
    """
    draft_K = np.empty(token_SK.shape[1], dtype=np.int64)
    key_L = np.empty(MAX_MATCH - MIN_MATCH + 1, dtype=np.int64)
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    bits = bits_of(len(end_E))
    for s in range(len(slot_S)):
        num_prompt, known, state_4 = num_prompt_S[s], known_S[s], state_B4[slot_S[s]]
        text, symbol_W = tokens[begin_S[s] : begin_S[s] + known], symbol_BW[slot_S[s]]
        count, copy_from, copy_position = state_4[SYMBOLS], state_4[COPY_FROM], state_4[COPY_POSITION]
        until = min(num_prompt + state_4[PARSED] + max_new, known)
        for at in range(num_prompt + state_4[PARSED], until):
            count, copy_from, copy_position = _push(text, num_prompt, at, symbol_W, count, copy_from, copy_position)
        state_4[PARSED], state_4[SYMBOLS] = until - num_prompt, count
        state_4[COPY_FROM], state_4[COPY_POSITION] = copy_from, copy_position
        if until < known or known == num_prompt:
            continue
        write_tail(symbol_W, 0, count, tail_M)
        write_keys(tail_M, np.uint64(0), bits, key_L)
        end, match = longest(symbol_N, 0, len(symbol_N), tail_M, key_L, end_E)
        position, copy_4 = 0, copy_N4[0]
        if copy_from >= 0:
            if match:
                position = copy_position + known - copy_from
                copy_4 = _same_copy(text, copy_position, tail_M[1:], copy_N4[end - 1], known_TQ4)
        elif count > 1:
            # Its last token may be the first one of a copy, which is recognised only by the next token.
            write_tail(symbol_W, 0, count - 1, tail_M)
            write_keys(tail_M, np.uint64(0), bits, key_L)
            other_end, other = longest(symbol_N, 0, len(symbol_N), tail_M, key_L, end_E)
            if other >= match and other and symbol_N[other_end] == COPY:
                start, copy_4 = _copy_of(text, num_prompt, tail_M, copy_N4[other_end], known_TQ4)
                if start and text[start] == text[known - 1]:
                    position, end, match = start + 1, other_end + 1, other + 1
        if match and match >= match_S[s]:
            number = _follow(text, num_prompt, position, copy_4, end, symbol_N, copy_N4, known_TQ4, draft_K)
            if number:
                count_S[s], match_S[s] = number, min(match, MAX_MATCH)
                for k in range(number):
                    token_SK[s, k] = draft_K[k]


@njit
def _push(text, num_prompt, at, symbol_W, count, copy_from, copy_position):
    """Append the token at index `at` of the text to the `count` symbols before it. copy_from: index where the current
    copy began (-1: none), copy_position: its position in the prompt. Return the three new values."""
    token = text[at]
    if copy_from >= 0:
        position = copy_position + at - copy_from
        if position < num_prompt and text[position] == token:
            return count, copy_from, copy_position
        position = _find(text, num_prompt, copy_from, at + 1)
        if position:
            return count, copy_from, position
    elif count and symbol_W[count - 1] >= 0:
        position = _find(text, num_prompt, at - 1, at + 1)
        if position:
            symbol_W[count - 1] = COPY
            return count, at - 1, position
    symbol_W[count] = token
    return count + 1, -1, 0


@njit
def _find(text, num_prompt, begin, end):
    """Return the first position in the prompt, after a source, of text[begin:end] (at least two tokens); 0: none."""
    first, second = text[begin], text[begin + 1]
    last = num_prompt - (end - begin)
    for block in range(_SOURCE, last + 1, _BLOCK):
        until, hits = min(block + _BLOCK, last + 1), 0
        for position in range(block, until):
            hits += (text[position] == first) & (text[position + 1] == second)
        if hits:
            for position in range(block, until):
                length = 0
                while length < end - begin and text[position + length] == text[begin + length]:
                    length += 1
                if length == end - begin:
                    return position
    return 0


@njit
def _find_after(text, num_prompt, copy_4):
    """Return the first position in the prompt after this source; 0: none."""
    first, second = copy_4[0], copy_4[1]
    for block in range(0, num_prompt - _SOURCE, _BLOCK):
        until, hits = min(block + _BLOCK, num_prompt - _SOURCE), 0
        for position in range(block, until):
            hits += (text[position] == first) & (text[position + 1] == second)
        if hits:
            for position in range(block, until):
                if text[position] == first and text[position + 1] == second:
                    return position + _SOURCE
    return 0


@njit
def _describe(text, num_prompt, position, length, copy_4):
    """Write the description of a copy of `length` tokens from `position` of the prompt."""
    end = position + length
    copy_4[0], copy_4[1] = text[position - 2], text[position - 1]
    copy_4[2] = text[end] if end < num_prompt else NONE
    copy_4[3] = NONE
    for at in range(position, end):
        if text[at] == copy_4[2]:  # the copy contains this token, so two tokens are needed to mark its end
            copy_4[3] = text[end + 1] if end + 1 < num_prompt else NONE


@njit
def _context(tail_M, number, num_contexts):
    """Return the row of the table of copies after `number` symbols."""
    mixed, symbol = np.uint64(number), 0
    for m in range(number):
        symbol = NONE if m > 0 and symbol in (BORDER, NONE) else tail_M[m]  # earlier symbols are of another output
        mixed = (mixed + np.uint64(symbol)) * GOLDEN
        mixed ^= mixed >> _32
    return np.int64((mixed * GOLDEN) >> (_64 - bits_of(num_contexts)))


@njit
def _remember(known_Q4, copy_4):
    """Move the copy to the front; it replaces the entry with the same source, or else the last one."""
    at = 0
    while at < len(known_Q4) - 1 and (known_Q4[at, 0] != copy_4[0] or known_Q4[at, 1] != copy_4[1]):
        at += 1
    for q in range(at, 0, -1):
        for i in range(4):  # copying whole rows takes a second longer to compile
            known_Q4[q, i] = known_Q4[q - 1, i]
    for i in range(4):
        known_Q4[0, i] = copy_4[i]


@njit
def _same_copy(text, position, before_M, instance_4, known_TQ4):
    """Return the known copy with the source before that position, after these symbols; otherwise `instance_4`."""
    first, second = text[position - 2], text[position - 1]
    if instance_4[0] != first or instance_4[1] != second:
        for number in range(CONTEXT, 0, -1):
            known_Q4 = known_TQ4[_context(before_M, number, len(known_TQ4))]
            for copy_4 in known_Q4:
                if copy_4[0] == first and copy_4[1] == second:
                    return copy_4
    return instance_4


@njit
def _copy_of(text, num_prompt, before_M, instance_4, known_TQ4):
    """Return the position in the prompt of a copy that can follow these symbols, and its description; 0: none."""
    position = _find_after(text, num_prompt, instance_4)
    if position:
        return position, instance_4
    for number in range(CONTEXT, 0, -1):
        known_Q4 = known_TQ4[_context(before_M, number, len(known_TQ4))]
        for copy_4 in known_Q4:
            position = _find_after(text, num_prompt, copy_4)
            if position:
                return position, copy_4
    return 0, instance_4


@njit
def _follow(text, num_prompt, position, copy_4, end, symbol_N, copy_N4, known_TQ4, draft_K):
    """Write drafts and return their number: the rest of a copy that continues at prompt `position` (0: none),
    then the symbols from `end` on, with copies taken from this prompt."""
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    count, may_end = 0, True
    while True:
        if position:
            while count < len(draft_K) and position < num_prompt:
                if may_end and _ends(text, num_prompt, position, copy_4):
                    break
                draft_K[count] = text[position]
                count, position, may_end = count + 1, position + 1, True
            if position == num_prompt:
                return count  # the end of this copy is not known
        if count == len(draft_K) or symbol_N[end] == BORDER:
            return count
        position = 0
        if symbol_N[end] == COPY:
            write_tail(symbol_N, 0, end, tail_M)
            position, copy_4 = _copy_of(text, num_prompt, tail_M, copy_N4[end], known_TQ4)
            if not position:
                return count
            may_end = False  # a copy has at least one token
        else:
            draft_K[count] = symbol_N[end]
            count += 1
        end += 1


@njit
def _ends(text, num_prompt, position, copy_4):
    """Return whether a copy ends before that position of the prompt."""
    if text[position] != copy_4[2]:
        return False
    return copy_4[3] == NONE or (position + 1 < num_prompt and text[position + 1] == copy_4[3])
