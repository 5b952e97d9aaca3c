"""The aims: the worst measurement counts, what was not measured says why, and a missed one says where to look."""

from dataclasses import asdict, replace

import pytest

from pipeline.bench.engines.agreement import Agreement
from pipeline.bench.gpu.jobs import OurJob, OurJobs
from pipeline.bench.gpu.kernels.checks import Check
from pipeline.bench.gpu.kernels.crossover import borders
from pipeline.bench.gpu.kernels.kernel_times import CHECKING, DECODING, PROMPTS, SKEWED, KernelTime, KernelTimes
from pipeline.bench.gpu.kernels.linear_times import LinearTime, summed_up
from pipeline.bench.gpu.kernels.tile_times import TileTime, TileTimes
from pipeline.bench.gpu.peers import PeerJob, PeerJobs
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.result import Found
from pipeline.bench.gpu.results.aims import AGAINST_PEER, aims_of, aims_to_text
from pipeline.bench.gpu.results.figures import Failure, ModelFigures
from pipeline.bench.gpu.results.report import SessionReport
from pipeline.bench.gpu.steps.step_times import StepTime
from pipeline.bench.gpu.steps.trace import Traced
from pipeline.bench.gpu.task import Outcome, Task
from pipeline.roofline.cost_model import AWQ, DecoderSize, Reached

SIZE = DecoderSize(256, 512, 2, 4, 2, 64, 1000)
RATES = Rates(1e12, 1e15)


def attention(kind, share, bytes_=1e8, other_s=None):
    """A kernel that moves its bytes at this share of the copy bandwidth."""
    floor_s = bytes_ / RATES.copy_bytes_per_s
    return KernelTime("attention", f"{kind} at {share}", floor_s / share, floor_s, bytes_, 1.0, other_s, kind)


def linears(**paths):
    """path -> seconds at 1, 64 and 256 tokens, of both linears alike."""
    names = {"dense": "16 bit", "fused": "int4 fused"}
    return [
        LinearTime(linear, names.get(path, path), tokens, seconds)
        for path, of in paths.items()
        for linear in ("qkv", "down")
        for tokens, seconds in zip((1, 64, 256), of)
    ]


def our_job(name, wall_s, predicted_s=1.0, **counted):
    empty = dict.fromkeys(OurJob.__dataclass_fields__, 0) | {"requests": name, "wall_s": wall_s, "bound_s": 0.5}
    return OurJob(**empty | {"predicted_s": predicted_s} | counted)


def peer_job(name, *wall_s):
    return PeerJob(name, wall_s, Agreement())


def jobs(*ours):
    return OurJobs({}, ours, {})


def step(rows, busy_s, idle_s, host_s):
    return StepTime(rows, 100.0, 1.0, Traced(8, None, busy_s, idle_s, host_s, {}), 1.0)


BARE = ModelFigures("m", RATES)


def with_linears(found):
    return replace(BARE, linears=found, borders=tuple(borders(found)))


SECTIONS = ("kernels", "linears", "tiles", "jobs", "steps")


def aim(name, model, sections=SECTIONS, failures=()):
    (found,) = (each for each in aims_of(model, sections, failures) if name in each.name)
    return found


@pytest.mark.parametrize(
    ("kind", "name"), [(DECODING, "same lengths"), (SKEWED, "skewed lengths"), (CHECKING, "drafts")]
)
def test_decoding_is_judged_by_its_worst_case_that_is_long_enough(kind, name):
    good = KernelTimes((attention(kind, 0.95), attention(kind, 0.86), attention(kind, 0.2, bytes_=1e6)))
    found = aim(name, replace(BARE, kernels=good))
    assert (found.verdict, found.look_first) == ("met", ())
    assert found.measured == pytest.approx(0.86)
    assert found.about == f"worst of 2: {kind} at 0.86"
    bad = replace(BARE, kernels=KernelTimes((*good.times, attention(kind, 0.84))))
    found = aim(name, bad)
    assert found.verdict == "missed"
    assert found.look_first[0] == "the tile table of decode: `pipeline bench gpu --follow-up`"
    assert any("decode_metadata" in hint for hint in found.look_first) == (kind == SKEWED)
    slow, fast = (TileTime("decode._stages", "g", "c", {"buffers": n}, n == 3, s) for n, s in ((3, 2.0), (2, 1.0)))
    found = aim(name, replace(bad, tiles=TileTimes((slow, fast))))
    assert found.look_first[0] == "decode._stages, g (1 cases): buffers 3 -> buffers 2, 2.00x"
    other = {DECODING: SKEWED, SKEWED: CHECKING, CHECKING: DECODING}[kind]
    assert aim(name, replace(BARE, kernels=KernelTimes((attention(other, 0.9),)))).verdict == "not measured"


def test_prompts_are_held_against_flash_attention():
    def prompts(times_slower, other_s=1e-3):
        return replace(attention(PROMPTS, 0.5, other_s=other_s), seconds=times_slower * other_s)

    short = prompts(9.0, other_s=1e-6)
    found = aim("attention of prompts", replace(BARE, kernels=KernelTimes((short, prompts(1.5), prompts(1.2)))))
    assert (found.verdict, found.measured) == ("met", pytest.approx(1 / 1.5))
    found = aim("attention of prompts", replace(BARE, kernels=KernelTimes((prompts(1.6), prompts(1.0)))))
    assert (found.verdict, found.look_first) == (
        "missed",
        ("the tile table of prefill: `pipeline bench gpu --follow-up`",),
    )
    found = aim("attention of prompts", replace(BARE, kernels=KernelTimes((short,))))
    assert (found.verdict, found.measured) == ("not measured", None)


def test_linears_are_held_against_the_better_path_and_the_border_is_suggested():
    measured = linears(
        dense=(4, 4, 6), fused=(1, 2, 9), cached=(4, 4, 6), scratch=(9, 9, 9), served=(1, 2.05, 6.0)
    )  # fmt: skip
    model = with_linears(summed_up(measured, SIZE, AWQ, RATES))
    found = aim("linears as served", model)
    assert (found.verdict, found.measured) == ("met", pytest.approx(1.025))
    slower = [replace(t, seconds=4.0) if (t.path, t.tokens) == ("served", 64) else t for t in measured]
    found = aim("linears as served", with_linears(summed_up(slower, SIZE, AWQ, RATES)))
    assert (found.verdict, found.measured) == ("missed", 2.0)
    assert "3 numbers of tokens from 1 to 256: 64" in found.about
    cached, scratch = found.look_first
    assert cached == (
        "the cached crossover of kernels/triton/linear/crossover.py is 128; this run says 64 (measured next: 256), for "
        "MEASURED there; by linear: qkv 64, down 64"
    )
    assert "the scratch crossover of kernels/triton/linear/crossover.py is 320; this run says 64" in scratch
    assert [border.now for border in borders(model.linears)] == [128, 320]
    plain = summed_up(linears(dense=(1, 1, 1), served=(1, 1, 2)), SIZE, AWQ, RATES)
    assert "no fused int4 path" in aim("linears as served", with_linears(plain)).look_first[0]


def test_a_border_is_where_least_is_lost_whatever_one_number_says():
    def border(fused, cached):
        seconds = {"fused": fused, "cached": cached}
        times = [
            LinearTime("qkv", {"fused": "int4 fused"}.get(path, path), 2**i, s)
            for path, of in seconds.items()
            for i, s in enumerate(of)
        ]
        (found,) = borders(summed_up(times, SIZE, AWQ, RATES))
        assert found.most_tokens["layer"] == found.most_tokens["qkv"]
        return found.most_tokens["layer"]

    assert border((1, 1, 2, 4), (2, 2, 2.1, 2)) == 4
    assert border((1, 1, 2.02, 1), (2, 2, 2, 2)) == 8  # slower at one number by 1%: noise
    assert border((3, 3, 3, 3), (2, 2, 2, 2)) == 0
    assert borders(summed_up(linears(dense=(1, 1, 1)), SIZE, AWQ, RATES)) == []


@pytest.mark.parametrize(("host_s", "hint"), [(0.0005, "waits for the host"), (0.0001, "between kernels of a step")])
def test_idle_time_is_the_worst_gap(host_s, hint):
    fine = (step(1, 0.099, 0.001, 0.001),)
    assert aim("idle", replace(BARE, steps=fine)).verdict == "met"
    found = aim("idle", replace(BARE, steps=(*fine, step(64, 0.0192, 0.0008, host_s))))
    assert (found.verdict, found.measured, found.shown) == ("missed", pytest.approx(0.04), "4.0%")
    assert "64 rows" in found.about
    assert hint in found.look_first[0]
    assert "no card to trace" in aim("idle", replace(BARE, steps=(StepTime(1, 1.0, 1.0, None, 1.0),))).about


def test_jobs_are_held_against_the_best_mode_of_vllm():
    ours = jobs(*(our_job(name, (2.0, 4.0, 3.0)) for name in (*AGAINST_PEER, "single")))
    peers = (
        PeerJobs("vllm", {}, tuple(peer_job(name, 9.0, 4.6, 4.5) for name in AGAINST_PEER)),
        PeerJobs("vllm, throughput", {}, (peer_job("mixed", 3.3),), "died"),
    )
    model = replace(BARE, jobs=ours, peers=peers, reached=Reached(kv=0.4, bandwidth=0.9), kernels=KernelTimes(()))
    found = aim("the set summaries", model)
    assert (found.verdict, found.measured, found.about) == ("met", pytest.approx(4.6 / 3), "against vllm")
    found = aim("the set mixed", model)
    assert (found.verdict, found.measured) == ("missed", pytest.approx(1.1))
    assert found.about == "against vllm, throughput"
    assert "3.00 times what its kernels alone should" in found.look_first[0]
    assert aim("the set generation", model).wanted == "at least 1.15 times as fast"
    bound = replace(model, jobs=jobs(our_job("mixed", (3.0,), predicted_s=2.9, num_preemptions=7)))
    preempted, kernels = aim("the set mixed", bound).look_first
    assert preempted.startswith("7 preemptions")
    assert "5.80 times their floor, and reach least in kv (40%" in kernels
    assert not [each for each in aims_of(model, SECTIONS, ()) if "single" in each.name]


def test_what_was_not_measured_says_why():
    nothing = aims_of(BARE, ("kernels", "jobs"), [Failure("kernels", "m", "broke"), Failure("jobs", "other", "broke")])
    assert {found.verdict for found in nothing} == {"not measured"}
    reasons = {found.name: found.about for found in nothing}
    assert reasons["decoding attention, drafts"] == "the section kernels failed or was ended, see above"
    assert reasons["idle time of the card while decoding"] == "the section steps was not run"
    assert reasons["linears as served"] == "the section linears was not run"
    ours = replace(BARE, jobs=jobs(our_job("mixed", (1.0,))))
    assert "took no part" in aim("the set mixed", ours).about
    assert aim("the set shared", ours).about == "this set was not asked for"
    failed = replace(ours, peers=(PeerJobs("vllm", {}, (), "no memory"),))
    assert aim("the set mixed", failed).about == "vllm failed: no memory"
    other = replace(ours, peers=(PeerJobs("vllmish", {}, (peer_job("mixed", 9.0),)),))
    assert aim("the set mixed", other).verdict == "not measured"


def test_a_missed_aim_is_told_and_is_no_failure():
    kernels = KernelTimes((attention(DECODING, 0.5), attention(SKEWED, 0.9)))
    tasks = (
        Task("machine", "machine", 1),
        Task("kernels-m", "kernels", 1, {"model": "m", "what": "kernels"}),
        Task("steps-m", "steps", 1, {"model": "m"}),
        Task("late", "jobs", 1, {"model": "m"}),
    )
    results = {
        "machine": Found(tasks[0], {"machine": {"card": "one"}, "rates": asdict(RATES)}, "a card", ()),
        "kernels-m": Found(tasks[1], {"model": "m", "kernels": kernels.to_json()}, "times", ()),
    }
    outcomes = (
        Outcome("machine", "done", 0.0, 1.0),
        Outcome("kernels-m", "done", 1.0, 2.0),
        Outcome("late", "not started", 3.0, 0.0, "no time"),
    )
    report = SessionReport("now", "typed", 60.0, True, tasks, outcomes, results, complete=True)
    assert not report.failed
    verdicts = [(each["model"], each["verdict"]) for each in report.to_json()["aims"]]
    assert verdicts[:3] == [("m", "missed"), ("m", "met"), ("m", "not measured")]
    text = report.to_text()
    assert "=== kernels-m\ntimes" in text
    assert "m: 1 met, 1 missed of 11" in text
    assert "\nmissed        decoding attention, same lengths: 50.0% (at least 85% of the copy bandwidth); worst" in text
    assert "              -> the tile table of decode" in text
    assert text.rstrip().splitlines()[-1].startswith("not measured  the set generation")
    assert "the section jobs was not run" in text
    assert "mean nothing" not in text
    assert "mean nothing" in replace(report, on_card=False).to_text()
    assert aims_to_text([], True) == "Aims"
    ended = (*outcomes, Outcome("steps-m", "ended", 3.0, 9.0, "at its limit"))
    assert replace(report, outcomes=ended).failed
    assert "the section steps failed or was ended" in replace(report, outcomes=ended).to_text()
    wrong = {"checks": [asdict(Check("linear", "c", "float32", "s", 1.0, 0.1))]}
    checked = replace(report, results=results | {"late": Found(tasks[3], wrong, "", ())})
    assert checked.failed
    assert "FAILED linear float32, c: error 1.0e+00" in checked.to_text()
    broken = replace(report, results=results | {"late": Found(tasks[3], {}, "", ("late: it broke",))})
    assert broken.failed
    assert "FAILED late, late: it broke" in broken.to_text()
