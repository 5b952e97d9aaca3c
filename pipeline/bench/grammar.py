"""What structured outputs cost: rows that keep to a grammar against the same rows without one, at equal work.

Every way is the same engine with the same prompts, and each row generates as many tokens in each way: as many as its
JSON has. `any text` has a regular expression that only forbids to end, so all that differs from `free` is the work of
the grammar. `json` also has tokens that its schema forces, which take no step of their own. Ways alternate within a
round, and all rounds have other rows. Free rows are run twice in a round, as a control: the ratio of the two would be 1
on a machine of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from pipeline.bench.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from pipeline.checkpoints.locate import locate_model
from pipeline.demo.reports import make_report
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig, Request, SamplingParams
from pipeline.engine.stats import EngineStats
from pipeline.errors import ConfigError, PipelineError

FREE, ANY, JSON, AGAIN = "free", "any text", "json", "free again"
MOST_TOKENS = 160
SCHEMA = {  # as in jobs/extract-json.yaml
    "type": "object",
    "properties": {
        "date": {"type": "string", "pattern": "^[A-Z][a-z]{2,8} [1-3]?[0-9]$"},
        "site": {"type": "string", "maxLength": 30},
        "technician": {"type": "string", "maxLength": 30},
        "hours": {"type": "number", "minimum": 0, "maximum": 100},
        "replaced_part": {"type": ["string", "null"], "maxLength": 30},
    },
    "required": ["date", "site", "technician", "hours", "replaced_part"],
    "additionalProperties": False,
}
_GRAMMARS: dict[str, dict[str, Any] | None] = {
    FREE: None,
    ANY: {"regex": "(?s:.{10000,})"},
    JSON: {"json": SCHEMA},
    AGAIN: None,
}


@dataclass(frozen=True)
class GrammarWay:
    """One way over the counted rounds. The counts are sums over them: see `EngineStats`."""

    name: str
    seconds: tuple[float, ...]
    tokens: int
    steps: int
    masked_tokens: int
    forced_tokens: int
    filled_masks: int
    mask_us: int


@dataclass(frozen=True)
class GrammarBench:
    model: str
    dtype: str
    rows: int
    rounds: int
    ways: tuple[GrammarWay, ...]
    machine: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "grammar", **asdict(self)}

    def to_text(self) -> str:
        free, rows = self.ways[0], []
        for way in self.ways:
            rows.append(
                (
                    way.name,
                    Spread.of([way.tokens / self.rounds / s for s in way.seconds]).median,
                    ratio(free.seconds, way.seconds).to_text(3),
                    way.steps / self.rounds,
                    way.forced_tokens / way.tokens,
                    way.filled_masks / way.masked_tokens if way.masked_tokens else None,
                    way.mask_us / way.filled_masks if way.filled_masks else None,
                )
            )
        columns = (
            "way <12 | tokens/s >10,.0f | by free >24 | steps >8,.0f | forced >8.1%"
            " | masks filled >14.1% | us a mask >11.1f"
        )
        return "\n".join(
            [
                f"{self.model}, {self.dtype}: {self.rows} rows at once, greedy, each with as many tokens in every way "
                "as its JSON has.",
                facts_to_text(self.machine),
                f"Rounds: {self.rounds}, in alternating order, other rows each; medians (least to most), ratios within "
                "a round.",
                "",
                *table(columns, rows),
                "",
                "by free: how many times as fast as without a grammar. forced: of the tokens, those that the schema "
                "left no choice of; they take no step.",
                "masks filled: of the tokens that were chosen; the others were the model's best and allowed.",
            ]
        )


def bench_grammar(
    model: str = "demo:target-awq",
    rows: int = 64,
    rounds: int = 15,
    dtype: str = "auto",
    threads: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> GrammarBench:
    """Raises PipelineError when a row fails or when ways did not do equal work."""
    if rows < 1 or rounds < 1:
        raise ConfigError(f"{rows} rows, {rounds} rounds: expected at least 1 of each")
    use_threads(threads)
    machine = machine_facts()
    options = EngineConfig(str(locate_model(model)), dtype=dtype, max_num_seqs=rows, num_threads=threads)
    runs: dict[str, list[_Run]] = {name: [] for name in _GRAMMARS}
    say("loading")
    with Engine(options) as engine:
        engine.warm_up()
        resolved = str(engine.resolved["dtype"])
        for number, order in enumerate(alternating(list(_GRAMMARS), rounds + 1)):
            say("warm-up" if number == 0 else f"round {number} of {rounds}")
            prompts = [engine.tokenizer.encode(make_report("job", rows * number + row).prompt) for row in range(rows)]
            lengths = _run(engine, JSON, prompts, [MOST_TOKENS] * rows).lengths
            for name in order:
                run = _run(engine, name, prompts, lengths)
                if resolved == "float32" and run.lengths != lengths:
                    raise PipelineError(f"{name}: rows of {run.lengths} tokens; expected {lengths}")
                if number:
                    runs[name].append(run)
    return GrammarBench(model, resolved, rows, rounds, tuple(_way(name, runs[name]) for name in _GRAMMARS), machine)


@dataclass(frozen=True)
class _Run:
    seconds: float
    lengths: list[int]
    stats: EngineStats  # of this run alone


def _run(engine: Engine, name: str, prompts: Sequence[list[int]], lengths: Sequence[int]) -> _Run:
    engine.forget()
    before, found = replace(engine.stats), [0] * len(prompts)
    for row, (prompt, length) in enumerate(zip(prompts, lengths)):
        params = SamplingParams(max_tokens=length, ignore_eos=True, structured_outputs=_GRAMMARS[name])  # type: ignore[arg-type]
        engine.add(Request(row, prompt, params))
    begun = perf_counter()
    while engine.has_unfinished:
        for completion in engine.step():
            if completion.error is not None:
                raise PipelineError(f"row {completion.row_id} failed: {completion.error_message}")
            assert isinstance(completion.row_id, int)
            found[completion.row_id] = len(completion.token_ids)
    seconds = perf_counter() - begun
    return _Run(seconds, found, engine.stats.since(before))


def _way(name: str, runs: Sequence[_Run]) -> GrammarWay:
    def total(counter: str) -> int:
        return sum(getattr(run.stats, counter) for run in runs)

    return GrammarWay(
        name,
        tuple(run.seconds for run in runs),
        tokens=total("generated_tokens"),
        steps=total("num_steps"),
        masked_tokens=total("masked_tokens"),
        forced_tokens=total("forced_tokens"),
        filled_masks=total("filled_masks"),
        mask_us=total("mask_us"),
    )
