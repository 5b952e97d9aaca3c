"""Sequences from requests: checks, seeds, samples, and what each sequence needs to end, to reason and to be read."""

import time

import numpy as np

from pipeline.engine.final_check import checked, is_checked
from pipeline.engine.forward.runner import Runner
from pipeline.engine.grammar.validity import import_jsonschema
from pipeline.engine.reading.sequences import prompt_reader, sequence_of, unsupported_reason
from pipeline.engine.reasoning.requests import RequestReasoning
from pipeline.engine.request import Request
from pipeline.engine.samples import ParentRequest, sample_seed
from pipeline.engine.schedule.request_stream import RequestStream
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.token_ids import token_array
from pipeline.errors import ConfigError, RowError
from pipeline.tokenization.detokenizer import StopChecker
from pipeline.tokenization.tokenizer import Tokenizer


class InputProcessor:
    """Adds requests to the scheduler as sequences. Those that cannot be served end with an error."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, masks: GrammarMasks, seed: int) -> None:
        """seed: of requests without one, to which the index of the request in its call is added."""
        self._scheduler, self._tokenizer, self._masks, self._seed = scheduler, tokenizer, masks, seed
        self._reasoning = RequestReasoning(tokenizer)
        self._order = 0

    def add(self, request: Request, call: RequestStream, model: Runner) -> None:
        """Add a request of `call`. Raises ConfigError for token ids of other types, or if the tokenizer lacks the
        markers of `reasoning`."""
        refused = self._refusal(request, model)
        sequences = [] if refused is not None else self._sequences(request, call, model)
        call.num_submitted += 1
        call.num_unfinished += 1
        if refused is not None:
            nothing = np.zeros(len(request.prompt_token_ids), dtype=np.int32)
            return Sequence(request, nothing, self._order, call=call).fail(*refused)
        for sequence in sequences:
            self._queue(sequence, model.vocab_size)

    def _refusal(self, request: Request, model: Runner) -> tuple[RowError, str] | None:
        """Return why the request cannot be served, if that does not depend on its tokens."""
        params, no_reasoning, known = request.params, None, self._scheduler.table.adapter_index
        if params.reasoning is not None:
            no_reasoning = self._reasoning.unsupported_reason(
                params.reasoning, params.thinking_token_budget is not None, params.structured_outputs is not None
            )
        refused = None
        if request.task is not None or not model.has_vocabulary_head:
            refused = unsupported_reason(request, model)
        if refused is None and no_reasoning is not None and request.task is None:
            refused = RowError.INVALID_SAMPLING, no_reasoning
        if refused is None and request.adapter not in (None, *known):
            names = ", ".join(known) or "none"
            refused = RowError.UNKNOWN_ADAPTER, f"adapter {request.adapter!r:.80}: this engine has {names}"
        return refused

    def _sequences(self, request: Request, call: RequestStream, model: Runner) -> list[Sequence]:
        """Return the request's sequences: one, or `n` that share the blocks of its prompt."""
        params, first, queued_us = request.params, self._order, time.monotonic_ns() // 1000
        if request.task is not None:
            self._order += 1
            return [sequence_of(request, first, call, queued_us, model)]
        seed = params.seed if params.seed is not None else self._seed + call.num_submitted
        token_ids = token_array(request.prompt_token_ids)
        self._order += params.n
        if params.n == 1:
            return [Sequence(request, token_ids, first, seed, call, queued_us=queued_us)]
        group = ParentRequest(params.n)
        return [
            Sequence(
                request,
                token_ids,
                first + index,
                sample_seed(seed, index),
                call=call,
                group=group,
                sample_index=index,
                queued_us=queued_us,
            )
            for index in range(params.n)
        ]

    def _queue(self, sequence: Sequence, vocab_size: int) -> None:
        params, generates = sequence.request.params, sequence.generates
        if generates and params.stop:
            sequence.stop_checker = StopChecker(self._tokenizer, params.stop, params.min_tokens)
        if generates and params.min_tokens > 0:
            eos = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
            stop_ids = sorted(i for i in eos.union(params.stop_token_ids) if i < vocab_size)
            sequence.ending_ids = np.array(stop_ids, dtype=np.int64)
        if generates and params.reasoning is not None:
            sequence.reasoning = self._reasoning.after(
                sequence.token_ids,
                params.reasoning,
                params.thinking_token_budget,
                params.structured_outputs is not None,
            )
        outside = (sequence.token_ids < 0) | (sequence.token_ids >= vocab_size)
        if outside.any():
            sequence.fail(
                RowError.TOKEN_OUT_OF_VOCABULARY,
                f"the prompt contains token id {sequence.request.prompt_token_ids[outside.argmax()]}, but the model's "
                f"vocabulary has {vocab_size} tokens; check that the tokenizer belongs to the model",
            )
            return
        if generates and params.structured_outputs is not None:
            try:
                self._masks.check(params.structured_outputs)
                if sequence.call.check is checked and is_checked(params):
                    import_jsonschema()  # raises here, not in the middle of a step
            except ConfigError as error:
                return sequence.fail(RowError.GRAMMAR_ERROR, str(error))
        if generates and params.prompt_logprobs is not None:
            sequence.reader = prompt_reader(sequence)
        self._scheduler.add(sequence)
