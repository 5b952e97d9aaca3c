"""Labels that may follow a prompt as a tree of tokens, and who reads their probabilities off one sequence.

A label's probability is the product of its tokens', each after the prompt and the label's tokens before it. So every
beginning of a label that another token follows, the empty one too, is a place where something is to be told. Each of
the longest such beginnings is computed after the prompt in its turn: the sequence goes back to where it differs from
the one before, and what was computed from there on is written over, as a rejected draft's is. For labels of one token
each the prompt alone is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeline.engine.reading.readers import LogprobReader
from pipeline.engine.tasks import ChoiceResult


@dataclass(frozen=True)
class LabelTree:
    """continuations: what follows the prompt, in each turn. kept: how many of their first tokens stand there from the
    turn before. asked: of each turn (tokens of the continuation before it, next token), in order; each such pair is
    asked in one turn alone."""

    labels: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    asked: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, labels: Sequence[tuple[int, ...]]) -> "LabelTree":
        following: dict[tuple[int, ...], set[int]] = {}  # by beginning
        for label in labels:
            for length in range(len(label)):
                following.setdefault(label[:length], set()).add(label[length])
        passed = {beginning[:length] for beginning in following for length in range(len(beginning))}
        continuations = tuple(sorted(beginning for beginning in following if beginning not in passed))
        asked = []
        for continuation in continuations:
            beginnings = (continuation[:length] for length in range(len(continuation) + 1))
            pairs = [(len(b), token) for b in beginnings for token in sorted(following.pop(b, ()))]
            asked.append(np.array(pairs, dtype=np.int64))
        kept = (0, *(_num_common(one, after) for one, after in pairwise(continuations)))
        return cls(tuple(labels), continuations, kept, tuple(asked))

    @property
    def num_computed(self) -> int:
        """Tokens that are computed after the prompt, in all turns."""
        return sum(map(len, self.continuations)) - sum(self.kept)

    @property
    def num_after(self) -> int:
        """Tokens of the longest continuation."""
        return max(map(len, self.continuations))


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """First tokens that are the same; neither is the beginning of the other."""
    return next(place for place, (a, b) in enumerate(zip(one, other)) if a != b)


class LabelReader(LogprobReader):
    """The log-probabilities of all labels of a tree after a prompt of `num_prompt` tokens."""

    def __init__(self, tree: LabelTree, num_prompt: int) -> None:
        self._tree, self._num_prompt, self._turn = tree, num_prompt, 0
        self._told: dict[tuple[int, ...], float] = {}  # by a beginning and the token after it
        self.num_after = tree.num_after
        self._ask()

    def _ask(self) -> None:
        asked_P2 = self._tree.asked[self._turn]
        super().__init__(self._num_prompt - 1 + asked_P2[:, 0], asked_P2[:, 1])

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        continuation = self._tree.continuations[self._turn]
        for (length, token), logprob in zip(self._tree.asked[self._turn].tolist(), self.logprob_P.tolist()):
            self._told[(*continuation[:length], token)] = logprob
        self._turn += 1
        if self._turn == len(self._tree.continuations):
            return None
        self._ask()
        kept = self._tree.kept[self._turn]
        return self._num_prompt + kept, self._tree.continuations[self._turn][kept:]

    def result(self) -> ChoiceResult:
        """Once there is no next text."""
        told = self._told
        return ChoiceResult(
            tuple(sum(told[label[:length]] for length in range(1, len(label) + 1)) for label in self._tree.labels)
        )
