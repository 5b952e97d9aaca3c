"""This engine against `transformers.generate` and other engines: the same requests, in turn, in one run.

Every contender gets the same checkpoint, token ids, output lengths, type and threads, and its own rounds alternate
with the others'. Ratios are taken within a round. That the work was the same is checked by the tokens: in float32
they are equal or part at a near-tie, else the run ends without a figure.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.bench.engines.asked import Asked
from pipeline.bench.engines.contender import GenerateModel, StaticBatches, ThisEngine
from pipeline.bench.engines.floor import Phase, phases
from pipeline.bench.engines.lineup import Lineup, Speed
from pipeline.bench.engines.memory import MemoryTaken, load_measured
from pipeline.bench.engines.peer import Peer, PeerTask
from pipeline.bench.measure import facts_to_text, machine_facts, read_bandwidth, table, use_threads
from pipeline.bench.request_sets import BenchRequest
from pipeline.bench.shapes import bench_model, dequantized, derived
from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.params import EngineConfig
from pipeline.errors import ConfigError
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder


@dataclass(frozen=True)
class EngineBench:
    model: str
    dtype: str
    work: str
    speeds: tuple[Speed, ...]
    trials: dict[int, float]  # static batch size -> tokens a second in the round before the counted ones
    rounds: int
    phases: tuple[Phase, ...]
    read_bytes_per_s: float
    strict: bool
    settings: dict[str, str | int]
    peers: dict[str, dict[str, str]]
    memory: MemoryTaken | None
    machine: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "engine", **asdict(self), "shares": {p.name.strip(): p.share for p in self.phases}}

    def to_text(self) -> str:
        lines = [
            "Greedy completions of the same requests by each in turn; each round new prompts of the same lengths.",
            f"Model: {self.model}; {self.dtype} ({self.settings['weights']}).",
            f"Work: {self.work}.",
            facts_to_text(self.machine),
            f"Rounds: {self.rounds}; medians (least to most), ratios within a round. Only tokens asked for count.",
            "",
        ]
        rows = []
        for s in self.speeds:
            faster = (f"{v.to_text()} x" if v is not None else None for v in (s.faster, s.single_faster))
            rows.append((s.name, s.tokens_per_s.to_text(1), s.single_tokens_per_s.to_text(1), *faster))
        columns = " <34 | tokens/s >24 | one request alone >24 | this engine is >24 | for one alone >24"
        lines += [*table(columns, rows), "", *self._about_others(), *self._about_floor()]
        return "\n".join(lines)

    def _about_others(self) -> Iterator[str]:
        if self.trials:
            trials = ", ".join(f"{size}: {speed:,.1f}" for size, speed in self.trials.items())
            tried = f" Tokens/s in a trial by batch size: {trials}; those near the best took part."
            yield (
                "transformers.generate: static batches of prompts sorted by length, padded on the left, each run as "
                f"long as its longest row.{tried if len(self.trials) > 1 else ''}"
            )
        for speed in self.speeds:
            if speed.cpu_ratio is not None:
                yield f"Processor time of {speed.name}: {speed.cpu_ratio.to_text()} times this engine's."
            if speed.agreement is not None:
                yield f"Same tokens as {speed.name}: {speed.agreement.to_text()}."
        if self.trials and not self.strict:
            yield "Rounded, a near-tie may go either way in every engine, and what follows it differs: counted only."
        for name, about in self.peers.items():
            yield f"Peer {name}: {facts_to_text(about)}."
        if not self.peers:
            yield "No other engine took part (--peer)."
        if self.memory is not None:
            yield self.memory.to_text()

    def _about_floor(self) -> Iterator[str]:
        if not self.phases:
            yield "The floor is measured on processors only."
            return
        yield ""
        yield (
            "Where this engine's time went, all rounds, against its floor: its own linears alone, and in decoding keys "
            f"and values read at {self.read_bytes_per_s / 1e9:.1f} GB/s, both measured after the rounds."
        )
        parts = "s >8.2f | model >8.2f | linears >8.2f | KV >7.2f | share >7.0%"
        spent = [(p.name, p.steps, p.tokens, p.wall_s, p.model_s, p.gemm_s, p.kv_s, p.share) for p in self.phases]
        yield from table(f"steps of <22 | steps >7, | tokens >9, | {parts}", spent)
        if float(self.machine["load before"]) > 1:
            yield f"Other programs ran (load {self.machine['load before']} before): shares and seconds say little."
        yield "model: part of s in the model; linears + KV: the floor; share: floor / s. Steps of prompts decode too."


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
    say: Callable[[str], None] = lambda text: None,
) -> EngineBench:
    """Measure `model` (see `shapes.bench_model`). No `batch_sizes`: without transformers. `peers`: name and place.
    reports: the rows of the demonstration job instead of random prompts; lengths are then the rows' own.

    Raises PipelineError when contenders do not do the same work, EnvironmentFailed when a peer fails.
    """
    if rounds < 1 or any(size < 1 for size in batch_sizes):
        raise ConfigError(f"{rounds} rounds, batches of {list(batch_sizes)}: expected at least 1 of each")
    use_threads(threads)
    found = bench_model(model, folder, say)
    config = read_config(found.folder)
    asked = (
        Asked.reports(found.folder, requests)
        if reports
        else Asked.random(requests, prompt_tokens, output_tokens, config.vocab_size)
    )
    sets = asked.sets(rounds, chooses=len(batch_sizes) > 1)
    longest = max(len(r.prompt_token_ids) + r.max_tokens for each in sets.values() for r in each)
    with ExitStack() as stack:
        options = EngineConfig(
            str(found.folder),
            dtype=dtype,
            activation_dtype=activation_dtype,
            num_threads=threads,
            max_model_len=longest,
        )
        loaded, memory = load_measured(options, say, folder)
        engine = stack.enter_context(loaded)
        machine = machine_facts()
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        decoder = runner.decoder
        ours = ThisEngine(engine, shared_prefixes=reports)
        strict = decoder.dtype == torch.float32 and activation_dtype == "auto"
        lineup = Lineup(sets, ours.name, lambda name: ours.run(sets[name]), strict, say)
        dense = found.folder
        if config.quantization is not None and (batch_sizes or peers):
            dense = dequantized(found.folder, decoder.dtype, say)
        about: dict[str, dict[str, str]] = {}
        for name, place in peers:
            say(f"starting {name}")
            task = _peer_task(engine, found.folder, dense, config.quantization is not None, reports, sets)
            peer = stack.enter_context(Peer(name, place, task))
            lineup.add(name, peer.run_set)
            about[name] = peer.about
        if batch_sizes:
            say("loading the model with transformers")
            generate = GenerateModel(dense, decoder.dtype, str(decoder.device), engine.tokenizer.eos_token_ids)
            lineup.add_statics([StaticBatches(generate, size) for size in batch_sizes], generate.next_logits)

        lineup.trial()
        for number in range(1, rounds + 1):
            lineup.round(number)
        machine["load after"] = f"{os.getloadavg()[0]:.1f}"
        floor = _floor(lineup, decoder, say)
        return EngineBench(
            model=found.about,
            dtype=str(engine.resolved["dtype"]),
            work=asked.work,
            speeds=lineup.speeds(),
            trials=lineup.trials,
            rounds=rounds,
            phases=floor[0],
            read_bytes_per_s=floor[1],
            strict=lineup.strict,
            settings=dict(engine.resolved),
            peers=about,
            memory=memory,
            machine=machine,
        )


def _floor(lineup: Lineup, decoder: Decoder, say: Callable[[str], None]) -> tuple[tuple[Phase, ...], float]:
    """This engine's phases over the counted rounds, and the memory's bandwidth; nothing and 0 on a GPU."""
    if decoder.device.type != "cpu":
        return (), 0.0
    say("measuring the floor")
    bytes_per_s = read_bandwidth()
    steps = [step for ran in lineup.ran(lineup.ours, "set") for step in ran.steps]
    return tuple(phases(steps, decoder, bytes_per_s)), bytes_per_s


def _peer_task(
    engine: Engine, folder: Path, dense: Path, is_quantized: bool, reports: bool, sets: dict[str, list[BenchRequest]]
) -> PeerTask:
    """What another engine needs to do the same work. dense: the checkpoint's weights in 16 or 32 bit."""
    return PeerTask(
        model=str(folder.resolve()),
        dense_model=str(dense.resolve()),
        quantized=is_quantized,
        dtype=str(engine.resolved["dtype"]),
        threads=int(engine.resolved["num_threads"]),
        max_model_len=engine.max_model_len,
        max_num_seqs=int(engine.resolved["max_num_seqs"]),
        work_folder=str(derived(dense, "peers")),
        shared_prefixes=reports,
        eos_token_ids=tuple(sorted(engine.tokenizer.eos_token_ids)),
        sets=sets,
        device=str(engine.resolved["device"]),
    )
