"""The promise on simulated machines and texts: at most 1% slower than plain, within 5% of the best fixed choice.

Some of the whole grid that `simulation` runs; figures are simulated seconds with fixed seeds.
"""

import numpy as np
import pytest

from tests.engine.speculation import machines as m
from tests.engine.speculation.simulation import Noise, compare, controller_for, job, measured, simulate

MAX_LOSS = 0.01
MAX_BEHIND = 0.05
STEPS = 1200


@pytest.mark.parametrize(
    ("machine", "text", "batch"),
    [
        (m.DISPATCH, m.HIGH, 1),
        (m.DISPATCH, m.LOW, 16),
        (m.DISPATCH, m.BURSTY, 4),
        (m.MEMORY, m.HIGH, 64),
        (m.MEMORY, m.MIDDLE, 1),
        (m.MEMORY, m.RARE, 1),
        (m.MEMORY, m.DECAYING, 16),
        (m.MEMORY, m.ADVERSARY, 4),
        (m.COMPUTE, m.HIGH, 1),
        (m.COMPUTE, m.LOW, 64),
        (m.COMPUTE, m.ADVERSARY, 1),
        (m.KINKED, m.MIXTURE, 64),
        (m.KINKED, m.HIGH, 64),
        (m.KINKED, m.DRIFTING, 16),
        (m.KINKED, m.LOW, 1),
        (m.GRAPHS, m.MIDDLE, 64),
        (m.GRAPHS, m.ADVERSARY, 16),
        (m.GRAPHS, m.MIXTURE, 64),
        (m.UNKNOWN_GRAPHS, m.DECAYING, 4),
        (m.UNGRAPHED, m.MIDDLE, 16),
        (m.UNGRAPHED, m.ADVERSARY, 1),
        (m.UNGRAPHED, m.MIXTURE, 16),
        (m.CPU, m.HIGH, 1),
        (m.CPU, m.LOW, 16),
        (m.CPU, m.BURSTY, 4),
        (m.CPU, m.ADVERSARY, 64),
        (m.DRAFT_MODEL, m.MIDDLE, 4),
        (m.DRAFT_MODEL, m.DRIFTING, 1),
        (m.DRAFT_MODEL, m.ADVERSARY, 1),
        (m.DRAFT_MODEL, m.MIXTURE, 16),
        (m.DRAFT_MODEL, m.BURSTY, 16),
        (m.DRAFT_MODEL, m.BURSTY, 64),
        (m.UNGRAPHED, m.BURSTY, 16),
        (m.TINY_DRAFT_MODEL, m.LOW, 1),
        (m.TINY_DRAFT_MODEL, m.MIXTURE, 1),
        (m.TINY_DRAFT_MODEL, m.DECAYING, 1),
        (m.TINY_DRAFT_MODEL, m.MIDDLE, 16),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_at_any_batch_size(machine: m.Machine, text: m.Text, batch: int) -> None:
    result = compare(machine, text, batch, STEPS, fixed=(1, 2, 4, 8))
    assert result.loss < MAX_LOSS, str(result)
    assert result.behind_best < MAX_BEHIND, str(result)


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (m.MEMORY, m.HIGH),
        (m.MEMORY, m.MIDDLE),
        (m.MEMORY, m.DECAYING),
        (m.COMPUTE, m.HIGH),
        (m.KINKED, m.DECAYING),
        (m.CPU, m.MIXTURE),
        (m.GRAPHS, m.ADVERSARY),
        (m.DRAFT_MODEL, m.MIXTURE),
        (m.DRAFT_MODEL, m.DRIFTING),
        (m.DRAFT_MODEL, m.BURSTY),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_job_with_its_tail(machine: m.Machine, text: m.Text) -> None:
    result = compare(machine, text, 24, STEPS, has_tail=True, fixed=(1, 2, 4, 8), clocks=4)
    assert result.loss < MAX_LOSS, str(result)
    assert result.behind_best < MAX_BEHIND, str(result)


@pytest.mark.parametrize("text", [m.HIGH, m.LOW], ids=lambda text: text.name)
def test_at_256_sequences(text: m.Text) -> None:
    result = compare(m.MEMORY, text, 256, 500, fixed=(1, 2, 4))
    assert result.loss < MAX_LOSS, str(result)
    assert result.behind_best < MAX_BEHIND, str(result)


@pytest.mark.parametrize("length_R", [np.full(96, 200), job(16, 1000, has_tail=False)], ids=["rows wait", "none wait"])
def test_what_it_says_it_saved_is_what_was_saved(length_R: np.ndarray) -> None:
    """On average over some clocks. Where none wait, more is said than saved: plain steps would not have left some
    sequences to the last, whose tokens are worth most."""
    waiting = len(length_R) > 16
    plain = simulate(m.MEMORY, m.MIDDLE, length_R, 16, 0)
    said = []
    for seed in (1, 2, 3):
        noise = Noise(seed=seed)
        controller = controller_for(m.MEMORY, noise)
        run = simulate(m.MEMORY, m.MIDDLE, length_R, 16, controller, noise=noise)
        counts = controller.counts
        assert int((counts.plain_steps + counts.drafted_steps).sum()) == run.steps
        assert int(counts.drafted_steps.sum()) == run.drafted_steps
        assert int((counts.drafted_step_tokens + counts.plain_sequences).sum()) == run.tokens
        said.append(counts.saved_s / (plain.seconds - run.seconds))
    assert np.mean(said) == pytest.approx(1.0, abs=0.1 if waiting else 0.2)


def test_a_machine_that_is_slow_for_a_while_changes_no_decision() -> None:
    length_R = np.full(8, 1500)

    class Disturbed(Noise):
        calls = 0

        def __call__(self, seconds: float) -> float:
            self.calls += 1
            return super().__call__(seconds * (3.0 if self.calls // 200 % 2 else 1.0))

    for text in (m.HIGH, m.LOW):
        noise = Disturbed(seed=2)
        controller = controller_for(m.MEMORY, Noise(seed=3))
        disturbed = simulate(m.MEMORY, text, length_R, 8, controller, noise=noise)
        calm = simulate(m.MEMORY, text, length_R, 8, controller_for(m.MEMORY, Noise(seed=3)), noise=Noise(seed=2))
        assert disturbed.seconds == pytest.approx(calm.seconds, rel=0.03)


def test_a_table_of_padded_steps_is_near_the_truth_between_its_points() -> None:
    """Between two of them the real curve may have its kink."""
    cost = measured(m.GRAPHS, Noise(seed=0, spread=0.0, outliers=0.0))
    curve_s_D = cost.curve_s(64, 64 * 300, 0, 128)
    truth_s_D = [m.GRAPHS.step_s(64 + drafts, 64, 64 * 300, drafts > 0) for drafts in range(129)]
    assert curve_s_D == pytest.approx(truth_s_D, rel=0.06)
