"""What steps take that nobody looks at: those in a row, without the ones that come first or are unlike them."""

from pipeline.engine.speculation.unseen import FIRST_STEPS, LEAST_STEPS, UnseenSteps

SLOW_NS, STEP_NS = 900, 400


def begin(unseen: UnseenSteps, now_ns: int, steps: int, step_ns: int, num: int = 3, tokens: int = 3) -> int:
    """So many steps of this length begin; returns when the last one ends."""
    for _ in range(steps):
        unseen.begins(num, tokens, now_ns)
        now_ns += step_ns
    return now_ns


def test_a_row_of_steps_is_timed_without_its_first_ones() -> None:
    unseen = UnseenSteps()
    now_ns = begin(unseen, 0, FIRST_STEPS, SLOW_NS)
    now_ns = begin(unseen, now_ns, LEAST_STEPS, STEP_NS)
    unseen.begins(3, 3, now_ns)
    unseen.ends()
    assert unseen.step_s(3) == STEP_NS / 1e9
    assert unseen.step_s(3) is None, "told once"


def test_too_few_are_not_timed_nor_are_those_of_another_number() -> None:
    unseen = UnseenSteps()
    now_ns = begin(unseen, 0, FIRST_STEPS + LEAST_STEPS, STEP_NS)
    unseen.ends()
    assert unseen.step_s(3) is None
    now_ns = begin(unseen, now_ns, FIRST_STEPS + LEAST_STEPS + 1, STEP_NS)
    unseen.ends()
    assert unseen.step_s(2) is None


def test_what_begins_a_step_unlike_the_others_is_left_out() -> None:
    """A row that ends takes time in the last step; prompts come with the next one."""
    unseen = UnseenSteps()
    now_ns = begin(unseen, 0, FIRST_STEPS + LEAST_STEPS + 1, STEP_NS)
    unseen.begins(3, 90, now_ns + 50 * SLOW_NS)
    unseen.ends()
    assert unseen.step_s(3) == STEP_NS / 1e9
    begin(unseen, now_ns, LEAST_STEPS, STEP_NS, num=2, tokens=90)
    unseen.ends()
    assert unseen.step_s(2) is None
