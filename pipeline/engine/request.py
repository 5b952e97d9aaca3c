"""Requests to the engine."""

from dataclasses import dataclass

from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.tasks import Task


@dataclass(frozen=True)
class QualitySample:
    """Request to compare a row's completion with a reference model (`engine/quality/`). expected: the right answer, if
    the job knows it."""

    expected: str | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to complete. `row_id` belongs to the caller and is returned unchanged on the completion. task: a task
    instead of a completion; nothing is generated then, and `params` are ignored. adapter: a name from
    `EngineConfig.adapters`; None: the base model. is_follow_up: computed before waiting requests, while the prompt that
    it continues is still cached. expects_follow_up: its prompt stays cached for one that arrives soon after its end."""

    row_id: object
    prompt_token_ids: list[int]
    params: SamplingParams
    quality: QualitySample | None = None
    task: Task | None = None
    adapter: str | None = None
    is_follow_up: bool = False
    expects_follow_up: bool = False

    @property
    def max_tokens(self) -> int:
        """Maximum number of generated tokens."""
        return self.params.max_tokens if self.task is None else 0
