"""The replay of recorded rows, on rows that are made up."""

import pytest

from pipeline.engine.params import Request, SamplingParams
from tests.engine.speculation.machines import DEMO
from tests.engine.speculation.recorded import EOS, job_s
from tests.engine.speculation.simulation import DRAFTED_HOST_S


def test_a_replayed_job_takes_what_its_steps_take() -> None:
    """Two rows that count in circles, which lookup finds."""
    circles = [*range(10, 22)], [*range(40, 52)]
    rows = [
        (Request(row, each * 2, SamplingParams(max_tokens=96)), each * 4 + [EOS]) for row, each in enumerate(circles)
    ]
    plain_s = 24 * 2 * DEMO.prefill_s - 2 * DEMO.prefill_s
    plain_s += 49 * DEMO.step_s(2, 2, 0, False)
    assert job_s(rows, 2, "plain") == pytest.approx(plain_s, rel=1e-6)
    drafted_s = 7 * (DEMO.step_s(14, 2, 0, True) + DEMO.lookup_s(2)) + (24 * 2 - 2) * DEMO.prefill_s
    assert job_s(rows, 2, "forced") == pytest.approx(drafted_s, rel=0.05)
    assert job_s(rows, 2, "auto") < plain_s + 49 * DRAFTED_HOST_S
