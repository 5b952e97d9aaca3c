"""What outputs copy out of their prompts, and how to find it in another prompt: by what stands before it. No torch.

A summary, an extraction or a filled form says something of its own (the cue, "serviced by") and then what its prompt
says at some place ("Technician: Ann Lee"). The next row's output has the same cue, but other words follow, which no
run of tokens that occurred before foretells. What is the same is what stands before them in the prompt. So of finished
rows it is learnt which two tokens of a prompt stand before what was copied behind which two tokens of its output, or
behind which one; where an output comes to those, its prompt is looked through for the others, and what follows them is
the draft.
"""

from dataclasses import dataclass, field

import numpy as np

MOST_CUES = 1 << 14  # tokens and pairs of tokens of outputs that are remembered, a few hundred bytes each
MOST_SOURCES = 8  # pairs of tokens of prompts that are remembered for each
LEAST_COPIED = 2  # tokens in a row that an output and its prompt have in common for it to be a copy
LEARNT_TOKENS = 2048  # of a prompt that copies are looked for in: its first ones
FIRST_ROWS = 64  # that all are learnt from; it takes a fifth of a millisecond,
ROWS_BETWEEN = 8  # so of later ones only one in so many, to follow a change
TRUSTED = 0.25  # share of its occurrences in outputs behind which a copy began, from which on something is a cue


@dataclass
class _Cue:
    num_seen: int = 0
    num_copied: int = 0
    sources: dict[int, int] = field(default_factory=dict)  # pair before a copy in the prompt -> how often


class Cues:
    """Learnt from one row after the other."""

    def __init__(self, most_cues: int = MOST_CUES) -> None:
        self._most_cues = most_cues
        self._cues: dict[int, _Cue] = {}
        self._num_rows = 0

    @property
    def is_empty(self) -> bool:
        return not self._cues

    def learn(self, tokens: np.ndarray, num_prompt: int) -> None:
        """A row has ended: its prompt and behind it its output."""
        self._num_rows += 1
        if num_prompt < LEAST_COPIED + 2 or (self._num_rows > FIRST_ROWS and self._num_rows % ROWS_BETWEEN):
            return
        prompt, output = tokens[: min(num_prompt, LEARNT_TOKENS)].tolist(), tokens[num_prompt:].tolist()
        pair_P, pair_O = _pairs(tokens[: len(prompt)]).tolist(), _pairs(tokens[num_prompt - 2 :]).tolist()
        places: dict[int, list[int]] = {}
        for place, pair in enumerate(pair_P[2:], start=2):  # something has to stand before it
            places.setdefault(pair, []).append(place)
        copied_until = 0
        for at in range(len(output)):
            cues = [self._of(pair_O[at]), self._of(_single(pair_O[at]))]
            for cue in cues:
                cue.num_seen += 1
            if at < copied_until or at + 2 >= len(pair_O):
                continue
            source, copied = 0, 0
            for place in places.get(pair_O[at + 2], ()):
                length = _common(prompt, place, output, at)
                if length > copied:
                    source, copied = pair_P[place - 2], length
            if copied >= LEAST_COPIED:
                copied_until = at + copied
                for cue in cues:
                    cue.num_copied += 1
                    if source in cue.sources or len(cue.sources) < MOST_SOURCES:
                        cue.sources[source] = cue.sources.get(source, 0) + 1

    def place(self, tokens: np.ndarray, num_prompt: int) -> int:
        """The place in the prompt of what these known tokens, a prompt and some output, may go on with; 0: nowhere."""
        if len(tokens) < 2:
            return 0
        pair = (int(tokens[-2]) << 32) | int(tokens[-1])
        for key in (pair, _single(pair)):
            cue = self._cues.get(key)
            if cue is None or not cue.sources or cue.num_copied < TRUSTED * cue.num_seen:
                continue
            pair_P = _pairs(tokens[:num_prompt])
            for source in sorted(cue.sources, key=cue.sources.__getitem__, reverse=True):
                found = np.flatnonzero(pair_P == source)
                if len(found) and found[0] + 2 < num_prompt:
                    return int(found[0]) + 2
        return 0

    def _of(self, pair: int) -> _Cue:
        cue = self._cues.get(pair)
        if cue is None:
            if len(self._cues) >= self._most_cues:  # the oldest one is forgotten
                del self._cues[next(iter(self._cues))]
            cue = self._cues[pair] = _Cue()
        return cue


def _pairs(tokens: np.ndarray) -> np.ndarray:
    """Each token with the one behind it as one number, int64; one less than tokens."""
    wide = tokens.astype(np.int64)
    return (wide[:-1] << 32) | wide[1:]


def _single(pair: int) -> int:
    """The last token of a pair alone, as a number that no pair has."""
    return ~(pair & 0xFFFFFFFF)


def _common(one: list[int], at_one: int, other: list[int], at_other: int) -> int:
    """How many tokens are the same from there on."""
    length, most = 0, min(len(one) - at_one, len(other) - at_other)
    while length < most and one[at_one + length] == other[at_other + length]:
        length += 1
    return length
