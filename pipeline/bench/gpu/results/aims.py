"""The aims of the GPU kernels and of whole jobs, judged by what a run measured.

A missed aim is no failure: it says what to look at first. Kernels count where their work is long enough that starting
them does not matter. Of several measurements the worst counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipeline.bench.gpu.jobs import OurJob
from pipeline.bench.gpu.kernels.kernel_times import CHECKING, DECODING, PROMPTS, SKEWED, KernelTime
from pipeline.bench.gpu.kernels.linear_times import ALLOWED_BEHIND
from pipeline.bench.gpu.results.figures import Failure, ModelFigures

LEAST_S = 30e-6  # of a kernel's floor, or of the other kernel: starting one takes some 5 us
DECODING_SHARE = 0.85  # of the copy bandwidth
PROMPTS_SHARE = 0.65  # of FlashAttention's speed
IDLE_SHARE = 0.02  # of the time of decoding steps
AGAINST_PEER = {"summaries": 1.5, "classification": 1.5, "shared": 1.5, "mixed": 1.15, "generation": 1.15}
PEER = "vllm"
AS_PREDICTED = 1.15  # times the predicted time, up to which a job's time is its kernels'

Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True)
class Aim:
    """measured: None where it was not; shown: the same to read. about: where that was, or why it was not. look_first:
    where it was missed."""

    name: str
    wanted: str
    measured: float | None
    shown: str
    verdict: Verdict
    about: str
    look_first: tuple[str, ...] = ()

    def to_text(self) -> str:
        if self.measured is None:
            return f"{self.verdict:<13} {self.name} ({self.wanted}): {self.about}"
        line = f"{self.verdict:<13} {self.name}: {self.shown} ({self.wanted}); {self.about}"
        return "\n".join([line, *(f"{'':<13} -> {each}" for each in self.look_first)])


def aims_of(model: ModelFigures, sections: Sequence[str], failures: Sequence[Failure]) -> list[Aim]:
    """Every aim, judged by the figures of one model. sections: those that were asked for."""

    def why_not(section: str, otherwise: str) -> str:
        if section not in sections:
            return f"the section {section} was not run"
        failed = [failure for failure in failures if (failure.section, failure.model) == (section, model.name)]
        return f"the section {section} failed or was ended, see above" if failed else otherwise

    return [
        *(_decoding(model, kind, why_not) for kind in (DECODING, SKEWED, CHECKING)),
        _prompts(model, why_not),
        _linears(model, why_not),
        _idle(model, why_not),
        *(_job(model, name, least, why_not) for name, least in AGAINST_PEER.items()),
    ]


def aims_to_text(aims: Sequence[tuple[str, Sequence[Aim]]], on_card: bool) -> str:
    """aims: of each model."""
    lines = ["Aims" if on_card else "Aims. Run on a processor, to see that they are judged: the verdicts mean nothing."]
    for model, of_model in aims:
        count = {verdict: sum(aim.verdict == verdict for aim in of_model) for verdict in ("met", "missed")}
        lines.append(f"{model}: {count['met']} met, {count['missed']} missed of {len(of_model)}")
        lines += [aim.to_text() for aim in of_model]
    return "\n".join(lines)


_WhyNot = Callable[[str, str], str]


def _decoding(model: ModelFigures, kind: str, why_not: _WhyNot) -> Aim:
    name = {DECODING: "same lengths", SKEWED: "skewed lengths", CHECKING: "drafts"}[kind]
    name, wanted = f"decoding attention, {name}", f"at least {DECODING_SHARE:.0%} of the copy bandwidth"
    times = [time for time in _kernels(model, kind) if time.floor_s >= LEAST_S]
    if not times:
        return _unmeasured(name, wanted, why_not("kernels", f"no such work with a floor of {LEAST_S * 1e6:.0f} us"))
    worst, case = min((time.num_bytes / time.seconds / model.rates.copy_bytes_per_s, time.case) for time in times)
    look = (
        _tile_hint(model, "decode"),
        *(
            ["how tiles are partitioned over programs: kernels/triton/attention/decode_metadata.py"]
            if kind == SKEWED
            else []
        ),
    )
    about = f"worst of {len(times)}: {case}"
    return _judged(name, wanted, worst, f"{worst:.1%}", worst >= DECODING_SHARE, about, look)


def _prompts(model: ModelFigures, why_not: _WhyNot) -> Aim:
    name, wanted = "attention of prompts", f"at least {PROMPTS_SHARE:g} of FlashAttention's speed"
    shares = [
        (time.other_s / time.seconds, time.case)
        for time in _kernels(model, PROMPTS)
        if time.other_s is not None and time.other_s >= LEAST_S
    ]
    if not shares:
        return _unmeasured(name, wanted, why_not("kernels", f"FlashAttention took {LEAST_S * 1e6:.0f} us on no work"))
    worst, case = min(shares)
    about = f"worst of {len(shares)}: {case}"
    return _judged(name, wanted, worst, f"{worst:.2f}", worst >= PROMPTS_SHARE, about, (_tile_hint(model, "prefill"),))


def _linears(model: ModelFigures, why_not: _WhyNot) -> Aim:
    name, wanted = "linears as served", f"at most {ALLOWED_BEHIND:g} times the better path"
    behind = {} if model.linears is None else model.linears.behind
    if model.linears is None or not behind:
        return _unmeasured(name, wanted, why_not("linears", "no path was measured beside the served one"))
    tokens, worst = max(behind.items(), key=lambda item: item[1])
    about = f"worst of {len(behind)} numbers of tokens from {min(behind):,} to {max(behind):,}: {tokens:,}"
    look = tuple(border.to_text() for border in model.borders) or (
        "no fused int4 path here: the product itself, or how it is started",
    )
    return _judged(name, wanted, worst, f"{worst:.2f} times", worst <= ALLOWED_BEHIND, about, look)


def _idle(model: ModelFigures, why_not: _WhyNot) -> Aim:
    name, wanted = "idle time of the card while decoding", f"below {IDLE_SHARE:.0%} of the time"
    traced = [(step.traced.idle_share, step, step.traced) for step in model.steps if step.traced is not None]
    if not traced:
        return _unmeasured(name, wanted, why_not("steps", "there was no card to trace"))
    share, step, worst = max(traced, key=lambda each: each[0])
    look = (
        "most of it waits for the host: planning a step ahead (engine/forward/in_flight.py), `pipeline bench scheduler`"
        if worst.host_s > worst.idle_s / 2
        else "most of it lies between kernels of a step: fewer and longer kernels",
    )
    about = (
        f"worst of {len(traced)}: {step.rows:,} rows at {step.context:,.0f}, {worst.idle_s * 1e3:.3f} ms a step, "
        f"{worst.host_s * 1e3:.3f} of it waiting for the host"
    )
    return _judged(name, wanted, share, f"{share:.1%}", share < IDLE_SHARE, about, look)


def _job(model: ModelFigures, requests: str, least: float, why_not: _WhyNot) -> Aim:
    name, wanted = f"the set {requests} against vLLM", f"at least {least:g} times as fast"
    ours = [] if model.jobs is None else [job for job in model.jobs.jobs if job.requests == requests]
    peers = [peer for peer in model.peers if peer.name.split(",")[0] == PEER]
    theirs = {peer.name: median(job.wall_s) for peer in peers for job in peer.jobs if job.requests == requests}
    if not ours:
        return _unmeasured(name, wanted, why_not("jobs", "this set was not asked for"))
    if not theirs:
        failed = [f"{peer.name} failed: {peer.failure}" for peer in peers if peer.failure]
        return _unmeasured(name, wanted, failed[0] if failed else "vLLM took no part (--peer vllm=PYTHON)")
    best, seconds = min(theirs.items(), key=lambda item: item[1])
    ratio = seconds / median(ours[0].wall_s)
    return _judged(
        name, wanted, ratio, f"{ratio:.2f} times", ratio >= least, f"against {best}", tuple(_job_hints(model, ours[0]))
    )


def _job_hints(model: ModelFigures, job: OurJob) -> list[str]:
    """What takes the time: preemptions, what is not in the cost model, or the kernels."""
    found, wall_s = [], median(job.wall_s)
    if job.num_preemptions or job.num_out_of_memory:
        found.append(
            f"{job.num_preemptions:,} preemptions, {job.num_out_of_memory:,} steps that did not fit the memory"
        )
    if wall_s > AS_PREDICTED * job.predicted_s:
        found.append(
            f"the job takes {wall_s / job.predicted_s:.2f} times what its kernels alone should: the host, sampling and "
            "elementwise kernels: the section steps, and sample and greedy in the section kernels"
        )
    elif model.has_kernels:
        shares = {part: share for part, share in vars(model.reached).items() if part != "step_s"}
        least = min(shares, key=lambda part: shares[part])
        found.append(
            f"the kernels: they take {job.predicted_s / job.bound_s:.2f} times their floor, and reach least in "
            f"{least} ({shares[least]:.0%} of the card's rate)"
        )
    return found


def _tile_hint(model: ModelFigures, kernel: str) -> str:
    """What the section tiles says of the table of a kernel."""
    lines = [] if model.tiles is None else [line for line in model.tiles.lines() if line.startswith(kernel)]
    return "; ".join(lines) if lines else f"the tile table of {kernel}: `pipeline bench gpu --follow-up`"


def _kernels(model: ModelFigures, kind: str) -> list[KernelTime]:
    return [] if model.kernels is None else [time for time in model.kernels.times if time.kind == kind]


def _unmeasured(name: str, wanted: str, why: str) -> Aim:
    return Aim(name, wanted, None, "", "not measured", why)


def _judged(name: str, wanted: str, measured: float, shown: str, met: bool, about: str, look: tuple[str, ...]) -> Aim:
    return Aim(name, wanted, measured, shown, "met" if met else "missed", about, () if met else look)
