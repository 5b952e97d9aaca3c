"""Whether two contenders computed the same: greedy tokens equal, or apart from a near-tie on."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from pipeline.bench.request_sets import BenchRequest
from pipeline.errors import PipelineError

NextLogits = Callable[[list[int]], torch.Tensor]
"""Token ids -> logits (vocabulary) of the token after them."""

TIE = 1e-4  # in float32, two best logits closer than this may come out either way


@dataclass(frozen=True)
class Agreement:
    """Over some requests. Tokens after a request's first difference follow from it and are not counted as compared."""

    requests: int = 0
    equal_requests: int = 0
    compared_tokens: int = 0
    near_ties: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))

    def to_text(self) -> str:
        told = f"{self.equal_requests} of {self.requests} completions equal, {self.compared_tokens:,} tokens"
        return told + (f", {self.near_ties} apart from a near-tie on" if self.near_ties else "")


def compare(
    requests: Sequence[BenchRequest],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
    next_logits: NextLogits | None = None,
) -> Agreement:
    """Compare completions of the same requests. With `next_logits`, the logits of the token after a list of them, a
    first difference must be a near-tie; without it (16 bit, other weights) differences are only counted.

    Raises PipelineError where lengths are not what was asked (unequal work) or a difference is no near-tie.
    """
    found = Agreement()
    for index, (request, mine, other) in enumerate(zip(requests, ours, theirs, strict=True)):
        first = next((at for at, (a, b) in enumerate(zip(mine, other)) if a != b), None)
        wanted = {request.max_tokens} if request.ignore_eos else range(1, request.max_tokens + 1)
        if len(mine) not in wanted or len(other) not in wanted or (first is None and len(mine) != len(other)):
            raise PipelineError(
                f"request {index}: {request.max_tokens} tokens were asked for, this engine gave {len(mine)} and the "
                f"other {len(other)}: unequal work is not compared"
            )
        if first is None:
            found += Agreement(1, 1, len(mine))
            continue
        if next_logits is not None:
            logits = next_logits(request.prompt_token_ids + mine[:first])
            gap = float(logits[other[first]] - logits[mine[first]])
            if abs(gap) >= TIE:
                raise PipelineError(
                    f"request {index}: token {first} is {mine[first]} here and {other[first]} there, whose logit is "
                    f"{gap:.2e} higher: the two do not compute the same model, so their times are not compared"
                )
        found += Agreement(1, 0, first + 1, int(next_logits is not None))
    return found
