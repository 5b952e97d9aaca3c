"""Compares rows of a sample with a reference model while the engine goes on with others.

    take: finished rows of the sample are held back -> advance: a piece of one row is computed by both models, between
    two steps of the engine -> the row leaves with its figures

A row's text is read by both models, which need not generate it for that: the reference's choice at each token and the
distance of the distributions follow from the same prompt and the same tokens before. Where all choices of a greedy row
are the tokens that are there, the reference's own completion is the same text. Only where a right answer is known, or
tokens are sampled or held to something (`takes_likeliest`), does the reference generate a completion.

Of a row with several samples it is the first one that is compared.

No row's answer depends on this: whatever fails here leaves rows without figures.
"""

import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from pipeline.engine.engine import Engine
from pipeline.engine.forward.divergence import Divergence
from pipeline.engine.params import Completion, Request, RowQuality
from pipeline.engine.quality.reference_config import takes_likeliest
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.machine.out_of_memory import is_out_of_memory

LOGIT_BYTES = 64 << 20  # of the logits of one piece, of one model
MAX_PIECE_TOKENS = 256
TOO_LONG, OUT_OF_MEMORY, NOT_FINITE, FAILED = "too_long", "out_of_memory", "not_finite", "reference_failed"


@dataclass(frozen=True)
class _Row:
    request: Request
    served: Completion


class QualityWatch:
    """Of one engine and one reference, both in this process. Not thread-safe."""

    def __init__(self, served: Engine, reference: Engine) -> None:
        self._served, self._reference = served, reference
        self._most_tokens = min(served.max_read_tokens, reference.max_read_tokens)
        piece = LOGIT_BYTES // (4 * served.runner.vocab_size)
        self._piece_tokens = max(1, min(piece, MAX_PIECE_TOKENS))
        self._asked: dict[object, Request] = {}
        self._rows: deque[_Row] = deque()  # to be read
        self._reading: tuple[_Row, Generator[None, None, RowQuality]] | None = None
        self._generating: dict[object, tuple[_Row, RowQuality]] = {}
        self._has_failed = False

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._reading or self._generating)

    def expect(self, request: Request) -> None:
        """Told of each request that the engine gets."""
        if request.quality is not None:
            self._asked[request.row_id] = request

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Those that nothing is asked about; the others come from `advance`."""
        passed = []
        for completion in completions:
            request = self._asked.pop(completion.row_id, None)
            if request is None or completion.error is not None:
                passed.append(completion)
            else:
                self._rows.append(_Row(request, completion))
        return passed

    def advance(self) -> list[Completion]:
        """Compute the next piece of a row, and a step of what the reference generates. The rows that are done."""
        try:
            return self._advance()
        except Exception as error:  # whatever it is, the rows are delivered
            if is_out_of_memory(error):
                release_cached_memory()
                return self._give_up(OUT_OF_MEMORY)
            print(f"the quality watch ends:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            self._has_failed = True
            return self._give_up(FAILED)

    def _advance(self) -> list[Completion]:
        done = []
        if self._reading is None and self._rows:
            row = self._rows.popleft()
            why_not = FAILED if self._has_failed else TOO_LONG if _length(row) > self._most_tokens else ""
            if why_not:
                return [_with(row, RowQuality(why_not=why_not))]
            self._reading = row, self._read(row)
        if self._reading is not None:
            row, reading = self._reading
            try:
                next(reading)
            except StopIteration as end:
                self._reading = None
                done += self._read_to_end(row, end.value)
        if self._generating:
            done += [self._generated(own) for own in self._reference.step()]
        return done

    def _read_to_end(self, row: _Row, found: RowQuality) -> list[Completion]:
        request = row.request
        expected = request.quality and request.quality.expected
        if found.why_not or (expected is None and takes_likeliest(request.params)):
            return [_with(row, found)]
        self._generating[request.row_id] = row, found
        self._reference.add(replace(request, params=replace(request.params, logprobs=None, n=1), quality=None))
        return []

    def _generated(self, own: Completion) -> Completion:
        """own: the reference's completion of a row that was read."""
        row, found = self._generating.pop(own.row_id)
        if own.error is not None:
            return _with(row, RowQuality(why_not=own.error))
        expected = row.request.quality and row.request.quality.expected
        found = replace(found, same_text=own.text == row.served.text)
        if expected is not None:
            served, reference = (c.text.strip() == expected.strip() for c in (row.served, own))
            found = replace(found, served_right=served, reference_right=reference)
        return _with(row, found)

    def _read(self, row: _Row) -> Generator[None, None, RowQuality]:
        """Both models read the row, a piece at a time."""
        prompt, generated = row.request.prompt_token_ids, row.served.token_ids
        token_ids, first = [*prompt, *generated], len(prompt) - 1
        likeliest, apart, num_chosen = takes_likeliest(row.request.params), Divergence(), 0
        # Nothing follows the last token.
        ours = self._served.read(token_ids[:-1], self._piece_tokens)
        theirs = self._reference.read(token_ids[:-1], self._piece_tokens)
        with closing(ours), closing(theirs):
            for (piece, logits_RV), (same, reference_RV) in zip(ours, theirs, strict=True):
                assert piece == same
                begin = max(first - piece.start, 0)
                if begin < len(logits_RV):
                    with self._served.place:
                        if not bool(logits_RV.isfinite().all() & reference_RV.isfinite().all()):
                            return RowQuality(why_not=NOT_FINITE)
                        apart.add(logits_RV[begin:], reference_RV[begin:])
                        next_R = torch.tensor(
                            token_ids[piece.start + begin + 1 : piece.stop + 1], device=reference_RV.device
                        )
                        num_chosen += int((reference_RV[begin:].argmax(-1) == next_R).sum())
                yield
        agreed = num_chosen if likeliest else apart.num_same_top
        kl = round(1e9 * float(sum(nats.sum(dtype="float64") for nats in apart.nats)))
        return RowQuality(len(generated), agreed, kl, agreed == len(generated))

    def _give_up(self, why_not: str) -> list[Completion]:
        """Let go of the rows that both models are at."""
        left = [row for row, _ in self._generating.values()]
        for row in left:
            self._reference.abort(row.request.row_id)
        if self._reading is not None:
            row, reading = self._reading
            reading.close()
            left.append(row)
        self._reading, self._generating = None, {}
        return [_with(row, RowQuality(why_not=why_not)) for row in left]


def _length(row: _Row) -> int:
    return len(row.request.prompt_token_ids) + len(row.served.token_ids)


def _with(row: _Row, quality: RowQuality) -> Completion:
    return replace(row.served, quality=quality)
