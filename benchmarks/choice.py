"""Compare labels chosen by task `choice` with generated labels, on the same prompts and engine, in turn.

    python -m benchmarks.choice
    python -m benchmarks.choice --rows 64 --own-tokens 100 --json

    choose                      the probability of every label, by one pass over the prompt
    generate one of the labels  `structured_outputs.choice`, greedy: one of the labels, in any tokenization
    generate freely             unconstrained tokens, one more than the longest label has

All prompts share a solved example at the beginning, and ask about a few sentences of a report.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import click

from benchmarks.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from benchmarks.script import json_flag, progress, report, script, shared_options
from benchmarks.shapes import bench_model
from pipeline.demo.reports import make_report
from pipeline.demo.words import ACTIONS, DEVICES, FAULTS
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.reading.label_tree import LabelTree
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.tasks import Choice
from pipeline.errors import PipelineError
from pipeline.tokenization.labels import encode_labels

CHOOSE, CONSTRAINED, FREE = "choose", "generate one of the labels", "generate freely"
NUM_LABELS = 5
LABELS = {
    "one word": [f" {device}" for device in DEVICES[:NUM_LABELS]],
    "some words": [f" {fault}" for fault in FAULTS[:NUM_LABELS]],
    "a phrase": [f" {action}, then {ACTIONS[-1 - n]}" for n, action in enumerate(ACTIONS[:NUM_LABELS])],
}


class Prompts:
    """Prompts of a shared example, the first tokens of a report, and a question."""

    def __init__(self, engine: Engine, rows: int, own_tokens: int) -> None:
        self._encode, self._rows = engine.tokenizer.encode, rows
        solved = make_report("train", 0)
        self._head = self._encode(f"{solved.text}\nWhich of these fits?{LABELS['one word'][0]}\n\n")
        self._question = self._encode("\nWhich of these fits?")
        self._num_text = max(own_tokens - len(self._question), 1)

    def round(self, number: int) -> list[list[int]]:
        texts = (make_report("job", number * self._rows + row).text for row in range(self._rows))
        return [[*self._head, *self._encode(text)[: self._num_text], *self._question] for text in texts]


def measure(engine: Engine, prompts: Prompts, name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one set of labels. label_tokens: of the longest label. computed_tokens: of a round."""
    texts = LABELS[name]
    labels = tuple(encode_labels(engine.tokenizer, prompts.round(0)[0], texts))
    num_label_tokens = LabelTree.from_labels(labels).num_computed  # per row; not counted by the engine
    longest = max(map(len, labels))
    free = SamplingParams(max_tokens=longest + 1, ignore_eos=True)
    constrained = SamplingParams(max_tokens=64, structured_outputs={"choice": texts})  # type: ignore[arg-type]
    ways: dict[str, Callable[[int, list[int]], Request]] = {
        CHOOSE: lambda row, ids: Request(row, ids, SamplingParams(), task=Choice(labels)),
        CONSTRAINED: lambda row, ids: Request(row, ids, constrained),
        FREE: lambda row, ids: Request(row, ids, free),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    computed: dict[str, int] = {}
    for number, order in enumerate(alternating(list(ways), rounds)):
        for way in order:
            progress(f"{name}, round {number + 1} of {rounds}: {way}")
            requests = [ways[way](row, ids) for row, ids in enumerate(prompts.round(number))]
            seconds, computed[way], done = run(engine, requests)
            computed[way] += len(requests) * num_label_tokens if way == CHOOSE else 0
            if way == CONSTRAINED and any(completion.text not in texts for completion in done):
                raise PipelineError(f"{way}: a row's completion is not a label")
            rates[way].append(len(requests) / seconds)
    ratios = {way: asdict(ratio(rates[CHOOSE], rates[way])) for way in (CONSTRAINED, FREE)}
    figures = {"name": name, "label_tokens": longest, "rows_per_s": rates, "computed_tokens": computed}
    return figures | {"ratios": ratios}


def run(engine: Engine, requests: Sequence[Request]) -> tuple[float, int, list[Completion]]:
    """Run one round with an empty prefix cache. Returns its seconds, computed tokens and completions."""
    engine.forget()
    before, began = replace(engine.stats), perf_counter()
    done = list(engine.stream(requests))
    seconds, grew = perf_counter() - began, engine.stats.since(before)
    if failed := [completion.error_message for completion in done if completion.error is not None]:
        raise PipelineError(f"a request failed: {failed[0]}")
    return seconds, grew.prompt_tokens - grew.cached_tokens + grew.generated_tokens, done


def bench_choice(
    model: str, rows: int, own_tokens: int, rounds: int, dtype: str, threads: int | None, folder: str | None
) -> dict[str, Any]:
    """Return the figures. own_tokens: tokens of each prompt after the shared prefix.

    Raises PipelineError when a row fails, or when constrained generation returns no label.
    """
    use_threads(threads)
    machine, loaded = machine_facts(), bench_model(model, folder, progress)
    with Engine(
        EngineConfig(str(loaded.folder), dtype=dtype, num_threads=threads, speculation="off"), progress
    ) as engine:
        engine.warm_up()
        prompts = Prompts(engine, rows, own_tokens)
        return {
            "description": loaded.description,
            "rows": rows,
            "prompt_tokens": sum(map(len, prompts.round(0))),
            "own_tokens": rows * own_tokens,
            "dtype": str(engine.resolved["dtype"]),
            "rounds": rounds,
            "sets": [measure(engine, prompts, name, rounds) for name in LABELS],
            "machine": machine,
        }


def to_lines(figures: dict[str, Any]) -> list[str]:
    rows = []
    for each in figures["sets"]:
        for way, rates in each["rows_per_s"].items():
            by = None if way == CHOOSE else ratio(each["rows_per_s"][CHOOSE], rates).to_text()
            label = f"{each['name']}, {each['label_tokens']} tokens"
            rows.append((label, way, Spread.from_values(rates).to_text(0), by, each["computed_tokens"][way]))
    return [
        f"{NUM_LABELS} labels, chosen or generated: {figures['description']}, {figures['dtype']}.",
        f"A round: {figures['rows']} rows, {figures['prompt_tokens']:,} prompt tokens, {figures['own_tokens']:,} of "
        "them not shared. Rows per second.",
        f"Median of {figures['rounds']} rounds (lowest to highest), in alternating order, with new prompts each round.",
        facts_to_text(figures["machine"]),
        "",
        *table("labels <22 | way <28 | rows/s >25 | choose is faster by >25 | tokens computed >15,", rows),
    ]


@script(__doc__)
@shared_options(model="demo:target-awq", rows=256)
@click.option("--own-tokens", type=click.IntRange(min=1), default=24, show_default=True,
              help="Tokens of each prompt after the shared prefix.")  # fmt: skip
@shared_options(rounds=3, dtype="auto", threads=None, folder=None)
@json_flag
def main(as_json: bool, **options: Any) -> None:
    figures = bench_choice(**options)
    report("choice", figures, to_lines(figures), as_json)


if __name__ == "__main__":
    main()
