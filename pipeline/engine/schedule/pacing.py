"""Pacing of admissions, for steps with prompts that cost more host time than device time.

On a GPU, decode-only steps are replayed from graphs, and steps with prompts are launched kernel by kernel. If the
launches take longer than the device computes (small models, few sequences), the device waits for the host. If each
freed slot is filled at once, up to half of all steps have a prompt; if slots are filled every G steps, few do, but
slots are empty for G / 2 steps on average.

Let a sequence generate L tokens, a step take t seconds and a step with prompts E seconds more. The time of a step then
grows by E / G for prompts and by t * G / 2L for empty slots. Their sum is minimal at G = sqrt(2 * L * E / t).
"""

from math import sqrt

MAX_STEPS = 64  # between two admissions
MIN_EXTRA = 0.1  # of a step: less is within its noise, and the gain is small
DECAY = 0.9  # weight of the old mean when a step is observed
ENDED_SHARE = 0.125  # of the running sequences: when this share has ended, their slots are filled


class AdmissionPacing:
    """Pacing of one scheduler whose steps are launched one ahead: an iteration takes the longer of launching its step
    and the device's computation of the previous one."""

    def __init__(self) -> None:
        self._plain_us = self._mixed_us = 0.0  # means of iterations after a plain step; 0: none was observed
        self._was_mixed = True
        self._num_steps = self._num_ended = 0  # steps that could have admitted, and ended sequences, since an admission

    def observe(self, step_us: int, is_mixed: bool) -> None:
        """Record an iteration that launched a step with prompts, or a decode-only one. The iteration after a step with
        prompts is ignored: it is as long as the device takes for the prompts."""
        if not self._was_mixed:
            if is_mixed:
                self._mixed_us = _mean_with(self._mixed_us, step_us)
            else:
                self._plain_us = _mean_with(self._plain_us, step_us)
        self._was_mixed = is_mixed

    def steps(self, expected_output: int) -> int:
        """Return the number of steps from one admission to the next; 1: admit in each."""
        if not self._plain_us or not self._mixed_us:
            return 1
        extra = self._mixed_us / self._plain_us - 1.0
        if extra < MIN_EXTRA:
            return 1
        return max(1, min(MAX_STEPS, round(sqrt(2 * expected_output * extra))))

    def ended(self, num_sequences: int) -> None:
        self._num_ended += num_sequences

    def admitted(self) -> None:
        self._num_steps = self._num_ended = 0

    def is_time(self, num_running: int, expected_output: int) -> bool:
        """Return whether to admit sequences in this step, which has no prompts so far."""
        self._num_steps += 1
        has_room = self._num_ended >= ENDED_SHARE * num_running
        return has_room or self._num_steps >= self.steps(expected_output)


def _mean_with(mean_us: float, step_us: int) -> float:
    return DECAY * mean_us + (1 - DECAY) * step_us if mean_us else float(step_us)
