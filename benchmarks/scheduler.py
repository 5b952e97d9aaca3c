"""Time the host's part of a step without a model: planning, building inputs, sampling and processing outputs.

    OMP_NUM_THREADS=1 python -m benchmarks.scheduler
    OMP_NUM_THREADS=1 python -m benchmarks.scheduler --sequences 1024 --rounds 1

The runner returns fixed random logits, so that greedy tokens are the same in every run, and its time is excluded. Rows
have ragged lengths: at any time some rows finish, and new rows are admitted, whose prompts are computed in chunks next
to decoding rows. The tokenizer is the demonstration model's, so that finished rows are detokenized as in a job.
"""

from collections.abc import Callable, Sequence
from time import perf_counter_ns, process_time_ns
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch

from benchmarks.measure import alternating, facts_to_text, machine_facts, table
from benchmarks.script import json_flag, progress, report, script, shared_options
from pipeline.checkpoints.locate import locate_model
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.kernels import reference
from pipeline.roofline.kv_pages import KVPages
from pipeline.tokenization.tokenizer import Tokenizer

HOST_VOCAB = 256  # small, so that reading logits does not dominate the host's time
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
STEM_TOKENS, NUM_STEMS = 32, 8  # each prompt begins with one of a few shared stems
PROMPT_TOKENS = (48, 240)
OUTPUT_TOKENS = (16, 240)
CHUNK_TOKENS = 2048  # prompt tokens of a step, in addition to one token for each sequence
PARTS = ("plan", "build", "sample", "handle", "detokenize")
TIMES = (*PARTS, "cpu")


class Timed:
    """Timed function: records when it was last entered and left, and the total time of all calls."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.entered_ns = self.left_ns = self.spent_ns = 0

    def __call__(self, *args: Any) -> Any:
        self.entered_ns = perf_counter_ns()
        found = self._call(*args)
        self.left_ns = perf_counter_ns()
        self.spent_ns += self.left_ns - self.entered_ns
        return found


class NoModel:
    """Runner without a model, which returns fixed logits for each sampling row. All rows generate."""

    is_asynchronous, has_graphs = False, False
    greedy, sample = staticmethod(reference.greedy), staticmethod(reference.sample)
    hidden_size, has_vocabulary_head = 0, True
    class_head_CH: np.ndarray | None = None

    vocab_size = HOST_VOCAB

    def __init__(self, num_rows: int, ending: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        # Probabilities are a power law of the rank, roughly like a model's.
        self.logits_RV = 1.5 * torch.empty(num_rows, HOST_VOCAB).exponential_(generator=generator)
        self.logits_RV[:, list(ending)] = -1.0

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        return self.logits_RV[: len(step.logit_row_R)]


class Load:
    """Engine kept full with rows of ragged lengths, and the times of the parts of its steps."""

    def __init__(self, num_running: int, tokenizer: Tokenizer) -> None:
        self.num_running = num_running
        self.rng = np.random.default_rng(num_running)
        self.stems = self.rng.integers(5, HOST_VOCAB, (NUM_STEMS, STEM_TOKENS))
        self.decode = Timed(tokenizer.decode)
        self.runner = NoModel(num_running, sorted(tokenizer.eos_token_ids))
        self.engine = Engine.from_parts(
            self.runner,  # type: ignore[arg-type]  # reads nothing and cleans no blocks
            SimpleNamespace(decode=self.decode, eos_token_ids=tokenizer.eos_token_ids),  # type: ignore[arg-type]
            num_pages=num_running * -(-MAX_MODEL_LEN // BLOCK_SIZE),
            kv_pages=KVPages(BLOCK_SIZE, 0),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running + CHUNK_TOKENS,
        )
        scheduler = self.engine.scheduler
        self.plan, self.execute, self.commit = map(Timed, (scheduler.plan, self.runner.execute, scheduler.commit))
        scheduler.plan, self.runner.execute, scheduler.commit = self.plan, self.execute, self.commit  # type: ignore
        self.num_added = self.num_finished = self.adding_ns = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens computed so far, without shared blocks."""
        return self.engine.stats.prompt_tokens - self.engine.stats.cached_tokens

    def fill(self) -> None:
        """Step until `num_running` rows have finished, so that running rows have mixed ages."""
        while self.num_finished < self.num_running:
            self.step()

    def step(self) -> tuple[int, ...]:
        """Run a step, with enough queued rows to fill the batch. Returns the nanoseconds of `TIMES`."""
        missing = self.num_running + self.num_running // 8 + 16 - self.engine.num_unfinished
        requests = [self._request() for _ in range(missing)]
        start_ns = perf_counter_ns()
        for request in requests:
            self.engine.add(request)
        self.adding_ns += perf_counter_ns() - start_ns
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

    def _request(self) -> Request:
        stem = self.stems[int(self.rng.integers(NUM_STEMS))]
        own = self.rng.integers(5, HOST_VOCAB, int(self.rng.integers(*PROMPT_TOKENS)) - STEM_TOKENS)
        params = SamplingParams(max_tokens=int(self.rng.integers(*OUTPUT_TOKENS)))
        self.num_added += 1
        return Request(self.num_added, [*stem.tolist(), *own.tolist()], params)


def step_costs(sequences: Sequence[int], steps: int, rounds: int, tokenizer: Tokenizer) -> list[dict[str, float]]:
    """Return medians over steps in microseconds, for each number of running sequences.

    cpu_us: CPU time of the same steps. finished, prompt_tokens: means per step. add_us: time to queue a row, outside
    of steps.
    """
    loads = {str(n): Load(n, tokenizer) for n in sequences}
    for load in loads.values():
        progress(f"{load.num_running:,} sequences: filling")
        load.fill()
        load.num_added = load.num_finished = load.adding_ns = 0
    prompt_tokens = [load.num_prompt_tokens for load in loads.values()]
    parts: dict[str, list[tuple[int, ...]]] = {name: [] for name in loads}
    for number, order in enumerate(alternating(list(loads), rounds)):
        progress(f"round {number + 1} of {rounds}")
        for name in order:
            parts[name] += [loads[name].step() for _ in range(steps)]
    costs = []
    for load, times, before in zip(loads.values(), parts.values(), prompt_tokens):
        time_us = np.array(times) / 1e3
        step_us = time_us[:, : len(PARTS)].sum(axis=1)
        costs.append(
            {
                "sequences": load.num_running,
                **{f"{name}_us": us for name, us in zip(TIMES, np.median(time_us, axis=0).tolist())},
                "step_us": float(np.median(step_us)),
                "step_p95_us": float(np.percentile(step_us, 95)),
                "finished": load.num_finished / len(times),
                "prompt_tokens": (load.num_prompt_tokens - before) / len(times),
                "add_us": load.adding_ns / max(load.num_added, 1) / 1e3,
            }
        )
    return costs


def to_lines(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"Host time of a step, without the model; fixed logits over {HOST_VOCAB} tokens, all rows greedy.",
        f"Prompts of {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens, {STEM_TOKENS} of them shared, outputs of "
        f"{OUTPUT_TOKENS[0]}-{OUTPUT_TOKENS[1]}; finished rows are replaced, and new prompts computed in chunks.",
        f"Medians over {figures['rounds']} rounds of {figures['steps']} steps, sizes in turn; microseconds. handle: "
        "counters, prefix cache and finished rows; detokenize: text of finished rows; add: queue one row;",
        "cpu: CPU time of the step, which excludes other processes.",
        facts_to_text(figures["machine"]),
        "",
    ]
    parts = "plan >8,.0f | build >8,.0f | sample >8,.0f | handle >8,.0f | detok. >8,.0f"
    columns = f"running >8, | finished >9.1f | prompt tokens >14,.0f | {parts}"
    costs = []
    for cost in figures["costs"]:
        spent = (cost[f"{part}_us"] for part in (*PARTS, "step", "step_p95", "cpu", "add"))
        costs.append((cost["sequences"], cost["finished"], cost["prompt_tokens"], *spent))
    lines += table(f"{columns} | step >9,.0f | p95 >9,.0f | cpu >9,.0f | add >6,.0f", costs)
    return lines


@script(__doc__)
@click.option("sequences", "--sequences", multiple=True, type=click.IntRange(min=1), metavar="N", show_default=True,
              default=(64, 256, 1024, 4096), help="Sequences running at once. May be repeated.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Steps in a round.")
@shared_options(rounds=3)
@json_flag
def main(sequences: tuple[int, ...], steps: int, rounds: int, as_json: bool) -> None:
    machine = machine_facts()
    tokenizer = Tokenizer.from_folder(str(locate_model("demo:target")))
    figures = {
        "costs": step_costs(sorted(sequences), steps, rounds, tokenizer),
        "steps": steps,
        "rounds": rounds,
        "machine": machine,
    }
    report("scheduler", figures, to_lines(figures), as_json)


if __name__ == "__main__":
    main()
