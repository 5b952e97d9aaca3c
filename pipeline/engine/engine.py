"""The engine: requests in, completions out, one unified step at a time.

    add -> Scheduler (waiting, running) -> steps (step/loop.py) -> completions

`Engine` owns one model on one device. It knows nothing of Parquet, jobs or Ray. Threads that use one take turns, step
by step; several engines may live in one process.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np
import torch

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.final_check import checked, is_checked
from pipeline.engine.forward.runner import Place, Runner
from pipeline.engine.grammar.validity import import_jsonschema
from pipeline.engine.params import Completion, EngineConfig, Request, SamplingParams
from pipeline.engine.reading.sequences import prompt_reader, sequence_of, why_refused
from pipeline.engine.reasoning.tracking import RequestReasoning
from pipeline.engine.samples import Group, sample_seed
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Call, Sequence, SlotTable, given_ids, token_array
from pipeline.engine.startup.build import build
from pipeline.engine.startup.speculation import make_drafting
from pipeline.engine.stats import EngineStats
from pipeline.engine.step.completing import Completing
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.step.loop import StepLoop
from pipeline.engine.step.out_of_memory import MemoryRecovery
from pipeline.engine.step.overlapped import OverlappedLoop
from pipeline.engine.tasks import Choice, Classify, Embed, Pooling, Score, Task
from pipeline.errors import ConfigError, RowError
from pipeline.tokenization.detokenizer import StopChecker
from pipeline.tokenization.labels import encode_labels
from pipeline.tokenization.tokenizer import Tokenizer

Text = str | list[int]
"""A text, or the ids of its tokens."""


class Engine:
    """`Engine(EngineConfig(model="path")).generate(["prompt", ...], SamplingParams(max_tokens=64))`."""

    def __init__(self, config: EngineConfig, say: Callable[[str], None] | None = None) -> None:
        """Load the model. `say` is told what takes long while it does, here and in `warm_up`.

        Raises ModelError for the checkpoint, ConfigError for options it cannot be run with.
        """
        if not isinstance(config, EngineConfig):
            raise ConfigError(
                f"Engine({config!r:.80}): expected an EngineConfig, as in Engine(EngineConfig(model=...))"
            )
        self._say = say or (lambda text: None)
        built = build(config, self._say)
        resolved = built.resolved
        self._assemble(
            built.runner,
            built.tokenizer,
            built.place,
            num_blocks=built.num_blocks,
            block_size=resolved.block_size,
            max_model_len=built.max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            seed=config.seed,
        )
        with self.place:
            self.draft_as(
                make_drafting(resolved, self.scheduler, built.draft_runner, self.runner.vocab_size, self._say)
            )
        self.resolved: dict[str, str | int] = built.about

    @classmethod
    def from_parts(cls, runner: Runner, tokenizer: Tokenizer, **sizes: Any) -> "Engine":
        """An engine around a runner that is built already. sizes: see `_assemble`."""
        engine = cls.__new__(cls)
        engine.resolved = {}
        engine._say = lambda text: None
        engine._assemble(runner, tokenizer, Place(None, torch.device("cpu")), **sizes)
        return engine

    def _assemble(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        place: Place,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        self._turn = threading.RLock()  # held by the thread that adds, steps or aborts
        self.place = place  # for who computes with `runner` apart from steps
        self.tokenizer, self.seed, self.max_model_len = tokenizer, seed, max_model_len
        self.stats = EngineStats()
        self.pool = BlockPool(num_blocks, block_size)
        self.table = SlotTable(max_num_seqs, max_model_len, block_size)
        self.scheduler = Scheduler(self.table, self.pool, self.stats, max_num_batched_tokens, enable_prefix_caching)
        self._masks = GrammarMasks(tokenizer, runner.vocab_size, self.table, self.stats, place.num_threads)
        self._completing = Completing(self.scheduler, tokenizer, self._masks, runner.vocab_size, self._clean)
        self._reasoning = RequestReasoning(tokenizer)
        self._make_loop(runner, None)
        self._added = Call()  # of requests that are given one by one
        self._abandoned: list[Call] = []  # whose requests are still to be aborted
        self._is_stepping = False
        self._order = 0
        self._closed = False

    # -- one request at a time

    def add(self, request: Request) -> None:
        """Queue a request. Its completion comes from a later `step`, as an error when it cannot be served. The caller
        makes its final check (`pipeline.engine.final_check.checked`). Without a seed it takes the engine's and the
        number of requests that were added before. Raises ConfigError where the tokenizer lacks the markers of
        `reasoning`."""
        with self._turn:
            self._add(request, self._added)

    def _add(self, request: Request, call: Call) -> None:
        self._check_open()
        params, no_reasoning = request.params, None
        if params.reasoning is not None:  # raises before anything is counted
            no_reasoning = self._reasoning.why_refused(
                params.reasoning, params.thinking_token_budget is not None, params.structured_outputs is not None
            )
        seed = params.seed if params.seed is not None else self.seed + call.num_given
        refused = None
        if request.task is not None or not self.runner.has_vocabulary_head:
            refused = why_refused(request, self.runner)
        if refused is None and no_reasoning is not None and request.task is None:
            refused = RowError.INVALID_SAMPLING, no_reasoning
        sequences = [] if refused is not None else self._sequences(request, seed, call)  # raises for what are no ids
        call.num_given += 1
        call.num_open += 1
        if refused is not None:
            nothing = np.zeros(len(request.prompt_token_ids), dtype=np.int32)
            return Sequence(request, nothing, self._order, call=call).fail(*refused)
        for sequence in sequences:
            self._queue(sequence)

    def _sequences(self, request: Request, seed: int, call: Call) -> list[Sequence]:
        """What a request becomes: one sequence, or with `n` so many, which share the blocks of its prompt."""
        first, n, queued_us = self._order, request.params.n, time.monotonic_ns() // 1000
        if request.task is not None:
            self._order += 1
            return [sequence_of(request, first, call, queued_us, self.runner)]
        token_ids = token_array(request.prompt_token_ids)
        self._order += n
        if n == 1:
            return [Sequence(request, token_ids, first, seed, call, queued_us=queued_us)]
        group = Group(n)
        return [
            Sequence(
                request,
                token_ids,
                first + place,
                sample_seed(seed, place),
                call=call,
                group=group,
                place=place,
                queued_us=queued_us,
            )
            for place in range(n)
        ]

    def _queue(self, sequence: Sequence) -> None:
        params, generates = sequence.request.params, sequence.generates
        if generates and params.stop:
            sequence.stop_checker = StopChecker(self.tokenizer, params.stop, params.min_tokens)
        if generates and params.min_tokens > 0:
            eos = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
            ending = sorted(i for i in eos.union(params.stop_token_ids) if i < self.runner.vocab_size)
            sequence.ending_ids = np.array(ending, dtype=np.int64)
        if generates and params.reasoning is not None:
            sequence.reasoning = self._reasoning.after(
                sequence.token_ids,
                params.reasoning,
                params.thinking_token_budget,
                params.structured_outputs is not None,
            )
        outside = (sequence.token_ids < 0) | (sequence.token_ids >= self.runner.vocab_size)
        if outside.any():
            sequence.fail(
                RowError.TOKEN_OUT_OF_VOCABULARY,
                f"the prompt holds token {sequence.request.prompt_token_ids[outside.argmax()]}; the model has "
                f"{self.runner.vocab_size} (does the tokenizer belong to it?)",
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
        self.scheduler.add(sequence)

    def abort(self, row_id: object) -> bool:
        """Forget the requests with this id wherever they are; no completion will come. False when there is none here
        (any more): what was rejected, or ends with the token that is being computed for it, has ended, and its
        completion comes."""
        return self._abort(lambda sequence: sequence.request.row_id == row_id)

    def _abort(self, is_meant: Callable[[Sequence], bool]) -> bool:
        with self._turn, self.place:
            gone = self._recovery.abort(is_meant)
            for call in {id(sequence.group or sequence): sequence.call for sequence in gone}.values():  # a request once
                call.num_open -= 1
        return bool(gone)

    @property
    def runner(self) -> Runner:
        """Who computes the steps."""
        return self.loop.runner

    @runner.setter
    def runner(self, runner: Runner) -> None:
        assert not len(self.scheduler.running), "steps of the one before may be in flight"
        self._make_loop(runner, self.drafting)

    def _make_loop(self, runner: Runner, drafting: Drafting | None) -> None:
        kind = OverlappedLoop if runner.is_asynchronous else StepLoop
        self.loop: StepLoop = kind(self.scheduler, runner, self._completing, self._masks, drafting)
        is_captured = runner.is_asynchronous and runner.has_graphs
        self.scheduler.pacing = AdmissionPacing() if is_captured else None
        self._recovery = MemoryRecovery(self.loop)

    def _clean(self, blocks: list[int]) -> None:
        self.runner.zero_blocks(blocks)

    @property
    def drafting(self) -> Drafting | None:
        """Who drafts for this engine, and when; None: nobody."""
        return self.loop.drafting

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended, those of streams too, and completions that the next `step` returns."""
        return self._num_inside + len(self._added.ended)

    @property
    def _num_inside(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running) + self._recovery.num_suspects

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    def step(self) -> list[Completion]:
        """Compute one step, and return the completions of added requests that came since the last call.

        A step that does not fit the memory is undone, and smaller ones follow. Raises EnvironmentFailed when not even
        single tokens of several sequences fit.
        """
        with self._turn:
            self._step()
            return self._added.take()

    def _step(self) -> None:
        self._check_open()
        self._is_stepping = True
        try:
            with self.place:
                self._recovery.step()
        finally:
            self._is_stepping = False
            self._abort_abandoned()

    # -- many requests

    def generate(
        self, prompts: Text | Iterable[Text], params: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete `prompts` (strings or lists of token ids) and return the completions in their order.

        Other requests of the engine go on meanwhile, and keep their completions; when the call is interrupted, its own
        end. Rows that cannot be served come back as completions with an error. `params` is one SamplingParams for all
        or one for each. Raises ConfigError when the counts differ, and for what is no prompt or no SamplingParams.
        """
        ids = self._encoded(prompts)
        if isinstance(params, Iterable) and not isinstance(params, Mapping):
            each: list[Any] = list(params)
        else:
            each = [params or SamplingParams()] * len(ids)
        if len(each) != len(ids):
            raise ConfigError(
                f"{len(ids)} prompts with {len(each)} sampling params: expected one for all or one for each"
            )
        for own in each:
            if not isinstance(own, SamplingParams):
                raise ConfigError(f"params: expected SamplingParams, one for all or one for each, found {own!r:.80}")
        return self._completed([Request(row, prompt, own) for row, (prompt, own) in enumerate(zip(ids, each))])

    def _encoded(self, texts: Text | Iterable[Text]) -> list[list[int]]:
        are_many = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | bytearray)
        many: list[Any] = list(texts) if are_many else [texts]
        if are_many and many and isinstance(many[0], Integral):  # the ids of one text
            many = [many]
        return [self.tokenizer.encode(text) if isinstance(text, str) else given_ids(text) for text in many]

    def _completed(self, requests: Items[Request]) -> list[Completion]:
        done = {completion.row_id: completion for completion in self.stream(requests)}
        return [done[index] for index in range(len(requests))]

    def stream(self, requests: Iterable[Request]) -> Generator[Completion, None, None]:
        """Yield the completions of `requests` as they finish, pulling requests just fast enough to keep the batch full.

        Others' completions never come here: those of added requests come from `step`, and each stream has its own,
        though any step computes for all. A stream that is closed, given up or interrupted aborts its requests.
        """
        source, call, exhausted = iter(requests), Call(checked), False
        ahead = 2 * self.table.num_slots
        try:
            while True:
                taken: list[Request] = []
                if not exhausted and call.num_open < ahead:
                    wanted = ahead - call.num_open
                    taken = list(islice(source, wanted))
                    exhausted = len(taken) < wanted
                with self._turn:
                    for request in taken:
                        self._add(request, call)
                    if not call.num_open and not call.ended:
                        return
                    if not call.ended:  # in others' steps
                        self._step()
                    ended = call.take()
                yield from ended
        finally:
            with self._turn:
                self._abandoned.append(call)
                self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        """Not in the middle of a step: there the garbage collector may end a stream that nobody holds any more."""
        calls = list(self._abandoned)
        if calls and not self._is_stepping:
            if any(call.num_open for call in calls):
                self._abort(lambda sequence: sequence.call in calls)
            del self._abandoned[: len(calls)]  # not before: a second Ctrl-C leaves them to the next step

    # -- known texts: results in their order; rows that cannot be served come back as completions with an error

    def score(
        self, prompts: Text | Iterable[Text], completions: Items[str] | None = None, top: int | None = None
    ) -> list[Completion]:
        """How likely each completion is after its prompt; without completions, how likely each text is from its second
        token on. `result` of each is a `ScoreResult`. top: see `Score`. Raises ConfigError when the counts differ."""
        ids = self._encoded(prompts)
        if completions is None:
            return self._completed_tasks(ids, [Score(1, top)] * len(ids))
        _check_several("completions", completions)
        if len(completions) != len(ids):
            raise ConfigError(f"{len(ids)} prompts with {len(completions)} completions: expected one for each")
        texts = [own + self.tokenizer.continuation(own, text) for own, text in zip(ids, completions)]
        return self._completed_tasks(texts, [Score(max(len(own), 1), top) for own in ids])

    def choose(self, prompts: Text | Iterable[Text], labels: Items[str]) -> list[Completion]:
        """Which of the labels follows each prompt, by one pass over it. `result` of each is a `ChoiceResult`. Raises
        ConfigError for labels that cannot be told apart."""
        _check_several("labels", labels)
        ids = self._encoded(prompts)
        return self._completed_tasks(ids, [Choice(tuple(encode_labels(self.tokenizer, own, labels))) for own in ids])

    def embed(
        self,
        texts: Text | Iterable[Text],
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Completion]:
        """Each text as a vector (see `Embed`). `result` of each is a `VectorResult`."""
        ids = self._encoded(texts)
        return self._completed_tasks(ids, [Embed(pooling, normalize, dimensions)] * len(ids))

    def classify(self, texts: Text | Iterable[Text]) -> list[Completion]:
        """What the model's classification head makes of each text (see `Classify`)."""
        ids = self._encoded(texts)
        return self._completed_tasks(ids, [Classify()] * len(ids))

    def _completed_tasks(self, ids: Items[list[int]], tasks: Items[Task]) -> list[Completion]:
        params = SamplingParams()
        return self._completed(
            [Request(row, own, params, task=task) for row, (own, task) in enumerate(zip(ids, tasks))]
        )

    # -- upkeep

    def paused(self, ns: int) -> None:
        """The caller did something else for so long since the last step: no step took that time."""
        if self.drafting is not None:
            self.drafting.policy.paused(ns)

    def warm_up(self) -> None:
        """Run one short request without drafts, so that the first real one does not pay for lazy initialisation.

        Raises ConfigError when requests are waiting or running: what they would teach the engine is dropped.
        """
        self._check_open()
        if self._num_inside:
            raise ConfigError(f"warm_up: {self._num_inside} sequences are waiting or running; warm up before them")
        self._say("warming up (compiling kernels, the first time on a machine)")
        counted, drafting = vars(self.stats).copy(), self.drafting
        self.draft_as(None)
        prompt = [min(self.runner.vocab_size - 1, 1)] * min(self.pool.block_size, self.max_model_len - 2)
        try:
            list(self.stream([Request("warm-up", prompt, SamplingParams(max_tokens=2, ignore_eos=True))]))
        finally:
            self.forget()
            vars(self.stats).update(counted)
            self.draft_as(drafting)

    def forget(self) -> None:
        """Drop the prefixes that are kept for later requests, and what finished ones told of lengths. Nothing may be
        running."""
        self.pool.forget(range(self.pool.num_blocks))
        self.scheduler.admission.forget_lengths()

    def draft_as(self, drafting: Drafting | None) -> None:
        """From now on compute the drafts of `drafting`, made for this engine's scheduler; None: none. Nothing may be
        running."""
        assert not len(self.scheduler.running), "sequences that run already are unknown to the proposers"
        self.loop.drafting = self.table.watcher = drafting

    def counters(self) -> dict[str, int]:
        """`stats` and what the draft policy counted, by name. Sums over engines mean the same."""
        return self.stats.flat() | (self.drafting.policy.counters() if self.drafting is not None else {})

    def close(self) -> None:
        """Drop the weights and the KV cache. The engine answers ConfigError from then on."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self.loop.close()
                self.tokenizer.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the engine is closed")


def _check_several(name: str, texts: object) -> None:
    """A single text would be taken for a list of its characters."""
    if isinstance(texts, str) or not isinstance(texts, Items):
        raise ConfigError(f"{name} = {texts!r:.80}: expected a list of texts")
