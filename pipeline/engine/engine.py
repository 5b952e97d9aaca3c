"""The engine: requests in, completions out, one unified step at a time.

    add -> Scheduler (waiting, running) -> steps (step/loop.py) -> completions

`Engine` owns one model on one device. It does not know about Parquet, jobs or Ray. Threads that share an engine
alternate step by step; several engines may live in one process.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Items
from itertools import islice
from typing import Any

import torch

from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.drafts.spec_decoder import SpecDecoder
from pipeline.engine.final_check import checked
from pipeline.engine.forward.runner import DeviceContext, Runner
from pipeline.engine.input_processor import InputProcessor
from pipeline.engine.prompts import (
    Text,
    choice_requests,
    completion_requests,
    encode_all,
    score_requests,
    task_requests,
)
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.request_stream import RequestStream
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.engine.startup.build import build
from pipeline.engine.startup.speculation import make_spec_decoder
from pipeline.engine.stats import EngineStats
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.step.loop import StepLoop
from pipeline.engine.step.out_of_memory import MemoryRecovery
from pipeline.engine.step.output_processor import OutputProcessor
from pipeline.engine.step.overlapped import OverlappedLoop
from pipeline.engine.tasks import Classify, Embed, Pooling
from pipeline.errors import ConfigError
from pipeline.roofline.kv_pages import KVPages
from pipeline.tokenization.tokenizer import Tokenizer


class Engine:
    """`Engine(EngineConfig(model="path")).generate(["prompt", ...], SamplingParams(max_tokens=64))`."""

    def __init__(self, config: EngineConfig, log: Callable[[str], None] | None = None) -> None:
        """Load the model. `log` receives messages about slow operations, here and in `warm_up`.

        Raises ModelError for a bad checkpoint, ConfigError for options that it cannot run with.
        """
        if not isinstance(config, EngineConfig):
            raise ConfigError(
                f"Engine({config!r:.80}): expected an EngineConfig, as in Engine(EngineConfig(model=...))"
            )
        self._log = log or (lambda text: None)
        built = build(config, self._log)
        resolved = built.resolved
        self._assemble(
            built.runner,
            built.tokenizer,
            built.device_context,
            num_pages=built.num_pages,
            kv_pages=resolved.kv_pages,
            max_model_len=built.max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            has_states=resolved.state_bytes > 0,
            num_snapshots=resolved.num_snapshots,
            seed=config.seed,
            adapters=tuple(config.adapters),
        )
        with self.device_context:
            self.draft_as(
                make_spec_decoder(resolved, self.scheduler, built.draft_runner, self.runner.vocab_size, self._log)
            )
        self.resolved: dict[str, str | int] = built.settings

    @classmethod
    def from_parts(cls, runner: Runner, tokenizer: Tokenizer, **sizes: Any) -> "Engine":
        """Build an engine around an existing runner. sizes: see `_assemble`."""
        engine = cls.__new__(cls)
        engine.resolved = {}
        engine._log = lambda text: None
        engine._assemble(runner, tokenizer, DeviceContext(None, torch.device("cpu")), **sizes)
        return engine

    def _assemble(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        device_context: DeviceContext,
        *,
        num_pages: int,
        kv_pages: KVPages,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        has_states: bool = False,
        num_snapshots: int = 0,
        seed: int = 0,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._turn = threading.RLock()  # held by the thread that adds, steps or aborts
        self.device_context = device_context  # for callers that compute with `runner` outside steps
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.stats = EngineStats()
        self.pool = BlockPool(num_pages, kv_pages.page_size)
        self.table = SlotTable(max_num_seqs, max_model_len, kv_pages, adapters, has_states)
        self.scheduler = Scheduler(
            self.table, self.pool, self.stats, max_num_batched_tokens, enable_prefix_caching, num_snapshots
        )
        self._masks = GrammarMasks(tokenizer, runner.vocab_size, self.table, self.stats, device_context.num_threads)
        self._output_processor = OutputProcessor(self.scheduler, tokenizer, self._masks, runner.vocab_size, self._clean)
        self._input_processor = InputProcessor(self.scheduler, tokenizer, self._masks, seed)
        self._make_loop(runner, None)
        self._added = RequestStream()  # of requests that are passed to `add`
        self._abandoned: list[RequestStream] = []  # whose requests must still be aborted
        self._is_stepping = False
        self._closed = False

    # -- one request at a time

    def add(self, request: Request) -> None:
        """Queue a request. A later `step` returns its completion, which is an error if the request cannot be served.
        The caller runs its final check (`pipeline.engine.final_check.checked`). Without a seed it uses the engine's
        plus the number of requests added before. Raises ConfigError if the tokenizer lacks the markers of
        `reasoning`."""
        with self._turn:
            self._add(request, self._added)

    def _add(self, request: Request, call: RequestStream) -> None:
        self._check_open()
        self._input_processor.add(request, call, self.runner)

    def abort(self, row_id: object) -> bool:
        """Abort all requests with this id without completions. Return False if there are none. A request that was
        rejected, or that ends with the token in flight, counts as ended, and its completion is returned."""
        return self._abort(lambda sequence: sequence.request.row_id == row_id)

    def drain(self) -> None:
        """Abort the added requests that have not begun; those that have continue."""
        with self._turn:
            inside = [*self.scheduler.waiting, *map(self.table.at, self.scheduler.running.tolist())]
            begun = {id(sequence.request) for sequence in inside if sequence.num_cached >= 0}
            self._abort(
                lambda sequence: (
                    sequence.call is self._added and not sequence.is_compared and id(sequence.request) not in begun
                )
            )

    def _abort(self, matches: Callable[[Sequence], bool]) -> bool:
        with self._turn, self.device_context:
            aborted = self._recovery.abort(matches)
            # A request of several samples counts once.
            for call in {id(sequence.group or sequence): sequence.call for sequence in aborted}.values():
                call.num_unfinished -= 1
        return bool(aborted)

    @property
    def runner(self) -> Runner:
        """Runner that computes the steps."""
        return self.loop.runner

    def _make_loop(self, runner: Runner, spec_decoder: SpecDecoder | None) -> None:
        kind = OverlappedLoop if runner.is_asynchronous else StepLoop
        self.loop: StepLoop = kind(self.scheduler, runner, self._output_processor, self._masks, spec_decoder)
        is_captured = runner.is_asynchronous and runner.has_graphs
        self.scheduler.pacing = AdmissionPacing() if is_captured else None
        self._recovery = MemoryRecovery(self.loop)

    def _clean(self, page_ids: list[int]) -> None:
        self.runner.zero_pages(page_ids)

    @property
    def spec_decoder(self) -> SpecDecoder | None:
        """Speculative decoding state of this engine; None: off."""
        return self.loop.spec_decoder

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished sequences, including those of streams, plus completions that the next `step` returns."""
        return self._num_inside + len(self._added.ended)

    @property
    def _num_inside(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running) + self._recovery.num_suspects

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    def step(self) -> list[Completion]:
        """Compute one step, and return the completions of added requests since the last call.

        A step that runs out of memory is undone and smaller ones follow. Raises EnvironmentFailed when not even single
        tokens of several sequences fit.
        """
        with self._turn:
            self._step()
            return self._added.drain()

    def _step(self) -> None:
        self._check_open()
        self._is_stepping = True
        try:
            with self.device_context:
                self._recovery.step()
        finally:
            self._is_stepping = False
            self._abort_abandoned()

    # -- many requests

    def generate(
        self,
        prompts: Text | Iterable[Text],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        adapter: str | Items[str | None] | None = None,
    ) -> list[Completion]:
        """Complete `prompts` (strings or lists of token ids) and return the completions in their order.

        Other requests of the engine continue and keep their completions. When the call is interrupted, only its own
        requests are aborted. Rows that cannot be served become completions with an error. `params` is one
        SamplingParams for all or one for each, `adapter` one name or None (the base model) for all or one for each.
        Raises ConfigError when the counts differ, or for values of other types.
        """
        return self._complete(completion_requests(self.tokenizer, prompts, params, adapter))

    def _complete(self, requests: Items[Request]) -> list[Completion]:
        done = {completion.row_id: completion for completion in self.stream(requests)}
        return [done[index] for index in range(len(requests))]

    def stream(self, requests: Iterable[Request]) -> Generator[Completion, None, None]:
        """Yield the completions of `requests` as they finish, pulling requests just fast enough to keep the batch full.

        Completions of other requests are not yielded here: `step` returns those of added requests, and each stream
        yields its own, although any step computes all. A closed, collected or interrupted stream aborts its requests.
        """
        source, call, exhausted = iter(requests), RequestStream(checked), False
        max_open = 2 * self.table.num_slots
        try:
            while True:
                pulled: list[Request] = []
                if not exhausted and call.num_unfinished < max_open:
                    num_wanted = max_open - call.num_unfinished
                    pulled = list(islice(source, num_wanted))
                    exhausted = len(pulled) < num_wanted
                with self._turn:
                    for request in pulled:
                        self._add(request, call)
                    if not call.num_unfinished and not call.ended:
                        return
                    if not call.ended:  # steps of other threads may have completed some
                        self._step()
                    ended = call.drain()
                yield from ended
        finally:
            with self._turn:
                self._abandoned.append(call)
                self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        """Abort the requests of closed streams, but not during a step, where garbage collection may close a stream."""
        calls = list(self._abandoned)
        if calls and not self._is_stepping:
            if any(call.num_unfinished for call in calls):
                self._abort(lambda sequence: sequence.call in calls)
            del self._abandoned[: len(calls)]  # only now: after a second Ctrl-C the next step still finds them

    # -- tasks on known texts: results in order; rows that cannot be served become completions with an error

    def score(
        self, prompts: Text | Iterable[Text], completions: Items[str] | None = None, top: int | None = None
    ) -> list[Completion]:
        """Return the log-probability of each completion after its prompt; without completions, that of each text from
        its second token on. `result` of each is a `ScoreResult`. top: see `Score`. Raises ConfigError when the counts
        differ."""
        return self._complete(score_requests(self.tokenizer, prompts, completions, top))

    def choose(self, prompts: Text | Iterable[Text], labels: Items[str]) -> list[Completion]:
        """Return which label follows each prompt, by one pass over it. `result` of each is a `ChoiceResult`. Raises
        ConfigError for labels that cannot be distinguished."""
        return self._complete(choice_requests(self.tokenizer, prompts, labels))

    def embed(
        self,
        texts: Text | Iterable[Text],
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Completion]:
        """Embed each text as a vector (see `Embed`). `result` of each is a `VectorResult`."""
        ids = encode_all(self.tokenizer, texts)
        return self._complete(task_requests(ids, [Embed(pooling, normalize, dimensions)] * len(ids)))

    def classify(self, texts: Text | Iterable[Text]) -> list[Completion]:
        """Return the scores of the model's classification head for each text (see `Classify`)."""
        ids = encode_all(self.tokenizer, texts)
        return self._complete(task_requests(ids, [Classify()] * len(ids)))

    # -- maintenance

    def paused(self, ns: int) -> None:
        """Exclude `ns`, which the caller spent elsewhere since the last step, from the next step's measured time."""
        if self.spec_decoder is not None:
            self.spec_decoder.policy.paused(ns)

    def warm_up(self) -> None:
        """Run one short request without drafts, so that the first real one does not pay for lazy initialisation.

        Raises ConfigError when requests are waiting or running, because it clears the prefix cache and the
        output-length history afterwards.
        """
        self._check_open()
        if self._num_inside:
            raise ConfigError(f"warm_up: {self._num_inside} sequences are waiting or running; call it first")
        self._log("warming up (kernels are compiled the first time on a machine)")
        counted, spec_decoder = vars(self.stats).copy(), self.spec_decoder
        self.draft_as(None)
        prompt = [min(self.runner.vocab_size - 1, 1)] * min(self.pool.block_size, self.max_model_len - 2)
        try:
            list(self.stream([Request("warm-up", prompt, SamplingParams(max_tokens=2, ignore_eos=True))]))
        finally:
            self.forget()
            vars(self.stats).update(counted)
            self.draft_as(spec_decoder)

    def forget(self) -> None:
        """Clear the prefix cache and the output-length history. Nothing may be running."""
        self.pool.forget(range(self.pool.num_blocks))
        self.scheduler.admission.forget_lengths()

    def draft_as(self, spec_decoder: SpecDecoder | None) -> None:
        """Draft with `spec_decoder`, made for this engine's scheduler, from now on; None: no drafts. Nothing may be
        running."""
        assert not len(self.scheduler.running), "the proposers do not know sequences that are already running"
        self.loop.spec_decoder = self.table.watcher = spec_decoder

    def counters(self) -> dict[str, int]:
        """Return `stats` and the draft policy's counters by name. They can be summed over engines."""
        return self.stats.flat() | (self.spec_decoder.policy.counters() if self.spec_decoder is not None else {})

    def close(self) -> None:
        """Free the weights and the KV cache. Every later call raises ConfigError."""
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
