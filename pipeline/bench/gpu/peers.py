"""Other engines on the same card and the same request sets, one after another, each with the card to itself.

vLLM is run twice: with its defaults, and with `performance_mode="throughput"`. Its prefix cache is on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.bench.engines.agreement import Agreement, compare
from pipeline.bench.engines.peer import Peer, PeerTask
from pipeline.bench.gpu.jobs import OurJobs
from pipeline.bench.request_sets import RequestSet
from pipeline.errors import PipelineError
from pipeline.model.config import ModelConfig

MODES: dict[str, tuple[str | None, ...]] = {"vllm": (None, "throughput")}  # None: the default


@dataclass(frozen=True)
class PeerJob:
    """A request set through another engine. agreement: its tokens of the last round with this engine's."""

    requests: str
    wall_s: tuple[float, ...]
    agreement: Agreement


@dataclass(frozen=True)
class PeerJobs:
    """failure: why there are no jobs, or no more; else empty."""

    name: str
    about: dict[str, str]
    jobs: tuple[PeerJob, ...]
    failure: str = ""


def run_peers(
    peers: Sequence[tuple[str, str]],
    folder: Path,
    sets: Sequence[RequestSet],
    rounds: int,
    config: ModelConfig,
    ours: OurJobs,
    say: Callable[[str], None],
) -> Iterator[PeerJobs]:
    """Each peer (name and place) in each of its modes. One that fails is told of, and the next one runs."""
    each_round = [(work, str(number)) for work in sets for number in range(1, rounds + 1)]
    warm_up = [request for work in sets for request in work.smaller(64, 1).round("warm-up", config.vocab_size)]
    task = PeerTask(
        model=str(folder.resolve()),
        dense_model=str(folder.resolve()),
        quantized=config.quantization is not None,
        dtype=str(ours.settings["dtype"]),
        threads=torch.get_num_threads(),
        max_model_len=max(work.longest for work in sets),
        work_folder=str(folder.parent),
        shared_prefixes=True,
        device=str(ours.settings["device"]),
        sets={"warm-up": warm_up}
        | {f"{work.name} {number}": work.round(number, config.vocab_size) for work, number in each_round},
    )
    for (name, place), mode in ((peer, mode) for peer in peers for mode in MODES[peer[0]]):
        shown = name if mode is None else f"{name}, {mode}"
        say(f"starting {shown}")
        told = PeerJobs(shown, {}, ())
        try:
            with Peer(name, place, replace(task, performance_mode=mode)) as peer:
                told = replace(told, about=peer.about)
                for work in sets:
                    ran = []
                    for number in range(1, rounds + 1):
                        say(f"{work.name}, round {number} of {rounds}: {shown}")
                        ran.append(peer.run_set(f"{work.name} {number}"))
                    # in 16 bit a near-tie may go either way, and what follows it differs: differences are counted only
                    agreed = compare(task.sets[f"{work.name} {rounds}"], ours.token_ids[work.name], ran[-1].token_ids)
                    job = PeerJob(work.name, tuple(each.wall_s for each in ran), agreed)
                    told = replace(told, jobs=(*told.jobs, job))
        except PipelineError as failed:
            told = replace(told, failure=str(failed))
        yield told
