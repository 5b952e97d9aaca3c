"""Other engines on the same card and the same request sets, one after another, each with the card to itself.

vLLM is run twice: with its defaults, and with `performance_mode="throughput"`. Its prefix cache is on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.bench.engines.agreement import Agreement, compare
from pipeline.bench.engines.peer import Peer, PeerTask
from pipeline.bench.gpu.jobs import OurJobs
from pipeline.bench.gpu.request_sets import RequestSet
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
    vocab_size = config.vocab_size
    by_name = {
        f"{each.name} {number}": each.round(str(number), vocab_size) for each in sets for number in range(1, rounds + 1)
    }
    warm_up = [request for each in sets for request in each.smaller(64, 1).round("warm-up", vocab_size)]
    for name, place in peers:
        for mode in MODES[name]:
            task = PeerTask(
                model=str(folder.resolve()),
                dense_model=str(folder.resolve()),
                quantized=config.quantization is not None,
                dtype=str(ours.settings["dtype"]),
                threads=torch.get_num_threads(),
                max_model_len=max(each.longest for each in sets),
                max_num_seqs=None,
                work_folder=str(folder.parent),
                shared_prefixes=True,
                eos_token_ids=(),
                device=str(ours.settings["device"]),
                performance_mode=mode,
                sets={"warm-up": warm_up, **by_name},
            )
            say(f"starting {name}{'' if mode is None else f', {mode}'}")
            yield _run(name if mode is None else f"{name}, {mode}", name, place, task, sets, rounds, ours, say)


def _run(
    shown: str,
    name: str,
    place: str,
    task: PeerTask,
    sets: Sequence[RequestSet],
    rounds: int,
    ours: OurJobs,
    say: Callable[[str], None],
) -> PeerJobs:
    about: dict[str, str] = {}
    jobs: list[PeerJob] = []
    try:
        with Peer(name, place, task) as peer:
            about = peer.about
            for each in sets:
                walls: list[float] = []
                token_ids: list[list[int]] = []
                for number in range(1, rounds + 1):
                    say(f"{each.name}, round {number} of {rounds}: {shown}")
                    ran = peer.run_set(f"{each.name} {number}")
                    walls.append(ran.wall_s)
                    token_ids = ran.token_ids
                # in 16 bit a near-tie may go either way, and what follows it differs: differences are counted only
                agreed = compare(task.sets[f"{each.name} {rounds}"], ours.token_ids[each.name], token_ids)
                jobs.append(PeerJob(each.name, tuple(walls), agreed))
    except PipelineError as failed:
        return PeerJobs(shown, about, tuple(jobs), str(failed))
    return PeerJobs(shown, about, tuple(jobs))
