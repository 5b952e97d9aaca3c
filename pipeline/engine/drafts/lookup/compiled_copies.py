"""Drafts from what outputs have in common apart from what they copy out of their prompts, compiled by numba; no torch.

What is done, and why, is told in `copy_patterns.py`, with the arrays. A symbol is a token of an output (0
and up), `COPY` for a run of tokens that stands in the prompt as well, or `BORDER` before and after an output. What is
known of a copy are four tokens: the two before it in its prompt (its source), and what stands after it there: one
token that the copy does not contain, and NONE, or two tokens. NONE as the first of these: the prompt ended there.

Shapes: N places among the finished outputs, E entries of the index of runs of symbols, T contexts of copies, Q copies
that are known of one, S sequences of a step, B slots, W symbols of one, M symbols before a place (the last one first),
K most drafts of one sequence.
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
PARSED, SYMBOLS, COPY_FROM, COPY_PLACE = 0, 1, 2, 3  # of a slot's state; see `draft`
CONTEXT = 3  # symbols before a copy that what is known of such copies is found by, or fewer
_BLOCK = 64  # tokens that are compared at once
_SOURCE = 2  # tokens before a copy
_32, _64 = np.uint64(32), np.uint64(64)


@njit(cache=True)
@made_of_imports
def learn(text, num_prompt, begin, symbol_N, copy_N4, end_E, known_TQ4):
    """Write down the symbols of the output of this text, a prompt and the output, whose place among the finished
    outputs is `begin`, with a border after it; index their runs, and remember what is known of the copies."""
    num_output = len(text) - num_prompt
    count, copy_from, copy_place = 0, -1, 0
    for at in range(num_prompt, len(text)):
        count, copy_from, copy_place = _push(text, num_prompt, at, symbol_N[begin:], count, copy_from, copy_place)
        if copy_from >= 0:
            _describe(text, num_prompt, copy_place, at + 1 - copy_from, copy_N4[begin + count - 1])
    for place in range(begin + count, begin + num_output + 1):
        symbol_N[place] = BORDER
    key_L = np.empty(MAX_MATCH - MIN_MATCH + 1, dtype=np.int64)
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    for end in range(begin, begin + count):  # a run at the very end has nothing after it
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
    most_new,
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
    """Find the symbols of at most `most_new` new tokens of each text, which begins at tokens[begin_S] and has known_S
    tokens; and where its last symbols are known of finished outputs, and no shorter than match_S, exchange what is
    drafted for it.

    state_B4: output tokens whose symbols are in symbol_BW, how many symbols these are, with the border; where the copy
    began that its last tokens are, -1 without one, and where that stands in the prompt. Written: symbol_BW, state_B4,
    and rows of token_SK, count_S and match_S.
    """
    draft_K = np.empty(token_SK.shape[1], dtype=np.int64)
    key_L = np.empty(MAX_MATCH - MIN_MATCH + 1, dtype=np.int64)
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    bits = bits_of(len(end_E))
    for s in range(len(slot_S)):
        num_prompt, known, state_4 = num_prompt_S[s], known_S[s], state_B4[slot_S[s]]
        text, symbol_W = tokens[begin_S[s] : begin_S[s] + known], symbol_BW[slot_S[s]]
        count, copy_from, copy_place = state_4[SYMBOLS], state_4[COPY_FROM], state_4[COPY_PLACE]
        until = min(num_prompt + state_4[PARSED] + most_new, known)
        for at in range(num_prompt + state_4[PARSED], until):
            count, copy_from, copy_place = _push(text, num_prompt, at, symbol_W, count, copy_from, copy_place)
        state_4[PARSED], state_4[SYMBOLS] = until - num_prompt, count
        state_4[COPY_FROM], state_4[COPY_PLACE] = copy_from, copy_place
        if until < known or known == num_prompt:
            continue
        write_tail(symbol_W, 0, count, tail_M)
        write_keys(tail_M, np.uint64(0), bits, key_L)
        end, match = longest(symbol_N, 0, len(symbol_N), tail_M, key_L, end_E)
        place, copy_4 = 0, copy_N4[0]
        if copy_from >= 0:
            if match:
                place = copy_place + known - copy_from
                copy_4 = _same_copy(text, copy_place, tail_M[1:], copy_N4[end - 1], known_TQ4)
        elif count > 1:
            # Its last token may be the first one of a copy, which one token alone does not show.
            write_tail(symbol_W, 0, count - 1, tail_M)
            write_keys(tail_M, np.uint64(0), bits, key_L)
            other_end, other = longest(symbol_N, 0, len(symbol_N), tail_M, key_L, end_E)
            if other >= match and other and symbol_N[other_end] == COPY:
                begun, copy_4 = _copy_of(text, num_prompt, tail_M, copy_N4[other_end], known_TQ4)
                if begun and text[begun] == text[known - 1]:
                    place, end, match = begun + 1, other_end + 1, other + 1
        if match and match >= match_S[s]:
            number = _follow(text, num_prompt, place, copy_4, end, symbol_N, copy_N4, known_TQ4, draft_K)
            if number:
                count_S[s], match_S[s] = number, min(match, MAX_MATCH)
                for k in range(number):
                    token_SK[s, k] = draft_K[k]


@njit
def _push(text, num_prompt, at, symbol_W, count, copy_from, copy_place):
    """Take the token at place `at` of the text in, which comes after those of `count` symbols; copy_from: where the
    copy began that it may go on with, and copy_place where that stands in the prompt. Their new values."""
    token = text[at]
    if copy_from >= 0:
        place = copy_place + at - copy_from
        if place < num_prompt and text[place] == token:
            return count, copy_from, copy_place
        place = _find(text, num_prompt, copy_from, at + 1)
        if place:
            return count, copy_from, place
    elif count and symbol_W[count - 1] >= 0:
        place = _find(text, num_prompt, at - 1, at + 1)
        if place:
            symbol_W[count - 1] = COPY
            return count, at - 1, place
    symbol_W[count] = token
    return count + 1, -1, 0


@njit
def _find(text, num_prompt, begin, end):
    """The first place in the prompt, after a source, where text[begin:end] stands, at least two tokens; 0: nowhere."""
    first, second = text[begin], text[begin + 1]
    last = num_prompt - (end - begin)
    for block in range(_SOURCE, last + 1, _BLOCK):
        until, hits = min(block + _BLOCK, last + 1), 0
        for place in range(block, until):
            hits += (text[place] == first) & (text[place + 1] == second)
        if hits:
            for place in range(block, until):
                length = 0
                while length < end - begin and text[place + length] == text[begin + length]:
                    length += 1
                if length == end - begin:
                    return place
    return 0


@njit
def _behind(text, num_prompt, copy_4):
    """The first place in the prompt after this source; 0: nowhere."""
    first, second = copy_4[0], copy_4[1]
    for block in range(0, num_prompt - _SOURCE, _BLOCK):
        until, hits = min(block + _BLOCK, num_prompt - _SOURCE), 0
        for place in range(block, until):
            hits += (text[place] == first) & (text[place + 1] == second)
        if hits:
            for place in range(block, until):
                if text[place] == first and text[place + 1] == second:
                    return place + _SOURCE
    return 0


@njit
def _describe(text, num_prompt, place, length, copy_4):
    """Write down what is known of a copy of so many tokens from there."""
    end = place + length
    copy_4[0], copy_4[1] = text[place - 2], text[place - 1]
    copy_4[2] = text[end] if end < num_prompt else NONE
    copy_4[3] = NONE
    for at in range(place, end):
        if text[at] == copy_4[2]:  # it goes on after it: two tokens say where it ends
            copy_4[3] = text[end + 1] if end + 1 < num_prompt else NONE


@njit
def _context(tail_M, number, num_contexts):
    """The row of the table for copies after so many symbols."""
    mixed, symbol = np.uint64(number), 0
    for m in range(number):
        symbol = NONE if m > 0 and symbol in (BORDER, NONE) else tail_M[m]  # what was before belongs to another output
        mixed = (mixed + np.uint64(symbol)) * GOLDEN
        mixed ^= mixed >> _32
    return np.int64((mixed * GOLDEN) >> (_64 - bits_of(num_contexts)))


@njit
def _remember(known_Q4, copy_4):
    """As the first one; one of the same source is replaced, or else the last one."""
    at = 0
    while at < len(known_Q4) - 1 and (known_Q4[at, 0] != copy_4[0] or known_Q4[at, 1] != copy_4[1]):
        at += 1
    for q in range(at, 0, -1):
        for i in range(4):  # row by row takes a second to compile
            known_Q4[q, i] = known_Q4[q - 1, i]
    for i in range(4):
        known_Q4[0, i] = copy_4[i]


@njit
def _same_copy(text, place, before_M, instance_4, known_TQ4):
    """What is known of copies of the source before that place, after these symbols; else what the instance says."""
    first, second = text[place - 2], text[place - 1]
    if instance_4[0] != first or instance_4[1] != second:
        for number in range(CONTEXT, 0, -1):
            known_Q4 = known_TQ4[_context(before_M, number, len(known_TQ4))]
            for copy_4 in known_Q4:
                if copy_4[0] == first and copy_4[1] == second:
                    return copy_4
    return instance_4


@njit
def _copy_of(text, num_prompt, before_M, instance_4, known_TQ4):
    """Where a copy begins in the prompt that comes after these symbols, and what is known of it; 0: nowhere."""
    place = _behind(text, num_prompt, instance_4)
    if place:
        return place, instance_4
    for number in range(CONTEXT, 0, -1):
        known_Q4 = known_TQ4[_context(before_M, number, len(known_TQ4))]
        for copy_4 in known_Q4:
            place = _behind(text, num_prompt, copy_4)
            if place:
                return place, copy_4
    return 0, instance_4


@njit
def _follow(text, num_prompt, place, copy_4, end, symbol_N, copy_N4, known_TQ4, draft_K):
    """Drafts, and how many: the rest of a copy that goes on at that place of the prompt, none if it is 0; then what
    the symbols from `end` on become with this prompt."""
    tail_M = np.empty(MAX_MATCH, dtype=np.int64)
    count, may_end = 0, True
    while True:
        if place:
            while count < len(draft_K) and place < num_prompt:
                if may_end and _ends(text, num_prompt, place, copy_4):
                    break
                draft_K[count] = text[place]
                count, place, may_end = count + 1, place + 1, True
            if place == num_prompt:
                return count  # where it ends is not known
        if count == len(draft_K) or symbol_N[end] == BORDER:
            return count
        place = 0
        if symbol_N[end] == COPY:
            write_tail(symbol_N, 0, end, tail_M)
            place, copy_4 = _copy_of(text, num_prompt, tail_M, copy_N4[end], known_TQ4)
            if not place:
                return count
            may_end = False  # not before its first token
        else:
            draft_K[count] = symbol_N[end]
            count += 1
        end += 1


@njit
def _ends(text, num_prompt, place, copy_4):
    """Whether a copy ends before that place of the prompt."""
    if text[place] != copy_4[2]:
        return False
    return copy_4[3] == NONE or (place + 1 < num_prompt and text[place + 1] == copy_4[3])
