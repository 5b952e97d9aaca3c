"""Labels told by `choice` against labels that are generated: the same prompts, the same engine, in turn.

    choose                      the probability of every label, by one pass over the prompt
    generate one of the labels  `structured_outputs.choice`, greedy: a label comes out, in whatever tokens spell it
    generate freely             as many tokens as the longest label has and one that ends it, whatever they are

Prompts begin with the same solved example, whose blocks are shared, and ask about some sentences of a report.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from pipeline.bench.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from pipeline.bench.shapes import bench_model
from pipeline.demo.reports import make_report
from pipeline.demo.words import ACTIONS, DEVICES, FAULTS
from pipeline.engine.engine import Engine
from pipeline.engine.params import Completion, EngineConfig, Request, SamplingParams
from pipeline.engine.reading.label_tree import LabelTree
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


@dataclass(frozen=True)
class LabelSet:
    """Of one set of labels, over the rounds. label_tokens: of the longest. computed_tokens: of a round, by way."""

    name: str
    label_tokens: int
    rows_per_s: dict[str, tuple[float, ...]]
    computed_tokens: dict[str, int]

    def by(self, other: str) -> Spread:
        return ratio(self.rows_per_s[CHOOSE], self.rows_per_s[other])


@dataclass(frozen=True)
class ChoiceBench:
    about: str
    rows: int
    prompt_tokens: int
    own_tokens: int
    dtype: str
    rounds: int
    sets: tuple[LabelSet, ...]
    machine: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        sets = [
            asdict(one) | {"ratios": {way: asdict(one.by(way)) for way in (CONSTRAINED, FREE)}} for one in self.sets
        ]
        return {"bench": "choice", **asdict(self), "sets": sets}

    def to_text(self) -> str:
        lines = [
            f"{NUM_LABELS} labels, told or generated: {self.about}, {self.dtype}.",
            f"A round: {self.rows} rows, {self.prompt_tokens:,} tokens of prompts, {self.own_tokens:,} of them not "
            "shared. Rows per second.",
            f"Median of {self.rounds} rounds (lowest to highest), in alternating order, new prompts each round.",
            facts_to_text(self.machine),
            "",
        ]
        rows = []
        for one in self.sets:
            for way, rates in one.rows_per_s.items():
                by = None if way == CHOOSE else one.by(way).to_text()
                rows.append(
                    (f"{one.name}, {one.label_tokens} tokens", way, Spread.of(rates).to_text(0), by,
                     one.computed_tokens[way])
                )  # fmt: skip
        columns = "labels <22 | way <28 | rows/s >25 | choose is faster by >25 | tokens computed >15,"
        return "\n".join(lines + table(columns, rows))


def bench_choice(
    model: str = "demo:target-awq",
    rows: int = 256,
    own_tokens: int = 24,
    rounds: int = 3,
    dtype: str = "auto",
    threads: int | None = None,
    folder: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ChoiceBench:
    """own_tokens: of each prompt, those that come after what all begin with. Raises PipelineError when a row fails, or
    has no label where one is to be generated."""
    assert min(rows, own_tokens, rounds) >= 1
    use_threads(threads)
    machine, found = machine_facts(), bench_model(model, folder, say)
    say("loading the model")
    with Engine(EngineConfig(str(found.folder), dtype=dtype, num_threads=threads)) as engine:
        engine.warm_up()
        prompts = _Prompts(engine, rows, own_tokens)
        sets = tuple(_measured(engine, prompts, name, rounds, say) for name in LABELS)
        whole = sum(map(len, prompts.round(0)))
        resolved = str(engine.resolved["dtype"])
    return ChoiceBench(found.about, rows, whole, rows * own_tokens, resolved, rounds, sets, machine)


class _Prompts:
    """The same head, then the first tokens of a report, then the question."""

    def __init__(self, engine: Engine, rows: int, own_tokens: int) -> None:
        self._encode, self._rows = engine.tokenizer.encode, rows
        solved = make_report("train", 0)
        self._head = self._encode(f"{solved.text}\nWhich of these fits?{LABELS['one word'][0]}\n\n")
        self._question = self._encode("\nWhich of these fits?")
        self._num_text = max(own_tokens - len(self._question), 1)

    def round(self, number: int) -> list[list[int]]:
        texts = (make_report("job", number * self._rows + row).text for row in range(self._rows))
        return [[*self._head, *self._encode(text)[: self._num_text], *self._question] for text in texts]


def _measured(engine: Engine, prompts: _Prompts, name: str, rounds: int, say: Callable[[str], None]) -> LabelSet:
    texts = LABELS[name]
    labels = tuple(encode_labels(engine.tokenizer, prompts.round(0)[0], texts))
    after = LabelTree.of(labels).num_computed  # of each row, which the engine counts as no prompt's
    longest = max(map(len, labels))
    free = SamplingParams(max_tokens=longest + 1, ignore_eos=True)
    held = SamplingParams(max_tokens=64, structured_outputs={"choice": texts})  # type: ignore[arg-type]
    ways: dict[str, Callable[[int, list[int]], Request]] = {
        CHOOSE: lambda row, ids: Request(row, ids, SamplingParams(), task=Choice(labels)),
        CONSTRAINED: lambda row, ids: Request(row, ids, held),
        FREE: lambda row, ids: Request(row, ids, free),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    computed: dict[str, int] = {}
    for number, order in enumerate(alternating(list(ways), rounds)):
        for way in order:
            say(f"{name}, round {number + 1} of {rounds}: {way}")
            requests = [ways[way](row, ids) for row, ids in enumerate(prompts.round(number))]
            seconds, computed[way], done = _run(engine, requests)
            computed[way] += len(requests) * after if way == CHOOSE else 0
            if way == CONSTRAINED and any(completion.text not in texts for completion in done):
                raise PipelineError(f"{way}: a row has no label")
            rates[way].append(len(requests) / seconds)
    return LabelSet(name, longest, {way: tuple(each) for way, each in rates.items()}, computed)


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[float, int, list[Completion]]:
    """One round on an engine that remembers nothing: its seconds, and the tokens that it computed."""
    engine.forget()
    before, began = replace(engine.stats), perf_counter()
    done = list(engine.stream(requests))
    seconds, grew = perf_counter() - began, engine.stats.since(before)
    wrong = next((completion for completion in done if completion.error is not None), None)
    if wrong is not None:
        raise PipelineError(f"a request failed: {wrong.error_message}")
    return seconds, grew.prompt_tokens - grew.cached_tokens + grew.generated_tokens, done
