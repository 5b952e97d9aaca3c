"""Compares sampled rows with a reference model while the engine continues with others.

    add_finished: finished rows of the sample are held back -> advance: both models read the row, as requests of
    their engines, and a piece of the results is compared between two steps -> the row is returned with its quality

Both models read a row's text, which needs no generation: the reference's choice at each token and the divergence of the
distributions follow from the same prompt and previous tokens. If all choices equal the tokens of a greedy row, the
reference's own completion is identical. The reference generates a completion only if a right answer is known, or if
tokens are sampled or constrained (`is_unconstrained_greedy`).

Of a row with several samples only the first is compared.

The reference is loaded before the served engine, whose KV cache gets the remaining memory; the reference's is small,
`MAX_ROW_TOKENS` tokens, or twice that if it also generates.

No row's answer depends on this: if anything fails here, rows are returned without quality.
"""

import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pipeline.checkpoints.locate import locate_model
from pipeline.engine.completion import Completion, RowQuality
from pipeline.engine.engine import Engine
from pipeline.engine.quality.divergence import Divergence, logits_in_pieces
from pipeline.engine.quality.reference_config import MAX_ROW_TOKENS, ReferenceConfig, is_unconstrained_greedy
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.startup.resolve import resolve
from pipeline.engine.tasks import HiddenStates, StatesResult
from pipeline.errors import RowError
from pipeline.machine.out_of_memory import is_out_of_memory
from pipeline.model.config import read_config

LOGIT_BYTES = 64 << 20  # of the logits of one piece, for one model
MAX_PIECE_TOKENS = 256
TOO_LONG, OUT_OF_MEMORY, NOT_FINITE, FAILED = "too_long", "out_of_memory", "not_finite", "reference_failed"


def open_reference(config: ReferenceConfig, factory: Callable[..., Any], log: Callable[[str], None]) -> Engine:
    """Load the reference, with a KV cache of the fixed size. Raises as `Engine` does."""
    given = config.engine
    model = read_config(locate_model(given.model))
    length = min(given.max_model_len or MAX_ROW_TOKENS, MAX_ROW_TOKENS, model.max_position)
    resolved = resolve(replace(given, max_model_len=length), model)
    num_pages = (2 if config.generates else 1) * resolved.kv_pages.num_pages(length)
    sized = replace(
        given,
        max_model_len=length,
        kv_cache_memory_bytes=num_pages * resolved.kv_pages.page_bytes,
    )
    log("reading the reference model's weights")
    engine = factory(sized, lambda text: log(f"the reference model: {text}"))
    engine.warm_up()
    return engine


@dataclass(frozen=True, eq=False)
class _Row:
    """A served row. Both engines read it as a request whose row id is this object."""

    request: Request
    served: Completion
    read_by: dict[Engine, Completion] = field(default_factory=dict)


class QualityWatch:
    """Quality watch of one engine and one reference, both in this process. Not thread-safe."""

    def __init__(self, served: Engine, reference: Engine) -> None:
        self._served, self._reference = served, reference
        self._max_tokens = min(served.max_model_len, reference.max_model_len)
        piece = LOGIT_BYTES // (4 * served.runner.vocab_size)
        self._piece_tokens = max(1, min(piece, MAX_PIECE_TOKENS))
        self._expected: dict[object, Request] = {}
        self._rows: deque[_Row] = deque()  # still to be read
        self._reading: _Row | None = None
        self._comparing: Generator[None, None, RowQuality] | None = None  # of the row that both have read
        self._generating: dict[object, tuple[_Row, RowQuality]] = {}
        self._has_failed = False

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._reading or self._generating)

    def expect(self, request: Request) -> None:
        """Register a request that the engine gets."""
        if request.quality is not None:
            self._expected[request.row_id] = request

    def add_finished(self, completions: Iterable[Completion]) -> list[Completion]:
        """Return the completions that are not compared; `advance` returns the others."""
        passed = []
        for completion in completions:
            if isinstance(completion.row_id, _Row):
                completion.row_id.read_by[self._served] = completion
                continue
            request = self._expected.pop(completion.row_id, None)
            if request is None or completion.error is not None:
                passed.append(completion)
            else:
                self._rows.append(_Row(request, completion))
        return passed

    def advance(self) -> list[Completion]:
        """Start reading a row, run a step of the reference, compare the next piece. Return the finished rows."""
        try:
            return self._advance()
        except Exception as error:  # the rows are delivered whatever fails
            if is_out_of_memory(error):
                release_cached_memory()
                return self._give_up(OUT_OF_MEMORY)
            print(f"the quality watch failed and stops:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            self._has_failed = True
            return self._give_up(FAILED)

    def _advance(self) -> list[Completion]:
        done = []
        if self._reading is None and self._rows:
            row = self._rows.popleft()
            reason = FAILED if self._has_failed else TOO_LONG if _length(row) > self._max_tokens else ""
            if reason:
                return [_with(row, RowQuality(reason=reason))]
            self._reading = row
            self._read(row)
        if self._reference.has_unfinished:
            for own in self._reference.step():
                if isinstance(own.row_id, _Row):
                    own.row_id.read_by[self._reference] = own
                else:
                    done.append(self._generated(own))
        row = self._reading
        if row is not None and len(row.read_by) == 2:
            if self._comparing is None:
                self._comparing = self._compare(row)
            try:
                next(self._comparing)
            except StopIteration as end:
                self._reading = self._comparing = None
                done += self._compared(row, end.value)
        return done

    def _read(self, row: _Row) -> None:
        # Nothing follows the last token, so it is not read.
        token_ids = [*row.request.prompt_token_ids, *row.served.token_ids[:-1]]
        task = HiddenStates(len(row.request.prompt_token_ids) - 1)
        for engine in (self._served, self._reference):
            engine.add(Request(row, token_ids, SamplingParams(), task=task, adapter=row.request.adapter))

    def _compared(self, row: _Row, quality: RowQuality) -> list[Completion]:
        request = row.request
        expected = request.quality and request.quality.expected
        if quality.reason or (expected is None and is_unconstrained_greedy(request.params)):
            return [_with(row, quality)]
        self._generating[request.row_id] = row, quality
        self._reference.add(replace(request, params=replace(request.params, logprobs=None, n=1), quality=None))
        return []

    def _generated(self, own: Completion) -> Completion:
        """Complete the quality of a row. own: the reference's completion of it."""
        row, quality = self._generating.pop(own.row_id)
        if own.error is not None:
            return _with(row, RowQuality(reason=own.error))
        expected = row.request.quality and row.request.quality.expected
        quality = replace(quality, same_text=own.text == row.served.text)
        if expected is not None:
            served, reference = (c.text.strip() == expected.strip() for c in (row.served, own))
            quality = replace(quality, served_right=served, reference_right=reference)
        return _with(row, quality)

    def _compare(self, row: _Row) -> Generator[None, None, RowQuality]:
        """Compare the results of both models, one piece per step."""
        states, likeliest = [], is_unconstrained_greedy(row.request.params)
        generated = np.array(row.served.token_ids, dtype=np.int64)
        for engine in (self._served, self._reference):
            read = row.read_by[engine]
            if read.error is not None:
                return RowQuality(reason=NOT_FINITE if read.error == RowError.NON_FINITE_LOGITS else read.error)
            assert isinstance(read.result, StatesResult)
            states_NH = read.result.states_NH[: len(generated)]
            states.append(logits_in_pieces(engine.runner, states_NH, self._piece_tokens))
        divergence, num_chosen = Divergence(), 0
        while True:
            with self._served.device_context:  # the reference uses the same device
                ours, theirs = (next(pieces, None) for pieces in states)
                if ours is None or theirs is None:
                    break
                (first, logits_RV), (_, reference_RV) = ours, theirs
                if not bool(logits_RV.isfinite().all() & reference_RV.isfinite().all()):
                    return RowQuality(reason=NOT_FINITE)
                divergence.add(logits_RV, reference_RV)
                next_R = torch.from_numpy(generated[first : first + len(logits_RV)]).to(reference_RV.device)
                num_chosen += int((reference_RV.argmax(-1) == next_R).sum())
            yield
        agreed = num_chosen if likeliest else divergence.num_same_top
        kl = round(1e9 * float(sum(nats.sum(dtype="float64") for nats in divergence.nats)))
        return RowQuality(len(generated), agreed, kl, agreed == len(generated))

    def _give_up(self, reason: str) -> list[Completion]:
        """Return the rows in progress without quality."""
        abandoned = [row for row, _ in self._generating.values()]
        for row in abandoned:
            self._reference.abort(row.request.row_id)
        if self._reading is not None:
            abandoned.append(self._reading)
            for engine in (self._served, self._reference):
                engine.abort(self._reading)
        self._reading, self._comparing, self._generating = None, None, {}
        return [_with(row, RowQuality(reason=reason)) for row in abandoned]


def _length(row: _Row) -> int:
    return len(row.request.prompt_token_ids) + len(row.served.token_ids)


def _with(row: _Row, quality: RowQuality) -> Completion:
    return replace(row.served, quality=quality)
