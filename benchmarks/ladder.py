"""Compare batching strategies: one request at a time, static, dynamic and continuous batching, and further features.

    python -m benchmarks.ladder
    python -m benchmarks.ladder --model qwen3-0.6b --requests 16 --rounds 1

Every rung is this engine on the same prompts and generates the same tokens, except for the last one (other numerics).
Rungs differ in the requests that the engine has at a time. All have the same memory for weights and KV cache, with
blocks for `--batch` requests of the longest length:

    one request at a time     the next request begins when the last has finished
    static batches            `--batch` requests with room for the longest; the next batch begins when all have finished
    dynamic batches           sorted by length; batches of the size that fits, given the longest request of the batch
    continuous batching       a request begins as soon as its expected blocks are free
    + prefix sharing          the common prefix of prompts is computed and stored once
    + int4 weights            the same values in 4 bits, if supported; the KV cache uses the memory saved
    + int8 activations        rounded inputs of linears, on CPUs with int8 products: tokens may differ

Static and dynamic batches are not padded here, so the first rungs are faster than in an engine that pads. Sorting uses
prompt and output lengths, which a real job does not know, so the dynamic rung is an upper bound.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from benchmarks.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from benchmarks.request_sets import workload
from benchmarks.script import json_flag, progress, report, script, shared_options
from benchmarks.shapes import SHAPES, bench_model, dequantized
from pipeline.demo.reports import PROMPT_TEMPLATE, make_report
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.startup.memory import weight_bytes
from pipeline.engine.startup.resolve import resolve
from pipeline.errors import PipelineError
from pipeline.kernels.select import keep_cpu_kernels_in, select_kernels
from pipeline.machine.caches import cpu_kernel_folder
from pipeline.model.config import read_config
from pipeline.tokenization.tokenizer import Tokenizer
from pipeline.weights.awq import AwqFormat

ONE, STATIC, DYNAMIC, CONTINUOUS = (
    "one request at a time", "static batches", "dynamic batches, sorted", "continuous batching",
)  # fmt: skip
SHARING, INT4, ROUNDED = "+ prefix sharing", "+ int4 weights", "+ int8 activations"
BLOCK_SIZE = 16
SLOTS_PER_BATCH = 8  # continuous batching may run this multiple of `batch` requests, if they fit the memory

Drive = Callable[[Engine, list[Request]], Iterator[Completion]]
Way = tuple[Engine, bool, Drive]  # the bool: whether prompts share prefixes


@dataclass(frozen=True)
class Rung:
    """Result of one rung over all rounds.

    at_once: mean sequences in a step. computed_tokens: of a round's prompts. equal: completions equal to the first
    rung's, over all rounds.
    """

    name: str
    tokens_per_s: tuple[float, ...]
    at_once: float
    computed_tokens: int
    equal: int


@dataclass(frozen=True)
class Run:
    """Result of one round of one rung."""

    tokens_per_s: float
    computed_tokens: int
    at_once: float
    token_ids: dict[object, list[int]]


class Prompts:
    """Reports to summarize, after a shared solved example. Each request generates its own number of tokens."""

    def __init__(self, folder: Path, requests: int, output_tokens: tuple[int, int]) -> None:
        self._tokenizer = Tokenizer.from_folder(str(folder))
        solved = make_report("train", 0, fillers=False)
        self._head = f"{solved.prompt} {solved.summary}\n\n"
        self.outputs = [n.output for n in workload(requests, 1, output_tokens).lengths()]
        first, second = (self._tokenizer.encode(self._head + PROMPT_TEMPLATE.format(report=text)) for text in "AB")
        self.num_shared = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)

    def round(self, number: int) -> list[Request]:
        first = number * len(self.outputs)
        texts = [self._head + make_report("job", first + i).prompt for i in range(len(self.outputs))]
        return [
            Request(i, ids, SamplingParams(max_tokens=output, ignore_eos=True))
            for i, (ids, output) in enumerate(zip(self._tokenizer.encode_batch(texts), self.outputs))
        ]


def ways(folder: Path, dtype: str, batch: int, longest: int, threads: int | None) -> tuple[dict[str, Way], int, str]:
    """Return the rungs that this machine supports, the tokens of the KV cache, and the dtype."""
    config = read_config(folder)
    resolved = resolve(EngineConfig(str(folder), dtype=dtype), config)
    name = str(resolved.dtype).removeprefix("torch.")
    kernels = select_kernels(resolved.device, resolved.dtype)
    has_int4 = isinstance(config.quantization, AwqFormat) and "int4" in kernels.backends["linear"]
    plain = dequantized(folder, resolved.dtype, progress) if has_int4 else folder
    kv_tokens = batch * _in_blocks(longest)
    kv_bytes = kv_tokens * config.kv_bytes_per_token(resolved.kv_dtype)

    def load(path: Path, saved_bytes: int = 0, activation_dtype: str = "auto") -> Engine:
        progress(f"loading {path.name}")
        engine = Engine(
            EngineConfig(
                str(path),
                dtype=name,
                activation_dtype=activation_dtype,
                max_model_len=longest,
                max_num_seqs=SLOTS_PER_BATCH * batch,
                block_size=BLOCK_SIZE,
                kv_cache_memory_bytes=kv_bytes + saved_bytes,
                num_threads=threads,
            )
        )
        engine.warm_up()
        return engine

    engine = load(plain)
    found: dict[str, Way] = {
        ONE: (engine, False, lambda e, r: waves(e, [[one] for one in r])),
        STATIC: (engine, False, lambda e, r: waves(e, [r[i : i + batch] for i in range(0, len(r), batch)])),
        DYNAMIC: (engine, False, lambda e, r: waves(e, by_length(r, kv_tokens))),
        CONTINUOUS: (engine, False, lambda e, r: waves(e, [r])),
        SHARING: (engine, True, lambda e, r: waves(e, [r])),
    }
    if has_int4:
        sizes = [weight_bytes(read_config(each), resolved.device, resolved.dtype) for each in (plain, folder)]
        found[INT4] = (load(folder, sizes[0] - sizes[1]), True, lambda e, r: waves(e, [r]))
        rounded = kernels.rounded.get("int8")
        if rounded is not None and "products of bytes" in rounded.backends:
            found[ROUNDED] = (load(folder, sizes[0] - sizes[1], "int8"), True, lambda e, r: waves(e, [r]))
    return found, kv_tokens, name


def waves(engine: Engine, each: Sequence[list[Request]]) -> Iterator[Completion]:
    """Begin each wave when the previous one has finished."""
    for wave in each:
        for request in wave:
            engine.add(request)
        while engine.has_unfinished:
            yield from engine.step()


def by_length(requests: list[Request], kv_tokens: int) -> list[list[Request]]:
    """Return batches of descending length, each as large as the memory allows for its longest request."""
    left = sorted(requests, key=_length, reverse=True)
    batches = []
    while left:
        size = kv_tokens // _in_blocks(_length(left[0]))
        batches.append(left[:size])
        left = left[size:]
    return batches


def run(engine: Engine, shares: bool, drive: Drive, requests: list[Request]) -> Run:
    """Run one round of one rung with an empty prefix cache. Raises PipelineError when a request fails."""
    engine.scheduler.enable_prefix_caching = shares
    engine.forget()
    before, began = replace(engine.stats), perf_counter()
    done = list(drive(engine, requests))
    seconds, grew = perf_counter() - began, engine.stats.since(before)
    if failed := [each.error_message for each in done if each.error is not None]:
        raise PipelineError(f"a request failed: {failed[0]}")
    return Run(
        grew.generated_tokens / seconds,
        grew.prompt_tokens - grew.cached_tokens,
        grew.batch_sum / grew.num_steps,
        {each.row_id: each.token_ids for each in done},
    )


def rungs_of(runs: dict[str, list[Run]]) -> list[Rung]:
    found = []
    for name, of_way in runs.items():
        pairs = zip(of_way, runs[ONE], strict=True)
        equal = sum(own.token_ids[i] == ids for own, first in pairs for i, ids in first.token_ids.items())
        at_once = sum(each.at_once for each in of_way) / len(of_way)
        rates = tuple(each.tokens_per_s for each in of_way)
        found.append(Rung(name, rates, at_once, of_way[0].computed_tokens, equal))
    return found


def bench_ladder(
    model: str,
    requests: int,
    batch: int,
    rounds: int,
    output_tokens: tuple[int, int],
    dtype: str,
    threads: int | None,
    folder: str | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return figures and text. With an int4 checkpoint, all rungs use the values of its weights.

    Raises PipelineError when a rung's float32 tokens differ from the first rung's.
    """
    keep_cpu_kernels_in(cpu_kernel_folder(log=progress))
    use_threads(threads)
    machine = machine_facts()
    name = {"demo": "demo:target-awq"}.get(model, f"{model}-awq" if model in SHAPES else model)
    found = bench_model(name, folder, progress)
    prompts = Prompts(found.folder, requests, output_tokens)
    longest = max(_length(request) for number in range(rounds) for request in prompts.round(number))
    all_ways, kv_tokens, resolved = ways(found.folder, dtype, batch, longest, threads)
    runs: dict[str, list[Run]] = {way: [] for way in all_ways}
    for number, order in enumerate(alternating(list(all_ways), rounds)):
        for way in order:
            progress(f"round {number + 1} of {rounds}: {way}")
            runs[way].append(run(*all_ways[way], prompts.round(number)))
    rungs = rungs_of(runs)
    for rung in rungs:
        if resolved == "float32" and rung.name != ROUNDED and rung.equal < requests * rounds:
            raise PipelineError(f"{rung.name}: {requests * rounds - rung.equal} float32 completions differ from {ONE}")
    figures = {
        "description": found.description,
        "requests": requests,
        "batch": batch,
        "prompt_tokens": sum(len(each.prompt_token_ids) for each in prompts.round(0)),
        "shared_tokens": prompts.num_shared,
        "generated_tokens": sum(prompts.outputs),
        "kv_tokens": kv_tokens,
        "dtype": resolved,
        "rounds": rounds,
        "rungs": [asdict(rung) for rung in rungs],
        "machine": machine,
    }
    rows = []
    for before, rung in zip((None, *rungs), rungs):
        step = None if before is None else ratio(rung.tokens_per_s, before.tokens_per_s).to_text()
        first = ratio(rung.tokens_per_s, rungs[0].tokens_per_s).median
        speed = Spread.from_values(rung.tokens_per_s).to_text(0)
        rows.append((rung.name, speed, step, first, rung.at_once, rung.computed_tokens, rung.equal))
    columns = " <26 | tokens/s >25 | / previous rung >25 | / first >9.2f | at once >8.1f | prompt computed >16,"
    lines = [
        f"One engine with {len(rungs)} batching strategies: {found.description}, {resolved}.",
        f"A round: {requests} requests, {figures['prompt_tokens']:,} prompt tokens ({prompts.num_shared} of each "
        f"shared), {figures['generated_tokens']:,} generated, greedy. KV memory of {kv_tokens:,} tokens: "
        f"{batch} requests of the longest length.",
        f"Generated tokens per second: median of {rounds} rounds (lowest to highest), in alternating order, new "
        f"prompts each round. equal: completions equal to the first rung's, of {requests * rounds}.",
        facts_to_text(machine),
        "",
        *table(f"{columns} | equal >6,", rows),
    ]
    return figures, lines


def _length(request: Request) -> int:
    return len(request.prompt_token_ids) + request.params.max_tokens


def _in_blocks(tokens: int) -> int:
    """Round up to whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


@script(__doc__)
@shared_options(model="demo", requests=48)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Requests in a static batch.")
@shared_options(rounds=3, output_tokens="16-128", dtype="auto", threads=None, folder=None)
@json_flag
def main(as_json: bool, **options: Any) -> None:
    report("ladder", *bench_ladder(**options), as_json)


if __name__ == "__main__":
    main()
