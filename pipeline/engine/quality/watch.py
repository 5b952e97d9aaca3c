"""Compares rows of a sample with a reference model while the engine goes on with others.

    take: finished rows of the sample are held back -> advance: both models read the row, as requests of their engines,
    and a piece of what they read is compared between two steps -> the row leaves with its figures

A row's text is read by both models, which need not generate it for that: the reference's choice at each token and the
distance of the distributions follow from the same prompt and the same tokens before. Where all choices of a greedy row
are the tokens that are there, the reference's own completion is the same text. Only where a right answer is known, or
tokens are sampled or held to something (`takes_likeliest`), does the reference generate a completion.

Of a row with several samples it is the first one that is compared.

The reference is loaded before the served engine, whose KV cache takes what is left; its own is small, `MAX_ROW_TOKENS`
tokens or, where it also generates, twice as many.

No row's answer depends on this: whatever fails here leaves rows without figures.
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
from pipeline.engine.engine import Engine
from pipeline.engine.params import Completion, Request, RowQuality, SamplingParams
from pipeline.engine.quality.divergence import Divergence, logits_in_pieces
from pipeline.engine.quality.reference_config import MAX_ROW_TOKENS, ReferenceConfig, takes_likeliest
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.startup.resolve import resolve
from pipeline.engine.tasks import HiddenStates, StatesResult
from pipeline.errors import RowError
from pipeline.machine.out_of_memory import is_out_of_memory
from pipeline.model.config import read_config

LOGIT_BYTES = 64 << 20  # of the logits of one piece, of one model
MAX_PIECE_TOKENS = 256
TOO_LONG, OUT_OF_MEMORY, NOT_FINITE, FAILED = "too_long", "out_of_memory", "not_finite", "reference_failed"


def open_reference(config: ReferenceConfig, factory: Callable[..., Any], say: Callable[[str], None]) -> Engine:
    """Load the reference, with a KV cache of the fixed size. Raises as `Engine` does."""
    given = config.engine
    model = read_config(locate_model(given.model))
    length = min(given.max_model_len or MAX_ROW_TOKENS, MAX_ROW_TOKENS, model.max_position)
    resolved = resolve(replace(given, max_model_len=length), model)
    num_blocks = (2 if config.generates else 1) * -(-length // resolved.block_size)
    sized = replace(
        given,
        max_model_len=length,
        kv_cache_memory_bytes=num_blocks * resolved.block_size * model.kv_bytes_per_token(resolved.kv_dtype),
    )
    say("reading the reference model's weights")
    engine = factory(sized, lambda what: say(f"the reference model: {what}"))
    engine.warm_up()
    return engine


@dataclass(frozen=True, eq=False)
class _Row:
    """A row that was served. Both engines read it as a request with the row itself as its id."""

    request: Request
    served: Completion
    read_by: dict[Engine, Completion] = field(default_factory=dict)


class QualityWatch:
    """Of one engine and one reference, both in this process. Not thread-safe."""

    def __init__(self, served: Engine, reference: Engine) -> None:
        self._served, self._reference = served, reference
        self._most_tokens = min(served.max_model_len, reference.max_model_len)
        piece = LOGIT_BYTES // (4 * served.runner.vocab_size)
        self._piece_tokens = max(1, min(piece, MAX_PIECE_TOKENS))
        self._asked: dict[object, Request] = {}
        self._rows: deque[_Row] = deque()  # to be read
        self._reading: _Row | None = None
        self._comparing: Generator[None, None, RowQuality] | None = None  # the row that both have read
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
            if isinstance(completion.row_id, _Row):
                completion.row_id.read_by[self._served] = completion
                continue
            request = self._asked.pop(completion.row_id, None)
            if request is None or completion.error is not None:
                passed.append(completion)
            else:
                self._rows.append(_Row(request, completion))
        return passed

    def advance(self) -> list[Completion]:
        """Have a row read, compute a step of the reference, compare the next piece. The rows that are done."""
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
        # Nothing follows the last token.
        token_ids = [*row.request.prompt_token_ids, *row.served.token_ids[:-1]]
        task = HiddenStates(len(row.request.prompt_token_ids) - 1)
        for engine in (self._served, self._reference):
            engine.add(Request(row, token_ids, SamplingParams(), task=task))

    def _compared(self, row: _Row, found: RowQuality) -> list[Completion]:
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

    def _compare(self, row: _Row) -> Generator[None, None, RowQuality]:
        """Compare what both models read, a piece at a time."""
        states, likeliest = [], takes_likeliest(row.request.params)
        generated = np.array(row.served.token_ids, dtype=np.int64)
        for engine in (self._served, self._reference):
            read = row.read_by[engine]
            if read.error is not None:
                return RowQuality(why_not=NOT_FINITE if read.error == RowError.NON_FINITE_LOGITS else read.error)
            assert isinstance(read.result, StatesResult)
            states_NH = read.result.states_NH[: len(generated)]
            states.append(logits_in_pieces(engine.runner, states_NH, self._piece_tokens))
        apart, num_chosen = Divergence(), 0
        while True:
            with self._served.place:  # the reference is in the same one
                ours, theirs = (next(pieces, None) for pieces in states)
                if ours is None or theirs is None:
                    break
                (first, logits_RV), (_, reference_RV) = ours, theirs
                if not bool(logits_RV.isfinite().all() & reference_RV.isfinite().all()):
                    return RowQuality(why_not=NOT_FINITE)
                apart.add(logits_RV, reference_RV)
                next_R = torch.from_numpy(generated[first : first + len(logits_RV)]).to(reference_RV.device)
                num_chosen += int((reference_RV.argmax(-1) == next_R).sum())
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
            left.append(self._reading)
            for engine in (self._served, self._reference):
                engine.abort(self._reading)
        self._reading, self._comparing, self._generating = None, None, {}
        return [_with(row, RowQuality(why_not=why_not)) for row in left]


def _length(row: _Row) -> int:
    return len(row.request.prompt_token_ids) + len(row.served.token_ids)


def _with(row: _Row, quality: RowQuality) -> Completion:
    return replace(row.served, quality=quality)
