"""The engine: requests in, completions out, one unified step at a time.

    add -> Scheduler (waiting, running) -> StepPlan -> StepInput -> ModelRunner -> logits -> sampler -> append -> finish

`Engine` owns one model on one device. It knows nothing of Parquet, jobs or Ray. Not safe for use from several threads;
several engines may live in one process.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, replace
from itertools import islice

import numpy as np

from pipeline.engine.accounting import classify, record
from pipeline.engine.block_pool import BlockPool
from pipeline.engine.build import build
from pipeline.engine.completing import Completing, failed
from pipeline.engine.detokenizer import StopChecker
from pipeline.engine.drafting import Drafting, Noted
from pipeline.engine.drawn import Drawn, draw_on_device
from pipeline.engine.flight import Flight
from pipeline.engine.memory import is_out_of_memory
from pipeline.engine.params import Completion, EngineConfig, EngineStats, Request, SamplingParams
from pipeline.engine.penalties import takes_best
from pipeline.engine.propose.draft_model import DraftModelProposer
from pipeline.engine.propose.ngram import NgramProposer
from pipeline.engine.propose.policy import DraftPolicy, FixedDrafts
from pipeline.engine.propose.proposer import Proposer
from pipeline.engine.resolve import Speculation
from pipeline.engine.runner import Runner
from pipeline.engine.sampler import greedy, sample
from pipeline.engine.sampling_batch import SamplerOutput, SamplingBatch
from pipeline.engine.scheduler import NO_PROMISE, Promise, Scheduler
from pipeline.engine.sequence import Sequence, SlotTable
from pipeline.engine.shortage import Shortage
from pipeline.engine.step import StepPlan, build_input, runs
from pipeline.engine.timing import controlled_drafts
from pipeline.engine.tokenizer import Tokenizer
from pipeline.engine.verify import Checked, Verified
from pipeline.errors import ConfigError, RowError
from pipeline.kernels.select import must_compile, select_lookup


class Engine:
    """`Engine(EngineConfig(model="path")).generate(["prompt", ...], SamplingParams(max_tokens=64))`."""

    _warming_up = "warming up"  # what takes its time there

    def __init__(self, config: EngineConfig, say: Callable[[str], None] | None = None) -> None:
        """Load the model. `say` is told what takes long while it does, here and in `warm_up`.

        Raises ModelError for the checkpoint, ConfigError for options it cannot be run with.
        """
        self._say = say or _say_nothing
        built = build(config, self._say)
        if must_compile(built.runner.decoder.kernels):
            self._warming_up = "compiling CPU kernels (first time on this machine)"
        resolved = built.resolved
        self._assemble(
            built.runner,
            built.tokenizer,
            built.num_blocks,
            resolved.block_size,
            built.max_model_len,
            resolved.max_num_seqs,
            resolved.max_num_batched_tokens,
            config.enable_prefix_caching,
            config.seed,
        )
        if resolved.speculation is not None:
            tells_law = not resolved.deterministic
            self._speculate_as(resolved.speculation, built.draft_runner, built.runner.captured_tokens, tells_law)
        self.resolved: dict[str, str | int] = built.about

    @classmethod
    def from_parts(
        cls,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> "Engine":
        """An engine around a runner that is built already."""
        engine = cls.__new__(cls)
        engine.resolved = {}
        engine._say = _say_nothing
        engine._assemble(
            runner,
            tokenizer,
            num_blocks,
            block_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            enable_prefix_caching,
            seed,
        )
        return engine

    def _assemble(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        seed: int,
    ) -> None:
        self.runner, self.tokenizer, self.seed, self.max_model_len = runner, tokenizer, seed, max_model_len
        self.stats = EngineStats()
        self.pool = BlockPool(num_blocks, block_size)
        self.table = SlotTable(max_num_seqs, max_model_len, block_size)
        self.scheduler = Scheduler(self.table, self.pool, self.stats, max_num_batched_tokens, enable_prefix_caching)
        self._completing = Completing(self.scheduler, tokenizer, runner)
        self.drafting: Drafting | None = None
        self._shortage = Shortage(self.scheduler)
        self._flight: Flight | None = None
        self._noted: Noted | None = None  # of the step in flight,
        self._begun_ns = 0  # and when it was begun or, later, the one before had landed
        self._landed_ns = 0
        self._landed_early: list[Completion] = []  # finished outside of a step, for the next one to return
        self._order = 0
        self._closed = False

    # -- one request at a time

    def add(self, request: Request) -> None:
        """Queue a request. Its completion comes from a later `step`, as an error when it cannot be served."""
        self._check_open()
        seed = request.params.seed
        sequence = Sequence(
            request,
            np.array(request.prompt_token_ids, dtype=np.int32),
            self._order,
            seed if seed is not None else self.seed + self._order,
            queued_us=_now_us(),
        )
        self._order += 1
        if request.params.stop:
            sequence.stop_checker = StopChecker(self.tokenizer, request.params.stop, request.params.min_tokens)
        if request.params.min_tokens > 0:
            eos = frozenset() if request.params.ignore_eos else self.tokenizer.eos_token_ids
            sequence.ending_ids = np.array(sorted(eos.union(request.params.stop_token_ids)), dtype=np.int64)
        outside = (sequence.token_ids < 0) | (sequence.token_ids >= self.runner.vocab_size)
        if outside.any():
            self.scheduler.reject(
                sequence,
                RowError.TOKEN_OUT_OF_VOCABULARY,
                f"the prompt holds token {int(sequence.token_ids[outside][0])}; the model has "
                f"{self.runner.vocab_size} (does the tokenizer belong to it?)",
            )
        else:
            self.scheduler.add(sequence)

    def abort(self, row_id: object) -> bool:
        """Forget a request wherever it is; no completion will come. False when it is not here (any more)."""
        self._landed_early += self._land()  # what ends with the token that is being drawn for it is too late to abort
        return self.scheduler.abort(row_id) is not None

    @property
    def num_unfinished(self) -> int:
        scheduler = self.scheduler
        here = len(scheduler.waiting) + len(scheduler.running)
        return here + scheduler.num_rejected + self._shortage.num_suspects + len(self._landed_early)

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    def step(self) -> list[Completion]:
        """Compute one step and return the completions that it finished.

        A step that does not fit the memory is undone, and smaller ones follow. Raises EnvironmentFailed when not even
        single tokens of several sequences fit.
        """
        self._check_open()
        start_ns = time.perf_counter_ns()
        completions, self._landed_early = self._landed_early, []
        promise, landed = self._promise()
        completions += landed
        plan = self.scheduler.plan()
        if plan is None:
            self._shortage.convict()
        elif self.drafting is not None:
            plan, promise, landed = self._with_drafts(plan, promise)
            completions += landed
        completions += [failed(*rejected) for rejected in self.scheduler.take_rejected()]
        if plan is None:
            return completions + self._land()
        slot_R = plan.slot_S[plan.samples_S]
        output = self._compute(plan, slot_R, promise)
        noted = None if self.drafting is None else self.drafting.noted()
        if output is None:
            self.scheduler.retract(promise)
            completions += self._land()
            self._shortage.make_smaller(plan, self.stats)
            if self.drafting is not None:
                self.drafting.undone(plan)
            self.stats.repeated_us += (time.perf_counter_ns() - start_ns) // 1000
            return completions
        self._shortage.convict()
        tokens, num_sequences = classify(plan, self.table), len(plan.slot_S)
        kv_used_ppm = self.pool.num_held * 1_000_000 // self.pool.num_blocks
        self.scheduler.retract(promise)
        completions += self._land(plan)
        if len(promise.slot_P):
            plan = self.scheduler.follow_up(plan, promise)
        self.scheduler.advance(plan)
        completions += self._take(slot_R, output, noted, start_ns)
        record(self.stats, tokens, num_sequences, kv_used_ppm, (time.perf_counter_ns() - start_ns) // 1000)
        return completions

    # -- many requests

    def generate(
        self,
        prompts: str | list[int] | Items[str | list[int]],
        params: SamplingParams | Items[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete `prompts` (strings or lists of token ids) and return the completions in their order.

        `params` is one SamplingParams for all or one for each. Raises ConfigError when the counts differ.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Items) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts with {len(each)} sampling params: expected one for all or one for each"
            )
        requests = [
            Request(index, self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt), own)  # type: ignore[arg-type]
            for index, (prompt, own) in enumerate(zip(prompts, each))
        ]
        done = {completion.row_id: completion for completion in self.stream(requests)}
        return [done[index] for index in range(len(requests))]

    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions as they finish, pulling requests just fast enough to keep the batch full."""
        source = iter(requests)
        ahead = 2 * self.table.num_slots
        exhausted = False
        while True:
            if not exhausted and self.num_unfinished < ahead:
                wanted = ahead - self.num_unfinished
                taken = list(islice(source, wanted))
                exhausted = len(taken) < wanted
                for request in taken:
                    self.add(request)
            if not self.has_unfinished:
                return
            yield from self.step()

    def warm_up(self) -> None:
        """Run one short request without drafts, so that the first real one does not pay for lazy initialisation."""
        self._say(self._warming_up)
        saved, drafting = replace(self.stats), self.drafting
        self.draft_as(None)
        prompt = [min(self.runner.vocab_size - 1, 1)] * min(self.pool.block_size, self.max_model_len - 2)
        self.add(Request("warm-up", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        while self.has_unfinished:
            self.step()
        self.forget()
        self.stats = self.scheduler.stats = saved
        self.draft_as(drafting)

    def forget(self) -> None:
        """Drop the prefixes that are kept for later requests, and what finished ones told of lengths. Nothing may be
        running."""
        self.pool.forget(range(self.pool.num_blocks))
        self.scheduler.forget_history()

    def speculate(self, proposers: Items[Proposer], policy: DraftPolicy) -> None:
        """From now on compute drafts of `proposers`, made for this engine's `table`, as many as `policy` chooses.

        Nothing may be running.
        """
        self.draft_as(Drafting(proposers, policy, self.scheduler))

    def draft_as(self, drafting: Drafting | None) -> None:
        """From now on compute the drafts of `drafting`, made for this engine's scheduler; None: none. Nothing may be
        running."""
        assert not len(self.scheduler.running), "sequences that run already are unknown to the proposers"
        self.drafting = self.scheduler.watcher = drafting

    def counters(self) -> dict[str, int]:
        """`stats` and what the draft policy counted, by name. Sums over engines mean the same."""
        return asdict(self.stats) | (self.drafting.policy.counters() if self.drafting is not None else {})

    def close(self) -> None:
        """Drop the weights and the KV cache. The engine answers ConfigError from then on."""
        if not self._closed:
            self._closed = True
            self.drafting = self.scheduler.watcher = self._flight = None
            del self.runner, self._completing
            self.tokenizer.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _speculate_as(
        self, speculation: Speculation, draft: Runner | None, padded_to: Items[int], tells_law: bool
    ) -> None:
        most, vocab_size = speculation.max_draft_tokens, self.runner.vocab_size
        proposers: list[Proposer] = []
        for name in speculation.proposers:
            if name == "ngram":
                lookup = NgramProposer(self.table, most, compiled=select_lookup())
                self._say(self._warming_up)
                lookup.warm_up()
                proposers.append(lookup)
            else:
                assert draft is not None
                proposers.append(
                    DraftModelProposer(draft, self.table, self.pool, most, vocab_size, tells_law=tells_law)
                )
        policy: DraftPolicy = FixedDrafts(most)
        if not speculation.forced:
            self._say(self._warming_up if self._warming_up != Engine._warming_up else "timing steps, for drafts")
            policy = controlled_drafts(
                *(proposers, most, self.runner, self.table, self.scheduler.max_num_batched_tokens),
                *(padded_to, self.pool.num_blocks),
            )
        self.speculate(proposers, policy)

    # -- parts of a step

    def _promise(self) -> tuple[Promise, list[Completion]]:
        """The slots whose next tokens are being drawn and may be counted on; else what ended when they were waited for.

        A plan that gives up sequences waits: they leave with all they know.
        """
        flight = self._flight
        if flight is None:
            return NO_PROMISE, []
        promise = self.scheduler.promise(flight.slot_K, flight.draft_K)
        if not self.scheduler.would_preempt():
            return promise, []
        self.scheduler.retract(promise)
        return NO_PROMISE, self._land()

    def _with_drafts(self, plan: StepPlan, promise: Promise) -> tuple[StepPlan | None, Promise, list[Completion]]:
        """`plan` with drafts, or as it is. Where the tokens in flight must be known, they are waited for now, after the
        plan was made; then also what ended with them, and nothing is promised any more.

        Who drafts by looking up must know them; and where drafts in flight leave open how many tokens there are, rows
        that depend on that, and kernels that read contexts on the host.
        """
        drafting, flight, landed = self.drafting, self._flight, []
        assert drafting is not None
        proposer, most_queries = drafting.who(plan), None
        if flight is not None:
            follows = proposer is None or drafting.follows(proposer, flight, self._noted)
            if flight.has_drafts:
                most_queries = self.runner.most_short_queries
                follows = follows and int(plan.count_S.max()) <= most_queries
                follows = follows and bool(takes_best(self.table.sampling[plan.slot_S[plan.samples_S]]).all())
            if not follows:
                self.scheduler.retract(promise)
                landed, flight, most_queries = self._land(plan), None, None
                plan, promise = self.scheduler.follow_up(plan, promise), NO_PROMISE
                drafting.landed(plan)
        if proposer is not None and len(plan.slot_S):
            plan = drafting.extend(plan, proposer, flight, most_queries)
        return plan if len(plan.slot_S) else None, promise, landed

    def _compute(
        self, plan: StepPlan, slot_R: np.ndarray, promise: Promise
    ) -> SamplerOutput | Verified | Drawn | Checked | None:
        """The next tokens of the sequences that sample, of some perhaps several, or on their way; None when the memory
        does not suffice."""
        late = None
        if self._flight is not None and len(promise.slot_P):
            late = self._flight.late(plan, self.table)
        if self.drafting is not None:
            late = self.drafting.late(plan, late)
        try:
            step = build_input(plan, self.table)
            logits_RV = self.runner.execute(step, late)
            batch = None if self.table.is_plain[slot_R].all() else self._sampling_batch(plan, slot_R)
            drafting = None if plan.draft_S is None else self.drafting
            if not self.runner.is_asynchronous:
                if drafting is not None:
                    return drafting.verify(logits_RV, batch)
                return greedy(logits_RV) if batch is None else sample(logits_RV, batch)
            late_ids = None
            if late is not None and late.shortfall is None and batch is not None:
                late_ids = late.ids(step)
            if drafting is not None:
                return drafting.check(self.runner, logits_RV, batch, late_ids)
            return draw_on_device(self.runner, logits_RV, batch, late_ids)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _take(
        self, slot_R: np.ndarray, output: SamplerOutput | Verified | Drawn | Checked, noted: Noted | None, begun_ns: int
    ) -> list[Completion]:
        """Give sequences their tokens, or leave them in flight where the device is still drawing them."""
        if isinstance(output, Drawn | Checked):
            flight = Flight.of(slot_R, output, self.table, self.scheduler.running)
            if len(flight.slot_K):
                self._flight, self._noted, self._begun_ns = flight, noted, max(begun_ns, self._landed_ns)
            return []
        return self._given(slot_R, output, np.ones(len(slot_R), dtype=bool), noted, begun_ns)

    def _land(self, behind: StepPlan | None = None) -> list[Completion]:
        """Wait for the step in flight and take its tokens. `behind`: a step that is planned with them already, whose
        blocks are kept."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        output = flight.output()
        self._landed_ns = time.perf_counter_ns()
        noted, self._noted = self._noted, None
        return self._given(flight.slot_K, output, flight.kept_S, noted, self._begun_ns, behind)

    def _given(
        self,
        slot_K: np.ndarray,
        output: SamplerOutput | Verified,
        kept_S: np.ndarray,
        noted: Noted | None,
        begun_ns: int,
        behind: StepPlan | None = None,
    ) -> list[Completion]:
        """Give the sequences of a step that are still there (kept_S, of all that got tokens) what they get."""
        generated_before = self.stats.generated_tokens
        accepted_S = np.zeros(len(kept_S), dtype=np.int64)
        if isinstance(output, Verified):
            completions = self._completing.take_verified(slot_K, output, _now_us())
            accepted_S[kept_S] = output.num_accepted_S
            count_of = np.zeros(self.table.num_slots, dtype=np.int64)
            if behind is not None:
                count_of[behind.slot_S] = behind.count_S
            here_K = slot_K[np.isin(slot_K, self.scheduler.running)] if completions else slot_K
            self.scheduler.release_draft_blocks(here_K, count_of[here_K])
        else:
            completions = self._completing.take(slot_K, output, _now_us())
        if self.drafting is not None and noted is not None:
            num_generated = self.stats.generated_tokens - generated_before
            step_us = (time.perf_counter_ns() - begun_ns) // 1000
            self.drafting.done(self.stats, noted, accepted_S, kept_S, num_generated, step_us)
        return completions

    def _sampling_batch(self, plan: StepPlan, slot_S: np.ndarray) -> SamplingBatch:
        """A row behind the known tokens of each sequence and one behind each draft, which sees the drafts before it."""
        if plan.draft_S is None:
            return SamplingBatch.of(self.table, slot_S, self.table.num_known[slot_S])
        count_S = plan.draft_S[plan.samples_S] + 1
        known_R = runs(self.table.num_known[slot_S], count_S)
        return SamplingBatch.of(self.table, np.repeat(slot_S, count_S), known_R)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the engine is closed")


def _say_nothing(_: str) -> None:
    pass


def _now_us() -> int:
    return time.monotonic_ns() // 1000
