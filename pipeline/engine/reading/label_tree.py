"""Labels that may follow a prompt as a tree of tokens, and the reader of their probabilities in one sequence.

A label's probability is the product of its tokens' probabilities, each given the prompt and the label's tokens before
it. So a log-probability is needed after every prefix of a label, including the empty one. The longest of these prefixes
are computed after the prompt in turns: the sequence is rolled back to the common prefix with the previous turn, and the
tokens after it are overwritten, like a rejected draft. For labels of one token each, only the prompt is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeline.engine.reading.readers import LogprobReader
from pipeline.engine.tasks import ChoiceResult


@dataclass(frozen=True)
class LabelTree:
    """continuations: the tokens after the prompt in each turn. kept: how many of their first tokens remain from the
    previous turn. requested: for each turn the pairs (number of continuation tokens before it, next token) in order;
    each pair is in one turn only."""

    labels: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    requested: tuple[np.ndarray, ...]

    @classmethod
    def from_labels(cls, labels: Sequence[tuple[int, ...]]) -> "LabelTree":
        following: dict[tuple[int, ...], set[int]] = {}  # by prefix
        for label in labels:
            for length in range(len(label)):
                following.setdefault(label[:length], set()).add(label[length])
        inner = {prefix[:length] for prefix in following for length in range(len(prefix))}
        continuations = tuple(sorted(prefix for prefix in following if prefix not in inner))
        requested = []
        for continuation in continuations:
            prefixes = (continuation[:length] for length in range(len(continuation) + 1))
            pairs = [(len(b), token) for b in prefixes for token in sorted(following.pop(b, ()))]
            requested.append(np.array(pairs, dtype=np.int64))
        kept = (0, *(_num_common(one, after) for one, after in pairwise(continuations)))
        return cls(tuple(labels), continuations, kept, tuple(requested))

    @property
    def num_computed(self) -> int:
        """Number of tokens computed after the prompt in all turns."""
        return sum(map(len, self.continuations)) - sum(self.kept)

    @property
    def num_after(self) -> int:
        """Number of tokens of the longest continuation."""
        return max(map(len, self.continuations))


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix; neither is a prefix of the other."""
    return next(index for index, (a, b) in enumerate(zip(one, other)) if a != b)


class LabelReader(LogprobReader):
    """Reader of the log-probabilities of all labels of a tree after a prompt of `num_prompt` tokens."""

    def __init__(self, tree: LabelTree, num_prompt: int) -> None:
        self._tree, self._num_prompt, self._turn = tree, num_prompt, 0
        self._logprobs: dict[tuple[int, ...], float] = {}  # by prefix and next token
        self.num_after = tree.num_after
        self._start_turn()

    def _start_turn(self) -> None:
        pair_P2 = self._tree.requested[self._turn]
        super().__init__(self._num_prompt - 1 + pair_P2[:, 0], pair_P2[:, 1])

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        continuation = self._tree.continuations[self._turn]
        for (length, token), logprob in zip(self._tree.requested[self._turn].tolist(), self.logprob_P.tolist()):
            self._logprobs[(*continuation[:length], token)] = logprob
        self._turn += 1
        if self._turn == len(self._tree.continuations):
            return None
        self._start_turn()
        kept = self._tree.kept[self._turn]
        return self._num_prompt + kept, self._tree.continuations[self._turn][kept:]

    def result(self) -> ChoiceResult:
        """Return the result. Valid once there is no next text."""
        logprobs = self._logprobs
        return ChoiceResult(
            tuple(sum(logprobs[label[:length]] for length in range(1, len(label) + 1)) for label in self._tree.labels)
        )
