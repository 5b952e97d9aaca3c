"""Times of admissions if the host is slower than the device: those of minimal cost, and no row starves."""

import random

import numpy as np
import pytest

from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.pacing import ENDED_SHARE, MAX_STEPS, AdmissionPacing
from tests.engine.hash_runner import VOCAB, check_tokens, hash_engine
from tests.engine.schedule.test_admission import Job
from tests.engine.schedule.test_scheduler import run


def seen(plain_us: int, mixed_us: int) -> AdmissionPacing:
    """Return a pacing that has observed many such iterations."""
    pacing = AdmissionPacing()
    for _ in range(100):
        pacing.observe(7, is_mixed=False)  # after a step with prompts: ignored
        for _ in range(3):
            pacing.observe(plain_us, is_mixed=False)
        pacing.observe(mixed_us, is_mixed=True)
    return pacing


@pytest.mark.parametrize("outputs", [20, 200, 1000])
@pytest.mark.parametrize("extra", [0.2, 1.0, 3.0])
def test_steps_between_admissions_have_minimal_cost(outputs: int, extra: float) -> None:
    """The cost per step is that of prompts in each n-th one, and of slots that are empty for half of that time."""

    def cost(num_steps: int) -> float:
        return extra / num_steps + num_steps / (2 * outputs)

    steps = seen(1000, round(1000 * (1 + extra))).steps(outputs)
    assert cost(steps) == pytest.approx(min(cost(n) for n in range(1, MAX_STEPS + 1)), rel=0.01)


def test_where_the_host_is_hidden_each_step_may_admit() -> None:
    assert AdmissionPacing().steps(500) == 1  # nothing observed yet
    assert seen(1000, 1050).steps(500) == 1
    assert seen(1000, 900).steps(500) == 1


def test_many_free_slots_are_filled_at_once_and_an_admission_begins_anew() -> None:
    pacing = seen(1000, 3000)
    assert pacing.steps(100) == 20
    for _ in range(2):
        assert [pacing.is_time(64, 100) for _ in range(20)] == [False] * 19 + [True]
        assert pacing.is_time(64, 100)  # no row fitted: the next step tries again
        pacing.admitted()
    pacing.ended(int(64 * ENDED_SHARE) - 1)
    assert not pacing.is_time(64, 100)
    pacing.ended(1)
    assert pacing.is_time(64, 100)


def test_rows_are_admitted_together_and_all_of_them_end() -> None:
    """Far fewer steps have prompts, because prompts are admitted together."""

    def steps_with_prompts(pacing: AdmissionPacing | None) -> int:
        rng = random.Random(4)
        job = Job([6] * 400, [rng.randrange(30, 90) for _ in range(400)], 100, num_blocks=4000, size=4)
        job.scheduler.pacing = pacing
        mixed = 0
        while len(job.ended) < 400:
            prompts = job.stats.prompt_tokens
            job.step()
            mixed += job.stats.prompt_tokens > prompts
        return mixed

    assert steps_with_prompts(seen(1000, 2000)) < steps_with_prompts(None) / 3


class Moody(AdmissionPacing):
    """Pacing with random decisions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def is_time(self, num_running: int, expected_output: int) -> bool:
        return self.rng.random() < 0.2


@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_when_rows_are_admitted(seed: int) -> None:
    engine = hash_engine(40, 4, is_asynchronous=seed % 2 == 1)
    engine.scheduler.pacing = Moody(seed)
    engine.scheduler.admission.min_history = 2
    rng = np.random.default_rng(seed)
    requests = [
        Request(row, rng.integers(0, VOCAB - 1, int(rng.integers(1, 20))).tolist(),
                SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True))
        for row in range(60)
    ]  # fmt: skip
    check_tokens(run(engine, requests), requests)
