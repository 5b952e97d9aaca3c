"""The controller over many steps: what it forgets while it drafts, and how it goes on and off in turn."""

from itertools import pairwise

import numpy as np
import pytest

from pipeline.engine.speculation import acceptance
from pipeline.engine.speculation.acceptance import DRAFT_MODEL
from pipeline.engine.speculation.controller import (
    AS_A_STEP,
    LASTING_STEPS,
    LOOK_STEPS,
    MAX_LOOK_STEPS,
    SHADOWS_A_LOOK,
)
from pipeline.engine.speculation.proposing import ProposingCost
from tests.engine.speculation.test_controller import (
    MEMORY_BOUND,
    K,
    batch_of,
    controller_of,
    drafts_in,
    everything,
    step,
)


def test_while_on_what_was_seen_of_rare_candidates_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be of other rows by now. What others tell of them is left out here."""
    monkeypatch.setattr(acceptance, "POOLED_WEIGHT", 1e9)
    controller, batch = controller_of(MEMORY_BOUND), batch_of(1)
    rare = int(controller.beliefs.acceptance.class_of(0, np.array([3]))[0])
    prior = controller.beliefs.acceptance.probability()[rare, 0]
    drafts_in(controller, batch, 13, match_length=3)
    seen = controller.beliefs.acceptance.probability()[rare, 0]
    assert drafts_in(controller, batch, 1200) > 1000
    left = controller.beliefs.acceptance.probability()[rare, 0]
    assert prior < left < 0.8 < 0.9 < seen


@pytest.mark.parametrize("lasts", [False, True])
def test_going_on_for_a_few_steps_each_time_slows_down(lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known promises a gain, and drafts do not keep it: soon each time, or after many steps."""
    controller, batch = (
        controller_of(MEMORY_BOUND, (DRAFT_MODEL,), (ProposingCost(0.0, 0.0, [1], [1e-4]),)),
        batch_of(1),
    )
    monkeypatch.setattr(controller, "_expected_gain", lambda *_: 0.2)
    switched: list[tuple[int, bool]] = []
    for number in range(2500):
        since = number - switched[-1][0] if switched else 0
        step(controller, batch, 1.0 if lasts and since <= LASTING_STEPS + 20 else 0.0)
        if not switched or controller.is_on != switched[-1][1]:
            switched.append((number, controller.is_on))
    pauses = [after - before for (before, was_on), (after, _) in pairwise(switched) if not was_on]
    assert len(pauses) > 4
    if lasts:
        assert max(pauses[1:]) <= 2 * LOOK_STEPS
    else:
        assert max(pauses[-3:]) >= MAX_LOOK_STEPS


def test_many_sequences_do_not_draft_before_offers_of_theirs_were_compared() -> None:
    """What is believed at the start would do; but one step of many is a large part of what drafts may lose."""
    assert drafts_in(controller_of(MEMORY_BOUND), batch_of(AS_A_STEP - 1), 20) > 10
    controller, batch = controller_of(MEMORY_BOUND), batch_of(AS_A_STEP)
    assert drafts_in(controller, batch, 60) == 0
    some = AS_A_STEP * SHADOWS_A_LOOK
    controller.foretold(everything(some), *np.full((2, some), K), is_rest=False)
    assert drafts_in(controller, batch, 20) > 10
