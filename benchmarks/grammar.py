"""Compare rows with a grammar and the same rows without one, at equal work.

    python -m benchmarks.grammar
    python -m benchmarks.grammar --rows 8 --rounds 5 --dtype float32

All modes run on one engine with the same prompts, and in each mode a row generates the number of tokens of its JSON.
`any text` uses a regular expression that forbids only the end, so it differs from `free` by the grammar's work alone.
`json` also has tokens that its schema forces, which need no step. Modes alternate within a round, and each round has
other rows. Free rows run twice in a round as a control: without noise their ratio is 1. Nothing is drafted, which would
save different numbers of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import click

from benchmarks.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from benchmarks.script import json_flag, progress, report, script, shared_options
from pipeline.checkpoints.locate import locate_model
from pipeline.demo.reports import make_report
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.stats import EngineStats
from pipeline.errors import PipelineError

FREE, ANY, JSON, AGAIN = "free", "any text", "json", "free again"
MAX_TOKENS = 160
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
GRAMMARS: dict[str, Any] = {FREE: None, ANY: {"regex": "(?s:.{10000,})"}, JSON: {"json": SCHEMA}, AGAIN: None}
# Sums of `EngineStats` over the counted rounds.
COUNTERS = {"tokens": "generated_tokens", "steps": "num_steps"} | {
    name: name for name in ("masked_tokens", "forced_tokens", "filled_masks", "mask_us")
}


@dataclass(frozen=True)
class Run:
    seconds: float
    lengths: list[int]
    stats: EngineStats  # of this run only


def run(engine: Engine, name: str, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Run:
    """Run one round of one mode. Raises PipelineError when a row fails."""
    engine.forget()
    before, found = replace(engine.stats), [0] * len(prompts)
    for row, (prompt, length) in enumerate(zip(prompts, lengths)):
        params = SamplingParams(max_tokens=length, ignore_eos=True, structured_outputs=GRAMMARS[name])
        engine.add(Request(row, prompt, params))
    began = perf_counter()
    while engine.has_unfinished:
        for completion in engine.step():
            if completion.error is not None:
                raise PipelineError(f"row {completion.row_id} failed: {completion.error_message}")
            assert isinstance(completion.row_id, int)
            found[completion.row_id] = len(completion.token_ids)
    return Run(perf_counter() - began, found, engine.stats.since(before))


def bench_grammar(model: str, rows: int, rounds: int, dtype: str, threads: int | None) -> dict[str, Any]:
    """Return the figures. Raises PipelineError when a row fails or when modes did unequal work."""
    use_threads(threads)
    machine = machine_facts()
    folder = str(locate_model(model))
    options = EngineConfig(folder, dtype=dtype, max_num_seqs=rows, num_threads=threads, speculation="off")
    runs: dict[str, list[Run]] = {name: [] for name in GRAMMARS}
    with Engine(options, progress) as engine:
        engine.warm_up()
        resolved = str(engine.resolved["dtype"])
        for number, order in enumerate(alternating(list(GRAMMARS), rounds + 1)):
            progress("warm-up" if number == 0 else f"round {number} of {rounds}")
            prompts = [engine.tokenizer.encode(make_report("job", rows * number + row).prompt) for row in range(rows)]
            lengths = run(engine, JSON, prompts, [MAX_TOKENS] * rows).lengths
            for name in order:
                done = run(engine, name, prompts, lengths)
                if resolved == "float32" and done.lengths != lengths:
                    raise PipelineError(f"{name}: rows of {done.lengths} tokens; expected {lengths}")
                if number:
                    runs[name].append(done)
    found = [
        {"name": name, "seconds": [each.seconds for each in done]}
        | {key: sum(getattr(each.stats, counter) for each in done) for key, counter in COUNTERS.items()}
        for name, done in runs.items()
    ]
    return {"model": model, "dtype": resolved, "rows": rows, "rounds": rounds, "ways": found, "machine": machine}


def to_lines(figures: dict[str, Any]) -> list[str]:
    free, rounds, rows = figures["ways"][0], figures["rounds"], []
    for way in figures["ways"]:
        masked, filled = way["masked_tokens"], way["filled_masks"]
        rows.append(
            (
                way["name"],
                Spread.from_values([way["tokens"] / rounds / s for s in way["seconds"]]).median,
                ratio(free["seconds"], way["seconds"]).to_text(3),
                way["steps"] / rounds,
                way["forced_tokens"] / way["tokens"],
                filled / masked if masked else None,
                way["mask_us"] / filled if filled else None,
            )
        )
    columns = "mode <12 | tokens/s >10,.0f | relative to free >24 | steps >8,.0f | forced >8.1% | masks filled >14.1%"
    return [
        f"{figures['model']}, {figures['dtype']}: {figures['rows']} rows at once, greedy, each with the number of "
        "tokens of its JSON in every mode.",
        facts_to_text(figures["machine"]),
        f"Rounds: {rounds}, in alternating order, with other rows; medians (lowest to highest); ratios within a round.",
        "",
        *table(f"{columns} | us a mask >11.1f", rows),
        "",
        "relative to free: speedup. forced: share of tokens that the schema determines, which need no step.",
        "masks filled: share of sampled tokens; for the others the model's best token was allowed.",
    ]


@script(__doc__)
@click.option("--model", default="demo:target-awq", show_default=True, metavar="PATH", help="A served model.")
@shared_options(rows=64, rounds=15, dtype="auto", threads=None)
@json_flag
def main(as_json: bool, **options: Any) -> None:
    figures = bench_grammar(**options)
    report("grammar", figures, to_lines(figures), as_json)


if __name__ == "__main__":
    main()
