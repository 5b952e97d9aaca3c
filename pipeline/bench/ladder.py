"""Why the engine is built as it is: one workload of ragged lengths, served in five ways and more, each a rung higher.

Every rung is this engine, on the same prompts, giving the same tokens, but for the last one (other numerics); what
changes is which requests it has at a time. All rungs have the same memory for weights and KV cache; those above the
first and below int8 weights have KV blocks for `batch` requests of the longest length:

    one request at a time     the next begins when the last has ended
    static batches            `batch` requests, each with room for the longest; the next when all of them have ended
    dynamic batches           sorted by length; as many as fit with room for the longest of their own batch
    continuous batching       a request begins as soon as blocks for what it is expected to need are free
    + prefix sharing          the prompts' common beginning is computed and held once
    + int8 weights            the same values in 8 bits, where they are served so; the memory saved goes to the KV cache
    + int4 weights            the same in 4 bits
    + int8 activations        inputs of linears rounded, where the processor has products of bytes: tokens may differ

Static and dynamic batches here pad nothing: a batch of this engine computes no token that nobody asked for, so the
first rungs are better than an engine that pads would make them. Sorting is by the prompt's and the wanted output's
length together, which a real job does not know: the dynamic rung is the best that one can do.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeline.bench.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from pipeline.bench.request_sets import workload
from pipeline.bench.shapes import SHAPES, bench_model, dequantized, in_int8
from pipeline.demo.reports import PROMPT_TEMPLATE, make_report
from pipeline.engine.engine import Engine
from pipeline.engine.params import Completion, EngineConfig, Request, SamplingParams
from pipeline.engine.startup.memory import weight_bytes
from pipeline.engine.startup.resolve import Resolved, resolve
from pipeline.errors import PipelineError
from pipeline.kernels.contract import Kernels
from pipeline.kernels.select import keep_cpu_kernels_in, select_kernels
from pipeline.machine.caches import cpu_kernel_folder
from pipeline.model.config import read_config
from pipeline.weights.awq import AwqFormat

ONE, STATIC, DYNAMIC, CONTINUOUS, SHARING, INT8, INT4, ROUNDED = (
    "one request at a time",
    "static batches",
    "dynamic batches, sorted",
    "continuous batching",
    "+ prefix sharing",
    "+ int8 weights",
    "+ int4 weights",
    "+ int8 activations",
)
BLOCK_SIZE = 16
SLOTS_PER_BATCH = 8  # continuous batching may have so many times `batch` requests at once, if the memory does

Drive = Callable[[Engine, list[Request]], Iterator[Completion]]
Way = tuple[Engine, bool, Drive]  # the bool: whether prompts share prefixes


@dataclass(frozen=True)
class Rung:
    """One way, over the rounds. `at_once`: sequences in a step, on average. `computed_tokens`: of a round's prompts."""

    name: str
    tokens_per_s: tuple[float, ...]
    at_once: float
    computed_tokens: int
    equal: int  # completions that are those of the first rung, over all rounds


@dataclass(frozen=True)
class LadderBench:
    about: str
    requests: int
    batch: int
    prompt_tokens: int
    shared_tokens: int
    generated_tokens: int
    kv_tokens: int
    dtype: str
    rounds: int
    rungs: tuple[Rung, ...]
    left_out: str  # why a rung is not there; empty when all are
    machine: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "ladder", **asdict(self)}

    def to_text(self) -> str:
        lines = [
            f"The same engine, driven in {len(self.rungs)} ways: {self.about}, {self.dtype}.",
            f"A round: {self.requests} requests, {self.prompt_tokens:,} tokens in (each begins with the same "
            f"{self.shared_tokens}), {self.generated_tokens:,} out, greedy. KV memory of {self.kv_tokens:,} tokens: "
            f"{self.batch} requests of the longest length.",
            f"Generated tokens per second of the whole set: median of {self.rounds} rounds (lowest to highest), "
            "in alternating order, new prompts each round.",
            facts_to_text(self.machine),
            "",
        ]
        rows = []
        for before, rung in zip((None, *self.rungs), self.rungs):
            step = None if before is None else ratio(rung.tokens_per_s, before.tokens_per_s).to_text()
            first = ratio(rung.tokens_per_s, self.rungs[0].tokens_per_s).median
            speed = Spread.of(rung.tokens_per_s).to_text(0)
            rows.append((rung.name, speed, step, first, rung.at_once, rung.computed_tokens))
        columns = " <26 | tokens/s >25 | by rung before >25 | by first >9.2f | at once >8.1f | prompt computed >16,"
        lines += table(columns, rows)
        asked = self.requests * self.rounds
        rounded = [rung for rung in self.rungs if rung.name == ROUNDED]
        fewest, others = min(rung.equal for rung in self.rungs if rung not in rounded), ""
        if rounded:
            others = f" but the last, which rounds otherwise: {rounded[0].equal} of {asked} there"
        lines += ["", f"Tokens equal to the first rung's: {fewest} of {asked} requests in every rung{others}."]
        if self.left_out:
            lines.append(self.left_out)
        return "\n".join(lines)


def bench_ladder(
    model: str = "demo",
    requests: int = 48,
    batch: int = 8,
    rounds: int = 3,
    output_tokens: tuple[int, int] = (16, 128),
    dtype: str = "auto",
    threads: int | None = None,
    folder: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> LadderBench:
    """Measure `model`: `demo`, a shape of `shapes.NAMES`, or a path. Of one that there is in int4 too, all rungs
    compute the values of its int4 weights, and the last ones hold them as int8 and int4 where that is served.

    Raises PipelineError when a rung gives other float32 tokens than the first.
    """
    assert min(requests, batch, rounds) >= 1
    keep_cpu_kernels_in(cpu_kernel_folder(say=say))
    use_threads(threads)
    machine = machine_facts()
    found = bench_model(
        {"demo": "demo:target-awq"}.get(model, f"{model}-awq" if model in SHAPES else model), folder, say
    )
    own = read_config(found.folder)
    resolved = resolve(EngineConfig(str(found.folder), dtype=dtype), own)
    name = str(resolved.dtype).removeprefix("torch.")
    is_awq = isinstance(own.quantization, AwqFormat)
    kernels = select_kernels(resolved.device, resolved.dtype)
    is_served = is_awq and "int4" in kernels.served_by["linear"]
    plain = dequantized(found.folder, resolved.dtype, say) if is_served else found.folder
    prompts = _Prompts(plain, requests, output_tokens)
    longest = prompts.longest(rounds)
    kv_tokens = batch * _in_blocks(longest)
    kv_bytes = kv_tokens * own.kv_bytes_per_token(resolved.kv_dtype)
    load = _Loader(name, longest, SLOTS_PER_BATCH * batch, kv_bytes, threads, say)
    ways = _plain_ways(load.engine(plain), batch, kv_tokens)
    if is_served:
        ways |= _quantized_ways(load, found.folder, plain, resolved, kernels)
    runs: dict[str, list[_Run]] = {way: [] for way in ways}
    for number, order in enumerate(alternating(list(ways), rounds)):
        asked = prompts.round(number)
        for way in order:
            say(f"round {number + 1} of {rounds}: {way}")
            runs[way].append(_run(*ways[way], asked))
    rungs = tuple(_rung(way, runs[way], runs[ONE]) for way in ways)
    for rung in rungs:
        if name == "float32" and rung.name != ROUNDED and rung.equal < requests * rounds:
            raise PipelineError(f"{rung.name}: {requests * rounds - rung.equal} float32 completions are not {ONE}'s")
    return LadderBench(
        found.about,
        requests,
        batch,
        sum(len(r.prompt_token_ids) for r in prompts.round(0)),
        prompts.num_shared,
        prompts.num_output_tokens,
        kv_tokens,
        name,
        rounds,
        rungs,
        _left_out(ways, is_awq, name),
        machine,
    )


@dataclass(frozen=True)
class _Loader:
    """Makes the engines of all ways. kv_bytes: of the KV cache, where weights save nothing."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    threads: int | None
    say: Callable[[str], None]

    def engine(self, folder: Path, saved_bytes: int = 0, activation_dtype: str = "auto") -> Engine:
        self.say(f"loading {folder.name}")
        made = Engine(
            EngineConfig(
                str(folder),
                dtype=self.dtype,
                activation_dtype=activation_dtype,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                block_size=BLOCK_SIZE,
                kv_cache_memory_bytes=self.kv_bytes + saved_bytes,
                num_threads=self.threads,
            )
        )
        made.warm_up()
        return made


def _plain_ways(engine: Engine, batch: int, kv_tokens: int) -> dict[str, Way]:
    """The rungs below quantized weights."""
    return {
        ONE: (engine, False, lambda e, r: _waves(e, [[one] for one in r])),
        STATIC: (engine, False, lambda e, r: _waves(e, [r[i : i + batch] for i in range(0, len(r), batch)])),
        DYNAMIC: (engine, False, lambda e, r: _waves(e, _by_length(r, kv_tokens))),
        CONTINUOUS: (engine, False, _all_at_once),
        SHARING: (engine, True, _all_at_once),
    }


def _quantized_ways(load: _Loader, folder: Path, plain: Path, resolved: Resolved, kernels: Kernels) -> dict[str, Way]:
    """The rungs of quantized weights that these kernels serve; what the weights save goes to the KV cache. plain: the
    values of `folder`'s int4 weights in 16 or 32 bit."""
    ways: dict[str, Way] = {}
    plain_bytes = _bytes(plain, resolved)
    if "8-bit" in kernels.served_by["linear"]:
        narrow = in_int8(folder, load.say)
        ways[INT8] = (load.engine(narrow, plain_bytes - _bytes(narrow, resolved)), True, _all_at_once)
    saved_bytes = plain_bytes - _bytes(folder, resolved)
    ways[INT4] = (load.engine(folder, saved_bytes), True, _all_at_once)
    rounded = kernels.rounded.get("int8")
    if rounded is not None and "products of bytes" in rounded.served_by:
        ways[ROUNDED] = (load.engine(folder, saved_bytes, "int8"), True, _all_at_once)
    return ways


class _Prompts:
    """Reports to summarize after the same solved example; each request wants its own number of tokens."""

    def __init__(self, folder: Path, requests: int, output_tokens: tuple[int, int]) -> None:
        from pipeline.tokenization.tokenizer import Tokenizer

        self._tokenizer = Tokenizer.from_folder(str(folder))
        solved = make_report("train", 0, fillers=False)
        self._head = f"{solved.prompt} {solved.summary}\n\n"
        self._outputs = [n.output for n in workload(requests, 1, output_tokens).lengths()]
        self.num_output_tokens = sum(self._outputs)
        first, second = (self._tokenizer.encode(self._head + PROMPT_TEMPLATE.format(report=text)) for text in "AB")
        self.num_shared = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)

    def round(self, number: int) -> list[Request]:
        first = number * len(self._outputs)
        texts = [self._head + make_report("job", first + i).prompt for i in range(len(self._outputs))]
        return [
            Request(i, ids, SamplingParams(max_tokens=output, ignore_eos=True))
            for i, (ids, output) in enumerate(zip(self._tokenizer.encode_batch(texts), self._outputs))
        ]

    def longest(self, rounds: int) -> int:
        return max(_length(request) for number in range(rounds) for request in self.round(number))


@dataclass(frozen=True)
class _Run:
    seconds: float
    generated_tokens: int
    computed_tokens: int
    at_once: float
    token_ids: dict[object, list[int]]


def _run(engine: Engine, shares: bool, drive: Drive, requests: list[Request]) -> _Run:
    """One round of one way, on an engine that remembers nothing."""
    engine.scheduler.enable_prefix_caching = shares
    engine.pool.forget(range(engine.pool.num_blocks))
    engine.scheduler.admission.forget_lengths()
    before = replace(engine.stats)
    began = perf_counter()
    done = list(drive(engine, requests))
    seconds = perf_counter() - began
    grew = engine.stats.since(before)
    wrong = next((c for c in done if c.error is not None), None)
    if wrong is not None or len(done) != len(requests):
        raise PipelineError(
            f"{len(done)} of {len(requests)} requests completed{f': {wrong.error_message}' if wrong else ''}"
        )
    return _Run(
        seconds,
        grew.generated_tokens,
        grew.prompt_tokens - grew.cached_tokens,
        grew.batch_sum / grew.num_steps,
        {c.row_id: c.token_ids for c in done},
    )


def _waves(engine: Engine, waves: Sequence[list[Request]]) -> Iterator[Completion]:
    """Each wave is begun when the one before has ended whole."""
    for wave in waves:
        for request in wave:
            engine.add(request)
        while engine.has_unfinished:
            yield from engine.step()


def _all_at_once(engine: Engine, requests: list[Request]) -> Iterator[Completion]:
    return _waves(engine, [requests])


def _by_length(requests: list[Request], kv_tokens: int) -> list[list[Request]]:
    """The longest first, each batch as large as its longest request lets it be."""
    left = sorted(requests, key=_length, reverse=True)
    waves = []
    while left:
        size = kv_tokens // _in_blocks(_length(left[0]))
        waves.append(left[:size])
        left = left[size:]
    return waves


def _length(request: Request) -> int:
    return len(request.prompt_token_ids) + request.params.max_tokens


def _in_blocks(tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def _bytes(folder: Path, resolved: Resolved) -> int:
    return weight_bytes(read_config(folder), resolved.device, resolved.dtype)


def _left_out(ways: Collection[str], is_awq: bool, dtype: str) -> str:
    if not is_awq:
        return "No rung of int4 weights: the checkpoint has none."
    nothing = f"there are no kernels for them in {dtype} here"
    if INT4 not in ways:
        return f"No rung of int4 weights: {nothing}, so they are dequantized at load."
    missing = [what for way, what in ((INT8, "int8 weights"), (ROUNDED, "int8 activations")) if way not in ways]
    return f"No rung of {' and '.join(missing)}: {nothing}." if missing else ""


def _rung(name: str, runs: list[_Run], first: list[_Run]) -> Rung:
    return Rung(
        name,
        tuple(run.generated_tokens / run.seconds for run in runs),
        sum(run.at_once for run in runs) / len(runs),
        runs[0].computed_tokens,
        sum(run.token_ids[i] == ids for run, other in zip(runs, first) for i, ids in other.token_ids.items()),
    )
