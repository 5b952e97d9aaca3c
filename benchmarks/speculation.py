"""Compare speculative with plain decoding on the same rows at several batch sizes, with forced and automatic drafts.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --text extractive --batch-sizes 1,8
    python -m benchmarks.speculation --batch-sizes 1 --rows 2 --rounds 1
    python -m benchmarks.speculation --model SmolLM2-135M-Instruct.Q4_1.gguf --draft none --text rewrite

All modes run on one engine, since the location of its memory changes times by a few percent. They differ in proposer
and policy. Rows are scheduled as in a job: a full batch, a new row whenever one finishes, and a shrinking tail. Modes
alternate within a round, and each round has other rows. Each mode has its own proposers, and the prefix cache is
cleared between modes. Proposers and policies keep their state between rounds, as in a long job. One uncounted round
warms up. Plain decoding runs twice in each round as a control: without noise the ratio of the two is 1, and a mode
whose ratio is no further below 1 is not measurably slower.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import click

from benchmarks.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from benchmarks.script import json_flag, parse_sizes, progress, report, script, shared_options
from pipeline.checkpoints.locate import locate_model
from pipeline.demo.reports import make_report
from pipeline.engine.config import EngineConfig
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts
from pipeline.engine.drafts.spec_decoder import SpecDecoder
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts
from pipeline.engine.stats import EngineStats
from pipeline.errors import PipelineError

NO_DRAFT = "none"
PLAIN, NGRAM, DRAFT, AUTO, AGAIN = "plain", "lookup, forced", "draft model, forced", "auto", "plain again"
TEXTS = {
    "reports": "those of the demonstration job",
    "extractive": "a report with its summary, then the same report again, so that the prompt contains the answer",
    "rewrite": "chats that ask to correct a paragraph of the documentation",
    "extract": "chats that ask for the sentences of a paragraph that name a file, a key or a number",
    "summary": "chats that ask for a summary of a paragraph",
}
INSTRUCTIONS = {
    "rewrite": "Correct spelling and grammar. Answer with the corrected text only.\n\n{}",
    "extract": "Copy each sentence that names a file, a key or a number, word for word.\n\n{}",
    "summary": "Summarize in two sentences.\n\n{}",
}
PARAGRAPH_CHARS = (250, 900)
OUTPUT_TOKENS = 96  # as in the demonstration job
MIN_EQUAL = 0.98  # share of the rows; a near-tie of two logits may resolve differently at another batch size


@dataclass(frozen=True)
class Way:
    """Result of one mode at one batch size, over the counted rounds.

    tail_s: seconds after the last waiting row was scheduled. tokens_per_step: mean tokens of a sequence in a step.
    equal: rows with the same tokens as plain decoding.
    """

    name: str
    seconds: tuple[float, ...]
    tail_s: tuple[float, ...]
    tokens: int
    tokens_per_step: float
    draft_steps: float  # share of steps with drafts
    acceptance: float  # share of draft tokens
    equal: int


@dataclass(frozen=True)
class BatchSpeculation:
    """Results of all modes at one batch size. rows: in each round."""

    batch: int
    rows: int
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class SpeculationBench:
    model: str
    draft: str
    text: str
    dtype: str
    max_draft_tokens: int
    rounds: int
    batches: tuple[BatchSpeculation, ...]
    machine: dict[str, str]

    def to_lines(self) -> list[str]:
        lines = [
            f"{self.model} with and without drafts of up to {self.max_draft_tokens} tokens, from the draft model "
            f"{self.draft} or n-gram lookup; {self.dtype}.",
            f"Rows: {TEXTS[self.text]}; greedy, until EOS or {OUTPUT_TOKENS} tokens.",
            facts_to_text(self.machine),
            f"Rounds: {self.rounds}, in alternating order, with other rows in each; medians (lowest to highest); "
            "ratios within a round.",
            "",
        ]
        rows = []
        for batch in self.batches:
            plain = batch.ways[0]
            for way in batch.ways:
                speed = Spread.from_values([way.tokens / len(way.seconds) / s for s in way.seconds]).median
                by_plain = ratio(plain.seconds, way.seconds).to_text(), ratio(plain.tail_s, way.tail_s).to_text()
                drafted = (way.draft_steps, way.acceptance) if way.draft_steps else (None, None)
                equal = f"{way.equal:,} of {batch.rows * self.rounds:,}"
                rows.append((batch.batch, way.name, speed, *by_plain, way.tokens_per_step, *drafted, equal))
        columns = "at once >7 | mode <8 | tokens/s >8,.0f | speedup >19 | speedup of tail >19 | tokens/step >11.2f"
        lines += table(f"{columns} | steps drafted >13.0% | accepted >8.0% | equal >8", rows)
        return [*lines, "", "speedup: relative to plain decoding. tail: after the last waiting row was scheduled."]


def bench_speculation(
    model: str = "demo:target-awq",
    draft: str = "demo:draft",
    text: str = "reports",
    batch_sizes: Sequence[int] = (1, 8, 32, 128),
    rows: int | None = None,
    rounds: int = 3,
    max_draft_tokens: int = 6,
    dtype: str = "auto",
    threads: int | None = None,
) -> SpeculationBench:
    """Measure every mode at each batch size.

    rows: in each round at every batch size; None: max(32, 2 * batch size). Raises PipelineError when drafts change
    tokens in float32, except for near-ties.
    """
    use_threads(threads)
    machine = machine_facts()
    done, resolved = [], ""
    for batch in batch_sizes:
        num_rows = rows if rows is not None else max(32, 2 * batch)
        found, resolved = _batch(model, draft, text, batch, num_rows, rounds, max_draft_tokens, dtype, threads)
        done.append(found)
    return SpeculationBench(model, draft, text, resolved, max_draft_tokens, rounds, tuple(done), machine)


def _batch(
    model: str,
    draft: str,
    text: str,
    batch: int,
    num_rows: int,
    rounds: int,
    max_drafts: int,
    dtype: str,
    threads: int | None,
) -> tuple[BatchSpeculation, str]:
    speculation = SpeculationConfig("lookup", num_speculative_tokens=max_drafts)
    if draft != NO_DRAFT:
        speculation = SpeculationConfig("draft_model", str(locate_model(draft)), max_drafts)
    options = EngineConfig(
        str(locate_model(model)),
        dtype=dtype,
        speculation=speculation,
        max_num_seqs=batch,
        num_threads=threads,
    )
    progress(f"{batch} at once: loading")
    with Engine(options) as engine:
        engine.warm_up()
        ways = _draftings(engine, max_drafts)
        strict = engine.resolved["dtype"] == "float32"
        runs: dict[str, list[_SpeculationRun]] = {name: [] for name in ways}
        for number, order in enumerate(alternating(list(ways), rounds + 1)):
            requests = _rows(engine, text, number, num_rows)
            for name in order:
                progress(f"{batch} at once: {'warm-up' if number == 0 else f'round {number} of {rounds}'}, {name}")
                engine.forget()
                engine.draft_as(ways[name])
                runs[name].append(_run(engine, requests))
        return (
            BatchSpeculation(batch, num_rows, tuple(_way(name, runs[name], runs[PLAIN], strict) for name in ways)),
            str(engine.resolved["dtype"]),
        )


def _draftings(engine: Engine, max_drafts: int) -> dict[str, SpecDecoder | None]:
    """Return the drafts of each mode.

    Each mode has its own n-gram lookup, since lookups learn. The draft model is shared, since it does not.
    """
    assert engine.spec_decoder is not None
    proposer, scheduler = engine.spec_decoder.proposer, engine.scheduler
    forced, lookup = NgramProposer(engine.table, max_drafts), NgramProposer(engine.table, max_drafts)
    forced.warm_up()
    modes = {
        PLAIN: None,
        AUTO: SpecDecoder(lookup, MeasuredDrafts(max_drafts), scheduler),
        AGAIN: None,
        NGRAM: SpecDecoder(forced, FixedDrafts(), scheduler),
    }
    has_model = not isinstance(proposer, NgramProposer)
    return modes | {DRAFT: SpecDecoder(proposer, FixedDrafts(), scheduler)} if has_model else modes


def _rows(engine: Engine, text: str, number: int, num_rows: int) -> list[Request]:
    """Return the rows of one round. Each round has other rows, unless there are too few paragraphs."""
    if text in INSTRUCTIONS:
        paragraphs = itertools.cycle(_paragraphs())
        chosen = itertools.islice(paragraphs, number * num_rows, (number + 1) * num_rows)
        chats = [[{"role": "user", "content": INSTRUCTIONS[text].format(paragraph)}] for paragraph in chosen]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS)
        return [Request(i, engine.tokenizer.encode_chat(chat), params) for i, chat in enumerate(chats)]
    index = itertools.count(1000 * number * num_rows)
    params, requests = SamplingParams(max_tokens=OUTPUT_TOKENS), []
    while len(requests) < num_rows:
        report = make_report("job", next(index))
        prompt = report.prompt
        if text == "extractive":
            prompt = f"{prompt} {report.summary}\n\n{prompt}"
        tokens = engine.tokenizer.encode(prompt)
        if len(tokens) + OUTPUT_TOKENS <= engine.max_model_len:  # some reports are too long to repeat
            requests.append(Request(len(requests), tokens, params))
    return requests


def _paragraphs() -> list[str]:
    """Return paragraphs of the documentation, in an order that mixes the pages."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(Path("docs").glob("*.md"))]
    found = [part for page in pages for part in page.split("\n\n") if part[0] not in "#|`!<"]
    low, high = PARAGRAPH_CHARS
    Random(0).shuffle(found)
    return [part for part in found if low <= len(part) <= high]


@dataclass(frozen=True)
class _SpeculationRun:
    seconds: float
    tail_s: float
    tokens: list[list[int]]
    stats: EngineStats  # of this run only


def _run(engine: Engine, requests: Sequence[Request]) -> _SpeculationRun:
    before = replace(engine.stats)
    tokens: list[list[int]] = [[] for _ in requests]
    for request in requests:
        engine.add(request)
    begun = perf_counter()
    tail_from: float | None = None
    while engine.has_unfinished:
        for completion in engine.step():
            if completion.error is not None:
                raise PipelineError(f"row {completion.row_id} failed: {completion.error_message}")
            assert isinstance(completion.row_id, int)
            tokens[completion.row_id] = completion.token_ids
        if tail_from is None and not engine.scheduler.waiting:
            tail_from = perf_counter()
    ended = perf_counter()
    return _SpeculationRun(ended - begun, ended - (tail_from or begun), tokens, engine.stats.since(before))


def _way(name: str, runs: list[_SpeculationRun], plain: list[_SpeculationRun], strict: bool) -> Way:
    """Combine the runs of one mode, except the first, which is the warm-up."""
    counted = runs[1:]
    pairs = [(a, b) for ours, theirs in zip(counted, plain[1:]) for a, b in zip(ours.tokens, theirs.tokens)]
    equal = sum(a == b for a, b in pairs)
    if strict and equal < MIN_EQUAL * len(pairs):
        raise PipelineError(f"{name}: {len(pairs) - equal} of {len(pairs)} completions differ from plain decoding")

    def total(counter: str) -> int:
        return sum(getattr(run.stats, counter) for run in counted)

    drafted = sum(sum(run.stats.drafted_by_position) for run in counted)
    accepted = sum(sum(run.stats.accepted_by_position) for run in counted)
    return Way(
        name,
        tuple(run.seconds for run in counted),
        tuple(run.tail_s for run in counted),
        tokens=sum(len(tokens) for run in counted for tokens in run.tokens),
        tokens_per_step=total("generated_tokens") / max(total("batch_sum"), 1),
        draft_steps=total("num_draft_steps") / max(total("num_steps"), 1),
        acceptance=accepted / drafted if drafted else 0.0,
        equal=equal,
    )


@script(__doc__)
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="Target model.")
@click.option("--draft", default="demo:draft", show_default=True, metavar="PATH", help="Draft model, or none.")
@click.option("--text", type=click.Choice(tuple(TEXTS)), default="reports", show_default=True,
              help="Rows of the demonstration job, rows whose prompt contains the answer, or chats.")  # fmt: skip
@click.option("--batch-sizes", metavar="N,N", default="1,8,32,128", show_default=True, callback=parse_sizes,
              help="Rows that run at once.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), help="Rows of a round; default: twice the batch size, at least 32.")
@click.option("--max-draft-tokens", type=click.IntRange(1, 32), default=6, show_default=True,
              help="Maximum draft tokens of a row in one step.")  # fmt: skip
@shared_options(rounds=3, dtype="auto", threads=None)
@json_flag
def main(as_json: bool, **options: Any) -> None:
    found = bench_speculation(**options)
    report("speculation", asdict(found), found.to_lines(), as_json)


if __name__ == "__main__":
    main()
