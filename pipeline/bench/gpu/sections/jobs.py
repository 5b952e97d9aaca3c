"""Whole jobs: fixed request sets through the engine, and through other engines where they are there."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from pipeline.bench.gpu.device import memory_bytes
from pipeline.bench.gpu.jobs import Limits, OurJobs, run_our_jobs
from pipeline.bench.gpu.peers import PeerJobs, run_peers
from pipeline.bench.gpu.result import Result, read_results
from pipeline.bench.gpu.results.figures import reached_by
from pipeline.bench.gpu.subject import Subject, known_rates
from pipeline.bench.gpu.variants import AS_SERVED, VARIANTS
from pipeline.bench.measure import facts_to_text
from pipeline.bench.request_sets import RequestSet, find_set

ROUNDS = 1


def run(
    result: Result,
    model: str,
    requests: Sequence[str],
    variant: str = AS_SERVED,
    peers: Sequence[tuple[str, str]] = (),
    of_task: str = "",
) -> None:
    """peers: run these engines instead of this one, beside what the task `of_task` found."""
    subject = Subject.of(result.setting, model)
    sets = [find_set(name).smaller(subject.scale.requests_by, subject.scale.tokens_by) for name in requests]
    head = "\n".join([f"{subject.name}, {subject.dtype_name}, {variant}", *(each.to_text() for each in sets)])

    def say(text: str) -> None:
        print(text, flush=True)

    if peers:
        _run_peers(result, subject, sets, peers, of_task)
        return
    rates = known_rates(result.setting, subject.stopwatch(), subject.dtype, subject.scale)
    reached = reached_by(read_results(result.setting.results), model, rates)
    limits = Limits(subject.size, subject.weights, rates, reached, memory_bytes(subject.device))
    device = subject.device
    found = run_our_jobs(subject.folder, device, subject.dtype_name, sets, ROUNDS, limits, VARIANTS[variant], say)
    for jobs in found:
        result.keep(f"{head}\n{jobs.to_text()}", model=model, variant=variant, jobs=jobs.to_json())


def _run_peers(
    result: Result, subject: Subject, sets: Sequence[RequestSet], peers: Sequence[tuple[str, str]], of_task: str
) -> None:
    ours = OurJobs.from_json(read_results(result.setting.results)[of_task].figures["jobs"])
    done = {job.requests for job in ours.jobs}
    sets = [each for each in sets if each.name in done]
    told: dict[str, PeerJobs] = {}
    places = [(name, place) for name, place in peers]
    say = lambda text: print(text, flush=True)  # noqa: E731
    for peer in run_peers(places, subject.folder, sets, ROUNDS, subject.config, ours, say):
        told[peer.name] = peer
        text = "\n".join(line for each in told.values() for line in peer_lines(ours, each))
        result.keep(text, model=subject.name, peers=[asdict(each) for each in told.values()])


def peer_lines(ours: OurJobs, peer: PeerJobs) -> list[str]:
    wall_s = {job.requests: median(job.wall_s) for job in ours.jobs}
    lines = [f"{peer.name} ({facts_to_text(peer.about)}), after this engine and alone on the card:"]
    for job in peer.jobs:
        theirs = median(job.wall_s)
        lines.append(
            f"{job.requests:<15} {theirs:>8.2f} s; this engine is {theirs / wall_s[job.requests]:.2f}x; "
            f"{job.agreement.to_text()}"
        )
    return [*lines, f"{peer.name} failed: {peer.failure}"] if peer.failure else lines
