"""Labels that may follow a prompt as a tree of tokens, so that what they have in common is computed once.

A label's probability is the product of its tokens', each after the prompt and the label's tokens before it. So every
beginning of a label that another token follows, the empty one too, is a place where something is to be told. A text is
computed for each of the longest such beginnings: for labels of one token each that is the prompt alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.params import Completion
from pipeline.engine.reading.readers import LogprobReader
from pipeline.engine.tasks import ChoiceResult, ScoreResult


@dataclass(frozen=True)
class LabelTree:
    """continuations: what follows the prompt in each text. asked: of each text (position after the prompt's last token,
    next token), in order; each such pair is asked of one text alone."""

    labels: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    asked: tuple[tuple[tuple[int, int], ...], ...]

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
            asked.append(tuple(pairs))
        return cls(tuple(labels), continuations, tuple(asked))

    def readers(self, num_prompt: int) -> list[LogprobReader]:
        """One for each text."""
        pairs = [np.array(asked, dtype=np.int64).reshape(-1, 2) for asked in self.asked]
        return [LogprobReader(num_prompt - 1 + pair_P2[:, 0], pair_P2[:, 1], top=0) for pair_P2 in pairs]

    def joined(self, completions: Sequence[Completion]) -> Completion:
        """Of the completions of the texts, in their order. What the prompt took is told of the first, which computed
        it; one that failed makes the request an error."""
        for completion in completions:
            if completion.error is not None:
                return completion
        told: dict[tuple[int, ...], float] = {}  # by a beginning and the token after it
        for continuation, asked, completion in zip(self.continuations, self.asked, completions):
            assert isinstance(completion.result, ScoreResult)
            assert completion.result.tokens is not None
            for (length, token), each in zip(asked, completion.result.tokens):
                told[(*continuation[:length], token)] = each.logprob
        sums = tuple(sum(told[label[: length + 1]] for length in range(len(label))) for label in self.labels)
        last_us = max(completion.last_token_us for completion in completions)
        return replace(completions[0], result=ChoiceResult(sums), first_token_us=last_us, last_token_us=last_us)
