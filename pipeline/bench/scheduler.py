"""Host time of a step: what the engine does around the model, with no model.

The runner gives made logits, so greedy tokens are the same on every run and its own time is taken out. Rows have
ragged lengths: at each moment some finish, others are admitted and their prompts are computed in chunks beside those
that generate. The tokenizer is the demonstration model's, so that text of finished rows is made as in a job.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter_ns, process_time_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipeline.bench.measure import alternating, facts_to_text, machine_facts, resident_bytes, table
from pipeline.checkpoints.locate import locate_model
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.kernels import reference
from pipeline.tokenization.tokenizer import Tokenizer

HOST_VOCAB = 256  # small, so that a step's time is the host's and not that of reading logits
SAMPLING_VOCAB = 32_000
MOST_SAMPLED = 1024  # rows of the part with a real vocabulary: 131 MB of logits
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
STEM_TOKENS, NUM_STEMS = 32, 8  # each prompt begins with one of a few shared stems
PROMPT_TOKENS = (48, 240)
OUTPUT_TOKENS = (16, 240)
CHUNK_TOKENS = 2048  # of a step's tokens, beside one for each sequence
PARTS = ("plan", "build", "sample", "handle", "detokenize")
TIMES = (*PARTS, "cpu")
KINDS = {
    "greedy": {},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "repetition": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}


@dataclass(frozen=True)
class StepCost:
    """At one number of running sequences, medians over steps in microseconds; `step_us` is the sum of the parts,
    `cpu_us` the processor time of the same steps.

    finished and prompt_tokens: means of a step. add_us: of one row, which is queued outside of the steps.
    """

    sequences: int
    plan_us: float
    build_us: float
    sample_us: float
    handle_us: float
    detokenize_us: float
    cpu_us: float
    step_us: float
    step_p95_us: float
    finished: float
    prompt_tokens: float
    add_us: float


@dataclass(frozen=True)
class SampleCost:
    """Tokens from logits of `SAMPLING_VOCAB` in milliseconds; read_ms: finding each row's maximum and nothing else."""

    rows: int
    read_ms: float
    kinds_ms: dict[str, float]


@dataclass(frozen=True)
class LongRun:
    """Processor time of a step of a fresh engine and of one that finished `rows`; memory of the process before and
    after those."""

    sequences: int
    rows: int
    fresh_cpu_us: float
    old_cpu_us: float
    early_bytes: int
    late_bytes: int


@dataclass(frozen=True)
class SchedulerBench:
    costs: tuple[StepCost, ...]
    sampling: tuple[SampleCost, ...]
    long_run: LongRun
    steps: int
    rounds: int
    machine: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "scheduler", **asdict(self)}

    def to_text(self) -> str:
        lines = [
            "Host time of a step, without the model's. All rows greedy; made logits over "
            f"{HOST_VOCAB} tokens, so that reading them is next to nothing.",
            f"Prompts of {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens, {STEM_TOKENS} of them shared, outputs of "
            f"{OUTPUT_TOKENS[0]}-{OUTPUT_TOKENS[1]}; rows that finish are replaced, their prompts computed in chunks.",
            f"Medians over {self.rounds} rounds of {self.steps} steps, sizes in turn; microseconds. handle: counters, "
            "blocks made findable, ends; detokenize: text of rows that finished; add: to queue one row;",
            "cpu: processor time of the step, which does not count what other programs take.",
            facts_to_text(self.machine),
            "",
        ]
        parts = "plan >8,.0f | build >8,.0f | sample >8,.0f | handle >8,.0f | detok. >8,.0f"
        columns = f"running >8, | finished >9.1f | prompt tokens >14,.0f | {parts}"
        costs = []
        for c in self.costs:
            spent = (vars(c)[f"{part}_us"] for part in (*PARTS, "step", "step_p95", "cpu", "add"))
            costs.append((c.sequences, c.finished, c.prompt_tokens, *spent))
        lines += table(f"{columns} | step >9,.0f | p95 >9,.0f | cpu >9,.0f | add >6,.0f", costs)
        run = self.long_run
        lines += [
            "",
            f"A step of {run.sequences:,} running in a fresh engine and in one after {run.rows:,} finished rows: "
            f"{run.fresh_cpu_us:,.0f} and {run.old_cpu_us:,.0f} us of processor time;",
            f"memory of the process before and after those rows: {run.early_bytes / 1e6:,.1f} and "
            f"{run.late_bytes / 1e6:,.1f} MB.",
        ]
        if self.sampling:
            lines += [
                "",
                f"Tokens from logits over {SAMPLING_VOCAB:,} tokens, all rows of one kind; milliseconds.",
                "read: each row's maximum by torch.amax, the least that any of them does.",
            ]
            kinds = " | ".join(f"{kind} >11,.2f" for kind in KINDS)
            taken = [(s.rows, s.read_ms, *(s.kinds_ms[kind] for kind in KINDS)) for s in self.sampling]
            lines += table(f"rows >8, | read >8,.2f | {kinds}", taken)
        return "\n".join(lines)


def bench_scheduler(
    sequences: Sequence[int] = (64, 256, 1024, 4096),
    steps: int = 100,
    rounds: int = 3,
    rows: int = 10_000,
    say: Callable[[str], None] = lambda text: None,
) -> SchedulerBench:
    """Measure steps of each number of running sequences, sampling at those up to `MOST_SAMPLED`, and a run of `rows`.

    `say` is told what goes on.
    """
    assert min(*sequences, steps, rounds, rows) >= 1
    machine = machine_facts()
    tokenizer = Tokenizer.from_folder(str(locate_model("demo:target")))
    long_run = _long_run(min(256, max(sequences)), rows, steps, rounds, tokenizer, say)
    costs = _step_costs(sorted(sequences), steps, rounds, tokenizer, say)
    sampled = (n for n in sorted(sequences) if n <= MOST_SAMPLED)
    sample_costs = tuple(_sample_cost(n, rounds, tokenizer, say) for n in sampled)
    return SchedulerBench(costs, sample_costs, long_run, steps, rounds, machine)


class _Timed:
    """A function, and when it was last entered and left."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.entered_ns = self.left_ns = self.spent_ns = 0  # spent: of all calls

    def __call__(self, *args: Any) -> Any:
        self.entered_ns = perf_counter_ns()
        found = self._call(*args)
        self.left_ns = perf_counter_ns()
        self.spent_ns += self.left_ns - self.entered_ns
        return found


class _NoModel:
    """The runner of an engine: a row of made logits for each that wants one."""

    is_asynchronous, has_graphs = False, False
    greedy, sample = staticmethod(reference.greedy), staticmethod(reference.sample)
    hidden_size, has_vocabulary_head = 0, True
    class_head_CH: np.ndarray | None = None

    def __init__(self, num_rows: int, vocab_size: int, ending: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(num_rows)
        # probabilities that fall as a power of the rank, as a model's roughly do: a few tokens hold most of a row
        self.logits_RV = 1.5 * torch.empty(num_rows, vocab_size).exponential_(generator=generator)
        self.logits_RV[:, list(ending)] = -1.0

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        return self.logits_RV[: len(step.logit_row_R)]

    def execute_and_read(self, step: StepInput, row_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("all rows generate")

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        raise AssertionError("all rows generate")

    def zero_blocks(self, blocks: list[int]) -> None:
        raise AssertionError("made logits are finite")


class _Load:
    """An engine that is kept full with rows of ragged lengths, and the time of the parts of its steps."""

    def __init__(
        self, num_running: int, vocab_size: int, tokenizer: Tokenizer, max_tokens: int | None = None, **options: float
    ) -> None:
        self.num_running, self.max_tokens, self.options = num_running, max_tokens, options
        self.rng = np.random.default_rng(num_running)
        self.stems = self.rng.integers(5, HOST_VOCAB, (NUM_STEMS, STEM_TOKENS))
        self.decode = _Timed(tokenizer.decode)
        self.runner = _NoModel(num_running, vocab_size, sorted(tokenizer.eos_token_ids))
        self.engine = Engine.from_parts(
            self.runner,
            SimpleNamespace(decode=self.decode, eos_token_ids=tokenizer.eos_token_ids),  # type: ignore[arg-type]
            num_blocks=num_running * -(-MAX_MODEL_LEN // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running + CHUNK_TOKENS,
        )
        scheduler = self.engine.scheduler
        self.plan, self.execute, self.commit = map(_Timed, (scheduler.plan, self.runner.execute, scheduler.commit))
        scheduler.plan, self.runner.execute, scheduler.commit = self.plan, self.execute, self.commit  # type: ignore
        self.num_added = self.num_finished = self.adding_ns = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Computed so far, those of shared blocks not."""
        return self.engine.stats.prompt_tokens - self.engine.stats.cached_tokens

    def refill(self) -> None:
        """Queue so many rows that none of the next step's places stays empty."""
        missing = self.num_running + self.num_running // 8 + 16 - self.engine.num_unfinished
        requests = [self._request() for _ in range(missing)]
        start_ns = perf_counter_ns()
        for request in requests:
            self.engine.add(request)
        self.adding_ns += perf_counter_ns() - start_ns

    def _request(self) -> Request:
        stem = self.stems[int(self.rng.integers(NUM_STEMS))]
        own = self.rng.integers(5, HOST_VOCAB, int(self.rng.integers(*PROMPT_TOKENS)) - STEM_TOKENS)
        max_tokens = self.max_tokens or int(self.rng.integers(*OUTPUT_TOKENS))
        params = SamplingParams(max_tokens=max_tokens, **self.options)  # type: ignore[arg-type]
        self.num_added += 1
        return Request(self.num_added, [*stem.tolist(), *own.tolist()], params)

    def step(self) -> tuple[int, ...]:
        """Nanoseconds of `TIMES` in one step."""
        self.refill()
        self.decode.spent_ns = 0
        start_ns, start_cpu_ns = perf_counter_ns(), process_time_ns()
        completions = self.engine.step()
        end_ns, cpu_ns = perf_counter_ns(), process_time_ns() - start_cpu_ns
        assert all(completion.error is None for completion in completions)
        self.num_finished += len(completions)
        planned_ns, sampled_ns, text_ns = self.plan.left_ns, self.commit.entered_ns, self.decode.spent_ns
        return (
            planned_ns - start_ns,
            self.execute.entered_ns - planned_ns,
            sampled_ns - self.execute.left_ns,
            end_ns - sampled_ns - text_ns,
            text_ns,
            cpu_ns,
        )

    def fill(self) -> None:
        """Step until all places were taken and given up about once, so that ages are mixed."""
        while self.num_finished < self.num_running:
            self.step()


def _step_costs(
    sequences: Sequence[int], steps: int, rounds: int, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[StepCost, ...]:
    loads = {str(n): _Load(n, HOST_VOCAB, tokenizer) for n in sequences}
    for load in loads.values():
        say(f"{load.num_running:,} sequences: filling")
        load.fill()
        load.num_added = load.num_finished = load.adding_ns = 0
    prompt_tokens = [load.num_prompt_tokens for load in loads.values()]
    parts: dict[str, list[tuple[int, ...]]] = {name: [] for name in loads}
    for number, order in enumerate(alternating(list(loads), rounds)):
        say(f"round {number + 1} of {rounds}")
        for name in order:
            parts[name] += [loads[name].step() for _ in range(steps)]
    costs = []
    for load, taken, before in zip(loads.values(), parts.values(), prompt_tokens):
        time_us = np.array(taken) / 1e3
        step_us = time_us[:, : len(PARTS)].sum(axis=1)
        middle = np.median(time_us, axis=0).tolist()
        costs.append(
            StepCost(
                load.num_running,
                **{f"{name}_us": value for name, value in zip(TIMES, middle)},
                step_us=float(np.median(step_us)),
                step_p95_us=float(np.percentile(step_us, 95)),
                finished=load.num_finished / len(taken),
                prompt_tokens=(load.num_prompt_tokens - before) / len(taken),
                add_us=load.adding_ns / max(load.num_added, 1) / 1e3,
            )
        )
    return tuple(costs)


def _sample_cost(rows: int, rounds: int, tokenizer: Tokenizer, say: Callable[[str], None]) -> SampleCost:
    """No row ends while it is measured: what is timed is the sampler alone."""
    say(f"{rows:,} rows: sampling")
    room = MAX_MODEL_LEN - PROMPT_TOKENS[1]
    loads = {kind: _Load(rows, SAMPLING_VOCAB, tokenizer, room, **options) for kind, options in KINDS.items()}
    logits_RV = loads["greedy"].runner.logits_RV
    sample = PARTS.index("sample")
    for load in loads.values():
        load.runner.logits_RV = logits_RV  # one copy of them
        full_steps = 0
        while full_steps < 2:
            load.step()
            full_steps += bool((load.engine.table.num_known > load.engine.table.num_prompt).all())
    taken: dict[str, list[int]] = {kind: [] for kind in ("read", *KINDS)}
    for _ in range(rounds):
        for kind, load in loads.items():
            taken[kind] += [load.step()[sample] for _ in range(2)]
            start_ns = perf_counter_ns()
            logits_RV.amax(dim=-1)
            taken["read"].append(perf_counter_ns() - start_ns)
    median_ms = {kind: median(values) / 1e6 for kind, values in taken.items()}
    return SampleCost(rows, median_ms["read"], {kind: median_ms[kind] for kind in KINDS})


def _long_run(
    sequences: int, rows: int, steps: int, rounds: int, tokenizer: Tokenizer, say: Callable[[str], None]
) -> LongRun:
    """The steps of an old engine beside those of a fresh one, in turn, so that both meet the same machine."""
    say(f"{sequences:,} sequences: {rows:,} rows")
    old = _Load(sequences, HOST_VOCAB, tokenizer)
    old.fill()
    gc.collect()
    early_bytes = resident_bytes()
    while old.num_finished < sequences + rows:
        old.step()
    gc.collect()
    late_bytes = resident_bytes()
    fresh = _Load(sequences, HOST_VOCAB, tokenizer)
    fresh.fill()
    taken: dict[_Load, list[float]] = {fresh: [], old: []}
    cpu = TIMES.index("cpu")
    for _ in range(rounds):
        for load, cpu_us in taken.items():
            cpu_us += [load.step()[cpu] / 1e3 for _ in range(steps)]
    return LongRun(sequences, rows, median(taken[fresh]), median(taken[old]), early_bytes, late_bytes)
